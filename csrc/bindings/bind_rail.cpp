#include <memory>
#include <string>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/shared/signature.h"
#include "bindings/shared/without_gil.h"
#include "core/error.h"
#include "core/rail.h"
#include "group/queued_rail.h"

namespace moe::bindings {

namespace py = pybind11;

namespace {

using group::QueuedRail;
using Request = QueuedRail::Request;

/// Memory of a Python object, held for as long as the rail needs it.
struct HeldMemory {
  explicit HeldMemory(const py::buffer& object) : info(object.request(true)) {
    MOE_CHECK(PyBuffer_IsContiguous(info.view(), 'C') != 0,
              "memory of a message must be contiguous, got strides");
  }
  uint64_t bytes() const { return static_cast<uint64_t>(info.size * info.itemsize); }
  py::buffer_info info;
};

Rail::Buffer hold(const py::buffer& object, uint64_t* bytes) {
  const auto drop = [](HeldMemory* held) {
    // The rail lets go of it on any thread.
    const py::gil_scoped_acquire gil;
    delete held;
  };
  std::shared_ptr<HeldMemory> held(new HeldMemory(object), drop);
  *bytes = held->bytes();
  auto* const data = static_cast<std::byte*>(held->info.ptr);
  return {std::move(held), data};
}

std::shared_ptr<Rail::Transfer> send(Rail& rail, int node_idx, const py::buffer& object) {
  uint64_t bytes = 0;
  Rail::Buffer memory = hold(object, &bytes);
  const py::gil_scoped_release no_gil;
  return rail.send(node_idx, std::move(memory), 0, bytes);
}

std::shared_ptr<Rail::Transfer> receive(Rail& rail, int node_idx, const py::buffer& object) {
  uint64_t bytes = 0;
  Rail::Buffer memory = hold(object, &bytes);
  const py::gil_scoped_release no_gil;
  return rail.receive(node_idx, std::move(memory), 0, bytes);
}

std::string state_name(const Rail::Transfer& transfer) {
  switch (transfer.state()) {
    case Rail::State::kMoving:
      return "moving";
    case Rail::State::kMoved:
      return "moved";
    case Rail::State::kFailed:
      return "failed";
  }
  return "";
}

py::buffer_info memory_of(Request& request) {
  return {reinterpret_cast<uint8_t*>(request.data()), static_cast<py::ssize_t>(request.bytes())};
}

void bind_requests(py::module_& module) {
  // Code that holds a view of the memory holds the request, and it the memory.
  py::class_<Request, Rail::Transfer, std::shared_ptr<Request>>(
      module, "RailRequest", py::buffer_protocol())
      .def_buffer(&memory_of)
      .def_property_readonly("is_send", &Request::is_send)
      .def_property_readonly("node_idx", &Request::node_idx)
      .def_property_readonly("num_bytes", &Request::bytes)
      .def("complete", &Request::complete, NoGil())
      .def("fail", &Request::fail, py::arg("text"), NoGil());
}

}  // namespace

void bind_rail(py::module_& module) {
  py::class_<Rail::Transfer, std::shared_ptr<Rail::Transfer>>(module, "RailTransfer")
      .def_property_readonly("state", &state_name)
      .def_property_readonly("error", &Rail::Transfer::error);
  py::class_<Rail, std::shared_ptr<Rail>>(module, "Rail")
      .def_property_readonly("name", &Rail::name)
      .def_property_readonly("sent_bytes", &Rail::sent_bytes)
      .def_property_readonly("received_bytes", &Rail::received_bytes)
      .def("send", &send, Signature("node_idx, memory"))
      .def("receive", &receive, Signature("node_idx, memory"))
      .def("give_up", &Rail::give_up, py::arg("reason"), NoGil());
  bind_requests(module);
  py::class_<QueuedRail, Rail, std::shared_ptr<QueuedRail>>(module, "QueuedRail")
      .def(py::init<std::string, int, int>(), Signature("name, num_nodes, node_idx"))
      .def_property_readonly("is_given_up", &QueuedRail::is_given_up)
      .def("next_send", &QueuedRail::next_send, Signature("node_idx, is_waiting=True"), NoGil())
      .def("next_receive",
           &QueuedRail::next_receive,
           Signature("node_idx, is_waiting=True"),
           NoGil())
      .def("next", &QueuedRail::next, py::arg("is_waiting") = true, NoGil());
}

}  // namespace moe::bindings
