#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "core/rail.h"

namespace moe::group {

/// A rail whose bytes are moved by threads of somebody else, who knows an engine that this package
/// does not link: they take requests from queues, move the bytes and say how that ended.
///
/// Per node and direction requests come out in the order in which they went in; the engine that
/// takes them starts them in that order and may end them in any. Thread-safe.
class QueuedRail final : public Rail {
 private:
  class Queues;

 public:
  /// One message to carry. Its memory lives as long as it does.
  class Request final : public Transfer {
   public:
    Request(std::shared_ptr<Queues> queues,
            bool is_send,
            int node_idx,
            Buffer buffer,
            uint64_t offset,
            uint64_t bytes);
    ~Request() override;

    bool is_send() const { return is_send_; }
    int node_idx() const { return node_idx_; }
    std::byte* data() const { return buffer_.get() + offset_; }
    uint64_t bytes() const { return bytes_; }

    State state() const override { return state_.load(std::memory_order_acquire); }
    std::string error() const override;

    /// The bytes have moved. Called by the engine that took it, after the last access to the
    /// memory. Means nothing once the request has ended, which giving up the rail may do at any
    /// time.
    void complete();
    /// The bytes will not move; otherwise like complete(). Other requests go on.
    void fail(const std::string& text);

   private:
    friend class Queues;

    const std::shared_ptr<Queues> queues_;
    const bool is_send_;
    const int node_idx_;
    const Buffer buffer_;
    const uint64_t offset_;
    const uint64_t bytes_;
    std::string error_;  ///< written before state_ says kFailed
    std::atomic<State> state_{State::kMoving};
  };

  /// @param name      Name of the engine.
  /// @param node_idx  Node of this rank, in [0, num_nodes).
  QueuedRail(std::string name, int num_nodes, int node_idx);
  ~QueuedRail() override;
  QueuedRail(const QueuedRail&) = delete;
  QueuedRail& operator=(const QueuedRail&) = delete;

  std::string name() const override { return name_; }
  std::shared_ptr<Transfer> send(int node_idx,
                                 Buffer buffer,
                                 uint64_t offset,
                                 uint64_t bytes) override;
  std::shared_ptr<Transfer> receive(int node_idx,
                                    Buffer buffer,
                                    uint64_t offset,
                                    uint64_t bytes) override;
  void set_listener(std::function<void()> on_change) override;
  /// Returns when the listener runs no more; hence not to be called by it.
  void give_up(const std::string& reason) override;
  uint64_t sent_bytes() const override;
  uint64_t received_bytes() const override;

  /// The next request to send to that node; waits for one where @p is_waiting. Null where there is
  /// none, or the rail has been given up.
  std::shared_ptr<Request> next_send(int node_idx, bool is_waiting);
  /// Likewise, to receive from that node.
  std::shared_ptr<Request> next_receive(int node_idx, bool is_waiting);
  /// Likewise, of all nodes and both directions, the oldest first: for one thread that starts
  /// everything.
  std::shared_ptr<Request> next(bool is_waiting);

  bool is_given_up() const;

 private:
  std::string name_;
  std::shared_ptr<Queues> queues_;
};

}  // namespace moe::group
