#include <cstdint>
#include <utility>
#include <vector>

#include "core/error.h"
#include "layout/control.h"
#include "schedules/exchange_world.h"
#include "simt/memory.h"

// Exchanges of random cases, and how they end when a peer does not come.

namespace moe::simt::checker {
namespace {

using kernels::OperationStatus;

ExchangeWorldShape draw_shape(Random& random) {
  ExchangeWorldShape shape;
  shape.num_ranks = static_cast<int>(random.between(1, 4));
  // With one entry, a row comes to where the last one was.
  shape.depth = static_cast<int>(random.between(1, 3));
  shape.first_epoch = static_cast<uint64_t>(random.chance(1, 2) ? 1 : random.between(2, 9));
  // Now and then more than a block has threads.
  const int64_t num_experts = random.chance(1, 8) ? random.between(30, 70) : random.between(1, 7);
  const bool is_scattered = random.chance(1, 2);
  for (int64_t expert_idx = 0; expert_idx < num_experts; ++expert_idx)
    shape.expert_rank.push_back(
        static_cast<int32_t>(is_scattered ? random.between(0, shape.num_ranks - 1)
                                          : expert_idx * shape.num_ranks / num_experts));
  shape.is_active.assign(static_cast<size_t>(shape.num_ranks), 1);
  if (shape.num_ranks > 2 && random.chance(1, 4))
    shape.is_active[random.below(static_cast<uint32_t>(shape.num_ranks))] = 0;
  return shape;
}

/// Operations one after the other on every rank, each rank at its own pace.
/// @param are_repeated  all of them follow once more, with the same segments and without the host's
///   table of them
void run_operations(Run& run, int num_operations, bool are_repeated = false) {
  Random& random = run.random();
  ExchangeWorld world(run, draw_shape(random));
  const auto& shape = world.shape();
  std::vector<ExchangeCase> cases;
  for (int i = 0; i < num_operations; ++i)
    cases.push_back(draw_exchange_case(random, world.placement(), shape.is_active));
  std::vector<std::vector<ExchangeMemory>> memories(static_cast<size_t>(shape.num_ranks));
  world.announce_segments();
  for (int rank_idx = 0; rank_idx < shape.num_ranks; ++rank_idx) {
    if (!world.is_active(rank_idx))
      continue;
    auto& own = memories[static_cast<size_t>(rank_idx)];
    for (size_t i = 0; i < cases.size(); ++i)
      own.push_back(world.prepare(cases[i], rank_idx, shape.first_epoch + i));
    if (are_repeated) {
      world.rank(rank_idx).buffer.segment_bases = nullptr;
      for (size_t i = 0; i < cases.size(); ++i)
        own.push_back(world.prepare(cases[i], rank_idx, shape.first_epoch + cases.size() + i));
    }
    const int num_threads = 32 * static_cast<int>(random.between(1, 3));
    run.start_host(rank_idx, "caller", [&world, &cases, &own, rank_idx, num_threads] {
      for (size_t i = 0; i < own.size(); ++i)
        world.launch(cases[i % cases.size()], rank_idx, own[i], num_threads);
    });
  }
  run.scheduler().run();
  for (int rank_idx = 0; rank_idx < shape.num_ranks; ++rank_idx)
    for (size_t i = 0; i < memories[static_cast<size_t>(rank_idx)].size(); ++i)
      world.check(cases[i % cases.size()], rank_idx, memories[static_cast<size_t>(rank_idx)][i]);
}

MOE_SCENARIO(exchange, "random exchanges, counted or cached, held to the spec, as layout/ is") {
  run_operations(run, 2);
}

MOE_SCENARIO(exchange_reuse, "more exchanges than the ring has entries") {
  run_operations(run, 5);
}

MOE_SCENARIO(exchange_in_known_segments,
             "no memory of the host is read for segments that were offered before") {
  run_operations(run, ExchangeWorld::kNumSegments, true);
}

/// Reports of a rank's kernels on why they left, as its host reads it.
kernels::WaitReport await_report(Run& run, const kernels::Buffer& buffer) {
  while (memory::atomic_load(&buffer.report->cause, 4, Order::kAcquire, Reach::kSystem) == 0)
    run.scheduler().idle(1000);
  kernels::WaitReport report{};
  for (size_t offset = 0; offset < sizeof(report); offset += 8)
    memory::load(reinterpret_cast<const std::byte*>(buffer.report) + offset,
                 reinterpret_cast<std::byte*>(&report) + offset,
                 8);
  return report;
}

/// One rank never comes; the others have to say so.
void run_without(Run& run, int absent_rank, bool is_aborted) {
  Random& random = run.random();
  ExchangeWorldShape shape;
  shape.num_ranks = 3;
  shape.expert_rank = {0, 1, 2, 2};
  shape.is_active.assign(3, 1);
  shape.arrival_limit_ns = is_aborted ? uint64_t{1} << 60 : 200'000;
  ExchangeWorld world(run, shape);
  world.announce_segments();
  ExchangeCase expected = draw_exchange_case(random, world.placement(), shape.is_active);
  while (expected.first_status != OperationStatus::kOk || !expected.is_counted())
    expected = draw_exchange_case(random, world.placement(), shape.is_active);
  expected.first_status = expected.last_status = OperationStatus::kLeft;
  std::vector<kernels::WaitReport> reports(3);
  std::vector<ExchangeMemory> memories;
  for (int rank_idx = 0; rank_idx < 3; ++rank_idx) {
    memories.push_back(world.prepare(expected, rank_idx, 1));
    memories.push_back(world.prepare(expected, rank_idx, 1));
  }
  for (int rank_idx = 0; rank_idx < 3; ++rank_idx) {
    if (rank_idx == absent_rank)
      continue;
    run.start_host(rank_idx, "caller", [&, rank_idx] {
      world.launch(expected, rank_idx, memories[static_cast<size_t>(2 * rank_idx)], 64);
      // What comes after it leaves at once.
      world.launch(expected, rank_idx, memories[static_cast<size_t>(2 * rank_idx + 1)], 32);
    });
    run.start_host(rank_idx, "watch", [&, rank_idx] {
      reports[static_cast<size_t>(rank_idx)] = await_report(run, world.rank(rank_idx).buffer);
    });
    if (is_aborted)
      run.start_host(rank_idx, "service", [&, rank_idx] {
        const uint32_t word = layout::AbortRecord::word(1, layout::AbortRecord::kSet);
        memory::atomic_store(const_cast<uint32_t*>(world.rank(rank_idx).buffer.abort_word),
                             word,
                             4,
                             Order::kRelease,
                             Reach::kSystem);
      });
  }
  run.scheduler().run();
  for (int rank_idx = 0; rank_idx < 3; ++rank_idx) {
    if (rank_idx == absent_rank)
      continue;
    const kernels::WaitReport& report = reports[static_cast<size_t>(rank_idx)];
    const auto cause = is_aborted ? kernels::Cause::kAborted : kernels::Cause::kTimedOut;
    if (report.cause != static_cast<uint32_t>(cause) ||
        (!is_aborted && report.peer_rank != absent_rank) ||
        report.phase != static_cast<int32_t>(layout::Phase::kRows) ||
        report.operation != static_cast<int32_t>(layout::Operation::kDispatch) ||
        report.epoch != 1 || report.expected != 1 || report.seen != 0)
      run.report(Kind::kResult,
                 concat("rank ",
                        rank_idx,
                        " reports cause ",
                        report.cause,
                        ", rank ",
                        report.peer_rank,
                        ", phase ",
                        report.phase,
                        ", epoch ",
                        report.epoch));
    if (world.real(world.rank(rank_idx).buffer.state).epoch != 1)
      run.report(Kind::kResult, concat("rank ", rank_idx, " took an epoch after it had left"));
    for (int i = 0; i < 2; ++i) {
      const auto& tables = memories[static_cast<size_t>(2 * rank_idx + i)].params.tables;
      if (world.real(tables.status) != static_cast<int32_t>(OperationStatus::kLeft) ||
          world.real(tables.may_move) != 0)
        run.report(Kind::kResult, concat("rank ", rank_idx, " did not leave"));
    }
  }
}

MOE_SCENARIO(exchange_timeout, "a rank that never comes is named by all others") {
  run_without(run, static_cast<int>(run.random().below(3)), false);
}

MOE_SCENARIO(exchange_abort, "kernels that wait leave when the communicator is aborted") {
  run_without(run, static_cast<int>(run.random().below(3)), true);
}

/// Rank 1 takes far longer than the limit for a peer that stands still: it moves rows and says so,
/// or it obtains memory.
void run_with_slow_rank(Run& run, bool is_growing) {
  constexpr uint64_t kStallLimitNs = 100'000;
  Random& random = run.random();
  ExchangeWorldShape shape;
  shape.expert_rank = {1, 0, 1};
  shape.is_active.assign(2, 1);
  shape.stall_limit_ns = kStallLimitNs;
  shape.arrival_limit_ns = uint64_t{1} << 60;
  ExchangeWorld world(run, shape);
  world.announce_segments();
  const auto fits = [&](const ExchangeCase& drawn) {
    if (!drawn.is_counted() || !drawn.has_host_read || drawn.last_status != OperationStatus::kOk)
      return false;
    return is_growing
               ? drawn.is_short == std::vector<uint8_t>{0, 1}
               : drawn.first_status == OperationStatus::kOk && layout::sends_rows(drawn.kept, 1, 0);
  };
  ExchangeCase expected = draw_exchange_case(random, world.placement(), shape.is_active);
  while (!fits(expected))
    expected = draw_exchange_case(random, world.placement(), shape.is_active);
  world.set_pause([&](int rank_idx, layout::Phase phase) {
    if (rank_idx != 1 || (phase == layout::Phase::kOffers) != is_growing)
      return;
    const kernels::Buffer& buffer = world.rank(1).buffer;
    uint64_t& progress = buffer.workspace(world.real(buffer.workspaces + 1)).activity().progress;
    for (uint64_t step = 1; step <= 500; ++step) {
      // Slowly enough for peers to look at the clock in between.
      run.scheduler().advance(kStallLimitNs / 100);
      if (!is_growing)
        memory::atomic_store(&progress, step, 8, Order::kRelaxed, Reach::kSystem);
      run.scheduler().idle(100);
    }
  });
  std::vector<ExchangeMemory> memories{world.prepare(expected, 0, 1),
                                       world.prepare(expected, 1, 1)};
  for (int rank_idx = 0; rank_idx < 2; ++rank_idx)
    run.start_host(rank_idx, "caller", [&, rank_idx] {
      world.launch(expected, rank_idx, memories[static_cast<size_t>(rank_idx)], 32);
    });
  run.scheduler().run();
  for (int rank_idx = 0; rank_idx < 2; ++rank_idx) {
    world.check(expected, rank_idx, memories[static_cast<size_t>(rank_idx)]);
    if (world.real(world.rank(rank_idx).buffer.report).cause != 0)
      run.report(Kind::kResult, concat("rank ", rank_idx, " gave up a peer that was at work"));
  }
}

MOE_SCENARIO(exchange_slow_peer, "a rank that moves rows for longer than the limit is waited for") {
  run_with_slow_rank(run, false);
}

MOE_SCENARIO(exchange_growing_peer, "a rank that obtains memory is waited for as if it came late") {
  run_with_slow_rank(run, true);
}

}  // namespace
}  // namespace moe::simt::checker
