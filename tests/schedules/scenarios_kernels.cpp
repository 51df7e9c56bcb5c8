// Operations of the kernels, device to device, in small cases of every kind.

#include <algorithm>
#include <memory>
#include <vector>

#include "schedules/kernel_program.h"

namespace moe::simt::checker {
namespace {

using layout::OnOverflow;
using layout::RowLayout;

/// A shape that differs from seed to seed in everything that a kind of case leaves open.
KernelCase draw_case(Run& run, KernelCase shape) {
  Random& random = run.random();
  shape.num_blocks = static_cast<int>(random.between(1, 2));
  shape.num_threads = random.chance(1, 4) ? 64 : 32;
  shape.num_ranks =
      static_cast<int>(random.chance(1, 8) ? random.between(1, 4) : random.between(2, 3));
  shape.num_experts = static_cast<int>(random.between(shape.num_ranks, 2 * shape.num_ranks));
  shape.num_max_tokens = random.between(2, 5);
  return shape;
}

KernelCase expert_major(Run& run) {
  KernelCase shape;
  shape.layout = RowLayout::kExpertMajor;
  shape.expert_alignment = run.random().chance(1, 2) ? 4 : 1;
  shape.hidden = run.random().chance(1, 2) ? 8 : 24;
  shape.num_topk = 3;
  return draw_case(run, shape);
}

MOE_SCENARIO(expert_major, "dispatch, combine, cached dispatch, combine; rows by bulk copy") {
  run_operations(run, expert_major(run), 1);
}

MOE_SCENARIO(expert_major_plain, "the same by loads and stores, with weights") {
  KernelCase shape = expert_major(run);
  shape.is_plain = true;
  shape.with_weights = true;
  shape.dtype = run.random().chance(1, 2) ? DType::kFloat32 : DType::kFloat16;
  run_operations(run, shape, 1);
}

MOE_SCENARIO(expert_major_epochs, "three rounds, so that windows and ring entries are used again") {
  KernelCase shape = expert_major(run);
  shape.num_ranks = 2;
  shape.num_threads = 32;
  shape.num_max_tokens = 3;
  run_operations(run, shape, 3);
}

MOE_SCENARIO(dispatches, "one dispatch behind the other, into windows that were written over") {
  KernelCase shape = expert_major(run);
  shape.num_threads = 32;
  shape.num_max_tokens = 3;
  run_operations(run, shape, 4, true);
}

MOE_SCENARIO(expert_major_odd, "rows of bytes that no wide unit divides") {
  KernelCase shape = expert_major(run);
  shape.hidden = 9;
  shape.with_weights = true;
  run_operations(run, shape, 1);
}

MOE_SCENARIO(rank_major, "one row per token and rank, with weights and local expert ids") {
  KernelCase shape;
  shape.layout = RowLayout::kRankMajor;
  shape.num_topk = 3;
  shape.hidden = 16;
  shape.with_weights = true;
  shape.is_plain = run.random().chance(1, 4);
  run_operations(run, draw_case(run, shape), 1);
}

KernelCase low_latency_rows(Run& run) {
  KernelCase shape;
  shape.layout = RowLayout::kLowLatency;
  shape.hidden = 16;
  shape.with_masks = true;
  shape = draw_case(run, shape);
  shape.num_max_tokens = 3;
  return shape;
}

MOE_SCENARIO(low_latency, "places that follow from shapes alone, ranks masked now and then") {
  run_operations(run, low_latency_rows(run), 2);
}

/// @param name  of a format, whose default scale factors it has
KernelCase quantized(Run& run, std::string_view name) {
  KernelCase shape;
  shape.is_quantized = true;
  shape.dtype = run.random().chance(1, 2) ? DType::kBFloat16 : DType::kFloat32;
  shape.hidden = run.random().chance(1, 2) ? 32 : 144;
  shape.is_column_major = run.random().chance(1, 2);
  shape.expert_alignment = 2;
  shape.quantization = quantization_named(name, shape.dtype, shape.hidden);
  shape.is_plain = run.random().chance(1, 4);
  shape = draw_case(run, shape);
  shape.num_max_tokens = 3;
  return shape;
}

MOE_SCENARIO(fp8_block128, "rows quantized in shared memory, float32 scale factors") {
  run_operations(run, quantized(run, "FP8_BLOCK128"), 1);
}

MOE_SCENARIO(mxfp8, "rows quantized in shared memory, scale factors of one byte") {
  run_operations(run, quantized(run, "MXFP8"), 1);
}

/// @p shape with several warps to a row.
KernelCase share_rows(Run& run, KernelCase shape) {
  shape.num_blocks = 2;
  shape.num_threads = 64;
  shape.num_parts = static_cast<int>(run.random().between(2, 4));
  shape.num_ranks = 2;
  shape.num_experts = 4;
  shape.num_max_tokens = 3;
  shape.is_plain = run.random().chance(1, 4);
  return shape;
}

MOE_SCENARIO(shared_rows, "several warps to a row, on one device or two") {
  KernelCase shape = expert_major(run);
  shape.with_weights = true;
  if (run.random().chance(1, 4))
    shape.layout = RowLayout::kRankMajor;
  else if (run.random().chance(1, 2))
    shape.num_devices = 2;
  run_operations(run, share_rows(run, shape), 1);
}

MOE_SCENARIO(shared_quantized_rows, "each with the scale factors of its part") {
  const bool is_mx = run.random().chance(1, 2);
  KernelCase shape = quantized(run, is_mx ? "MXFP8" : "FP8_BLOCK128");
  shape.hidden = 528;
  shape.quantization.hidden = shape.hidden;
  shape.num_topk = 2;
  if (run.random().chance(1, 4))
    shape.num_devices = 2;
  shape = share_rows(run, shape);
  shape.num_max_tokens = 2;
  run_operations(run, shape, 1);
}

/// @p shape with limits of experts, of ranks, or of both.
KernelCase with_drops(Run& run, KernelCase shape) {
  shape.rule.on_overflow = OnOverflow::kDrop;
  if (run.random().chance(1, 2))
    shape.rule.expert_capacity = run.random().between(0, 3);
  shape.has_fixed_rows = run.random().chance(1, 2);
  return shape;
}

MOE_SCENARIO(drops, "rows beyond an expert's capacity or a rank's fixed rows are dropped") {
  run_operations(run, with_drops(run, expert_major(run)), 2);
}

MOE_SCENARIO(replicas, "counts of logical experts say which replica takes a row") {
  KernelCase shape = expert_major(run);
  shape.with_weights = run.random().chance(1, 2);
  shape.has_bad_choice = run.random().chance(1, 8);
  if (run.random().chance(1, 4))
    shape = with_drops(run, shape);
  run_operations(run, with_replicas(run, shape), 2);
}

MOE_SCENARIO(replicas_shared_rows, "the same with several warps to a row, on one device or two") {
  KernelCase shape = share_rows(run, expert_major(run));
  shape.num_devices = static_cast<int>(run.random().between(1, 2));
  run_operations(run, with_replicas(run, shape), 1);
}

MOE_SCENARIO(replicas_rank_major,
             "ranks read what others chose, where a token has one row a rank") {
  KernelCase shape = expert_major(run);
  shape.layout = RowLayout::kRankMajor;
  shape.with_weights = run.random().chance(1, 2);
  shape.has_bad_choice = run.random().chance(1, 8);
  if (run.random().chance(1, 4))
    shape.num_max_tokens = 70;  // more than a word of a set has bits
  run_operations(run, with_replicas(run, shape), 2);
}

MOE_SCENARIO(replicas_rank_major_epochs, "the same, so that places of sets are used again") {
  KernelCase shape = expert_major(run);
  shape.layout = RowLayout::kRankMajor;
  shape.num_max_tokens = 3;
  run_operations(run, with_replicas(run, shape), 6, true);
}

MOE_SCENARIO(replicas_rank_major_shared_rows, "the same with several warps to a row") {
  KernelCase shape = expert_major(run);
  shape.layout = RowLayout::kRankMajor;
  shape.with_weights = true;
  run_operations(run, with_replicas(run, share_rows(run, shape)), 1);
}

MOE_SCENARIO(replicas_low_latency, "the same where ranks are masked now and then") {
  run_operations(run, with_replicas(run, low_latency_rows(run)), 2);
}

MOE_SCENARIO(raises, "more rows than a capacity that raises: nobody sends, the next goes on") {
  KernelCase shape = expert_major(run);
  shape.rule.on_overflow = OnOverflow::kRaise;
  shape.rule.expert_capacity = run.random().between(1, 4);
  run_operations(run, shape, 3);
}

MOE_SCENARIO(limits, "as many rows as limits allow, which is no overflow, or one more") {
  KernelCase shape = expert_major(run);
  constexpr OnOverflow kAll[] = {
      OnOverflow::kRaise, OnOverflow::kRaise, OnOverflow::kDrop, OnOverflow::kGrow};
  shape.rule.on_overflow = kAll[run.random().below(4)];
  shape.has_fixed_rows = shape.rule.on_overflow == OnOverflow::kGrow || run.random().chance(1, 2);
  if (!shape.has_fixed_rows ||
      (shape.rule.on_overflow == OnOverflow::kDrop && run.random().chance(1, 2)))
    shape.rule.expert_capacity = run.random().between(1, 3);
  shape.is_at_limits = true;
  run_operations(run, shape, 2);
}

MOE_SCENARIO(bad_choice, "one rank has an id that is none: nobody sends, the next goes on") {
  KernelCase shape = expert_major(run);
  shape.has_bad_choice = true;
  run_operations(run, shape, 4);
}

/// @p shape with ranks on 2 devices, in turn: some pairs of 3 ranks share one.
KernelCase on_devices(Run& run, KernelCase shape) {
  shape.num_devices = 2;
  shape.num_ranks = run.random().chance(1, 4) ? 2 : 3;
  shape.num_experts = 2 * shape.num_ranks;
  shape.num_topk = 3;
  shape.num_max_tokens = 3;
  return shape;
}

MOE_SCENARIO(devices_expert_major,
             "a row crosses once to a rank of another device, which copies it") {
  KernelCase shape = on_devices(run, expert_major(run));
  shape.is_plain = run.random().chance(1, 4);
  shape.with_weights = run.random().chance(1, 2);
  run_operations(run, shape, 1);
}

MOE_SCENARIO(devices_epochs, "the same in windows that are used again") {
  KernelCase shape = on_devices(run, expert_major(run));
  shape.num_ranks = 2;
  shape.num_threads = 32;
  run_operations(run, shape, 3, true);
}

MOE_SCENARIO(devices_many_choices, "the same with more slots of a token than a warp has lanes") {
  KernelCase shape = on_devices(run, expert_major(run));
  shape.num_ranks = 2;
  shape.num_experts = 36;
  shape.num_topk = 34;
  shape.num_max_tokens = 2;
  run_operations(run, shape, 1);
}

MOE_SCENARIO(devices_low_latency, "the same where most rows of a window are nobody's") {
  KernelCase shape;
  shape.layout = RowLayout::kLowLatency;
  shape.with_masks = true;
  run_operations(run, on_devices(run, draw_case(run, shape)), 1);
}

MOE_SCENARIO(devices_low_latency_wide, "the same with many more places than are looked at") {
  KernelCase shape;
  shape.layout = RowLayout::kLowLatency;
  shape.hidden = 8;
  shape.num_spare_tokens = 100;
  shape = on_devices(run, draw_case(run, shape));
  shape.num_ranks = 2;
  shape.num_threads = 32;
  run_operations(run, shape, 1, true);
}

MOE_SCENARIO(devices_quantized, "the same with scale factors, which are copied with their row") {
  const bool is_mx = run.random().chance(1, 2);
  run_operations(run, on_devices(run, quantized(run, is_mx ? "MXFP8" : "FP8_BLOCK128")), 1);
}

MOE_SCENARIO(devices_drops, "the same where the first slots of tokens are dropped") {
  run_operations(run, with_drops(run, on_devices(run, expert_major(run))), 1);
}

/// @p shape whose ranks add first, and offer the rows that they have in their heap or have none
/// there.
KernelCase with_rank_reduction(Run& run, KernelCase shape) {
  shape.rank_reduction = true;
  shape.offers_rows = run.random().chance(1, 2);
  return shape;
}

MOE_SCENARIO(rank_reduction, "ranks add the rows of a token before their sum is pulled") {
  KernelCase shape = with_rank_reduction(run, expert_major(run));
  shape.is_plain = run.random().chance(1, 4);
  shape.with_weights = run.random().chance(1, 2);
  constexpr DType kAll[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};
  shape.dtype = kAll[run.random().below(3)];
  run_operations(run, shape, 1);
}

MOE_SCENARIO(rank_reduction_epochs, "the same in memory of rings and flags that is used again") {
  KernelCase shape = with_rank_reduction(run, expert_major(run));
  shape.num_ranks = 2;
  shape.num_threads = 32;
  shape.num_max_tokens = 3;
  run_operations(run, shape, 3);
}

MOE_SCENARIO(devices_rank_reduction, "the same on two devices, between which a sum crosses once") {
  KernelCase shape = with_rank_reduction(run, on_devices(run, expert_major(run)));
  if (run.random().chance(1, 4))
    shape = with_drops(run, shape);
  run_operations(run, shape, 1);
}

MOE_SCENARIO(rank_reduction_low_latency, "the same where most rows of a window are nobody's") {
  KernelCase shape = with_rank_reduction(run, {});
  shape.layout = RowLayout::kLowLatency;
  shape.with_masks = true;
  shape.hidden = run.random().chance(1, 4) ? 9 : 16;
  run_operations(run, on_devices(run, draw_case(run, shape)), 1);
}

MOE_SCENARIO(rank_reduction_many_choices, "the same with more slots of a token than lanes") {
  KernelCase shape = with_rank_reduction(run, expert_major(run));
  shape.num_ranks = 2;
  shape.num_experts = 36;
  shape.num_topk = 34;
  shape.num_max_tokens = 2;
  shape.hidden = 8;
  run_operations(run, shape, 1);
}

MOE_SCENARIO(devices_host_read, "the same where hosts wait for sizes and offer again") {
  run_host_reads(run, on_devices(run, expert_major(run)));
}

MOE_SCENARIO(host_read, "hosts wait for sizes; ranks that are short make second offers") {
  run_host_reads(run, expert_major(run));
}

KernelCase two_or_three_ranks(Run& run) {
  KernelCase shape = expert_major(run);
  shape.num_ranks = static_cast<int>(run.random().between(2, 3));
  shape.num_experts = 2 * shape.num_ranks;
  return shape;
}

MOE_SCENARIO(never_comes, "a rank stops taking part: the others name it and leave") {
  run_to_an_early_end(run, two_or_three_ranks(run), false);
}

MOE_SCENARIO(devices_early_end,
             "the same where rows are copied by blocks that wait, each, for all") {
  KernelCase shape = on_devices(run, expert_major(run));
  run_to_an_early_end(run, shape, run.random().chance(1, 2));
}

MOE_SCENARIO(rank_reduction_early_end,
             "a rank never adds: who pulls its sums names it and leaves") {
  KernelCase shape = with_rank_reduction(run, expert_major(run));
  shape.num_ranks = 2;
  shape.num_experts = 4;
  run_to_an_early_end_of_sums(run, shape, run.random().chance(1, 2));
}

MOE_SCENARIO(aborted, "the communicator is aborted at some moment: everybody leaves") {
  run_to_an_early_end(run, two_or_three_ranks(run), true);
}

}  // namespace
}  // namespace moe::simt::checker
