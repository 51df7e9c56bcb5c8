#pragma once

#include <cstddef>
#include <cstdint>

#include "core/symmetric_memory.h"
#include "layout/workspace.h"

namespace moe::layout {

/// Row of a rank to a peer at the start of a batched copy.
///
/// Byte map (512 bytes):
///   [0, 8)      epoch, the flag: stored last, released
///   [8, 12)     status, a RowStatus
///   [16, 24)    prepared_number: equal only where everything but the bytes is as it was
///   [24, 48)    offer of the sender's ReceiveTable
///   [48, 64)    first_entry, num_entries: the reader's share of that table
///   [64, 80)    needed and available bytes (status kNoCapacity)
///   [80, 512)   status not kOk: a message, zero-terminated
struct alignas(64) CopyRow {
  static constexpr int64_t kMessageBytes = 432;

  uint64_t epoch;
  int32_t status;
  uint32_t reserved;
  uint64_t prepared_number;
  Offer table;
  int64_t first_entry;
  int64_t num_entries;
  uint64_t needed_bytes;
  uint64_t available_bytes;
  char message[kMessageBytes];
};
static_assert(sizeof(CopyRow) == 512);

/// Slots that the reader of a verdict empties: [0, 24) offer of CopySlots; [24, 32) num_entries,
/// how many of the reader's entries come through them.
struct OfferedSlots {
  Offer slots;
  int64_t num_entries;
};
static_assert(sizeof(OfferedSlots) == 32);

/// Verdict of a rank on its sends beside the receives of its peers, to one of these.
///
/// Byte map (768 bytes):
///   [0, 8)      epoch, the flag: stored last, released
///   [8, 12)     status, a RowStatus
///   [12, 16)    num_offers
///   [16, 32)    needed and available bytes (status kNoCapacity)
///   [32, 256)   num_offers OfferedSlots, in the order in which entries are listed (ReceiveTable)
///   [256, 768)  status not kOk: a message, zero-terminated
struct alignas(64) CopyVerdict {
  static constexpr int64_t kMessageBytes = 512;
  static constexpr int kMaxOffers = 7;

  uint64_t epoch;
  int32_t status;
  int32_t num_offers;
  uint64_t needed_bytes;
  uint64_t available_bytes;
  OfferedSlots offers[kMaxOffers];
  char message[kMessageBytes];
};
static_assert(sizeof(CopyVerdict) == 768);

/// A count within an epoch, in one word, so that what an earlier epoch left behind counts as 0.
constexpr uint64_t count_word(uint64_t epoch, uint64_t count) {
  return epoch << 32 | count;
}
constexpr uint64_t count_in_epoch(uint64_t word, uint64_t epoch) {
  return word >> 32 == (epoch & 0xFFFFFFFFu) ? word & 0xFFFFFFFFu : 0;
}

/// A word of one peer, alone on its cache line.
struct alignas(64) Word {
  uint64_t value;
};
static_assert(sizeof(Word) == 64);

/// Slots in the heap of a rank, which fills them for the peers that read them: one, or several that
/// receive the same bytes. A slot is filled again once each of these has emptied it.
///
/// Byte map, R ranks:
///   [0, 64)  filled: count_word of slots filled
///   R lines  emptied: count_word of slots that reader p has emptied; unused for other ranks
///   the slots
class CopySlots {
 public:
  CopySlots() = default;
  CopySlots(std::byte* base, int num_ranks) : base_(base), num_ranks_(num_ranks) {}

  static int64_t header_bytes(int num_ranks) { return 64 + int64_t{64} * num_ranks; }

  Word& filled() const { return *reinterpret_cast<Word*>(base_); }
  Word& emptied(int reader) const {
    return *reinterpret_cast<Word*>(base_ + 64 + int64_t{64} * reader);
  }
  std::byte* data() const { return base_ + header_bytes(num_ranks_); }

 private:
  std::byte* base_ = nullptr;
  int num_ranks_ = 0;
};

/// Control area of one batched copy on one rank.
///
/// Byte map, R ranks, lines of 64 bytes:
///   [0, 64)   activity of the owner; progress rises while it moves bytes and while it waits
///   R lines   closed: peer p raises closed[p] when it destroys its end
///   R lines   done: epoch that p has taken part in to its end
///   R lines   stopped: epoch in which p gave up and writes no more
///   R rows, R verdicts
/// One of each is enough: a rank ends an epoch only after every verdict of it, and a peer gives its
/// verdict after it has read every row.
class CopyWorkspace {
 public:
  CopyWorkspace() = default;
  CopyWorkspace(std::byte* base, int num_ranks) : base_(base), num_ranks_(num_ranks) {}

  static int64_t bytes(int num_ranks) {
    return 64 + num_ranks * (kNumLines * int64_t{64} +
                             static_cast<int64_t>(sizeof(CopyRow) + sizeof(CopyVerdict)));
  }

  std::byte* base() const { return base_; }
  Activity& activity() const { return *reinterpret_cast<Activity*>(base_); }
  Word& closed(int rank_idx) const { return line(0, rank_idx); }
  Word& done(int rank_idx) const { return line(1, rank_idx); }
  Word& stopped(int rank_idx) const { return line(2, rank_idx); }
  CopyRow& row(int rank_idx) const {
    return *reinterpret_cast<CopyRow*>(base_ + rows_offset() + int64_t{512} * rank_idx);
  }
  CopyVerdict& verdict(int rank_idx) const {
    return *reinterpret_cast<CopyVerdict*>(base_ + rows_offset() + int64_t{512} * num_ranks_ +
                                           int64_t{768} * rank_idx);
  }

 private:
  static constexpr int64_t kNumLines = 3;

  int64_t rows_offset() const { return 64 + kNumLines * 64 * num_ranks_; }
  Word& line(int64_t kind, int rank_idx) const {
    return *reinterpret_cast<Word*>(base_ + 64 + (kind * num_ranks_ + rank_idx) * 64);
  }

  std::byte* base_ = nullptr;
  int num_ranks_ = 0;
};

}  // namespace moe::layout
