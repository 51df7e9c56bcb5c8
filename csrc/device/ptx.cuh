#pragma once

// The vocabulary of device/primitives.h on NVIDIA GPUs. All inline assembly of the project is here.
// Instructions and their qualifiers are named as in the PTX ISA 8.0.
//
// Assembly is `volatile` and clobbers memory, so the compiler keeps the order in which one thread's
// accesses are written down: a kernel that wants several loads in flight writes them before the
// stores. Addresses are generic (shared or global) where nothing else is said.

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "device/cuda_check.h"
#include "device/kernel_modules.cuh"
#include "device/launch.h"

#define MOE_KERNEL __global__
#define MOE_KERNEL_OF(most_threads) __global__ __launch_bounds__(most_threads, 1)
#define MOE_DEVICE __device__ __forceinline__
#define MOE_DEVICE_CALLED inline __device__ __noinline__

namespace moe::device {

/// Reach of an order of accesses.
enum class Scope { kBlock, kDevice, kSystem };

struct alignas(16) Bytes16 {
  uint32_t words[4];
};

/// Barrier in shared memory.
using MBarrier = uint64_t;

/// cp.async.bulk begins with compute capability 9.0. What the host passes decides there.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kHasBulkCopies = false;
#else
constexpr bool kHasBulkCopies = true;
#endif

namespace ptx {

// Text of instructions and qualifiers, for the "C" constraint.
template <Scope kScope>
struct ScopeText;
template <>
struct ScopeText<Scope::kBlock> {
  static constexpr char text[] = "cta";
};
template <>
struct ScopeText<Scope::kDevice> {
  static constexpr char text[] = "gpu";
};
template <>
struct ScopeText<Scope::kSystem> {
  static constexpr char text[] = "sys";
};
struct Relaxed {
  static constexpr char text[] = "relaxed";
};
struct Acquire {
  static constexpr char text[] = "acquire";
};
struct Release {
  static constexpr char text[] = "release";
};
struct AcquireRelease {
  static constexpr char text[] = "acq_rel";
};
struct LoadWeak {
  static constexpr char text[] = "ld";
};
struct LoadReadOnly {
  static constexpr char text[] = "ld.global.nc";
};
struct LoadShared {
  static constexpr char text[] = "ld.shared";
};
struct StoreWeak {
  static constexpr char text[] = "st";
};
struct StoreEvictFirst {
  static constexpr char text[] = "st.global.cs";
};

/// The register that holds a T on its way between memory and the program.
template <size_t kBytes>
struct RawOf;
template <>
struct RawOf<1> {
  using Type = uint32_t;
};
template <>
struct RawOf<2> {
  using Type = uint16_t;
};
template <>
struct RawOf<4> {
  using Type = uint32_t;
};
template <>
struct RawOf<8> {
  using Type = uint64_t;
};
template <>
struct RawOf<16> {
  using Type = Bytes16;
};
template <typename T>
using Raw = typename RawOf<sizeof(T)>::Type;

template <typename T>
MOE_DEVICE T from_raw(Raw<T> raw) {
  static_assert(std::is_trivially_copyable_v<T>);
  T value;
  __builtin_memcpy(&value, &raw, sizeof(T));
  return value;
}

template <typename T>
MOE_DEVICE Raw<T> to_raw(T value) {
  static_assert(std::is_trivially_copyable_v<T>);
  Raw<T> raw{};
  __builtin_memcpy(&raw, &value, sizeof(T));
  return raw;
}

template <typename Operation, typename T>
MOE_DEVICE T plain_load(uint64_t from) {
  Raw<T> raw;
  if constexpr (sizeof(T) == 1)
    asm volatile("%1.u8 %0, [%2];" : "=r"(raw) : "C"(Operation::text), "l"(from) : "memory");
  else if constexpr (sizeof(T) == 2)
    asm volatile("%1.u16 %0, [%2];" : "=h"(raw) : "C"(Operation::text), "l"(from) : "memory");
  else if constexpr (sizeof(T) == 4)
    asm volatile("%1.u32 %0, [%2];" : "=r"(raw) : "C"(Operation::text), "l"(from) : "memory");
  else if constexpr (sizeof(T) == 8)
    asm volatile("%1.u64 %0, [%2];" : "=l"(raw) : "C"(Operation::text), "l"(from) : "memory");
  else
    asm volatile("%4.v4.u32 {%0, %1, %2, %3}, [%5];"
                 : "=r"(raw.words[0]), "=r"(raw.words[1]), "=r"(raw.words[2]), "=r"(raw.words[3])
                 : "C"(Operation::text), "l"(from)
                 : "memory");
  return from_raw<T>(raw);
}

template <typename Operation, typename T>
MOE_DEVICE void plain_store(uint64_t to, T value) {
  const Raw<T> raw = to_raw<T>(value);
  if constexpr (sizeof(T) == 1)
    asm volatile("%0.u8 [%1], %2;" ::"C"(Operation::text), "l"(to), "r"(raw) : "memory");
  else if constexpr (sizeof(T) == 2)
    asm volatile("%0.u16 [%1], %2;" ::"C"(Operation::text), "l"(to), "h"(raw) : "memory");
  else if constexpr (sizeof(T) == 4)
    asm volatile("%0.u32 [%1], %2;" ::"C"(Operation::text), "l"(to), "r"(raw) : "memory");
  else if constexpr (sizeof(T) == 8)
    asm volatile("%0.u64 [%1], %2;" ::"C"(Operation::text), "l"(to), "l"(raw) : "memory");
  else
    asm volatile("%0.v4.u32 [%1], {%2, %3, %4, %5};" ::"C"(Operation::text),
                 "l"(to),
                 "r"(raw.words[0]),
                 "r"(raw.words[1]),
                 "r"(raw.words[2]),
                 "r"(raw.words[3])
                 : "memory");
}

template <typename Order, Scope kScope, typename T>
MOE_DEVICE T ordered_load(const T* from) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  Raw<T> raw;
  if constexpr (sizeof(T) == 4)
    asm volatile("ld.%1.%2.u32 %0, [%3];"
                 : "=r"(raw)
                 : "C"(Order::text), "C"(ScopeText<kScope>::text), "l"(from)
                 : "memory");
  else
    asm volatile("ld.%1.%2.u64 %0, [%3];"
                 : "=l"(raw)
                 : "C"(Order::text), "C"(ScopeText<kScope>::text), "l"(from)
                 : "memory");
  return from_raw<T>(raw);
}

template <typename Order, Scope kScope, typename T>
MOE_DEVICE void ordered_store(T* to, T value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  const Raw<T> raw = to_raw<T>(value);
  if constexpr (sizeof(T) == 4)
    asm volatile(
        "st.%0.%1.u32 [%2], %3;" ::"C"(Order::text), "C"(ScopeText<kScope>::text), "l"(to), "r"(raw)
        : "memory");
  else
    asm volatile(
        "st.%0.%1.u64 [%2], %3;" ::"C"(Order::text), "C"(ScopeText<kScope>::text), "l"(to), "l"(raw)
        : "memory");
}

template <typename Order, Scope kScope, typename T>
MOE_DEVICE T ordered_add(T* to, T value) {
  static_assert(std::is_integral_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  const Raw<T> raw = to_raw<T>(value);
  Raw<T> before;
  if constexpr (sizeof(T) == 4)
    asm volatile("atom.%1.%2.add.u32 %0, [%3], %4;"
                 : "=r"(before)
                 : "C"(Order::text), "C"(ScopeText<kScope>::text), "l"(to), "r"(raw)
                 : "memory");
  else
    asm volatile("atom.%1.%2.add.u64 %0, [%3], %4;"
                 : "=l"(before)
                 : "C"(Order::text), "C"(ScopeText<kScope>::text), "l"(to), "l"(raw)
                 : "memory");
  return from_raw<T>(before);
}

MOE_DEVICE uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

MOE_DEVICE uint64_t global_address(const void* pointer) {
  return __cvta_generic_to_global(pointer);
}

}  // namespace ptx

// --- Thread -------------------------------------------------------------------------------------

MOE_DEVICE int thread_idx() {
  return static_cast<int>(threadIdx.x);
}
MOE_DEVICE int num_threads() {
  return static_cast<int>(blockDim.x);
}
MOE_DEVICE int block_idx() {
  return static_cast<int>(blockIdx.x);
}
MOE_DEVICE int num_blocks() {
  return static_cast<int>(gridDim.x);
}
MOE_DEVICE int lane_idx() {
  return static_cast<int>(threadIdx.x % 32);
}
MOE_DEVICE int warp_idx() {
  return static_cast<int>(threadIdx.x / 32);
}
MOE_DEVICE int num_warps() {
  return static_cast<int>(blockDim.x / 32);
}

// --- Plain access -------------------------------------------------------------------------------

template <typename T>
MOE_DEVICE T load(const T* from) {
  return ptx::plain_load<ptx::LoadWeak, T>(reinterpret_cast<uint64_t>(from));
}

template <typename T>
MOE_DEVICE void store(T* to, std::type_identity_t<T> value) {
  ptx::plain_store<ptx::StoreWeak, T>(reinterpret_cast<uint64_t>(to), value);
}

/// Global addresses only.
template <typename T>
MOE_DEVICE T load_constant(const T* from) {
  return ptx::plain_load<ptx::LoadReadOnly, T>(ptx::global_address(from));
}

/// Global addresses only.
template <typename T>
MOE_DEVICE void store_streaming(T* to, std::type_identity_t<T> value) {
  ptx::plain_store<ptx::StoreEvictFirst, T>(ptx::global_address(to), value);
}

// --- Words that threads agree by ----------------------------------------------------------------

template <Scope kScope, typename T>
MOE_DEVICE T load_relaxed(const T* from) {
  return ptx::ordered_load<ptx::Relaxed, kScope>(from);
}

template <Scope kScope, typename T>
MOE_DEVICE T load_acquire(const T* from) {
  return ptx::ordered_load<ptx::Acquire, kScope>(from);
}

template <Scope kScope, typename T>
MOE_DEVICE void store_relaxed(T* to, std::type_identity_t<T> value) {
  ptx::ordered_store<ptx::Relaxed, kScope, T>(to, value);
}

template <Scope kScope, typename T>
MOE_DEVICE void store_release(T* to, std::type_identity_t<T> value) {
  ptx::ordered_store<ptx::Release, kScope, T>(to, value);
}

template <Scope kScope, typename T>
MOE_DEVICE T add_acq_rel(T* to, std::type_identity_t<T> value) {
  return ptx::ordered_add<ptx::AcquireRelease, kScope, T>(to, value);
}

template <Scope kScope, typename T>
MOE_DEVICE T add_relaxed(T* to, std::type_identity_t<T> value) {
  return ptx::ordered_add<ptx::Relaxed, kScope, T>(to, value);
}

template <Scope kScope>
MOE_DEVICE void fence() {
  asm volatile("fence.acq_rel.%0;" ::"C"(ptx::ScopeText<kScope>::text) : "memory");
}

// --- Block and warp -----------------------------------------------------------------------------

constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

MOE_DEVICE void sync_block() {
  __syncthreads();
}

MOE_DEVICE void sync_warp() {
  __syncwarp();
}

template <typename T>
MOE_DEVICE T shuffle(T value, int src_lane) {
  return ptx::from_raw<T>(__shfl_sync(kAllLanes, ptx::to_raw<T>(value), src_lane));
}

template <typename T>
MOE_DEVICE T shuffle_xor(T value, int mask) {
  return ptx::from_raw<T>(__shfl_xor_sync(kAllLanes, ptx::to_raw<T>(value), mask));
}

template <typename T>
MOE_DEVICE T shuffle_up(T value, int delta) {
  return ptx::from_raw<T>(
      __shfl_up_sync(kAllLanes, ptx::to_raw<T>(value), static_cast<unsigned>(delta)));
}

MOE_DEVICE uint32_t ballot(bool predicate) {
  return __ballot_sync(kAllLanes, predicate);
}
MOE_DEVICE bool any(bool predicate) {
  return __any_sync(kAllLanes, predicate) != 0;
}
MOE_DEVICE bool all(bool predicate) {
  return __all_sync(kAllLanes, predicate) != 0;
}
MOE_DEVICE uint32_t match_any(uint32_t value) {
  return __match_any_sync(kAllLanes, value);
}
MOE_DEVICE int population(uint32_t bits) {
  return __popc(bits);
}
MOE_DEVICE int first_bit(uint32_t bits) {
  return __ffs(static_cast<int>(bits)) - 1;
}

// --- Shared memory ------------------------------------------------------------------------------

extern __shared__ __align__(128) std::byte dynamic_shared_memory[];

MOE_DEVICE std::byte* shared_memory() {
  return dynamic_shared_memory;
}

template <typename T>
MOE_DEVICE T load_shared(const T* from) {
  return ptx::plain_load<ptx::LoadShared, T>(__cvta_generic_to_shared(from));
}

template <typename T>
MOE_DEVICE T add_shared(T* to, std::type_identity_t<T> value) {
  return ptx::ordered_add<ptx::Relaxed, Scope::kBlock, T>(to, value);
}

// --- Bulk copies --------------------------------------------------------------------------------
// Where the architecture has none, the bodies are empty and kernels must not come here.

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define MOE_BULK_ASM(...)
#else
#define MOE_BULK_ASM(...) asm volatile(__VA_ARGS__)
#endif

MOE_DEVICE void fence_proxy_async() {
  MOE_BULK_ASM("fence.proxy.async;" :: : "memory");
}

MOE_DEVICE void fence_proxy_async_shared() {
  MOE_BULK_ASM("fence.proxy.async.shared::cta;" :: : "memory");
}

MOE_DEVICE void init_mbarrier([[maybe_unused]] MBarrier* barrier,
                              [[maybe_unused]] int num_arrivals) {
  MOE_BULK_ASM("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(ptx::shared_address(barrier)),
               "r"(num_arrivals) : "memory");
}

/// Initialized barriers become visible to the threads of the block (with its next barrier) and to
/// bulk copies.
MOE_DEVICE void fence_mbarrier_init() {
  MOE_BULK_ASM("fence.mbarrier_init.release.cluster;" :: : "memory");
  fence_proxy_async_shared();
}

MOE_DEVICE void arrive_expect([[maybe_unused]] MBarrier* barrier, [[maybe_unused]] uint32_t bytes) {
  MOE_BULK_ASM(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(ptx::shared_address(barrier)),
      "r"(bytes) : "memory");
}

MOE_DEVICE bool try_wait([[maybe_unused]] MBarrier* barrier, [[maybe_unused]] uint32_t parity) {
  uint32_t is_done = 0;
  MOE_BULK_ASM(
      "{\n"
      ".reg .pred is_done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 is_done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, is_done;\n"
      "}" : "=r"(is_done) : "r"(ptx::shared_address(barrier)),
      "r"(parity) : "memory");
  return is_done != 0;
}

MOE_DEVICE void bulk_load([[maybe_unused]] std::byte* shared,
                          [[maybe_unused]] const std::byte* global,
                          [[maybe_unused]] uint32_t bytes,
                          [[maybe_unused]] MBarrier* barrier) {
  // A block that is no cluster is a cluster of one: shared::cluster addresses are its own.
  MOE_BULK_ASM(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(ptx::shared_address(shared)),
      "l"(ptx::global_address(global)),
      "r"(bytes),
      "r"(ptx::shared_address(barrier)) : "memory");
}

MOE_DEVICE void bulk_store([[maybe_unused]] std::byte* global,
                           [[maybe_unused]] const std::byte* shared,
                           [[maybe_unused]] uint32_t bytes) {
  MOE_BULK_ASM("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                   ptx::global_address(global)),
               "r"(ptx::shared_address(shared)),
               "r"(bytes) : "memory");
}

MOE_DEVICE void commit_bulk_stores() {
  MOE_BULK_ASM("cp.async.bulk.commit_group;" :: : "memory");
}

template <int kNumPending>
MOE_DEVICE void await_bulk_stores() {
  MOE_BULK_ASM("cp.async.bulk.wait_group %0;" ::"n"(kNumPending) : "memory");
}

template <int kNumPending>
MOE_DEVICE void await_bulk_reads() {
  MOE_BULK_ASM("cp.async.bulk.wait_group.read %0;" ::"n"(kNumPending) : "memory");
}

#undef MOE_BULK_ASM

// --- Arithmetic ---------------------------------------------------------------------------------
// The intrinsics are never fused. The build keeps subnormals (no -ftz, no --use_fast_math).

MOE_DEVICE float multiply(float left, float right) {
  return __fmul_rn(left, right);
}
MOE_DEVICE double multiply(double left, double right) {
  return __dmul_rn(left, right);
}
MOE_DEVICE float add(float left, float right) {
  return __fadd_rn(left, right);
}
MOE_DEVICE double add(double left, double right) {
  return __dadd_rn(left, right);
}
MOE_DEVICE float divide(float left, float right) {
  return __fdiv_rn(left, right);
}
MOE_DEVICE double divide(double left, double right) {
  return __ddiv_rn(left, right);
}

MOE_DEVICE uint32_t float_bits(float value) {
  return __float_as_uint(value);
}
MOE_DEVICE float bits_float(uint32_t bits) {
  return __uint_as_float(bits);
}

MOE_DEVICE float bfloat16_to_float(uint16_t bits) {
  return bits_float(static_cast<uint32_t>(bits) << 16);
}

/// Rounds in integers, as the CPU backend does (cpu/row_numbers_impl.h).
MOE_DEVICE uint16_t float_to_bfloat16(float value) {
  const uint32_t bits = float_bits(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u)
    return 0x7FC0;
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

MOE_DEVICE float half_to_float(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

MOE_DEVICE uint16_t float_to_half(float value) {
  if ((float_bits(value) & 0x7FFFFFFFu) > 0x7F800000u)
    return 0x7E00;
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// --- Time ---------------------------------------------------------------------------------------

MOE_DEVICE uint64_t now_ns() {
  uint64_t nanoseconds;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds)::"memory");
  return nanoseconds;
}

MOE_DEVICE void pause(uint32_t nanoseconds) {
  __nanosleep(nanoseconds);
}

// --- Launch -------------------------------------------------------------------------------------

MOE_DEVICE void await_prerequisites() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

MOE_DEVICE void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Puts a kernel into its stream. It was loaded before and may have all shared memory of a block
/// (device/kernel_modules.cuh).
/// @throws CudaError
template <typename Params>
void launch(void (*kernel)(Params), const Launch& shape, const Params& params) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.num_blocks));
  config.blockDim = dim3(static_cast<unsigned>(shape.num_threads));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = static_cast<cudaStream_t>(shape.stream);
  cudaLaunchAttribute dependent{};
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &dependent;
  config.numAttrs = shape.is_dependent ? 1 : 0;
  void* arguments[] = {const_cast<Params*>(&params)};
  const cudaError_t code =
      cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments);
  if (code != cudaSuccess) [[unlikely]]
    throw_cuda_error(code,
                     concat("launching ",
                            shape.num_blocks,
                            " blocks of ",
                            shape.num_threads,
                            " threads with ",
                            shape.shared_bytes,
                            " bytes of shared memory"));
}

}  // namespace moe::device
