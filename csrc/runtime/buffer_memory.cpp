#include "runtime/buffer_memory.h"

#include <algorithm>

#include "core/error.h"
#include "layout/rank_sums.h"
#include "layout/token_sets.h"
#include "layout/window.h"
#include "ops/dispatch_rules.h"
#include "ops/operations_in_flight.h"
#include "runtime/device_plan.h"
#include "runtime/device_replicas.h"

namespace moe::runtime {

namespace {

// Sizes that are made room for where the configuration leaves them open.
constexpr int64_t kUsualTokens = 4096;
constexpr int64_t kUsualTopk = 8;
constexpr int64_t kPlansAtOnce = 2;  ///< plans for each operation in flight: handles live longer
constexpr int64_t kHostBytesAtOnce = 64 << 10;
constexpr int64_t kPageBytes = 4096;  ///< bytes that memory is rounded up to

}  // namespace

BufferMemory::BufferMemory(ops::EndpointBase& endpoint, CallOrder& order, SegmentBases& segments)
    : endpoint_(endpoint),
      order_(order),
      device_(order.device()),
      segments_(segments),
      captured_(order.stream()) {}

void BufferMemory::reserve_windows() {
  windows_ = WindowRing(
      endpoint_.memory(), endpoint_.config().num_low_latency_windows, low_latency_bytes());
}

std::shared_ptr<Window> BufferMemory::reserve(const kernels::Buffer& buffer,
                                              int tokens_per_chunk,
                                              Offer* last) {
  const ops::EndpointConfig& config = endpoint_.config();
  const int64_t num_tokens = config.num_max_tokens > 0 ? config.num_max_tokens : kUsualTokens;
  const int64_t num_topk = config.num_max_topk > 0 ? config.num_max_topk : kUsualTopk;
  if (config.balances_replicas) {
    try {
      token_sets(num_tokens, num_topk);
    } catch (const CapacityError&) {  // the first dispatch that needs them says so
    }
  }
  // Low-latency dispatches, each with its combine, of which the host runs ahead.
  const int64_t num_pairs = windows_.bytes() > 0 ? ops::kMostUnheard / 2 : 0;
  const int64_t plan_bytes =
      DevicePlan::memory_bytes(buffer, layout::RowLayout::kExpertMajor, num_tokens, num_topk) +
      DispatchTables::memory_bytes(buffer, nullptr) + 2 * kPageBytes;
  scratch(chunk_bytes(buffer, tokens_per_chunk, num_tokens, num_topk, sets_));
  const int64_t num_plans = kPlansAtOnce * std::max<int64_t>(config.depth, num_pairs);
  // Those of two placements, while one replaces the other.
  const int64_t replica_bytes =
      config.balances_replicas
          ? 2 * DeviceReplicas::memory_bytes(buffer.num_ranks, buffer.num_experts)
          : 0;
  reserved_ =
      device_.reserve(num_plans * plan_bytes + replica_bytes, kHostBytesAtOnce + replica_bytes);
  int64_t bytes = 0;
  // The device is the host where the caller is, and growth of its heap waits for nobody.
  if (!device_.has_host_caller() && config.max_row_bytes > 0 && config.num_max_tokens > 0) {
    bytes = num_tokens * std::max(num_topk + 1, num_pairs) * config.max_row_bytes;
    // A combine then has a row more for each that came.
    if (config.rank_reduction)
      bytes =
          2 * bytes + layout::RankSumsMap::make(num_tokens, num_topk, sizeof(double)).sums_offset;
  }
  std::shared_ptr<Window> window;
  try {
    window = endpoint_.memory().allocate(static_cast<uint64_t>(bytes));
  } catch (const CapacityError&) {  // where it is short, operations say so
    window = endpoint_.memory().allocate(0);
  }
  // Segments are opened in their order.
  *last = window->offer();
  for (const Offer& other : {windows_.last_offer(), sets_.offer})
    if (other.segment_idx > last->segment_idx)
      *last = other;
  return window;
}

kernels::TokenSets BufferMemory::token_sets(int64_t num_tokens, int64_t num_topk) {
  const ops::EndpointConfig& config = endpoint_.config();
  // Whatever placement comes.
  const int64_t stride = layout::most_set_bytes(
      endpoint_.num_ranks(), layout::most_shared_experts(config.num_experts), num_tokens, num_topk);
  if (stride <= sets_.stride && sets_.base != nullptr)
    return sets_;
  kernels::TokenSets sets;
  sets.stride = std::max({stride, 2 * sets_.stride, int64_t{64}});
  sets.num_nodes = endpoint_.group().nodes().num_nodes();
  const auto window = allocate_window(static_cast<uint64_t>(
      sets.stride * kernels::TokenSets::num_places(config.depth, sets.num_nodes)));
  endpoint_.add_control_window(window);
  sets.base = window->data();
  sets.offer = window->offer();
  return sets_ = sets;
}

/// Bytes of the largest low-latency window, or sums of its combine, that are configured; 0
/// where it leaves a size open.
uint64_t BufferMemory::low_latency_bytes() const {
  const ops::EndpointConfig& config = endpoint_.config();
  const int64_t num_rows = ops::num_low_latency_rows(endpoint_);
  int64_t row_bytes = config.max_row_bytes;
  if (num_rows == 0 || row_bytes == 0)
    return 0;
  // Rows of two bytes an element are no smaller than quantized ones with their scale factors.
  const int bits = config.row_type & 0xFF;
  if (config.hidden > 0 && bits >= 16)
    row_bytes = config.hidden * bits / 8;
  const int64_t weight_bytes = bits == 64 || bits == 0 ? 8 : 4;
  int64_t bytes =
      layout::ReceiveWindow::make(
          layout::RowLayout::kLowLatency, num_rows, row_bytes, {}, weight_bytes, 0, false, true)
          .bytes;
  if (config.rank_reduction && config.num_max_topk > 0)
    bytes = std::max(
        bytes,
        layout::RankSumsMap::make(config.num_max_tokens, config.num_max_topk, sizeof(double))
            .bytes(num_rows, row_bytes));
  return static_cast<uint64_t>(bytes + kPageBytes);  // regions of scale factors are aligned
}

/// Kernels are behind the caller's stream, and other streams may use what was dropped, too. Those
/// that called this buffer are waited for as well; others may hold operations of other buffers, in
/// which peers may wait for this one.
std::shared_ptr<Window> BufferMemory::take_reserved_window(uint64_t bytes, bool is_captured) {
  const auto busy = order_.busy_others();
  const bool can_wait =
      busy.empty() || (!is_captured && std::ranges::all_of(busy, [this](const auto& stream) {
        return !stream->is_capturing() && order_.has_called(stream);
      }));
  auto window = can_wait ? windows_.take(bytes) : nullptr;
  for (const auto& stream : busy)
    if (window != nullptr)
      order_.stream()->wait(*stream->record());
  return window;
}

std::shared_ptr<Window> BufferMemory::take_window(uint64_t bytes, bool is_captured) {
  if (!is_captured)
    return take_reserved_window(bytes, false);
  // One size, whatever the rows are. The buffer's own go to graphs for good: an eager result
  // that a replay wrote to would tell nobody.
  const uint64_t size = std::max(bytes, windows_.bytes());
  return captured_.take<Window>(kCapturedRows, static_cast<int64_t>(size), [&] {
    auto window = take_reserved_window(size, true);
    return window != nullptr ? window : allocate_window(size);
  });
}

std::shared_ptr<Window> BufferMemory::take_captured_window(int64_t kind, uint64_t bytes) {
  return captured_.take<Window>(
      kind, static_cast<int64_t>(bytes), [&] { return allocate_window(bytes); });
}

std::shared_ptr<Window> BufferMemory::allocate_window(uint64_t bytes) {
  auto window = endpoint_.memory().allocate(bytes);
  segments_.refresh();
  return window;
}

std::byte* BufferMemory::scratch(int64_t bytes) {
  if (bytes > scratch_bytes_) {
    scratch_bytes_ = std::max(bytes, 2 * scratch_bytes_);
    scratch_ = device_.allocate_unset(scratch_bytes_);
  }
  return scratch_.get();
}

void BufferMemory::close() {
  kept_.clear();
  captured_.close();
  windows_.clear();
}

}  // namespace moe::runtime
