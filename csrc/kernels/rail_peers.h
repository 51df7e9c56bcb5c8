#pragma once

#include <cstdint>

#include "kernels/internode.h"
#include "kernels/publish.h"
#include "kernels/wait.h"

namespace moe::kernels {

/// Places of one rank's rail region, and puts along its rail.
class RailMemory {
 public:
  MOE_DEVICE RailMemory(const Buffer& buffer, const Rails& rails)
      : buffer_(buffer), rails_(rails), own_node_(rails.nodes.node_idx(buffer.rank_idx)) {}

  MOE_DEVICE int own_node() const { return own_node_; }
  MOE_DEVICE int num_remote_nodes() const { return rails_.map.num_nodes - 1; }
  /// The i-th remote node: each node starts behind itself.
  MOE_DEVICE int remote_node(int i) const { return (own_node_ + 1 + i) % rails_.map.num_nodes; }
  MOE_DEVICE int rank_of(int node_idx) const {
    return rails_.nodes.rail_rank(buffer_.rank_idx, node_idx);
  }
  MOE_DEVICE bool is_active(int rank_idx) const {
    return device::load_constant(buffer_.is_active + rank_idx) != 0;
  }
  MOE_DEVICE RankRange local_ranks() const {
    return {rails_.nodes.rank_of(own_node_, 0), rails_.nodes.num_local_ranks};
  }
  MOE_DEVICE std::byte* at(int64_t offset) const { return rails_.region + offset; }
  template <typename T>
  MOE_DEVICE T* at(int64_t offset) const {
    return reinterpret_cast<T*>(rails_.region + offset);
  }

  /// Puts bytes of this region into that of the rail's rank on @p node_idx. All lanes of a warp.
  MOE_DEVICE void put(
      int node_idx, int64_t to, int64_t from, int64_t bytes, int64_t signal, uint64_t value) const {
    const int32_t pe = device::load_constant(rails_.pes + rank_of(node_idx));
    uint64_t* const signal_place = at<uint64_t>(signal);
    device::put_signal(pe, at(to), at(from), bytes, signal_place, value);
  }

  /// A warp waits for a signal that the rail's rank on @p src_node raises, and acquires what came
  /// with it. @return the same on every lane: false when the kernel is to leave.
  MOE_DEVICE bool await(const WaitSite& site,
                        int src_node,
                        int64_t signal,
                        uint64_t expected,
                        uint64_t limit_ns) const {
    int32_t has_come = 1;
    if (device::lane_idx() == 0)
      has_come = await_flag(
          buffer_, site, rank_of(src_node), at<const uint64_t>(signal), expected, limit_ns);
    if (device::lane_idx() == 0 && has_come != 0)
      device::take_put(at<const uint64_t>(signal), expected);
    has_come = device::shuffle(has_come, 0);
    // All lanes may read what lane 0 acquired.
    device::sync_warp();
    return has_come != 0;
  }

 private:
  const Buffer& buffer_;
  const Rails& rails_;
  int own_node_;
};

/// Raises done flags of @p epoch at every active rank of this node: this rank's, and those of the
/// other ranks of its rail, for which it has written (dispatch) or pulled (combine) all rows here.
/// The threads of one block share them.
MOE_DEVICE void release_rail_done(const Buffer& buffer, const Rails& rails, uint64_t epoch) {
  const RailMemory rail(buffer, rails);
  const RankRange readers = rail.local_ranks();
#pragma unroll 1
  for (int i = device::thread_idx(); i < readers.count * rails.map.num_nodes;
       i += device::num_threads()) {
    const int peer_rank = readers.behind(buffer.rank_idx, i % readers.count);
    const int src_rank = rail.rank_of(i / readers.count);
    if (rail.is_active(peer_rank) && rail.is_active(src_rank))
      raise_flag(&workspace(buffer, peer_rank).done(epoch, src_rank).epoch, epoch);
  }
}

/// Does what NodePeers does, across nodes: rows and offers go to the ranks of the node by stores
/// and along the rail by puts; what comes along the rail is written to the ranks of the node, flag
/// last.
class RailPeers {
 public:
  static constexpr bool kSendsSets = true;

  MOE_DEVICE RailPeers(const Buffer& buffer, const Rails& rails)
      : buffer_(buffer), rails_(rails), rail_(buffer, rails) {}

