#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/symmetric_memory.h"
#include "layout/copy_table.h"
#include "layout/strided.h"
#include "ops/copy_stream.h"

namespace moe::ops {

/// One end of one copy: a tensor of this rank, and the task it belongs to.
struct CopyItem {
  int64_t task_id = 0;
  int peer_rank = 0;
  std::byte* data = nullptr;
  layout::StridedBytes shape;
  char dtype[layout::ReceiveEntry::kNameBytes] = {};  ///< zero-padded

  cpu::Place place() const { return {data, shape.is_contiguous() ? nullptr : &shape}; }
};

/// Copies of a rank in a batched copy: its sends and receives, in the orders that runs need, and
/// what was worked out with the peers in the last run.
///
/// Belongs to one engine; used by one run at a time.
class PreparedCopies {
 public:
  /// @param owner  Keeps the tensors.
  /// A mistake in the items is kept in problem() for the next run, which tells every rank.
  PreparedCopies(std::vector<CopyItem> sends,
                 std::vector<CopyItem> receives,
                 int rank_idx,
                 int num_ranks,
                 std::string problem,
                 std::shared_ptr<void> owner);

  const std::string& problem() const { return problem_; }
  const std::vector<CopyItem>& sends() const { return sends_; }
  const std::vector<CopyItem>& receives() const { return receives_; }
  int num_ranks() const { return num_ranks_; }

  /// Sends of one peer are adjacent, in ascending order of their task ids; so are receives.
  size_t first_send(int peer_rank) const { return first_send_[static_cast<size_t>(peer_rank)]; }
  size_t first_receive(int peer_rank) const {
    return first_receive_[static_cast<size_t>(peer_rank)];
  }

  /// Indices of sends with bytes, by source address: neighbors in memory are read together. Those
  /// of the same bytes are adjacent, in ascending order of their peers.
  const std::vector<uint32_t>& by_address() const { return by_address_; }

  /// Makes the table of receives in @p memory. @throws CapacityError
  /// @param number  Number of this table among all of its rank.
  void make_table(SymmetricMemory& memory, uint64_t number);
  /// Returns whether there is a table, which knows all of @p memory that is shared by now.
  bool has_table(const SymmetricMemory& memory) const {
    return table_window_ != nullptr && num_shared_ == memory.num_shared();
  }
  uint64_t number() const { return number_; }
  const std::shared_ptr<Window>& table_window() const { return table_window_; }
  layout::ReceiveTable table() const { return layout::ReceiveTable(table_window_->data()); }

  /// Forgets the table, which peers may still look at, and what rests on it.
  std::shared_ptr<Window> take_table();

  /// Place where this rank itself writes a receive, which may be shared with peers.
  cpu::Place destination(size_t receive_idx) const {
    return {written_[receive_idx], receives_[receive_idx].place().shape};
  }

  /// From now until end_writes() peers may write to shared pages that receives lie in.
  /// @return Whether all are still shared; where not, nothing begins, and the table is of no use.
  bool begin_writes();
  /// @param is_failed  Peers may still write.
  void end_writes(bool is_failed);
  const std::vector<std::shared_ptr<SharedPages>>& shared_pages() const { return shared_pages_; }

  const std::shared_ptr<void>& owner() const { return owner_; }

  /// A run begins, which forgets the checksums of the last.
  void begin_checksums();
  /// All sources have been hashed.
  void end_checksums() { has_checksums_ = true; }
  /// The sum of the blocks of the checksum of a send, and of those that are sent with it, while it
  /// is added up.
  uint64_t* blocks_of(size_t send_idx) {
    hashed_as_[send_idx] = static_cast<uint32_t>(send_idx);
    return &blocks_[send_idx];
  }
  /// The bytes of a send are read once, with those of another.
  void hash_as(size_t send_idx, uint32_t other_idx) { hashed_as_[send_idx] = other_idx; }
  /// The checksum of what the last run sent as this task to this peer. None where that run hashed
  /// nothing or failed, or where it sent bytes of other places than those of @p item.
  std::optional<uint64_t> checksum_of(const CopyItem& item) const;

  /// Bytes that go through the same slots, to one peer or to several.
  struct SlotStream {
    std::vector<int> peers;  ///< peers that receive them, ascending; or the one that sends them
    CopyStream stream;
    int64_t num_entries = 0;  ///< entries of each receiver
  };

  /// Moves of a run, worked out from this rank's items and its peers' tables.
  struct Route {
    std::vector<uint64_t> numbers;  ///< numbers of every rank's prepared copies; empty for no route
    std::vector<std::vector<uint32_t>> order;  ///< [num_ranks], see ReceiveTable
    std::deque<layout::StridedBytes> peer_shapes;
    CopyStream direct;  ///< in place at peers, and within this rank
    std::vector<SlotStream> outgoing;
    /// Streams of peers; those of a sender adjacent, in the order of its offers.
    std::vector<SlotStream> incoming;
    std::vector<uint8_t> writes_here;  ///< [num_ranks], in place
    int64_t direct_bytes = 0;
    int64_t slot_bytes = 0;
    int64_t local_bytes = 0;
  };
  Route& route() { return route_; }

 private:
  void find_problem(const char* what, const std::vector<CopyItem>& items);
  void find_overlap(const std::vector<CopyItem>& receives);

  std::vector<CopyItem> sends_;
  std::vector<CopyItem> receives_;
  int num_ranks_;
  std::string problem_;
  std::shared_ptr<void> owner_;
  std::vector<size_t> first_send_;     ///< [num_ranks + 1]
  std::vector<size_t> first_receive_;  ///< [num_ranks + 1]
  std::vector<uint32_t> by_address_;
  std::vector<uint64_t> blocks_;     ///< [sends]
  std::vector<uint32_t> hashed_as_;  ///< [sends], whose blocks theirs are
  bool has_checksums_ = false;
  std::vector<std::shared_ptr<SharedPages>> shared_pages_;
  std::vector<std::byte*> written_;  ///< [receives]
  uint64_t num_shared_ = 0;          ///< SymmetricMemory::num_shared() of the table
  std::shared_ptr<Window> table_window_;
  uint64_t number_ = 0;
  Route route_;
};

}  // namespace moe::ops
