#pragma once

namespace moe::cuda {

/// Loads every kernel of this module on a device and lets it have all shared memory of a block.
/// Idempotent.
///
/// Called when a device is made: a kernel that is loaded by its first launch may wait for an idle
/// device, while another rank's kernel on it waits for that launch.
///
/// @return The architecture that the kernels were compiled for, 90 for sm_90a or compute_90.
/// @throws CudaError  nothing that was compiled runs on this device; says what was compiled for. Or
///   the driver refuses to load them now, and has not loaded them (CUDA_MODULE_LOADING=EAGER).
int load_kernels(int device_idx);

}  // namespace moe::cuda
