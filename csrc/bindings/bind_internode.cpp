#include "bindings/bindings.h"
#include "bindings/shared/signature.h"
#include "layout/internode.h"
#include "layout/internode_combine.h"

namespace py = pybind11;

namespace moe::bindings {

void bind_internode(py::module_& module) {
  auto formulas = module.def_submodule(
      "internode",
      "Bytes that operations send from one rank to one other node; csrc/ops/README.md.");
  formulas.def(
      "dispatch_bytes",
      [](int32_t row_layout,
         int64_t row_bytes,
         int64_t scale_bytes,
         int64_t weight_bytes,
         int64_t num_topk,
         int num_local_ranks,
         bool with_ids,
         int64_t num_rows,
         int num_nodes,
         bool checks_messages) {
        const auto row = layout::InternodeRow::make(static_cast<layout::RowLayout>(row_layout),
                                                    row_bytes,
                                                    scale_bytes,
                                                    weight_bytes,
                                                    num_topk,
                                                    num_local_ranks,
                                                    with_ids);
        return layout::internode_dispatch_bytes(row, num_rows, num_nodes, checks_messages);
      },
      Signature("*, layout, row_bytes, scale_bytes, weight_bytes, num_topk, "
                "num_local_ranks, with_ids, num_rows, num_nodes, "
                "checks_messages=False"));
  formulas.def(
      "pull_checksum_bytes",
      [](int64_t num_wanted_rows,
         int64_t num_supplied,
         bool are_sums,
         int64_t row_bytes,
         int64_t num_slots,
         int num_nodes) {
        const layout::PulledRow row{row_bytes, 0, 0};
        return layout::internode_pull_checksum_bytes(
            num_wanted_rows,
            are_sums ? layout::PullChunks::of_sums(row, num_supplied, num_slots, num_nodes)
                     : layout::PullChunks::make(row, num_supplied, num_slots, num_nodes));
      },
      Signature("*, num_wanted_rows, num_supplied, are_sums, row_bytes, num_slots, "
                "num_nodes"));
  formulas.def(
      "reduction_bytes",
      [](int64_t num_wanted_rows,
         int64_t applied_bytes,
         int64_t num_supplied_sums,
         int64_t row_bytes) {
        return layout::internode_reduction_bytes(
            {num_wanted_rows, applied_bytes}, {row_bytes, 0, 0}, num_supplied_sums, 0);
      },
      Signature("*, num_wanted_rows, applied_bytes, num_supplied_sums, row_bytes"));
  formulas.def(
      "combine_bytes",
      [](int64_t num_wanted_rows,
         int64_t num_supplied_rows,
         int64_t row_bytes,
         int64_t weight_bytes,
         int64_t num_weights) {
        return layout::internode_combine_bytes(
            num_wanted_rows, {row_bytes, weight_bytes, num_weights}, num_supplied_rows);
      },
      Signature("*, num_wanted_rows, num_supplied_rows, row_bytes, weight_bytes, "
                "num_weights"));
}

}  // namespace moe::bindings
