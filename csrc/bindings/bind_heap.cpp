#include <memory>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/shared/signature.h"
#include "bindings/shared/without_gil.h"
#include "heap/peer_mesh.h"
#include "heap/shm_heap.h"

namespace moe::bindings {

namespace py = pybind11;
using heap::HeapOptions;
using heap::PeerMesh;
using heap::ShmHeap;

void bind_heap(py::module_& module) {
  py::class_<PeerMesh, std::shared_ptr<PeerMesh>>(module, "PeerMesh")
      .def_static("create", [] { return PeerMesh::create(); })
      .def_static(
          "create_over_nodes",
          [](bool is_one_machine, const std::string& interfaces, const std::string& route_to) {
            return PeerMesh::create(heap::TcpOptions{is_one_machine, interfaces, route_to});
          },
          Signature("is_one_machine, interfaces, route_to"),
          NoGil())
      .def("address", [](const PeerMesh& self) { return py::bytes(self.address()); })
      .def(
          "connect",
          [](PeerMesh& self,
             int rank_idx,
             const std::vector<std::string>& addresses,
             double timeout_s,
             const py::object& check,
             int num_local_ranks,
             double link_timeout_s) {
            const PeerMesh::ConnectOptions options{
                timeout_s, interrupt_check_with(check), num_local_ranks, link_timeout_s};
            const py::gil_scoped_release no_gil;
            self.connect(rank_idx, addresses, options);
          },
          Signature("rank_idx, addresses, timeout_s, check=None, num_local_ranks=0, "
                    "link_timeout_s=0.0"))
      .def("leave", &PeerMesh::leave, NoGil());
  py::class_<ShmHeap, std::shared_ptr<ShmHeap>>(module, "ShmHeap")
      .def_static(
          "create",
          [](std::shared_ptr<PeerMesh> mesh,
             uint64_t limit_bytes,
             bool with_huge_pages,
             bool poison) {
            return ShmHeap::create(std::move(mesh),
                                   HeapOptions{limit_bytes, with_huge_pages, poison});
          },
          Signature("mesh, limit_bytes=0, with_huge_pages=True, poison=False"));
}

}  // namespace moe::bindings
