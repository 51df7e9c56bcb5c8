// Fibers, barriers and warps of the emulator as kernels see them.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <thread>

#include "emulated.h"

namespace {

using namespace moe;
using namespace moe::device;
using namespace moe::cases;

// --- Fibers and scheduler -----------------------------------------------------------------------

struct Probe : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Every fiber handles two nested exceptions while the others handle theirs.
void run_handlers() {
  simt::Scheduler scheduler;
  constexpr int kNumFibers = 50;
  std::vector<std::string> caught(kNumFibers);
  for (int idx = 0; idx < kNumFibers; ++idx)
    scheduler.spawn(
        [&, idx] {
          for (int round = 0; round < 3; ++round) {
            try {
              throw Probe(concat("outer ", idx));
            } catch (const Probe& outer) {
              scheduler.yield();
              try {
                throw Probe(concat("inner ", idx));
              } catch (const Probe& inner) {
                scheduler.yield();
                caught[static_cast<size_t>(idx)] = concat(outer.what(), ", ", inner.what());
              }
              scheduler.yield();
              try {
                throw;
              } catch (const Probe& again) {
                expect_equal(std::string(again.what()), concat("outer ", idx), "rethrown");
              }
            }
            expect_equal(std::uncaught_exceptions(), 0, "uncaught exceptions");
          }
        },
        "handler");
  scheduler.run();
  for (int idx = 0; idx < kNumFibers; ++idx)
    expect_equal(
        caught[static_cast<size_t>(idx)], concat("outer ", idx, ", inner ", idx), "caught");
}

MOE_CASE(exceptions) {
  run_handlers();

  // The first exception unwinds all other fibers and is what run() throws.
  simt::Scheduler scheduler;
  int num_unwound = 0;
  struct Guard {
    int* count;
    ~Guard() { ++*count; }
  };
  for (int idx = 0; idx < 3; ++idx)
    scheduler.spawn(
        [&, idx] {
          const Guard guard{&num_unwound};
          if (idx == 0)
            scheduler.block({"an end that never comes"});
          if (idx == 1)
            scheduler.idle(1);
          scheduler.yield();
          throw Probe("failed");
        },
        "guarded");
  scheduler.spawn([&] { scheduler.idle(1); }, "idle");
  const std::string message = message_of<Probe>([&] { scheduler.run(); });
  expect_equal(message, std::string("failed"), "message");
  expect_equal(num_unwound, 3, "fibers that were unwound");

  // It can run again.
  int num_run = 0;
  for (int idx = 0; idx < 3; ++idx)
    scheduler.spawn([&] { scheduler.yield(), ++num_run; }, "again");
  scheduler.run();
  expect_equal(num_run, 3, "fibers of the next run");
}

MOE_CASE(threads) {
  std::vector<std::thread> threads;
  std::atomic<int> num_done{0};
  for (int idx = 0; idx < 4; ++idx)
    threads.emplace_back([&] {
      for (int round = 0; round < 20; ++round)
        run_handlers();
      ++num_done;
    });
  for (auto& thread : threads)
    thread.join();
  expect_equal(num_done.load(), 4, "threads that ended");
}

int deepen(volatile char* above, int levels) {
  volatile char frame[4096];
  frame[0] = *above;
  return levels == 0 ? 0 : deepen(frame, levels - 1) + frame[0];
}

/// Going too deep faults instead of writing into a neighbour's stack.
MOE_CASE(stack_overflow) {
  simt::Scheduler scheduler;
  const auto go = [](int levels) {
    volatile char start = 1;
    deepen(&start, levels);
  };
  scheduler.spawn([&] { go(16); }, "deep enough");
  scheduler.run();
  std::puts("deep enough");
  std::fflush(stdout);
  scheduler.spawn([&] { scheduler.yield(); }, "neighbor");
  scheduler.spawn([&] { go(1000); }, "too deep");
  scheduler.run();
}

MOE_CASE(idle) {
  // Idle fibers run after all others, and in turn.
  std::string order;
  simt::Scheduler scheduler;
  bool is_set = false;
  for (const char name : {'a', 'b'})
    scheduler.spawn(
        [&, name] {
          while (!is_set) {
            order += name;
            scheduler.idle(1);
          }
          order += static_cast<char>(name - 'a' + 'A');
        },
        "poller");
  scheduler.spawn(
      [&] {
        for (int idx = 0; idx < 3; ++idx) {
          order += 'w';
          scheduler.yield();
        }
        scheduler.idle(1);
        is_set = true;
      },
      "worker");
  scheduler.run();
  expect_equal(order, std::string("abwwwabAB"), "order");

  // Memory that another OS thread writes ends the wait.
  uint32_t word = 0;
  std::thread writer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    std::atomic_ref(word).store(1);
  });
  emulate(2, 64, 0, [&] {
    const uint64_t start = now_ns();
    while (load_acquire<Scope::kSystem>(&word) == 0)
      pause(100);
    expect(now_ns() >= start, "the clock went backwards");
  });
  writer.join();
}

