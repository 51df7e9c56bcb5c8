#include "group/retired_memory.h"

#include <algorithm>
#include <mutex>
#include <utility>

namespace moe::group {

RetiredMemory::~RetiredMemory() {
  if (ranks_.is_forked_child())
    return;
  for (auto& window : quarantined_)
    window->quarantine();
  // The words alone decide now: a peer that has set its own touches the window no more.
  for (auto& [windows, closed_words] : closed_) {
    const bool is_unused = std::all_of(closed_words.begin(), closed_words.end(), [](auto* word) {
      return word == nullptr || sync::load_acquire(*word) != 0;
    });
    for (auto& window : windows)
      if (!is_unused)
        window->quarantine();
  }
  for (auto& memory : kept_)
    new std::shared_ptr<void>(std::move(memory));  // for good
}

void RetiredMemory::quarantine(std::shared_ptr<Window> window) {
  if (!window)
    return;
  const std::lock_guard<sync::Mutex> lock(mutex_);
  quarantined_.push_back(std::move(window));
}

void RetiredMemory::keep(std::shared_ptr<void> memory) {
  const std::lock_guard<sync::Mutex> lock(mutex_);
  kept_.push_back(std::move(memory));
}

std::vector<std::shared_ptr<void>> RetiredMemory::release() {
  const std::lock_guard<sync::Mutex> lock(mutex_);
  quarantined_.clear();
  return std::exchange(kept_, {});
}

void RetiredMemory::close_control(std::vector<std::shared_ptr<Window>> windows,
                                  const std::vector<uint64_t*>& peer_words,
                                  std::vector<const uint64_t*> own_words,
                                  uint64_t next_epoch) {
  for (int peer_rank = 0; peer_rank < ranks_.num_ranks(); ++peer_rank) {
    uint64_t* const word = peer_words[static_cast<size_t>(peer_rank)];
    if (word == nullptr || ranks_.is_leaving())
      continue;
    sync::store_release(*word, next_epoch);
    sync::ring(ranks_.doorbell(peer_rank));
  }
  const std::lock_guard<sync::Mutex> lock(mutex_);
  closed_.push_back({std::move(windows), std::move(own_words)});
}

void RetiredMemory::free_closed() {
  const std::lock_guard<sync::Mutex> lock(mutex_);
  std::erase_if(closed_, [this](const ClosedControl& closed) {
    for (int peer_rank = 0; peer_rank < ranks_.num_ranks(); ++peer_rank) {
      const uint64_t* const word = closed.closed_words[static_cast<size_t>(peer_rank)];
      const bool is_gone =
          !ranks_.is_active(peer_rank) || ranks_.state(peer_rank) != PeerState::kAlive;
      if (word != nullptr && !is_gone && sync::load_acquire(*word) == 0)
        return false;
    }
    return true;
  });
}

}  // namespace moe::group
