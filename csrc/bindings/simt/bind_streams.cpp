#include "bindings/simt/bind_streams.h"

#include <memory>
#include <stdexcept>
#include <utility>

#include "bindings/shared/without_gil.h"
#include "simt/simt_device.h"
#include "simt/stream.h"

namespace moe::bindings {

namespace {

using runtime::DeviceEndpoint;
using simt::StreamEvent;
using simt::WorkerStream;

/// Stream in which graphs begin and run: that of the buffer for a caller that has none.
simt::DeviceStream& stream_of(DeviceEndpoint& endpoint) {
  runtime::CallOrder& order = endpoint.order();
  return dynamic_cast<simt::DeviceStream&>(endpoint.is_host_caller() ? *order.stream()
                                                                     : *order.caller());
}

/// Numbers of calls of the host to its device so far, for tests of what operations cost it.
py::dict device_calls(DeviceEndpoint& endpoint) {
  const auto& device = dynamic_cast<const simt::SimtDevice&>(endpoint.device());
  const auto& stream = dynamic_cast<const simt::DeviceStream&>(*endpoint.order().stream());
  py::dict calls;
  calls["zeroed_allocations"] = device.num_zeroed_allocations();
  calls["unset_allocations"] = device.num_unset_allocations();
  calls["host_allocations"] = device.num_host_allocations();
  calls["launches"] = stream.num_launches();
  calls["copies"] = stream.num_copies();
  calls["events"] = stream.num_events();
  calls["host_waits"] = endpoint.operations().num_host_waits();
  return calls;
}

/// A graph of operations of one buffer.
class BufferGraph {
 public:
  explicit BufferGraph(std::shared_ptr<DeviceEndpoint> endpoint)
      : endpoint_(std::move(endpoint)), graph_(stream_of(*endpoint_).end_capture()) {}

  size_t num_nodes() const { return graph_->num_nodes(); }
  void replay() { graph_->replay(stream_of(*endpoint_)); }
  void synchronize() {
    const auto end = stream_of(*endpoint_).record();
    dynamic_cast<const StreamEvent&>(*end).await();
  }

 private:
  std::shared_ptr<DeviceEndpoint> endpoint_;
  std::shared_ptr<simt::Graph> graph_;
};

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

void bind_streams(py::module_& module, DeviceEndpointClass& endpoint) {
  py::class_<StreamEvent, std::shared_ptr<StreamEvent>>(module, "Event", py::module_local())
      .def("is_complete", &StreamEvent::is_complete)
      .def("synchronize", &StreamEvent::await, NoGil());
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
      .def("synchronize", [](WorkerStream& self) { record(self)->await(); }, NoGil());
  py::class_<BufferGraph>(module, "Graph", py::module_local())
      .def_property_readonly("num_nodes", &BufferGraph::num_nodes)
      .def("replay", &BufferGraph::replay, NoGil())
      .def("synchronize", &BufferGraph::synchronize, NoGil());
  endpoint.def("device_calls", &device_calls)
      .def(
          "begin_capture",
          [](DeviceEndpoint& self) {
            // Work that was issued before is no part of the graph.
            self.progress().wait_idle(signal_check());
            self.open_receive().settle(signal_check());
            stream_of(self).begin_capture();
          },
          NoGil())
      .def("end_capture",
           [](std::shared_ptr<DeviceEndpoint> self) { return BufferGraph(std::move(self)); });
}

}  // namespace moe::bindings
