#include "group/queued_rail.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <limits>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/error.h"

namespace moe::group {

/// Queues that the rail and its requests share, so that a request may outlive its rail.
class QueuedRail::Queues {
 public:
  Queues(int num_nodes, int node_idx) : node_idx_(node_idx), queues_(2 * num_nodes) {}

  std::shared_ptr<Request> add(const std::shared_ptr<Request>& request) {
    const int peer_idx = request->node_idx();
    MOE_CHECK(peer_idx >= 0 && peer_idx < num_nodes() && peer_idx != node_idx_,
              "a rail of node ",
              node_idx_,
              " joins it to the others of ",
              num_nodes(),
              " nodes, got node ",
              peer_idx);
    MOE_CHECK(request->bytes() > 0, "a message has > 0 bytes, got ", request->bytes());
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_given_up_) {
      mark(*request, State::kFailed, reason_);
      return request;
    }
    open_.emplace(request.get(), request);
    Queue& queue = queue_of(request->is_send(), peer_idx);
    queue.requests.push_back({next_number_++, request});
    queue.has_more.notify_one();
    any_has_more_.notify_one();
    return request;
  }

  std::shared_ptr<Request> take(bool is_send, int peer_idx, bool is_waiting) {
    MOE_CHECK(peer_idx >= 0 && peer_idx < num_nodes(),
              "node_idx must be in [0, ",
              num_nodes(),
              "), got ",
              peer_idx);
    std::unique_lock<std::mutex> lock(mutex_);
    Queue& queue = queue_of(is_send, peer_idx);
    if (is_waiting)
      queue.has_more.wait(lock, [&] { return is_given_up_ || !queue.requests.empty(); });
    return queue.requests.empty() ? nullptr : pop(queue);
  }

  std::shared_ptr<Request> take_oldest(bool is_waiting) {
    std::unique_lock<std::mutex> lock(mutex_);
    Queue* queue = oldest();
    while (is_waiting && queue == nullptr && !is_given_up_) {
      any_has_more_.wait(lock);
      queue = oldest();
    }
    return queue == nullptr ? nullptr : pop(*queue);
  }

  void end(Request& request, State state, const std::string& text) {
    std::function<void()> on_change;
    std::shared_ptr<Request> ended;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto entry = open_.find(&request);
      if (entry == open_.end())
        return;
      ended = std::move(entry->second);
      open_.erase(entry);
      if (state == State::kMoved)
        (request.is_send() ? sent_bytes_ : received_bytes_) += request.bytes();
      mark(request, state, text);
      on_change = on_change_;
      ++num_calls_;
    }
    call(on_change);
  }

  void give_up(const std::string& reason) {
    std::function<void()> on_change;
    // Their memory goes where no lock is held: whose deleter it runs is not known here.
    std::unordered_map<Request*, std::shared_ptr<Request>> ended;
    std::vector<std::deque<Entry>> dropped;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!is_given_up_) {
        is_given_up_ = true;
        reason_ = reason;
        ended.swap(open_);
        for (const auto& [request, owner] : ended)
          mark(*request, State::kFailed, reason);
        for (Queue& queue : queues_) {
          dropped.push_back(std::move(queue.requests));
          queue.requests.clear();
          queue.has_more.notify_all();
        }
        any_has_more_.notify_all();
        on_change = std::move(on_change_);
        on_change_ = nullptr;
      }
      ++num_calls_;
    }
    call(on_change);
    std::unique_lock<std::mutex> lock(mutex_);
    no_calls_.wait(lock, [this] { return num_calls_ == 0; });
  }

  void set_listener(std::function<void()> on_change) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!is_given_up_)
      on_change_ = std::move(on_change);
  }

  std::string error(const Request& request) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return request.error_;
  }

  bool is_given_up() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return is_given_up_;
  }

  uint64_t bytes(bool is_send) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return is_send ? sent_bytes_ : received_bytes_;
  }

 private:
  struct Entry {
    uint64_t number;
    std::shared_ptr<Request> request;
  };
  struct Queue {
    std::deque<Entry> requests;
    std::condition_variable has_more;
  };

  int num_nodes() const { return static_cast<int>(queues_.size() / 2); }
  Queue& queue_of(bool is_send, int peer_idx) {
    return queues_[static_cast<size_t>(2 * peer_idx + (is_send ? 1 : 0))];
  }

  static std::shared_ptr<Request> pop(Queue& queue) {
    auto request = std::move(queue.requests.front().request);
    queue.requests.pop_front();
    return request;
  }

  Queue* oldest() {
    Queue* found = nullptr;
    for (Queue& queue : queues_)
      if (!queue.requests.empty() &&
          (found == nullptr || queue.requests.front().number < found->requests.front().number))
        found = &queue;
    return found;
  }

  static void mark(Request& request, State state, const std::string& text) {
    request.error_ = text;
    request.state_.store(state, std::memory_order_release);
  }

  /// Ends a call that was counted: the listener may call back, hence without the lock.
  void call(const std::function<void()>& on_change) {
    if (on_change)
      on_change();
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--num_calls_ == 0)
      no_calls_.notify_all();
  }

  const int node_idx_;
  mutable std::mutex mutex_;
  std::vector<Queue> queues_;  ///< by node: to receive, to send
  std::condition_variable any_has_more_;
  std::condition_variable no_calls_;
  std::unordered_map<Request*, std::shared_ptr<Request>> open_;  ///< not ended
  std::function<void()> on_change_;
  int num_calls_ = 0;  ///< calls of the listener that run now
  uint64_t next_number_ = 0;
  uint64_t sent_bytes_ = 0;
  uint64_t received_bytes_ = 0;
  bool is_given_up_ = false;
  std::string reason_;
};

