#include "schedules/run.h"

#include <cstring>
#include <exception>
#include <set>
#include <string>
#include <utility>

#include "core/error.h"
#include "schedules/checked_memory.h"
#include "schedules/fault.h"

namespace moe::simt {

namespace {
const char* active_fault = nullptr;
bool is_active_met = false;
std::set<std::string>* met_faults = nullptr;
}  // namespace

bool is_fault_on(const char* name) {
  if (met_faults != nullptr)
    met_faults->insert(name);
  const bool is_active = active_fault != nullptr && std::strcmp(active_fault, name) == 0;
  is_active_met = is_active_met || is_active;
  return is_active;
}

}  // namespace moe::simt

namespace moe::simt::checker {

void set_fault(const char* name) {
  active_fault = name;
}

bool has_met_fault() {
  return is_active_met;
}

void note_faults(std::set<std::string>* names) {
  met_faults = names;
}

std::vector<Scenario>& scenarios() {
  static std::vector<Scenario> all;
  return all;
}

// --- Threads of the host -----------------------------------------------------------------------

void Run::start_host(int rank_idx, const std::string& label, std::function<void()> body) {
  Place place;
  place.rank_idx = rank_idx;
  place.is_host = true;
  place.label = label;
  Machine::Thread* const thread = machine_.make_thread(std::move(place));
  if (scheduler_.current_fiber() >= 0)
    machine_.learn(thread, machine_.knowledge_of(scheduler_.thread_of(scheduler_.current_fiber())));
  const int fiber = scheduler_.spawn(
      [this, thread, body = std::move(body)] {
        body();
        machine_.knowledge_of(thread);  // its stores arrive
      },
      concat("rank ", rank_idx, " host, ", label));
  scheduler_.bind(fiber, thread, rank_idx, -1);
}

// --- Streams -----------------------------------------------------------------------------------

/// A kernel between its launch and its end.
struct RankStream::Launched {
  simt::Kernel kernel;
  std::function<void()> body;
  Knowledge before;
  Knowledge after;
  std::vector<int64_t> blocks;  ///< who a block is among all
  std::vector<int> num_left;    ///< threads by block
  std::set<int> launching;      ///< blocks that let the kernel behind start, and those that ended
  std::vector<int> waiting;     ///< fibers
  int set_idx = 0;
};

void RankStream::launch(simt::Kernel kernel) {
  Item item;
  item.is_kernel = true;
  item.kernel = std::move(kernel);
  put(std::move(item));
}

void RankStream::call(const std::string& label, std::function<void()> body) {
  Item item;
  item.is_kernel = false;
  item.label = label;
  item.body = std::move(body);
  put(std::move(item));
}

void RankStream::put(Item item) {
  SeededScheduler& scheduler = run_.scheduler();
  if (scheduler.current_fiber() >= 0)
    item.enqueued = run_.machine().knowledge_of(scheduler.thread_of(scheduler.current_fiber()));
  items_.push_back(std::move(item));
  if (!is_running_)
    start_next();
  else
    start_dependent();
}

void RankStream::start_next() {
  if (first_ == items_.size()) {
    items_.clear();
    first_ = 0;
    return;
  }
  is_running_ = true;
  Item item = std::move(items_[first_++]);
  reached_.join(item.enqueued);
  if (item.is_kernel)
    start_kernel(std::move(item));
  else
    start_call(std::move(item));
}

void RankStream::end_item(const Knowledge& after) {
  reached_.join(after);
  running_ = std::exchange(dependent_, nullptr);
  if (running_ == nullptr) {
    is_running_ = false;
    start_next();
    return;
  }
  running_->before = run_.machine().races().behind_launch(reached_, rank_idx_);
  for (const int fiber : running_->waiting)
    run_.scheduler().wake(fiber);
  start_dependent();
}

void RankStream::start_dependent() {
  if (running_ == nullptr || dependent_ != nullptr || first_ == items_.size())
    return;
  const Item& next = items_[first_];
  if (!next.is_kernel || !next.kernel.shape.is_dependent ||
      running_->launching.size() < running_->num_left.size())
    return;
  Item item = std::move(items_[first_++]);
  reached_.join(item.enqueued);
  start_kernel(std::move(item));
}

void RankStream::launch_dependents(Launched& launched) {
  launched.launching.insert(simt::current_thread().block->block_idx);
  if (&launched == running_.get())
    start_dependent();
}

void RankStream::await_prerequisites(Launched& launched) {
  SeededScheduler& scheduler = run_.scheduler();
  if (&launched != running_.get()) {
    launched.waiting.push_back(scheduler.current_fiber());
    scheduler.block({"the end of the kernel ahead"});
  }
  // What is constant was written before the kernel began, which may be earlier.
  run_.machine().learn(scheduler.thread_of(scheduler.current_fiber()), launched.before);
}

Machine::Thread* RankStream::thread_at(const Launched& launched,
                                       int block_idx,
                                       const Place& place) {
  auto& threads = threads_[launched.set_idx];
  const auto block = static_cast<size_t>(block_idx);
  const auto thread = static_cast<size_t>(place.thread_idx);
  if (block >= threads.size())
    threads.resize(block + 1);
  if (thread >= threads[block].size())
    threads[block].resize(thread + 1);
  if (threads[block][thread] == nullptr)
    threads[block][thread] = run_.machine().make_thread(place);
  return threads[block][thread];
}

void RankStream::run_thread(Launched& launched) {
  Machine& machine = run_.machine();
  const simt::Thread& self = simt::current_thread();
  const int block_idx = self.block->block_idx;
  const auto block = static_cast<size_t>(block_idx);
  Place place;
  place.rank_idx = rank_idx_;
  place.block = launched.blocks[block];
  place.block_idx = block_idx;
  place.thread_idx = self.thread_idx;
  place.label = launched.kernel.name;
  Machine::Thread* const thread = thread_at(launched, block_idx, place);
  machine.begin_thread(thread, place, launched.before);
  run_.scheduler().bind(self.fiber, thread, rank_idx_, place.block);
  launched.body();
  await_prerequisites(launched);
  machine.enter(thread);
  machine.end_thread(thread, &launched.after);
  if (--launched.num_left[block] > 0)
    return;
  if (self.block->shared != nullptr)
    machine.end_block(self.block->shared, static_cast<int64_t>(launched.kernel.shape.shared_bytes));
  launch_dependents(launched);
}

void RankStream::start_kernel(Item item) {
  auto launched = std::make_shared<Launched>();
  launched->kernel = item.kernel;
  launched->body = std::move(item.kernel.body);
  launched->kernel.body = nullptr;
  launched->before = run_.machine().races().behind_launch(reached_, rank_idx_);
  const device::Launch& shape = launched->kernel.shape;
  launched->num_left.assign(static_cast<size_t>(shape.num_blocks), shape.num_threads);
  item.kernel.rank_idx = rank_idx_;
  item.kernel.body = [this, launched] { run_thread(*launched); };
  item.kernel.await_prerequisites = [this, launched] { await_prerequisites(*launched); };
  item.kernel.launch_dependents = [this, launched] { launch_dependents(*launched); };
  launched->set_idx = running_ == nullptr ? 0 : 1 - running_->set_idx;
  (running_ == nullptr ? running_ : dependent_) = launched;
  SeededScheduler& scheduler = run_.scheduler();
  const int first_fiber = scheduler.num_fibers();
  forget_new_blocks();
  simt::launch_grid(
      scheduler, std::move(item.kernel), [this, launched] { end_item(launched->after); });
  launched->blocks = take_new_blocks(shape.num_blocks);
  for (int fiber = first_fiber; fiber < scheduler.num_fibers(); ++fiber)
    scheduler.set_group(
        fiber,
        rank_idx_,
        launched->blocks[static_cast<size_t>((fiber - first_fiber) / shape.num_threads)]);
}

void RankStream::start_call(Item item) {
  Machine& machine = run_.machine();
  SeededScheduler& scheduler = run_.scheduler();
  Place place;
  place.rank_idx = rank_idx_;
  place.is_host = true;
  place.label = item.label;
  if (host_ == nullptr)
    host_ = machine.make_thread(place);
  const int fiber = scheduler.spawn(
      [this, place, body = std::move(item.body)] {
        Machine& own_machine = run_.machine();
        own_machine.begin_thread(host_, place, reached_);
        body();
        Knowledge after;
        own_machine.enter(host_);
        own_machine.end_thread(host_, &after);
        end_item(after);
      },
      concat("rank ", rank_idx_, " host, ", item.label));
  scheduler.bind(fiber, host_, rank_idx_, -1);
}

void RankStream::synchronize() {
  SeededScheduler& scheduler = run_.scheduler();
  while (!is_idle())
    scheduler.idle(1000);
  run_.machine().learn(scheduler.thread_of(scheduler.current_fiber()), reached_);
}

// --- Schedules ---------------------------------------------------------------------------------

namespace {

struct World {
  Machine machine{0};
  SeededScheduler scheduler{machine};
  Trace trace;
};

World& world() {
  static World instance;
  return instance;
}

/// An error of the emulator as a finding.
Finding to_finding(const EmulationError& error) {
  const std::string text = error.what();
  return {text.starts_with("deadlock") ? Kind::kDeadlock : Kind::kBarrier, text};
}

}  // namespace

Trace last_trace() {
  return world().trace;
}

Findings run_schedule(const Scenario& scenario, uint64_t seed) {
  World& own = world();
  own.machine.reset(seed);
  own.scheduler.reset(seed);
  use_for_accesses(own.machine, own.scheduler);
  Place place;
  place.is_host = true;
  place.label = "the scenario";
  own.scheduler.set_main(own.machine.make_thread(std::move(place)));
  const uint64_t switches_before = own.scheduler.num_switches();
  Run run(own.machine, own.scheduler, seed);
  try {
    scenario.run(run);
  } catch (const Abandoned&) {
    // What was found is kept.
  } catch (const EmulationError& error) {
    Finding finding = to_finding(error);
    run.report(finding.kind, std::move(finding.text));
  } catch (const std::exception& error) {
    run.report(Kind::kResult, concat("an exception: ", error.what()));
  }
  own.trace = {run.num_steps(), own.scheduler.num_switches() - switches_before};
  return own.machine.findings();
}

}  // namespace moe::simt::checker
