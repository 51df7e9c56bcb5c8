#pragma once

/// Marks what kernels may call as well as the host; `CALLED` what they call and do not copy into
/// every place that needs it.
#if defined(__CUDACC__)
#define MOE_HOST_DEVICE __host__ __device__
#define MOE_HOST_DEVICE_CALLED __host__ __device__ __noinline__
#else
#define MOE_HOST_DEVICE
#define MOE_HOST_DEVICE_CALLED
#endif

/// Stands in front of a loop that kernels keep short. The host's compiler has no such pragma.
#if defined(__CUDA_ARCH__)
#define MOE_ROLLED _Pragma("unroll 1")
#else
#define MOE_ROLLED
#endif
