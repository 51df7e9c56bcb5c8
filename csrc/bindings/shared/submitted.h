#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/shared/make_tensor.h"
#include "bindings/shared/signals.h"
#include "core/dtype.h"
#include "core/error.h"
#include "ops/dispatch.h"

// Parts that the bindings of dispatch and combine share.

namespace moe::bindings {

namespace py = pybind11;

inline constexpr int32_t kFirstOpaqueType = 0x100 << 8;

inline int32_t weight_type(int64_t weight_bytes) {
  return dlpack_type(weight_bytes == 8 ? DType::kFloat64 : DType::kFloat32);
}

template <typename Value>
py::object vector_tensor(std::vector<Value> values,
                         std::initializer_list<int64_t> shape,
                         int32_t type) {
  auto owner = std::make_shared<std::vector<Value>>(std::move(values));
  void* const data = owner->data();
  return make_tensor(std::move(owner), data, shape, type);
}

/// Before the host reads what it learns with @p verdict; null for what it knows.
inline void await_verdict(const std::shared_ptr<ops::DeferredJoin>& verdict) {
  if (!verdict)
    return;
  const py::gil_scoped_release no_gil;
  verdict->join(signal_check());
}

/// Keeps Python objects alive for an operation that a progress thread may outlive the caller in.
inline std::shared_ptr<void> keep_alive(py::tuple objects) {
  auto* held = new py::object(std::move(objects));
  return std::shared_ptr<void>(held, [](void* memory) {
    auto* object = static_cast<py::object*>(memory);
    if (!Py_IsInitialized()) {
      object->release();
      delete object;
      return;
    }
    const py::gil_scoped_acquire gil;
    delete object;
  });
}

/// The tensors of a call, @p tensors() as a tuple, where something reads them when the call is
/// over; else null, as the caller has them.
template <typename MakeTuple>
std::shared_ptr<void> keep_inputs(ops::EndpointBase& endpoint,
                                  bool is_async,
                                  const MakeTuple& tensors) {
  if (!is_async && endpoint.is_host_caller() && endpoint.progress().is_idle())
    return nullptr;
  return endpoint.keep_inputs(keep_alive(tensors()));
}

/// One operation of a buffer as Python holds it. @p inputs are given where a progress thread will
/// read them, and where the caller is a stream: a caller interrupted by a signal may drop its own.
template <typename Outcome>
class Submitted {
 public:
  /// @param body  body(interrupt_check) runs the operation to its end. Copied for a progress
  /// thread.
  /// @param runs_in_captures  Whether a capture records asynchronous operations, too; else they are
  ///   refused there.
  template <typename Body>
  Submitted(std::shared_ptr<ops::EndpointBase> endpoint,
            std::shared_ptr<void> inputs,
            const Body& body,
            bool is_async,
            bool runs_in_captures = false)
      : endpoint_(std::move(endpoint)), pending_(std::make_shared<ops::Pending<Outcome>>()) {
    // Kernels may read them when the host has long done its part.
    if (is_async && !endpoint_->is_host_caller())
      inputs_ = inputs;
    const py::gil_scoped_release no_gil;
    const bool is_captured = (is_async ? runs_in_captures : !endpoint_->progress().is_idle()) &&
                             endpoint_->is_capturing();
    const bool runs_here =
        is_captured || (is_async && endpoint_->has_graphs() && !endpoint_->is_capturing());
    if (runs_here)  // behind what came before, which is no part of a graph
      endpoint_->progress().wait_idle(signal_check());
    if ((!is_async || runs_here) && endpoint_->progress().is_idle()) {
      pending_->run([&body] { return body(signal_check()); });
      if (!is_async || is_captured)
        pending_->wait({});
      return;
    }
    const auto& entries = endpoint_->group().mail().entries();
    entries->add_caller();
    auto queued = std::make_shared<group::QueuedOperation>(entries, endpoint_->buffer_number());
    {
      const group::AwaitedScope awaited(entries, endpoint_->buffer_number());
      endpoint_->progress().submit(
          [pending = pending_, body, inputs = std::move(inputs), queued] {
            pending->run([&body] { return body({}); });
          },
          signal_check());
      queued.reset();
    }
    if (is_async)
      return;
    const Outcome& outcome = await_progress();
    if (outcome.end)
      outcome.end->join(signal_check());
  }

  bool is_complete() const {
    check_fork();
    const Outcome* const outcome = pending_->outcome();
    if (outcome == nullptr || (!outcome->end && !outcome->verdict))
      return pending_->is_complete();
    const py::gil_scoped_release no_gil;
    return (!outcome->end || outcome->end->is_complete()) &&
           (!outcome->verdict || outcome->verdict->is_complete());
  }

  const Outcome& wait() {
    check_fork();
    const Outcome& outcome = await_host();
    if (outcome.end) {
      const py::gil_scoped_release no_gil;
      outcome.end->join(signal_check());
    }
    inputs_ = nullptr;
    return outcome;
  }

  /// The same, and what all ranks say of it has been heard.
  void judge() { await_verdict(wait().verdict); }

  const std::shared_ptr<ops::EndpointBase>& endpoint() const { return endpoint_; }

  DlpackDevice device() const { return {endpoint_->dlpack_device_type(), endpoint_->device_idx()}; }

 private:
  const Outcome& await_host() {
    if (pending_->is_complete())
      return pending_->wait({});
    const py::gil_scoped_release no_gil;
    return await_progress();
  }

  const Outcome& await_progress() {
    const group::AwaitedScope awaited(endpoint_->group().mail().entries(),
                                      endpoint_->buffer_number());
    return pending_->wait(signal_check());
  }

  // The thread that would end it is not in a forked child, and may have held its lock at the fork.
  void check_fork() const { endpoint_->group().check_fork("wait"); }

  std::shared_ptr<ops::EndpointBase> endpoint_;
  std::shared_ptr<void> inputs_;  ///< outlives the outcome, which joins the caller's stream
  std::shared_ptr<ops::Pending<Outcome>> pending_;
};

}  // namespace moe::bindings
