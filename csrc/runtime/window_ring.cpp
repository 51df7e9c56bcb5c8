#include "runtime/window_ring.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "core/error.h"

namespace moe::runtime {

struct WindowRing::Slot {
  std::shared_ptr<Window> memory;
  std::atomic<bool> is_held{false};
};

class WindowRing::Taken final : public Window {
 public:
  Taken(std::shared_ptr<Slot> slot, uint64_t bytes) : slot_(std::move(slot)) {
    data_ = slot_->memory->data();
    offer_ = slot_->memory->offer();
    offer_.bytes = bytes;
  }
  ~Taken() override { end_use(); }

  void shrink(uint64_t bytes) override {
    MOE_CHECK(bytes <= offer_.bytes, "shrink() to ", bytes, " bytes of a window of ", offer_.bytes);
    offer_.bytes = bytes;
  }
  void quarantine() override { slot_->memory->quarantine(); }

  const std::shared_ptr<Window>& memory() const { return slot_->memory; }

  void end_use() noexcept {
    if (!has_ended_.exchange(true))
      slot_->is_held.store(false, std::memory_order_release);
  }

 private:
  std::shared_ptr<Slot> slot_;
  std::atomic<bool> has_ended_{false};
};

WindowRing::WindowRing(SymmetricMemory& memory, int num_windows, uint64_t bytes) {
  for (int i = 0; i < num_windows && bytes > 0; ++i) {
    auto slot = std::make_shared<Slot>();
    try {
      slot->memory = memory.allocate(bytes);
    } catch (const CapacityError& error) {
      throw CapacityError(error.what(),
                          static_cast<uint64_t>(num_windows) * bytes,
                          static_cast<uint64_t>(i) * bytes + error.available_bytes);
    }
    slots_.push_back(std::move(slot));
  }
}

std::shared_ptr<Window> WindowRing::take(uint64_t bytes) {
  for (const std::shared_ptr<Slot>& slot : slots_)
    if (bytes <= slot->memory->bytes() && !slot->is_held.exchange(true, std::memory_order_acquire))
      return std::make_shared<Taken>(slot, bytes);
  return nullptr;
}

void WindowRing::end_use(Window& window) {
  if (auto* const taken = dynamic_cast<Taken*>(&window))
    taken->end_use();
}

bool WindowRing::owns(const Window& window) {
  return dynamic_cast<const Taken*>(&window) != nullptr;
}

std::shared_ptr<Window> WindowRing::memory_of(std::shared_ptr<Window> window) {
  const auto* const taken = dynamic_cast<Taken*>(window.get());
  return taken != nullptr ? taken->memory() : std::move(window);
}

uint64_t WindowRing::bytes() const {
  return slots_.empty() ? 0 : slots_.front()->memory->bytes();
}

Offer WindowRing::last_offer() const {
  Offer last;
  for (const std::shared_ptr<Slot>& slot : slots_)
    if (slot->memory->offer().segment_idx >= last.segment_idx)
      last = slot->memory->offer();
  return last;
}

}  // namespace moe::runtime
