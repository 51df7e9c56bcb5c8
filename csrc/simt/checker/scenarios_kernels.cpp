// Operations of the kernels, device to device, in small cases of every kind.

#include <memory>
#include <vector>

#include "simt/checker/kernel_world.h"

namespace moe::simt::checker {
namespace {

using layout::OnOverflow;
using layout::RowLayout;

/// What all ranks do, one operation after another; drawn before the schedule.
struct Program {
  Step step;
  Step cached;
  bool has_combine = true;
  bool has_cached = true;
  KernelWorld::Outputs outputs;
  KernelWorld::Outputs cached_outputs;
};

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

/// Dispatch and combine, then the same again with the handle: several epochs in a ring of two.
void run_operations(Run& run,
                    const KernelCase& shape,
                    int num_rounds,
                    bool has_dispatches_only = false) {
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
  expect_bytes("x loaded", run.guest().bytes_loaded("x"), traffic.x_loaded);
  expect_bytes("rows pulled", run.guest().bytes_loaded("expert output"), traffic.outputs_loaded);
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

MOE_SCENARIO(low_latency, "places that follow from shapes alone, ranks masked now and then") {
  KernelCase shape;
  shape.layout = RowLayout::kLowLatency;
  shape.hidden = 16;
  shape.with_masks = true;
  shape = draw_case(run, shape);
  shape.num_max_tokens = 3;
  run_operations(run, shape, 2);
}

KernelCase quantized(Run& run, int block, host::ScaleFormat format) {
  KernelCase shape;
  shape.is_quantized = true;
  shape.dtype = run.random().chance(1, 2) ? DType::kBFloat16 : DType::kFloat32;
  shape.hidden = run.random().chance(1, 2) ? 32 : 144;
  shape.is_column_major = run.random().chance(1, 2);
  shape.expert_alignment = 2;
  shape.quantization.dtype = shape.dtype;
  shape.quantization.block = block;
  shape.quantization.scale_format = format;
  shape.quantization.hidden = shape.hidden;
  shape.is_plain = run.random().chance(1, 4);
  shape = draw_case(run, shape);
  shape.num_max_tokens = 3;
  return shape;
}

MOE_SCENARIO(fp8_block128, "rows quantised in shared memory, float32 scale factors") {
  run_operations(run, quantized(run, 128, host::ScaleFormat::kFloat32), 1);
}

MOE_SCENARIO(mxfp8, "rows quantised in shared memory, scale factors of one byte") {
  run_operations(run, quantized(run, 32, host::ScaleFormat::kUe8m0), 1);
}

MOE_SCENARIO(drops, "rows beyond an expert's capacity or a rank's fixed rows are dropped") {
  KernelCase shape = expert_major(run);
  shape.rule.on_overflow = OnOverflow::kDrop;
  if (run.random().chance(1, 2))
    shape.rule.expert_capacity = run.random().between(0, 3);
  shape.has_fixed_rows = run.random().chance(1, 2);
  run_operations(run, shape, 2);
}

MOE_SCENARIO(raises, "more rows than a capacity that raises: nobody sends, the next goes on") {
  KernelCase shape = expert_major(run);
  shape.rule.on_overflow = OnOverflow::kRaise;
  shape.rule.expert_capacity = run.random().between(1, 4);
  run_operations(run, shape, 3);
}

MOE_SCENARIO(bad_choice, "one rank has an id that is none: nobody sends, the next goes on") {
  KernelCase shape = expert_major(run);
  shape.has_bad_choice = true;
  run_operations(run, shape, 4);
}

MOE_SCENARIO(host_read, "hosts wait for sizes; ranks that are short make second offers") {
  KernelCase shape = expert_major(run);
  KernelWorld world(run, shape);
  const bool has_memory = run.random().chance(3, 4);
  std::vector<Step> steps;
  std::vector<int64_t> first_rows;
  for (int i = 0; i < 2; ++i) {
    steps.push_back(draw_step(shape, world.placement(), &run.random()));
    for (int rank_idx = 0; rank_idx < shape.num_ranks; ++rank_idx)
      first_rows.push_back(run.random().chance(1, 2) ? 2 : 30);
  }
  for (int rank_idx = 0; rank_idx < shape.num_ranks; ++rank_idx)
    run.start_host(rank_idx, "dispatches", [&, rank_idx] {
      for (size_t i = 0; i < steps.size(); ++i)
        world.dispatch_by_host(
            rank_idx,
            steps[i],
            first_rows[i * static_cast<size_t>(shape.num_ranks) + static_cast<size_t>(rank_idx)],
            has_memory);
    });
  world.run_all();
}

/// Dispatches of all ranks but one, which never comes, or until they are aborted.
void run_to_an_early_end(Run& run, bool is_aborted) {
  KernelCase shape = expert_major(run);
  shape.num_ranks = static_cast<int>(run.random().between(2, 3));
  shape.num_experts = 2 * shape.num_ranks;
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
    run.start_host(missing, "aborts", [&] {
      const uint32_t num_steps = run.random().below(3000);
      for (uint32_t i = 0; i < num_steps; ++i)
        run.scheduler().yield();
      for (int rank_idx = 0; rank_idx < shape.num_ranks; ++rank_idx)
        world.abort(rank_idx);
    });
  world.run_until_left(is_aborted ? kernels::Cause::kAborted : kernels::Cause::kTimedOut, missing);
}

MOE_SCENARIO(never_comes, "a rank stops taking part: the others name it and leave") {
  run_to_an_early_end(run, false);
}

MOE_SCENARIO(aborted, "the communicator is aborted at some moment: everybody leaves") {
  run_to_an_early_end(run, true);
}

}  // namespace
}  // namespace moe::simt::checker
