#pragma once

#include <cstdint>

#include "kernels/wait.h"

namespace moe::kernels {

/// Raises done flags of @p epoch at every active peer: this rank has written (dispatch) or pulled
/// (combine) all its rows, or there are none. The threads of one block share the peers.
MOE_DEVICE void release_done(const Buffer& buffer, uint64_t epoch) {
#pragma unroll 1
  for (int i = device::thread_idx(); i < buffer.num_ranks; i += device::num_threads()) {
    // Each rank starts behind itself, so that no peer gets all flags at the end.
    const int peer_rank = (buffer.rank_idx + 1 + i) % buffer.num_ranks;
    if (device::load_constant(buffer.is_active + peer_rank) == 0)
      continue;
    const layout::Workspace peer = workspace(buffer, peer_rank);
    uint64_t* const flag = &peer.done(epoch, buffer.rank_idx).epoch;
    device::store_release<device::Scope::kSystem>(flag, epoch);
  }
}

/// Counts the blocks of a kernel as they come here; all threads of all blocks call it once. Kernels
/// of a buffer whose blocks are counted run one after another.
/// @param scratch  shared, a word
/// @return the same on all threads of a block: true in the last one, which may read what the others
///   have written.
MOE_DEVICE bool is_last_block(const Buffer& buffer, int32_t* scratch) {
  device::sync_block();
  // The others learn through shared memory what one thread counts.
  if (device::thread_idx() == 0) {
    uint32_t* const num_blocks_done = &buffer.state->num_blocks_done;
    const uint32_t before =
        device::add_acq_rel<device::Scope::kDevice>(num_blocks_done, uint32_t{1});
    const auto num_others = static_cast<uint32_t>(device::num_blocks() - 1);
    const bool is_last = before == num_others;
    if (is_last)
      device::store_relaxed<device::Scope::kDevice>(num_blocks_done, uint32_t{0});
    device::store(scratch, static_cast<int32_t>(is_last));
  }
  device::sync_block();
  const bool is_last = device::load(scratch) != 0;
  device::sync_block();
  return is_last;
}

/// The end of moving rows; all threads of all blocks of the kernel call it.
///
/// Every thread waits for its bulk stores, the blocks count themselves, and the last of them raises
/// the done flags: this rank needs nothing more of its peers' windows in this operation.
/// @param scratch  shared, a word per warp and at least two
/// @param release  release(epoch), by all threads of the last block: raises the done flags; false
///   where the operation ends without
/// @return the same on all threads of a block: true in the one that has raised them.
template <typename Release>
MOE_DEVICE bool finish_rows(const Buffer& buffer,
                            const Tables& tables,
                            int32_t* scratch,
                            const Release& release) {
  device::await_bulk_stores<0>();
  if (!is_last_block(buffer, scratch))
    return false;
  if (release(device::load(tables.epoch)))
    return true;
  if (device::thread_idx() == 0)
    device::store(tables.status, static_cast<int32_t>(OperationStatus::kLeft));
  return false;
}

/// The same within one node.
MOE_DEVICE bool finish_rows(const Buffer& buffer, const Tables& tables, int32_t* scratch) {
  return finish_rows(buffer, tables, scratch, [&](uint64_t epoch) {
    release_done(buffer, epoch);
    return true;
  });
}

/// A block waits for the done flags of every rank that has rows here. Rows are whole (dispatch), or
/// pulled by everybody (combine), for what follows in the stream, and for this block. Other blocks
/// of the kernel may wait for the same.
/// @param scratch  shared, a word per warp
/// @param counts_waits  whether waits are counted in WaitTotals, by one block
/// @return the same on every thread: false when the kernel is to leave.
MOE_DEVICE bool await_done(const Buffer& buffer,
                           const Tables& tables,
                           layout::Operation operation,
                           int32_t* scratch,
                           bool counts_waits = true) {
  const uint64_t epoch = device::load(tables.epoch);
  const layout::Workspace own = workspace(buffer, buffer.rank_idx);
  WaitSite site{layout::Phase::kData, static_cast<int32_t>(operation), epoch};
  site.counts_waits = counts_waits;
  const bool all_done = block_await_flags(
      buffer,
      site,
      epoch,
      buffer.stall_limit_ns,
      scratch,
      [&](int rank_idx) { return device::load(&tables.peers[rank_idx].is_received_from) != 0; },
      [&](int rank_idx) { return &own.done(epoch, rank_idx).epoch; });
  if (!all_done && device::thread_idx() == 0)
    device::store_relaxed<device::Scope::kDevice>(tables.status,
                                                  static_cast<int32_t>(OperationStatus::kLeft));
  return all_done;
}

/// Both, of a kernel that ends when its peers have ended.
MOE_DEVICE void finish(const Buffer& buffer,
                       const Tables& tables,
                       layout::Operation operation,
                       int32_t* scratch) {
  if (finish_rows(buffer, tables, scratch))
    await_done(buffer, tables, operation, scratch);
}

}  // namespace moe::kernels
