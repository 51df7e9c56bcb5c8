#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/node_layout.h"
#include "group/group.h"
#include "kernels/internode_combine.h"
#include "kernels/internode_dispatch.h"
#include "kernels/internode_exchange.h"
#include "layout/rail_region.h"
#include "runtime/device.h"
#include "runtime/symmetric_regions.h"

namespace moe::runtime {

/// Kernels across nodes, of a module that is linked with some: not every one has an engine for
/// puts.
struct InternodeKernels {
  decltype(&kernels::launch_internode_exchange) exchange;
  decltype(&kernels::launch_internode_offers) offers;
  decltype(&kernels::launch_internode_dispatch) dispatch;
  decltype(&kernels::internode_dispatch_shared_bytes) dispatch_shared_bytes;
  decltype(&kernels::internode_dispatch_bytes) dispatch_bytes;
  decltype(&kernels::launch_internode_combine) combine;
  decltype(&kernels::internode_combine_shared_bytes) combine_shared_bytes;
  decltype(&kernels::internode_combine_bytes) combine_bytes;
};

/// Needs of a buffer whose ranks lie on several nodes, besides a heap. Equal on every rank.
struct InternodeConfig {
  std::shared_ptr<SymmetricRegions> regions;  ///< null where kernels reach one node only
  InternodeKernels kernels{};
  layout::LargestOperation largest;
};

/// Memory of one buffer between nodes, and what kernels are told of it.
class Internode {
 public:
  /// Collective.
  /// @param num_experts, depth  Of the buffer.
  /// @throws CapacityError, InvalidArgument  on every rank alike.
  Internode(group::Group& group,
            Device& device,
            const InternodeConfig& config,
            int num_experts,
            int depth,
            const group::InterruptCheck& interrupt_check);

  /// Behind this, kernels of the stream may use rails().
  void upload(Stream& stream) const;

  const kernels::Rails& rails() const { return rails_; }
  const InternodeKernels& kernels() const { return kernels_; }
  bool node_reduction() const { return largest_.node_reduction; }

  /// Text of what is wrong with operations whose rows take @p needed_bytes of an area, or "".
  /// @param num_tokens, row_bytes  Of the operation, for the text.
  std::string find_shortage(int64_t needed_bytes, int64_t num_tokens, int64_t row_bytes) const;

 private:
  InternodeKernels kernels_;
  layout::LargestOperation largest_;
  std::shared_ptr<std::byte> region_;
  std::shared_ptr<std::byte> pes_staging_;
  std::shared_ptr<std::byte> pes_;
  kernels::Rails rails_;
};

}  // namespace moe::runtime
