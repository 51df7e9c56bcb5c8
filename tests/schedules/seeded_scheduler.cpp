#include "schedules/seeded_scheduler.h"

#include <algorithm>

#include "core/error.h"

namespace moe::simt::checker {

namespace {

constexpr uint64_t kShortestPauseNs = 1000;
constexpr uint64_t kLongestPauseNs = 200'000'000;
// Everybody has waited through all limits by then, and through the polls between two looks at the
// clock.
constexpr int kMostIdleRounds = 600;
constexpr uint64_t kMostSteps = 4'000'000;

}  // namespace

void SeededScheduler::reset(uint64_t seed) {
  random_ = Random(seed ^ 0x5C4ED);
  groups_.clear();
  target_ = Group();
  num_left_ = 0;
  now_ns_ = 1;
  pause_ns_ = kShortestPauseNs;
  seen_changes_ = 0;
  num_idle_rounds_ = 0;
  constexpr Policy::Pick kPicks[] = {Policy::Pick::kAny,
                                     Policy::Pick::kInTurn,
                                     Policy::Pick::kBursts,
                                     Policy::Pick::kStarved,
                                     Policy::Pick::kStarved,
                                     Policy::Pick::kLatest};
  policy_.pick = kPicks[random_.below(std::size(kPicks))];
  policy_.switch_one_in = 1u << random_.between(4, 10);
  until_switch_ = 1 + random_.below(policy_.switch_one_in);
  Delays delays;
  delays.num_of_8 = random_.below(9);
  delays.most_steps = 1u << random_.between(2, 12);
  machine_.set_delays(delays);
}

void SeededScheduler::set_group(int fiber, int rank_idx, int64_t block) {
  if (static_cast<size_t>(fiber) >= groups_.size())
    groups_.resize(static_cast<size_t>(fiber) + 1);
  groups_[static_cast<size_t>(fiber)].rank_idx = rank_idx;
  groups_[static_cast<size_t>(fiber)].block = block;
}

void SeededScheduler::bind(int fiber, Machine::Thread* thread, int rank_idx, int64_t block) {
  set_group(fiber, rank_idx, block);
  groups_[static_cast<size_t>(fiber)].thread = thread;
}

Machine::Thread* SeededScheduler::thread_of(int fiber) const {
  return fiber < 0 ? main_ : groups_[static_cast<size_t>(fiber)].thread;
}

void SeededScheduler::pass(bool is_between_threads) {
  machine_.step();
  if (machine_.num_steps() > kMostSteps) {
    machine_.findings().add(Kind::kLivelock,
                            concat("no end after ", kMostSteps, " accesses\n", describe_waiting()));
    throw Abandoned("livelock");
  }
  if (current_fiber() < 0)
    return;
  // Words that threads agree by are where an order matters.
  const uint32_t weight = is_between_threads ? 8 : 1;
  if (until_switch_ > weight) {
    until_switch_ -= weight;
    return;
  }
  until_switch_ = 1 + random_.below(2 * policy_.switch_one_in);
  yield();
}

bool SeededScheduler::is_favoured(int fiber) const {
  if (static_cast<size_t>(fiber) >= groups_.size())
    return true;
  const Group& group = groups_[static_cast<size_t>(fiber)];
  const bool is_in =
      group.rank_idx == target_.rank_idx && (is_whole_rank_ || group.block == target_.block);
  return policy_.pick == Policy::Pick::kBursts ? is_in : !is_in;
}

void SeededScheduler::draw_target(std::span<const int> ready) {
  const int fiber = ready[random_.below(static_cast<uint32_t>(ready.size()))];
  target_ =
      static_cast<size_t>(fiber) < groups_.size() ? groups_[static_cast<size_t>(fiber)] : Group();
  is_whole_rank_ = random_.chance(1, 2);
  num_left_ = 1 + random_.below(1u << random_.between(3, 14));
}

size_t SeededScheduler::pick_next(std::span<const int> ready) {
  const auto num_ready = static_cast<uint32_t>(ready.size());
  switch (policy_.pick) {
    case Policy::Pick::kInTurn:
      return 0;
    case Policy::Pick::kAny:
      return random_.below(num_ready);
    case Policy::Pick::kLatest:
      return random_.chance(15, 16) ? num_ready - 1 : random_.below(num_ready);
    case Policy::Pick::kBursts:
    case Policy::Pick::kStarved:
      break;
  }
  if (num_left_ == 0)
    draw_target(ready);
  --num_left_;
  uint32_t chosen = random_.below(num_ready);
  constexpr int kMostTries = 8;
  for (int i = 0; i < kMostTries && !is_favoured(ready[chosen]); ++i)
    chosen = random_.below(num_ready);
  for (uint32_t i = 0; i < num_ready && !is_favoured(ready[chosen]); ++i)
    chosen = (chosen + 1) % num_ready;
  return chosen;
}

void SeededScheduler::on_all_idle() {
  if (machine_.arrive_any()) {
    while (random_.chance(1, 2) && machine_.arrive_any()) {
    }
    return;
  }
  if (machine_.num_changes() != seen_changes_) {
    seen_changes_ = machine_.num_changes();
    num_idle_rounds_ = 0;
    pause_ns_ = kShortestPauseNs;
  }
  now_ns_ += pause_ns_;
  pause_ns_ = std::min(2 * pause_ns_, kLongestPauseNs);
  if (++num_idle_rounds_ < kMostIdleRounds)
    return;
  machine_.findings().add(Kind::kDeadlock,
                          concat("everybody waits and nothing changes\n", describe_waiting()));
  throw Abandoned("deadlock");
}

}  // namespace moe::simt::checker
