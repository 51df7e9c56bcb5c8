#pragma once

#include <cstdint>

#include "kernels/finish.h"
#include "kernels/publish.h"

namespace moe::kernels {

/// Way of a rank's rows and flags to all ranks where these share a node: by stores. RailPeers
/// (kernels/rail_peers.h) has the same functions across nodes.
class NodePeers {
 public:
  /// Sets go along with rows; else they are read where a row says.
  static constexpr bool kSendsSets = false;

  MOE_DEVICE explicit NodePeers(const Buffer& buffer) : buffer_(buffer) {}

  /// All threads of a block; see kernels::publish_row().
  MOE_DEVICE void publish_row(uint64_t epoch,
                              const std::byte* row,
                              int64_t used_bytes,
                              const SentSets& /*sets*/) const {
    kernels::publish_row(buffer_, all_ranks(), epoch, row, used_bytes);
  }
  MOE_DEVICE void publish_offer(uint64_t epoch, const layout::SecondOffer& second) const {
    kernels::publish_offer(buffer_, all_ranks(), epoch, buffer_.rank_idx, second);
  }
  /// Brings what other nodes sent to the ranks of this one. All threads of a block. @return false
  /// when the kernel is to leave.
  MOE_DEVICE bool relay_rows(const WaitSite& /*site*/,
                             int32_t* /*scratch*/,
                             const TokenSets& /*sets*/,
                             bool /*has_sets*/) const {
    return true;
  }
  template <typename IsShort>
  MOE_DEVICE bool relay_offers(const WaitSite& /*site*/,
                               int32_t* /*scratch*/,
                               const IsShort& /*is_short*/) const {
    return true;
  }
  /// Returns whether this rank needs the address of a rank's window or rows.
  /// @param sends  sends(src_rank, dst_rank): the count matrix has rows of src_rank there
  template <typename Sends>
  MOE_DEVICE bool moves_rows(int rank_idx, const Sends& sends) const {
    return sends(buffer_.rank_idx, rank_idx);
  }
  MOE_DEVICE int own_node() const { return 0; }
  /// The rank in whose heap the sets of @p rank_idx are read.
  MOE_DEVICE int set_owner(int rank_idx) const { return rank_idx; }
  /// Returns whether a rank's flags come here by its own hand. Others come by a rank of this node,
  /// which is waited for first, so that it is named where it is missing.
  MOE_DEVICE bool is_near(int /*rank_idx*/) const { return true; }
  MOE_DEVICE bool has_far_ranks() const { return false; }
  MOE_DEVICE void release_done(uint64_t epoch) const { kernels::release_done(buffer_, epoch); }
  /// Before the kernel ends; all threads of a block.
  MOE_DEVICE void end() const {}

 private:
  MOE_DEVICE RankRange all_ranks() const { return {0, buffer_.num_ranks}; }

  const Buffer& buffer_;
};

}  // namespace moe::kernels
