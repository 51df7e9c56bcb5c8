#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "schedules/machine.h"
#include "schedules/random.h"
#include "simt/scheduler.h"

namespace moe::simt::checker {

/// Rule by which a schedule chooses who runs; drawn from the seed.
struct Policy {
  enum class Pick : uint8_t {
    kInTurn,   ///< whoever has waited longest
    kAny,      ///< every thread alike
    kBursts,   ///< one block for a while, then another
    kStarved,  ///< one rank or block hardly ever runs, until another is starved
    kLatest,   ///< whoever became ready last
  };
  Pick pick = Pick::kAny;
  uint32_t switch_one_in = 64;  ///< how rarely an ordinary access lets others run first
};

/// Chooses who runs next by numbers from the seed. Time passes when everybody waits, and only once
/// everything that was on its way through memory has arrived.
class SeededScheduler : public Scheduler {
 public:
  explicit SeededScheduler(Machine& machine) : machine_(machine), random_(0) {}

  /// Begins another schedule.
  void reset(uint64_t seed);

  /// Identity of a fiber. Block -1: a thread of the host.
  void bind(int fiber, Machine::Thread* thread, int rank_idx, int64_t block);
  void set_group(int fiber, int rank_idx, int64_t block);
  Machine::Thread* thread_of(int fiber) const;
  /// For accesses outside of fibers.
  void set_main(Machine::Thread* thread) { main_ = thread; }

  /// Before an access: memory goes on, others may run. Throws when the schedule has no end.
  void pass(bool is_between_threads);

  /// The virtual clock.
  uint64_t now_ns() override { return now_ns_; }
  void advance(uint64_t duration_ns) { now_ns_ += duration_ns; }

 protected:
  size_t pick_next(std::span<const int> ready) override;
  void on_all_idle() override;

 private:
  struct Group {
    Machine::Thread* thread = nullptr;
    int rank_idx = -1;
    int64_t block = -1;
  };

  bool is_favoured(int fiber) const;
  void draw_target(std::span<const int> ready);

  Machine& machine_;
  Random random_;
  Policy policy_;
  std::vector<Group> groups_;  ///< by fiber
  Machine::Thread* main_ = nullptr;
  Group target_;
  bool is_whole_rank_ = false;
  uint32_t num_left_ = 0;  ///< picks until another target is drawn
  uint32_t until_switch_ = 1;
  uint64_t now_ns_ = 1;
  uint64_t pause_ns_ = 1;
  uint64_t seen_changes_ = 0;
  int num_idle_rounds_ = 0;
};

}  // namespace moe::simt::checker
