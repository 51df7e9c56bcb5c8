#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace moe::heap {

/// Callbacks of a service thread. remove() returns only when the callback does not run; a callback
/// may itself add and remove.
class ListenerList {
 public:
  int add(std::function<void()> on_change) {
    const std::lock_guard lock(mutex_);
    callbacks_[next_id_] = std::make_shared<std::function<void()>>(std::move(on_change));
    return next_id_++;
  }

  void remove(int id) {
    const std::lock_guard lock(mutex_);
    callbacks_.erase(id);
  }

  void call() {
    const std::lock_guard lock(mutex_);
    const auto callbacks = callbacks_;
    for (const auto& [id, on_change] : callbacks)
      if (callbacks_.count(id) != 0)  // an earlier callback may have removed it
        (*on_change)();
  }

 private:
  std::recursive_mutex mutex_;
  std::map<int, std::shared_ptr<std::function<void()>>> callbacks_;
  int next_id_ = 0;
};

}  // namespace moe::heap
