#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "bindings/shared/make_tensor.h"
#include "core/symmetric_memory.h"
#include "ops/endpoint_base.h"

// Memory of results whose size no count decides, and the tensors over it, for the next result of
// the same size: a decode loop neither allocates nor has torch make a tensor. Held until nobody
// else holds any of it, so that a result that somebody has is never written to again.

namespace moe::bindings {

/// A tensor that is handed out, and what torch and Python count of it while nobody has it.
class KeptTensor {
 public:
  KeptTensor(std::shared_ptr<void> owner, void* data, const TensorForm& form, DlpackDevice device);

  /// Whether it can be handed out as such a tensor, in the present mode of inference.
  bool is(const void* data, const TensorForm& form) const;
  /// Whether somebody else holds it, its memory or a view of it.
  bool is_held() const;
  /// Whether whoever had it has left nothing on it, and nothing that would know it again.
  bool is_as_made() const;
  const pybind11::object& tensor() const { return tensor_; }
  const void* data() const { return data_; }

 private:
  struct Counts {
    Py_ssize_t tensor_references;
    Py_ssize_t storage_references;
    int64_t tensor_uses;
    int64_t storage_uses;

    friend bool operator==(const Counts&, const Counts&) = default;
  };

  Counts count() const;

  const void* data_;
  TensorForm form_;
  bool is_inference_;
  pybind11::object tensor_;
  pybind11::object storage_;
  pybind11::object storage_address_;
  Counts idle_counts_;
};

/// The windows of one kind of result, the latest last. Called with the GIL.
class KeptWindows {
 public:
  /// A window that nobody else holds; a new one where there is none, kept from now on. Windows of
  /// other sizes that nobody holds go back to @p memory then.
  /// @throws CapacityError  as SymmetricMemory::allocate.
  std::shared_ptr<Window> take(SymmetricMemory& memory, uint64_t bytes);
  /// A tensor over @p data of @p window: the one that was made before, where it was kept.
  pybind11::object tensor(const std::shared_ptr<Window>& window,
                          void* data,
                          const TensorForm& form,
                          DlpackDevice device);
  /// A tensor of @p values, which go with @p window: into the memory of the one that was made
  /// before, where it was kept.
  /// @param kind  Which of those that go with the window.
  template <typename Value>
  pybind11::object numbers(const Window* window,
                           int kind,
                           const std::vector<Value>& values,
                           int32_t dlpack_type) {
    return numbers(window,
                   kind,
                   values.data(),
                   values.size() * sizeof(Value),
                   TensorForm({static_cast<int64_t>(values.size())}, dlpack_type));
  }
  /// Gives those back that nobody else holds.
  void give_back();
  /// Keeps none any more.
  void forget();

 private:
  struct Numbers {
    int kind;
    std::shared_ptr<std::vector<std::byte>> memory;
    KeptTensor tensor;
  };
  struct Result {
    std::shared_ptr<Window> window;
    std::vector<KeptTensor> tensors;  ///< over the window
    std::vector<Numbers> numbers;

    bool is_held() const;
    bool is_as_made() const;
  };

  pybind11::object numbers(
      const Window* window, int kind, const void* values, size_t bytes, const TensorForm& form);
  Result* find(const Window* window);

  std::vector<Result> results_;
};

/// What the calls of one communicator's buffers keep.
struct KeptResults {
  KeptWindows rows;  ///< of low-latency dispatches
  KeptWindows sums;  ///< of their combines

  void give_back() {
    rows.give_back();
    sums.give_back();
  }
  void forget() {
    rows.forget();
    sums.forget();
  }
};

/// Dropped with the GIL, by whoever is last.
std::shared_ptr<KeptResults> make_kept_results();

/// What @p endpoint keeps; null for nothing.
inline KeptResults* kept_results_of(const ops::EndpointBase& endpoint) {
  return static_cast<KeptResults*>(endpoint.beside().get());
}

}  // namespace moe::bindings
