#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/symmetric_memory.h"
#include "group/group.h"
#include "ops/endpoint.h"
#include "schedules/host_threads.h"
#include "schedules/run.h"

namespace moe::simt::checker {

class HostWorld;
class WorldHeap;
class WorldLink;

/// Where combines add first: of EndpointConfig.
enum class Reduction { kNone, kNodes, kRanks };

/// One rank of a HostWorld, for the thread that runs on it.
class HostRank {
 public:
  HostRank(HostWorld& world, int rank_idx) : world_(world), rank_idx_(rank_idx) {}

  int rank_idx() const { return rank_idx_; }
  int num_ranks() const;
  HostWorld& world() const { return world_; }
  const std::shared_ptr<group::Group>& group() const { return group_; }
  SymmetricMemory& heap() const;

  /// Collective.
  std::shared_ptr<ops::Endpoint> make_endpoint(int num_experts,
                                               int depth,
                                               Reduction reduction = Reduction::kNone);
  /// Whose dispatches find any of @p num_experts on every rank, and balance what ranks get.
  std::shared_ptr<ops::Endpoint> make_replicated(int num_experts, int depth);
  /// Ends a buffer before its rank does.
  void destroy(const std::shared_ptr<ops::Endpoint>& endpoint);

  /// Another thread of this rank; join_all() waits for all of them.
  void start(const std::string& name, std::function<void()> body);
  void join_all();
  /// Another thread of this rank aborts the communicator for it after so many turns: "gave up".
  void give_up_beside(int64_t num_turns);

  /// What came out is not what it should be.
  void fail(const std::string& text) const;

 private:
  friend class HostWorld;
  std::shared_ptr<ops::Endpoint> make(ops::EndpointConfig config);
  struct Task {
    bool has_ended = false;
    Clock end;
  };

  HostWorld& world_;
  int rank_idx_;
  std::shared_ptr<group::Group> group_;
  std::vector<std::shared_ptr<ops::Endpoint>> endpoints_;
  std::vector<std::shared_ptr<Task>> tasks_;
};

/// Ranks of the CPU backend in one process: real groups, buffers, operations and window allocators
/// over a heap that is watched and a link that keeps what peers say until its service thread runs.
class HostWorld {
 public:
  struct Options {
    int num_ranks = 2;
    int num_local_ranks = 0;                            ///< of a node; 0 for one node
    int64_t segment_bytes = int64_t{64} << 10;          ///< the heap grows by so much at least
    int64_t most_heap_bytes = HostMemory::kArenaBytes;  ///< of one rank
    double stall_timeout_s = 1e4;
    double arrival_timeout_s = 1e5;
    HostThreads::Options threads;
  };

  HostWorld(Run& run, const Options& options);
  ~HostWorld();
  HostWorld(const HostWorld&) = delete;
  HostWorld& operator=(const HostWorld&) = delete;

  /// Runs @p body on every rank, each with its group, and reports what was found.
  void run(const std::function<void(HostRank&)>& body);

  /// Waits until every rank has called it, without a word of the backend.
  void meet();

  /// The main thread of that rank dies @p num_steps steps after it called this.
  void doom(int rank_idx, int64_t num_steps);
  bool is_dead(int rank_idx) const { return (dead_ranks_ >> rank_idx & 1) != 0; }

  HostThreads& threads() { return threads_; }
  int num_ranks() const { return options_.num_ranks; }
  const Options& options() const { return options_; }
  uint64_t seed() const { return seed_; }
  WorldLink& link(int rank_idx) { return *links_[static_cast<size_t>(rank_idx)]; }
  WorldHeap& heap(int rank_idx) { return *heaps_[static_cast<size_t>(rank_idx)]; }

 private:
  void run_rank(HostRank& rank, const std::function<void(HostRank&)>& body);

  Run& run_;
  Options options_;
  uint64_t seed_;
  HostThreads& threads_;
  std::vector<std::shared_ptr<WorldLink>> links_;
  std::vector<std::shared_ptr<WorldHeap>> heaps_;
  std::vector<std::unique_ptr<HostRank>> ranks_;
  std::vector<int> main_threads_;
  uint64_t dead_ranks_ = 0;
  int64_t num_met_ = 0;
  Clock known_by_met_;
};

}  // namespace moe::simt::checker
