#include "runtime/captured_memory.h"

#include "core/error.h"

namespace moe::runtime {

std::shared_ptr<void> CapturedMemory::Store::find(const Key& key) {
  const std::lock_guard<std::mutex> lock(mutex);
  std::vector<Free>& known = free[key];
  if (known.empty())
    return nullptr;
  const Free found = std::move(known.back());
  known.pop_back();
  if (found.since != nullptr)
    to_check.push_back(found.since);
  return found.memory;
}

void CapturedMemory::Store::give_back(const Key& key, std::shared_ptr<void> memory) noexcept {
  try {
    Free given{std::move(memory), stream->capture_point()};
    const std::lock_guard<std::mutex> lock(mutex);
    if (!is_closed)
      free[key].push_back(std::move(given));
  } catch (...) {
    // The machine has no memory to note it in. Graphs may use it: it stays for good.
    new std::shared_ptr<void>(std::move(memory));
  }
}

void CapturedMemory::check_order() {
  std::vector<std::shared_ptr<const CapturePoint>> points;
  {
    const std::lock_guard<std::mutex> lock(store_->mutex);
    points.swap(store_->to_check);
  }
  for (const auto& point : points)
    MOE_CHECK(store_->stream->is_behind(*point),
              "this operation would write to memory of a result that was dropped in this capture "
              "while a stream of it had work that may read it: have the caller's stream wait for "
              "that stream before the result is dropped");
}

void CapturedMemory::close() {
  std::map<Key, std::vector<Free>> dropped;
  const std::lock_guard<std::mutex> lock(store_->mutex);
  store_->is_closed = true;
  dropped.swap(store_->free);
}

}  // namespace moe::runtime
