#include "simt/stream_heap.h"

#include <atomic>
#include <chrono>
#include <limits>
#include <thread>
#include <utility>

#include "core/error.h"

namespace moe::simt {

namespace {

// For streams to come to the end of what used a window.
constexpr auto kReturnLimit = std::chrono::seconds(5);
constexpr auto kReturnPoll = std::chrono::microseconds(20);

/// Bytes that were given back and that streams may still use.
using BytesOnTheirWay = std::atomic<uint64_t>;

/// A window that nobody holds any more, until the last stream has passed.
class Returning {
 public:
  Returning(std::shared_ptr<Window> window, std::shared_ptr<BytesOnTheirWay> bytes)
      : window_(std::move(window)), bytes_(std::move(bytes)) {
    bytes_->fetch_add(window_->bytes());
  }
  ~Returning() {
    const uint64_t num_bytes = window_->bytes();
    window_ = nullptr;
    bytes_->fetch_sub(num_bytes);
  }
  Returning(const Returning&) = delete;
  Returning& operator=(const Returning&) = delete;

 private:
  std::shared_ptr<Window> window_;
  std::shared_ptr<BytesOnTheirWay> bytes_;
};

class StreamWindow final : public Window {
 public:
  StreamWindow(std::shared_ptr<Window> window,
               std::shared_ptr<StreamOrder> order,
               std::shared_ptr<BytesOnTheirWay> bytes)
      : window_(std::move(window)), order_(std::move(order)), bytes_(std::move(bytes)) {
    data_ = window_->data();
    offer_ = window_->offer();
  }
  ~StreamWindow() override {
    order_->drop(std::make_shared<const Returning>(std::move(window_), std::move(bytes_)));
  }

  void shrink(uint64_t bytes) override {
    window_->shrink(bytes);
    offer_ = window_->offer();
  }
  void quarantine() override { window_->quarantine(); }

 private:
  std::shared_ptr<Window> window_;
  std::shared_ptr<StreamOrder> order_;
  std::shared_ptr<BytesOnTheirWay> bytes_;
};

class StreamHeap final : public moe::SymmetricMemory {
 public:
  StreamHeap(std::shared_ptr<moe::SymmetricMemory> heap, std::shared_ptr<StreamOrder> order)
      : heap_(std::move(heap)), order_(std::move(order)) {}

  std::shared_ptr<Window> allocate(uint64_t bytes) override {
    const auto deadline = std::chrono::steady_clock::now() + kReturnLimit;
    while (true) {
      const bool is_more_to_come = *bytes_ > 0 && std::chrono::steady_clock::now() < deadline;
      try {
        return wrap(heap_->allocate(bytes));
      } catch (const CapacityError&) {
        // Memory that is on its way is no lack of it.
        if (!is_more_to_come)
          throw;
      }
      std::this_thread::sleep_for(kReturnPoll);
    }
  }
  std::shared_ptr<Window> allocate_free(uint64_t most_bytes) override {
    auto window = heap_->allocate_free(most_bytes);
    return window == nullptr ? nullptr : wrap(std::move(window));
  }
  std::byte* try_resolve(int rank_idx, const Offer& offer) override {
    return heap_->try_resolve(rank_idx, offer);
  }
  bool find(const void* address, uint64_t bytes, Offer* offer) const override {
    return heap_->find(address, bytes, offer);
  }
  uint64_t available_bytes() const override {
    const uint64_t now = heap_->available_bytes();
    const uint64_t later = *bytes_;
    return now > std::numeric_limits<uint64_t>::max() - later ? now : now + later;
  }
  uint64_t largest_available_bytes() const override { return heap_->largest_available_bytes(); }
  void end_quarantine() override { heap_->end_quarantine(); }

 private:
  std::shared_ptr<Window> wrap(std::shared_ptr<Window> window) const {
    return std::make_shared<StreamWindow>(std::move(window), order_, bytes_);
  }

  std::shared_ptr<moe::SymmetricMemory> heap_;
  std::shared_ptr<StreamOrder> order_;
  std::shared_ptr<BytesOnTheirWay> bytes_ = std::make_shared<BytesOnTheirWay>(0);
};

}  // namespace

std::shared_ptr<moe::SymmetricMemory> make_stream_heap(std::shared_ptr<moe::SymmetricMemory> heap,
                                                       std::shared_ptr<StreamOrder> order) {
  return std::make_shared<StreamHeap>(std::move(heap), std::move(order));
}

}  // namespace moe::simt
