#include "schedules/kernel_program.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

namespace moe::simt::checker {

namespace {

/// Program of all ranks, one operation after another; drawn before the schedule.
struct Program {
  Step step;
  Step cached;
  bool has_combine = true;
  bool has_cached = true;
  KernelWorld::Outputs outputs;
  KernelWorld::Outputs cached_outputs;
};

}  // namespace

KernelCase with_replicas(Run& run, KernelCase shape) {
  Random& random = run.random();
  shape.num_logical_experts =
      static_cast<int>(random.between(1, std::max(1, shape.num_experts - 1)));
  for (int slot = 0; slot < shape.num_experts; ++slot) {
    const auto drawn =
        static_cast<int32_t>(random.below(static_cast<uint32_t>(shape.num_logical_experts)));
    const auto on_rank = [&](int other) {
      return other * shape.num_ranks / shape.num_experts ==
                 slot * shape.num_ranks / shape.num_experts &&
             shape.slot_expert[static_cast<size_t>(other)] == drawn;
    };
    bool is_taken = false;
    for (int other = 0; other < slot; ++other)
      is_taken = is_taken || on_rank(other);
    shape.slot_expert.push_back(slot < shape.num_logical_experts ? slot : is_taken ? -1 : drawn);
  }
  return shape;
}

void run_operations(Run& run, const KernelCase& shape, int num_rounds, bool has_dispatches_only) {
  KernelWorld world(run, shape);
  std::vector<std::unique_ptr<Program>> programs;
  for (int i = 0; i < num_rounds; ++i) {
    auto program = std::make_unique<Program>();
    program->step = draw_step(shape, world.placement(), &run.random());
    const bool is_ok =
        program->step.status == kernels::OperationStatus::kOk && !has_dispatches_only;
    program->has_combine = is_ok;
    program->has_cached = is_ok && !shape.with_masks;
    if (program->has_cached) {
      program->cached = draw_cached_step(shape, world.placement(), program->step, &run.random());
      program->cached_outputs = world.draw_outputs(program->cached);
    }
    if (program->has_combine)
      program->outputs = world.draw_outputs(program->step);
    programs.push_back(std::move(program));
  }
  const bool is_weighted = !shape.is_by_rank();
  for (int rank_idx = 0; rank_idx < shape.num_ranks; ++rank_idx) {
    const int64_t num_late_steps = run.random().chance(1, 2) ? run.random().below(400) : 0;
    run.start_host(rank_idx, "launches", [&, rank_idx, num_late_steps] {
      for (int64_t i = 0; i < num_late_steps; ++i)
        run.scheduler().yield();
      for (const auto& program : programs) {
        const auto handle = world.dispatch(rank_idx, program->step);
        if (program->has_combine)
          world.combine(
              rank_idx, program->step, handle, program->outputs, false, shape.with_weights);
        if (!program->has_cached)
          continue;
        world.dispatch_cached(rank_idx, program->cached, handle);
        world.combine(
            rank_idx, program->cached, handle, program->cached_outputs, is_weighted, false);
      }
    });
  }
  world.run_all();
  if (!run.is_clean())
    return;
  const KernelWorld::Traffic& traffic = world.expected_traffic();
  const auto expect_bytes = [&](const char* what, int64_t got, int64_t expected) {
    if (got != expected)
      run.report(Kind::kResult,
                 std::string(what) + ": " + std::to_string(expected) + " bytes by formula, got " +
                     std::to_string(got));
  };
  expect_bytes("sums stored", run.guest().bytes_stored("sums"), traffic.sums_stored);
  expect_bytes("windows stored", run.guest().bytes_stored("window "), traffic.window_stored);
  expect_bytes("windows loaded", run.guest().bytes_loaded("window "), traffic.window_loaded);
  expect_bytes("windows stored from other devices",
               run.guest().bytes_stored_across("window "),
               traffic.window_stored_across);
  expect_bytes("x loaded", run.guest().bytes_loaded("x"), traffic.x_loaded);
  int64_t put_bytes = 0;
  for (int rank_idx = 0; rank_idx < shape.num_ranks; ++rank_idx)
    put_bytes += run.machine().puts_of(rank_idx).payload_bytes;
  // A message in place of counts makes a row longer.
  if (!shape.has_bad_choice)
    expect_bytes("put to other nodes", put_bytes, traffic.put);
  if (shape.layout == layout::RowLayout::kLowLatency && shape.has_origins())
    expect_bytes("numbers of rows loaded",
                 run.guest().bytes_loaded("num_tokens_per_expert"),
                 traffic.counts_loaded);
  expect_bytes("rows pulled", run.guest().bytes_loaded("expert output"), traffic.outputs_loaded);
  if (shape.num_local_ranks > 0)
    return;
  expect_bytes("rows pulled from other devices",
               run.guest().bytes_loaded_across("expert output"),
               traffic.outputs_loaded_across);
  expect_bytes("sums of rows pulled from other devices",
               run.guest().bytes_loaded_across("rank sums"),
               traffic.sums_loaded_across);
}

void run_host_reads(Run& run, const KernelCase& shape) {
  KernelWorld world(run, shape);
  const bool has_memory = run.random().chance(3, 4);
  std::vector<Step> steps;
  std::vector<int64_t> first_rows;
  std::vector<uint8_t> sends_ahead;
  for (int i = 0; i < 2; ++i) {
    steps.push_back(draw_step(shape, world.placement(), &run.random()));
    for (int rank_idx = 0; rank_idx < shape.num_ranks; ++rank_idx) {
      first_rows.push_back(run.random().chance(1, 2) ? 2 : 30);
      // Within a node the host launches what sends rows before it has read their counts.
      sends_ahead.push_back(shape.num_local_ranks == 0 && run.random().chance(3, 4) ? 1 : 0);
    }
  }
  for (int rank_idx = 0; rank_idx < shape.num_ranks; ++rank_idx)
    run.start_host(rank_idx, "dispatches", [&, rank_idx] {
      for (size_t i = 0; i < steps.size(); ++i) {
        const size_t idx = i * static_cast<size_t>(shape.num_ranks) + static_cast<size_t>(rank_idx);
        world.dispatch_by_host(
            rank_idx, steps[i], first_rows[idx], has_memory, sends_ahead[idx] != 0);
      }
    });
  world.run_all();
}

namespace {

/// A thread of the host aborts all ranks at some moment.
void start_abort(Run& run, KernelWorld& world, int rank_idx) {
  run.start_host(rank_idx, "aborts", [&] {
    const uint32_t num_steps = run.random().below(3000);
    for (uint32_t i = 0; i < num_steps; ++i)
      run.scheduler().yield();
    for (int i = 0; i < world.shape().num_ranks; ++i)
      world.abort(i);
  });
}

}  // namespace

void run_to_an_early_end_of_sums(Run& run, const KernelCase& shape, bool is_aborted) {
  KernelWorld world(run, shape);
  const int missing = static_cast<int>(run.random().below(2));
  const auto waiting = static_cast<size_t>(1 - missing);
  // Whoever has rows on the missing rank waits for their sums.
  const auto is_served_by_missing = [&](const Step& step) {
    const std::vector<int64_t>& slots = step.dispatched[waiting].slots;
    return std::any_of(slots.begin(), slots.end(), [&](int64_t slot) {
      return slot != layout::Slot::kNone && layout::Slot::rank_idx(slot) == missing;
    });
  };
  Step step = draw_step(shape, world.placement(), &run.random());
  for (int i = 0; i < 20 && !is_served_by_missing(step); ++i)
    step = draw_step(shape, world.placement(), &run.random());
  if (!is_served_by_missing(step))
    return;  // a rank without experts
  const KernelWorld::Outputs outputs = world.draw_outputs(step);
  for (int rank_idx = 0; rank_idx < shape.num_ranks; ++rank_idx)
    run.start_host(rank_idx, "launches", [&, rank_idx] {
      const auto handle = world.dispatch_unchecked(rank_idx, step);
      world.launch_combine(
          rank_idx, step, handle, outputs, run.random().chance(1, 2), false, rank_idx == missing);
    });
  if (is_aborted)
    start_abort(run, world, missing);
  world.run_until_left(is_aborted ? kernels::Cause::kAborted : kernels::Cause::kTimedOut, missing);
}

void run_to_an_early_end(Run& run, const KernelCase& shape, bool is_aborted) {
  KernelWorld world(run, shape);
  const int missing = static_cast<int>(run.random().below(static_cast<uint32_t>(shape.num_ranks)));
  const auto num_complete = static_cast<int64_t>(run.random().below(2));
  std::vector<Step> steps;
  for (int i = 0; i < 4; ++i)
    steps.push_back(draw_step(shape, world.placement(), &run.random()));
  for (int rank_idx = 0; rank_idx < shape.num_ranks; ++rank_idx)
    run.start_host(rank_idx, "launches", [&, rank_idx] {
      for (size_t i = 0; i < steps.size(); ++i)
        if (rank_idx != missing || static_cast<int64_t>(i) < num_complete)
          world.dispatch_unchecked(rank_idx, steps[i]);
    });
  if (is_aborted)
    start_abort(run, world, missing);
  world.run_until_left(is_aborted ? kernels::Cause::kAborted : kernels::Cause::kTimedOut, missing);
}

}  // namespace moe::simt::checker
