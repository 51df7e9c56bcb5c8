#pragma once

#include <vector>

namespace moe::device {

/// One kernel of every file of kernels that is linked in; its module holds all kernels of the file.
inline std::vector<const void*>& kernel_modules() {
  static std::vector<const void*> modules;
  return modules;
}

/// Added to kernel_modules() when the library is loaded.
struct KernelModule {
  explicit KernelModule(const void* kernel) { kernel_modules().push_back(kernel); }
};

}  // namespace moe::device