MOE_CASE(deadlock) {
  const std::string message = error_of_kernel(96, [] {
    if (thread_idx() == 70)
      sync_warp();
  });
  expect_error(message, {"thread 70 comes to sync_warp", "returned: 0 to 5"});
  expect_error(error_of_kernel(96,
                               [] {
                                 if (thread_idx() >= 64 && thread_idx() < 95)
                                   sync_warp();
                                 else
                                   sync_block();
                               }),
               {"deadlock",
                "Body block 0 threads 0 to 63 wait for the barrier of the block\n",
                "Body block 0 threads 64 to 94 wait for the other lanes of warp 2\n",
                "Body block 0 thread 95 waits for the barrier of the block\n"});
}

MOE_CASE(many_launches) {
  const auto num_mappings = [] {
    std::ifstream maps("/proc/self/maps");
    int count = 0;
    for (std::string line; std::getline(maps, line);)
      ++count;
    return count;
  };
  Immediate stream;
  int num_run = 0;
  const std::function<void()> body = [&] {
    sync_block();
    ++num_run;
  };
  const Launch shape = stream.shape(3, 160, 1024);
  launch(run_body, shape, Body{&body});
  const int before = num_mappings();
  for (int idx = 0; idx < 200; ++idx)
    launch(run_body, shape, Body{&body});
  expect_equal(num_run, 201 * 480, "threads that ran");
  expect(num_mappings() <= before + 2, concat(before, " mappings became ", num_mappings()));
}

// --- Block and warp -----------------------------------------------------------------------------

MOE_CASE(thread_indices) {
  std::vector<int> seen(3 * 64);
  emulate(3, 64, 0, [&] {
    expect_equal(num_blocks(), 3, "num_blocks");
    expect_equal(num_threads(), 64, "num_threads");
    expect_equal(num_warps(), 2, "num_warps");
    expect_equal(warp_idx(), thread_idx() / 32, "warp_idx");
    expect_equal(lane_idx(), thread_idx() % 32, "lane_idx");
    ++seen[static_cast<size_t>(block_idx() * 64 + thread_idx())];
  });
  for (const int count : seen)
    expect_equal(count, 1, "threads of one index");
}

MOE_CASE(block_barrier) {
  emulate(2, 128, 128 * sizeof(int), [] {
    int* const values = shared_array<int>();
    for (int round = 0; round < 10; ++round) {
      store(values + thread_idx(), round * 1000 + thread_idx());
      sync_block();
      const int neighbor = (thread_idx() + 37) % num_threads();
      expect_equal(load(values + neighbor), round * 1000 + neighbor, "the neighbor's value");
      sync_block();
    }
  });
}

MOE_CASE(barrier_errors) {
  expect_error(error_of_kernel(64,
                               [] {
                                 if (thread_idx() != 5)
                                   sync_block();
                               }),
               {"Body block 0 thread 5 has returned", "barrier of the block: 0 to 4"});
  expect_error(
      error_of_kernel(64,
                      [] {
                        if (warp_idx() == 1)
                          sync_block();
                      }),
      {"thread 32 comes to the barrier of the block, where 32 of 64 threads have returned"});
}

MOE_CASE(shuffles) {
  emulate(1, 64, 0, [] {
    const int lane = lane_idx();
    expect_equal(shuffle(lane * 10, 7), 70, "shuffle");
    expect_equal(shuffle(lane, lane + 1), (lane + 1) % 32, "shuffle of the next lane");
    expect_equal(shuffle_xor(lane, 5), lane ^ 5, "shuffle_xor");
    expect_equal(shuffle_up(lane, 3), lane < 3 ? lane : lane - 3, "shuffle_up");
    expect_equal(shuffle(int64_t{lane} << 40, 31), int64_t{31} << 40, "shuffle of 8 bytes");
    const Bytes16 wide = shuffle(Bytes16{{1u, 2u, 3u, static_cast<uint32_t>(lane)}}, 9);
    expect_equal(wide.words[3], 9u, "shuffle of 16 bytes");
    // Fast lanes go on while slow ones have not read their answer.
    int sum = lane;
    for (int mask = 16; mask > 0; mask /= 2)
      sum += shuffle_xor(sum, mask);
    expect_equal(sum, 31 * 32 / 2, "sum of the warp");
  });
}