  MOE_DEVICE void publish_row(uint64_t epoch,
                              const std::byte* row,
                              int64_t used_bytes,
                              const SentSets& sets) const {
    const int64_t num_words = (used_bytes + kWordBytes - 1) / kWordBytes;
    std::byte* const sent = rail_.at(0);
#pragma unroll 1
    for (int64_t i = device::thread_idx(); i < num_words; i += device::num_threads())
      store_word(sent, i, load_word(row, i));
    copy_sets(sent + num_words * kWordBytes,
              sets.from,
              sets.bytes,
              device::thread_idx(),
              device::num_threads());
    device::sync_block();
    for_remote_nodes([&](int node_idx) {
      const int64_t to = rails_.map.row_in(epoch, node_idx, rail_.own_node());
      rail_.put(node_idx,
                to + kFlagBytes,
                kFlagBytes,
                num_words * kWordBytes + sets.bytes - kFlagBytes,
                to,
                epoch);
    });
    kernels::publish_row(buffer_, rail_.local_ranks(), epoch, row, used_bytes);
  }

  MOE_DEVICE void publish_offer(uint64_t epoch, const layout::SecondOffer& second) const {
    const int64_t sent = rails_.map.second_offer_out;
    if (device::thread_idx() == 0)
      store_struct(rail_.at<layout::SecondOffer>(sent), second);
    device::sync_block();
    for_remote_nodes([&](int node_idx) {
      const int64_t to = rails_.map.second_offer_in(epoch, node_idx, rail_.own_node());
      rail_.put(node_idx,
                to + kFlagBytes,
                sent + kFlagBytes,
                static_cast<int64_t>(sizeof(layout::SecondOffer)) - kFlagBytes,
                to,
                epoch);
    });
    kernels::publish_offer(buffer_, rail_.local_ranks(), epoch, buffer_.rank_idx, second);
  }

  /// @param sets      places for those that come with rows
  /// @param has_sets  whether any do
  MOE_DEVICE bool relay_rows(const WaitSite& site,
                             int32_t* scratch,
                             const TokenSets& sets,
                             bool has_sets) const {
    return relay(
        site,
        buffer_.arrival_limit_ns,
        scratch,
        [](int) { return true; },
        [&](int node_idx) { return rails_.map.row_in(site.epoch, rail_.own_node(), node_idx); },
        [&](int src_rank) { return &own().row(site.epoch, src_rank).epoch; },
        [&](int src_rank, std::byte* came) {
          relay_row(site.epoch, src_rank, came, sets, has_sets);
        });
  }

  template <typename IsShort>
  MOE_DEVICE bool relay_offers(const WaitSite& site,
                               int32_t* scratch,
                               const IsShort& is_short) const {
    return relay(
        site,
        buffer_.stall_limit_ns,
        scratch,
        is_short,
        [&](int node_idx) {
          return rails_.map.second_offer_in(site.epoch, rail_.own_node(), node_idx);
        },
        [&](int src_rank) { return &own().second_offer(site.epoch, src_rank).epoch; },
        [&](int src_rank, std::byte* came) {
          const auto second_offer = [&](int peer_rank) {
            return &workspace(buffer_, peer_rank).second_offer(site.epoch, src_rank).epoch;
          };
          write_to_node(
              came, static_cast<int64_t>(sizeof(layout::SecondOffer)), site.epoch, second_offer);
        });
  }

  /// Windows of this node that any rank of the rail moves rows to or from.
  template <typename Sends>
  MOE_DEVICE bool moves_rows(int rank_idx, const Sends& sends) const {
    if (rails_.nodes.node_idx(rank_idx) != rail_.own_node())
      return false;
#pragma unroll 1
    for (int node_idx = 0; node_idx < rails_.map.num_nodes; ++node_idx)
      if (sends(rail_.rank_of(node_idx), rank_idx))
        return true;
    return false;
  }

  MOE_DEVICE int own_node() const { return rail_.own_node(); }
  MOE_DEVICE int set_owner(int rank_idx) const {
    return rails_.nodes.rail_rank(rank_idx, rail_.own_node());
  }
  MOE_DEVICE bool is_near(int rank_idx) const {
    return rails_.nodes.is_same_node(rank_idx, buffer_.rank_idx);
  }
  MOE_DEVICE bool has_far_ranks() const { return rail_.num_remote_nodes() > 0; }
  MOE_DEVICE void release_done(uint64_t epoch) const { release_rail_done(buffer_, rails_, epoch); }
  /// The next operation writes again what was sent.
  MOE_DEVICE void end() const { device::quiet(); }

