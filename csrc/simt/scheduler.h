#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "simt/fiber.h"

namespace moe::simt {

/// Fault of an emulated program: a deadlock, a barrier that some threads never reach, a
/// lane that has returned while others wait for it.
class EmulationError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Identity of a fiber, for reports. Fibers of one group that wait at the same point and have
/// successive numbers are named as a range.
struct FiberName {
  std::string group;   ///< "rank 1 DispatchParams block 0"
  int thread_idx = 0;  ///< in the group
};

/// Point at which a fiber waits; strings are literals.
struct WaitPoint {
  const char* what = "";
  int detail = -1;  ///< added to `what` where it is not negative
};

namespace detail {
// State of the calling OS thread; small enough for the space that the loader keeps for late
// modules.
extern constinit thread_local void* t_local __attribute__((tls_model("initial-exec")));
}  // namespace detail

/// Runs fibers on one OS thread, one at a time, until all have ended.
///
/// Process mode uses it as it is: fibers run in turn. A checker derives from it, chooses who runs
/// next (pick_next), what time it is (now_ns), and what happens when everybody waits for memory
/// (on_all_idle).
///
/// Several grids, of one rank or of several, run at a time when they are launched into the same
/// scheduler (simt/grid.h):
///
///   Scheduler scheduler;
///   launch_grid(scheduler, Kernel{"exchange", shape, body_of_rank_0, .rank_idx = 0});
///   launch_grid(scheduler, Kernel{"exchange", shape, body_of_rank_1, .rank_idx = 1});
///   scheduler.run();
///
/// Every OS thread may have a scheduler of its own; a scheduler and its fibers stay on the thread
/// that calls run(). Fibers keep their stacks for the next run().
class Scheduler {
 public:
  static constexpr size_t kStackBytes = 128 * 1024;

  explicit Scheduler(size_t stack_bytes = kStackBytes);
  virtual ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  /// The scheduler whose run() the calling thread is in, or null.
  static Scheduler* current();

  /// Makes a fiber that runs @p body. Before or during run(). Captures of two words are not
  /// allocated.
  /// @return its number: 0, 1, ... in each run(), never used twice in it.
  int spawn(std::function<void()> body, std::function<FiberName()> name);
  int spawn(std::function<void()> body, std::string name);

  /// Keeps what fibers point to until run() has ended. Before or during run().
  void keep(std::shared_ptr<void> owned) { kept_.push_back(std::move(owned)); }

  /// Runs until every fiber has ended. The first exception that leaves a fiber ends all others
  /// (their stacks unwind) and is thrown.
  /// @throws EmulationError  nobody can run: names every fiber that waits, and where.
  void run();

  // --- Called by fibers -------------------------------------------------------------------------

  /// The fiber that runs; -1 outside of fibers.
  int current_fiber() const { return running_; }

  /// Lets other fibers run first.
  void yield();

  /// Waits until wake() is called for this fiber. After another fiber has failed, this and the
  /// other waits throw what unwinds the stack; in a destructor that unwinding calls, yield() and
  /// idle() return at once.
  void block(WaitPoint where);

  /// Lets @p fiber run, which is in block().
  void wake(int fiber);

  /// From a loop that waits for memory: fibers that do not wait for memory run first. When none is
  /// left, on_all_idle() and then all idle fibers in turn.
  /// @param duration_ns  a hint
  virtual void idle(uint64_t duration_ns);

  /// Wall-clock time of the machine, the same for all its processes.
  virtual uint64_t now_ns();

  // --- About fibers -----------------------------------------------------------------------------

  int num_fibers() const { return num_fibers_; }  ///< spawned in this run
  int num_live() const { return num_live_; }
  FiberName name(int fiber) const;
  uint64_t num_switches() const { return num_switches_; }  ///< in all runs

  /// Value that the running fiber has set (grids: its simt::Thread); null outside of fibers.
  static void* current_local() { return detail::t_local; }
  void set_local(void* local_of_fiber);

  /// Every fiber that waits and where, in ranges.
  std::string describe_waiting() const;

 protected:
  /// Chooses who runs next.
  /// @param ready  fibers that can run, never empty; in the order in which they became ready where
  ///   index 0 was always chosen, else in one that follows from what was chosen
  /// @return an index into @p ready.
  virtual size_t pick_next(std::span<const int> ready);

  /// Every live fiber that does not wait in block() is idle. Process mode gives the core away.
  virtual void on_all_idle();

 private:
  enum class State : uint8_t { kReady, kRunning, kBlocked, kIdle, kEnded };
  struct Fiber;
  struct Worker;
  /// Unwinds a fiber after another has failed. No std::exception, so that handlers pass it on.
  struct Cancelled {};

  static void work(void* worker);

  Fiber& fiber(int idx) const { return *fibers_[static_cast<size_t>(idx)]; }
  void push_ready(int idx);
  int take_ready();
  int choose();
  void start(Fiber& fiber);
  void end(Fiber& fiber);
  void leave(State state, WaitPoint where);
  void switch_from(Worker& from);
  void fail(std::exception_ptr error);

  StackPool stacks_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<Worker*> spare_workers_;
  std::vector<std::unique_ptr<Fiber>> fibers_;  ///< the first num_fibers_ belong to this run
  int num_fibers_ = 0;
  std::vector<std::shared_ptr<void>> kept_;
  std::vector<int> ready_;  ///< from first_ready_ on
  size_t first_ready_ = 0;
  std::vector<int> idle_;
  std::unique_ptr<Worker> main_;
  int running_ = -1;
  int num_live_ = 0;
  int num_idle_rounds_ = 0;
  uint64_t num_switches_ = 0;
  bool is_cancelling_ = false;
  std::exception_ptr error_;
  void* exception_globals_ = nullptr;  ///< exception globals of the OS thread in run()
};

}  // namespace moe::simt
