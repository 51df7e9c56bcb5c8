// Operations of the kernels across nodes, in small cases of every kind.

#include <string>

#include "schedules/kernel_program.h"

namespace moe::simt::checker {
namespace {

using layout::RowLayout;

/// Nodes, ranks of a node and everything else that a kind of case leaves open.
KernelCase across_nodes(Run& run, KernelCase shape) {
  constexpr int kNodes[][2] = {{2, 1}, {2, 1}, {2, 2}, {3, 1}};
  Random& random = run.random();
  const auto& [num_nodes, num_local_ranks] =
      kNodes[random.below(static_cast<uint32_t>(std::size(kNodes)))];
  shape.num_ranks = num_nodes * num_local_ranks;
  shape.num_local_ranks = num_local_ranks;
  shape.num_blocks = static_cast<int>(random.between(1, 2));
  shape.num_threads = random.chance(1, 4) ? 64 : 32;
  shape.num_experts = static_cast<int>(random.between(shape.num_ranks, 2 * shape.num_ranks));
  shape.num_max_tokens = random.between(2, 5);
  shape.tokens_per_chunk = random.between(1, 3);
  shape.num_reply_places = random.between(1, 3);
  return shape;
}

KernelCase expert_major_across_nodes(Run& run) {
  KernelCase shape;
  shape.expert_alignment = run.random().chance(1, 2) ? 4 : 1;
  shape.hidden = run.random().chance(1, 2) ? 8 : 24;
  shape.num_topk = 3;
  return across_nodes(run, shape);
}

MOE_SCENARIO(internode_expert_major, "dispatch, combine, cached dispatch, combine across nodes") {
  run_operations(run, expert_major_across_nodes(run), 1);
}

MOE_SCENARIO(internode_epochs,
             "three rounds, so that rail regions and ring entries are used again") {
  KernelCase shape = expert_major_across_nodes(run);
  shape.num_threads = 32;
  shape.num_max_tokens = 3;
  run_operations(run, shape, 3);
}

MOE_SCENARIO(internode_dispatches, "one dispatch across nodes behind the other") {
  KernelCase shape = expert_major_across_nodes(run);
  shape.num_threads = 32;
  shape.num_max_tokens = 3;
  run_operations(run, shape, 4, true);
}

MOE_SCENARIO(internode_weights, "rows of odd sizes or wide numbers, with weights") {
  KernelCase shape = expert_major_across_nodes(run);
  shape.hidden = run.random().chance(1, 2) ? 9 : 8;
  shape.with_weights = true;
  shape.dtype = run.random().chance(1, 2) ? DType::kFloat32 : DType::kFloat16;
  run_operations(run, shape, 1);
}

MOE_SCENARIO(internode_rank_major,
             "one row per token and rank across nodes, with weights and ids") {
  KernelCase shape;
  shape.layout = RowLayout::kRankMajor;
  shape.num_topk = 3;
  shape.hidden = 16;
  shape.with_weights = true;
  run_operations(run, across_nodes(run, shape), 1);
}

MOE_SCENARIO(internode_replicas_rank_major,
             "sets of tokens come with the rows of other nodes, and are read on this one") {
  KernelCase shape;
  shape.layout = RowLayout::kRankMajor;
  shape.num_topk = 3;
  shape.with_weights = run.random().chance(1, 2);
  shape = with_replicas(run, across_nodes(run, shape));
  const bool has_many_rounds = run.random().chance(1, 2);
  shape.num_max_tokens = has_many_rounds ? 2 : shape.num_max_tokens;
  run_operations(run, shape, has_many_rounds ? 5 : 1, has_many_rounds);
}

MOE_SCENARIO(internode_low_latency, "places that follow from shapes alone, across nodes") {
  KernelCase shape;
  shape.layout = RowLayout::kLowLatency;
  shape.hidden = 16;
  shape.with_masks = true;
  shape = across_nodes(run, shape);
  shape.num_max_tokens = 3;
  run_operations(run, shape, 2);
}

MOE_SCENARIO(internode_node_sums, "every other node sends one sum for a token") {
  KernelCase shape = expert_major_across_nodes(run);
  shape.node_reduction = true;
  shape.num_topk = run.random().chance(1, 8) ? 40 : 4;  // more slots than a warp has lanes
  if (shape.num_topk > 32)
    shape.num_max_tokens = 2;
  const bool is_wide = run.random().chance(1, 2);
  shape.dtype = is_wide ? DType::kFloat32 : DType::kFloat16;
  shape.hidden = run.random().chance(1, 4) ? 9 : 8;
  shape.with_weights = run.random().chance(1, 2);
  run_operations(run, shape, 1);
}

MOE_SCENARIO(internode_node_sums_epochs, "sums of nodes in three rounds; places are used again") {
  KernelCase shape = expert_major_across_nodes(run);
  shape.node_reduction = true;
  shape.num_threads = 32;
  shape.num_max_tokens = 3;
  shape.num_reply_places = 1;
  run_operations(run, shape, 3);
}

MOE_SCENARIO(internode_node_sums_layouts, "sums of nodes by rank, or in places of shapes alone") {
  KernelCase shape;
  shape.node_reduction = true;
  shape.hidden = 16;
  shape.num_topk = 3;
  const bool is_by_rank = run.random().chance(1, 2);
  shape.layout = is_by_rank ? RowLayout::kRankMajor : RowLayout::kLowLatency;
  shape.with_weights = is_by_rank;
  shape.with_masks = !is_by_rank;
  shape = across_nodes(run, shape);
  shape.num_max_tokens = 3;
  run_operations(run, shape, is_by_rank ? 1 : 2);
}

MOE_SCENARIO(internode_fp8, "rows quantized before they leave the node") {
  KernelCase shape;
  shape.is_quantized = true;
  shape.dtype = run.random().chance(1, 2) ? DType::kBFloat16 : DType::kFloat32;
  shape.hidden = run.random().chance(1, 2) ? 32 : 144;
  shape.is_column_major = run.random().chance(1, 2);
  shape.expert_alignment = 2;
  const bool is_long = run.random().chance(1, 2);
  shape.quantization =
      quantization_named(is_long ? "FP8_BLOCK128" : "MXFP8", shape.dtype, shape.hidden);
  shape = across_nodes(run, shape);
  shape.num_max_tokens = 3;
  run_operations(run, shape, 1);
}

MOE_SCENARIO(internode_drops, "rows beyond capacities are dropped, or raise on all nodes") {
  KernelCase shape = expert_major_across_nodes(run);
  const bool is_dropped = run.random().chance(1, 2);
  shape.rule.on_overflow = is_dropped ? layout::OnOverflow::kDrop : layout::OnOverflow::kRaise;
  shape.rule.expert_capacity = run.random().between(is_dropped ? 0 : 1, 4);
  shape.has_bad_choice = !is_dropped && run.random().chance(1, 2);
  run_operations(run, shape, 3);
}

MOE_SCENARIO(internode_host_read, "hosts wait for sizes; short ranks make second offers") {
  run_host_reads(run, expert_major_across_nodes(run));
}

/// Bytes of R ranks on N nodes with a row of b bytes (a multiple of 16): every rank gets R rows and
/// R done flags by stores, and sends its own row N - 1 times.
void check_row_bytes(Run& run, const KernelCase& shape) {
  const int64_t num_ranks = shape.num_ranks;
  const int64_t num_nodes = num_ranks / shape.num_local_ranks;
  const int64_t row_bytes =
      round_up(static_cast<int64_t>(sizeof(layout::Row)) +
                   int64_t{4} * layout::Row::num_counts(shape.num_ranks, shape.num_experts),
               16);
  const auto expect_bytes = [&](const char* what, int64_t got, int64_t expected) {
    if (got != expected)
      run.report(Kind::kResult,
                 std::string(what) + " of " + std::to_string(num_ranks) + " ranks on " +
                     std::to_string(num_nodes) + " nodes: " + std::to_string(expected) +
                     " bytes by formula, got " + std::to_string(got));
  };
  // Of a row, 8 bytes are its flag.
  expect_bytes("rows and done flags",
               run.guest().bytes_stored("workspace"),
               num_ranks * num_ranks * (row_bytes + 8));
  for (int rank_idx = 0; rank_idx < shape.num_ranks; ++rank_idx) {
    const auto puts = run.machine().puts_of(rank_idx);
    expect_bytes("rows put", puts.payload_bytes + puts.signal_bytes, (num_nodes - 1) * row_bytes);
  }
}

MOE_SCENARIO(internode_row_bytes, "bytes of rows and flags grow as ranks times experts, up to 16") {
  constexpr int kLayouts[][2] = {{2, 1}, {4, 2}, {4, 4}, {8, 2}, {8, 4}, {12, 4}, {16, 2}, {16, 8}};
  const auto& [num_ranks, num_local_ranks] = kLayouts[run.seed() % std::size(kLayouts)];
  KernelCase shape;
  shape.num_ranks = num_ranks;
  shape.num_local_ranks = num_local_ranks;
  shape.num_experts = num_ranks * static_cast<int>(run.random().between(1, 4));
  shape.num_blocks = 1;
  shape.num_max_tokens = 0;
  KernelWorld world(run, shape);
  const Step step = draw_step(shape, world.placement(), &run.random());
  for (int rank_idx = 0; rank_idx < shape.num_ranks; ++rank_idx)
    run.start_host(rank_idx, "launches", [&, rank_idx] { world.dispatch(rank_idx, step); });
  world.run_all();
  if (run.is_clean())
    check_row_bytes(run, shape);
}

MOE_SCENARIO(internode_never_comes, "a rank stops taking part: all nodes name it and leave") {
  run_to_an_early_end(run, expert_major_across_nodes(run), false);
}

MOE_SCENARIO(internode_aborted, "an abort at some moment across nodes: everybody leaves") {
  run_to_an_early_end(run, expert_major_across_nodes(run), true);
}

}  // namespace
}  // namespace moe::simt::checker