 private:
  static constexpr int64_t kWordBytes = sizeof(device::Bytes16);
  /// A row and a second offer begin with their flag.
  static constexpr int64_t kFlagBytes = sizeof(uint64_t);

  static MOE_DEVICE device::Bytes16 load_word(const std::byte* from, int64_t i) {
    if (i > 0)
      return device::load(reinterpret_cast<const device::Bytes16*>(from) + i);
    const auto bits = device::load(reinterpret_cast<const uint64_t*>(from) + 1);
    return {{0, 0, static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)}};
  }
  static MOE_DEVICE void store_word(std::byte* to, int64_t i, const device::Bytes16& word) {
    if (i > 0)
      device::store(reinterpret_cast<device::Bytes16*>(to) + i, word);
    else
      device::store(reinterpret_cast<uint64_t*>(to) + 1,
                    uint64_t{word.words[3]} << 32 | word.words[2]);
  }

  /// Called by threads that are counted from @p first, @p num_threads in all.
  static MOE_DEVICE void copy_sets(
      std::byte* to, const std::byte* from, int64_t bytes, int first, int num_threads) {
#pragma unroll 1
    for (int64_t i = first; i < bytes / 8; i += num_threads)
      device::store(reinterpret_cast<uint64_t*>(to) + i,
                    device::load(reinterpret_cast<const uint64_t*>(from) + i));
  }

  /// A warp takes a node at a time. @param use  use(node_idx), by all lanes
  template <typename Use>
  MOE_DEVICE void for_remote_nodes(const Use& use) const {
#pragma unroll 1
    for (int i = device::warp_idx(); i < rail_.num_remote_nodes(); i += device::num_warps()) {
      const int node_idx = rail_.remote_node(i);
      if (rail_.is_active(rail_.rank_of(node_idx)))
        use(node_idx);
    }
  }

  MOE_DEVICE layout::Workspace own() const { return workspace(buffer_, buffer_.rank_idx); }

  /// Hands on what the ranks of the rail sent, in whatever order it comes; a warp looks after some
  /// of the nodes.
  /// @param flag_of  flag_of(src_rank), which handing on raises here
  template <typename Wants, typename OffsetOf, typename FlagOf, typename HandOn>
  MOE_DEVICE bool relay(const WaitSite& site,
                        uint64_t limit_ns,
                        int32_t* scratch,
                        const Wants& wants,
                        const OffsetOf& offset_of,
                        const FlagOf& flag_of,
                        const HandOn& hand_on) const {
    const auto has_come = [&](int node_idx) {
      const auto* const flag = rail_.at<const uint64_t>(offset_of(node_idx));
      return device::load_acquire<device::Scope::kSystem>(flag) >= site.epoch;
    };
    bool goes_on = true;
#pragma unroll 1
    for (bool is_done = false; goes_on && !is_done;) {
      int missing = -1;  // lane 0: the first node that nothing has come from
      for_remote_nodes([&](int node_idx) {
        const int src_rank = rail_.rank_of(node_idx);
        if (!wants(src_rank))
          return;
        // 0: came before, 1: has come, 2: has not
        int32_t state = 0;
        if (device::lane_idx() == 0 &&
            device::load_relaxed<device::Scope::kSystem>(flag_of(src_rank)) < site.epoch)
          state = has_come(node_idx) ? 1 : 2;
        if (state == 1)
          device::take_put(rail_.at<const uint64_t>(offset_of(node_idx)), site.epoch);
        state = device::shuffle(state, 0);
        if (state == 2 && missing < 0)
          missing = node_idx;
        if (state != 1)
          return;
        // All lanes may read what lane 0 acquired.
        device::sync_warp();
        hand_on(src_rank, rail_.at(offset_of(node_idx)));
        device::sync_warp();
      });
      is_done = missing < 0;
      if (!is_done)
        goes_on = await_any(site, limit_ns, missing, wants, flag_of, has_come);
    }
    return device::block_all(goes_on, scratch);
  }

