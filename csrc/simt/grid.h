#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "device/launch.h"
#include "simt/scheduler.h"

namespace moe::simt {

class Grid;

/// A launch: what every thread of a grid runs.
struct Kernel {
  std::string name;            ///< name for reports
  device::Launch shape;        ///< shape; its stream is not looked at
  std::function<void()> body;  ///< run once by every thread
  int rank_idx = -1;  ///< rank for reports and the checker; -1 where there is one rank only
  /// Called by its threads in device::await_prerequisites() and launch_dependents(), where the
  /// stream starts kernels that are dependent before the one ahead has ended.
  std::function<void()> await_prerequisites = nullptr;
  std::function<void()> launch_dependents = nullptr;
};

/// @throws InvalidArgument  the shape is not one that a device takes.
void check_shape(const Kernel& kernel);

/// Queue that device::launch puts kernels into: device::Launch::stream points to one.
///
/// A checker derives from it and calls launch_grid() for the first kernel of its stream, and for
/// each further one when `at_end` of the one before is called.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual void launch(Kernel kernel) = 0;
};

constexpr int kWarpSize = 32;
constexpr int kMaxThreads = 1024;            ///< threads of a block
constexpr int kMaxSharedBytes = 227 * 1024;  ///< bytes of a block

enum class WarpOperation : uint8_t { kNone, kSync, kShuffle, kBallot, kMatch };

/// Meeting of the lanes of a warp. A lane leaves its value and waits; the last to come
/// answers for all, so that nobody's answer changes before it was read.
struct Warp {
  struct Value {
    uint64_t words[2];
  };
  WarpOperation operation = WarpOperation::kNone;  ///< operation of the rendezvous that runs
  uint32_t present = 0;                            ///< lanes that wait
  uint32_t returned = 0;                           ///< lanes whose kernel has ended
  int fibers[kWarpSize];
  Value values[kWarpSize];
  int sources[kWarpSize];  ///< shuffle: the lane whose value is wanted
  Value results[kWarpSize];
};

struct Block {
  Grid* grid = nullptr;
  int block_idx = 0;
  std::byte* shared = nullptr;
  int num_returned = 0;  ///< threads
  std::vector<Warp> warps;
  std::vector<int> waiting;  ///< fibers, at the barrier of the block
};

/// One emulated thread.
struct Thread {
  int thread_idx = 0;
  Block* block = nullptr;
  int fiber = -1;
};

/// The emulated thread that runs. Kernels only.
inline Thread& current_thread() {
  return *static_cast<Thread*>(Scheduler::current_local());
}

/// @throws EmulationError  @p address is not in the shared memory of the running thread's block.
void check_shared(const void* address, size_t bytes);

/// A kernel that runs: blocks, and threads as fibers of one scheduler.
class Grid {
 public:
  /// @throws InvalidArgument  the shape is not one that a device takes.
  Grid(Scheduler& scheduler, Kernel kernel, std::function<void()> at_end);
  ~Grid();
  Grid(const Grid&) = delete;
  Grid& operator=(const Grid&) = delete;

  /// Spawns all threads.
  void start();

  const Kernel& kernel() const { return kernel_; }
  Scheduler& scheduler() const { return scheduler_; }
  int num_threads() const { return kernel_.shape.num_threads; }  ///< per block
  int num_blocks() const { return kernel_.shape.num_blocks; }
  const std::vector<Thread>& threads() const { return threads_; }  ///< by block, then thread

  /// "rank 1 DispatchParams block 0"
  std::string block_name(int block_idx) const;

 private:
  void run_thread(Thread& thread);
  void end_thread(Thread& thread);
  void free_shared();

  Scheduler& scheduler_;
  Kernel kernel_;
  std::function<void()> at_end_;
  std::vector<Block> blocks_;
  std::vector<Thread> threads_;
  int num_running_ = 0;
};

/// Puts a grid into @p scheduler; it runs in the scheduler's run().
/// @param at_end  called by the thread that ends last; may launch further grids.
/// @throws InvalidArgument  the shape is not one that a device takes.
void launch_grid(Scheduler& scheduler, Kernel kernel, std::function<void()> at_end = nullptr);

// Functions that device::sync_block() and the others stand on; called by emulated threads.
void sync_block();
void sync_warp();
void await_prerequisites();
void launch_dependents();
/// @param src_lane  taken modulo 32
Warp::Value shuffle(const Warp::Value& value, int src_lane);
uint32_t ballot(bool vote);
uint32_t match_any(uint32_t value);

}  // namespace moe::simt
