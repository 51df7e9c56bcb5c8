#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <utility>

namespace moe::bindings {

// DLPack's types of counts and ids, `code << 8 | bits`.
inline constexpr int32_t kInt32 = 0 << 8 | 32;
inline constexpr int32_t kInt64 = 0 << 8 | 64;

/// DLPack's type and number of the device that memory belongs to.
struct DlpackDevice {
  int32_t type = 1;  // kDLCPU
  int32_t idx = 0;
};

/// Dtype, shape and strides of a tensor of at most 3 dimensions.
struct TensorForm {
  static constexpr int kMostDims = 3;

  int32_t dlpack_type = 0;  ///< `code << 8 | bits`
  int num_dims = 0;
  int64_t shape[kMostDims] = {};
  int64_t strides[kMostDims] = {};  ///< in elements

  /// Contiguous elements, the last dimension fastest.
  TensorForm(std::initializer_list<int64_t> sizes, int32_t type);
  TensorForm(std::initializer_list<int64_t> sizes,
             std::initializer_list<int64_t> steps,
             int32_t type);
};

/// Makes a torch tensor over memory that @p owner keeps alive, without a copy.
///
/// The end of the tensor only drops @p owner, which needs no GIL and may be on any thread.
pybind11::object make_tensor(std::shared_ptr<void> owner,
                             void* data,
                             const TensorForm& form,
                             DlpackDevice device = {});
inline pybind11::object make_tensor(std::shared_ptr<void> owner,
                                    void* data,
                                    std::initializer_list<int64_t> shape,
                                    int32_t dlpack_type,
                                    DlpackDevice device = {}) {
  return make_tensor(std::move(owner), data, TensorForm(shape, dlpack_type), device);
}

}  // namespace moe::bindings
