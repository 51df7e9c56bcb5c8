#include <algorithm>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/shared/bind_endpoint.h"
#include "bindings/shared/count_matrix.h"
#include "bindings/shared/make_tensor.h"
#include "bindings/shared/signature.h"
#include "bindings/shared/submitted.h"
#include "core/error.h"
#include "heap/window_allocator.h"
#include "layout/capacity.h"
#include "layout/control.h"
#include "layout/placement_plan.h"
#include "layout/rail_region.h"
#include "layout/rank_sums.h"
#include "layout/replicas.h"
#include "layout/row_streams.h"
#include "layout/token_sets.h"
#include "layout/window.h"
#include "layout/wire_format.h"
#include "layout/workspace.h"

// Arithmetic of csrc/layout for decisions made in Python. Tensors lie in host memory, and are read
// and written in place.

namespace moe::bindings {

namespace {

using layout::Arrangement;
using layout::CapacityRule;
using layout::CountMatrix;
using layout::Placement;
using layout::Replicas;

const int64_t* ids_of(const TensorView& choices) {
  return reinterpret_cast<const int64_t*>(choices.data);
}

CountMatrix count_matrix(py::handle counts, const Placement& placement) {
  return count_matrix_of(counts, placement.num_ranks, placement.num_experts);
}

py::object numbers(std::vector<int64_t> values) {
  const auto size = static_cast<int64_t>(values.size());
  return vector_tensor(std::move(values), {size}, kInt64);
}

Placement make_placement(py::handle expert_rank, int num_ranks) {
  const TensorView ranks = view_tensor(expert_rank);
  MOE_CHECK(
      ranks.element_bytes == 4, "expert_rank must be int32, got ", ranks.element_bytes, " bytes");
  const auto* first = reinterpret_cast<const int32_t*>(ranks.data);
  std::vector<int32_t> owners(first, first + ranks.num_rows);
  for (const int32_t owner : owners)
    MOE_CHECK(owner >= 0 && owner < num_ranks, owner, " is not a rank of ", num_ranks);
  return Placement(std::move(owners), num_ranks);
}

/// Turns counts of logical experts into counts of slots.
py::object share_rows(py::handle asked, const Replicas& replicas, const Placement& placement) {
  CountMatrix shared = count_matrix(asked, placement);
  layout::share_rows(replicas, placement, &shared);
  const int64_t num_columns = shared.stride();
  return vector_tensor(std::move(shared.counts), {placement.num_ranks, num_columns}, kInt32);
}

/// @param counts  Result of share_rows().
py::object choose_slots(py::handle topk_idx,
                        py::handle counts,
                        const Replicas& replicas,
                        const Placement& placement,
                        int rank_idx) {
  const TensorView choices = view_tensor(topk_idx);
  return vector_tensor(layout::choose_slots(ids_of(choices),
                                            choices.num_rows * choices.row_elements,
                                            replicas,
                                            count_matrix(counts, placement).row(rank_idx)),
                       {choices.num_rows, choices.row_elements},
                       kInt64);
}

/// @param replicas  Null where ids are slots.
/// @throws InvalidArgument  An id is no expert's.
void count_choices(const Placement& placement,
                   py::handle topk_idx,
                   py::handle row,
                   const Replicas* replicas) {
  const TensorView choices = view_tensor(topk_idx);
  const TensorView counts = view_tensor(row);
  const int num_counts = layout::Row::num_counts(placement.num_ranks, placement.num_experts);
  MOE_CHECK(counts.num_rows == num_counts && counts.element_bytes == 4,
            "a row of counts must be int32 [",
            num_counts,
            "], got [",
            counts.num_rows,
            "]");
  const int64_t bad_idx = layout::count_choices(ids_of(choices),
                                                choices.num_rows,
                                                choices.row_elements,
                                                replicas,
                                                placement,
                                                reinterpret_cast<int32_t*>(counts.data),
                                                nullptr);
  MOE_CHECK(bad_idx < 0,
            layout::describe_bad_expert(bad_idx,
                                        choices.row_elements,
                                        ids_of(choices)[bad_idx],
                                        layout::num_ids(replicas, placement)));
}

CapacityRule rule_of(int64_t expert_capacity, int on_overflow) {
  return {expert_capacity, static_cast<layout::OnOverflow>(on_overflow)};
}

/// @throws CapacityError, InvalidArgument  See layout::find_overflow().
void check_overflow(py::handle asked,
                    const Placement& placement,
                    const Arrangement& arrangement,
                    int64_t expert_capacity,
                    int on_overflow,
                    int64_t row_bytes) {
  if (const std::exception_ptr error = layout::find_overflow(count_matrix(asked, placement),
                                                             placement,
                                                             arrangement,
                                                             rule_of(expert_capacity, on_overflow),
                                                             row_bytes))
    std::rethrow_exception(error);
}

py::object keep_rows(py::handle asked,
                     const Placement& placement,
                     const Arrangement& arrangement,
                     int64_t expert_capacity,
                     int on_overflow) {
  CountMatrix kept = layout::keep_rows(count_matrix(asked, placement),
                                       placement,
                                       arrangement,
                                       rule_of(expert_capacity, on_overflow));
  const int64_t num_columns = kept.stride();
  return vector_tensor(std::move(kept.counts), {placement.num_ranks, num_columns}, kInt32);
}

int64_t num_required_rows(py::handle asked,
                          const Placement& placement,
                          const Arrangement& arrangement,
                          int rank_idx) {
  return layout::num_required_rows(
      count_matrix(asked, placement), placement, arrangement, rank_idx);
}

py::tuple received_rows(py::handle counts,
                        const Placement& placement,
                        const Arrangement& arrangement,
                        int rank_idx) {
  layout::ReceivedRows rows =
      layout::received_rows(count_matrix(counts, placement), placement, arrangement, rank_idx);
  const auto num_offsets = static_cast<int64_t>(rows.expert_offsets.size());
  std::vector<int32_t> offsets(rows.expert_offsets.begin(), rows.expert_offsets.end());
  return py::make_tuple(numbers(std::move(rows.num_tokens_per_expert)),
                        vector_tensor(std::move(offsets), {num_offsets}, kInt32),
                        rows.num_rows);
}

py::object assign_slots(py::handle topk_idx,
                        py::handle counts,
                        const Placement& placement,
                        const Arrangement& arrangement,
                        int rank_idx) {
  const TensorView choices = view_tensor(topk_idx);
  const CountMatrix kept = count_matrix(counts, placement);
  check_plan(kept, choices, placement, arrangement.is_by_rank(), rank_idx);
  const int64_t num_slots =
      layout::num_slots_per_token(arrangement.layout, choices.row_elements, placement.num_ranks);
  std::vector<int64_t> slots(static_cast<size_t>(choices.num_rows * num_slots));
  layout::assign_slots(ids_of(choices),
                       choices.num_rows,
                       choices.row_elements,
                       kept,
                       placement,
                       arrangement,
                       rank_idx,
                       slots.data());
  return vector_tensor(std::move(slots), {choices.num_rows, num_slots}, kInt64);
}

/// @param slots  Result of assign_slots() for the other arguments.
py::tuple row_streams(py::handle topk_idx,
                      py::handle slots,
                      py::handle counts,
                      const Placement& placement,
                      const Arrangement& arrangement,
                      int rank_idx) {
  const TensorView choices = view_tensor(topk_idx);
  const TensorView places = view_tensor(slots);
  layout::RowStreams streams = layout::row_streams(ids_of(choices),
                                                   choices.num_rows,
                                                   choices.row_elements,
                                                   ids_of(places),
                                                   count_matrix(counts, placement),
                                                   placement,
                                                   arrangement,
                                                   rank_idx);
  std::vector<int64_t> of_choices(static_cast<size_t>(choices.num_rows * choices.row_elements));
  layout::choice_positions(ids_of(choices),
                           choices.num_rows,
                           choices.row_elements,
                           ids_of(places),
                           streams.positions.data(),
                           placement,
                           arrangement,
                           of_choices.data());
  return py::make_tuple(
      streams.num_sent,
      streams.num_received,
      numbers(std::move(streams.sent_slots)),
      numbers(std::move(streams.window_rows)),
      vector_tensor(std::move(streams.positions), {choices.num_rows, places.row_elements}, kInt64),
      vector_tensor(std::move(of_choices), {choices.num_rows, choices.row_elements}, kInt64));
}

/// Returns the rows of the fullest rank, where every expert's rows are split between its slots.
/// @param expert_rows  int64 [num_experts]
int64_t fullest_rank(py::handle expert_rows,
                     std::vector<int32_t> slot_rank,
                     std::vector<int32_t> slot_expert,
                     int num_ranks) {
  const TensorView rows = view_tensor(expert_rows);
  std::vector<int64_t> slot_rows(slot_rank.size());
  const layout::ReplicaSlots slots(std::move(slot_rank),
                                   std::move(slot_expert),
                                   num_ranks,
                                   static_cast<int>(rows.num_rows * rows.row_elements));
  slots.split_evenly(ids_of(rows), slot_rows.data());
  return slots.level(slot_rows.data());
}

/// Plans every layer.
/// @param loads    float64 [layers, experts]
/// @param present  int32 [layers, ranks * any number of slots], or None
/// @return int32 [layers, ranks * slots]
py::object plan_placement(py::handle loads, py::handle present, const layout::PlanRules& rules) {
  const TensorView given = view_tensor(loads, "loads");
  const TensorView held = view_tensor(present, "present");
  MOE_CHECK(given.element_bytes == 8 && given.row_elements == rules.num_experts,
            "loads must be float64 [layers, ",
            rules.num_experts,
            "], got rows of ",
            given.row_bytes(),
            " bytes");
  MOE_CHECK(
      present.is_none() || (held.element_bytes == 4 && held.num_rows == given.num_rows &&
                            held.row_elements > 0 && held.row_elements % rules.num_ranks == 0),
      "present must be int32 [",
      given.num_rows,
      ", a multiple of ",
      rules.num_ranks,
      "], got [",
      held.num_rows,
      ", ",
      held.row_elements,
      "] of ",
      held.element_bytes,
      " bytes each");
  const auto num_slots = static_cast<size_t>(int64_t{rules.num_ranks} * rules.num_slots);
  const auto num_experts = static_cast<size_t>(rules.num_experts);
  const auto num_held = static_cast<size_t>(present.is_none() ? 0 : held.row_elements);
  std::vector<int32_t> slots(static_cast<size_t>(given.num_rows) * num_slots);
  {
    const py::gil_scoped_release no_gil;
    const layout::PlacementPlanner planner(rules);
    for (size_t i = 0; i < static_cast<size_t>(given.num_rows); ++i) {
      const auto* const layer_loads = reinterpret_cast<const double*>(given.data);
      const auto* const layer_present = reinterpret_cast<const int32_t*>(held.data);
      const layout::SlotExperts plan = planner.plan({layer_loads + i * num_experts, num_experts},
                                                    {layer_present + i * num_held, num_held});
      std::copy(plan.begin(), plan.end(), slots.begin() + static_cast<ptrdiff_t>(i * num_slots));
    }
  }
  return vector_tensor(std::move(slots), {given.num_rows, static_cast<int64_t>(num_slots)}, kInt32);
}

layout::ScaleMap scale_map(int row_layout,
                           int64_t num_rows,
                           int64_t num_rows_per_expert,
                           int64_t num_scales,
                           int64_t scale_bytes,
                           bool is_column_major) {
  return layout::ScaleMap::make(static_cast<layout::RowLayout>(row_layout),
                                num_rows,
                                num_rows_per_expert,
                                num_scales,
                                scale_bytes,
                                is_column_major);
}

/// Binds sizes of what every rank has once: control rows, workspaces, memory between nodes.
void bind_region_sizes(py::module_& sizes) {
  sizes.attr("SLOT_ROW_BITS") = layout::Slot::kRowBits;
  sizes.attr("ROW_HEADER_BYTES") = sizeof(layout::Row);
  sizes.attr("CONTROL_BLOCK_BYTES") = sizeof(layout::ControlBlock);
  sizes.def("num_counts", &layout::Row::num_counts, Signature("num_ranks, num_experts"));
  sizes.def("row_stride", &layout::Row::stride, Signature("num_ranks, num_experts"));
  sizes.def(
      "workspace_bytes", &layout::Workspace::bytes, Signature("num_ranks, num_experts, depth"));
  sizes.def("token_sets_bytes",
            &layout::most_set_bytes,
            Signature("*, num_ranks, num_shared, num_tokens, num_topk"));
  sizes.def(
      "rail_region_bytes",
      [](int num_ranks,
         int num_local_ranks,
         int num_experts,
         int depth,
         int64_t num_max_tokens,
         int64_t num_max_topk,
         int64_t max_row_bytes,
         bool node_reduction,
         int num_max_shared) {
        return layout::rail_region(
                   {num_max_tokens, num_max_topk, max_row_bytes, node_reduction, num_max_shared},
                   {num_ranks, num_local_ranks},
                   num_experts,
                   depth)
            .bytes;
      },
      Signature("*, num_ranks, num_local_ranks, num_experts, depth, num_max_tokens, "
                "num_max_topk, max_row_bytes, node_reduction, num_max_shared"));
}

/// Binds sizes of windows, which hold the rows of an operation, and of their parts.
void bind_window_sizes(py::module_& sizes) {
  sizes.def(
      "rank_sums_bytes",
      [](int64_t num_tokens,
         int64_t num_slots,
         int64_t number_bytes,
         int64_t num_rows,
         int64_t row_bytes) {
        return layout::RankSumsMap::make(num_tokens, num_slots, number_bytes)
            .bytes(num_rows, row_bytes);
      },
      Signature("*, num_tokens, num_slots, number_bytes, num_rows, row_bytes"));
  sizes.def("window_bytes", &heap::WindowAllocator::rounded_bytes, py::arg("num_bytes"));
  sizes.def(
      "scale_region_bytes",
      [](int row_layout,
         int64_t num_rows,
         int64_t num_rows_per_expert,
         int64_t num_scales,
         int64_t scale_bytes,
         bool is_column_major) {
        return scale_map(row_layout,
                         num_rows,
                         num_rows_per_expert,
                         num_scales,
                         scale_bytes,
                         is_column_major)
            .bytes(num_rows);
      },
      Signature("layout, num_rows, num_rows_per_expert, num_scales, scale_bytes, "
                "is_column_major"));
  sizes.def(
      "receive_window_bytes",
      [](int row_layout,
         int64_t num_rows,
         int64_t num_rows_per_expert,
         int64_t row_bytes,
         int64_t num_scales,
         int64_t scale_bytes,
         bool is_column_major,
         int64_t weight_bytes,
         int64_t num_topk,
         bool spans_devices) {
        const auto order = static_cast<layout::RowLayout>(row_layout);
        const layout::ScaleMap scales = scale_map(
            row_layout, num_rows, num_rows_per_expert, num_scales, scale_bytes, is_column_major);
        return layout::ReceiveWindow::make(order,
                                           num_rows,
                                           row_bytes,
                                           scales,
                                           weight_bytes,
                                           num_topk,
                                           order == layout::RowLayout::kRankMajor,
                                           spans_devices && order != layout::RowLayout::kRankMajor)
            .bytes;
      },
      Signature("layout, num_rows, num_rows_per_expert, row_bytes, num_scales, "
                "scale_bytes, is_column_major, weight_bytes, num_topk, spans_devices"));
}

/// Binds formats as Python knows them; moe_comm/tensors/quantization.py computes the same sizes of
/// rows where hidden is symbolic.
void bind_wire_formats(py::module_& module) {
  using layout::ScaleRecord;
  using layout::WireFormat;
  py::class_<ScaleRecord>(module, "ScaleRecord", py::module_local())
      .def_readonly("name", &ScaleRecord::name)
      .def_readonly("dtype", &ScaleRecord::dtype)
      .def_readonly("bytes", &ScaleRecord::bytes);
  py::class_<WireFormat>(module, "WireFormat", py::module_local())
      .def_readonly("name", &WireFormat::name)
      .def_readonly("dtype", &WireFormat::dtype)
      .def_readonly("element_bits", &WireFormat::element_bits)
      .def_readonly("block", &WireFormat::block)
      .def_readonly("least_amax", &WireFormat::least_amax)
      .def_readonly("packs_exponents", &WireFormat::packs_exponents)
      .def_property_readonly("scale_formats",
                             [](const WireFormat& self) {
                               py::list numbers;
                               for (const layout::ScaleFormat scale : self.scale_formats)
                                 numbers.append(static_cast<int>(scale));
                               return py::tuple(numbers);
                             })
      .def("is_e4m3",
           [](const WireFormat& self, int scale) {
             return self.is_e4m3(static_cast<layout::ScaleFormat>(scale));
           })
      .def("row_bytes", &WireFormat::row_bytes)
      .def("scale_bytes",
           [](const WireFormat& self, int scale) {
             return self.scale_bytes(static_cast<layout::ScaleFormat>(scale));
           })
      .def("num_scales", [](const WireFormat& self, int64_t hidden, int scale) {
        return self.num_scales(hidden, static_cast<layout::ScaleFormat>(scale));
      });
  module.attr("SCALE_FORMATS") = py::tuple(py::cast(layout::scale_table()));
  module.attr("WIRE_FORMATS") = py::tuple(py::cast(layout::format_table()));
}

}  // namespace

void bind_layout(py::module_& parent) {
  py::module_ module = parent.def_submodule(
      "layout", "Counts, capacities, slots, offsets and sizes: csrc/layout, on host tensors.");
  py::class_<Placement>(module, "Placement", py::module_local())
      .def(py::init(&make_placement), Signature("expert_rank, num_ranks"))
      .def_readonly("num_ranks", &Placement::num_ranks)
      .def_readonly("num_experts", &Placement::num_experts)
      .def("local_expert_idx",
           [](const Placement& self) {
             return vector_tensor(self.local_expert_idx, {self.num_experts}, kInt32);
           })
      .def("num_local_experts", [](const Placement& self, int rank_idx) {
        return self.local_experts.at(static_cast<size_t>(rank_idx)).size();
      });
  py::class_<Arrangement>(module, "Arrangement", py::module_local())
      .def(py::init([](int row_layout, int64_t expert_alignment, int64_t num_places_per_expert) {
             return Arrangement{static_cast<layout::RowLayout>(row_layout),
                                expert_alignment,
                                num_places_per_expert};
           }),
           Signature("layout, expert_alignment=1, num_places_per_expert=0"))
      .def_readonly("num_places_per_expert", &Arrangement::rows_per_expert);
  py::class_<Replicas, std::shared_ptr<Replicas>>(module, "Replicas", py::module_local())
      .def(py::init(&make_replicas),
           Signature("slot_expert, num_experts, num_local_ranks, placement"));
  module.def(
      "fullest_rank", &fullest_rank, Signature("expert_rows, slot_rank, slot_expert, num_ranks"));
  module.def(
      "plan_placement",
      [](py::handle loads,
         py::handle present,
         int num_experts,
         int num_ranks,
         int num_slots,
         int ranks_per_node,
         double move_price,
         double scatter,
         int num_kept) {
        return plan_placement(
            loads,
            present,
            {num_experts, num_ranks, num_slots, ranks_per_node, move_price, scatter, num_kept});
      },
      Signature("loads, present, *, num_experts, num_ranks, num_slots, "
                "ranks_per_node, move_price, scatter, num_kept"));
  module.def("count_choices", &count_choices, Signature("placement, topk_idx, row, replicas=None"));
  module.def("share_rows", &share_rows);
  module.def("choose_slots", &choose_slots);
  module.def("check_overflow", &check_overflow);
  module.def("keep_rows", &keep_rows);
  module.def("num_required_rows", &num_required_rows);
  module.def("received_rows", &received_rows);
  module.def("assign_slots", &assign_slots);
  module.def("row_streams", &row_streams);
  bind_region_sizes(module);
  bind_window_sizes(module);
  bind_wire_formats(module);
}

}  // namespace moe::bindings
