#pragma once

#include <cstdint>
#include <cstring>

#include "core/symmetric_memory.h"
#include "device/primitives.h"
#include "kernels/exchange.h"
#include "kernels/wait.h"

// Publications of one rank: its row, that it is busy, and to the host that its answer is there.

namespace moe::kernels {

/// Stores a struct that is a multiple of 8 bytes.
template <typename T>
MOE_DEVICE void store_struct(T* to, const T& value) {
  static_assert(sizeof(T) % 8 == 0);
  uint64_t words[sizeof(T) / 8];
  std::memcpy(words, &value, sizeof(T));
  for (size_t i = 0; i < sizeof(T) / 8; ++i)
    device::store(reinterpret_cast<uint64_t*>(to) + i, words[i]);
}

template <typename T>
MOE_DEVICE T load_struct(const T* from) {
  static_assert(sizeof(T) % 8 == 0);
  uint64_t words[sizeof(T) / 8];
  for (size_t i = 0; i < sizeof(T) / 8; ++i)
    words[i] = device::load(reinterpret_cast<const uint64_t*>(from) + i);
  T value;
  std::memcpy(&value, words, sizeof(T));
  return value;
}

/// Copies words by all threads of a block, several at a time under way. They are counted in 32
/// bits: callers divide by what a rank has of them.
/// @param from      from(i) returns the address of word i
/// @param to        to(i) returns the address that it is copied to
/// @param is_there  is_there(i): where not, the word is 0
template <typename Word, typename From, typename To, typename IsThere>
MOE_DEVICE void block_copy(int num_words, const From& from, const To& to, const IsThere& is_there) {
  constexpr int kBatch = 4;
  const int stride = device::num_threads();
#pragma unroll 1
  for (int first = device::thread_idx(); first < num_words; first += kBatch * stride) {
    Word words[kBatch] = {};
    for (int i = 0; i < kBatch; ++i)
      if (first + i * stride < num_words && is_there(first + i * stride))
        words[i] = device::load<Word>(from(first + i * stride));
    for (int i = 0; i < kBatch; ++i)
      if (first + i * stride < num_words)
        device::store<Word>(to(first + i * stride), words[i]);
  }
}

/// Raises the flag of something written to a peer.
MOE_DEVICE void raise_flag(uint64_t* flag, uint64_t epoch) {
  device::store_release<device::Scope::kSystem>(flag, epoch);
}

/// Sets of tokens that go along a rail with a row, see TokenSets; in multiples of 8 bytes.
struct SentSets {
  const std::byte* from = nullptr;
  int64_t bytes = 0;
};

/// Successive ranks.
struct RankRange {
  int first;
  int count;

  /// The i-th of them behind @p own_rank, which is one: each rank starts behind itself, so that no
  /// reader gets everything at the end.
  MOE_DEVICE int behind(int own_rank, int i) const {
    return first + (own_rank - first + 1 + i) % count;
  }
};

/// Writes the row of this rank to the active ranks of @p readers; all threads of a block.
/// @param row         shared, all but its epoch
/// @param used_bytes  a multiple of 4, the row's header at least
MOE_DEVICE void publish_row(const Buffer& buffer,
                            const RankRange& readers,
                            uint64_t epoch,
                            const std::byte* row,
                            int64_t used_bytes) {
  using device::Bytes16;
  constexpr auto kWordBytes = static_cast<int64_t>(sizeof(Bytes16));
  const auto peer_row = [&](int i) {
    const int peer_rank = readers.behind(buffer.rank_idx, i);
    const bool is_active = device::load_constant(buffer.is_active + peer_rank) != 0;
    return is_active ? &workspace(buffer, peer_rank).row(epoch, buffer.rank_idx) : nullptr;
  };
  const auto num_words = static_cast<int>((used_bytes + kWordBytes - 1) / kWordBytes);
#pragma unroll 1
  for (int i = device::thread_idx(); i < num_words * readers.count; i += device::num_threads()) {
    auto* const to = reinterpret_cast<std::byte*>(peer_row(i / num_words));
    const int64_t offset = i % num_words * kWordBytes;
    if (to == nullptr)
      continue;
    if (offset > 0)
      device::store(reinterpret_cast<Bytes16*>(to + offset),
                    device::load(reinterpret_cast<const Bytes16*>(row + offset)));
    else  // the first half is the flag
      device::store(reinterpret_cast<uint64_t*>(to + 8),
                    device::load(reinterpret_cast<const uint64_t*>(row + 8)));
  }
  device::sync_block();
#pragma unroll 1
  for (int i = device::thread_idx(); i < readers.count; i += device::num_threads())
    if (layout::Row* const to = peer_row(i))
      raise_flag(&to->epoch, epoch);
}

/// Writes the second offer of @p src_rank, all but its epoch, to the active ranks of @p readers;
/// all threads of a block.
MOE_DEVICE void publish_offer(const Buffer& buffer,
                              const RankRange& readers,
                              uint64_t epoch,
                              int src_rank,
                              const layout::SecondOffer& second) {
#pragma unroll 1
  for (int i = device::thread_idx(); i < readers.count; i += device::num_threads()) {
    const int peer_rank = readers.behind(buffer.rank_idx, i);
    if (device::load_constant(buffer.is_active + peer_rank) == 0)
      continue;
    layout::SecondOffer& to = workspace(buffer, peer_rank).second_offer(epoch, src_rank);
    store_struct(&to.offer, second.offer);
    device::store(&to.needed_bytes, second.needed_bytes);
    device::store(&to.available_bytes, second.available_bytes);
    raise_flag(&to.epoch, epoch);
  }
}

/// Says to peers that wait what this rank is doing. One thread.
MOE_DEVICE void show_phase(const Buffer& buffer, layout::Phase phase) {
  device::store_relaxed<device::Scope::kSystem>(
      &workspace(buffer, buffer.rank_idx).activity().phase, static_cast<int32_t>(phase));
}

/// Address here of a place in a peer's heap; waits until the peer's segment is known here. Host
/// memory is read for the first offer of a segment alone.
/// @return false when the kernel is to leave.
MOE_DEVICE bool resolve(const Buffer& buffer,
                        const WaitSite& site,
                        int peer_rank,
                        const Offer& offer,
                        std::byte** place) {
  if (offer.segment_idx >= static_cast<uint32_t>(Buffer::kMaxSegments)) {
    leave(buffer, Cause::kTimedOut, peer_rank, site, Buffer::kMaxSegments, offer.segment_idx);
    return false;
  }
  const int64_t entry = int64_t{peer_rank} * Buffer::kMaxSegments + offer.segment_idx;
  // Several threads may find the same.
  uint64_t base = device::load_relaxed<device::Scope::kDevice>(buffer.found_bases + entry);
  if (base == 0) {
    const uint64_t* const told = buffer.segment_bases + entry;
    if (!await_flag(buffer, site, peer_rank, told, 1, buffer.stall_limit_ns))
      return false;
    base = device::load_relaxed<device::Scope::kSystem>(told);
    device::store_relaxed<device::Scope::kDevice>(buffer.found_bases + entry, base);
  }
  *place = reinterpret_cast<std::byte*>(base + offer.offset);
  return true;
}

/// Tells a host that polls. What the block stored before a barrier is there when it sees the
/// ticket.
MOE_DEVICE void give_ticket(HostRead* host_read, uint64_t ticket, OperationStatus status) {
  device::store(&host_read->status, static_cast<int32_t>(status));
  device::store_release<device::Scope::kSystem>(&host_read->ticket, ticket);
}

}  // namespace moe::kernels
