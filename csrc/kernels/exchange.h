#pragma once

#include <cstdint>

#include "device/launch.h"
#include "kernels/buffer.h"
#include "kernels/replicas.h"
#include "layout/capacity.h"
#include "layout/routing.h"

namespace moe::kernels {

/// Choices of this rank, counted in chunks of successive tokens so that many blocks can count.
struct Choices {
  /// device [num_tokens, num_topk]: what the caller gave, ids of experts. Counting copies
  /// it to topk_idx; where these are no slots yet, dispatch writes which it has chosen.
  const int64_t* asked_idx = nullptr;
  int64_t* topk_idx = nullptr;
  int64_t num_tokens = 0;
  int32_t num_topk = 0;
  int32_t num_slots = 0;  ///< layout::num_slots_per_token
  int32_t is_by_rank = 0;
  int32_t tokens_per_chunk = 0;
  int32_t num_chunks = 0;
  /// device [num_chunks, num_experts + num_ranks]: choices of every expert and tokens bound for
  /// every distinct rank; the exchange turns each column into running sums (what came before the
  /// chunk).
  int32_t* chunk_counts = nullptr;
  /// device [num_tokens, num_slots]: how many of the same expert (by rank: tokens of the same rank)
  /// came before in the chunk, -1 for none; by rank: entry i belongs to the i-th distinct rank,
  /// ascending. With TokenSets as by expert, [num_tokens, num_topk].
  int32_t* place_in_chunk = nullptr;
  int64_t* bad_choice =
      nullptr;  ///< device [num_chunks]: first flat index outside the range, or -1
};

/// Host memory that an exchange fills for a host that hears what the ranks say, then or later.
///
/// Layout behind this header: num_ranks rows of Row::stride, as they lay in this rank's workspace;
/// zero for ranks that are not active. Counts and messages are there where a row is uncached or
/// some row is not ok.
struct HostRead {
  uint64_t ticket;  ///< stored last, with release at system scope
  uint64_t epoch;   ///< epoch of the exchange, once it has begun; the host sets it to 0 before
  int32_t status;   ///< OperationStatus
  int32_t reserved[11];
};
static_assert(sizeof(HostRead) == 64);

struct ExchangeParams {
  Buffer buffer;
  Tables tables;

  // The row of this rank.
  layout::OperationArguments arguments;
  Offer offer;
  Offer weights_offer;
  /// host: what is wrong, zero-terminated, where the host rejects the row (status not kOk).
  const char* message = nullptr;
  int32_t status = 0;  ///< layout::RowStatus
  int32_t num_tokens = 0;
  int32_t num_topk = 0;
  int32_t fixed_rows = -1;
  uint64_t needed_bytes = 0;
  uint64_t available_bytes = 0;
  uint64_t heard_epoch = layout::Row::kHeardAll;  ///< last operation that the caller has heard of;
                                                  ///< sent in a row that is ok

  // Uncached dispatch. A bad id makes a row of status kBadExpert, whose needed_bytes is the flat
  // index and whose available_bytes is the id.
  int32_t is_dispatch = 0;  ///< dispatch, cached or not: windows are laid out; else a combine
  int32_t with_counts = 0;
  Choices choices;  ///< with `sets` as if by expert
  Replicas replicas;
  TokenSets sets;
  const uint8_t* is_masked = nullptr;  ///< device [num_ranks] or null
  layout::CapacityRule rule;

  layout::Arrangement arrangement;
  int32_t is_column_major = 0;
  int32_t with_topk_idx = 0;
  const int32_t* kept_counts = nullptr;  ///< device: matrix of the handle, without counts
  /// A combine: every rank adds rows for those that sent them, and needs what these offer.
  int32_t adds_for_peers = 0;

  /// device: status of the captured dispatch that made the handle, or null. Where that is not ok,
  /// which all ranks know alike, nothing moves here either.
  const int32_t* needed_status = nullptr;

  HostRead* host_read = nullptr;  ///< or null
  uint64_t ticket = 0;
};

constexpr int kMaxExchangeThreads = 512;

/// Returns whether the kernel counts choices: the row of a dispatch that the host has found nothing
/// wrong with.
MOE_HOST_DEVICE inline bool counts_choices(const ExchangeParams& params) {
  return params.with_counts != 0 && params.status == static_cast<int32_t>(layout::RowStatus::kOk);
}

/// Returns whether ids are of logical experts, whose rows the counts give to replicas.
inline bool has_replicas(const ExchangeParams& params) {
  return params.replicas.num_experts > 0;
}

/// Exchanges rows: waits until the ring entry is free, publishes this rank's row, takes
/// everybody's, and fills the tables. Blocks of at most kMaxExchangeThreads: as many as
/// Launch::num_blocks, and no more than there are chunks, count the choices; the last to be done
/// goes on, and no other block waits for anything.
///
/// Where the operation ends here (rejected, too many rows; too little room without a host that
/// could make more), it has ended on all ranks alike, and its ring entry is given back.
void launch_exchange(const device::Launch& launch, const ExchangeParams& params);
size_t exchange_shared_bytes(const ExchangeParams& params);
/// Number of blocks of the kernel that exchanges rows, across nodes too.
int num_exchange_blocks(int most_blocks, const ExchangeParams& params);

/// Contents of layout::SecondOffer.
struct OwnOffer {
  Offer offer;  ///< bytes 0 where memory could not be had
  uint64_t needed_bytes = 0;
  uint64_t available_bytes = 0;
};

struct OffersParams {
  Buffer buffer;
  Tables tables;
  OwnOffer own;
  int32_t is_short = 0;                  ///< this rank publishes `own`
  const uint8_t* short_ranks = nullptr;  ///< device [num_ranks]: who publishes one
  /// host [num_ranks] of layout::SecondOffer behind the header.
  HostRead* host_read = nullptr;
  uint64_t ticket = 0;
};

/// Second offers of ranks that were short: updates Tables::peers and sets may_move, or with one
/// failure ends the operation on all ranks (kShort). One block.
void launch_offers(const device::Launch& launch, const OffersParams& params);

}  // namespace moe::kernels
