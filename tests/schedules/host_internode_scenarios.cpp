#include <string>

#include "core/error.h"
#include "core/sync.h"
#include "schedules/host_layer.h"
#include "schedules/host_world.h"
#include "schedules/run.h"

// Dispatch and combine of the CPU backend on several nodes, over the sockets: the link delivers
// what ranks send each other at any time after it was sent.

namespace moe::simt::checker {

namespace {

HostWorld::Options draw_nodes(Run& run) {
  HostWorld::Options options;
  options.num_local_ranks = static_cast<int>(run.random().between(1, 2));
  options.num_ranks = options.num_local_ranks * 2;
  options.threads.cache_bytes = run.random().chance(1, 2) ? 1 : int64_t{1} << 30;
  return options;
}

HostLayer::Shape draw_shape_across_nodes(Random& random, int num_ranks) {
  HostLayer::Shape shape;
  shape.num_experts = static_cast<int>(random.between(num_ranks, 2 * num_ranks));
  shape.num_topk = random.between(1, 3);
  shape.most_tokens = random.between(1, 4);
  shape.with_weights = random.chance(1, 2);
  shape.is_in_place = random.chance(2, 3);
  return shape;
}

}  // namespace

MOE_SCENARIO(host_internode, "CPU: two nodes; layers, and calls that one rank's input ends") {
  const HostWorld::Options options = draw_nodes(run);
  HostWorld world(run, options);
  HostLayer::Shape shape = draw_shape_across_nodes(run.random(), options.num_ranks);
  bool has_replicas = false;
  if (run.random().chance(1, 4)) {
    shape.layout = layout::RowLayout::kRankMajor;
    shape.with_weights = false;
    has_replicas = run.random().chance(1, 2);
  }
  const int depth = static_cast<int>(run.random().between(1, 2));
  const int bad_rank = static_cast<int>(run.random().between(0, options.num_ranks - 1));
  world.run([&](HostRank& rank) {
    HostLayer layer(rank,
                    has_replicas ? rank.make_replicated(shape.num_experts, depth)
                                 : rank.make_endpoint(shape.num_experts, depth),
                    shape);
    layer.run(0);
    layer.run_rejected(1, bad_rank);
    for (int64_t step = 2; step < 4; ++step)
      layer.run(step);
    world.meet();  // nothing that follows wakes anybody
  });
}

MOE_SCENARIO(host_internode_reduced, "CPU: two nodes; combines that add rows on their node first") {
  const HostWorld::Options options = draw_nodes(run);
  HostWorld world(run, options);
  HostLayer::Shape shape = draw_shape_across_nodes(run.random(), options.num_ranks);
  shape.num_topk = run.random().between(2, 5);
  if (run.random().chance(1, 4)) {
    shape.layout = layout::RowLayout::kRankMajor;
    shape.with_weights = false;
  } else {
    shape.with_factors = run.random().chance(3, 4);
  }
  world.run([&](HostRank& rank) {
    HostLayer layer(rank, rank.make_endpoint(shape.num_experts, 2, Reduction::kNodes), shape);
    for (int64_t step = 0; step < 3; ++step)
      layer.run(step);
    world.meet();  // nothing that follows wakes anybody
  });
}

MOE_SCENARIO(host_internode_abort,
             "CPU: two nodes; a rank gives up at any time, and all go on over another rail") {
  const HostWorld::Options options = draw_nodes(run);
  HostWorld world(run, options);
  const HostLayer::Shape shape = draw_shape_across_nodes(run.random(), options.num_ranks);
  const int quitter = static_cast<int>(run.random().between(0, options.num_ranks - 1));
  const int64_t num_spins = run.random().between(0, 200);
  world.run([&](HostRank& rank) {
    HostLayer layer(rank, rank.make_endpoint(shape.num_experts, 2), shape);
    try {
      for (int64_t step = 0;; ++step) {
        layer.run(step);
        if (step == 0 && rank.rank_idx() == quitter)
          rank.give_up_beside(num_spins);
      }
    } catch (const PeerFailed& error) {
      if (std::string(error.what()) != "gave up")
        rank.fail(concat("another reason: ", error.what()));
    }
    rank.join_all();
    rank.group()->recover({});
    for (int64_t step = 1000; step < 1002; ++step)
      layer.run(step);
  });
}

}  // namespace moe::simt::checker
