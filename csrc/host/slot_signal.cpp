#include "host/slot_signal.h"

#include "core/error.h"
#include "core/sync.h"
#include "host/row_kernels.h"
#include "host/wait.h"

namespace moe::host {

void copy_chunks(const ChunkList& chunks, bool is_streaming) {
  for (int64_t i = 0; i < chunks.num_chunks; ++i)
    MOE_CHECK(chunks.bytes[i] >= 0, "chunk ", i, " has ", chunks.bytes[i], " bytes");
  const RowKernels& kernels = best_row_kernels();
  const StoreMode mode = store_mode(is_streaming);
  for (int64_t i = 0; i < chunks.num_chunks; ++i)
    kernels.copy(reinterpret_cast<const std::byte*>(chunks.src[i]),
                 reinterpret_cast<std::byte*>(chunks.dst[i]),
                 chunks.bytes[i],
                 mode);
  if (is_streaming)
    kernels.store_fence();
}

void post_signal(Group& group, uint64_t& word, uint64_t value, int peer_rank) {
  sync::store_release(word, value);
  sync::ring(group.doorbell(peer_rank));
}

void await_signal(Group& group,
                  const uint64_t& word,
                  uint64_t value,
                  int peer_rank,
                  const std::string& what,
                  const InterruptCheck& interrupt_check) {
  const WaitSite site;
  const auto is_there = [&] { return sync::load_acquire(word) >= value; };
  const int64_t start_ns = sync::now_ns();
  wait_until(group, is_there, [&] {
    if (interrupt_check)
      interrupt_check();
    group.check_abort();
    // The word is looked at after the state: a peer may post and then leave in good order.
    const PeerState state = group.state(peer_rank);
    if (state != PeerState::kAlive && !is_there()) {
      group.abort(layout::AbortCause::kPeerFailed,
                  site,
                  {peer_rank},
                  concat("rank ",
                         peer_rank,
                         state == PeerState::kDead ? " died" : " left",
                         " while rank ",
                         group.rank_idx(),
                         " waited for ",
                         what));
      group.throw_abort();
    }
    if (sync::now_ns() - start_ns > group.stall_timeout_ns() && !is_there()) {
      group.abort(layout::AbortCause::kPeerTimeout,
                  site,
                  {peer_rank},
                  concat("rank ",
                         peer_rank,
                         " stopped: rank ",
                         group.rank_idx(),
                         " waited ",
                         static_cast<double>(group.stall_timeout_ns()) / 1e9,
                         " s for ",
                         what));
      group.throw_abort();
    }
  });
}

void give_up_slots(Group& group, const std::string& message) {
  if (group.is_aborted())
    return;
  group.abort(layout::AbortCause::kPeerFailed,
              WaitSite{},
              {group.rank_idx()},
              concat("rank ", group.rank_idx(), " gave up an exchange of slots: ", message));
}

}  // namespace moe::host
