#include "heap/peer_connection.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/error.h"
#include "heap/tcp.h"

namespace moe::heap {

void Inbox::put(uint64_t channel, uint64_t sequence, std::string payload) {
  const std::lock_guard lock(mutex_);
  messages_[{channel, sequence}].push_back(std::move(payload));
  num_messages_.fetch_add(1, std::memory_order_release);
}

bool Inbox::take(uint64_t channel, uint64_t sequence, std::string* payload) {
  if (num_messages_.load(std::memory_order_acquire) == 0)
    return false;
  const std::lock_guard lock(mutex_);
  const auto found = messages_.find({channel, sequence});
  if (found == messages_.end())
    return false;
  *payload = std::move(found->second.front());
  found->second.pop_front();
  if (found->second.empty())
    messages_.erase(found);
  num_messages_.fetch_sub(1, std::memory_order_release);
  return true;
}

void PeerConnection::watch(int epoll, uint64_t socket_key, uint64_t pidfd_key) {
  const std::lock_guard lock(send_mutex_);
  epoll_ = epoll;
  socket_key_ = socket_key;
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP;
  event.data.u64 = socket_key;
  if (::epoll_ctl(epoll, EPOLL_CTL_ADD, socket_.get(), &event) != 0)
    throw SystemError("epoll_ctl of a peer's socket failed", errno);
  if (!pidfd_)
    return;
  event.events = EPOLLIN;
  event.data.u64 = pidfd_key;
  if (::epoll_ctl(epoll, EPOLL_CTL_ADD, pidfd_.get(), &event) != 0)
    pidfd_.reset();  // the socket's end tells as well
}

void PeerConnection::send(const FrameHeader& header,
                          std::string payload,
                          std::shared_ptr<OwnedFd> passed_fd) {
  const std::lock_guard lock(send_mutex_);
  if (!socket_ || state() != PeerState::kAlive)
    return;
  outbox_.push_back({header, std::move(payload), std::move(passed_fd)});
  if (outbox_.size() == 1)
    flush_locked();
}

PeerConnection::Flush PeerConnection::flush() {
  const std::lock_guard lock(send_mutex_);
  return flush_locked();
}

PeerConnection::Flush PeerConnection::flush_locked() {
  Transfer transfer = Transfer::kMoved;
  while (socket_ && !outbox_.empty() && transfer == Transfer::kMoved) {
    const OutFrame& frame = outbox_.front();
    const bool passes_fd = num_sent_bytes_ == 0 && frame.passed_fd != nullptr;
    std::string_view head(reinterpret_cast<const char*>(&frame.header), sizeof frame.header);
    std::string_view body = frame.payload;
    head.remove_prefix(std::min(num_sent_bytes_, head.size()));
    body.remove_prefix(num_sent_bytes_ - std::min(num_sent_bytes_, sizeof frame.header));
    size_t sent_bytes = 0;
    transfer =
        send_bytes(socket_.get(), head, body, passes_fd ? frame.passed_fd->get() : -1, &sent_bytes);
    num_sent_bytes_ += sent_bytes;
    sent_bytes_.fetch_add(sent_bytes, std::memory_order_relaxed);
    if (num_sent_bytes_ == frame.bytes()) {
      outbox_.pop_front();
      num_sent_bytes_ = 0;
    }
  }
  if (transfer == Transfer::kLost)  // the socket tells it once
    is_lost_.store(true, std::memory_order_relaxed);
  if (transfer == Transfer::kClosed ||
      transfer == Transfer::kLost) {  // receive() will see the end and say so
    outbox_.clear();
    num_sent_bytes_ = 0;
  }
  // While the socket is full it reports when it takes more; TryLater has nothing to report, the
  // service thread asks again after a moment.
  const bool wants_output = !outbox_.empty();
  if (socket_ && epoll_ >= 0 && wants_output != wants_output_) {
    epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP;
    if (wants_output)
      event.events |= EPOLLOUT;
    event.data.u64 = socket_key_;
    if (::epoll_ctl(epoll_, EPOLL_CTL_MOD, socket_.get(), &event) == 0)
      wants_output_ = wants_output;
  }
  if (outbox_.empty())
    return Flush::kEmpty;
  return transfer == Transfer::kTryLater ? Flush::kTryLater : Flush::kWaits;
}

PeerConnection::Receive PeerConnection::receive(const FrameHandler& handle_frame) {
  char buffer[kReceiveBytes];
  for (int i = 0; i < kReceivesPerCall; ++i) {
    // A large payload is received in its place.
    const size_t missing_bytes = payload_.size() - num_payload_bytes_;
    const bool is_direct = missing_bytes >= kReceiveBytes;
    char* const data = is_direct ? payload_.data() + num_payload_bytes_ : buffer;
    size_t received_bytes = 0;
    switch (receive_bytes(socket_.get(),
                          data,
                          is_direct ? missing_bytes : kReceiveBytes,
                          &received_bytes,
                          &received_fds_)) {
      case Transfer::kMoved:
        break;
      case Transfer::kClosed:
        return Receive::kEnded;
      case Transfer::kLost:
        is_lost_.store(true, std::memory_order_relaxed);
        return Receive::kEnded;
      default:
        return Receive::kDrained;
    }
    if (is_direct) {
      num_payload_bytes_ += received_bytes;
      if (num_payload_bytes_ == payload_.size() && !take_frame(handle_frame))
        return Receive::kEnded;
    } else if (!parse(buffer, received_bytes, handle_frame)) {
      return Receive::kEnded;
    }
  }
  return Receive::kMore;
}

/// Handles whole frames; @return false when the peer sends something else.
bool PeerConnection::parse(const char* data, size_t bytes, const FrameHandler& handle_frame) {
  const auto take = [&](char* target, size_t most_bytes) {
    const size_t taken_bytes = std::min(bytes, most_bytes);
    std::memcpy(target, data, taken_bytes);
    data += taken_bytes;
    bytes -= taken_bytes;
    return taken_bytes;
  };
  while (bytes > 0) {
    if (num_header_bytes_ < sizeof header_) {
      num_header_bytes_ += take(reinterpret_cast<char*>(&header_) + num_header_bytes_,
                                sizeof header_ - num_header_bytes_);
      if (num_header_bytes_ < sizeof header_)
        return true;
      if (header_.kind < FrameKind::kMessage || header_.kind > FrameKind::kMemory ||
          header_.payload_bytes > kMaxPayloadBytes)
        return false;
      payload_.resize(header_.payload_bytes);
    }
    num_payload_bytes_ +=
        take(payload_.data() + num_payload_bytes_, payload_.size() - num_payload_bytes_);
    if (num_payload_bytes_ == payload_.size() && !take_frame(handle_frame))
      return false;
  }
  return true;
}

/// The frame under way is whole.
bool PeerConnection::take_frame(const FrameHandler& handle_frame) {
  OwnedFd fd;
  if (header_.with_fd != 0) {
    // It comes with the first byte of the frame, so it must be here already.
    if (received_fds_.empty())
      return false;
    fd = std::move(received_fds_.front());
    received_fds_.erase(received_fds_.begin());
  }
  num_header_bytes_ = 0;
  num_payload_bytes_ = 0;
  handle_frame(header_, std::exchange(payload_, {}), std::move(fd));
  return true;
}

bool PeerConnection::check_link(double limit_s) {
  if (kind_ != Kind::kRemote || !socket_)
    return false;
  num_silent_looks_ = is_tcp_silent(socket_, limit_s) ? num_silent_looks_ + 1 : 0;
  if (num_silent_looks_ < 2)
    return false;
  is_lost_.store(true, std::memory_order_relaxed);
  end();
  return true;
}

void PeerConnection::mark_left() {
  PeerState expected = PeerState::kAlive;
  state_.compare_exchange_strong(expected, PeerState::kLeft, std::memory_order_acq_rel);
}

void PeerConnection::end() {
  PeerState expected = PeerState::kAlive;
  state_.compare_exchange_strong(expected, PeerState::kDead, std::memory_order_acq_rel);
  disconnect();
}

void PeerConnection::end_sending() {
  const std::lock_guard lock(send_mutex_);
  if (socket_)
    ::shutdown(socket_.get(), SHUT_WR);
}

void PeerConnection::disconnect() {
  const std::lock_guard lock(send_mutex_);
  socket_.reset();
  pidfd_.reset();
  outbox_.clear();
  num_sent_bytes_ = 0;
  payload_.clear();
  num_header_bytes_ = 0;
  num_payload_bytes_ = 0;
  received_fds_.clear();
}

}  // namespace moe::heap
