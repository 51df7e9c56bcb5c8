// memory.h in the checked build.

#include "schedules/checked_memory.h"

#include <utility>

#include "core/error.h"
#include "simt/memory.h"

namespace moe::simt {

namespace {

checker::Machine* machine_of_accesses = nullptr;
checker::SeededScheduler* scheduler_of_accesses = nullptr;
int64_t num_blocks_ever = 0;
std::vector<int64_t> new_blocks;

/// Others may run, then the calling thread accesses memory.
checker::Machine& enter(bool is_between_threads) {
  scheduler_of_accesses->pass(is_between_threads);
  machine_of_accesses->enter(
      scheduler_of_accesses->thread_of(scheduler_of_accesses->current_fiber()));
  return *machine_of_accesses;
}

void check_aligned(const void* address, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0) [[unlikely]]
    memory::throw_misaligned(address, bytes);
}

std::vector<checker::Machine::Thread*> threads_of(const int* fibers, int num_fibers) {
  std::vector<checker::Machine::Thread*> threads(static_cast<size_t>(num_fibers));
  for (int i = 0; i < num_fibers; ++i)
    threads[static_cast<size_t>(i)] = scheduler_of_accesses->thread_of(fibers[i]);
  return threads;
}

}  // namespace

namespace checker {

void use_for_accesses(Machine& machine, SeededScheduler& scheduler) {
  machine_of_accesses = &machine;
  scheduler_of_accesses = &scheduler;
  num_blocks_ever = 0;
  new_blocks.clear();
}

void forget_new_blocks() {
  new_blocks.clear();
}

std::vector<int64_t> take_new_blocks(int num_blocks) {
  if (new_blocks.size() != static_cast<size_t>(num_blocks))
    throw EmulationError("a grid allocates shared memory once per block");
  return std::exchange(new_blocks, {});
}

}  // namespace checker

namespace memory {

void throw_misaligned(const void* address, size_t bytes) {
  checker::Machine& machine = enter(false);
  machine.races().found(checker::Kind::kBounds,
                        machine.running()->actor,
                        concat("an access of ",
                               bytes,
                               " bytes at ",
                               machine.guest().describe(address),
                               " is not aligned"));
  throw checker::Abandoned("misaligned");
}

void load(const void* from, void* value, size_t bytes) {
  check_aligned(from, bytes);
  enter(false).load(from, value, bytes, false);
}

void load_constant(const void* from, void* value, size_t bytes) {
  check_aligned(from, bytes);
  enter(false).load(from, value, bytes, true);
}

void store(void* to, const void* value, size_t bytes) {
  check_aligned(to, bytes);
  enter(false).store(to, value, bytes);
}

uint64_t atomic_load(const void* from, size_t bytes, Order order, Reach reach) {
  check_aligned(from, bytes);
  return enter(true).atomic_load(from, bytes, order, reach);
}

void atomic_store(void* to, uint64_t value, size_t bytes, Order order, Reach reach) {
  check_aligned(to, bytes);
  enter(true).atomic_store(to, value, bytes, order, reach);
}

uint64_t atomic_add(void* to, uint64_t value, size_t bytes, Order order, Reach reach) {
  check_aligned(to, bytes);
  return enter(true).atomic_add(to, value, bytes, order, reach);
}

void fence(Reach reach) {
  enter(true).fence(reach);
}

void fence_proxy(Space space) {
  enter(false).fence_proxy(space);
}

void init_mbarrier(uint64_t* barrier, int num_arrivals) {
  check_aligned(barrier, sizeof(uint64_t));
  enter(false).init_mbarrier(barrier, num_arrivals);
}

void fence_mbarrier_init() {
  enter(false).fence_mbarrier_init();
}

void arrive_expect(uint64_t* barrier, uint32_t bytes) {
  enter(true).arrive_expect(barrier, bytes);
}

bool try_wait(uint64_t* barrier, uint32_t parity) {
  if (enter(true).try_wait(barrier, parity))
    return true;
  scheduler_of_accesses->idle(0);
  return enter(true).try_wait(barrier, parity);
}

void bulk_load(std::byte* shared, const std::byte* global, uint32_t bytes, uint64_t* barrier) {
  enter(true).bulk_load(shared, global, bytes, barrier);
}

void bulk_store(std::byte* global, const std::byte* shared, uint32_t bytes) {
  enter(true).bulk_store(global, shared, bytes);
}

void commit_bulk_stores() {
  enter(false).commit_bulk_stores();
}

void await_bulk_stores(int num_pending) {
  enter(true).await_bulk_stores(num_pending);
}

void await_bulk_reads(int num_pending) {
  enter(true).await_bulk_reads(num_pending);
}

void put_signal(
    int pe, std::byte* to, const std::byte* from, int64_t bytes, uint64_t* signal, uint64_t value) {
  check_aligned(signal, sizeof(uint64_t));
  enter(true).put_signal(pe, to, from, bytes, signal, value);
}

void take_put(const uint64_t* signal) {
  enter(false).take_put(signal);
}

void quiet() {
  enter(true).quiet();
}

void met(const int* threads, int num_threads) {
  const auto met_threads = threads_of(threads, num_threads);
  machine_of_accesses->meet(met_threads.data(), num_threads);
}

std::byte* allocate_shared(size_t bytes, int rank_idx, int block_idx) {
  new_blocks.push_back(++num_blocks_ever);
  if (bytes == 0)
    return nullptr;
  return machine_of_accesses->guest().allocate_shared(static_cast<int64_t>(bytes),
                                                      rank_idx,
                                                      num_blocks_ever,
                                                      concat("shared memory of block ", block_idx));
}

void free_shared(std::byte* shared, size_t bytes) {
  if (shared == nullptr)
    return;
  machine_of_accesses->races().forget(shared, static_cast<int64_t>(bytes));
  machine_of_accesses->guest().release_shared(shared);
}

}  // namespace memory
}  // namespace moe::simt
