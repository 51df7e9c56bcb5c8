#pragma once

#include <cstdint>
#include <string>

#include "group/group.h"

namespace moe::ops {

/// Copies between slots that two ranks share and memory of this rank; sources and destinations do
/// not overlap.
struct ChunkList {
  const int64_t* src = nullptr;    ///< addresses
  const int64_t* dst = nullptr;    ///< addresses
  const int64_t* bytes = nullptr;  ///< each >= 0
  int64_t num_chunks = 0;
};

/// Copies every chunk. Called by one thread of the rank.
///
/// @param is_streaming  Store past the caches: for destinations that nobody reads soon.
/// @throws InvalidArgument  a number of bytes is negative; nothing was copied.
void copy_chunks(const ChunkList& chunks, bool is_streaming);

/// Releases @p value to @p word, which lies in memory of @p peer_rank, and wakes that rank: who
/// sees the value there also sees everything this rank stored before.
void post_signal(group::Group& group, uint64_t& word, uint64_t value, int peer_rank);

/// Waits until @p word, in memory of this rank, holds at least @p value, which @p peer_rank posts.
///
/// Aborts the communicator when the peer is gone or does not post within the stall timeout: a peer
/// that takes part in an exchange of slots posts as soon as its own slots allow.
///
/// @param what  What is waited for, for the error.
/// @throws PeerFailed, PeerTimeout  They name @p peer_rank, or what aborted the communicator.
void await_signal(group::Group& group,
                  const uint64_t& word,
                  uint64_t value,
                  int peer_rank,
                  const std::string& what,
                  const group::InterruptCheck& interrupt_check);

/// Tells every peer that this rank gave up an exchange of slots, because of @p message. Does
/// nothing in a communicator that is aborted already.
void give_up_slots(group::Group& group, const std::string& message);

}  // namespace moe::ops
