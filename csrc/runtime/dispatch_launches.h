#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "kernels/dispatch.h"
#include "kernels/receive.h"
#include "ops/dispatch.h"
#include "runtime/device_endpoint.h"
#include "runtime/device_plan.h"

namespace moe::runtime {

/// Contents of an operation's memory before kernels write it. They write all of it, unless they
/// leave; a run of a graph that leaves tells nobody but by the plan's status, so that what else can
/// be read is zero, or of a run whose result has as many rows.
enum class Contents { kUnset, kCaptured };

/// The kernels of one dispatch in their order, whether the host reads rows between them or not.
class DispatchLaunches {
 public:
  DispatchLaunches(DeviceEndpoint& endpoint,
                   const ops::DispatchParams& params,
                   const layout::Arrangement& arrangement,
                   Contents contents)
      : endpoint_(endpoint), params_(params), arrangement_(arrangement), contents_(contents) {}

  /// Uncached: memory for what the exchange counts.
  /// @param allocate  allocate(bytes) returns device memory for counting that outlives the kernels.
  template <typename Allocate>
  void make_plan(const Allocate& allocate) {
    allocate_plan();
    const kernels::Buffer buffer = endpoint_.control().buffer();
    const int64_t bytes = lay_chunks(nullptr, buffer, &choices_, &sets_);
    lay_chunks(allocate(bytes), buffer, &choices_, &sets_);
  }
  /// Uncached, before that: places for sets of tokens, where the rows of replicas are counted from
  /// those. @throws CapacityError
  void take_sets() {
    if (arrangement_.is_by_rank() && params_.replicas != nullptr)
      sets_ = endpoint_.buffer_memory().token_sets(params_.num_tokens, params_.num_topk);
  }
  /// Cached: rows go where @p plan says.
  void take_plan(const DevicePlan& plan);

  /// The plan that kernels of an uncached dispatch fill. Its header is of the caller's making.
  const std::shared_ptr<DevicePlan>& made_plan() const { return made_plan_; }
  /// Fills what no count decides in the header of a plan of fixed size whose counts the host does
  /// not know.
  void foresee_plan();
  DispatchTables& tables() { return tables_; }

  /// Arguments of the exchange, all but the offer and what belongs to the buffer.
  kernels::ExchangeParams row() const;
  /// Launches what sends this rank's rows.
  void send_rows() const;
  /// Arguments of Launcher::receive(), behind that.
  kernels::ReceiveParams receive_params() const;
  /// Text of what is wrong with this dispatch for the memory between nodes, or "".
  std::string find_shortage() const;

 private:
  kernels::Choices shape_choices() const;
  kernels::Replicas replicas() const;
  kernels::DispatchParams kernel_params() const;
  /// Number of rows of a result whose size no count decides.
  int64_t num_fixed_rows() const;
  void allocate_plan();
  /// Takes memory of the operation, whose result has @p num_rows.
  TakeMemory taker(int64_t num_rows) const;

  DeviceEndpoint& endpoint_;
  const ops::DispatchParams& params_;
  layout::Arrangement arrangement_;
  Contents contents_;  ///< contents of memory that is made
  kernels::TokenSets sets_;
  std::shared_ptr<DevicePlan> made_plan_;
  DispatchTables tables_;
  kernels::Choices choices_;
  int64_t* slots_ = nullptr;
  const int32_t* kept_counts_ = nullptr;
};

}  // namespace moe::runtime
