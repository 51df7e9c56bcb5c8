#pragma once

#include <cstddef>
#include <cstdint>

#include "layout/window.h"
#include "layout/workspace.h"

// Data that kernels of one buffer share. Every pointer is an address that the device can use;
// memory is
//   device:   private to this rank
//   heap:     this rank's or a peer's, reached by peers too
//   host:     page-locked host memory, written by one side and polled by the other

namespace moe::kernels {

/// Why a kernel left before its end.
enum class Cause : uint32_t {
  kNone = 0,
  kAborted = 1,   ///< the abort word was set
  kTimedOut = 2,  ///< a wait ran into its limit
};

/// Device memory of a buffer that its kernels count in. Zero before the first operation.
struct BufferState {
  uint64_t epoch;            ///< epoch of the last operation whose exchange began
  uint64_t refused_epoch;    ///< epoch of the last in which no row moved, as all ranks found alike
  uint32_t has_left;         ///< a kernel left early: later ones return at once. Reset by the host
  uint32_t num_blocks_done;  ///< blocks done of the running kernel; the last sets it to 0 again
};

/// Host memory: who left a wait, and why. Written once per buffer until the host has reset it.
///
/// Byte map (64 bytes): [0, 4) cause, stored last with release; [4, 8) peer_rank; [8, 12) phase
///   (layout::Phase); [12, 16) operation; [16, 24) epoch; [24, 32) expected; [32, 40) seen.
struct alignas(64) WaitReport {
  uint32_t cause;
  int32_t peer_rank;
  int32_t phase;
  int32_t operation;
  uint64_t epoch;
  uint64_t expected;
  uint64_t seen;
};
static_assert(sizeof(WaitReport) == 64);

/// Host memory: how long kernels of a buffer have waited for one rank, since it was made. One
/// thread waits for a rank at a time; the host may read it beside running kernels.
struct WaitTotals {
  uint64_t waited_ns;
  uint64_t num_waits;  ///< waits that were not over at the first look
};

/// State that every operation of a buffer shares on this rank. Passed by value.
struct Buffer {
  static constexpr int kMaxSegments = 256;

  int32_t rank_idx = 0;
  int32_t num_ranks = 0;
  int32_t num_experts = 0;
  int32_t num_local_experts = 0;
  int32_t depth = 0;  ///< entries of a workspace's ring

  std::byte* const* workspaces =
      nullptr;                            ///< device [num_ranks]: base of every control area (heap)
  const uint8_t* is_active = nullptr;     ///< device [num_ranks]: 0 for ranks a recovery excluded
  const uint8_t* is_elsewhere = nullptr;  ///< device [num_ranks]: 1 for ranks on another device
  const int32_t* expert_rank = nullptr;   ///< device [num_experts]
  /// device [num_experts]: ids ordered by (owner, id); [num_ranks + 1]: where an owner's begin.
  const int32_t* experts_by_rank = nullptr;
  const int32_t* first_of_rank = nullptr;

  BufferState* state = nullptr;  ///< device
  WaitReport* report = nullptr;  ///< host
  WaitTotals* waits = nullptr;   ///< host [num_ranks], or null where nobody asks
  /// host: layout::AbortRecord::state of this rank. Kernels leave once its generation is at least
  /// abort_generation and it is set.
  const uint32_t* abort_word = nullptr;
  uint32_t abort_generation = 0;
  uint64_t stall_limit_ns = 0;    ///< for a peer that has entered the operation
  uint64_t arrival_limit_ns = 0;  ///< for a peer that has not
  uint64_t first_epoch = 1;       ///< after a recovery: flags of earlier epochs mean nothing
  /// host [num_ranks, kMaxSegments]: address here of every peer's segment, 0 until it is known.
  const uint64_t* segment_bases = nullptr;
  /// device, of the same shape: entries of it that kernels have read, which never change; else 0.
  uint64_t* found_bases = nullptr;

  MOE_HOST_DEVICE layout::Workspace workspace(std::byte* base) const {
    return layout::Workspace(base, num_ranks, num_experts, depth);
  }
};

/// One destination or source rank of the operation that runs.
struct Peer {
  /// Its window as this rank addresses it; null where no row goes. That of this rank itself is
  /// there whenever it has any bytes.
  std::byte* rows;
  std::byte* weights;            ///< combine: where weights are pulled from
  layout::ReceiveWindow window;  ///< dispatch: regions of its receive window
  int32_t is_sent_to;            ///< this rank has rows there (dispatch: sends, combine: pulls)
  int32_t is_received_from;      ///< it has rows here
};

/// Device memory of one operation: what the exchange found, for the kernels behind it.
struct Tables {
  uint64_t* epoch = nullptr;    ///< [1]
  int32_t* may_move = nullptr;  ///< [1] 1 when rows may move: no rank rejected, all have room
  /// [2, num_ranks]: the second part is where add_rank_sums says that rows lie that are alone.
  Peer* peers = nullptr;
  int32_t* counts = nullptr;  ///< [num_ranks, Row::num_counts]: the count matrix that was kept
  int64_t* stream_starts = nullptr;  ///< by expert [num_experts], by rank [num_ranks]: first
                                     ///< row that this rank writes there
  int64_t* num_rows = nullptr;       ///< [2]: rows of this rank's window, num_recv_topk
  int64_t* num_tokens_per_expert = nullptr;  ///< [num_local_experts], kept choices
  int32_t* expert_offsets = nullptr;         ///< [num_local_experts + 1], padded starts
  int32_t* status = nullptr;  ///< [2]: OperationStatus, rows dropped here (saturating)
};

/// Outcome that a captured operation leaves to be looked at later; Tables::status[0].
enum class OperationStatus : int32_t {
  kOk = 0,
  kRejected = 1,  ///< a rank's input was bad: nobody sent anything
  kOverflow = 2,  ///< more rows than a capacity that raises allows: nobody sent anything
  kShort = 3,     ///< a window offered is too small: nobody has sent anything yet
  kLeft = 4,      ///< aborted or timed out
};

}  // namespace moe::kernels
