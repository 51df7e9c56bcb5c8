#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace moe::bindings {

// The binary interface of DLPack, major version 1, as its specification states it. Only what is
// called has a signature.

/// DLPack's `DLTensor`.
struct DlpackTensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t num_dims;
  uint8_t type_code;
  uint8_t type_bits;
  uint16_t type_lanes;
  int64_t* shape;
  int64_t* strides;  ///< in elements
  uint64_t byte_offset;

  /// `code << 8 | bits`, as tensors of one element a place have it.
  int32_t type() const { return type_code << 8 | type_bits; }

  int64_t element_bytes() const { return type_bits * type_lanes / 8; }
};
static_assert(sizeof(DlpackTensor) == 48);

/// DLPack's `DLManagedTensorVersioned`.
struct DlpackManagedTensor {
  uint32_t major;
  uint32_t minor;
  void* context;
  void (*deleter)(DlpackManagedTensor*);
  uint64_t flags;
  DlpackTensor tensor;
};

/// DLPack's table of C functions, which torch has from 2.10 on: they describe and make a tensor in
/// some tens of nanoseconds, where Python takes most of a microsecond. Called with the GIL; each
/// returns 0, or another number with a Python error set.
struct ExchangeApi {
  uint32_t major;
  uint32_t minor;
  const ExchangeApi* older;
  void (*allocate)();
  void (*export_managed)();
  /// Takes over the managed tensor.
  int (*make)(DlpackManagedTensor* managed, void** object);
  /// Describes an object; @p out points to memory of the object, which must not change meanwhile.
  int (*describe)(void* object, DlpackTensor* out);
  void (*current_work_stream)();
};

/// Null where the torch of this process has none of this version.
const ExchangeApi* exchange_api();

/// Returns whether @p object is a torch.Tensor or a Parameter and of no other subclass, which may
/// be something else than memory.
bool is_plain_tensor(pybind11::handle object);

/// Describes a tensor. @return false where @p object is no plain tensor and where DLPack cannot
/// say what it is.
bool describe_tensor(pybind11::handle object, DlpackTensor* out);

}  // namespace moe::bindings
