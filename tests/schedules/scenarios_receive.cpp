// The two phases of a dispatch: what a rank's stream does between its rows and the receive kernel.

#include <vector>

#include "schedules/kernel_program.h"

namespace moe::simt::checker {
namespace {

KernelCase small_case(Run& run, layout::RowLayout layout, int num_local_ranks) {
  Random& random = run.random();
  KernelCase shape;
  shape.layout = layout;
  shape.num_blocks = static_cast<int>(random.between(1, 2));
  shape.num_ranks =
      num_local_ranks > 0 ? 2 * num_local_ranks : static_cast<int>(random.between(2, 3));
  shape.num_local_ranks = num_local_ranks;
  shape.num_experts = 2 * shape.num_ranks;
  shape.with_masks = layout == layout::RowLayout::kLowLatency;
  shape.num_max_tokens = 3;
  return shape;
}

enum class Between { kOtherWork, kCheck, kWriting };

/// Dispatches of all ranks, each received late.
void run_phases(Run& run, const KernelCase& shape, int num_rounds, Between between) {
  KernelWorld world(run, shape);
  std::vector<Step> steps;
  for (int i = 0; i < num_rounds; ++i)
    steps.push_back(draw_step(shape, world.placement(), &run.random()));
  for (int rank_idx = 0; rank_idx < shape.num_ranks; ++rank_idx) {
    std::vector<int64_t> num_late_steps;
    for (int i = 0; i < num_rounds; ++i)
      num_late_steps.push_back(run.random().chance(1, 2) ? run.random().below(2000) : 0);
    run.start_host(rank_idx, "launches", [&, rank_idx, num_late_steps] {
      for (size_t i = 0; i < steps.size(); ++i) {
        const auto sent = world.send(rank_idx, steps[i]);
        if (between == Between::kCheck)
          world.check(rank_idx, steps[i], sent);
        if (between == Between::kWriting)
          world.overwrite_window(rank_idx, steps[i], sent.segment_idx);
        world.stream(rank_idx).call("other work", [&run] { run.scheduler().yield(); });
        for (int64_t step = 0; step < num_late_steps[i]; ++step)
          run.scheduler().yield();
        world.receive(rank_idx);
        if (between == Between::kOtherWork)
          world.check(rank_idx, steps[i], sent);
      }
    });
  }
  world.run_all();
}

layout::RowLayout draw_layout(Run& run) {
  return run.random().chance(1, 2) ? layout::RowLayout::kLowLatency
                                   : layout::RowLayout::kExpertMajor;
}

MOE_SCENARIO(received_late, "a rank receives when it likes, behind other work; peers go on") {
  run_phases(run, small_case(run, draw_layout(run), 0), 3, Between::kOtherWork);
}

MOE_SCENARIO(devices_received_late,
             "the same on two devices: rows are copied when they are received") {
  KernelCase shape = small_case(run, draw_layout(run), 0);
  shape.num_devices = 2;
  shape.num_topk = 3;
  run_phases(run, shape, 3, Between::kOtherWork);
}

MOE_SCENARIO(internode_received_late, "the same across nodes: rows are forwarded all the same") {
  run_phases(run,
             small_case(run, draw_layout(run), run.random().chance(1, 2) ? 1 : 2),
             2,
             Between::kOtherWork);
}

MOE_WRONG_SCENARIO(read_before_receive, "rows are read before the receive kernel") {
  run_phases(run, small_case(run, draw_layout(run), 0), 2, Between::kCheck);
}

MOE_WRONG_SCENARIO(written_before_receive, "a window is used again before the receive kernel") {
  run_phases(run, small_case(run, draw_layout(run), 0), 2, Between::kWriting);
}

}  // namespace
}  // namespace moe::simt::checker
