// Words, shared memory, bulk copies and puts of the emulator as kernels see them.

#include <algorithm>
#include <cstring>

#include "emulated.h"
#include "simt/nic.h"

namespace {

using namespace moe;
using namespace moe::device;
using namespace moe::cases;

MOE_CASE(words) {
  uint32_t count = 0;
  uint64_t wide = 5;
  std::vector<int> order(256, -1);
  emulate(2, 128, 64, [&] {
    const uint32_t before = thread_idx() % 2 == 0
                                ? add_acq_rel<Scope::kDevice>(&count, uint32_t{1})
                                : add_relaxed<Scope::kDevice>(&count, uint32_t{1});
    order[before] = 1;
    add_relaxed<Scope::kSystem>(&wide, uint64_t{1} << 33);
    int* const shared = shared_array<int>();
    if (thread_idx() == 0)
      store(shared, 0);
    sync_block();
    add_shared(shared, 2);
    sync_block();
    expect_equal(load(shared), 256, "sum in shared memory");
    expect_equal(load_shared(shared), 256, "the same, known to be there");
    expect_equal(reinterpret_cast<uintptr_t>(shared) % 128, 0u, "alignment of shared memory");
  });
  expect_equal(std::count(order.begin(), order.end(), 1), 256, "distinct values handed out");
  expect_equal(wide, 5 + (uint64_t{256} << 33), "the wide sum");
  expect_error(error_of_kernel(32, [] { load(reinterpret_cast<const int*>(shared_memory() + 2)); }),
               {"an access of 4 bytes", "not aligned"});
  expect_error(error_of_kernel(32,
                               [] {
                                 store_release<Scope::kBlock>(
                                     reinterpret_cast<uint64_t*>(shared_memory() + 4), 1);
                               }),
               {"an access of 8 bytes", "not aligned"});
  // What is no shared memory of the block has no address that such a load could use.
  expect_error(error_of_kernel(32, [&] { load_shared(&count); }),
               {"loads 4 bytes at", "as shared memory, which its block has 256 bytes of"});
  expect_error(
      error_of_kernel(
          32, [] { load_shared(reinterpret_cast<const uint64_t*>(shared_memory() + 252)); }),
      {"loads 8 bytes at", "has 256 bytes of"});
  // Nobody has written shared memory when a block begins.
  emulate(
      1, 32, 64, [] { expect_equal(load(shared_array<uint32_t>() + lane_idx() % 16), ~0u, ""); });
}

/// A ring of two stages: one thread loads, all read, several rounds; then stores back.
MOE_CASE(bulk_copies) {
  constexpr int kNumRounds = 9;
  constexpr uint32_t kBytes = 256;
  alignas(16) std::byte source[kNumRounds * kBytes];
  alignas(16) std::byte target[kNumRounds * kBytes] = {};
  for (size_t idx = 0; idx < sizeof source; ++idx)
    source[idx] = static_cast<std::byte>(idx * 7 + idx / 256);
  emulate(1, 64, 2 * kBytes + 2 * sizeof(MBarrier), [&] {
    std::byte* const stages = shared_memory();
    auto* const barriers = reinterpret_cast<MBarrier*>(stages + 2 * kBytes);
    const auto load_round = [&](int round) {
      arrive_expect(barriers + round % 2, kBytes);
      bulk_load(stages + round % 2 * kBytes, source + round * kBytes, kBytes, barriers + round % 2);
    };
    if (thread_idx() == 0) {
      init_mbarrier(barriers, 1);
      init_mbarrier(barriers + 1, 1);
      fence_mbarrier_init();
    }
    sync_block();
    if (thread_idx() == 0)
      load_round(0);
    for (int round = 0; round < kNumRounds; ++round) {
      if (thread_idx() == 0 && round + 1 < kNumRounds)
        load_round(round + 1);
      while (!try_wait(barriers + round % 2, static_cast<uint32_t>(round / 2 % 2))) {
      }
      std::byte* const stage = stages + round % 2 * kBytes;
      const auto* const wanted = reinterpret_cast<const uint32_t*>(source + round * kBytes);
      expect_equal(
          load(reinterpret_cast<uint32_t*>(stage) + thread_idx()), wanted[thread_idx()], "loaded");
      sync_block();
      if (thread_idx() == 0) {
        bulk_store(target + round * kBytes, stage, kBytes);
        commit_bulk_stores();
        await_bulk_stores<0>();
      }
      sync_block();
    }
  });
  expect(std::memcmp(source, target, sizeof source) == 0, "bytes stored differ from the source");
}

MOE_CASE(mbarrier_phases) {
  emulate(1, 64, 64, [] {
    auto* const barrier = shared_array<MBarrier>();
    if (thread_idx() == 0)
      init_mbarrier(barrier, 3);
    sync_block();
    expect(!try_wait(barrier, 0), "the first phase has not begun to end");
    expect(try_wait(barrier, 1), "the phase before the first counts as complete");
    sync_block();
    // Three arrivals end it, each with bytes that come later or have come already.
    std::byte* const data = shared_memory() + 16;
    alignas(16) const std::byte source[16] = {};
    if (thread_idx() == 0) {
      bulk_load(data, source, 16, barrier);
      arrive_expect(barrier, 16);
      arrive_expect(barrier, 16);
      expect(!try_wait(barrier, 0), "an arrival and bytes are missing");
      arrive_expect(barrier, 0);
      expect(!try_wait(barrier, 0), "bytes are missing");
      bulk_load(data, source, 16, barrier);
    }
    sync_block();
    expect(try_wait(barrier, 0), "the first phase has ended");
    expect(!try_wait(barrier, 1), "the second runs");
  });
}

MOE_CASE(bulk_errors) {
  const auto with_barrier = [](const std::function<void(MBarrier*)>& body) {
    return error_of_kernel(32, [&] {
      auto* const barrier = shared_array<MBarrier>();
      if (thread_idx() == 0) {
        init_mbarrier(barrier, 1);
        body(barrier);
      }
    });
  };
  alignas(16) static std::byte memory[512] = {};
  expect_error(
      with_barrier([](MBarrier* barrier) { bulk_load(shared_memory() + 24, memory, 16, barrier); }),
      {"Body block 0 thread 0", "a bulk copy of 16 bytes", "multiples of 16"});
  expect_error(with_barrier([](MBarrier*) { bulk_store(memory + 8, shared_memory() + 16, 16); }),
               {"multiples of 16"});
  expect_error(with_barrier([](MBarrier*) { bulk_store(memory, shared_memory() + 16, 40); }),
               {"a bulk copy of 40 bytes"});
  expect_error(with_barrier([](MBarrier* barrier) {
                 bulk_load(shared_memory() + 16, memory, 256, barrier);
               }),
               {"256 bytes at offset 16 of shared memory, which has 256"});
  expect_error(with_barrier([](MBarrier* barrier) { arrive_expect(barrier + 2, 0); }),
               {"was not initialized"});
  expect_error(with_barrier([](MBarrier* barrier) {
                 arrive_expect(barrier, 16);
                 arrive_expect(barrier, 16);
               }),
               {"all its 1 arrivals", "misses 32 bytes"});
  expect_error(with_barrier([](MBarrier* barrier) { init_mbarrier(barrier, 0); }),
               {"0 arrivals", "1048575"});
  expect_error(with_barrier([](MBarrier* barrier) { arrive_expect(barrier, 1 << 20); }),
               {"1048575", "1048576"});
}

/// Symmetric memory of two ranks of one process.
struct TwoNodes {
  static constexpr int kNumPuts = 64;
  struct Region {
    uint64_t sent[kNumPuts];
    uint64_t received[kNumPuts];
    uint64_t signals[kNumPuts];
  };
  Region regions[2] = {};

