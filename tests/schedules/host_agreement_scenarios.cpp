#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/sync.h"
#include "schedules/host_layer.h"
#include "schedules/host_world.h"
#include "schedules/run.h"

// How the survivors of failures agree on who goes on: real groups, over a link that keeps what
// peers say until its service thread runs. Ranks die in the middle of telling the others.

namespace moe::simt::checker {

namespace {

HostWorld::Options draw_options(Run& run, int fewest_ranks, int most_ranks) {
  HostWorld::Options options;
  options.num_ranks = static_cast<int>(run.random().between(fewest_ranks, most_ranks));
  options.threads.cache_bytes = 1;
  options.threads.may_time_pass = true;
  // Who waits for somebody that will not come throws in a schedule of a bearable length.
  options.stall_timeout_s = 10;
  options.arrival_timeout_s = 20;
  return options;
}

/// One or two ranks that die at any step.
class Deaths {
 public:
  Deaths(Random& random, int num_ranks, int64_t most_steps) {
    for (int64_t& num_steps : num_steps_)
      num_steps = random.between(1, most_steps);
    for (int& victim : victims_)
      victim = static_cast<int>(random.between(0, num_ranks - 1));
  }

  void doom(const HostRank& rank) const {
    for (size_t i = 0; i < victims_.size(); ++i)
      if (victims_[i] == rank.rank_idx())
        rank.world().doom(victims_[i], num_steps_[i]);
  }

 private:
  std::array<int, 2> victims_;
  std::array<int64_t, 2> num_steps_;
};

/// By rank, the survivors that a rank came out with; empty for a rank that did not.
using Outcomes = std::vector<std::vector<int>>;

/// Does what a caller of the agreement does: it makes the new group again until all survivors have
/// it. Here the new group is who said what in so many gathers.
group::ShrinkDecision shrink(HostRank& rank,
                             const std::vector<int>& failed_ranks,
                             int64_t num_gathers = 1) {
  group::ShrinkAgreement& agreement = rank.group()->shrink_agreement();
  group::ShrinkDecision decision = agreement.agree({failed_ranks, "shrink", "", "", true}, {});
  while (true) {
    bool has_group = true;
    try {
      for (int64_t gather_idx = 0; gather_idx < num_gathers; ++gather_idx) {
        const auto words = [gather_idx](int from) { return concat(from, " in ", gather_idx); };
        const auto said = agreement.all_gather(words(rank.rank_idx()), {});
        for (size_t i = 0; i < said.size(); ++i)
          if (said[i] != words(decision.survivors[i]))
            rank.fail(concat("rank ", decision.survivors[i], " said ", said[i]));
      }
    } catch (const PeerFailed&) {
      has_group = false;
    }
    std::optional<group::ShrinkDecision> later = agreement.finish(has_group, {});
    if (!later)
      return decision;
    decision = std::move(*later);
  }
}

/// A rank that came out with a group came out with the same as all who live in it, and with one
/// that no other contradicts.
void check_outcomes(const HostRank& rank, const HostWorld& world, const Outcomes& outcomes) {
  for (size_t left = 0; left < outcomes.size(); ++left)
    for (size_t right = 0; right < outcomes.size(); ++right) {
      if (outcomes[left].empty() || outcomes[right].empty() ||
          world.is_dead(static_cast<int>(left)) || world.is_dead(static_cast<int>(right)))
        continue;
      if (outcomes[left] != outcomes[right])
        rank.fail(concat("ranks ", left, " and ", right, " go on in different groups"));
    }
}

/// A buffer that stands where the schedule puts it.
class StandingBuffer : public group::Recoverable {
 public:
  explicit StandingBuffer(uint64_t last_completed) : last_completed_(last_completed) {}
  Epochs epochs() const override { return {last_completed_ + 1, last_completed_}; }
  bool is_idle() const override { return true; }
  void restart(uint64_t next_epoch) override { next_epoch_ = next_epoch; }
  uint64_t next_epoch() const { return next_epoch_; }

 private:
  uint64_t last_completed_;
  uint64_t next_epoch_ = 0;
};

/// Several buffers of every rank, no two ranks at the same epochs as a rule.
class StandingBuffers {
 public:
  StandingBuffers(Random& random, int num_ranks)
      : last_completed_(static_cast<size_t>(random.between(1, 3))) {
    for (auto& by_rank : last_completed_) {
      const int64_t first = random.between(0, 2);  // 0 is none
      for (int rank_idx = 0; rank_idx < num_ranks; ++rank_idx)
        by_rank.push_back(static_cast<uint64_t>(first + random.between(0, 3)));
    }
  }

