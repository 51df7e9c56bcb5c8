#include "cuda/kernel_loading.h"

#include <map>
#include <mutex>
#include <vector>

#include "core/error.h"
#include "cuda/driver.h"
#include "device/kernel_modules.h"

namespace moe::cuda {
namespace {

/// Whether the driver has loaded every kernel with its module (CUDA_MODULE_LOADING=EAGER).
bool is_eager() {
  CUmoduleLoadingMode mode{};
  return driver().module_get_loading_mode != nullptr &&
         driver().module_get_loading_mode(&mode) == CUDA_SUCCESS && mode == CU_MODULE_EAGER_LOADING;
}

void load_module(const void* kernel) {
  for (const bool is_there : {driver().func_get_module != nullptr,
                              driver().func_load != nullptr,
                              driver().module_get_function_count != nullptr,
                              driver().module_enumerate_functions != nullptr})
    if (!is_there)
      throw CudaError("the CUDA driver has no functions for it", cudaErrorNotSupported);
  cudaFunction_t function = nullptr;
  device::check_cuda(cudaGetFuncBySymbol(&function, kernel), "looking for a kernel");
  CUmodule module = nullptr;
  check_driver(driver().func_get_module(&module, function), "looking for a module of kernels");
  unsigned num_functions = 0;
  check_driver(driver().module_get_function_count(&num_functions, module), "counting kernels");
  std::vector<CUfunction> functions(num_functions);
  check_driver(driver().module_enumerate_functions(functions.data(), num_functions, module),
               "listing kernels");
  for (CUfunction one : functions)
    check_driver(driver().func_load(one), "loading a kernel");
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
  try {
    for (const void* kernel : kernels)
      load_module(kernel);
  } catch (const CudaError& error) {
    cudaGetLastError();
    if (!is_eager())
      throw CudaError(
          concat("kernels cannot be loaded before their first launch, which may wait for "
                 "kernels of other ranks for ever (",
                 error.what(),
                 "): set CUDA_MODULE_LOADING=EAGER before the process first uses CUDA"),
          error.code());
  }
  // What decided in the source (__CUDA_ARCH__), also where a driver compiled it for a newer device.
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
