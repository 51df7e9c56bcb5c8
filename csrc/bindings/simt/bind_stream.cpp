#include "bindings/simt/bind_stream.h"

#include <memory>
#include <stdexcept>
#include <utility>

#include "bindings/shared/bind_endpoint.h"
#include "simt/stream.h"

namespace moe::bindings {

namespace {

using simt::StreamEvent;
using simt::WorkerStream;

std::shared_ptr<StreamEvent> record(WorkerStream& stream) {
  return std::dynamic_pointer_cast<StreamEvent>(stream.record());
}

/// @p function without arguments, called by the stream.
void call(WorkerStream& stream, py::object function) {
  auto* const address = function.ptr();
  stream.call([address, kept = keep_alive(py::make_tuple(std::move(function)))] {
    const py::gil_scoped_acquire gil;
    try {
      py::reinterpret_borrow<py::function>(address)();
    } catch (const py::error_already_set& error) {
      // Everybody who waits for the stream hears of it; a Python error can be raised once only.
      throw std::runtime_error(error.what());
    }
  });
}

}  // namespace

void bind_stream(py::module_& module) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<StreamEvent, std::shared_ptr<StreamEvent>>(module, "Event", py::module_local())
      .def("is_complete", &StreamEvent::is_complete)
      .def("synchronize", &StreamEvent::await, no_gil);
  py::class_<WorkerStream, std::shared_ptr<WorkerStream>>(module, "Stream", py::module_local())
      .def(py::init([] { return drop_without_gil(std::make_shared<WorkerStream>(-1)); }))
      .def_property_readonly(
          "handle",
          [](const WorkerStream& self) { return reinterpret_cast<uintptr_t>(self.handle()); })
      .def("call", &call, py::arg("function"))
      .def("record", &record)
      .def(
          "wait",
          [](WorkerStream& self, const StreamEvent& event) { self.wait(event); },
          py::arg("event"))
      .def("is_idle", &WorkerStream::is_idle)
      .def("synchronize", [](WorkerStream& self) { record(self)->await(); }, no_gil);
}

}  // namespace moe::bindings
