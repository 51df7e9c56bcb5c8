#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/peer_link.h"
#include "heap/owned_fd.h"
#include "heap/segment_table.h"
#include "heap/socket.h"
#include "heap/wire.h"

namespace moe::heap {

/// Messages of one peer that nobody has taken yet.
class Inbox {
 public:
  void put(uint64_t channel, uint64_t sequence, std::string payload);
  bool take(uint64_t channel, uint64_t sequence, std::string* payload);

 private:
  std::mutex mutex_;
  std::atomic<uint64_t> num_messages_{0};  ///< so that polling an empty inbox takes no lock
  std::map<std::pair<uint64_t, uint64_t>, std::deque<std::string>> messages_;
};

/// The socket to one peer: frames in both directions and what they told of the peer.
///
/// send() may be called by any thread; everything that receives or watches belongs to the service
/// thread.
class PeerConnection {
 public:
  enum class Kind {
    kThread,   ///< a rank of this process
    kProcess,  ///< a rank of another process, on this node
    kRemote,   ///< a rank on another node: over TCP, with no memory shared
  };

  PeerConnection(OwnedFd socket, OwnedFd pidfd, Kind kind)
      : socket_(std::move(socket)), pidfd_(std::move(pidfd)), kind_(kind) {}

  /// A thread that sees the peer gone also sees every message it sent before.
  PeerState state() const { return state_.load(std::memory_order_acquire); }
  Kind kind() const { return kind_; }
  /// Returns whether the peer is dead as far as can be seen because its machine does not answer.
  bool is_lost() const { return is_lost_.load(std::memory_order_relaxed); }
  bool is_open() const { return static_cast<bool>(socket_); }  ///< service thread only
  /// Bytes that the socket has taken so far.
  uint64_t sent_bytes() const { return sent_bytes_.load(std::memory_order_relaxed); }
  Inbox& inbox() { return inbox_; }

  /// Starts watching the socket and the pidfd; the keys are what @p epoll then reports.
  /// @throws SystemError
  void watch(int epoll, uint64_t socket_key, uint64_t pidfd_key);

  /// Queues a frame behind all earlier ones and sends what the socket takes now. Does nothing when
  /// the peer is gone.
  /// @param passed_fd  Sent along with the first byte; null for none.
  void send(const FrameHeader& header,
            std::string payload = "",
            std::shared_ptr<OwnedFd> passed_fd = nullptr);

  /// Rest to send afterwards: nothing, what the socket has no room for now, or what the
  /// system has no room for now (the socket will not tell when it has).
  enum class Flush { kEmpty, kWaits, kTryLater };

  /// Sends what waits and the socket takes now.
  Flush flush();

  /// A frame that arrived; @p fd came along, if any.
  using FrameHandler =
      std::function<void(const FrameHeader& header, std::string payload, OwnedFd fd)>;

  enum class Receive {
    kMore,     ///< there may be more: it stops at times, so that one peer cannot starve the others
    kDrained,  ///< nothing is left for now
    kEnded,    ///< nothing will ever come; the caller calls end()
  };

  /// Receives what is there.
  Receive receive(const FrameHandler& handle_frame);

  /// Ends the connection to a remote peer whose machine has not answered for @p limit_s; called now
  /// and then. @return Whether it did.
  bool check_link(double limit_s);

  /// The peer said goodbye: from now on its end is no failure.
  void mark_left();

  /// The peer is gone; it is dead if it has not said goodbye.
  void end();

  /// This rank sends no more: the peer reads what is on the way, and then the end.
  void end_sending();

  /// This rank is leaving: closes the connection, the peer's state stays.
  void disconnect();

 private:
  struct OutFrame {
    FrameHeader header;
    std::string payload;
    std::shared_ptr<OwnedFd> passed_fd;

    uint64_t bytes() const { return sizeof header + payload.size(); }
  };

  static constexpr size_t kReceiveBytes = size_t{64} << 10;
  static constexpr int kReceivesPerCall = 16;

  Flush flush_locked();
  bool parse(const char* data, size_t bytes, const FrameHandler& handle_frame);
  bool take_frame(const FrameHandler& handle_frame);

  std::mutex send_mutex_;
  OwnedFd socket_;  ///< closed under send_mutex_
  OwnedFd pidfd_;
  Kind kind_;
  std::atomic<PeerState> state_{PeerState::kAlive};
  std::atomic<bool> is_lost_{false};
  int num_silent_looks_ = 0;  ///< in a row; service thread only

  int epoll_ = -1;
  uint64_t socket_key_ = 0;
  bool wants_output_ = false;
  std::deque<OutFrame> outbox_;
  size_t num_sent_bytes_ = 0;  ///< bytes sent of the first frame in the outbox
  std::atomic<uint64_t> sent_bytes_{0};

  // The frame under way: its header until that is whole, then its payload.
  FrameHeader header_;
  size_t num_header_bytes_ = 0;
  std::string payload_;
  size_t num_payload_bytes_ = 0;
  std::vector<OwnedFd> received_fds_;
  Inbox inbox_;
};

}  // namespace moe::heap
