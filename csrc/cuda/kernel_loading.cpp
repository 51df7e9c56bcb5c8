#include "cuda/kernel_loading.h"

#include <map>
#include <mutex>
#include <vector>

#include "core/error.h"
#include "cuda/driver.h"
#include "device/kernel_modules.h"

namespace moe::cuda {
namespace {

/// Returns whether the driver has loaded every kernel with its module (CUDA_MODULE_LOADING=EAGER).
bool is_eager() {
  CUmoduleLoadingMode mode{};
  return driver().module_get_loading_mode != nullptr &&
         driver().module_get_loading_mode(&mode) == CUDA_SUCCESS && mode == CU_MODULE_EAGER_LOADING;
}

void load(CUfunction kernel) {
  const CUresult code =
      driver().func_load == nullptr ? CUDA_ERROR_NOT_SUPPORTED : driver().func_load(kernel);
  if (code == CUDA_SUCCESS || is_eager())
    return;
  try {
    check_driver(code, "loading a kernel");
  } catch (const CudaError& error) {
    throw CudaError(
        concat(error.what(),
               ": kernels cannot be loaded before their first launch, which may wait for kernels "
               "of other ranks for ever; set CUDA_MODULE_LOADING=EAGER before the process first "
               "uses CUDA"),
        error.code());
  }
}

/// Lets a kernel that is loaded have all the shared memory that a block can have: here and not
/// where it is launched, which asks the host for nothing then.
/// @param most_bytes  most shared memory of a block, in bytes
void allow_shared_memory(CUfunction kernel, int most_bytes) {
  int static_bytes = 0;
  check_driver(
      driver().func_get_attribute(&static_bytes, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, kernel),
      "asking for the static shared memory of a kernel");
  check_driver(
      driver().func_set_attribute(
          kernel, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, most_bytes - static_bytes),
      "allowing a kernel all shared memory of a block");
}

void load_module(const void* kernel, int most_shared_bytes) {
  cudaFunction_t function = nullptr;
  device::check_cuda(cudaGetFuncBySymbol(&function, kernel), "looking for a kernel");
  CUmodule module = nullptr;
  check_driver(driver().func_get_module(&module, function), "looking for a module of kernels");
  unsigned num_functions = 0;
  check_driver(driver().module_get_function_count(&num_functions, module), "counting kernels");
  std::vector<CUfunction> functions(num_functions);
  check_driver(driver().module_enumerate_functions(functions.data(), num_functions, module),
               "listing kernels");
  for (CUfunction one : functions) {
    load(one);
    allow_shared_memory(one, most_shared_bytes);
  }
}

int load_all(int device_idx) {
  const std::vector<const void*>& kernels = device::kernel_modules();
  MOE_CHECK(!kernels.empty(), "this module was linked without kernels");
  cudaFuncAttributes attributes{};
  const cudaError_t code = cudaFuncGetAttributes(&attributes, kernels.front());
  if (code != cudaSuccess) {
    int major = 0;
    int minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device_idx);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device_idx);
    device::throw_cuda_error(code,
                             concat("loading kernels compiled for ",
                                    MOE_CUDA_ARCHS,
                                    " on a device of compute capability ",
                                    major,
                                    ".",
                                    minor));
  }
  const int most_shared_bytes =
      device_attribute(device_idx, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  for (const void* kernel : kernels)
    load_module(kernel, most_shared_bytes);
  // The version that decided in the source (__CUDA_ARCH__), also where a driver compiled it for a
  // newer device.
  return attributes.ptxVersion;
}

}  // namespace

int load_kernels(int device_idx) {
  static std::mutex mutex;
  static std::map<int, int> architectures;
  const std::lock_guard lock(mutex);
  const auto known = architectures.find(device_idx);
  if (known != architectures.end())
    return known->second;
  const CurrentDevice current(device_idx);
  const int architecture = load_all(device_idx);
  architectures[device_idx] = architecture;
  return architecture;
}

}  // namespace moe::cuda
