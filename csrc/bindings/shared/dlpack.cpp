#include "bindings/shared/dlpack.h"

#include <algorithm>

namespace moe::bindings {

namespace {

// The binary interface of DLPack (unversioned capsule "dltensor"), as its specification states it.
struct Device {
  int32_t type;
  int32_t id;
};
struct Type {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};
struct Tensor {
  void* data;
  Device device;
  int32_t num_dims;
  Type type;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

constexpr const char* kName = "dltensor";

struct Holder {
  ManagedTensor managed;
  int64_t shape[2];
  std::shared_ptr<void> owner;
};

void drop(ManagedTensor* managed) {
  delete static_cast<Holder*>(managed->context);
}

void drop_unconsumed(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, kName))
    drop(static_cast<ManagedTensor*>(PyCapsule_GetPointer(capsule, kName)));
}

// torch wants an address even where there are no elements.
alignas(64) std::byte no_elements[64];

}  // namespace

pybind11::capsule make_dlpack(std::shared_ptr<void> owner,
                              void* data,
                              std::initializer_list<int64_t> shape,
                              int32_t dlpack_type,
                              DlpackDevice device) {
  auto* holder = new Holder{};
  std::copy(shape.begin(), shape.end(), holder->shape);
  holder->owner = std::move(owner);
  Tensor& tensor = holder->managed.tensor;
  tensor.data = data != nullptr ? data : no_elements;
  tensor.device = Device{device.type, device.idx};
  tensor.num_dims = static_cast<int32_t>(shape.size());
  tensor.type = Type{static_cast<uint8_t>(dlpack_type >> 8), static_cast<uint8_t>(dlpack_type), 1};
  tensor.shape = holder->shape;
  holder->managed.context = holder;
  holder->managed.deleter = drop;
  return pybind11::capsule(&holder->managed, kName, drop_unconsumed);
}

}  // namespace moe::bindings
