#pragma once

#include <memory>

#include "kernels/exchange.h"
#include "kernels/receive.h"
#include "runtime/call_order.h"
#include "runtime/control_memory.h"
#include "runtime/internode.h"
#include "runtime/launch_defaults.h"

namespace moe::runtime {

/// Launches of one buffer's kernels: their blocks and threads, in its stream, and whether they
/// reach ranks of other nodes.
class Launcher {
 public:
  /// All but @p shape outlive this.
  Launcher(const CallOrder& order, const ControlMemory& control, const LaunchShape& shape);

  int num_sms() const { return num_sms_; }
  /// Threads of a block of a kernel that has @p usual_threads where nothing else was asked for.
  int num_threads(int usual_threads = kUsualThreads) const {
    return num_threads_ > 0 ? num_threads_ : usual_threads;
  }
  int tokens_per_chunk() const { return tokens_per_chunk_; }
  /// Way to ranks of other nodes; null with one node.
  const Internode* internode() const { return internode_.get(); }
  void set_internode(std::unique_ptr<Internode> internode) { internode_ = std::move(internode); }

  /// A launch of @p num_blocks.
  /// @param usual_threads  threads of a block, if nothing else was asked for
  device::Launch launch(int num_blocks, int usual_threads = kUsualThreads) const;
  /// The same right behind another kernel of this buffer, before which the kernel may start: see
  /// device::Launch::is_dependent.
  device::Launch launch_behind(int num_blocks, int usual_threads = kUsualThreads) const;

  /// Launches the exchange of rows, within a node or across.
  void exchange(const kernels::ExchangeParams& params) const;
  void offers(const kernels::OffersParams& params) const;
  /// @param params  All but what belongs to the buffer.
  /// @param is_behind  right behind the kernel that moves rows
  void receive(kernels::ReceiveParams params, bool is_behind = false) const;

 private:
  const CallOrder& order_;
  Device& device_;
  const ControlMemory& control_;
  int num_sms_;
  int num_threads_;  ///< 0 where nothing was asked for
  int tokens_per_chunk_;
  std::unique_ptr<Internode> internode_;
};

}  // namespace moe::runtime
