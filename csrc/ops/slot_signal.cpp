#include "ops/slot_signal.h"

#include "core/error.h"
#include "core/sync.h"
#include "cpu/row_kernels.h"
#include "group/peer_wait.h"

namespace moe::ops {

namespace {

constexpr const char* kCall = "an exchange of slots";

}  // namespace

void copy_chunks(const ChunkList& chunks, bool is_streaming) {
  for (int64_t i = 0; i < chunks.num_chunks; ++i)
    MOE_CHECK(chunks.bytes[i] >= 0, "chunk ", i, " has ", chunks.bytes[i], " bytes");
  const cpu::RowKernels& kernels = cpu::best_row_kernels();
  const cpu::StoreMode mode = cpu::store_mode(is_streaming);
  for (int64_t i = 0; i < chunks.num_chunks; ++i)
    kernels.copy(reinterpret_cast<const std::byte*>(chunks.src[i]),
                 reinterpret_cast<std::byte*>(chunks.dst[i]),
                 chunks.bytes[i],
                 mode);
  if (is_streaming)
    kernels.store_fence();
}

void post_signal(group::Group& group, uint64_t& word, uint64_t value, int peer_rank) {
  sync::store_release(word, value);
  sync::ring(group.doorbell(peer_rank));
}

void await_signal(group::Group& group,
                  const uint64_t& word,
                  uint64_t value,
                  int peer_rank,
                  const std::string& what,
                  const group::InterruptCheck& interrupt_check) {
  group::WaitSite site;
  site.interrupt_check = &interrupt_check;
  site.call = kCall;
  const auto is_there = [&] { return sync::load_acquire(word) >= value; };
  const int64_t start_ns = sync::now_ns();
  group::await_peer(group, site, is_there, [&](int64_t now_ns) {
    // Other peers owe this wait nothing: a wait for them finds that they are gone.
    group::check_gone(
        group,
        site,
        [&](int gone_rank) { return gone_rank == peer_rank && !is_there(); },
        what.c_str());
    if (now_ns - start_ns > group.stall_timeout_ns() && !is_there())
      group::give_up_stalled(group, site, peer_rank, group.stall_timeout_ns(), what);
  });
}

void give_up_slots(group::Group& group, const std::string& message) {
  if (group.is_aborted())
    return;
  group.abort(layout::AbortCause::kPeerFailed,
              group::WaitSite{},
              {group.rank_idx()},
              concat("rank ", group.rank_idx(), " gave up ", kCall, ": ", message));
}

}  // namespace moe::ops
