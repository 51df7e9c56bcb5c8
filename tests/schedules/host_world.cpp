#include "schedules/host_world.h"

#include <limits>
#include <utility>

#include "core/error.h"
#include "schedules/host_heap.h"
#include "schedules/host_link.h"

namespace moe::simt::checker {

namespace {

constexpr uint64_t kChannel = 7;

/// Stacks are kept from one schedule to the next.
HostThreads& shared_threads() {
  static HostThreads threads;
  return threads;
}

}  // namespace

int HostRank::num_ranks() const {
  return world_.num_ranks();
}

SymmetricMemory& HostRank::heap() const {
  return world_.heap(rank_idx_);
}

std::shared_ptr<ops::Endpoint> HostRank::make_endpoint(int num_experts,
                                                       int depth,
                                                       Reduction reduction) {
  ops::EndpointConfig config;
  config.node_reduction = reduction == Reduction::kNodes;
  config.rank_reduction = reduction == Reduction::kRanks;
  config.num_experts = num_experts;
  config.depth = depth;
  // Experts in turn, so that every rank owns some wherever there are enough.
  for (int expert_idx = 0; expert_idx < num_experts; ++expert_idx)
    config.expert_rank.push_back(expert_idx % num_ranks());
  return make(std::move(config));
}

std::shared_ptr<ops::Endpoint> HostRank::make_replicated(int num_experts, int depth) {
  ops::EndpointConfig config;
  config.num_experts = num_experts * num_ranks();
  config.depth = depth;
  std::vector<int32_t> slot_expert;
  for (int slot = 0; slot < config.num_experts; ++slot) {
    config.expert_rank.push_back(slot / num_experts);
    slot_expert.push_back(slot % num_experts);
  }
  auto endpoint = make(std::move(config));
  endpoint->balance_replicas(std::make_shared<layout::Replicas>(
      slot_expert, num_experts, group_->nodes().num_local_ranks, endpoint->placement()));
  return endpoint;
}

std::shared_ptr<ops::Endpoint> HostRank::make(ops::EndpointConfig config) {
  endpoints_.push_back(ops::Endpoint::create(group_, std::move(config), {}));
  return endpoints_.back();
}

void HostRank::destroy(const std::shared_ptr<ops::Endpoint>& endpoint) {
  endpoint->destroy({});
}

void HostRank::start(const std::string& name, std::function<void()> body) {
  HostThreads& threads = world_.threads();
  auto task = std::make_shared<Task>();
  tasks_.push_back(task);
  Clock known = threads.memory().close(threads.thread());
  threads.start(rank_idx_, name, [this, &threads, task, known, body = std::move(body)] {
    threads.memory().join(threads.thread(), known);
    try {
      body();
    } catch (const std::exception& error) {
      fail(concat("unexpected: ", error.what()));
    }
    task->end = threads.memory().close(threads.thread());
    task->has_ended = true;
    threads.wake_all(task.get());
  });
}

void HostRank::give_up_beside(int64_t num_turns) {
  start("second thread", [this, num_turns] {
    for (int64_t i = 0; i < num_turns; ++i)
      sync::yield();
    group_->abort(layout::AbortCause::kPeerFailed, group::WaitSite{}, {rank_idx()}, "gave up");
  });
}

void HostRank::join_all() {
  HostThreads& threads = world_.threads();
  for (const auto& task : tasks_) {
    while (threads.step() && !task->has_ended)
      threads.sleep(task.get(), std::numeric_limits<int64_t>::max(), false, "another thread");
    threads.memory().join(threads.thread(), task->end);
  }
  tasks_.clear();
}

void HostRank::fail(const std::string& text) const {
  if (world_.threads().step_quietly())
    world_.threads().found(Kind::kResult, concat("rank ", rank_idx_, ": ", text));
}

HostWorld::HostWorld(Run& run, const Options& options)
    : run_(run), options_(options), seed_(run.seed()), threads_(shared_threads()) {
  threads_.begin(seed_, options_.threads);
  threads_.memory().set_part_bytes(HostMemory::kArenaBytes / options_.num_ranks / 4096 * 4096);
  for (int rank_idx = 0; rank_idx < options_.num_ranks; ++rank_idx) {
    links_.push_back(std::make_shared<WorldLink>(*this, rank_idx));
    heaps_.push_back(std::make_shared<WorldHeap>(*this, rank_idx));
    ranks_.push_back(std::make_unique<HostRank>(*this, rank_idx));
  }
}

HostWorld::~HostWorld() = default;

void HostWorld::run(const std::function<void(HostRank&)>& body) {
  for (int rank_idx = 0; rank_idx < num_ranks(); ++rank_idx) {
    WorldLink& link = *links_[static_cast<size_t>(rank_idx)];
    main_threads_.push_back(threads_.start(rank_idx, "main thread", [this, rank_idx, &body] {
      run_rank(*ranks_[static_cast<size_t>(rank_idx)], body);
    }));
    threads_.start(rank_idx, "service thread", [&link] { link.serve(); });
  }
  threads_.run_all();
  run_.count_steps(static_cast<uint64_t>(threads_.num_steps()));
  for (const Finding& finding : threads_.findings().kept())
    run_.report(finding.kind, finding.text);
}

void HostWorld::run_rank(HostRank& rank, const std::function<void(HostRank&)>& body) {
  WorldLink& link = *links_[static_cast<size_t>(rank.rank_idx())];
  std::vector<int> members;
  for (int rank_idx = 0; rank_idx < num_ranks(); ++rank_idx)
    members.push_back(rank_idx);
  try {
    rank.group_ = std::make_shared<group::Group>(links_[static_cast<size_t>(rank.rank_idx())],
                                                 heaps_[static_cast<size_t>(rank.rank_idx())],
                                                 std::move(members),
                                                 rank.rank_idx(),
                                                 kChannel,
                                                 options_.stall_timeout_s,
                                                 options_.arrival_timeout_s,
                                                 1,
                                                 false,
                                                 group::InterruptCheck{},
                                                 options_.num_local_ranks);
    body(rank);
    rank.join_all();
    for (const auto& endpoint : rank.endpoints_)
      endpoint->destroy({});
    rank.group_->destroy();
    WorldLink::News news;
    news.event = WorldLink::Event::kLeft;
    news.known = threads_.memory().close(threads_.thread());
    link.tell_peers(std::move(news));
    threads_.leave();
    link.close();
    rank.endpoints_.clear();
    rank.group_ = nullptr;
    return;
  } catch (const HostThreads::Ended&) {
  } catch (const std::exception& error) {
    rank.fail(concat("unexpected: ", error.what()));
  }
  // Other threads of the rank may still use what it has: it goes with the world.
  link.close();
}

void HostWorld::meet() {
  const int64_t wanted = (num_met_ / num_ranks() + 1) * num_ranks();
  known_by_met_.join(threads_.memory().close(threads_.thread()));
  ++num_met_;
  threads_.wake_all(&num_met_);
  while (threads_.step() && num_met_ < wanted)
    threads_.sleep(&num_met_, std::numeric_limits<int64_t>::max(), false, "all ranks");
  threads_.memory().join(threads_.thread(), known_by_met_);
}

void HostWorld::doom(int rank_idx, int64_t num_steps) {
  threads_.doom(main_threads_[static_cast<size_t>(rank_idx)], num_steps, [this, rank_idx] {
    dead_ranks_ |= uint64_t{1} << rank_idx;
    WorldLink::News news;
    news.event = WorldLink::Event::kDead;
    threads_.memory().store_fence(threads_.thread());  // nothing stays on its way
    news.known = threads_.memory().close(threads_.thread());
    link(rank_idx).tell_peers(std::move(news));
  });
}

}  // namespace moe::simt::checker
