#include "simt/scheduler.h"

#include <cxxabi.h>
#include <time.h>

#include <algorithm>
#include <cassert>
#include <cstring>
#include <utility>

#include "core/error.h"
#include "core/sync.h"

namespace moe::simt {

namespace detail {
constinit thread_local void* t_local = nullptr;
}  // namespace detail

namespace {

constinit thread_local Scheduler* t_scheduler __attribute__((tls_model("initial-exec"))) = nullptr;

/// State of the C++ runtime per OS thread: exceptions being handled, and the number that unwind.
/// The two members of abi::__cxa_eh_globals as the Itanium C++ ABI lays them out.
struct ExceptionGlobals {
  void* caught = nullptr;
  unsigned num_uncaught = 0;
};

}  // namespace

/// A stack that runs one fiber after another.
struct Scheduler::Worker {
  explicit Worker(Scheduler* scheduler) : scheduler(scheduler) {}
  Worker(Scheduler* scheduler, StackPool::Stack stack)
      : scheduler(scheduler), context(stack.base, stack.bytes, &Scheduler::work, this) {}

  Scheduler* scheduler;
  Context context;
  Fiber* fiber = nullptr;
  ExceptionGlobals exceptions;
};

struct Scheduler::Fiber {
  std::function<void()> body;
  std::function<FiberName()> name;
  Worker* worker = nullptr;  ///< from its first switch to its end
  void* local = nullptr;
  WaitPoint where;
  State state = State::kEnded;
};

Scheduler::Scheduler(size_t stack_bytes)
    : stacks_(stack_bytes), main_(std::make_unique<Worker>(this)) {}

Scheduler::~Scheduler() = default;

Scheduler* Scheduler::current() {
  return t_scheduler;
}

int Scheduler::spawn(std::function<void()> body, std::function<FiberName()> name) {
  const int idx = num_fibers_;
  if (static_cast<size_t>(idx) == fibers_.size())
    fibers_.push_back(std::make_unique<Fiber>());
  ++num_fibers_;
  Fiber& made = fiber(idx);
  made.body = std::move(body);
  made.name = std::move(name);
  made.worker = nullptr;
  made.local = nullptr;
  ++num_live_;
  push_ready(idx);
  return idx;
}

int Scheduler::spawn(std::function<void()> body, std::string name) {
  return spawn(std::move(body), [name = std::move(name)] { return FiberName{name, -1}; });
}

void Scheduler::run() {
  MOE_CHECK(t_scheduler == nullptr, "a scheduler runs on this thread already");
  t_scheduler = this;
  exception_globals_ = abi::__cxa_get_globals();
  switch_from(*main_);
  assert(num_live_ == 0 && idle_.empty() && first_ready_ == ready_.size());
  t_scheduler = nullptr;
  is_cancelling_ = false;
  num_idle_rounds_ = 0;
  for (int idx = 0; idx < num_fibers_; ++idx)
    fiber(idx).name = nullptr;
  num_fibers_ = 0;
  kept_.clear();
  if (error_)
    std::rethrow_exception(std::exchange(error_, nullptr));
}

void Scheduler::yield() {
  leave(State::kReady, {});
}

void Scheduler::block(WaitPoint where) {
  leave(State::kBlocked, where);
}

void Scheduler::idle(uint64_t /*duration_ns*/) {
  leave(State::kIdle, {"memory that it polls"});
}

void Scheduler::wake(int idx) {
  Fiber& woken = fiber(idx);
  if (is_cancelling_)
    return;  // it runs already, to its end
  assert(woken.state == State::kBlocked);
  woken.where = {};
  push_ready(idx);
}

uint64_t Scheduler::now_ns() {
  return static_cast<uint64_t>(sync::now_ns());
}

FiberName Scheduler::name(int idx) const {
  return fiber(idx).name();
}

void Scheduler::set_local(void* local_of_fiber) {
  fiber(running_).local = local_of_fiber;
  detail::t_local = local_of_fiber;
}

size_t Scheduler::pick_next(std::span<const int> /*ready*/) {
  return 0;
}

void Scheduler::on_all_idle() {
  constexpr int kNumYields = 64;
  constexpr long kSleepNs = 20'000;
  if (++num_idle_rounds_ <= kNumYields) {
    sync::yield();
    return;
  }
  const timespec duration{0, kSleepNs};
  nanosleep(&duration, nullptr);
}

void Scheduler::push_ready(int idx) {
  fiber(idx).state = State::kReady;
  ready_.push_back(idx);
}

int Scheduler::take_ready() {
  constexpr size_t kNumKept = 1024;
  const std::span<const int> ready(ready_.data() + first_ready_, ready_.size() - first_ready_);
  const size_t chosen = is_cancelling_ ? 0 : pick_next(ready);
  assert(chosen < ready.size());
  std::swap(ready_[first_ready_], ready_[first_ready_ + chosen]);
  const int idx = ready_[first_ready_++];
  if (first_ready_ == ready_.size()) {
    ready_.clear();
    first_ready_ = 0;
  } else if (first_ready_ >= kNumKept && 2 * first_ready_ >= ready_.size()) {
    ready_.erase(ready_.begin(), ready_.begin() + static_cast<ptrdiff_t>(first_ready_));
    first_ready_ = 0;
  }
  return idx;
}

/// Chooses the fiber to run next; -1 when all have ended.
int Scheduler::choose() {
  while (num_live_ > 0) {
    try {
      if (ready_.empty() && idle_.empty())
        throw EmulationError(concat("deadlock: nobody can run, and\n", describe_waiting()));
      if (ready_.empty()) {
        on_all_idle();
        for (const int idx : idle_)
          push_ready(idx);
        idle_.clear();
      }
      const int idx = take_ready();
      Fiber& chosen = fiber(idx);
      if (chosen.worker == nullptr)
        start(chosen);
      if (chosen.worker != nullptr)
        return idx;
    } catch (...) {
      fail(std::current_exception());
    }
  }
  return -1;
}

void Scheduler::start(Fiber& fiber) {
  if (is_cancelling_) {
    end(fiber);
    return;
  }
  try {
    if (spare_workers_.empty()) {
      workers_.push_back(std::make_unique<Worker>(this, stacks_.take()));
      spare_workers_.push_back(workers_.back().get());
    }
  } catch (...) {
    end(fiber);
    throw;
  }
  fiber.worker = spare_workers_.back();
  fiber.worker->fiber = &fiber;
  spare_workers_.pop_back();
}

void Scheduler::end(Fiber& fiber) {
  fiber.state = State::kEnded;
  fiber.body = nullptr;
  --num_live_;
}

void Scheduler::work(void* argument) {
  Worker& self = *static_cast<Worker*>(argument);
  Scheduler& scheduler = *self.scheduler;
  while (true) {
    Fiber& fiber = *self.fiber;
    try {
      fiber.body();
    } catch (const Cancelled&) {
    } catch (...) {
      scheduler.fail(std::current_exception());
    }
    scheduler.end(fiber);
    scheduler.num_idle_rounds_ = 0;
    // The next fiber to start may get this very stack, and then starts without a switch.
    scheduler.spare_workers_.push_back(&self);
    scheduler.switch_from(self);
  }
}

void Scheduler::leave(State state, WaitPoint where) {
  assert(running_ >= 0 && t_scheduler == this);
  if (is_cancelling_) {
    if (std::uncaught_exceptions() > 0 && state != State::kBlocked)
      return;
    throw Cancelled{};
  }
  const int idx = running_;
  Fiber& self = fiber(idx);
  self.where = where;
  if (state == State::kReady) {
    push_ready(idx);
  } else {
    self.state = state;
    if (state == State::kIdle)
      idle_.push_back(idx);
  }
  if (state != State::kIdle)
    num_idle_rounds_ = 0;
  switch_from(*self.worker);
  if (is_cancelling_)
    throw Cancelled{};
}

void Scheduler::switch_from(Worker& from) {
  running_ = -1;
  const int idx = choose();
  running_ = idx;
  Worker* to = main_.get();
  detail::t_local = nullptr;
  if (idx >= 0) {
    Fiber& next = fiber(idx);
    next.state = State::kRunning;
    detail::t_local = next.local;
    to = next.worker;
  }
  if (to == &from)
    return;
  ++num_switches_;
  std::memcpy(&from.exceptions, exception_globals_, sizeof(ExceptionGlobals));
  std::memcpy(exception_globals_, &to->exceptions, sizeof(ExceptionGlobals));
  from.context.switch_to(to->context);
}

void Scheduler::fail(std::exception_ptr error) {
  if (!error_)
    error_ = std::move(error);
  if (is_cancelling_)
    return;
  is_cancelling_ = true;
  for (int idx = 0; idx < num_fibers_; ++idx) {
    const State state = fiber(idx).state;
    if (state == State::kBlocked || state == State::kIdle)
      push_ready(idx);
  }
  idle_.clear();
}

std::string Scheduler::describe_waiting() const {
  struct Range {
    FiberName name;
    std::string where;
    int last = 0;
  };
  std::vector<Range> ranges;
  for (int idx = 0; idx < num_fibers_; ++idx) {
    const Fiber& waiting = fiber(idx);
    if (waiting.state != State::kBlocked && waiting.state != State::kIdle)
      continue;
    FiberName name = waiting.name();
    std::string where = waiting.where.what;
    if (waiting.where.detail >= 0)
      where += concat(" ", waiting.where.detail);
    const int thread_idx = name.thread_idx;
    if (!ranges.empty() && thread_idx >= 0 && ranges.back().last + 1 == thread_idx &&
        ranges.back().name.group == name.group && ranges.back().where == where)
      ranges.back().last = thread_idx;
    else
      ranges.push_back({std::move(name), std::move(where), thread_idx});
  }
  std::string text;
  for (const Range& range : ranges) {
    text += "  " + range.name.group;
    if (range.name.thread_idx >= 0)
      text += concat(range.last > range.name.thread_idx ? " threads " : " thread ",
                     range.name.thread_idx);
    text += range.last > range.name.thread_idx ? concat(" to ", range.last, " wait") : " waits";
    text += " for " + range.where + "\n";
  }
  return text;
}

}  // namespace moe::simt
