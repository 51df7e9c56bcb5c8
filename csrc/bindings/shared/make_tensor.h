#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <initializer_list>
#include <memory>

namespace moe::bindings {

// DLPack's types of counts and ids, `code << 8 | bits`.
inline constexpr int32_t kInt32 = 0 << 8 | 32;
inline constexpr int32_t kInt64 = 0 << 8 | 64;

/// DLPack's type and number of the device that memory belongs to.
struct DlpackDevice {
  int32_t type = 1;  // kDLCPU
  int32_t idx = 0;
};

/// A torch tensor over memory that @p owner keeps alive, without a copy.
///
/// What torch calls at its end only drops @p owner: it needs no GIL and may run on any thread.
/// @param shape        At most 2 dimensions; contiguous.
/// @param dlpack_type  `code << 8 | bits`.
pybind11::object make_tensor(std::shared_ptr<void> owner,
                             void* data,
                             std::initializer_list<int64_t> shape,
                             int32_t dlpack_type,
                             DlpackDevice device = {});

}  // namespace moe::bindings
