#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <string>

#include "device/cuda_check.h"

namespace moe::cuda {

/// Functions of the driver, found when they are first needed: nothing links libcuda, so the module
/// loads on a machine without one.
struct Driver {
  decltype(&::cuGetErrorName) get_error_name;
  decltype(&::cuDeviceGetAttribute) device_get_attribute;
  decltype(&::cuDevicePrimaryCtxGetState) device_primary_ctx_get_state;
  // Null where the driver has none: see load_kernels().
  decltype(&::cuModuleGetLoadingMode) module_get_loading_mode;
  decltype(&::cuFuncGetModule) func_get_module;
  decltype(&::cuFuncLoad) func_load;
  decltype(&::cuFuncGetAttribute) func_get_attribute;
  decltype(&::cuFuncSetAttribute) func_set_attribute;
  decltype(&::cuModuleGetFunctionCount) module_get_function_count;
  decltype(&::cuModuleEnumerateFunctions) module_enumerate_functions;
  decltype(&::cuMemGetAllocationGranularity) mem_get_allocation_granularity;
  decltype(&::cuMemCreate) mem_create;
  decltype(&::cuMemRelease) mem_release;
  decltype(&::cuMemAddressReserve) mem_address_reserve;
  decltype(&::cuMemAddressFree) mem_address_free;
  decltype(&::cuMemMap) mem_map;
  decltype(&::cuMemUnmap) mem_unmap;
  decltype(&::cuMemSetAccess) mem_set_access;
  decltype(&::cuMemExportToShareableHandle) mem_export;
  decltype(&::cuMemImportFromShareableHandle) mem_import;
};

/// @throws CudaError  there is no driver, or it is older than the functions above.
const Driver& driver();

/// @param doing  Action that was tried.
/// @throws CudaError
void check_driver(CUresult code, const std::string& doing);

/// Value of an attribute of a device; 0 where the driver does not know it.
int device_attribute(int device_idx, CUdevice_attribute attribute);

/// Returns whether this process uses a device already. False where the driver cannot say.
bool has_context(int device_idx) noexcept;

/// Lets the calling thread make calls that a capture on another thread would forbid: they touch no
/// stream that is captured.
class RelaxedCapture {
 public:
  RelaxedCapture() {
    if (depth_++ == 0)
      cudaThreadExchangeStreamCaptureMode(&mode_);
  }
  ~RelaxedCapture() {
    if (--depth_ == 0)
      cudaThreadExchangeStreamCaptureMode(&mode_);
  }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  static inline thread_local int depth_ = 0;  ///< number of those that live on this thread
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

/// Makes a device current on the calling thread while it lives, and its context with it, which the
/// driver's own functions look for: a thread that has called nothing yet has none, whatever the
/// runtime says of its current device. A device that was current by default only, and that this
/// process does not use, is not made current again: that would make a context on it, which takes
/// hundreds of MiB there.
///
/// Nothing is asked where another of the thread makes the same device current, nor, from a thread's
/// second on, where the process sees one device only.
class CurrentDevice {
 public:
  /// @throws CudaError
  explicit CurrentDevice(int device_idx);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int enclosing_;      ///< device that the one around this has made current; -1 for none
  int previous_ = -1;  ///< to be made current again; -1 for none
};

}  // namespace moe::cuda
