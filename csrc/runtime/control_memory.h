#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/buffer.h"
#include "ops/endpoint_base.h"
#include "runtime/device.h"
#include "runtime/segment_bases.h"

namespace moe::runtime {

/// Memory in which kernels of one buffer keep its state, and the host looks at it: this rank's
/// control area on the device, to which kernels of peers write, tables, and what kernels report.
class ControlMemory {
 public:
  /// @param area  Room for the control area.
  ControlMemory(const ops::EndpointBase& endpoint,
                Device& device,
                const SegmentBases& bases,
                const Window& area);

  /// Bytes of the control area of a rank.
  static int64_t area_bytes(const ops::EndpointBase& endpoint);
  std::byte* area() const { return own_area_.base(); }
  const Offer& area_offer() const { return area_offer_; }
  /// @param areas         [num_ranks] control areas; null for ranks that take no part
  /// @param is_elsewhere  [num_ranks]: on another device than this rank
  void connect(std::vector<std::byte*> areas, std::vector<uint8_t> is_elsewhere);
  const std::vector<std::byte*>& areas() const { return areas_; }
  const std::vector<uint8_t>& is_elsewhere() const { return is_elsewhere_; }
  /// Brings what is the same in every operation to the device, in the order of @p stream, which is
  /// drained before it is called again.
  void upload(Stream& stream);
  /// Forgets what kernels have left, likewise.
  void restart(Stream& stream, uint64_t next_epoch);

  /// State that kernels of this buffer share, as it is now.
  kernels::Buffer buffer() const;
  /// Device memory in which kernels of one operation tell those behind them what they found; its
  /// counts, offsets and choices per expert belong to the plan.
  const kernels::Tables& tables() const { return tables_; }
  /// Device memory [num_ranks] for a value per rank, in the order of the buffer's stream.
  uint8_t* rank_values() const { return reinterpret_cast<uint8_t*>(rank_values_.get()); }
  const kernels::WaitReport& report() const { return *buffer_.report; }
  ops::WaitStatistics wait_statistics() const;
  /// Nanoseconds that kernels have waited for every rank since the last call, [num_ranks].
  /// Called by the thread that issues operations.
  std::vector<int64_t> take_waited_ns();

  // Beside running kernels, for the slow path of waits.
  /// This rank's flags of @p epoch, as peers left them.
  bool has_row(uint64_t epoch, int peer_rank) const;
  bool is_done(uint64_t epoch, int peer_rank) const;
  /// Returns whether the operation that began last needs what @p peer_rank has not written, and
  /// cannot any more if it was gone before the call. @p site is then where it waits.
  bool lacks(int peer_rank, group::WaitSite* site) const;
  /// Epochs of graphs, which kernels alone count.
  group::Recoverable::Epochs epochs() const;
  /// For peers that wait: this rank is obtaining memory, which takes its time.
  void show_phase(layout::Phase phase);
  /// In place of a peer that will write none.
  void write_rejected_row(uint64_t epoch, int peer_rank);
  /// Copies what no kernel is to touch, and waits for that; one side is page-locked.
  void copy(void* target, const void* source, int64_t bytes) const;

 private:
  void copy_alone(void* target, const void* source, int64_t bytes) const;
  template <typename Word>
  Word read(const Word& word) const;
  template <typename Word>
  void write(Word& word, Word value);

  const ops::EndpointBase& endpoint_;
  Device& device_;
  layout::Workspace own_area_;
  Offer area_offer_;
  std::vector<std::byte*> areas_;
  std::vector<uint8_t> is_elsewhere_;
  std::shared_ptr<std::byte> constants_;
  std::shared_ptr<std::byte> staging_;
  std::shared_ptr<std::byte> state_;
  std::shared_ptr<std::byte> state_staging_;
  std::shared_ptr<std::byte> tables_memory_;
  std::shared_ptr<std::byte> report_;
  std::shared_ptr<std::byte> waits_;  ///< kernels::WaitTotals [num_ranks]
  std::shared_ptr<std::byte> rank_values_;
  kernels::Buffer buffer_;
  kernels::Tables tables_;
  std::vector<int64_t> taken_waits_ns_;
  mutable std::mutex side_mutex_;
  mutable std::shared_ptr<Stream> side_stream_;  ///< made when it is first needed
  std::shared_ptr<std::byte> side_word_;         ///< page-locked, under side_mutex_
};

}  // namespace moe::runtime
