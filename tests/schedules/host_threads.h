#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "schedules/finding.h"
#include "schedules/host_memory.h"
#include "schedules/random.h"
#include "simt/scheduler.h"

namespace moe::simt::checker {

/// Threads of the CPU backend as fibers, one schedule after another: who runs next, what time it is
/// and who dies when follow from a seed. core/sync.h of a checked build calls it.
///
/// Time passes with every step a little and, when everybody sleeps, up to the first limit.
class HostThreads final : public Scheduler {
 public:
  struct Options {
    bool may_time_pass = false;  ///< else it is a finding when nothing but time wakes anybody
    int64_t cache_bytes = int64_t{1} << 30;  ///< above which rows are stored past the caches
    int64_t most_steps = 400'000;
  };

  /// Ends a fiber whose rank has died, or whose schedule is over. No std::exception, so that
  /// handlers pass it on.
  struct Ended {};

  HostThreads();
  ~HostThreads() override;

  /// Thread that the calling fiber belongs to; null outside of fibers of this class.
  static HostThreads* current();

  void begin(uint64_t seed, const Options& options);
  /// Before or during run_all(). @p body may end by Ended.
  int start(int rank_idx, const std::string& name, std::function<void()> body);
  /// Runs until every thread has ended.
  void run_all();

  /// The thread that runs on rank @p rank_idx as @p thread dies @p num_steps steps from now.
  void doom(int thread, int64_t num_steps, std::function<void()> on_death);
  /// Nobody of that rank does anything any more.
  void kill(int rank_idx);

  HostMemory& memory() { return memory_; }
  Random& random() { return random_; }
  Findings& findings() { return findings_; }
  const Options& options() const { return options_; }
  int64_t num_steps() const { return num_steps_; }
  int thread() const { return thread_of_[static_cast<size_t>(current_fiber())]; }
  void found(Kind kind, std::string text);

  // --- Called by running threads ----------------------------------------------------------------

  /// A step: others may run first. @return false where the thread is not to touch anything.
  /// @throws Ended  its rank is dead or the schedule is over.
  bool step(bool is_plain = false);
  /// Says whether what the thread does counts; no step.
  bool is_touching() { return !is_silent(); }
  /// A step where nothing may be thrown.
  bool step_quietly();
  /// A step of a loop that waits: others do run first.
  void spin();
  /// Sleeps until wake_all(@p address) or @p deadline_ns, or for no reason. Nobody runs between the
  /// call and the sleep. @param is_timed  It is time that is waited for.
  void sleep(const void* address, int64_t deadline_ns, bool is_timed, const char* what);
  void wake_all(const void* address);
  int64_t time_ns();
  /// From now on the thread only gives things back: it ends without a further step.
  void leave();

  void lock(const void* mutex, bool* is_held);
  void unlock(const void* mutex, bool* is_held);
  void forget(const void* mutex) { locks_.erase(mutex); }

 protected:
  size_t pick_next(std::span<const int> ready) override;
  void on_all_idle() override {}

 private:
  struct Thread {
    int rank_idx = 0;
    int fiber = -1;
    std::string name;
    bool has_left = false;
    bool is_asleep = false;
    bool is_timed = false;
    const void* address = nullptr;
    const char* what = "";
    int64_t deadline_ns = 0;
    int64_t steps_to_live = -1;  ///< or it is not doomed
    std::function<void()> on_death;
  };

  Thread& self() { return threads_[static_cast<size_t>(thread())]; }
  bool is_silent() { return is_over_ || self().has_left || is_dead(self().rank_idx); }
  bool is_dead(int rank_idx) const { return (dead_ranks_ >> rank_idx & 1) != 0; }
  void throw_ended();
  void end_all();
  void rouse(Thread& thread);
  void run_clock();

  HostMemory memory_;
  Findings findings_;
  Options options_;
  Random random_{0};
  std::vector<Thread> threads_;
  std::vector<int> thread_of_;  ///< by fiber; -1 for the clock
  std::map<const void*, Clock> locks_;
  int64_t time_ns_ = 0;
  int64_t num_steps_ = 0;
  uint64_t dead_ranks_ = 0;
  bool is_over_ = false;
  uint32_t switch_of_ = 2;  ///< one step in so many lets others run
  int slow_rank_ = -1;      ///< runs when nobody else can, mostly
};

}  // namespace moe::simt::checker
