#include "cuda/driver.h"

#include "core/error.h"

namespace moe::cuda {
namespace {

/// @param version  Version of CUDA with which the function came (cudaTypedefs.h). A driver is asked
///   for no later one: it refuses what is newer than itself, although it has the function.
template <typename Function>
void find(const char* name, int version, Function* function) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t code = cudaGetDriverEntryPointByVersion(
      name, &found, static_cast<unsigned>(version), cudaEnableDefault, &result);
  if (code != cudaSuccess)
    device::throw_cuda_error(code, concat("looking for ", name, " in the CUDA driver"));
  if (result != cudaDriverEntryPointSuccess || found == nullptr)
    throw CudaError(concat("the CUDA driver has no ",
                           name,
                           " of version ",
                           version / 1000,
                           ".",
                           version % 1000 / 10,
                           ": it is older than this module needs"),
                    cudaErrorInsufficientDriver);
  *function = reinterpret_cast<Function>(found);
}

/// Leaves null what the driver does not have.
template <typename Function>
void find_if_there(const char* name, int version, Function* function) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  int driver_version = 0;
  if (cudaDriverGetVersion(&driver_version) != cudaSuccess || driver_version < version)
    return;
  if (cudaGetDriverEntryPointByVersion(
          name, &found, static_cast<unsigned>(version), cudaEnableDefault, &result) == cudaSuccess)
    *function = reinterpret_cast<Function>(found);
  else
    cudaGetLastError();
}

Driver find_all() {
  Driver found{};
  find("cuGetErrorName", 6000, &found.get_error_name);
  find("cuDeviceGetAttribute", 2000, &found.device_get_attribute);
  find("cuDevicePrimaryCtxGetState", 7000, &found.device_primary_ctx_get_state);
  find_if_there("cuModuleGetLoadingMode", 11070, &found.module_get_loading_mode);
  find_if_there("cuFuncLoad", 12040, &found.func_load);
  find("cuFuncGetModule", 11000, &found.func_get_module);
  find("cuFuncGetAttribute", 2020, &found.func_get_attribute);
  find("cuFuncSetAttribute", 9000, &found.func_set_attribute);
  find("cuModuleGetFunctionCount", 12040, &found.module_get_function_count);
  find("cuModuleEnumerateFunctions", 12040, &found.module_enumerate_functions);
  find("cuMemGetAllocationGranularity", 10020, &found.mem_get_allocation_granularity);
  find("cuMemCreate", 10020, &found.mem_create);
  find("cuMemRelease", 10020, &found.mem_release);
  find("cuMemAddressReserve", 10020, &found.mem_address_reserve);
  find("cuMemAddressFree", 10020, &found.mem_address_free);
  find("cuMemMap", 10020, &found.mem_map);
  find("cuMemUnmap", 10020, &found.mem_unmap);
  find("cuMemSetAccess", 10020, &found.mem_set_access);
  find("cuMemExportToShareableHandle", 10020, &found.mem_export);
  find("cuMemImportFromShareableHandle", 10020, &found.mem_import);
  return found;
}

}  // namespace

const Driver& driver() {
  static const Driver found = find_all();
  return found;
}

void check_driver(CUresult code, const std::string& doing) {
  if (code == CUDA_SUCCESS) [[likely]]
    return;
  const char* name = nullptr;
  driver().get_error_name(code, &name);
  throw CudaError(concat(doing, ": ", name == nullptr ? "unknown error" : name), code);
}

int device_attribute(int device_idx, CUdevice_attribute attribute) {
  int value = 0;
  // A CUdevice is the number that the runtime uses.
  if (driver().device_get_attribute(&value, attribute, device_idx) != CUDA_SUCCESS)
    return 0;
  return value;
}

bool has_context(int device_idx) noexcept {
  unsigned flags = 0;
  int is_active = 0;
  try {
    return driver().device_primary_ctx_get_state(device_idx, &flags, &is_active) == CUDA_SUCCESS &&
           is_active != 0;
  } catch (const CudaError&) {  // without a driver there are none
    return false;
  }
}

namespace {

thread_local int t_current = -1;      ///< device of the innermost CurrentDevice; -1 for none
thread_local uint64_t t_was_current;  ///< devices that one has made current on this thread, by bit

bool sees_one_device() {
  static const bool sees_one = [] {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess && count == 1;
  }();
  return sees_one;
}

}  // namespace

CurrentDevice::CurrentDevice(int device_idx) : enclosing_(t_current) {
  const uint64_t bit = device_idx < 64 ? uint64_t{1} << device_idx : 0;
  const bool was_current = (t_was_current & bit) != 0;
  if (t_current != device_idx && !(was_current && sees_one_device())) {
    int previous = 0;
    device::check_cuda(cudaGetDevice(&previous), "asking for the current device");
    if (previous != device_idx || !was_current)
      device::check_cuda(cudaSetDevice(device_idx), "making a device current");
    if (previous != device_idx)
      previous_ = previous;
    t_was_current |= bit;
  }
  t_current = device_idx;
}

CurrentDevice::~CurrentDevice() {
  t_current = enclosing_;
  if (previous_ >= 0 && has_context(previous_))
    cudaSetDevice(previous_);
}

}  // namespace moe::cuda
