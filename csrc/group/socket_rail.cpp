#include "group/socket_rail.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <mutex>
#include <utility>

#include "core/error.h"
#include "core/sync.h"
#include "group/group.h"

namespace moe::group {

namespace {

/// Head of every frame: where its bytes belong.
///
/// Byte map (24 bytes): [0, 8) message, counted from 0; [8, 16) bytes of the whole message;
/// [16, 24) offset of this frame's bytes in it.
struct FrameHead {
  uint64_t message_idx = 0;
  uint64_t message_bytes = 0;
  uint64_t offset = 0;
};
static_assert(sizeof(FrameHead) == 24);

// Frames taken between two grants: fewer than the window, so that a sender is never left without.
constexpr uint64_t kFramesPerGrant = SocketRail::kWindowFrames / 4;

class Message final : public Rail::Transfer {
 public:
  Message(Rail::Buffer buffer, uint64_t offset, uint64_t bytes)
      : bytes(bytes), buffer_(std::move(buffer)), data_(buffer_.get() + offset) {}

  Rail::State state() const override {
    return static_cast<Rail::State>(sync::load_acquire(state_));
  }
  std::string error() const override { return error_; }

  std::byte* data() const { return data_; }
  void end_moved() {
    buffer_.reset();
    sync::store_release(state_, static_cast<uint32_t>(Rail::State::kMoved));
  }
  void fail(const std::string& error) {
    buffer_.reset();
    error_ = error;
    sync::store_release(state_, static_cast<uint32_t>(Rail::State::kFailed));
  }

  const uint64_t bytes;
  uint64_t num_done_bytes = 0;

 private:
  Rail::Buffer buffer_;
  std::byte* data_;
  std::string error_;
  uint32_t state_ = static_cast<uint32_t>(Rail::State::kMoving);
};

/// Streams to and from the rail rank of one node.
struct Peer {
  int link_rank = -1;
  std::string failure;  ///< why nothing moves any more; "" while it does
  std::deque<std::shared_ptr<Message>> sends;
  uint64_t num_sent_messages = 0;
  uint64_t num_sent_frames = 0;
  uint64_t num_granted_frames = SocketRail::kWindowFrames;
  std::deque<std::shared_ptr<Message>> receives;
  uint64_t num_received_messages = 0;
  uint64_t num_taken_frames = 0;
  uint64_t num_acknowledged_frames = 0;
};

}  // namespace

/// State that the rail shares with the service thread.
class SocketRail::Engine {
 public:
  Engine(std::shared_ptr<PeerLink> link,
         const std::vector<int>& link_ranks,
         int node_idx,
         const SocketRailStream& stream)
      : link_(std::move(link)),
        node_idx_(node_idx),
        channel_(stream.channel),
        frames_(stream.buffer_number << 33 | uint64_t{stream.generation} << 1),
        grants_(frames_ | 1),
        peers_(link_ranks.size()) {
    for (size_t i = 0; i < peers_.size(); ++i)
      peers_[i].link_rank = link_ranks[i];
  }

  void set_listener(std::function<void()> on_change) {
    const std::lock_guard<sync::Mutex> lock(mutex_);
    on_change_ = std::move(on_change);
  }

  std::shared_ptr<Transfer> start(
      bool is_send, int node_idx, Buffer buffer, uint64_t offset, uint64_t bytes) {
    MOE_CHECK(node_idx >= 0 && node_idx < static_cast<int>(peers_.size()) && node_idx != node_idx_,
              "node ",
              node_idx,
              " is none of the other nodes of node ",
              node_idx_,
              " in [0, ",
              peers_.size(),
              ")");
    MOE_CHECK(bytes > 0, "a transfer moves at least 1 byte, got ", bytes);
    auto message = std::make_shared<Message>(std::move(buffer), offset, bytes);
    change([&] {
      Peer& peer = peers_[static_cast<size_t>(node_idx)];
      (is_send ? peer.sends : peer.receives).push_back(message);
      return step(node_idx);
    });
    return message;
  }

  /// Called by the service thread.
  void step_all() {
    change([&] {
      bool has_ended = false;
      for (int node_idx = 0; node_idx < static_cast<int>(peers_.size()); ++node_idx)
        if (node_idx != node_idx_)
          has_ended |= step(node_idx);
      return has_ended;
    });
  }

  void give_up(const std::string& reason) {
    change([&] {
      bool has_ended = false;
      for (auto& peer : peers_)
        if (peer.failure.empty())
          has_ended |= fail(peer, reason);
      return has_ended;
    });
  }

