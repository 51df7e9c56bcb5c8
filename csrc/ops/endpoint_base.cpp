#include "ops/endpoint_base.h"

#include <cstdlib>
#include <cstring>
#include <new>

#include "ops/agreement.h"
#include "ops/kept_memory.h"

namespace moe::ops {

namespace {

std::shared_ptr<std::byte> zeroed_memory(int64_t bytes) {
  auto* const memory = static_cast<std::byte*>(std::calloc(static_cast<size_t>(bytes), 1));
  if (memory == nullptr)
    throw std::bad_alloc();
  return {memory, [](std::byte* data) { std::free(data); }};
}

}  // namespace

EndpointBase::EndpointBase(std::shared_ptr<group::Group> group, EndpointConfig config)
    : BufferBase(std::move(group)),
      config_(std::move(config)),
      placement_(config_.expert_rank, this->group().num_ranks()),
      workspaces_(static_cast<size_t>(this->group().num_ranks())),
      wait_totals_(static_cast<size_t>(this->group().num_ranks())),
      recent_needs_(kRecentNeeds),
      progress_(static_cast<size_t>(config_.depth)) {}

std::vector<std::string> EndpointBase::connect(int depth,
                                               const std::string& extra,
                                               const group::InterruptCheck& interrupt_check) {
  group().check_usable(layout::Operation::kNone);
  const int64_t bytes = layout::Workspace::bytes(num_ranks(), config_.num_experts, depth);
  control_windows_.push_back(group().memory().allocate(static_cast<uint64_t>(bytes)));
  const Window& own_window = *control_windows_.back();
  sync::fill_shared(own_window.data(), 0, static_cast<size_t>(bytes));
  take_number();
  const layout::Workspace own(own_window.data(), num_ranks(), config_.num_experts, depth);
  std::vector<uint64_t*> closed_words;
  for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank)
    closed_words.push_back(&own.closed(peer_rank).epoch);
  group().mail().watch_ends(buffer_number(), std::move(closed_words));
  const Offer offer = own_window.offer();
  std::string payload(reinterpret_cast<const char*>(&offer), sizeof(offer));
  payload += extra;
  payload += config_text(config_.agreed);
  const auto payloads = group().all_gather(payload, interrupt_check);
  check_same_config(noun(), payloads, sizeof(Offer) + extra.size());
  group::WaitSite site;
  site.interrupt_check = &interrupt_check;
  std::vector<std::string> extras(static_cast<size_t>(num_ranks()));
  for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank) {
    if (!group().is_active(peer_rank))
      continue;
    const std::string& said = payloads[static_cast<size_t>(peer_rank)];
    Offer place;
    std::memcpy(&place, said.data(), sizeof(place));
    std::byte* base = nullptr;
    if (group().is_local(peer_rank)) {
      base = group().resolve(peer_rank, place, site);
    } else {
      if (remote_workspace_ == nullptr)
        remote_workspace_ = zeroed_memory(bytes);
      base = remote_workspace_.get();
    }
    workspaces_[static_cast<size_t>(peer_rank)] =
        layout::Workspace(base, num_ranks(), config_.num_experts, depth);
    extras[static_cast<size_t>(peer_rank)] = said.substr(sizeof(Offer), extra.size());
  }
  group().mail().answer_for(buffer_number(), [this] { return awaited_rank(); });
  return extras;
}

int EndpointBase::awaited_rank() const {
  const layout::Workspace& workspace = own_workspace();
  const auto& activity = workspace.activity();
  const auto peer_rank = static_cast<int>(sync::load_relaxed(activity.waiting_for)) - 1;
  if (peer_rank < 0 || peer_rank >= num_ranks())
    return -1;
  const uint64_t flag_epoch = sync::load_relaxed(activity.waiting_epoch);
  uint64_t seen_epoch = 0;
  switch (static_cast<layout::Phase>(sync::load_relaxed(activity.waiting_phase))) {
    case layout::Phase::kIdle:  // for no flag, but for what that rank sends or takes
      return peer_rank;
    case layout::Phase::kRows:
      seen_epoch = sync::load_relaxed(workspace.row(flag_epoch, peer_rank).epoch);
      break;
    case layout::Phase::kOffers:
      seen_epoch = sync::load_relaxed(workspace.second_offer(flag_epoch, peer_rank).epoch);
      break;
    default:
      seen_epoch = sync::load_relaxed(workspace.done(flag_epoch, peer_rank).epoch);
  }
  if (seen_epoch >= flag_epoch)
    return -1;
  // The rank of its rail writes here what a rank of another node has to say.
  const NodeLayout& nodes = group().nodes();
  const int relay_rank = nodes.rail_rank(peer_rank, nodes.node_idx(rank_idx()));
  return group().is_local(peer_rank) || relay_rank == rank_idx() ? peer_rank : relay_rank;
}

void EndpointBase::give_up_connecting() {
  group().mail().forget_buffer(buffer_number());
  for (auto& window : control_windows_)
    window->quarantine();
}

WaitStatistics EndpointBase::wait_statistics() const {
  WaitStatistics statistics;
  for (const WaitTotal& total : wait_totals_) {
    statistics.waited_ns.push_back(total.waited_ns.load(std::memory_order_relaxed));
    statistics.num_waits.push_back(total.num_waits.load(std::memory_order_relaxed));
  }
  return statistics;
}

std::shared_ptr<Window> EndpointBase::guess_window() {
  const uint64_t need = largest_recent_need();
  if (need == 0)
    return nullptr;
  return memory().allocate_free(guessed_window_bytes(need));
}

void EndpointBase::remember_need(uint64_t bytes) {
  recent_needs_[next_need_] = bytes;
  next_need_ = (next_need_ + 1) % recent_needs_.size();
}

void EndpointBase::restart(uint64_t next_epoch) {
  BufferBase::restart(next_epoch);
  first_epoch_ = next_epoch;
}

void EndpointBase::end_operations(const group::InterruptCheck& interrupt_check) {
  const auto give_up = [this] {
    group::WaitSite site;
    group().abort(layout::AbortCause::kPeerFailed,
                  site,
                  {rank_idx()},
                  concat("rank ",
                         rank_idx(),
                         " destroyed buffer ",
                         buffer_number(),
                         " with operations in flight"));
  };
  try {
    if (!progress_.wait_idle(interrupt_check, group().stall_timeout_ns()))
      give_up();
    start_last_phase();
    if (!progress_.wait_idle(interrupt_check, group().stall_timeout_ns()))
      give_up();
    await_verdict(interrupt_check);
  } catch (...) {
    give_up();
    throw;
  }
}

void EndpointBase::destroy(const group::InterruptCheck& interrupt_check) {
  if (is_destroyed() || group().is_forked_child())
    return;
  end_operations(interrupt_check);
  become_destroyed();
  progress_.stop();
  end_device_operations();
  group().mail().forget_buffer(buffer_number());
  group().mail().post_end(buffer_number(), next_epoch());
  if (own_workspace().base() == nullptr)
    return;
  close_control(std::move(control_windows_), [this](int owner, int rank) -> uint64_t* {
    const int peer_rank = owner == rank_idx() ? rank : owner;
    const layout::Workspace& area = workspace(owner);
    return group().is_local(peer_rank) && area.base() != nullptr ? &area.closed(rank).epoch
                                                                 : nullptr;
  });
}

}  // namespace moe::ops
