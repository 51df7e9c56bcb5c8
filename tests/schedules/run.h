#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "schedules/finding.h"
#include "schedules/machine.h"
#include "schedules/random.h"
#include "schedules/seeded_scheduler.h"
#include "simt/grid.h"

namespace moe::simt::checker {

/// One schedule of one scenario: memory, threads and numbers that follow from the seed.
class Run {
 public:
  Run(Machine& machine, SeededScheduler& scheduler, uint64_t seed)
      : machine_(machine), scheduler_(scheduler), seed_(seed), random_(seed ^ 0x5EED) {}

  Machine& machine() { return machine_; }
  GuestMemory& guest() { return machine_.guest(); }
  SeededScheduler& scheduler() { return scheduler_; }
  uint64_t seed() const { return seed_; }
  /// For sizes, inputs and moments of the scenario; the schedule has numbers of its own.
  Random& random() { return random_; }

  /// The schedule is wrong; it goes on.
  void report(Kind kind, std::string text) { machine_.findings().add(kind, std::move(text)); }
  bool is_clean() { return machine_.findings().empty(); }

  /// Accesses that the machine does not know of: the host's, in a world of its own.
  void count_steps(uint64_t num_steps) { num_steps_ += num_steps; }
  uint64_t num_steps() const { return machine_.num_steps() + num_steps_; }

  /// A thread of the host of a rank. It begins with scheduler().run().
  void start_host(int rank_idx, const std::string& label, std::function<void()> body);

 private:
  Machine& machine_;
  SeededScheduler& scheduler_;
  uint64_t seed_;
  Random random_;
  uint64_t num_steps_ = 0;
};

/// A stream of one rank: kernels and what the host does between them, one after the other.
class RankStream : public simt::Stream {
 public:
  RankStream(Run& run, int rank_idx) : run_(run), rank_idx_(rank_idx) {}

  void launch(simt::Kernel kernel) override;
  /// Runs @p body as a thread of the host, after what is in the stream and before what comes.
  void call(const std::string& label, std::function<void()> body);
  /// Returns whether all that was put in has ended.
  bool is_idle() const { return !is_running_ && first_ == items_.size(); }
  /// A thread of the host waits for that, and comes after it.
  void synchronize();

 private:
  struct Item {
    bool is_kernel;
    simt::Kernel kernel;
    std::string label;
    std::function<void()> body;
    Knowledge enqueued;
  };
  struct Launched;

  void put(Item item);
  void start_next();
  void start_kernel(Item item);
  void start_call(Item item);
  void run_thread(Launched& launched);
  void end_item(const Knowledge& after);
  /// Starts what is next in the stream where it is a kernel that need not wait for the running one.
  void start_dependent();
  void launch_dependents(Launched& launched);
  void await_prerequisites(Launched& launched);
  Machine::Thread* thread_at(const Launched& launched, int block_idx, const Place& place);

  Run& run_;
  int rank_idx_;
  std::vector<Item> items_;
  size_t first_ = 0;
  bool is_running_ = false;
  std::shared_ptr<Launched> running_;    ///< a kernel; what is behind it waits for its end
  std::shared_ptr<Launched> dependent_;  ///< started before that; its threads wait
  Knowledge reached_;                    ///< what has happened in the stream
  /// By block, then thread. A kernel and the one that starts before its end have a set each.
  std::vector<std::vector<Machine::Thread*>> threads_[2];
  Machine::Thread* host_ = nullptr;
};

/// A case that is run under many schedules.
struct Scenario {
  const char* name;
  const char* summary;
  void (*run)(Run&);
  bool is_wrong = false;  ///< on purpose: every exploration finds something
};

std::vector<Scenario>& scenarios();

struct Registration {
  explicit Registration(const Scenario& scenario) { scenarios().push_back(scenario); }
};

/// Runs @p scenario once. Equal seeds give equal runs.
/// @return what was found; empty when all was right.
Findings run_schedule(const Scenario& scenario, uint64_t seed);

/// Accesses and switches of the last schedule, to compare replays.
struct Trace {
  uint64_t num_steps = 0;
  uint64_t num_switches = 0;
};
Trace last_trace();

/// Switches the fault of that name on, or all off for null. The name is kept, not copied.
void set_fault(const char* name);
/// Returns whether code has come across the fault that is on.
bool has_met_fault();
/// From now on the names of faults that code comes across are added to @p names.
void note_faults(std::set<std::string>* names);

}  // namespace moe::simt::checker

/// Defines a scenario: MOE_SCENARIO(name, "what it shows") { uses `run`; }
#define MOE_SCENARIO(name, summary) MOE_SCENARIO_OF(name, summary, false)
/// The same, with a fault that has to be found.
#define MOE_WRONG_SCENARIO(name, summary) MOE_SCENARIO_OF(name, summary, true)
#define MOE_SCENARIO_OF(name, summary, is_wrong)                                   \
  static void name##_scenario(::moe::simt::checker::Run& run);                     \
  static const ::moe::simt::checker::Registration name##_registration(             \
      ::moe::simt::checker::Scenario{#name, summary, &name##_scenario, is_wrong}); \
  static void name##_scenario([[maybe_unused]] ::moe::simt::checker::Run& run)