  size_t size() const { return last_completed_.size(); }

  /// Of one rank, which keeps them.
  std::vector<std::shared_ptr<StandingBuffer>> make(HostRank& rank) const {
    std::vector<std::shared_ptr<StandingBuffer>> buffers;
    for (const auto& by_rank : last_completed_) {
      buffers.push_back(
          std::make_shared<StandingBuffer>(by_rank[static_cast<size_t>(rank.rank_idx())]));
      rank.group()->add_recoverable(buffers.size(), buffers.back());
    }
    return buffers;
  }

  /// Holds what @p rank was told to the last epoch that all of @p survivors have completed.
  void check(const HostRank& rank,
             const std::vector<int>& survivors,
             const std::vector<int64_t>& told) const {
    if (told.size() != size())
      return rank.fail(concat("epochs of ", told.size(), " buffers instead of ", size()));
    for (size_t buffer = 0; buffer < size(); ++buffer) {
      uint64_t last = ~uint64_t{0};
      for (const int survivor : survivors)
        last = std::min(last, last_completed_[buffer][static_cast<size_t>(survivor)]);
      const int64_t expected = last == 0 ? -1 : static_cast<int64_t>(last);
      if (told[buffer] != expected)
        rank.fail(concat("buffer ",
                         buffer,
                         ": all completed epoch ",
                         told[buffer],
                         ", where the survivors completed ",
                         expected));
    }
  }

  /// An evicted rank hears where the first buffer of the rank that names it stands.
  void check_named(const HostRank& rank, const FailureSite& site) const {
    const uint64_t last = last_completed_[0][static_cast<size_t>(site.ranks.at(0))];
    if (site.epoch != (last == 0 ? -1 : static_cast<int64_t>(last)))
      rank.fail(
          concat("rank ", site.ranks[0], " says epoch ", site.epoch, " and stands at ", last));
  }

  /// Behind whatever any of @p ranks has begun.
  uint64_t next_epoch(size_t buffer, const std::vector<int>& ranks) const {
    uint64_t next = 0;
    for (const int rank : ranks)
      next = std::max(next, last_completed_[buffer][static_cast<size_t>(rank)] + 1);
    return next;
  }

 private:
  std::vector<std::vector<uint64_t>> last_completed_;  ///< by buffer, by rank
};

std::vector<int> ranks_outside(const std::vector<int>& ranks, int num_ranks) {
  std::vector<int> others;
  for (int rank = 0; rank < num_ranks; ++rank)
    if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end())
      others.push_back(rank);
  return others;
}

}  // namespace

MOE_SCENARIO(host_shrink, "CPU: ranks die at any step while the survivors agree to go on") {
  HostWorld world(run, draw_options(run, 2, 4));
  const Deaths deaths(run.random(), world.num_ranks(), 400);
  Outcomes outcomes(static_cast<size_t>(world.num_ranks()));
  world.run([&](HostRank& rank) {
    world.meet();
    deaths.doom(rank);
    const std::vector<int> survivors = shrink(rank, {}).survivors;
    outcomes[static_cast<size_t>(rank.rank_idx())] = survivors;
    for (int peer_rank = 0; peer_rank < rank.num_ranks(); ++peer_rank)
      if (!world.is_dead(peer_rank) &&
          std::find(survivors.begin(), survivors.end(), peer_rank) == survivors.end())
        rank.fail(concat("rank ", peer_rank, " lives, and is no part of the new group"));
    check_outcomes(rank, world, outcomes);
  });
}

MOE_SCENARIO(host_shrink_epochs,
             "CPU: survivors stand at different epochs of several buffers, ranks that spoke die") {
  HostWorld world(run, draw_options(run, 2, 4));
  const StandingBuffers standing(run.random(), world.num_ranks());
  const Deaths deaths(run.random(), world.num_ranks(), 400);
  world.run([&](HostRank& rank) {
    const auto buffers = standing.make(rank);
    world.meet();
    deaths.doom(rank);
    const group::ShrinkDecision decision = shrink(rank, {});
    standing.check(rank, decision.survivors, decision.completed_epochs);
  });
}

MOE_SCENARIO(host_shrink_gathers, "CPU: a rank dies while survivors exchange more than once") {
  HostWorld world(run, draw_options(run, 3, 3));
  const Deaths deaths(run.random(), world.num_ranks(), 900);
  Outcomes outcomes(static_cast<size_t>(world.num_ranks()));
  world.run([&](HostRank& rank) {
    world.meet();
    deaths.doom(rank);
    outcomes[static_cast<size_t>(rank.rank_idx())] = shrink(rank, {}, 6).survivors;
    check_outcomes(rank, world, outcomes);
  });
}

