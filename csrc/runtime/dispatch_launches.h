#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "host/dispatch.h"
#include "kernels/dispatch.h"
#include "kernels/receive.h"
#include "runtime/device_plan.h"

namespace moe::runtime {

/// The kernels of one dispatch in their order, whether the host reads rows between them or not.
class DispatchLaunches {
 public:
  DispatchLaunches(DeviceEndpoint& endpoint,
                   const host::DispatchParams& params,
                   const layout::Arrangement& arrangement,
                   Contents contents)
      : endpoint_(endpoint), params_(params), arrangement_(arrangement), contents_(contents) {}

  /// Uncached: launches the counting of this rank's choices, from a copy that the plan keeps.
  /// @param allocate  Of so many bytes, device memory for counting that outlives the kernels.
  template <typename Allocate>
  void count_choices(const Allocate& allocate) {
    begin_counting();
    lay_chunks(allocate(lay_chunks(nullptr)));
    end_counting();
  }
  /// Cached: rows go where @p plan says.
  void take_plan(const DevicePlan& plan);

  /// The plan that kernels of an uncached dispatch fill. Its header is of the caller's making.
  const std::shared_ptr<DevicePlan>& made_plan() const { return made_plan_; }
  DispatchTables& tables() { return tables_; }

  /// What the exchange is told, all but the offer and what belongs to the buffer.
  kernels::ExchangeParams row() const;
  /// Launches what sends this rank's rows.
  void send_rows() const;
  /// What DeviceEndpoint::launch_receive() is told, behind that.
  kernels::ReceiveParams receive_params() const;
  /// What is wrong with this dispatch for the memory between nodes, or "".
  std::string find_shortage() const;

 private:
  static constexpr int64_t kMostChunks = 512;
  static constexpr int kBlocksPerSm = 4;  ///< that count

  kernels::Choices shape_choices() const;
  kernels::DispatchParams kernel_params() const;
  void begin_counting();
  int64_t lay_chunks(std::byte* memory);
  void end_counting();

  DeviceEndpoint& endpoint_;
  const host::DispatchParams& params_;
  layout::Arrangement arrangement_;
  Contents contents_;  ///< of memory that is made
  std::shared_ptr<DevicePlan> made_plan_;
  DispatchTables tables_;
  kernels::Choices choices_;
  int64_t* slots_ = nullptr;
  const int32_t* kept_counts_ = nullptr;
};

}  // namespace moe::runtime
