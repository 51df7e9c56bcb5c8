#include <memory>
#include <numeric>

#include "bindings/bind_shrink.h"
#include "bindings/bindings.h"
#include "bindings/shared/heap_stats.h"
#include "bindings/shared/make_tensor.h"
#include "bindings/shared/native_group.h"
#include "bindings/shared/peer_check.h"
#include "core/dtype.h"

namespace moe::bindings {

namespace py = pybind11;

namespace {

std::shared_ptr<NativeGroup> create_group(std::shared_ptr<heap::PeerMesh> mesh,
                                          std::shared_ptr<heap::ShmHeap> heap,
                                          uint64_t channel,
                                          double stall_timeout_s,
                                          double arrival_timeout_s,
                                          int num_threads,
                                          int num_local_ranks,
                                          int num_machine_ranks,
                                          const py::object& check) {
  const group::InterruptCheck interrupt_check = interrupt_check_with(check);
  const py::gil_scoped_release no_gil;
  std::vector<int> members(static_cast<size_t>(mesh->num_ranks()));
  std::iota(members.begin(), members.end(), 0);
  auto group = std::make_shared<group::Group>(mesh,
                                              heap,
                                              members,
                                              mesh->rank_idx(),
                                              channel,
                                              stall_timeout_s,
                                              arrival_timeout_s,
                                              num_threads,
                                              false,
                                              interrupt_check,
                                              num_local_ranks,
                                              num_machine_ranks);
  return std::make_shared<NativeGroup>(NativeGroup{mesh, heap, group, true});
}

std::shared_ptr<NativeGroup> create_child(const std::shared_ptr<NativeGroup>& parent,
                                          const std::vector<int>& parent_ranks,
                                          int rank_idx,
                                          uint64_t channel,
                                          double stall_timeout_s,
                                          double arrival_timeout_s,
                                          int num_threads,
                                          int num_local_ranks,
                                          int num_machine_ranks) {
  const py::gil_scoped_release no_gil;
  std::vector<int> members;
  for (const int parent_rank : parent_ranks)
    members.push_back(parent->group->members().at(static_cast<size_t>(parent_rank)));
  auto group = std::make_shared<group::Group>(parent->mesh,
                                              parent->heap,
                                              members,
                                              rank_idx,
                                              channel,
                                              stall_timeout_s,
                                              arrival_timeout_s,
                                              num_threads,
                                              true,
                                              signal_check(),
                                              num_local_ranks,
                                              num_machine_ranks);
  return std::make_shared<NativeGroup>(NativeGroup{parent->mesh, parent->heap, group, false});
}

py::list all_gather(NativeGroup& native, const std::string& payload) {
  std::vector<std::string> payloads;
  {
    const py::gil_scoped_release no_gil;
    payloads = native.group->all_gather(payload, signal_check());
  }
  py::list gathered;
  for (const auto& item : payloads)
    gathered.append(py::bytes(item));
  return gathered;
}

/// Bytes of this rank's heap as a tensor of uint8; they go back when the last tensor over them
/// does.
py::object empty_bytes(NativeGroup& native, uint64_t bytes) {
  std::shared_ptr<Window> window;
  {
    const py::gil_scoped_release no_gil;
    native.group->check_process("empty");
    window = native.heap->allocate(bytes);
  }
  std::byte* const data = window->data();
  return make_tensor(
      std::move(window), data, {static_cast<int64_t>(bytes)}, dlpack_type(DType::kBytes));
}

/// Has ranges (address, bytes) of this process's memory share their pages with peers.
std::vector<std::shared_ptr<heap::HeapPages>> share_memory(
    NativeGroup& native, const std::vector<std::pair<uintptr_t, uint64_t>>& ranges) {
  std::vector<heap::MemoryRange> memory;
  for (const auto& [address, bytes] : ranges)
    memory.push_back({reinterpret_cast<std::byte*>(address), bytes});
  const py::gil_scoped_release no_gil;
  native.group->check_process("share");
  return native.heap->share(memory);
}

/// (segment, offset) of memory that lies whole in this rank's heap, else None.
py::object find_place(const NativeGroup& native, uintptr_t address, uint64_t bytes) {
  native.group->check_process("find");
  Offer offer;
  if (!native.heap->find(reinterpret_cast<const void*>(address), bytes, &offer))
    return py::none();
  return py::make_tuple(offer.segment_idx, offer.offset);
}

/// The bytes of a place that a peer found, as a tensor of uint8 over the peer's own memory.
py::object resolve_bytes(
    NativeGroup& native, int rank_idx, uint32_t segment_idx, uint64_t offset, uint64_t bytes) {
  MOE_CHECK(rank_idx >= 0 && rank_idx < native.group->num_ranks(),
            "rank ",
            rank_idx,
            " is not a rank of a group of ",
            native.group->num_ranks());
  std::byte* data = nullptr;
  {
    const py::gil_scoped_release no_gil;
    native.group->check_process("resolve");
    group::WaitSite site;
    site.interrupt_check = &signal_check();
    site.call = "resolve";
    data = native.group->resolve(rank_idx, Offer{segment_idx, 0, offset, bytes}, site);
  }
  // The heap and the mesh keep the mapping.
  struct Mapping {
    std::shared_ptr<heap::PeerMesh> mesh;
    std::shared_ptr<heap::ShmHeap> heap;
  };
  return make_tensor(std::make_shared<Mapping>(Mapping{native.mesh, native.heap}),
                     data,
                     {static_cast<int64_t>(bytes)},
                     dlpack_type(DType::kBytes));
}

}  // namespace

void bind_group(py::module_& module) {
  py::class_<heap::HeapPages, std::shared_ptr<heap::HeapPages>>(module, "HeapPages")
      .def("unshare", &heap::HeapPages::unshare, py::call_guard<py::gil_scoped_release>())
      .def("abandon", &heap::HeapPages::abandon);
  py::class_<NativeGroup, std::shared_ptr<NativeGroup>> group(module, "Group");
  group
      .def_static("create",
                  &create_group,
                  py::arg("mesh"),
                  py::arg("heap"),
                  py::arg("channel"),
                  py::arg("stall_timeout_s"),
                  py::arg("arrival_timeout_s"),
                  py::arg("num_threads"),
                  py::arg("num_local_ranks") = 0,
                  py::arg("num_machine_ranks") = 0,
                  py::arg("check") = py::none())
      .def_static("create_child",
                  &create_child,
                  py::arg("parent"),
                  py::arg("parent_ranks"),
                  py::arg("rank_idx"),
                  py::arg("channel"),
                  py::arg("stall_timeout_s"),
                  py::arg("arrival_timeout_s"),
                  py::arg("num_threads"),
                  py::arg("num_local_ranks") = 0,
                  py::arg("num_machine_ranks") = 0)
      .def_property_readonly("rank_idx",
                             [](const NativeGroup& self) { return self.group->rank_idx(); })
      .def_property_readonly("num_ranks",
                             [](const NativeGroup& self) { return self.group->num_ranks(); })
      .def_property_readonly("num_threads",
                             [](const NativeGroup& self) { return self.group->num_threads(); })
      .def_property_readonly(
          "num_local_ranks",
          [](const NativeGroup& self) { return self.group->nodes().num_local_ranks; })
      .def_property_readonly("is_aborted",
                             [](const NativeGroup& self) { return self.group->is_aborted(); })
      .def_property_readonly("num_recoveries",
                             [](const NativeGroup& self) { return self.group->generation(); })
      .def("all_gather", &all_gather)
      .def("empty", &empty_bytes, py::arg("num_bytes"))
      .def_static("has_pages",
                  [](uintptr_t address, uint64_t bytes) {
                    const heap::MemoryRange range{reinterpret_cast<std::byte*>(address), bytes};
                    return heap::whole_pages(range).bytes > 0;
                  })
      .def("share", &share_memory, py::arg("ranges"))
      .def("find", &find_place, py::arg("address"), py::arg("num_bytes"))
      .def("resolve",
           &resolve_bytes,
           py::arg("rank_idx"),
           py::arg("segment_idx"),
           py::arg("offset"),
           py::arg("num_bytes"))
      .def(
          "reserve",
          [](NativeGroup& self, uint64_t bytes) { self.heap->reserve(bytes); },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "trim",
          [](NativeGroup& self) { return self.heap->trim(); },
          py::call_guard<py::gil_scoped_release>())
      .def("heap_stats",
           [](const NativeGroup& self) { return heap_stats_dict(self.heap->stats()); })
      .def("recover",
           [](NativeGroup& self) {
             group::RecoveryResult result;
             {
               const py::gil_scoped_release no_gil;
               result = self.group->recover(signal_check());
             }
             return py::make_tuple(result.failed_ranks, result.completed_epochs);
           })
      .def("prepare_to_leave", [](NativeGroup& self) { self.group->prepare_to_leave(); })
      .def(
          "destroy",
          [](NativeGroup& self) {
            self.group->destroy();
            if (self.owns_mesh)
              self.mesh->leave();
          },
          py::call_guard<py::gil_scoped_release>());
  bind_shrink(group);
}

}  // namespace moe::bindings
