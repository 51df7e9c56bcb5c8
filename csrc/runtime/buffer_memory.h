#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/symmetric_memory.h"
#include "kernels/replicas.h"
#include "ops/endpoint_base.h"
#include "runtime/call_order.h"
#include "runtime/captured_memory.h"
#include "runtime/device.h"
#include "runtime/segment_bases.h"
#include "runtime/window_ring.h"

namespace moe::runtime {

/// Kinds of memory of captured operations; see CapturedMemory.
enum CapturedKind : int64_t { kCapturedRows = -8, kCapturedScratch, kCapturedSums };

/// Memory that operations of one buffer take beside what every operation shares: windows, which are
/// the buffer's own or the heap's, memory for counting, and what graphs keep.
class BufferMemory {
 public:
  /// All of them outlive this.
  BufferMemory(ops::EndpointBase& endpoint, CallOrder& order, SegmentBases& segments);

  /// Takes windows for low-latency rows, as many as are configured. @throws CapacityError
  void reserve_windows();
  /// Memory of the sizes that the configuration speaks of, for the plans, tables and scratch of
  /// operations and for windows.
  /// @param last  Offer of all this that peers hear of last.
  /// @return A window that holds those for windows, for peers to open before it is given back.
  std::shared_ptr<Window> reserve(const kernels::Buffer& buffer, int tokens_per_chunk, Offer* last);

  /// Bytes of a window for low-latency rows; 0 where there is none.
  uint64_t window_bytes() const { return windows_.bytes(); }
  /// See ops::EndpointBase::take_window().
  std::shared_ptr<Window> take_window(uint64_t bytes, bool is_captured);
  /// Places in the heap for sets of so many tokens. They stay until all ranks have closed the
  /// buffer. @throws CapacityError
  kernels::TokenSets token_sets(int64_t num_tokens, int64_t num_topk);
  /// Device memory for counting choices, at least so many bytes, unset; kept between operations.
  std::byte* scratch(int64_t bytes);

  /// Memory that a captured operation needs until the next one.
  CapturedMemory& captured() { return captured_; }
  std::shared_ptr<Window> take_captured_window(int64_t kind, uint64_t bytes);
  /// Takes device memory: zero where it is new.
  std::shared_ptr<std::byte> take_captured(int64_t kind, int64_t bytes) {
    return captured_.take<std::byte>(kind, bytes, [&] { return device_.allocate(bytes); });
  }
  /// Keeps what a captured operation needs unchanged until the buffer is destroyed.
  void keep(std::shared_ptr<const void> owned) { kept_.push_back(std::move(owned)); }

  /// Gives back what no operation holds: there will be no more.
  void close();

 private:
  uint64_t low_latency_bytes() const;
  std::shared_ptr<Window> take_reserved_window(uint64_t bytes, bool is_captured);
  std::shared_ptr<Window> allocate_window(uint64_t bytes);

  ops::EndpointBase& endpoint_;
  CallOrder& order_;
  Device& device_;
  SegmentBases& segments_;
  std::shared_ptr<const void> reserved_;  ///< memory for plans and tables of operations
  WindowRing windows_;                    ///< windows of low-latency rows
  kernels::TokenSets sets_;               ///< sets where balanced replicas take rows by rank
  std::shared_ptr<std::byte> scratch_;
  int64_t scratch_bytes_ = 0;
  CapturedMemory captured_;
  std::vector<std::shared_ptr<const void>> kept_;  ///< by captured operations
};

}  // namespace moe::runtime
