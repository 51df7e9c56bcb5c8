#include "simt/grid.h"

#include <bit>
#include <utility>

#include "core/error.h"
#include "simt/memory.h"

namespace moe::simt {
namespace {

const char* operation_name(WarpOperation operation) {
  switch (operation) {
    case WarpOperation::kNone:
      return "none";
    case WarpOperation::kSync:
      return "sync_warp";
    case WarpOperation::kShuffle:
      return "a shuffle";
    case WarpOperation::kBallot:
      return "a vote";
    case WarpOperation::kMatch:
      return "match_any";
  }
  return "";
}

/// "3, 5 to 7" of the indices below @p count for which @p is_in holds.
template <typename IsIn>
std::string list_indices(int count, const IsIn& is_in) {
  std::string text;
  for (int first = 0; first < count; ++first) {
    if (!is_in(first))
      continue;
    int last = first;
    while (last + 1 < count && is_in(last + 1))
      ++last;
    text += concat(text.empty() ? "" : ", ", first);
    if (last > first)
      text += concat(" to ", last);
    first = last;
  }
  return text;
}

std::string thread_name(const Thread& thread) {
  return concat(
      thread.block->grid->block_name(thread.block->block_idx), " thread ", thread.thread_idx);
}

/// Threads of @p block that wait at its barrier, for a report.
std::string list_waiting(const Block& block) {
  const Thread* const threads = block.grid->threads().data() +
                                static_cast<ptrdiff_t>(block.block_idx) * block.grid->num_threads();
  std::vector<bool> is_waiting(static_cast<size_t>(block.grid->num_threads()));
  for (const int fiber : block.waiting)
    is_waiting[static_cast<size_t>(fiber - threads[0].fiber)] = true;
  return list_indices(block.grid->num_threads(),
                      [&](int idx) { return is_waiting[static_cast<size_t>(idx)]; });
}

/// Waits for all lanes; the last answers for all by @p answer(warp).
template <typename Answer>
void meet(WarpOperation operation, const Warp::Value& value, int source, const Answer& answer) {
  const Thread& self = current_thread();
  Block& block = *self.block;
  Scheduler& scheduler = block.grid->scheduler();
  const int warp_idx = self.thread_idx / kWarpSize;
  const int lane_idx = self.thread_idx % kWarpSize;
  Warp& warp = block.warps[static_cast<size_t>(warp_idx)];
  if (warp.returned != 0)
    throw EmulationError(
        concat(thread_name(self),
               " comes to ",
               operation_name(operation),
               " of warp ",
               warp_idx,
               ", where these lanes have returned: ",
               list_indices(kWarpSize, [&](int lane) { return warp.returned >> lane & 1u; })));
  if (warp.present != 0 && warp.operation != operation)
    throw EmulationError(
        concat(thread_name(self),
               " comes to ",
               operation_name(operation),
               " of warp ",
               warp_idx,
               ", where these lanes wait for ",
               operation_name(warp.operation),
               ": ",
               list_indices(kWarpSize, [&](int lane) { return warp.present >> lane & 1u; })));
  warp.operation = operation;
  warp.present |= 1u << lane_idx;
  warp.fibers[lane_idx] = self.fiber;
  warp.values[lane_idx] = value;
  warp.sources[lane_idx] = source;
  if (warp.present != ~0u) {
    scheduler.block({"the other lanes of warp", warp_idx});
    return;
  }
  answer(warp);
  warp.present = 0;
  for (int lane = 0; lane < kWarpSize; ++lane)
    if (lane != lane_idx)
      scheduler.wake(warp.fibers[lane]);
}

/// The warp's answer to the calling thread, whichever lane worked it out.
const Warp::Value& own_result() {
  const Thread& self = current_thread();
  return self.block->warps[static_cast<size_t>(self.thread_idx / kWarpSize)]
      .results[self.thread_idx % kWarpSize];
}

}  // namespace

void check_shape(const Kernel& kernel) {
  const device::Launch& shape = kernel.shape;
  MOE_CHECK(shape.num_blocks >= 1 && shape.num_threads >= kWarpSize &&
                shape.num_threads <= kMaxThreads && shape.num_threads % kWarpSize == 0,
            kernel.name,
            ": a grid of ",
            shape.num_blocks,
            " blocks of ",
            shape.num_threads,
            " threads is not of at least 1 block of 32 to ",
            kMaxThreads,
            " threads, a multiple of 32");
  MOE_CHECK(shape.shared_bytes <= kMaxSharedBytes,
            kernel.name,
            ": a block wants ",
            shape.shared_bytes,
            " bytes of shared memory and may have ",
            kMaxSharedBytes);
}

Grid::Grid(Scheduler& scheduler, Kernel kernel, std::function<void()> at_end)
    : scheduler_(scheduler), kernel_(std::move(kernel)), at_end_(std::move(at_end)) {
  check_shape(kernel_);
  const auto num_blocks = static_cast<size_t>(kernel_.shape.num_blocks);
  const auto num_threads = static_cast<size_t>(kernel_.shape.num_threads);
  blocks_.resize(num_blocks);
  threads_.resize(num_blocks * num_threads);
  for (size_t block_idx = 0; block_idx < num_blocks; ++block_idx) {
    Block& block = blocks_[block_idx];
    block.grid = this;
    block.block_idx = static_cast<int>(block_idx);
    block.warps.resize(num_threads / kWarpSize);
    block.waiting.reserve(num_threads);
    for (size_t idx = 0; idx < num_threads; ++idx) {
      Thread& thread = threads_[block_idx * num_threads + idx];
      thread.thread_idx = static_cast<int>(idx);
      thread.block = &block;
    }
  }
}

Grid::~Grid() {
  free_shared();
}

void Grid::free_shared() {
  for (Block& block : blocks_)
    if (block.shared != nullptr)
      memory::free_shared(std::exchange(block.shared, nullptr), kernel_.shape.shared_bytes);
}

void Grid::start() {
  for (Block& block : blocks_)
    block.shared =
        memory::allocate_shared(kernel_.shape.shared_bytes, kernel_.rank_idx, block.block_idx);
  num_running_ = static_cast<int>(threads_.size());
  for (Thread& thread : threads_)
    thread.fiber =
        scheduler_.spawn([this, &thread] { run_thread(thread); },
                         [this, &thread] {
                           return FiberName{block_name(thread.block->block_idx), thread.thread_idx};
                         });
}

std::string Grid::block_name(int block_idx) const {
  if (kernel_.rank_idx < 0)
    return concat(kernel_.name, " block ", block_idx);
  return concat("rank ", kernel_.rank_idx, " ", kernel_.name, " block ", block_idx);
}

void Grid::run_thread(Thread& thread) {
  scheduler_.set_local(&thread);
  kernel_.body();
  end_thread(thread);
}

void Grid::end_thread(Thread& thread) {
  Block& block = *thread.block;
  const int warp_idx = thread.thread_idx / kWarpSize;
  Warp& warp = block.warps[static_cast<size_t>(warp_idx)];
  warp.returned |= 1u << thread.thread_idx % kWarpSize;
  ++block.num_returned;
  if (warp.present != 0)
    throw EmulationError(
        concat(thread_name(thread),
               " has returned, while these lanes of its warp wait for it at ",
               operation_name(warp.operation),
               ": ",
               list_indices(kWarpSize, [&](int lane) { return warp.present >> lane & 1u; })));
  // sync_block is for every thread of the block; who returns will never come.
  if (!block.waiting.empty())
    throw EmulationError(concat(thread_name(thread),
                                " has returned, while these threads wait for it at the barrier "
                                "of the block: ",
                                list_waiting(block)));
  if (--num_running_ > 0)
    return;
  free_shared();
  if (at_end_)
    at_end_();
}

void launch_grid(Scheduler& scheduler, Kernel kernel, std::function<void()> at_end) {
  // Reports may name its threads until the run has ended.
  auto grid = std::make_shared<Grid>(scheduler, std::move(kernel), std::move(at_end));
  grid->start();
  scheduler.keep(std::move(grid));
}

void sync_block() {
  const Thread& self = current_thread();
  Block& block = *self.block;
  if (block.num_returned != 0) {
    const Grid& grid = *block.grid;
    throw EmulationError(concat(thread_name(self),
                                " comes to the barrier of the block, where ",
                                block.num_returned,
                                " of ",
                                grid.num_threads(),
                                " threads have returned"));
  }
  Scheduler& scheduler = block.grid->scheduler();
  block.waiting.push_back(self.fiber);
  if (static_cast<int>(block.waiting.size()) < block.grid->num_threads()) {
    scheduler.block({"the barrier of the block"});
    return;
  }
  memory::met(block.waiting.data(), static_cast<int>(block.waiting.size()));
  for (const int fiber : block.waiting)
    if (fiber != self.fiber)
      scheduler.wake(fiber);
  block.waiting.clear();
}

void await_prerequisites() {
  if (const auto& await = current_thread().block->grid->kernel().await_prerequisites)
    await();
}

void launch_dependents() {
  if (const auto& launch = current_thread().block->grid->kernel().launch_dependents)
    launch();
}

void check_shared(const void* address, size_t bytes) {
  const Thread& self = current_thread();
  const auto first = reinterpret_cast<uintptr_t>(self.block->shared);
  const auto offset = reinterpret_cast<uintptr_t>(address) - first;
  const size_t num_bytes = self.block->grid->kernel().shape.shared_bytes;
  if (offset >= num_bytes || num_bytes - offset < bytes) [[unlikely]]
    throw EmulationError(concat(thread_name(self),
                                " loads ",
                                bytes,
                                " bytes at ",
                                address,
                                " as shared memory, which its block has ",
                                num_bytes,
                                " bytes of at ",
                                static_cast<const void*>(self.block->shared)));
}

void sync_warp() {
  meet(WarpOperation::kSync, {}, 0, [](const Warp& warp) { memory::met(warp.fibers, kWarpSize); });
}

Warp::Value shuffle(const Warp::Value& value, int src_lane) {
  meet(WarpOperation::kShuffle, value, src_lane, [](Warp& warp) {
    for (int lane = 0; lane < kWarpSize; ++lane)
      warp.results[lane] = warp.values[warp.sources[lane] & (kWarpSize - 1)];
  });
  return own_result();
}

uint32_t ballot(bool vote) {
  meet(WarpOperation::kBallot, {{vote, 0}}, 0, [](Warp& warp) {
    uint64_t votes = 0;
    for (int lane = 0; lane < kWarpSize; ++lane)
      votes |= warp.values[lane].words[0] << lane;
    for (Warp::Value& result : warp.results)
      result.words[0] = votes;
  });
  return static_cast<uint32_t>(own_result().words[0]);
}

uint32_t match_any(uint32_t value) {
  meet(WarpOperation::kMatch, {{value, 0}}, 0, [](Warp& warp) {
    for (Warp::Value& result : warp.results)
      result.words[0] = 0;
    for (int lane = 0; lane < kWarpSize; ++lane)
      for (int other = 0; other < kWarpSize; ++other)
        if (warp.values[other].words[0] == warp.values[lane].words[0])
          warp.results[lane].words[0] |= uint64_t{1} << other;
  });
  return static_cast<uint32_t>(own_result().words[0]);
}

}  // namespace moe::simt
