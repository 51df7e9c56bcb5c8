#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

#include "core/error.h"
#include "simt/grid.h"
#include "simt/memory.h"

// Accesses themselves. Bulk copies are made where they are issued, so that waits for them find them
// done; words are atomic across processes whatever the order and scope asked for, which costs
// nothing next to a switch of fibers.

namespace moe::simt::memory {
namespace {

constexpr size_t kSharedAlignment = 128;
constexpr int kUnwritten = 0xFF;  // NaN in every float format
constexpr uintptr_t kBulkAlignment = 16;

template <typename Word>
Word& word_at(const void* address) {
  if (reinterpret_cast<uintptr_t>(address) % sizeof(Word) != 0) [[unlikely]]
    throw_misaligned(address, sizeof(Word));
  return *static_cast<Word*>(const_cast<void*>(address));
}

std::string who() {
  const Thread& thread = current_thread();
  return concat(
      thread.block->grid->block_name(thread.block->block_idx), " thread ", thread.thread_idx);
}

/// A barrier that bulk copies arrive at.
///
/// Bits: [0, 20) arrivals of a phase; [20, 40) arrivals that are missing; [40, 61) bytes that are
/// missing, two's complement; 61 parity of the phase that runs; [62, 64) 1, which neither zeros
/// nor unwritten memory show.
class Phase {
 public:
  static constexpr int64_t kMaxArrivals = (1 << 20) - 1;
  static constexpr int64_t kMaxBytes = (1 << 20) - 1;

  Phase(int num_arrivals) : num_arrivals_(num_arrivals), num_missing_(num_arrivals) {}

  static Phase read(const uint64_t* barrier) {
    const uint64_t bits = word_at<uint64_t>(barrier);
    if (bits >> 62 != 1)
      throw EmulationError(concat(who(), ": the mbarrier at ", barrier, " was not initialized"));
    Phase phase(static_cast<int>(bits & kMaxArrivals));
    phase.num_missing_ = static_cast<int64_t>(bits >> 20 & kMaxArrivals);
    phase.missing_bytes_ = static_cast<int64_t>(bits << 3) >> 43;
    phase.parity_ = bits >> 61 & 1;
    return phase;
  }

  void write(uint64_t* barrier) const {
    word_at<uint64_t>(barrier) = static_cast<uint64_t>(num_arrivals_) |
                                 static_cast<uint64_t>(num_missing_) << 20 |
                                 (static_cast<uint64_t>(missing_bytes_) & 0x1FFFFF) << 40 |
                                 parity_ << 61 | uint64_t{1} << 62;
  }

  void arrive() {
    if (num_missing_ == 0)
      throw EmulationError(concat(who(),
                                  " arrives at an mbarrier whose phase had all its ",
                                  num_arrivals_,
                                  " arrivals and still misses ",
                                  missing_bytes_,
                                  " bytes"));
    --num_missing_;
  }

  void add_missing_bytes(int64_t bytes) {
    missing_bytes_ += bytes;
    if (missing_bytes_ > kMaxBytes || missing_bytes_ < -kMaxBytes)
      throw EmulationError(concat(who(),
                                  ": an mbarrier that counts up to ",
                                  kMaxBytes,
                                  " bytes would miss ",
                                  missing_bytes_));
  }

  void end_if_complete() {
    if (num_missing_ != 0 || missing_bytes_ != 0)
      return;
    num_missing_ = num_arrivals_;
    parity_ ^= 1;
  }

  uint64_t parity() const { return parity_; }

