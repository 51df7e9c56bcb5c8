#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

namespace moe::simt::checker {

/// Known part of every thread's past: entry `slot` is the last step of that thread that
/// happened before. Shared between threads and messages, copied when it changes.
///
/// A slot is a thread (block and thread index of a stream's kernels, which follow one another), or
/// the bulk copies that complete on one barrier, or those of one thread in order.
class Clock {
 public:
  static constexpr uint32_t kMaxSlots = 4096;

  Clock() = default;
  Clock(const Clock& other) : body_(other.body_) {
    if (body_ != nullptr)
      ++body_->num_owners;
  }
  Clock(Clock&& other) noexcept : body_(std::exchange(other.body_, nullptr)) {}
  Clock& operator=(Clock other) noexcept {
    std::swap(body_, other.body_);
    return *this;
  }
  ~Clock() { drop(); }

  uint32_t at(uint32_t slot) const {
    return body_ == nullptr || slot >= body_->size ? 0 : body_->steps[slot];
  }
  bool is_same(const Clock& other) const { return body_ == other.body_; }

  void raise(uint32_t slot, uint32_t step) {
    if (at(slot) >= step)
      return;
    own(slot + 1);
    body_->steps[slot] = step;
  }

  void join(const Clock& other) {
    if (other.body_ == nullptr || other.body_ == body_)
      return;
    if (body_ == nullptr) {
      *this = other;
      return;
    }
    own(other.body_->size);
    const uint32_t* const theirs = other.body_->steps;
    uint32_t* const mine = body_->steps;
    for (uint32_t i = 0; i < other.body_->size; ++i)
      mine[i] = std::max(mine[i], theirs[i]);
  }

 private:
  struct Body {
    uint32_t num_owners;
    uint32_t size;
    uint32_t steps[kMaxSlots];
  };

  /// Never destroyed: clocks of static objects may outlive anything.
  static std::vector<Body*>& free_bodies() {
    static auto* const bodies = new std::vector<Body*>;
    return *bodies;
  }

  static Body* obtain() {
    auto& bodies = free_bodies();
    if (bodies.empty())
      return new Body;
    Body* const body = bodies.back();
    bodies.pop_back();
    return body;
  }

  void drop() {
    if (body_ != nullptr && --body_->num_owners == 0)
      free_bodies().push_back(body_);
    body_ = nullptr;
  }

  /// Makes the body this one's alone, with at least @p size entries.
  void own(uint32_t size) {
    if (size > kMaxSlots)
      throw std::length_error("more threads than a clock has slots");
    if (body_ == nullptr) {
      body_ = obtain();
      body_->num_owners = 1;
      body_->size = 0;
    } else if (body_->num_owners > 1) {
      Body* const copy = obtain();
      copy->num_owners = 1;
      copy->size = body_->size;
      std::copy_n(body_->steps, body_->size, copy->steps);
      --body_->num_owners;
      body_ = copy;
    }
    if (body_->size < size) {
      std::fill(body_->steps + body_->size, body_->steps + size, 0u);
      body_->size = size;
    }
  }

  Body* body_ = nullptr;
};

/// Knowledge of a thread in three ways: for loads and stores; for its bulk copies of any memory;
/// for its bulk copies from and to shared memory. A proxy fence carries the first into the others.
struct Knowledge {
  Clock all;
  Clock bulk;
  Clock bulk_shared;

  void join(const Knowledge& other) {
    all.join(other.all);
    bulk.join(other.bulk);
    bulk_shared.join(other.bulk_shared);
  }
};

}  // namespace moe::simt::checker
