#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/sync.h"
#include "schedules/host_layer.h"
#include "schedules/host_world.h"
#include "schedules/run.h"

// Dispatch and combine of the CPU backend, whole: real groups, buffers and operations.

namespace moe::simt::checker {

namespace {

HostLayer::Shape draw_shape(Random& random, int num_ranks) {
  HostLayer::Shape shape;
  shape.num_experts = static_cast<int>(random.between(num_ranks, 2 * num_ranks));
  shape.num_topk = random.between(1, 3);
  shape.most_tokens = random.between(1, 4);
  shape.alignment = random.chance(1, 2) ? 1 : 4;
  shape.with_weights = random.chance(1, 2);
  shape.is_in_place = random.chance(2, 3);
  return shape;
}

HostWorld::Options draw_options(Run& run, int most_ranks) {
  HostWorld::Options options;
  options.num_ranks = static_cast<int>(run.random().between(1, most_ranks));
  options.threads.cache_bytes = run.random().chance(1, 2) ? 1 : int64_t{1} << 30;
  return options;
}

/// Checks that what was thrown names that rank and no other.
void check_names(const HostRank& rank, const FailureSite& site, int failed_rank) {
  if (site.ranks != std::vector<int>{failed_rank})
    rank.fail(concat("an error names ",
                     site.ranks.size(),
                     " ranks, the first is ",
                     site.ranks.empty() ? -1 : site.ranks[0],
                     ", instead of rank ",
                     failed_rank));
}

}  // namespace

MOE_SCENARIO(host_rank_reduction, "CPU: combines that add the rows of each rank first") {
  HostWorld world(run, draw_options(run, 3));
  HostLayer::Shape shape = draw_shape(run.random(), world.num_ranks());
  shape.num_topk = run.random().between(3, 5);
  shape.with_factors = true;
  world.run([&](HostRank& rank) {
    HostLayer layer(rank, rank.make_endpoint(shape.num_experts, 2, Reduction::kRanks), shape);
    for (int64_t step = 0; step < 3; ++step)
      layer.run(step);
    world.meet();  // nothing that follows wakes anybody
  });
}

MOE_SCENARIO(host_layer, "CPU: dispatch and combine, ragged, more epochs than the ring holds") {
  HostWorld world(run, draw_options(run, 4));
  HostLayer::Shape shape = draw_shape(run.random(), world.num_ranks());
  if (run.random().chance(1, 4)) {
    shape.layout = layout::RowLayout::kRankMajor;
    shape.alignment = 1;
    shape.with_weights = false;
  }
  if (run.random().chance(1, 4))
    shape.copy_out = ops::CopyOut::kAlways;
  const int depth = static_cast<int>(run.random().between(1, 2));
  world.run([&](HostRank& rank) {
    HostLayer layer(rank, rank.make_endpoint(shape.num_experts, depth), shape);
    for (int64_t step = 0; step < 4; ++step)
      layer.run(step);
    world.meet();  // nothing that follows wakes anybody
  });
}

MOE_SCENARIO(host_dispatches, "CPU: dispatches one after the other, some by a handle") {
  HostWorld world(run, draw_options(run, 3));
  const HostLayer::Shape shape = draw_shape(run.random(), world.num_ranks());
  const int depth = static_cast<int>(run.random().between(1, 2));
  world.run([&](HostRank& rank) {
    HostLayer layer(rank, rank.make_endpoint(shape.num_experts, depth), shape);
    for (int64_t step = 0; step < 3; ++step)
      layer.run_twice(step);
  });
}

MOE_SCENARIO(host_scales, "CPU: rows with scale factors in rows or columns, past the caches too") {
  HostWorld world(run, draw_options(run, 3));
  Random& random = run.random();
  HostLayer::Shape shape = draw_shape(random, world.num_ranks());
  if (random.chance(1, 3)) {
    shape.layout = layout::RowLayout::kRankMajor;
    shape.alignment = 1;
    shape.with_weights = false;
  }
  // An expert gets more rows of a rank than a line has factors, and its rows begin anywhere in one.
  // Nothing smaller than the cells of HostMemory: two ranks would seem to write the same byte.
  shape.scale_bytes = random.chance(1, 2) ? 4 : 8;
  shape.num_scales = random.between(1, 3);
  shape.has_scale_columns = random.chance(3, 4);
  shape.num_experts = world.num_ranks();
  shape.most_tokens = shape.scale_bytes == 8 ? 16 : 24;
  shape.hidden = 4;
  world.run([&](HostRank& rank) {
    HostLayer layer(rank, rank.make_endpoint(shape.num_experts, 2), shape);
    for (int64_t step = 0; step < 2; ++step)
      layer.run_dispatch(step);
  });
}

MOE_SCENARIO(host_replicas,
             "CPU: rows by rank of replicas, for which ranks read what others chose") {
  HostWorld world(run, draw_options(run, 3));
  HostLayer::Shape shape = draw_shape(run.random(), world.num_ranks());
  shape.layout = layout::RowLayout::kRankMajor;
  shape.alignment = 1;
  shape.with_weights = false;
  const int depth = static_cast<int>(run.random().between(1, 2));
  world.run([&](HostRank& rank) {
    HostLayer layer(rank, rank.make_replicated(shape.num_experts, depth), shape);
    for (int64_t step = 0; step < 3; ++step)
      layer.run_twice(step);
  });
}

MOE_SCENARIO(host_results, "CPU: a rank hands what an operation gave it to another thread") {
  HostWorld world(run, draw_options(run, 3));
  HostLayer::Shape shape = draw_shape(run.random(), world.num_ranks());
  shape.alignment = 4;
  shape.is_read_elsewhere = true;
  world.run([&](HostRank& rank) {
    HostLayer(rank, rank.make_endpoint(shape.num_experts, 2), shape).run(0);
  });
}

MOE_SCENARIO(host_rejection, "CPU: one rank's input is bad, all say so and go on") {
  HostWorld::Options options = draw_options(run, 3);
  HostWorld world(run, options);
  const HostLayer::Shape shape = draw_shape(run.random(), world.num_ranks());
  const int bad_rank = static_cast<int>(run.random().between(0, world.num_ranks() - 1));
  world.run([&](HostRank& rank) {
    HostLayer layer(rank, rank.make_endpoint(shape.num_experts, 2), shape);
    layer.run_rejected(0, bad_rank);
    layer.run(1);
    layer.run_rejected(2, bad_rank);
    layer.run_rejected(3, bad_rank);
    layer.run(4);
  });
}

MOE_SCENARIO(host_growth, "CPU: offers are too small, and one heap has no room for a second") {
  HostWorld::Options options = draw_options(run, 3);
  options.num_ranks = std::max(2, options.num_ranks);
  options.segment_bytes = 8192;
  options.most_heap_bytes = int64_t{96} << 10;
  HostWorld world(run, options);
  HostLayer::Shape shape = draw_shape(run.random(), world.num_ranks());
  shape.with_weights = true;
  const int full_rank = static_cast<int>(run.random().between(0, world.num_ranks() - 1));
  world.run([&](HostRank& rank) {
    HostLayer layer(rank, rank.make_endpoint(shape.num_experts, 2), shape);
    layer.run(0);
    HostLayer::Shape larger = shape;
    larger.most_tokens = 12;
    larger.hidden = 32;
    HostLayer grown(rank, rank.make_endpoint(shape.num_experts, 2), larger);
    grown.run(1);
    larger.most_tokens = 24;
    larger.hidden = 64;
    larger.is_in_place = false;
    HostLayer outgrown(rank, rank.make_endpoint(shape.num_experts, 2), larger);
    // Nothing is left on one rank: all of them hear of it before any row moves.
    std::vector<std::shared_ptr<Window>> taken;
    if (rank.rank_idx() == full_rank)
      for (uint64_t bytes = uint64_t{1} << 16; bytes >= 64;) {
        try {
          taken.push_back(rank.heap().allocate(bytes));
        } catch (const CapacityError&) {
          bytes /= 2;
        }
      }
    try {
      outgrown.run(2);
    } catch (const CapacityError& error) {
      if (error.ranks != std::vector<int>{full_rank})
        rank.fail(concat("a shortage of another rank: ", error.what()));
    }
    taken.clear();
    layer.run(3);
  });
}

MOE_SCENARIO(host_closed,
             "CPU: a rank destroys a buffer that others still use, and makes another") {
  HostWorld::Options options = draw_options(run, 3);
  options.num_ranks = std::max(2, options.num_ranks);
  options.segment_bytes = 8192;
  HostWorld world(run, options);
  const HostLayer::Shape shape = draw_shape(run.random(), world.num_ranks());
  const int leaver = static_cast<int>(run.random().between(0, world.num_ranks() - 1));
  world.run([&](HostRank& rank) {
    auto first = rank.make_endpoint(shape.num_experts, 2);
    const auto second = rank.make_endpoint(shape.num_experts, 2);
    HostLayer layer(rank, first, shape);
    layer.run(0);
    if (rank.rank_idx() == leaver) {
      rank.destroy(first);
    } else {
      try {
        layer.run(1);
        rank.fail("an operation on a buffer that a peer has destroyed ends well");
      } catch (const InvalidArgument& error) {
        const std::string text = error.what();
        // By now another rank may have given it up for the same reason.
        if (text.find(" has destroyed this buffer") == std::string::npos)
          rank.fail(concat("another error: ", text));
      }
      rank.destroy(first);
    }
    // Collective calls look whether control areas can serve something else.
    HostLayer third(rank, rank.make_endpoint(shape.num_experts, 2), shape);
    HostLayer(rank, second, shape).run(2);
    third.run(3);
    HostLayer(rank, rank.make_endpoint(shape.num_experts, 2), shape).run(4);
    third.run(5);
  });
}

MOE_SCENARIO(host_two_threads, "CPU: two buffers of a rank, each with a thread of its own") {
  HostWorld::Options options = draw_options(run, 2);
  HostWorld world(run, options);
  const HostLayer::Shape shape = draw_shape(run.random(), world.num_ranks());
  world.run([&](HostRank& rank) {
    const auto first = rank.make_endpoint(shape.num_experts, 2);
    const auto second = rank.make_endpoint(shape.num_experts, 2);
    rank.start("second thread", [&rank, &shape, second] {
      HostLayer layer(rank, second, shape);
      for (int64_t step = 10; step < 13; ++step)
        layer.run(step);
    });
    HostLayer layer(rank, first, shape);
    for (int64_t step = 0; step < 3; ++step)
      layer.run(step);
    rank.join_all();
  });
}

MOE_SCENARIO(host_abort,
             "CPU: a rank gives up at any time; the others hear of it and all recover") {
  HostWorld::Options options = draw_options(run, 3);
  options.num_ranks = std::max(2, options.num_ranks);
  HostWorld world(run, options);
  const HostLayer::Shape shape = draw_shape(run.random(), world.num_ranks());
  const int quitter = static_cast<int>(run.random().between(0, world.num_ranks() - 1));
  const int64_t num_spins = run.random().between(0, 200);
  world.run([&](HostRank& rank) {
    HostLayer layer(rank, rank.make_endpoint(shape.num_experts, 2), shape);
    try {
      for (int64_t step = 0;; ++step) {
        layer.run(step);
        // From here on every rank is past its making.
        if (step == 0 && rank.rank_idx() == quitter)
          rank.give_up_beside(num_spins);
      }
    } catch (const PeerFailed& error) {
      check_names(rank, error.site, quitter);
      if (std::string(error.what()) != "gave up")
        rank.fail(concat("another reason: ", error.what()));
    }
    rank.join_all();
    const group::RecoveryResult result = rank.group()->recover({});
    if (!result.failed_ranks.empty())
      rank.fail(concat("recovery takes rank ", result.failed_ranks[0], " for failed"));
    for (int64_t step = 1000; step < 1003; ++step)
      layer.run(step);
  });
}

MOE_SCENARIO(host_abort_combine,
             "CPU: a rank gives up while peers pull rows that its caller then overwrites") {
  HostWorld::Options options = draw_options(run, 3);
  options.num_ranks = std::max(2, options.num_ranks);
  HostWorld world(run, options);
  HostLayer::Shape shape = draw_shape(run.random(), world.num_ranks());
  shape.is_in_place = true;
  const int64_t num_spins = run.random().between(0, 30);
  world.run([&](HostRank& rank) {
    HostLayer layer(rank, rank.make_endpoint(shape.num_experts, 2), shape);
    world.meet();
    if (rank.rank_idx() == 0)
      rank.start("second thread", [&rank, num_spins] {
        for (int64_t i = 0; i < num_spins; ++i)
          sync::yield();
        rank.group()->abort(layout::AbortCause::kPeerFailed, group::WaitSite{}, {0}, "gave up");
      });
    try {
      layer.run_combines(0);
    } catch (const PeerFailed& error) {
      check_names(rank, error.site, 0);
    }
    rank.join_all();
    rank.group()->recover({});
    layer.run(1);
  });
}

MOE_SCENARIO(host_interrupt, "CPU: a rank is interrupted while it waits, and the buffers recover") {
  HostWorld::Options options = draw_options(run, 3);
  options.num_ranks = std::max(2, options.num_ranks);
  HostWorld world(run, options);
  const HostLayer::Shape shape = draw_shape(run.random(), world.num_ranks());
  const int64_t num_looks = run.random().between(0, 6);
  world.run([&](HostRank& rank) {
    HostLayer layer(rank, rank.make_endpoint(shape.num_experts, 2), shape);
    int64_t looks_left = num_looks;
    try {
      layer.run(0);
      if (rank.rank_idx() == 0)
        layer.set_interrupt_check([&looks_left] {
          if (looks_left-- <= 0)
            throw std::runtime_error("interrupted");
        });
      for (int64_t step = 1; step < 20 || rank.rank_idx() != 0; ++step)
        layer.run(step);
      // It never had to wait.
      rank.group()->abort(layout::AbortCause::kPeerFailed, group::WaitSite{}, {0}, "interrupted");
    } catch (const PeerFailed& error) {
      check_names(rank, error.site, 0);
    } catch (const std::runtime_error& error) {
      if (std::string(error.what()) != "interrupted")
        throw;
    }
    layer.set_interrupt_check({});
    rank.group()->recover({});
    for (int64_t step = 1000; step < 1003; ++step)
      layer.run(step);
  });
}

MOE_SCENARIO(host_death, "CPU: a rank dies at any step; the others name it, recover and go on") {
  HostWorld::Options options = draw_options(run, 4);
  options.num_ranks = std::max(2, options.num_ranks);
  options.threads.may_time_pass = true;
  HostWorld world(run, options);
  const HostLayer::Shape shape = draw_shape(run.random(), world.num_ranks());
  const int victim = static_cast<int>(run.random().between(0, world.num_ranks() - 1));
  const int64_t num_steps = run.random().between(1, 1500);
  // By rank; that of the victim says nothing.
  std::vector<int64_t> num_completed(static_cast<size_t>(world.num_ranks()),
                                     std::numeric_limits<int64_t>::max());
  world.run([&](HostRank& rank) {
    HostLayer layer(rank, rank.make_endpoint(shape.num_experts, 2), shape);
    try {
      layer.run(0);
      if (rank.rank_idx() == victim)
        world.doom(victim, num_steps);
      for (int64_t step = 1;; ++step)
        layer.run(step);
    } catch (const PeerFailed& error) {
      if (!error.site.ranks.empty() ||
          std::string(error.what()).find("while it aborted") == std::string::npos)
        check_names(rank, error.site, victim);
    }
    num_completed[static_cast<size_t>(rank.rank_idx())] = layer.num_completed();
    const group::RecoveryResult result = rank.group()->recover({});
    if (result.failed_ranks != std::vector<int>{victim})
      rank.fail(concat("recovery excludes ", result.failed_ranks.size(), " ranks instead of one"));
    const int64_t by_all = *std::min_element(num_completed.begin(), num_completed.end());
    if (result.completed_epochs != std::vector<int64_t>{by_all})
      rank.fail(concat("recovery says that epoch ",
                       result.completed_epochs.empty() ? 0 : result.completed_epochs[0],
                       " is the last that all have completed, instead of ",
                       by_all));
    layer.exclude(victim);
    for (int64_t step = 1000; step < 1003; ++step)
      layer.run(step);
  });
}

MOE_SCENARIO(host_windows, "CPU: two threads of a rank take, shrink and give back windows") {
  HostWorld::Options options;
  options.num_ranks = 1;
  options.segment_bytes = 8192;
  HostWorld world(run, options);
  const auto play = [&](HostRank& rank, uint64_t seed) {
    Random random(seed);
    std::vector<std::shared_ptr<Window>> held;
    for (int i = 0; i < 40; ++i) {
      if (held.size() < 4 && random.chance(2, 3)) {
        const auto bytes =
            static_cast<uint64_t>(random.between(1, 300) * (random.chance(1, 4) ? 20 : 1));
        auto window =
            random.chance(1, 4) ? rank.heap().allocate_free(bytes) : rank.heap().allocate(bytes);
        if (!window)
          continue;
        sync::fill_shared(window->data(), static_cast<int>(seed & 0x7F), window->bytes());
        held.push_back(std::move(window));
      } else if (!held.empty()) {
        const size_t idx = random.below(static_cast<uint32_t>(held.size()));
        Window& window = *held[idx];
        std::vector<std::byte> found(window.bytes());
        sync::read_shared(found.data(), window.data(), found.size());
        for (const std::byte byte : found)
          if (byte != static_cast<std::byte>(seed & 0x7F))
            rank.fail("a window holds what another thread wrote");
        if (random.chance(1, 4))
          window.quarantine();
        if (random.chance(1, 3))
          window.shrink(window.bytes() / 2);
        else
          held.erase(held.begin() + static_cast<std::ptrdiff_t>(idx));
      }
    }
  };
  const uint64_t seed = run.seed();
  world.run([&](HostRank& rank) {
    rank.start("second thread", [&] { play(rank, seed * 2 + 1); });
    play(rank, seed * 2);
    rank.join_all();
    rank.heap().end_quarantine();
    play(rank, seed * 2 + 2);
  });
}

}  // namespace moe::simt::checker
