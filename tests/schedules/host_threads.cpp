#include "schedules/host_threads.h"

#include <algorithm>
#include <exception>
#include <limits>
#include <utility>

#include "core/error.h"

namespace moe::simt::checker {

namespace {

constexpr size_t kHostStackBytes = 512 * 1024;
constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
constexpr int64_t kStepNs = 20;
constexpr int64_t kSpinNs = 1'000;
constexpr int64_t kSilentNs = 1'000'000'000;
constexpr uint32_t kPlainOf = 8;  // plain accesses are steps this much rarer
constexpr uint32_t kSpuriousOf = 400;

HostThreads* running = nullptr;

}  // namespace

HostThreads::HostThreads() : Scheduler(kHostStackBytes) {}
HostThreads::~HostThreads() = default;

HostThreads* HostThreads::current() {
  return running != nullptr && running->current_fiber() >= 0 && running->thread() >= 0 ? running
                                                                                       : nullptr;
}

void HostThreads::begin(uint64_t seed, const Options& options) {
  options_ = options;
  random_ = Random(seed);
  findings_ = Findings();
  memory_.reset(&random_, &findings_);
  threads_.clear();
  thread_of_.clear();
  locks_.clear();
  time_ns_ = 1'000'000'000;
  num_steps_ = 0;
  dead_ranks_ = 0;
  is_over_ = false;
  constexpr uint32_t kSwitchOf[] = {2, 4, 16, 64};
  switch_of_ = kSwitchOf[random_.below(4)];
  slow_rank_ = random_.chance(1, 2) ? static_cast<int>(random_.below(4)) : -1;
}

int HostThreads::start(int rank_idx, const std::string& name, std::function<void()> body) {
  Thread made;
  made.rank_idx = rank_idx;
  made.name = concat(name, " of rank ", rank_idx);
  const int idx = memory_.add_thread(made.name);
  made.fiber = spawn(
      [body = std::move(body)] {
        try {
          body();
        } catch (const Ended&) {
        }
      },
      made.name);
  thread_of_.resize(static_cast<size_t>(made.fiber) + 1, -1);
  thread_of_[static_cast<size_t>(made.fiber)] = idx;
  threads_.push_back(std::move(made));
  return idx;
}

void HostThreads::run_all() {
  const int clock = spawn([this] { run_clock(); }, "clock");
  thread_of_.resize(static_cast<size_t>(clock) + 1, -1);
  running = this;
  try {
    run();
  } catch (...) {
    running = nullptr;
    throw;
  }
  running = nullptr;
}

/// Runs when nobody else can.
void HostThreads::run_clock() {
  while (true) {
    idle(0);
    if (num_live() == 1)
      return;
    Thread* first = nullptr;
    for (Thread& thread : threads_)
      if (thread.is_asleep && (first == nullptr || thread.deadline_ns < first->deadline_ns))
        first = &thread;
    if (first == nullptr) {
      found(Kind::kDeadlock, concat("nobody can run\n", describe_waiting()));
      return;
    }
    if (!is_over_ &&
        (first->deadline_ns == kNever || (!options_.may_time_pass && !first->is_timed))) {
      std::string text = "everybody sleeps, and nothing but a limit would wake anybody:";
      for (const Thread& thread : threads_)
        if (thread.is_asleep)
          text += concat("\n  ", thread.name, " waits for ", thread.what);
      found(Kind::kDeadlock, text);
      continue;
    }
    time_ns_ = std::max(time_ns_, first->deadline_ns);
    rouse(*first);
  }
}

void HostThreads::found(Kind kind, std::string text) {
  findings_.add(kind, std::move(text));
  end_all();
}

void HostThreads::end_all() {
  if (is_over_)
    return;
  is_over_ = true;
  for (Thread& thread : threads_)
    rouse(thread);
}

void HostThreads::rouse(Thread& thread) {
  if (!thread.is_asleep)
    return;
  thread.is_asleep = false;
  wake(thread.fiber);
}

void HostThreads::doom(int thread, int64_t num_steps, std::function<void()> on_death) {
  Thread& doomed = threads_[static_cast<size_t>(thread)];
  doomed.steps_to_live = num_steps;
  doomed.on_death = std::move(on_death);
}

void HostThreads::kill(int rank_idx) {
  dead_ranks_ |= uint64_t{1} << rank_idx;
  for (Thread& thread : threads_)
    if (thread.rank_idx == rank_idx)
      rouse(thread);
}

void HostThreads::leave() {
  self().has_left = true;
}

void HostThreads::throw_ended() {
  if (!self().has_left && std::uncaught_exceptions() == 0)
    throw Ended{};
}

size_t HostThreads::pick_next(std::span<const int> ready) {
  size_t chosen = random_.below(static_cast<uint32_t>(ready.size()));
  // A rank that hardly ever runs sees the others far ahead of it.
  for (int again = 0; again < 4; ++again) {
    const int thread = thread_of_[static_cast<size_t>(ready[chosen])];
    if (thread < 0 || threads_[static_cast<size_t>(thread)].rank_idx != slow_rank_)
      break;
    chosen = random_.below(static_cast<uint32_t>(ready.size()));
  }
  return chosen;
}

bool HostThreads::step_quietly() {
  if (!findings_.empty())
    end_all();
  if (is_silent())
    return false;
  time_ns_ += kStepNs;
  if (++num_steps_ > options_.most_steps) {
    found(Kind::kLivelock, concat("no end after ", options_.most_steps, " steps"));
    return false;
  }
  if (random_.chance(1, kSpuriousOf)) {
    Thread& sleeper = threads_[random_.below(static_cast<uint32_t>(threads_.size()))];
    if (sleeper.deadline_ns != kNever)
      rouse(sleeper);
  }
  if (random_.chance(1, switch_of_))
    yield();
  return !is_silent();
}

bool HostThreads::step(bool is_plain) {
  if (self().steps_to_live >= 0 && !is_silent() && self().steps_to_live-- == 0) {
    const int rank_idx = self().rank_idx;
    self().on_death();
    kill(rank_idx);
  }
  const bool goes_on =
      is_plain && !random_.chance(1, kPlainOf) && findings_.empty() ? !is_silent() : step_quietly();
  if (!goes_on)
    throw_ended();
  return goes_on;
}

void HostThreads::spin() {
  if (!step()) {
    time_ns_ += kSilentNs;
    return;
  }
  time_ns_ += kSpinNs;
  yield();
  if (is_silent())
    throw_ended();
}

void HostThreads::sleep(const void* address, int64_t deadline_ns, bool is_timed, const char* what) {
  if (is_silent())
    return;
  Thread& sleeper = self();
  sleeper.is_asleep = true;
  sleeper.is_timed = is_timed;
  sleeper.address = address;
  sleeper.what = what;
  sleeper.deadline_ns = deadline_ns;
  block({what});
}

void HostThreads::wake_all(const void* address) {
  for (Thread& thread : threads_)
    if (thread.is_asleep && thread.address == address)
      rouse(thread);
}

int64_t HostThreads::time_ns() {
  time_ns_ += is_silent() ? kSilentNs : kStepNs;
  return time_ns_;
}

void HostThreads::lock(const void* mutex, bool* is_held) {
  step_quietly();
  while (*is_held && !is_silent())
    sleep(mutex, kNever, false, "a lock");
  *is_held = true;
  if (!is_silent())
    memory_.join(thread(), locks_[mutex]);
}

void HostThreads::unlock(const void* mutex, bool* is_held) {
  *is_held = false;
  if (is_silent())
    return;
  locks_[mutex] = memory_.close(thread());
  wake_all(mutex);
  step_quietly();
}

}  // namespace moe::simt::checker