  uint64_t sent_bytes() const { return sync::load_relaxed(sent_bytes_); }
  uint64_t received_bytes() const { return sync::load_relaxed(received_bytes_); }

 private:
  /// Runs @p body under the lock; tells the listener, without it, where a transfer has ended.
  template <typename Body>
  void change(Body&& body) {
    std::function<void()> on_change;
    {
      const std::lock_guard<sync::Mutex> lock(mutex_);
      if (!body())
        return;
      on_change = on_change_;
    }
    if (on_change)
      on_change();
  }

  /// Moves what can be moved to and from a node; @return whether a transfer has ended.
  bool step(int node_idx) {
    Peer& peer = peers_[static_cast<size_t>(node_idx)];
    if (!peer.failure.empty()) {
      discard_frames(peer);
      return end_all(peer, peer.failure);
    }
    // Read before the messages: what a peer sent before it went is there once it is seen gone.
    const PeerState state = peer.link_rank < 0 ? PeerState::kLeft : link_->state(peer.link_rank);
    bool has_ended = peer.link_rank >= 0 && take_frames(node_idx, peer);
    if (state == PeerState::kAlive)
      return send_frames(peer) || has_ended;
    // Frames that nobody has asked for yet may still be taken: no failure of the stream.
    const bool is_dead = state == PeerState::kDead;
    return end_all(peer, concat("the rank of node ", node_idx, is_dead ? " died" : " left")) ||
           has_ended;
  }

  bool send_frames(Peer& peer) {
    std::string payload;
    while (link_->take(peer.link_rank, channel_, grants_, &payload)) {
      uint64_t num_taken_frames = 0;
      std::memcpy(
          &num_taken_frames, payload.data(), std::min(payload.size(), sizeof(num_taken_frames)));
      peer.num_granted_frames = num_taken_frames + kWindowFrames;
    }
    bool has_ended = false;
    while (!peer.sends.empty() && peer.num_sent_frames < peer.num_granted_frames) {
      Message& message = *peer.sends.front();
      const FrameHead head{peer.num_sent_messages, message.bytes, message.num_done_bytes};
      const uint64_t bytes = std::min(kFrameBytes, message.bytes - message.num_done_bytes);
      std::string frame(sizeof(head) + bytes, '\0');
      std::memcpy(frame.data(), &head, sizeof(head));
      std::memcpy(frame.data() + sizeof(head), message.data() + head.offset, bytes);
      link_->post(peer.link_rank, channel_, frames_, std::move(frame));
      ++peer.num_sent_frames;
      message.num_done_bytes += bytes;
      if (message.num_done_bytes < message.bytes)
        continue;
      sync::store_relaxed(sent_bytes_, sent_bytes() + message.bytes);
      message.end_moved();
      peer.sends.pop_front();
      ++peer.num_sent_messages;
      has_ended = true;
    }
    return has_ended;
  }

  bool take_frames(int node_idx, Peer& peer) {
    bool has_ended = false;
    std::string frame;
    // Frames that nobody has asked for stay with the link: no more than a window of them.
    while (!peer.receives.empty() && link_->take(peer.link_rank, channel_, frames_, &frame)) {
      Message& message = *peer.receives.front();
      const std::string problem = find_problem(node_idx, peer, message, frame);
      if (!problem.empty())
        return fail(peer, problem) || has_ended;
      const uint64_t bytes = frame.size() - sizeof(FrameHead);
      std::memcpy(message.data() + message.num_done_bytes, frame.data() + sizeof(FrameHead), bytes);
      message.num_done_bytes += bytes;
      ++peer.num_taken_frames;
      grant(peer);
      if (message.num_done_bytes < message.bytes)
        continue;
      sync::store_relaxed(received_bytes_, received_bytes() + message.bytes);
      message.end_moved();
      peer.receives.pop_front();
      ++peer.num_received_messages;
      has_ended = true;
    }
    return has_ended;
  }

  void grant(Peer& peer) {
    if (peer.num_taken_frames - peer.num_acknowledged_frames < kFramesPerGrant)
      return;
    peer.num_acknowledged_frames = peer.num_taken_frames;
    link_->post(peer.link_rank,
                channel_,
                grants_,
                std::string(reinterpret_cast<const char*>(&peer.num_taken_frames),
                            sizeof(peer.num_taken_frames)));
  }

