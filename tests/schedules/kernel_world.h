#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/combine.h"
#include "kernels/dispatch.h"
#include "kernels/exchange.h"
#include "kernels/internode.h"
#include "kernels/rank_sums.h"
#include "layout/control.h"
#include "schedules/kernel_case.h"
#include "schedules/run.h"
#include "simt/memory.h"

namespace moe::simt::checker {

/// Value that lies there in memory of the kernels' world, as a kernel would load it.
template <typename T>
T read(const T* from) {
  T value;
  memory::load(from, &value, sizeof(T));
  return value;
}

/// Ranks with one buffer each, whose operations run on emulated devices alone: counts, epochs and
/// statuses never leave them. What comes out is compared with what plain C++ makes of the inputs.
///
/// Receive windows are used in turn, so that every one is offered again; what was received is read
/// and written over by the host, in the order of the stream, as soon as an operation has ended.
class KernelWorld {
 public:
  static constexpr int kNumWindows = 2;
  static constexpr uint64_t kStallLimitNs = 1'000'000'000;
  static constexpr uint64_t kArrivalLimitNs = 4'000'000'000;

  KernelWorld(Run& run, const KernelCase& shape);

  Run& run() { return run_; }
  const KernelCase& shape() const { return shape_; }
  const layout::Placement& placement() const { return placement_; }
  RankStream& stream(int rank_idx) { return *rank(rank_idx).stream; }
  const kernels::Buffer& buffer(int rank_idx) { return rank(rank_idx).buffer; }

  /// Plan of one dispatch, on one rank.
  struct Handle {
    int64_t* slots = nullptr;       ///< device
    int64_t* topk_idx = nullptr;    ///< device
    const int32_t* kept = nullptr;  ///< device
  };

  /// Puts the four kernels of a dispatch into the stream of a rank, and the checks behind them.
  Handle dispatch(int rank_idx, const Step& step);
  /// The same in two: what is put into the stream between them runs beside the rows of peers.
  struct Sent {
    Handle handle;
    int segment_idx = 0;
    uint64_t epoch = 0;
  };
  Sent send(int rank_idx, const Step& step);
  void receive(int rank_idx, layout::Operation operation = layout::Operation::kDispatch);
  void check(int rank_idx, const Step& step, const Sent& sent);
  /// The owner of the window writes over what it holds.
  void overwrite_window(int rank_idx, const Step& step, int segment_idx);
  /// All kernels without checks: the operation may end early.
  Handle dispatch_unchecked(int rank_idx, const Step& step);
  /// The same rows again with the handle of @p step; @p cached has other contents.
  void dispatch_cached(int rank_idx, const Step& cached, const Handle& handle);
  /// Outputs of experts for a dispatch, on all ranks.
  struct Outputs {
    std::vector<std::vector<std::byte>> rows;     ///< [num_rows, hidden] by rank
    std::vector<std::vector<float>> row_weights;  ///< [num_rows] or [num_rows, num_recv_topk]
    std::vector<int> rows_segment;                ///< where they lie, by rank
    std::vector<int> weights_segment;
  };
  Outputs draw_outputs(const Step& step);
  /// @param is_weighted  the weights of the step are applied; only where rows go by expert
  void combine(int rank_idx,
               const Step& step,
               const Handle& handle,
               const Outputs& outputs,
               bool is_weighted,
               bool pulls_weights);

  /// Its kernels without checks: the operation may end early.
  struct Combined {
    kernels::CombineParams params;
    int requests_segment = -1;  ///< where ranks add first
  };
  /// @param ends_behind_exchange  the rank launches nothing more
  Combined launch_combine(int rank_idx,
                          const Step& step,
                          const Handle& handle,
                          const Outputs& outputs,
                          bool is_weighted,
                          bool pulls_weights,
                          bool ends_behind_exchange);

  /// A dispatch whose host waits for sizes: polls for the rows, obtains a window where this rank is
  /// short, and launches the rest. Called by a thread of the host. @p first_rows: rows that the
  /// window offered first has room for. @p sends_ahead: what sends rows is launched before the host
  /// waits, and again where a rank was short.
  void dispatch_by_host(
      int rank_idx, const Step& step, int64_t first_rows, bool has_memory, bool sends_ahead);

  /// Value of a rank's abort word when the communicator is aborted; by a thread of the host.
  void abort(int rank_idx);

  /// An operation was put into the stream of every rank that is to end in this status. Runs all,
  /// then checks that nobody left and that every check was made.
  void run_all();
  /// The same where all ranks but @p missing_rank are to leave early: each reports @p cause, and
  /// after a time-out for whom it waited.
  void run_until_left(kernels::Cause cause, int missing_rank);

  /// Bytes that operations moved, by formula: see tests/schedules/README.md.
  struct Traffic {
    int64_t x_loaded = 0;
    int64_t window_stored = 0;  ///< every byte that has a value once, then what the host wrote over
    int64_t window_stored_across = 0;  ///< from other devices: see tests/schedules/README.md
    int64_t window_loaded = 0;         ///< by who copies rows, then by the host
    int64_t counts_loaded = 0;         ///< the same of how many rows experts have: low latency
    int64_t outputs_loaded = 0;
    int64_t outputs_loaded_across = 0;  ///< what a combine pulls from other devices
    int64_t sums_loaded_across = 0;     ///< the same where ranks add first, with what they ask
    int64_t sums_stored = 0;
    int64_t put = 0;  ///< to ranks of other nodes, signals not counted
  };
  const Traffic& expected_traffic() const { return traffic_; }

  // Memory that the scenario fills before the schedule.
  template <typename T>
  T* put(int rank_idx, Ownership ownership, const std::string& name, const std::vector<T>& values) {
    return reinterpret_cast<T*>(put_bytes(
        rank_idx, ownership, name, values.data(), static_cast<int64_t>(values.size() * sizeof(T))));
  }

