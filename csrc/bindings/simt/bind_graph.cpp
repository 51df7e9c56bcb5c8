#include "bindings/simt/bind_graph.h"

#include "simt/simt_device.h"
#include "simt/stream.h"

namespace moe::bindings {

namespace {

using runtime::DeviceEndpoint;

/// Stream in which graphs begin and run: that of the buffer for a caller that has none.
simt::DeviceStream& stream_of(DeviceEndpoint& endpoint) {
  return dynamic_cast<simt::DeviceStream&>(endpoint.is_host_caller() ? endpoint.stream()
                                                                     : endpoint.caller_stream());
}

/// Numbers of calls of the host to its device so far, for tests of what operations cost it.
py::dict device_calls(const DeviceEndpoint& endpoint) {
  const auto& device = dynamic_cast<const simt::SimtDevice&>(endpoint.device());
  const auto& stream = dynamic_cast<const simt::DeviceStream&>(endpoint.stream());
  py::dict calls;
  calls["zeroed_allocations"] = device.num_zeroed_allocations();
  calls["unset_allocations"] = device.num_unset_allocations();
  calls["host_allocations"] = device.num_host_allocations();
  calls["launches"] = stream.num_launches();
  calls["copies"] = stream.num_copies();
  calls["events"] = stream.num_events();
  calls["host_waits"] = endpoint.num_host_waits();
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
    dynamic_cast<const simt::StreamEvent&>(*end).await();
  }

 private:
  std::shared_ptr<DeviceEndpoint> endpoint_;
  std::shared_ptr<simt::Graph> graph_;
};

}  // namespace

void bind_graph(py::module_& module, DeviceEndpointClass& endpoint) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<BufferGraph>(module, "Graph", py::module_local())
      .def_property_readonly("num_nodes", &BufferGraph::num_nodes)
      .def("replay", &BufferGraph::replay, no_gil)
      .def("synchronize", &BufferGraph::synchronize, no_gil);
  endpoint.def("device_calls", &device_calls)
      .def(
          "begin_capture",
          [](DeviceEndpoint& self) {
            // What was issued before is no part of the graph.
            self.progress().wait_idle(signal_check());
            self.settle_receive(signal_check());
            stream_of(self).begin_capture();
          },
          no_gil)
      .def("end_capture",
           [](std::shared_ptr<DeviceEndpoint> self) { return BufferGraph(std::move(self)); });
}

}  // namespace moe::bindings