  /// Text of what keeps a frame from being the next part of @p message; "" for nothing.
  static std::string find_problem(int node_idx,
                                  const Peer& peer,
                                  const Message& message,
                                  const std::string& frame) {
    FrameHead head;
    if (frame.size() <= sizeof(head))
      return concat("node ", node_idx, " sent a frame of ", frame.size(), " bytes");
    std::memcpy(&head, frame.data(), sizeof(head));
    if (head.message_bytes != message.bytes)
      return concat("node ",
                    node_idx,
                    " sent message ",
                    head.message_idx,
                    " of ",
                    head.message_bytes,
                    " bytes where ",
                    message.bytes,
                    " were expected");
    if (head.message_idx != peer.num_received_messages || head.offset != message.num_done_bytes ||
        frame.size() - sizeof(head) > message.bytes - message.num_done_bytes)
      return concat("node ",
                    node_idx,
                    " sent byte ",
                    head.offset,
                    " of message ",
                    head.message_idx,
                    " where byte ",
                    message.num_done_bytes,
                    " of message ",
                    peer.num_received_messages,
                    " was expected");
    return "";
  }

  /// Nothing moves to or from that node any more; @return whether a transfer has ended by it.
  static bool fail(Peer& peer, const std::string& reason) {
    peer.failure = reason;
    return end_all(peer, reason);
  }

  /// Transfers that have been started fail; @return whether there was one.
  static bool end_all(Peer& peer, const std::string& reason) {
    const bool has_ended = !peer.sends.empty() || !peer.receives.empty();
    for (auto* messages : {&peer.sends, &peer.receives}) {
      for (const auto& message : *messages)
        message->fail(reason);
      messages->clear();
    }
    return has_ended;
  }

  /// They would lie in the link for as long as it lives.
  void discard_frames(const Peer& peer) {
    std::string frame;
    while (peer.link_rank >= 0 && link_->take(peer.link_rank, channel_, frames_, &frame)) {
    }
  }

  const std::shared_ptr<PeerLink> link_;
  const int node_idx_;
  const uint64_t channel_;
  const uint64_t frames_;  ///< sequence of frames, and of grants
  const uint64_t grants_;
  sync::Mutex mutex_;
  std::vector<Peer> peers_;  ///< by node
  std::function<void()> on_change_;
  uint64_t sent_bytes_ = 0;  ///< written under the lock
  uint64_t received_bytes_ = 0;
};

SocketRail::SocketRail(std::shared_ptr<PeerLink> link,
                       std::vector<int> link_ranks,
                       int node_idx,
                       const SocketRailStream& stream)
    : link_(std::move(link)),
      engine_(std::make_shared<Engine>(link_, link_ranks, node_idx, stream)),
      process_id_(::getpid()) {
  // The callback may still run while this goes, so it holds what it needs.
  listener_id_ = link_->add_listener([engine = engine_] { engine->step_all(); });
}

SocketRail::~SocketRail() {
  // In a forked child there is no service thread, and it may have held the lock for ever.
  if (::getpid() != process_id_) {
    new std::shared_ptr<Engine>(std::move(engine_));
    return;
  }
  link_->remove_listener(listener_id_);
  engine_->set_listener({});
  engine_->give_up("the rail was destroyed");
}

std::shared_ptr<Rail::Transfer> SocketRail::send(int node_idx,
                                                 Buffer buffer,
                                                 uint64_t offset,
                                                 uint64_t bytes) {
  return engine_->start(true, node_idx, std::move(buffer), offset, bytes);
}

std::shared_ptr<Rail::Transfer> SocketRail::receive(int node_idx,
                                                    Buffer buffer,
                                                    uint64_t offset,
                                                    uint64_t bytes) {
  return engine_->start(false, node_idx, std::move(buffer), offset, bytes);
}

void SocketRail::set_listener(std::function<void()> on_change) {
  engine_->set_listener(std::move(on_change));
}

void SocketRail::give_up(const std::string& reason) {
  engine_->give_up(reason);
}

uint64_t SocketRail::sent_bytes() const {
  return engine_->sent_bytes();
}

uint64_t SocketRail::received_bytes() const {
  return engine_->received_bytes();
}

std::shared_ptr<Rail> make_socket_rail(Group& group, uint64_t buffer_number) {
  const NodeLayout& nodes = group.nodes();
  std::vector<int> link_ranks;
  for (int node_idx = 0; node_idx < nodes.num_nodes(); ++node_idx) {
    const int rank_idx = nodes.rail_rank(group.rank_idx(), node_idx);
    link_ranks.push_back(group.is_active(rank_idx) ? group.link_rank(rank_idx) : -1);
  }
  return std::make_shared<SocketRail>(
      group.link(),
      std::move(link_ranks),
      nodes.node_idx(group.rank_idx()),
      SocketRailStream{group.channel(Topic::kRail), buffer_number, group.generation()});
}

}  // namespace moe::group
