#include "group/group.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "group/peer_wait.h"

namespace moe::group {

Group::Group(std::shared_ptr<PeerLink> link,
             std::shared_ptr<SymmetricMemory> memory,
             std::vector<int> members,
             int rank_idx,
             uint64_t channel,
             double stall_timeout_s,
             double arrival_timeout_s,
             int num_threads,
             bool is_child,
             const InterruptCheck& interrupt_check,
             int num_local_ranks,
             int num_machine_ranks)
    : Peers(std::move(link),
            std::move(memory),
            std::move(members),
            rank_idx,
            channel,
            stall_timeout_s,
            arrival_timeout_s,
            is_child,
            num_local_ranks,
            num_machine_ranks),
      num_threads_(num_threads) {
  listener_id_ = this->link()->add_listener([this] {
    mail().take_all();
    answer_probes(*this);
    sync::ring(own_doorbell());
  });
  try {
    const Offer own_offer = own_control_window().offer();
    const std::string payload(reinterpret_cast<const char*>(&own_offer), sizeof(own_offer));
    const auto payloads = all_gather(payload, interrupt_check);
    const WaitSite site{.interrupt_check = &interrupt_check};
    for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank) {
      Offer offer;
      std::memcpy(&offer, payloads[static_cast<size_t>(peer_rank)].data(), sizeof(offer));
      set_control(
          peer_rank,
          is_local(peer_rank) ? find_control(peer_rank, offer, site) : make_remote_control());
    }
    // Nobody may write to a peer's block before that peer zeroed it: the gather above ordered that.
  } catch (...) {
    this->link()->remove_listener(listener_id_);
    throw;
  }
}

/// A rank that is a thread, had its group and left has taken its memory along: that is no
/// failure, and there is nobody to ring any more.
layout::ControlBlock* Group::find_control(int peer_rank, const Offer& offer, const WaitSite& site) {
  std::byte* control = memory().try_resolve(link_rank(peer_rank), offer);
  if (control == nullptr) [[unlikely]]
    await_announcement(peer_rank, site, [&] {
      // Looked at first: what a peer announced before it left is there once it is seen gone.
      const bool has_left = state(peer_rank) == PeerState::kLeft;
      control = memory().try_resolve(link_rank(peer_rank), offer);
      return control != nullptr || has_left;
    });
  return control != nullptr ? reinterpret_cast<layout::ControlBlock*>(control)
                            : make_remote_control();
}

Group::~Group() {
  destroy();
}

void Group::destroy() {
  if (!is_forked_child() && leave())
    link()->remove_listener(listener_id_);
}

std::byte* Group::resolve(SymmetricMemory& memory,
                          int rank_idx,
                          const Offer& offer,
                          const WaitSite& site) {
  std::byte* address = memory.try_resolve(link_rank(rank_idx), offer);
  if (address != nullptr) [[likely]]
    return address;
  MOE_CHECK(is_local(rank_idx),
            "memory of rank ",
            rank_idx,
            " on node ",
            nodes().node_idx(rank_idx),
            " is not seen by rank ",
            this->rank_idx(),
            " on node ",
            nodes().node_idx(this->rank_idx()));
  await_announcement(rank_idx, site, [&] {
    return (address = memory.try_resolve(link_rank(rank_idx), offer)) != nullptr;
  });
  return address;
}

/// Waits until @p is_here, for memory that @p rank_idx has said it has.
void Group::await_announcement(int rank_idx,
                               const WaitSite& site,
                               const std::function<bool()>& is_here) {
  constexpr const char* kAwaited = "the announcement of memory that it offered";
  const int64_t start_ns = sync::now_ns();
  await_peer(*this, site, is_here, [&](int64_t now_ns) {
    check_gone(
        *this, site, [&](int peer_rank) { return peer_rank == rank_idx && !is_here(); }, kAwaited);
    if (now_ns - start_ns > stall_timeout_ns())
      give_up_stalled(*this, site, rank_idx, stall_timeout_ns(), kAwaited);
  });
}

void Group::check_usable(layout::Operation operation) {
  const char* const name =
      operation == layout::Operation::kNone ? "collective call" : layout::operation_name(operation);
  check_process(name);
  check_abort();
  const bool is_recovering = recovery_.is_unfinished();
  if (is_recovering || shrink_ballots().is_unfinished()) [[unlikely]] {
    const char* const call = is_recovering ? "recover" : "shrink";
    throw PeerFailed(concat(name, ": the last ", call, "() of rank ", rank_idx(), " has not ended"),
                     FailureSite{missing_ranks(), name, "idle", -1});
  }
  for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank) {
    if (!is_peer(peer_rank))
      continue;
    const PeerState peer_state = state(peer_rank);
    if (peer_state == PeerState::kAlive) [[likely]]
      continue;
    check_evicted();
    const std::string message = concat(end_of(peer_rank),
                                       peer_state == PeerState::kDead ? "" : " the communicator",
                                       " before this ",
                                       name,
                                       " of rank ",
                                       rank_idx());
    if (peer_state == PeerState::kDead) {
      abort(layout::AbortCause::kPeerFailed, {.operation = operation}, {peer_rank}, message);
      throw_abort();
    }
    throw PeerFailed(message, FailureSite{{peer_rank}, name, "idle", -1});
  }
}

std::vector<std::string> Group::all_gather(const std::string& payload,
                                           const InterruptCheck& interrupt_check) {
  check_usable(layout::Operation::kNone);
  retired_.free_closed();
  const uint64_t sequence = next_gather_sequence();
  set_next_gather_sequence(sequence + 1);
  mail().entries()->add_caller();
  mail().entries()->enter(EntryTable::kCollectiveCall, sequence);
  post_to_peers(Topic::kGather, sequence, payload);
  std::vector<std::string> payloads(static_cast<size_t>(num_ranks()));
  std::vector<uint8_t> has_arrived(payloads.size());
  payloads[own_idx()] = payload;
  // A message that was sent before its sender left or died counts.
  const auto is_missing = [&](int peer_rank) {
    const auto idx = static_cast<size_t>(peer_rank);
    if (has_arrived[idx] == 0)
      has_arrived[idx] = take(peer_rank, Topic::kGather, sequence, &payloads[idx]);
    return has_arrived[idx] == 0;
  };
  const WaitSite site{.epoch = static_cast<int64_t>(sequence),
                      .buffer_number = EntryTable::kCollectiveCall,
                      .interrupt_check = &interrupt_check};
  for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank) {
    if (!is_peer(peer_rank) || !is_missing(peer_rank))
      continue;
    ArrivalWatch arrival(*this, site, peer_rank);
    await_peer(
        *this,
        site,
        [&] { return !is_missing(peer_rank); },
        [&](int64_t now_ns) {
          check_gone(*this, site, is_missing);
          arrival.check(now_ns, is_missing);
        });
  }
  return payloads;
}

}  // namespace moe::group
