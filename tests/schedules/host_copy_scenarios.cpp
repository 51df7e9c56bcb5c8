#include <cstring>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/sync.h"
#include "cpu/strided_copy.h"
#include "ops/batched_copy.h"
#include "schedules/host_world.h"
#include "schedules/run.h"

// The batched copy of the CPU backend: in place, through slots that are used again, of one peer and
// of all, and by turns.

namespace moe::simt::checker {

namespace {

ops::CopyItem make_item(int64_t task_id, int peer_rank, std::byte* data, int64_t bytes) {
  ops::CopyItem item;
  item.task_id = task_id;
  item.peer_rank = peer_rank;
  item.data = data;
  item.shape.bytes = bytes;
  item.shape.run_bytes = bytes;
  std::memcpy(item.dtype, "bytes", 6);
  return item;
}

/// Value of every byte from one rank to another in a run.
int value_of(int src_rank, int dst_rank, int run_idx) {
  return 1 + src_rank * 16 + dst_rank * 4 + run_idx;
}

/// Tensors between this rank and every other: one that lands in the heap, one that does not, and
/// one that is the same for all and does not either.
struct Tensors {
  std::vector<std::vector<std::byte>> sources;  ///< [num_ranks]
  std::vector<std::vector<std::byte>> private_targets;
  std::vector<std::byte> common_source;
  std::vector<std::vector<std::byte>> common_targets;  ///< [num_ranks]
  std::vector<std::shared_ptr<Window>> heap_targets;
  int64_t direct_bytes;
  int64_t slot_bytes;

  Tensors(HostRank& rank, int64_t direct_bytes, int64_t slot_bytes)
      : sources(static_cast<size_t>(rank.num_ranks())),
        private_targets(sources.size()),
        common_source(static_cast<size_t>(slot_bytes)),
        common_targets(sources.size()),
        heap_targets(sources.size()),
        direct_bytes(direct_bytes),
        slot_bytes(slot_bytes) {
    for (size_t peer = 0; peer < sources.size(); ++peer) {
      sources[peer].resize(static_cast<size_t>(direct_bytes + slot_bytes));
      private_targets[peer].resize(static_cast<size_t>(slot_bytes));
      common_targets[peer].resize(static_cast<size_t>(slot_bytes));
      heap_targets[peer] = rank.heap().allocate(static_cast<uint64_t>(direct_bytes));
    }
  }

  std::shared_ptr<ops::PreparedCopies> prepare(const HostRank& rank) {
    std::vector<ops::CopyItem> sends;
    std::vector<ops::CopyItem> receives;
    for (int peer_rank = 0; peer_rank < rank.num_ranks(); ++peer_rank) {
      const auto peer = static_cast<size_t>(peer_rank);
      sends.push_back(make_item(1, peer_rank, sources[peer].data(), direct_bytes));
      sends.push_back(make_item(2, peer_rank, sources[peer].data() + direct_bytes, slot_bytes));
      sends.push_back(make_item(3, peer_rank, common_source.data(), slot_bytes));
      receives.push_back(make_item(1, peer_rank, heap_targets[peer]->data(), direct_bytes));
      receives.push_back(make_item(2, peer_rank, private_targets[peer].data(), slot_bytes));
      receives.push_back(make_item(3, peer_rank, common_targets[peer].data(), slot_bytes));
    }
    return std::make_shared<ops::PreparedCopies>(
        sends, receives, rank.rank_idx(), rank.num_ranks(), "", nullptr);
  }

  void fill(const HostRank& rank, int run_idx) {
    for (size_t peer = 0; peer < sources.size(); ++peer)
      std::memset(sources[peer].data(),
                  value_of(rank.rank_idx(), static_cast<int>(peer), run_idx),
                  sources[peer].size());
    std::memset(common_source.data(),
                value_of(rank.rank_idx(), rank.rank_idx(), run_idx),
                common_source.size());
  }

  /// Checks what has come; then destinations belong to the caller again, who writes there.
  void check(const HostRank& rank, int run_idx) {
    for (size_t peer = 0; peer < sources.size(); ++peer) {
      const auto expected =
          static_cast<std::byte>(value_of(static_cast<int>(peer), rank.rank_idx(), run_idx));
      std::vector<std::byte> found(static_cast<size_t>(direct_bytes));
      sync::read_shared(found.data(), heap_targets[peer]->data(), found.size());
      found.insert(found.end(), private_targets[peer].begin(), private_targets[peer].end());
      for (size_t i = 0; i < found.size(); ++i)
        if (found[i] != expected)
          return rank.fail(concat("batched copy: byte ", i, " from rank ", peer, " is wrong"));
      const auto common =
          static_cast<std::byte>(value_of(static_cast<int>(peer), static_cast<int>(peer), run_idx));
      for (const std::byte byte : common_targets[peer])
        if (byte != common)
          return rank.fail(concat("batched copy: what rank ", peer, " sends to all is wrong"));
      std::memset(common_targets[peer].data(), 0x7F, common_targets[peer].size());
      sync::fill_shared(heap_targets[peer]->data(), 0x7F, static_cast<size_t>(direct_bytes));
      std::memset(private_targets[peer].data(), 0x7F, private_targets[peer].size());
    }
  }
};

}  // namespace

MOE_SCENARIO(host_copy,
             "CPU: batched copies in place and through few small slots, again and again") {
  HostWorld::Options options;
  options.num_ranks = static_cast<int>(run.random().between(1, 3));
  options.threads.cache_bytes = run.random().chance(1, 2) ? 1 : int64_t{1} << 30;
  HostWorld world(run, options);
  const int64_t direct_bytes = 4 * run.random().between(0, 60);
  const int64_t slot_bytes = 4 * run.random().between(0, 100);
  const bool disagrees = run.random().chance(1, 4);
  world.run([&](HostRank& rank) {
    ops::BatchedCopyConfig config;
    config.slot_bytes = 64;
    config.num_slots = 2;
    const auto engine = ops::BatchedCopy::create(rank.group(), config, {});
    Tensors tensors(rank, direct_bytes, slot_bytes);
    const auto prepared = tensors.prepare(rank);
    for (int run_idx = 0; run_idx < 3; ++run_idx) {
      tensors.fill(rank, run_idx);
      const bool with_checksums = run_idx != 1;
      engine->run(prepared, with_checksums, {});
      tensors.check(rank, run_idx);
      for (const ops::CopyItem& send : prepared->sends()) {
        const auto hashed = prepared->checksum_of(send);
        if (hashed.has_value() != with_checksums ||
            (hashed && *hashed != cpu::checksum(send.place(), send.shape.bytes)))
          rank.fail(concat("the checksum of task ", send.task_id, " is of other bytes"));
      }
    }
    if (disagrees) {
      // The last rank sends what nobody receives: all hear of it before a byte moves.
      std::vector<ops::CopyItem> sends;
      if (rank.rank_idx() == rank.num_ranks() - 1)
        sends.push_back(make_item(9, 0, tensors.sources[0].data(), 0));
      const auto wrong = std::make_shared<ops::PreparedCopies>(
          sends, std::vector<ops::CopyItem>{}, rank.rank_idx(), rank.num_ranks(), "", nullptr);
      try {
        engine->run(wrong, false, {});
        rank.fail("a send that nobody receives was not reported");
      } catch (const InvalidArgument&) {
      }
      tensors.fill(rank, 3);
      engine->run(prepared, false, {});
      tensors.check(rank, 3);
    }
    engine->destroy();
  });
}

}  // namespace moe::simt::checker