  TwoNodes() {
    std::vector<std::byte*> bases = {base(0), base(1)};
    for (int rank_idx = 0; rank_idx < 2; ++rank_idx)
      simt::Nic::connect(base(rank_idx), sizeof(Region), bases);
  }
  ~TwoNodes() {
    simt::Nic::disconnect(base(0));
    simt::Nic::disconnect(base(1));
  }
  std::byte* base(int rank_idx) { return reinterpret_cast<std::byte*>(regions + rank_idx); }
  /// By a warp of rank 0.
  void put(int i) {
    Region& own = regions[0];
    put_signal(1,
               reinterpret_cast<std::byte*>(own.received + i),
               reinterpret_cast<const std::byte*>(own.sent + i),
               8,
               own.signals + i,
               9);
  }
};

/// Puts arrive by themselves, late and in another order, each signal behind its bytes.
MOE_CASE(puts) {
  constexpr int kNumPuts = TwoNodes::kNumPuts;
  TwoNodes nodes;
  TwoNodes::Region& there = nodes.regions[1];
  std::vector<int> order;
  int num_late = 0;
  emulate(1, 64, 0, [&] {
    if (warp_idx() == 1) {
      // The peer: looks for whatever has come, and never finds a signal without its bytes.
      bool has_come[kNumPuts] = {};
      while (lane_idx() == 0 && order.size() < kNumPuts) {
        for (int i = 0; i < kNumPuts; ++i) {
          if (has_come[i] || load_acquire<Scope::kSystem>(there.signals + i) != 9)
            continue;
          has_come[i] = true;
          order.push_back(i);
          expect_equal(load(there.received + i), uint64_t(100 + i), "bytes before their signal");
        }
        pause(32);
      }
      return;
    }
    for (int i = 0; i < kNumPuts; ++i) {
      if (lane_idx() == 0)
        store(nodes.regions[0].sent + i, uint64_t(100 + i));
      nodes.put(i);
      sync_warp();
      if (lane_idx() == 0)
        num_late += load_relaxed<Scope::kSystem>(there.signals + i) != 9;
    }
  });
  expect_equal(order.size(), size_t(kNumPuts), "puts that came without quiet()");
  expect(!std::is_sorted(order.begin(), order.end()), "puts overtake each other");
  expect(num_late > 0, "a put is not there at once");
  expect_equal(simt::Nic::sent_bytes(nodes.base(0)), uint64_t(8 * kNumPuts), "payload");
  expect_equal(simt::Nic::sent_bytes(nodes.base(1)), uint64_t(0), "payload of the peer");
}

MOE_CASE(quiet) {
  TwoNodes nodes;
  TwoNodes::Region& own = nodes.regions[0];
  emulate(1, 32, 0, [&] {
    if (lane_idx() == 0)
      store(own.sent, 7);
    for (int i = 0; i < 4; ++i)
      nodes.put(i);
    quiet();
    for (int i = 0; i < 4; ++i)
      expect_equal(load(nodes.regions[1].signals + i), 9u, "a signal after quiet()");
    expect_equal(load(nodes.regions[1].received), 7u, "bytes after quiet()");
  });
  uint64_t elsewhere = 0;
  expect_error(error_of_kernel(32, [&] { put_signal(1, nullptr, nullptr, 0, &elsewhere, 1); }),
               {"a put of 8 bytes", "not symmetric memory"});
  expect_error(error_of_kernel(32, [&] { put_signal(2, nullptr, nullptr, 0, own.signals, 1); }),
               {"a put to rank 2", "does not join"});
}

}  // namespace

int main(int argc, char** argv) {
  return cases::run_case(argc, argv);
}
