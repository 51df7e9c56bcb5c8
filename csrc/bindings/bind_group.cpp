#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/shared/heap_stats.h"
#include "bindings/shared/make_tensor.h"
#include "bindings/shared/native_group.h"
#include "bindings/shared/signature.h"
#include "bindings/shared/without_gil.h"
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

/// Payloads of all ranks.
/// @param exchange  Gives them, and needs no GIL.
template <typename Exchange>
py::list gathered(const Exchange& exchange) {
  py::list items;
  for (const std::string& item : without_gil(exchange))
    items.append(py::bytes(item));
  return items;
}

py::list all_gather(NativeGroup& native, const std::string& payload) {
  return gathered([&] { return native.group->all_gather(payload, signal_check()); });
}

py::list shrink_gather(NativeGroup& native, const std::string& payload) {
  return gathered(
      [&] { return native.group->shrink_agreement().all_gather(payload, signal_check()); });
}

py::tuple to_tuple(const group::ShrinkDecision& decision) {
  return py::make_tuple(decision.failed_ranks, decision.survivors, decision.completed_epochs);
}

py::tuple shrink_agree(NativeGroup& native,
                       std::vector<int> failed_ranks,
                       std::string call,
                       std::string agreed,
                       std::string problem,
                       bool needs_majority) {
  group::ShrinkAgreement::Arguments arguments{std::move(failed_ranks),
                                              std::move(call),
                                              std::move(agreed),
                                              std::move(problem),
                                              needs_majority};
  const auto decision = without_gil(
      [&] { return native.group->shrink_agreement().agree(arguments, signal_check()); });
  return to_tuple(decision);
}

py::object shrink_finish(NativeGroup& native, bool has_group) {
  const auto decision = without_gil(
      [&] { return native.group->shrink_agreement().finish(has_group, signal_check()); });
  return decision ? py::object(to_tuple(*decision)) : py::none();
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

/// Adds how survivors leave a group for a new one.
void bind_shrink(py::class_<NativeGroup, std::shared_ptr<NativeGroup>>& group) {
  group
      .def("shrink_agree",
           &shrink_agree,
           Signature("failed_ranks, call, agreed, problem, needs_majority"))
      .def("shrink_gather", &shrink_gather, py::arg("payload"))
      .def("shrink_finish", &shrink_finish, py::arg("has_group"))
      .def(
          "shrink_check",
          [](NativeGroup& self) { self.group->shrink_ballots().check_round(); },
          NoGil())
      .def(
          "shrink_refuse",
          [](NativeGroup& self, const std::string& text, bool is_mistake) {
            return self.group->shrink_ballots().refuse(text, is_mistake);
          },
          Signature("text, is_mistake"),
          NoGil());
}

}  // namespace

void bind_group(py::module_& module) {
  py::class_<heap::HeapPages, std::shared_ptr<heap::HeapPages>>(module, "HeapPages")
      .def("unshare", &heap::HeapPages::unshare, NoGil())
      .def("abandon", &heap::HeapPages::abandon);
  py::class_<NativeGroup, std::shared_ptr<NativeGroup>> group(module, "Group");
  group
      .def_static("create",
                  &create_group,
                  Signature("mesh, heap, channel, stall_timeout_s, arrival_timeout_s, "
                            "num_threads, num_local_ranks=0, num_machine_ranks=0, check=None"))
      .def_static("create_child",
                  &create_child,
                  Signature("parent, parent_ranks, rank_idx, channel, stall_timeout_s, "
                            "arrival_timeout_s, num_threads, num_local_ranks=0, "
                            "num_machine_ranks=0"))
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
      .def("find", &find_place, Signature("address, num_bytes"))
      .def("resolve", &resolve_bytes, Signature("rank_idx, segment_idx, offset, num_bytes"))
      .def(
          "reserve", [](NativeGroup& self, uint64_t bytes) { self.heap->reserve(bytes); }, NoGil())
      .def(
          "trim", [](NativeGroup& self) { return self.heap->trim(); }, NoGil())
      .def("heap_stats",
           [](const NativeGroup& self) { return heap_stats_dict(self.heap->stats()); })
      .def("recover",
           [](NativeGroup& self) {
             const auto result = without_gil([&] { return self.group->recover(signal_check()); });
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
          NoGil());
  bind_shrink(group);
}

}  // namespace moe::bindings
