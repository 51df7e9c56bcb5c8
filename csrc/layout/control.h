#pragma once

#include <cstdint>

#include "core/sync.h"

namespace moe::layout {

/// kEvicted: `ranks` has first who declared the others failed.
enum class AbortCause : int32_t { kPeerFailed = 0, kPeerTimeout = 1, kEvicted = 2 };

/// Why a communicator was aborted; written once by the first rank that aborts, into every peer.
///
/// `state` is 0, or four times the generation (recoveries that the writer has been through) plus
/// kBeingWritten or kSet; a record of an earlier generation than the reader's means nothing.
///
/// Byte map (512 bytes): [0, 4) state; [4, 8) cause; [8, 12) operation; [12, 16) phase;
///   [16, 24) epoch; [24, 28) num_ranks, how many of `ranks` count; [28, 156) ranks;
///   [156, 512) message, zero-terminated.
struct alignas(64) AbortRecord {
  static constexpr int kMaxRanks = 32;
  static constexpr int kMessageBytes = 356;
  static constexpr uint32_t kBeingWritten = 1;
  static constexpr uint32_t kSet = 2;

  static constexpr uint32_t word(uint32_t generation, uint32_t state) {
    return generation << 2 | state;
  }
  static constexpr uint32_t generation(uint32_t word) { return word >> 2; }
  static constexpr bool is_set(uint32_t word) { return (word & 3) == kSet; }

  uint32_t state;
  int32_t cause;
  int32_t operation;
  int32_t phase;
  int64_t epoch;
  int32_t num_ranks;
  int32_t ranks[kMaxRanks];
  char message[kMessageBytes];
};
static_assert(sizeof(AbortRecord) == 512);

/// The operation a rank entered last on any buffer, for peers that wait for it on another.
///
/// Byte map (64 bytes): [0, 8) buffer_number; [8, 16) epoch; [16, 20) operation, 0 when it has
/// ended;
///   rest unused.
struct alignas(64) Presence {
  uint64_t buffer_number;
  uint64_t epoch;
  int32_t operation;
};
static_assert(sizeof(Presence) == 64);

/// One per (communicator, rank), in that rank's heap; peers write to it.
struct ControlBlock {
  sync::Doorbell doorbell;
  AbortRecord abort;
  Presence presence;  ///< written by its owner
};
static_assert(sizeof(ControlBlock) == 640);

}  // namespace moe::layout