MOE_SCENARIO(host_stopped, "CPU: a rank that lives and says nothing is reported by one alone") {
  HostWorld world(run, draw_options(run, 3, 4));
  const auto stopped = static_cast<int>(run.random().between(0, world.num_ranks() - 1));
  const auto others = static_cast<int>(run.random().between(1, world.num_ranks() - 1));
  const int reporter = (stopped + others) % world.num_ranks();
  world.run([&](HostRank& rank) {
    world.meet();
    if (rank.rank_idx() != stopped) {
      const std::vector<int> reported =
          rank.rank_idx() == reporter ? std::vector<int>{stopped} : std::vector<int>{};
      const std::vector<int> survivors = shrink(rank, reported).survivors;
      if (static_cast<int>(survivors.size()) != world.num_ranks() - 1)
        rank.fail(concat(survivors.size(), " ranks go on"));
    }
    world.meet();
  });
}

MOE_SCENARIO(host_evict, "CPU: ranks that live declare each other failed; one group comes of it") {
  HostWorld world(run, draw_options(run, 2, 5));
  const int num_ranks = world.num_ranks();
  std::vector<std::vector<int>> reports(static_cast<size_t>(num_ranks));
  for (int rank = 0; rank < num_ranks; ++rank)
    for (int peer = 0; peer < num_ranks; ++peer)
      if (peer != rank && run.random().chance(1, 3))
        reports[static_cast<size_t>(rank)].push_back(peer);
  const StandingBuffers standing(run.random(), num_ranks);
  Outcomes outcomes(static_cast<size_t>(num_ranks));
  world.run([&](HostRank& rank) {
    const auto buffers = standing.make(rank);
    world.meet();
    const auto idx = static_cast<size_t>(rank.rank_idx());
    try {
      outcomes[idx] = shrink(rank, reports[idx]).survivors;
    } catch (const Evicted& error) {
      standing.check_named(rank, error.site);
    } catch (const PeerFailed&) {
    }
    check_outcomes(rank, world, outcomes);
  });
}

MOE_SCENARIO(host_recover, "CPU: ranks die at any step while the survivors recover") {
  HostWorld world(run, draw_options(run, 2, 4));
  const Deaths deaths(run.random(), world.num_ranks(), 100);
  std::vector<std::optional<group::RecoveryResult>> results(static_cast<size_t>(world.num_ranks()));
  world.run([&](HostRank& rank) {
    world.meet();
    deaths.doom(rank);
    const auto& result =
        results[static_cast<size_t>(rank.rank_idx())].emplace(rank.group()->recover({}));
    for (int peer_rank = 0; peer_rank < rank.num_ranks(); ++peer_rank) {
      const auto& other = results[static_cast<size_t>(peer_rank)];
      if (other && !world.is_dead(peer_rank) && other->failed_ranks != result.failed_ranks)
        rank.fail(concat("ranks ",
                         rank.rank_idx(),
                         " and ",
                         peer_rank,
                         " take others for failed: ",
                         result.failed_ranks.size(),
                         " and ",
                         other->failed_ranks.size()));
    }
  });
}

MOE_SCENARIO(host_recover_epochs,
             "CPU: the living stand at different epochs of several buffers, and recover") {
  HostWorld world(run, draw_options(run, 2, 4));
  const StandingBuffers standing(run.random(), world.num_ranks());
  const Deaths deaths(run.random(), world.num_ranks(), 100);
  world.run([&](HostRank& rank) {
    const auto buffers = standing.make(rank);
    world.meet();
    deaths.doom(rank);
    const group::RecoveryResult result = rank.group()->recover({});
    const std::vector<int> living = ranks_outside(result.failed_ranks, world.num_ranks());
    standing.check(rank, living, result.completed_epochs);
    for (size_t buffer = 0; buffer < buffers.size(); ++buffer)
      if (buffers[buffer]->next_epoch() != standing.next_epoch(buffer, living))
        rank.fail(concat("buffer ", buffer, " resumes at ", buffers[buffer]->next_epoch()));
  });
}

MOE_SCENARIO(host_recover_shrink, "CPU: ranks shrink while others are still in recover") {
  HostWorld::Options options = draw_options(run, 2, 4);
  options.threads.may_time_pass = false;
  HostWorld world(run, options);
  world.run([&](HostRank& rank) {
    world.meet();
    rank.group()->recover({});
    const std::vector<int> survivors = shrink(rank, {}).survivors;
    if (static_cast<int>(survivors.size()) != world.num_ranks())
      rank.fail(concat(survivors.size(), " ranks go on"));
  });
}

}  // namespace moe::simt::checker
