#include "schedules/host_link.h"

#include <algorithm>
#include <limits>

#include "core/sync.h"

namespace moe::simt::checker {

WorldLink::WorldLink(HostWorld& world, int rank_idx)
    : world_(world), rank_idx_(rank_idx), peers_(static_cast<size_t>(world.num_ranks())) {}

PeerState WorldLink::state(int rank_idx) const {
  HostThreads& threads = world_.threads();
  const Peer& peer = peers_[static_cast<size_t>(rank_idx)];
  if (HostThreads::current() == nullptr || !threads.step_quietly() ||
      peer.state == PeerState::kAlive)
    return peer.state;
  threads.memory().join(threads.thread(), peer.known);
  return peer.state;
}

void WorldLink::post(int rank_idx, uint64_t channel, uint64_t sequence, std::string payload) {
  HostThreads& threads = world_.threads();
  try {
    if (!threads.step())
      return;
  } catch (const HostThreads::Ended&) {
    return;  // destructors post as well and may not throw; whoever goes on meets it again
  }
  News news;
  news.from = rank_idx_;
  news.channel = channel;
  news.sequence = sequence;
  news.payload = std::move(payload);
  news.known = threads.memory().close(threads.thread());
  world_.link(rank_idx).receive(std::move(news));
}

bool WorldLink::take(int rank_idx, uint64_t channel, uint64_t sequence, std::string* payload) {
  HostThreads& threads = world_.threads();
  if (!threads.step())
    return false;
  const auto found = inbox_.find({rank_idx, channel, sequence});
  if (found == inbox_.end())
    return false;
  auto& messages = found->second;
  *payload = std::move(messages.front().first);
  threads.memory().join(threads.thread(), messages.front().second);
  messages.pop_front();
  if (messages.empty())
    inbox_.erase(found);
  return true;
}

int WorldLink::add_listener(std::function<void()> on_change) {
  HostThreads& threads = world_.threads();
  listeners_.push_back(
      {next_listener_, std::move(on_change), threads.memory().close(threads.thread())});
  return next_listener_++;
}

void WorldLink::remove_listener(int id) {
  while (HostThreads::current() != nullptr && is_calling_ && world_.threads().step_quietly())
    world_.threads().yield();
  std::erase_if(listeners_, [id](const Listener& listener) { return listener.id == id; });
}

void WorldLink::tell_peers(News news) {
  news.from = rank_idx_;
  for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank)
    if (peer_rank != rank_idx_)
      world_.link(peer_rank).receive(news);
}

void WorldLink::receive(News news) {
  news_.push_back(std::move(news));
  world_.threads().wake_all(this);
}

const WorldLink::Segment* WorldLink::find_segment(int rank_idx, uint32_t segment_idx) const {
  const auto& segments = peers_[static_cast<size_t>(rank_idx)].segments;
  return segment_idx < segments.size() ? &segments[segment_idx] : nullptr;
}

void WorldLink::serve() {
  HostThreads& threads = world_.threads();
  while (true) {
    if (!threads.step())
      return;
    while (news_.empty() && !is_closed_) {
      threads.sleep(this, std::numeric_limits<int64_t>::max(), false, "news");
      if (!threads.step())
        return;
    }
    if (is_closed_)
      return;
    News news = next_news();
    threads.memory().join(threads.thread(), news.known);
    take_in(std::move(news));
    is_calling_ = true;
    for (size_t i = 0; i < listeners_.size(); ++i) {
      threads.memory().join(threads.thread(), listeners_[i].known);
      listeners_[i].call();
    }
    is_calling_ = false;
  }
}

/// Every peer has a socket of its own: what two of them say is heard in either order.
WorldLink::News WorldLink::next_news() {
  const auto some = world_.threads().random().below(static_cast<uint32_t>(news_.size()));
  const auto first =
      std::find_if(news_.begin(), news_.end(), [from = news_[some].from](auto& news) {
        return news.from == from;
      });
  News news = std::move(*first);
  news_.erase(first);
  return news;
}

void WorldLink::take_in(News news) {
  HostThreads& threads = world_.threads();
  Clock known = threads.memory().close(threads.thread());
  Peer& peer = peers_[static_cast<size_t>(news.from)];
  switch (news.event) {
    case Event::kMessage:
      inbox_[{news.from, news.channel, news.sequence}].emplace_back(std::move(news.payload),
                                                                    std::move(known));
      break;
    case Event::kSegment:
      peer.segments.push_back({news.begin, news.bytes, std::move(known)});
      break;
    case Event::kLeft:
    case Event::kDead:
      peer.state = news.event == Event::kLeft ? PeerState::kLeft : PeerState::kDead;
      peer.known = std::move(known);
      break;
  }
}

void WorldLink::close() {
  is_closed_ = true;
  world_.threads().wake_all(this);
}

}  // namespace moe::simt::checker