MOE_CASE(votes) {
  emulate(1, 96, 0, [] {
    const int lane = lane_idx();
    expect_equal(ballot(lane % 3 == 0), 0x49249249u, "ballot");
    expect(any(lane == 31), "any of one");
    expect(!any(false), "any of none");
    expect(all(true), "all of all");
    expect(!all(lane != 4), "all but one");
    uint32_t same = 0;
    for (int other = 0; other < 32; ++other)
      same |= static_cast<uint32_t>(other % 5 == lane % 5) << other;
    expect_equal(match_any(static_cast<uint32_t>(lane % 5)), same, "match_any");
    expect_equal(population(0xF00Fu), 8, "population");
    expect_equal(first_bit(0x50u), 4, "first_bit");
    expect_equal(first_bit(0u), -1, "first_bit of none");
  });
}

MOE_CASE(warp_errors) {
  expect_error(error_of_kernel(32,
                               [] {
                                 if (lane_idx() != 3)
                                   shuffle(1, 0);
                               }),
               {"thread 3 has returned", "at a shuffle: 0 to 2"});
  expect_error(error_of_kernel(64,
                               [] {
                                 if (lane_idx() >= 30)
                                   sync_warp();
                               }),
               {"thread 30 comes to sync_warp of warp 0", "lanes have returned: 0 to 29"});
  expect_error(error_of_kernel(32,
                               [] {
                                 if (lane_idx() % 2 == 0)
                                   ballot(true);
                                 else
                                   sync_warp();
                               }),
               {"thread 1 comes to sync_warp", "wait for a vote: 0"});
}

MOE_CASE(shapes) {
  Immediate stream;
  const std::function<void()> body = [] {};
  const auto message = [&](const Launch& shape) {
    return message_of<InvalidArgument>([&] { launch(run_body, shape, Body{&body}); });
  };
  expect_error(message(stream.shape(0, 32)), {"Body", "0 blocks of 32 threads"});
  expect_error(message(stream.shape(1, 48)), {"1 blocks of 48 threads"});
  expect_error(message(stream.shape(1, 1056)), {"of 1056 threads", "1024"});
  expect_error(message(stream.shape(1, 32, 300'000)), {"300000", "232448"});
  expect_error(message({}), {"names no stream"});
}

MOE_CASE(two_grids) {
  Handshake pair;
  simt::Scheduler scheduler;
  int num_ended = 0;
  for (int rank_idx = 0; rank_idx < 2; ++rank_idx)
    simt::launch_grid(
        scheduler,
        {"pair", {2, 64, 0, nullptr}, [&pair, rank_idx] { pair.run(rank_idx); }, rank_idx},
        [&] { ++num_ended; });
  scheduler.run();
  expect_equal(num_ended, 2, "grids that ended");
  expect_equal(pair.flags[0] + pair.flags[1], 10u, "flags");

  // A chain: at the end of one grid the next is launched.
  simt::Scheduler chained;
  std::string order;
  std::function<void(int)> start = [&](int left) {
    simt::launch_grid(
        chained,
        {"chain", {1, 32, 0, nullptr}, [&] { thread_idx() == 0 ? void(order += 'k') : void(); }},
        [&, left] {
          order += 'e';
          if (left > 1)
            start(left - 1);
        });
  };
  start(3);
  chained.run();
  expect_equal(order, std::string("kekeke"), "order");
}

/// Prints switches per second; expects nothing.
MOE_CASE(measure) {
  const auto time = [](const char* what, simt::Scheduler& scheduler, const auto& body) {
    const uint64_t before = scheduler.num_switches();
    const auto start = std::chrono::steady_clock::now();
    body();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    const auto num_switches = static_cast<double>(scheduler.num_switches() - before);
    std::printf(
        "%s: %.1f million switches per second\n", what, num_switches / seconds.count() / 1e6);
  };
  simt::Scheduler scheduler;
  for (int idx = 0; idx < 256; ++idx)
    scheduler.spawn(
        [&] {
          for (int round = 0; round < 20'000; ++round)
            scheduler.yield();
        },
        "yields");
  time("256 fibers that yield", scheduler, [&] { scheduler.run(); });
  Immediate stream;
  const std::function<void()> body = [] {
    for (int round = 0; round < 100; ++round)
      sync_block();
  };
  time("barriers of 4 blocks of 256 threads", stream.scheduler, [&] {
    for (int idx = 0; idx < 20; ++idx)
      launch(run_body, stream.shape(4, 256), Body{&body});
  });
}

}  // namespace

int main(int argc, char** argv) {
  return cases::run_case(argc, argv);
}