QueuedRail::Request::Request(std::shared_ptr<Queues> queues,
                             bool is_send,
                             int node_idx,
                             Buffer buffer,
                             uint64_t offset,
                             uint64_t bytes)
    : queues_(std::move(queues)),
      is_send_(is_send),
      node_idx_(node_idx),
      buffer_(std::move(buffer)),
      offset_(offset),
      bytes_(bytes) {}

QueuedRail::Request::~Request() = default;

std::string QueuedRail::Request::error() const {
  return queues_->error(*this);
}

void QueuedRail::Request::complete() {
  queues_->end(*this, State::kMoved, "");
}

void QueuedRail::Request::fail(const std::string& text) {
  queues_->end(*this, State::kFailed, text);
}

QueuedRail::QueuedRail(std::string name, int num_nodes, int node_idx) : name_(std::move(name)) {
  MOE_CHECK(num_nodes > 0 && node_idx >= 0 && node_idx < num_nodes,
            "node_idx must be in [0, num_nodes = ",
            num_nodes,
            "), got ",
            node_idx);
  queues_ = std::make_shared<Queues>(num_nodes, node_idx);
}

QueuedRail::~QueuedRail() {
  give_up("the rail is gone");
}

std::shared_ptr<Rail::Transfer> QueuedRail::send(int node_idx,
                                                 Buffer buffer,
                                                 uint64_t offset,
                                                 uint64_t bytes) {
  return queues_->add(
      std::make_shared<Request>(queues_, true, node_idx, std::move(buffer), offset, bytes));
}

std::shared_ptr<Rail::Transfer> QueuedRail::receive(int node_idx,
                                                    Buffer buffer,
                                                    uint64_t offset,
                                                    uint64_t bytes) {
  return queues_->add(
      std::make_shared<Request>(queues_, false, node_idx, std::move(buffer), offset, bytes));
}

void QueuedRail::set_listener(std::function<void()> on_change) {
  queues_->set_listener(std::move(on_change));
}

void QueuedRail::give_up(const std::string& reason) {
  queues_->give_up(reason);
}

uint64_t QueuedRail::sent_bytes() const {
  return queues_->bytes(true);
}

uint64_t QueuedRail::received_bytes() const {
  return queues_->bytes(false);
}

std::shared_ptr<QueuedRail::Request> QueuedRail::next_send(int node_idx, bool is_waiting) {
  return queues_->take(true, node_idx, is_waiting);
}

std::shared_ptr<QueuedRail::Request> QueuedRail::next_receive(int node_idx, bool is_waiting) {
  return queues_->take(false, node_idx, is_waiting);
}

std::shared_ptr<QueuedRail::Request> QueuedRail::next(bool is_waiting) {
  return queues_->take_oldest(is_waiting);
}

bool QueuedRail::is_given_up() const {
  return queues_->is_given_up();
}

}  // namespace moe::group