 private:
  int64_t num_arrivals_;
  int64_t num_missing_;
  int64_t missing_bytes_ = 0;
  uint64_t parity_ = 0;
};

void check_bulk(const void* shared, const void* global, uint32_t bytes) {
  if (reinterpret_cast<uintptr_t>(shared) % kBulkAlignment != 0 ||
      reinterpret_cast<uintptr_t>(global) % kBulkAlignment != 0 || bytes % kBulkAlignment != 0)
    throw EmulationError(concat(who(),
                                ": a bulk copy of ",
                                bytes,
                                " bytes between shared memory at ",
                                shared,
                                " and ",
                                global,
                                " is not of multiples of ",
                                kBulkAlignment));
  const Thread& thread = current_thread();
  const auto offset =
      reinterpret_cast<uintptr_t>(shared) - reinterpret_cast<uintptr_t>(thread.block->shared);
  const size_t shared_bytes = thread.block->grid->kernel().shape.shared_bytes;
  if (offset > shared_bytes || bytes > shared_bytes - offset)
    throw EmulationError(concat(who(),
                                ": a bulk copy of ",
                                bytes,
                                " bytes at offset ",
                                static_cast<int64_t>(offset),
                                " of shared memory, which has ",
                                shared_bytes));
}

}  // namespace

void throw_misaligned(const void* address, size_t bytes) {
  throw EmulationError(
      concat(who(), ": an access of ", bytes, " bytes at ", address, " is not aligned to them"));
}

uint64_t atomic_load(const void* from, size_t bytes, Order, Reach) {
  if (bytes == 8)
    return std::atomic_ref(word_at<uint64_t>(from)).load(std::memory_order_acquire);
  return std::atomic_ref(word_at<uint32_t>(from)).load(std::memory_order_acquire);
}

void atomic_store(void* to, uint64_t value, size_t bytes, Order, Reach) {
  if (bytes == 8)
    std::atomic_ref(word_at<uint64_t>(to)).store(value, std::memory_order_release);
  else
    std::atomic_ref(word_at<uint32_t>(to))
        .store(static_cast<uint32_t>(value), std::memory_order_release);
}

uint64_t atomic_add(void* to, uint64_t value, size_t bytes, Order, Reach) {
  if (bytes == 8)
    return std::atomic_ref(word_at<uint64_t>(to)).fetch_add(value, std::memory_order_acq_rel);
  return std::atomic_ref(word_at<uint32_t>(to))
      .fetch_add(static_cast<uint32_t>(value), std::memory_order_acq_rel);
}

void fence(Reach) {
  std::atomic_thread_fence(std::memory_order_acq_rel);
}

void fence_proxy(Space) {}

void init_mbarrier(uint64_t* barrier, int num_arrivals) {
  if (num_arrivals < 1 || num_arrivals > Phase::kMaxArrivals)
    throw EmulationError(concat(who(),
                                ": an mbarrier for ",
                                num_arrivals,
                                " arrivals is not for 1 to ",
                                Phase::kMaxArrivals));
  Phase(num_arrivals).write(barrier);
}

void fence_mbarrier_init() {}

void arrive_expect(uint64_t* barrier, uint32_t bytes) {
  Phase phase = Phase::read(barrier);
  phase.add_missing_bytes(bytes);
  phase.arrive();
  phase.end_if_complete();
  phase.write(barrier);
}

bool try_wait(uint64_t* barrier, uint32_t parity) {
  if (Phase::read(barrier).parity() != (parity & 1))
    return true;
  Scheduler::current()->idle(0);
  return Phase::read(barrier).parity() != (parity & 1);
}

void bulk_load(std::byte* shared, const std::byte* global, uint32_t bytes, uint64_t* barrier) {
  check_bulk(shared, global, bytes);
  Phase phase = Phase::read(barrier);
  std::memcpy(shared, global, bytes);
  phase.add_missing_bytes(-static_cast<int64_t>(bytes));
  phase.end_if_complete();
  phase.write(barrier);
}

void bulk_store(std::byte* global, const std::byte* shared, uint32_t bytes) {
  check_bulk(shared, global, bytes);
  std::memcpy(global, shared, bytes);
}

void commit_bulk_stores() {}
void await_bulk_stores(int /*num_pending*/) {}
void await_bulk_reads(int /*num_pending*/) {}

void met(const int* /*threads*/, int /*num_threads*/) {}

std::byte* allocate_shared(size_t bytes, int /*rank_idx*/, int /*block_idx*/) {
  if (bytes == 0)
    return nullptr;
  auto* const shared =
      static_cast<std::byte*>(::operator new(bytes, std::align_val_t{kSharedAlignment}));
  std::memset(shared, kUnwritten, bytes);
  return shared;
}

void free_shared(std::byte* shared, size_t /*bytes*/) {
  ::operator delete(shared, std::align_val_t{kSharedAlignment});
}

}  // namespace moe::simt::memory
