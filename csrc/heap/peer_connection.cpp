#include "heap/peer_connection.h"

#include <sys/epoll.h>

#include <cerrno>
#include <cstring>

#include "core/error.h"

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

void PeerConnection::send(std::string frame, std::shared_ptr<OwnedFd> passed_fd) {
  const std::lock_guard lock(send_mutex_);
  if (!socket_ || state() != PeerState::kAlive)
    return;
  outbox_.push_back({std::move(frame), std::move(passed_fd)});
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
    size_t sent_bytes = 0;
    transfer = send_bytes(socket_.get(),
                          frame.bytes.data() + num_sent_bytes_,
                          frame.bytes.size() - num_sent_bytes_,
                          passes_fd ? frame.passed_fd->get() : -1,
                          &sent_bytes);
    num_sent_bytes_ += sent_bytes;
    if (num_sent_bytes_ == frame.bytes.size()) {
      outbox_.pop_front();
      num_sent_bytes_ = 0;
    }
  }
  if (transfer == Transfer::kClosed) {  // receive() will see the end and say so
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
    size_t received_bytes = 0;
    switch (receive_bytes(socket_.get(), buffer, sizeof buffer, &received_bytes, &received_fds_)) {
      case Transfer::kMoved:
        break;
      case Transfer::kClosed:
        return Receive::kEnded;
      default:
        return Receive::kDrained;
    }
    received_.append(buffer, received_bytes);
    if (!parse(handle_frame))
      return Receive::kEnded;
  }
  return Receive::kMore;
}

/// Handles whole frames; @return false when the peer sends something else.
bool PeerConnection::parse(const FrameHandler& handle_frame) {
  size_t position = 0;
  while (received_.size() - position >= sizeof(FrameHeader)) {
    FrameHeader header;
    std::memcpy(&header, received_.data() + position, sizeof header);
    if (header.kind < FrameKind::kMessage || header.kind > FrameKind::kMemory ||
        header.payload_bytes > kMaxPayloadBytes)
      return false;
    if (received_.size() - position - sizeof header < header.payload_bytes)
      break;
    std::string payload = received_.substr(position + sizeof header, header.payload_bytes);
    position += sizeof header + header.payload_bytes;
    OwnedFd fd;
    if (header.with_fd != 0) {
      // It comes with the first byte of the frame, so it must be here already.
      if (received_fds_.empty())
        return false;
      fd = std::move(received_fds_.front());
      received_fds_.erase(received_fds_.begin());
    }
    handle_frame(header, std::move(payload), std::move(fd));
  }
  received_.erase(0, position);
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

void PeerConnection::disconnect() {
  const std::lock_guard lock(send_mutex_);
  socket_.reset();
  pidfd_.reset();
  outbox_.clear();
  num_sent_bytes_ = 0;
  received_.clear();
  received_fds_.clear();
}

}  // namespace moe::heap
