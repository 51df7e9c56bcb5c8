#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/sync.h"
#include "kernels/exchange.h"
#include "runtime/device.h"

namespace moe::runtime {

/// Page-locked memory in which one operation and the host tell each other what they know: rows and
/// offers that its exchange brings, and what the host gives to that.
class Mailbox {
 public:
  Mailbox(Device& device, int num_ranks, int num_experts);

  /// For the next operation: nobody reads or writes what was of the one before.
  void reset() { header()->epoch = 0; }

  kernels::HostRead* header() const { return reinterpret_cast<kernels::HostRead*>(memory_.get()); }
  /// Returns whether the exchange with @p ticket has copied its rows here.
  bool has_ticket(uint64_t ticket) const { return sync::load_acquire(header()->ticket) >= ticket; }
  /// Epoch of the exchange, 0 before it has begun.
  uint64_t epoch() const { return sync::load_relaxed(header()->epoch); }
  kernels::OperationStatus status() const {
    return static_cast<kernels::OperationStatus>(header()->status);
  }
  const layout::Row& row(int rank_idx) const;
  const layout::SecondOffer& second_offer(int rank_idx) const;

  /// Text of a row that is rejected, for the exchange.
  const char* write_message(const std::string& text) const;
  /// A value per rank, to be copied.
  const std::byte* write_ranks(const std::vector<uint8_t>& values) const;

 private:
  std::shared_ptr<std::byte> memory_;
  int64_t row_stride_ = 0;
  char* message_ = nullptr;
  std::byte* ranks_ = nullptr;
};

}  // namespace moe::runtime