  /// A warp waits until something has come that was not handed on.
  template <typename Wants, typename FlagOf, typename HasCome>
  MOE_DEVICE bool await_any(const WaitSite& site,
                            uint64_t limit_ns,
                            int missing,
                            const Wants& wants,
                            const FlagOf& flag_of,
                            const HasCome& has_come) const {
    int32_t goes_on = 1;
    if (device::lane_idx() == 0) {
      const uint64_t seen = 0;
      goes_on = await_until(buffer_, site, rail_.rank_of(missing), site.epoch, seen, limit_ns, [&] {
        // Its row may have been given up for it: its owner has gone.
        bool any = device::load_relaxed<device::Scope::kSystem>(flag_of(rail_.rank_of(missing))) >=
                   site.epoch;
        for_remote_nodes([&](int node_idx) {
          const int src_rank = rail_.rank_of(node_idx);
          any = any ||
                (wants(src_rank) &&
                 device::load_relaxed<device::Scope::kSystem>(flag_of(src_rank)) < site.epoch &&
                 has_come(node_idx));
        });
        return any;
      });
    }
    return device::shuffle(goes_on, 0) != 0;
  }

  MOE_DEVICE void relay_row(
      uint64_t epoch, int src_rank, std::byte* came, const TokenSets& sets, bool has_sets) const {
    auto& row = *reinterpret_cast<layout::Row*>(came);
    auto used_bytes = static_cast<int64_t>(sizeof(layout::Row));
    if (device::load(&row.status) != static_cast<int32_t>(layout::RowStatus::kOk))
      used_bytes += layout::Row::kMessageBytes;
    else if (device::load(&row.arguments.operation) ==
             static_cast<int32_t>(layout::Operation::kDispatch)) {
      used_bytes += int64_t{4} * layout::Row::num_counts(buffer_.num_ranks, buffer_.num_experts);
      if (has_sets)
        relay_sets(epoch, src_rank, &row, came + round_up(used_bytes, kWordBytes), sets);
    }
    write_to_node(came, used_bytes, epoch, [&](int peer_rank) {
      return &workspace(buffer_, peer_rank).row(epoch, src_rank).epoch;
    });
  }

  /// Offers the sets that came behind a row in the heap, and says so in the row.
  MOE_DEVICE void relay_sets(uint64_t epoch,
                             int src_rank,
                             layout::Row* row,
                             const std::byte* came,
                             const TokenSets& sets) const {
    const int node_idx = rails_.nodes.node_idx(src_rank);
    const uint64_t bytes = device::load(&row->weights_offer.bytes);
    const Offer offer = sets.offer_at(epoch, buffer_.depth, node_idx, bytes);
    if (bytes == 0 || bytes > static_cast<uint64_t>(sets.stride))
      return;
    copy_sets(sets.base + sets.offset(epoch, buffer_.depth, node_idx),
              came,
              static_cast<int64_t>(bytes),
              device::lane_idx(),
              device::kWarpSize);
    device::sync_warp();
    if (device::lane_idx() == 0)
      store_struct(&row->weights_offer, offer);
    device::sync_warp();
  }

  /// A warp writes a row or a second offer, flag last, to every active rank of this node.
  /// @param place_of  place_of(peer_rank), its flag there
  template <typename PlaceOf>
  MOE_DEVICE void write_to_node(const std::byte* from,
                                int64_t used_bytes,
                                uint64_t epoch,
                                const PlaceOf& place_of) const {
    const RankRange readers = rail_.local_ranks();
    const int64_t num_words = (used_bytes + kWordBytes - 1) / kWordBytes;
#pragma unroll 1
    for (int64_t word = device::lane_idx(); word < num_words; word += device::kWarpSize) {
      const device::Bytes16 value = load_word(from, word);
#pragma unroll 1
      for (int i = 0; i < readers.count; ++i) {
        const int peer_rank = readers.behind(buffer_.rank_idx, i);
        if (rail_.is_active(peer_rank))
          store_word(reinterpret_cast<std::byte*>(place_of(peer_rank)), word, value);
      }
    }
    device::sync_warp();
#pragma unroll 1
    for (int i = device::lane_idx(); i < readers.count; i += device::kWarpSize) {
      const int peer_rank = readers.behind(buffer_.rank_idx, i);
      if (rail_.is_active(peer_rank))
        raise_flag(place_of(peer_rank), epoch);
    }
  }

  const Buffer& buffer_;
  const Rails& rails_;
  RailMemory rail_;
};

}  // namespace moe::kernels
