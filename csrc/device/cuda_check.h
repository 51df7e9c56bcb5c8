#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "core/error.h"

namespace moe {

/// The CUDA runtime or driver refused something; becomes RuntimeError in Python.
class CudaError : public std::runtime_error {
 public:
  CudaError(const std::string& what, int code) : std::runtime_error(what), code_(code) {}
  int code() const { return code_; }  ///< a cudaError_t, or a CUresult where the driver refused

 private:
  int code_;
};

namespace device {

/// @param doing  Action that was tried: "launching a kernel of 8 blocks".
[[noreturn]] inline void throw_cuda_error(cudaError_t code, const std::string& doing) {
  throw CudaError(concat(doing, ": ", cudaGetErrorName(code), " (", cudaGetErrorString(code), ")"),
                  code);
}

inline void check_cuda(cudaError_t code, const char* doing) {
  if (code != cudaSuccess) [[unlikely]]
    throw_cuda_error(code, doing);
}

}  // namespace device
}  // namespace moe