 private:
  struct Segment {
    std::byte* base = nullptr;
    int64_t bytes = 0;
  };
  struct Rank {
    std::unique_ptr<RankStream> stream;
    kernels::Buffer buffer;
    kernels::Tables tables;
    std::byte* workspace = nullptr;
    layout::AbortRecord* abort = nullptr;
    std::vector<Segment> segments;  ///< of its heap: windows first
    int32_t* chunk_counts = nullptr;
    int32_t* place_in_chunk = nullptr;
    int64_t* bad_choice = nullptr;
    kernels::Replicas replicas;
    kernels::TokenSets sets;
    kernels::Rails rails;
    uint64_t epoch = 0;
    int num_dispatched = 0;
    std::byte* host_read = nullptr;
    uint64_t ticket = 0;
  };
  /// Parameters that a rank passes to the kernels of one dispatch.
  struct Inputs {
    const int64_t* topk_idx = nullptr;
    const std::byte* x = nullptr;
    const std::byte* weights = nullptr;
    const uint8_t* is_masked = nullptr;
  };

  Rank& rank(int rank_idx) { return ranks_[static_cast<size_t>(rank_idx)]; }
  std::byte* put_bytes(
      int rank_idx, Ownership ownership, const std::string& name, const void* from, int64_t bytes);
  /// Memory that begins as zeros.
  template <typename T>
  T* zeros(int rank_idx, Ownership ownership, const std::string& name, int64_t count) {
    return reinterpret_cast<T*>(run_.guest().allocate(
        count * static_cast<int64_t>(sizeof(T)), ownership, rank_idx, name, true));
  }
  /// Memory whose contents mean nothing until somebody writes them.
  template <typename T>
  T* unwritten(int rank_idx, Ownership ownership, const std::string& name, int64_t count) {
    return reinterpret_cast<T*>(run_.guest().allocate(
        count * static_cast<int64_t>(sizeof(T)), ownership, rank_idx, name, false));
  }
  int add_segment(int rank_idx, std::byte* base, int64_t bytes);
  void make_rank(int rank_idx);
  void make_tables(int rank_idx);
  void make_replicas(int rank_idx);
  /// Bytes of the sets of a rank at most; 0 where none are made.
  int64_t set_bytes() const;
  Offer offer_of(int rank_idx, int segment_idx, int64_t bytes = -1);
  int64_t most_window_bytes() const;
  bool has_nodes() const { return shape_.num_local_ranks > 0; }
  int64_t area_bytes() const;
  void make_rails();
  void count_puts(int rank_idx,
                  const Step& step,
                  layout::Operation operation,
                  bool pulls_weights,
                  bool is_weighted = false);
  void launch_exchange(int rank_idx, const kernels::ExchangeParams& params);
  device::Launch shape_of(int rank_idx, int num_blocks);
  /// Of a kernel that may start before the end of the one ahead.
  device::Launch shape_behind(int rank_idx);
  Inputs put_inputs(int rank_idx, const RankInputs& inputs);
  layout::OperationArguments arguments(layout::Operation operation, bool with_weights) const;
  /// Place where counting copies the choices to.
  int64_t* unwritten_choices(int rank_idx, const RankInputs& inputs);
  kernels::Choices choices_of(int rank_idx,
                              const RankInputs& inputs,
                              const int64_t* asked_idx,
                              int64_t* topk_idx);
  kernels::ExchangeParams dispatch_exchange(int rank_idx,
                                            const RankInputs& inputs,
                                            const kernels::Choices& choices,
                                            const Inputs& place,
                                            const Offer& offer);
  kernels::DispatchParams dispatch_rows(int rank_idx,
                                        const kernels::Choices& choices,
                                        const Inputs& place,
                                        int64_t* slots);
  void launch_rows(int rank_idx, const kernels::DispatchParams& params);
  kernels::CombineParams combine_rows(
      int rank_idx, const Step& step, const Handle& handle, bool is_weighted, bool pulls_weights);
  void launch_sums(int rank_idx, const kernels::CombineParams& params);
  /// Requests where ranks add first. @return the segment that it lies in.
  int launch_rank_requests(int rank_idx,
                           const Step& step,
                           const Outputs& outputs,
                           const kernels::CombineParams& combine);
  void launch_rank_sums(int rank_idx,
                        const Outputs& outputs,
                        int requests_segment,
                        kernels::CombineParams* combine);
  int offer_again(int rank_idx,
                  const Step& step,
                  const std::vector<uint8_t>& short_ranks,
                  bool has_memory,
                  int segment_idx);
  void check_dispatch(int rank_idx, const Step& step, int segment_idx, const int64_t* slots);
  void check_tables(int rank_idx, const Step& step, uint64_t epoch, bool is_cached);
  /// Reads what has a value through the checker and compares it.
  void compare(const std::byte* from, const ExpectedBytes& expected, const std::string& what);
  void overwrite(std::byte* to, int64_t bytes);
  template <typename T>
  void expect_equal(const T& got, const T& expected, const std::string& what);
  void count_pulled_across(int rank_idx, const ExpectedDispatch& expected, bool is_weighted);
  void count_crossing(int rank_idx, const ExpectedDispatch& expected);
  void count_traffic(int rank_idx, const Step& step, bool is_combine, bool is_dispatch);

  Run& run_;
  KernelCase shape_;
  layout::Placement placement_;
  std::vector<Rank> ranks_;
  std::vector<uint64_t*> segment_bases_;  ///< host memory of every rank
  Traffic traffic_;
  int num_checks_due_ = 0;
  int num_checks_made_ = 0;
};

}  // namespace moe::simt::checker
