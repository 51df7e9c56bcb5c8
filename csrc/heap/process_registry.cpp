#include "heap/process_registry.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <utility>
#include <vector>

#include "core/error.h"
#include "heap/fork_guard.h"

namespace moe::heap::process_registry {
namespace {

struct Registry {
  ForkOrigin origin;
  Token token = random_token();
  std::map<std::pair<Token, uint32_t>, std::weak_ptr<Segment>> segments;
  std::vector<std::weak_ptr<ExitListener>> exit_listeners;
};

/// Call it with ForkGuard::lock() held. Never destroyed: threads may use it during exit. What a
/// forked child inherited is abandoned, as its objects belong to the parent.
Registry& registry() {
  static Registry* instance = nullptr;
  if (instance == nullptr || instance->origin.is_forked_child())
    instance = new Registry;
  return *instance;
}

void leave_all() {
  std::vector<std::weak_ptr<ExitListener>> listeners;
  {
    const auto lock = ForkGuard::lock();
    listeners.swap(registry().exit_listeners);
  }
  for (const auto& weak : listeners)
    if (const std::shared_ptr<ExitListener> listener = weak.lock())
      listener->on_process_exit();
}

}  // namespace

Token process_token() {
  const auto lock = ForkGuard::lock();
  return registry().token;
}

void publish_segment(const Token& mesh_token,
                     uint32_t segment_idx,
                     std::weak_ptr<Segment> segment) {
  const auto lock = ForkGuard::lock();
  registry().segments[{mesh_token, segment_idx}] = std::move(segment);
}

std::shared_ptr<Segment> find_segment(const Token& mesh_token, uint32_t segment_idx) {
  const auto lock = ForkGuard::lock();
  const auto& segments = registry().segments;
  const auto found = segments.find({mesh_token, segment_idx});
  return found == segments.end() ? nullptr : found->second.lock();
}

void forget_segments(const Token& mesh_token) {
  const auto lock = ForkGuard::lock();
  auto& segments = registry().segments;
  auto entry = segments.lower_bound({mesh_token, 0});
  while (entry != segments.end() && entry->first.first == mesh_token)
    entry = segments.erase(entry);
}

void add_exit_listener(const std::weak_ptr<ExitListener>& listener) {
  const auto lock = ForkGuard::lock();
  static const bool is_registered = [] {
    if (std::atexit(leave_all) != 0)
      throw SystemError("atexit failed", 0);
    return true;
  }();
  static_cast<void>(is_registered);
  auto& listeners = registry().exit_listeners;
  std::erase_if(listeners, [](const auto& weak) { return weak.expired(); });
  listeners.push_back(listener);
}

}  // namespace moe::heap::process_registry
