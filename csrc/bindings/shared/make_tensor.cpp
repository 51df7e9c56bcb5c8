#include "bindings/shared/make_tensor.h"

#include <algorithm>
#include <utility>

#include "bindings/shared/exchange_api.h"

namespace moe::bindings {

namespace py = pybind11;

namespace {

/// DLPack's `DLManagedTensor`, in the capsule "dltensor", which every torch takes.
struct UnversionedTensor {
  DlpackTensor tensor;
  void* context;
  void (*deleter)(UnversionedTensor*);
};

constexpr const char* kCapsuleName = "dltensor";

/// Part of a tensor made here that torch holds.
template <typename Managed>
struct Holder {
  Managed managed{};
  TensorForm form;
  std::shared_ptr<void> owner;

  static void drop(Managed* managed) { delete static_cast<Holder*>(managed->context); }
};

// torch wants an address even where there are no elements.
alignas(64) std::byte no_elements[64];

template <typename Managed>
Managed* hold(std::shared_ptr<void> owner,
              void* data,
              const TensorForm& form,
              DlpackDevice device) {
  auto* const holder = new Holder<Managed>{{}, form, std::move(owner)};
  DlpackTensor& tensor = holder->managed.tensor;
  tensor.data = data != nullptr ? data : no_elements;
  tensor.device_type = device.type;
  tensor.device_id = device.idx;
  tensor.num_dims = form.num_dims;
  tensor.type_code = static_cast<uint8_t>(form.dlpack_type >> 8);
  tensor.type_bits = static_cast<uint8_t>(form.dlpack_type);
  tensor.type_lanes = 1;
  tensor.shape = holder->form.shape;
  tensor.strides = holder->form.strides;
  holder->managed.context = holder;
  holder->managed.deleter = Holder<Managed>::drop;
  return &holder->managed;
}

void drop_unconsumed(PyObject* capsule) {
  if (!PyCapsule_IsValid(capsule, kCapsuleName))
    return;
  auto* const managed =
      static_cast<UnversionedTensor*>(PyCapsule_GetPointer(capsule, kCapsuleName));
  managed->deleter(managed);
}

py::object take(UnversionedTensor* managed) {
  const py::object from_dlpack = py::module_::import("torch.utils.dlpack").attr("from_dlpack");
  return from_dlpack(py::capsule(managed, kCapsuleName, drop_unconsumed));
}

py::object take(const ExchangeApi& api, DlpackManagedTensor* managed) {
  managed->major = api.major;
  managed->minor = api.minor;
  void* object = nullptr;
  if (api.make(managed, &object) != 0)
    throw py::error_already_set();
  return py::reinterpret_steal<py::object>(static_cast<PyObject*>(object));
}

}  // namespace

TensorForm::TensorForm(std::initializer_list<int64_t> sizes, int32_t type)
    : dlpack_type(type), num_dims(static_cast<int>(sizes.size())) {
  std::ranges::copy(sizes, shape);
  int64_t step = 1;
  for (int dim = num_dims; dim-- > 0; step *= shape[dim])
    strides[dim] = step;
}

TensorForm::TensorForm(std::initializer_list<int64_t> sizes,
                       std::initializer_list<int64_t> steps,
                       int32_t type)
    : dlpack_type(type), num_dims(static_cast<int>(sizes.size())) {
  std::ranges::copy(sizes, shape);
  std::ranges::copy(steps, strides);
}

py::object make_tensor(std::shared_ptr<void> owner,
                       void* data,
                       const TensorForm& form,
                       DlpackDevice device) {
  if (const ExchangeApi* const api = exchange_api())
    return take(*api, hold<DlpackManagedTensor>(std::move(owner), data, form, device));
  return take(hold<UnversionedTensor>(std::move(owner), data, form, device));
}

}  // namespace moe::bindings
