#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "core/dtype.h"
#include "cpu/row_kernels.h"
#include "cpu/thread_pool.h"
#include "group/rail_buffers.h"
#include "ops/endpoint_base.h"

namespace moe::ops {

/// One buffer on one rank, whose rows the CPU moves; see EndpointBase.
class Endpoint : public EndpointBase {
 public:
  /// Collective. @throws InvalidArgument  configurations differ; names both values, on every rank.
  static std::shared_ptr<Endpoint> create(std::shared_ptr<group::Group> group,
                                          EndpointConfig config,
                                          const group::InterruptCheck& interrupt_check);
  ~Endpoint() override;

  const cpu::RowKernels& kernels() const { return *kernels_; }
  cpu::ThreadPool& threads() { return threads_; }
  SymmetricMemory& memory() const override { return group().memory(); }
  int32_t dlpack_device_type() const override { return 1; }  // kDLCPU
  int32_t device_idx() const override { return 0; }
  bool can_quantize(const layout::WireFormat& format, layout::ScaleFormat scale) const override {
    return cpu::can_quantize(format, scale);
  }
  void restart(uint64_t next_epoch) override;

  /// Keeps what peers may read throughout the operation of @p epoch until they have ended it, as
  /// whoever takes its place in the ring finds.
  void keep_readable(uint64_t epoch, std::shared_ptr<Window> window) {
    readable(epoch).push_back(std::move(window));
  }
  /// They have ended it.
  void drop_readable(uint64_t epoch) { readable(epoch).clear(); }

  bool is_across_nodes() const { return group().nodes().num_nodes() > 1; }
  /// Rail of a buffer across nodes.
  Rail& rail();
  group::RailBuffers& rail_buffers() { return rail_buffers_; }
  /// Bytes of all messages that have moved between nodes, out of this rank and into it.
  struct InternodeBytes {
    uint64_t sent = 0;
    uint64_t received = 0;
  };
  InternodeBytes internode_bytes() const;

  /// Streaming stores where @p total_bytes written by all ranks outgrow their share of the caches,
  /// so that they pay.
  cpu::StoreMode store_mode(int64_t total_bytes) const;

  /// Threads split a loop only where it moves enough to pay for waking them.
  void for_tokens(int64_t num_tokens,
                  int64_t total_bytes,
                  const std::function<void(int64_t, int64_t)>& body);

 protected:
  void end_device_operations() override;

 private:
  Endpoint(std::shared_ptr<group::Group> group, EndpointConfig config);
  std::vector<std::shared_ptr<Window>>& readable(uint64_t epoch) {
    return readable_[static_cast<size_t>(epoch % readable_.size())];
  }
  void listen();
  void retire_rail(const std::string& reason);

  const cpu::RowKernels* kernels_;
  int64_t cache_bytes_;
  cpu::ThreadPool threads_;
  mutable sync::Mutex rail_mutex_;  ///< the rail changes while bytes are asked for
  std::shared_ptr<Rail> rail_;
  InternodeBytes bytes_of_former_rails_;
  group::RailBuffers rail_buffers_;
  std::vector<std::vector<std::shared_ptr<Window>>> readable_;  ///< [depth]
};

}  // namespace moe::ops
