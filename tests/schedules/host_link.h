#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/peer_link.h"
#include "schedules/host_world.h"

namespace moe::simt::checker {

/// News that a rank hears of its peers, in the order in which each of them said it: messages,
/// memory, its end. The service thread of the rank takes it in, at any time, and then calls
/// listeners.
class WorldLink final : public PeerLink {
 public:
  enum class Event : uint8_t { kMessage, kSegment, kLeft, kDead };

  struct News {
    Event event = Event::kMessage;
    int from = 0;
    uint64_t channel = 0;
    uint64_t sequence = 0;
    std::string payload;
    std::byte* begin = nullptr;  ///< of a segment, and its bytes
    uint64_t bytes = 0;
    Clock known;  ///< by its sender
  };

  struct Segment {
    std::byte* begin = nullptr;
    uint64_t bytes = 0;
    Clock known;
  };

  WorldLink(HostWorld& world, int rank_idx);

  int rank_idx() const override { return rank_idx_; }
  int num_ranks() const override { return world_.num_ranks(); }
  PeerState state(int rank_idx) const override;
  void post(int rank_idx, uint64_t channel, uint64_t sequence, std::string payload) override;
  bool take(int rank_idx, uint64_t channel, uint64_t sequence, std::string* payload) override;
  int add_listener(std::function<void()> on_change) override;
  void remove_listener(int id) override;

  /// Tells every peer.
  void tell_peers(News news);
  void receive(News news);
  /// Null while the news of it has not been taken in.
  const Segment* find_segment(int rank_idx, uint32_t segment_idx) const;

  void serve();  ///< the service thread
  void close();  ///< ends it

 private:
  using Address = std::tuple<int, uint64_t, uint64_t>;
  struct Peer {
    PeerState state = PeerState::kAlive;
    Clock known;
    std::vector<Segment> segments;
  };
  struct Listener {
    int id;
    std::function<void()> call;
    Clock known;  ///< when it was added
  };

  News next_news();
  void take_in(News news);

  HostWorld& world_;
  int rank_idx_;
  std::deque<News> news_;
  std::map<Address, std::deque<std::pair<std::string, Clock>>> inbox_;
  std::vector<Peer> peers_;
  std::deque<Listener> listeners_;  ///< one that is added while they run moves none of them
  int next_listener_ = 0;
  bool is_calling_ = false;
  bool is_closed_ = false;
};

}  // namespace moe::simt::checker
