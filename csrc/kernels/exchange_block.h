#pragma once

#include <climits>
#include <cstdint>

#include "device/primitives.h"
#include "kernels/chunk_sums.h"
#include "kernels/count_chunks.h"
#include "kernels/exchange.h"
#include "kernels/node_peers.h"
#include "kernels/publish.h"
#include "kernels/replica_rows.h"
#include "kernels/tables.h"
#include "kernels/token_sets.h"
#include "kernels/wait.h"

// The exchange of rows, within one node or across nodes.

namespace moe::kernels {

/// Shared memory of the block of an exchange.
///
/// Byte map, R ranks and E experts:
///   [0, 128)  a word of 8 bytes per warp
///   then      int32 [kMaxExchangeThreads]: sums of chunks, see ChunkSums
///   then      the row of this rank, Row::stride; while choices are counted, counts of one chunk
///   then      int64 [E]: totals; [E + 1]: starts; int32 [R]: is_masked
///   then      multiple of 8: see ReplicaSharedMap, where there are replicas
struct ExchangeSharedMap {
  static constexpr int64_t kMaxWarps = kMaxExchangeThreads / 32;

  int64_t chunk_sums;
  int64_t row;
  int64_t totals;
  int64_t starts;
  int64_t is_masked;
  int64_t bytes;

  MOE_HOST_DEVICE static ExchangeSharedMap make(int num_ranks, int num_experts) {
    ExchangeSharedMap map{};
    map.chunk_sums = 8 * kMaxWarps;
    map.row = map.chunk_sums + 4 * kMaxExchangeThreads;
    map.totals = map.row + layout::Row::stride(num_ranks, num_experts);
    map.starts = map.totals + int64_t{8} * num_experts;
    map.is_masked = map.starts + int64_t{8} * (num_experts + 1);
    map.bytes = round_up(map.is_masked + int64_t{4} * num_ranks, 8);
    return map;
  }
};

/// One operation's exchange, by the threads of one block, the last of those that count.
///
/// @tparam Peers  how rows reach all ranks: NodePeers, or RailPeers across nodes.
/// @tparam kHasReplicas  has_replicas(): what shares rows out costs registers.
template <typename Peers, bool kHasReplicas>
class ExchangeBlock {
  using Row = layout::Row;
  using RowStatus = layout::RowStatus;

 public:
  MOE_DEVICE ExchangeBlock(const ExchangeParams& params, const Peers& peers)
      : params_(params),
        peers_(peers),
        buffer_(params.buffer),
        map_(ExchangeSharedMap::make(buffer_.num_ranks, buffer_.num_experts)),
        own_(workspace(buffer_, buffer_.rank_idx)),
        chunk_sums_(params.choices,
                    buffer_.num_experts + buffer_.num_ranks,
                    reinterpret_cast<int32_t*>(shared(map_.chunk_sums))),
        counts_(buffer_,
                params.arrangement,
                params.tables.counts,
                CountScratch{reinterpret_cast<int64_t*>(shared(0)),
                             reinterpret_cast<int64_t*>(shared(map_.totals)),
                             reinterpret_cast<int64_t*>(shared(map_.starts)),
                             reinterpret_cast<int32_t*>(shared(map_.is_masked))}) {}

  /// First, by all blocks of the kernel. @return whether this block is to run(): the last to be
  /// done, as the others have nothing left to do.
  MOE_DEVICE bool count() const {
    if (!counts_choices(params_))
      return true;
    if constexpr (kHasReplicas)
      write_sets();
    // Nobody can count yet where counts are to say which ranks tokens go to.
    count_chunks({params_.choices,
                  kHasReplicas ? nullptr : buffer_.expert_rank,
                  buffer_.num_experts,
                  kHasReplicas ? params_.replicas.num_experts : buffer_.num_experts,
                  buffer_.num_ranks},
                 scratch(),
                 row()->counts());
    return is_last_block(buffer_, narrow_scratch());
  }

  MOE_DEVICE void run() {
    const uint64_t former_epoch = device::load(&buffer_.state->epoch);
    const bool is_over = has_left(buffer_);
    epoch_ = is_over ? former_epoch : former_epoch + 1;
    if (is_over) {
      tell_epoch();
      conclude(OperationStatus::kLeft);
      return;
    }
    if (device::thread_idx() == 0) {
      device::store(&buffer_.state->epoch, epoch_);
      device::store(params_.tables.epoch, epoch_);
    }
    conclude(exchange());
  }

 private:
  MOE_DEVICE static std::byte* shared(int64_t offset) { return device::shared_memory() + offset; }
  MOE_DEVICE int64_t* scratch() const { return reinterpret_cast<int64_t*>(shared(0)); }
  MOE_DEVICE int32_t* narrow_scratch() const { return reinterpret_cast<int32_t*>(shared(0)); }
  MOE_DEVICE Row* row() const { return reinterpret_cast<Row*>(shared(map_.row)); }
  MOE_DEVICE bool is_active(int rank_idx) const {
    return device::load_constant(buffer_.is_active + rank_idx) != 0;
  }
  MOE_DEVICE bool all(bool condition) const {
    return device::block_all(condition, narrow_scratch());
  }
  MOE_DEVICE bool is_cached_dispatch() const {
    return params_.is_dispatch != 0 && params_.with_counts == 0;
  }
  /// Returns whether rows by rank follow from sets of tokens.
  MOE_DEVICE bool has_sets() const {
    return kHasReplicas && counts_choices(params_) && params_.sets.base != nullptr;
  }

  MOE_DEVICE OperationStatus exchange() {
    make_row();
    if (!await_reuse()) {
      tell_epoch();
      return OperationStatus::kLeft;
    }
    peers_.publish_row(epoch_, shared(map_.row), row_bytes_, sent_sets());
    // Work that needs no peer is done while their rows are on the way. The host's memory comes
    // behind the flags, each of which waits until all that was stored before it has arrived.
    tell_epoch();
    if (counts_choices(params_))
      chunk_sums_.spread();
    if (is_cached_dispatch())
      take_kept();
    if (!peers_.relay_rows(
            site(layout::Phase::kRows), narrow_scratch(), params_.sets, has_sets()) ||
        !await_rows())
      return OperationStatus::kLeft;
    // No peer keeps this kernel any longer: blocks that wait for its end take nobody's place.
    device::launch_dependents();
    const bool is_agreed = all(agrees()) && agrees_on_gradients();
    take_rows(is_agreed);
    if (!is_agreed)
      return OperationStatus::kRejected;
    if (params_.needed_status != nullptr) {
      const auto needed = static_cast<OperationStatus>(device::load(params_.needed_status));
      if (needed != OperationStatus::kOk)
        return needed;
    }
    if (params_.with_counts != 0) {
      if constexpr (kHasReplicas)
        share_replicas({params_.replicas,
                        buffer_.first_of_rank,
                        buffer_.num_experts,
                        buffer_.rank_idx,
                        params_.arrangement.layout == layout::RowLayout::kLowLatency,
                        params_.tables.counts,
                        shared(map_.bytes)});
      if constexpr (kHasReplicas)
        if (has_sets() && !count_tokens())
          return OperationStatus::kLeft;
      int64_t num_dropped = 0;
      if (counts_.keep_rows(params_.rule, &num_dropped))
        return OperationStatus::kOverflow;
      num_dropped_ = num_dropped < INT32_MAX ? static_cast<int32_t>(num_dropped) : INT32_MAX;
    }
    return params_.is_dispatch != 0 ? lay_out_windows() : find_sources();
  }

  /// A host that has left epochs to graphs learns which one this is.
  MOE_DEVICE void tell_epoch() const {
    if (params_.host_read != nullptr && device::thread_idx() == 0)
      device::store_relaxed<device::Scope::kSystem>(&params_.host_read->epoch, epoch_);
  }

  // --- The row of this rank ---------------------------------------------------------------------

  MOE_DEVICE void make_row() {
    int32_t status = params_.status;
    uint64_t needed_bytes = params_.needed_bytes;
    uint64_t available_bytes = params_.available_bytes;
    if (counts_choices(params_)) {
      chunk_sums_.add_up(row()->counts());
      finish_counts(&status, &needed_bytes, &available_bytes);
    }
    const bool is_ok = status == static_cast<int32_t>(RowStatus::kOk);
    if (device::thread_idx() == 0) {
      device::store(&row()->status, status);
      device::store(&row()->num_tokens, params_.num_tokens);
      store_struct(&row()->arguments, params_.arguments);
      store_struct(&row()->offer, params_.offer);
      store_struct(&row()->weights_offer, has_sets() ? offered_sets() : params_.weights_offer);
      device::store(&row()->needed_bytes, is_ok ? params_.heard_epoch : needed_bytes);
      device::store(&row()->available_bytes, available_bytes);
      if (!is_ok)
        copy_message();
    }
    row_bytes_ = static_cast<int64_t>(sizeof(Row));
    if (!is_ok)
      row_bytes_ += Row::kMessageBytes;
    else if (params_.with_counts != 0)
      row_bytes_ += int64_t{4} * Row::num_counts(buffer_.num_ranks, buffer_.num_experts);
    device::sync_block();
  }

  /// Adds masks and what follows the counts; finds what only the device knows to be wrong.
  MOE_DEVICE void finish_counts(int32_t* status,
                                uint64_t* needed_bytes,
                                uint64_t* available_bytes) const {
    constexpr int64_t kFirstRank = int64_t{1} << 62;
    int32_t* const to_rank = row()->counts() + buffer_.num_experts;
    const bool is_low_latency = params_.arrangement.layout == layout::RowLayout::kLowLatency;
    int64_t first_wrong = INT64_MAX;
#pragma unroll 1
    for (int i = device::thread_idx(); i < params_.choices.num_chunks; i += device::num_threads()) {
      const int64_t bad_idx = device::load(params_.choices.bad_choice + i);
      if (bad_idx >= 0 && bad_idx < first_wrong)
        first_wrong = bad_idx;
    }
#pragma unroll 1
    for (int rank_idx = device::thread_idx(); rank_idx < buffer_.num_ranks;
         rank_idx += device::num_threads()) {
      const bool is_failed = !is_active(rank_idx);
      const bool is_masked =
          params_.is_masked != nullptr && device::load_constant(params_.is_masked + rank_idx) != 0;
      // Replicas elsewhere take the rows of a rank that has failed.
      if (is_failed ? is_low_latency || kHasReplicas : is_low_latency && is_masked)
        device::store(to_rank + rank_idx, int32_t{layout::CountMatrix::kMasked});
      else if (is_failed && device::load(to_rank + rank_idx) > 0 &&
               kFirstRank + rank_idx < first_wrong)
        first_wrong = kFirstRank + rank_idx;
    }
    if constexpr (kHasReplicas)
      if (const int lost = is_low_latency ? INT_MAX : first_lost_expert();
          lost != INT_MAX && kFirstRank + lost < first_wrong)
        first_wrong = kFirstRank + lost;
    if (device::thread_idx() == 0) {
      device::store(to_rank + buffer_.num_ranks, params_.fixed_rows);
      device::store(to_rank + buffer_.num_ranks + 1, params_.num_topk);
      // Rows are sent in words of 16 bytes.
      for (int i = 2; i < 5; ++i)
        device::store(to_rank + buffer_.num_ranks + i, int32_t{0});
    }
    first_wrong = -device::block_max(-first_wrong, scratch());
    if (first_wrong == INT64_MAX)
      return;
    if (first_wrong < kFirstRank) {
      *status = static_cast<int32_t>(RowStatus::kBadExpert);
      *needed_bytes = static_cast<uint64_t>(first_wrong);
      *available_bytes =
          static_cast<uint64_t>(device::load_constant(params_.choices.asked_idx + first_wrong));
    } else if constexpr (kHasReplicas) {
      const auto expert_idx = static_cast<int>(first_wrong - kFirstRank);
      const layout::ReplicaTable& table = params_.replicas.table;
      const int first = device::load_constant(table.expert_begin + expert_idx);
      *status = static_cast<int32_t>(RowStatus::kFailedRank);
      *needed_bytes = static_cast<uint64_t>(device::load(row()->counts() + expert_idx));
      *available_bytes = static_cast<uint64_t>(device::load_constant(
          table.slot_rank + device::load_constant(table.expert_slots + first)));
    } else {
      const auto rank_idx = static_cast<int>(first_wrong - kFirstRank);
      *status = static_cast<int32_t>(RowStatus::kFailedRank);
      *needed_bytes = static_cast<uint64_t>(device::load(to_rank + rank_idx));
      *available_bytes = static_cast<uint64_t>(rank_idx);
    }
    // The message takes the place of the counts.
    device::sync_block();
  }

  /// The first expert that this rank chose and whose ranks have all failed, of those that this
  /// thread looks at; INT_MAX for none.
  MOE_DEVICE int first_lost_expert() const {
    const layout::ReplicaTable& table = params_.replicas.table;
#pragma unroll 1
    for (int expert_idx = device::thread_idx(); expert_idx < params_.replicas.num_experts;
         expert_idx += device::num_threads()) {
      bool is_lost = device::load(row()->counts() + expert_idx) > 0;
      const int end = device::load_constant(table.expert_begin + expert_idx + 1);
#pragma unroll 1
      for (int i = device::load_constant(table.expert_begin + expert_idx); is_lost && i < end; ++i)
        is_lost = !is_active(
            device::load_constant(table.slot_rank + device::load_constant(table.expert_slots + i)));
      if (is_lost)
        return expert_idx;
    }
    return INT_MAX;
  }

  MOE_DEVICE void copy_message() const {
    int64_t length = 0;
#pragma unroll 1
    for (; params_.message != nullptr && length < Row::kMessageBytes - 1; ++length) {
      const char letter = device::load(params_.message + length);
      if (letter == '\0')
        break;
      device::store(row()->message() + length, letter);
    }
#pragma unroll 1
    for (; length < Row::kMessageBytes; ++length)
      device::store(row()->message() + length, '\0');
  }

  // --- Sets of tokens, which replicas by rank are counted from
  // ------------------------------------

  /// Bytes of the sets of a rank.
  MOE_DEVICE uint64_t set_bytes(int64_t num_tokens, int64_t num_topk) const {
    const layout::TokenSetMap map{
        buffer_.num_ranks, params_.replicas.num_shared, layout::TokenSetMap::words_of(num_tokens)};
    return map.bytes(layout::TokenSetMap::most_planes(num_topk));
  }
  MOE_DEVICE Offer offered_sets() const {
    return params_.sets.offer_at(epoch_,
                                 buffer_.depth,
                                 peers_.own_node(),
                                 set_bytes(params_.choices.num_tokens, params_.choices.num_topk));
  }
  /// Sets that go with the row of this rank, if it is ok.
  MOE_DEVICE SentSets sent_sets() const {
    if constexpr (kHasReplicas && Peers::kSendsSets)
      if (has_sets() && device::load(&row()->status) == static_cast<int32_t>(RowStatus::kOk))
        return {own_sets(epoch_), static_cast<int64_t>(device::load(&row()->weights_offer.bytes))};
    return {};
  }
  MOE_DEVICE std::byte* own_sets(uint64_t epoch) const {
    const TokenSets& sets = params_.sets;
    return sets.base + sets.offset(epoch, buffer_.depth, peers_.own_node());
  }

  /// Called by all blocks.
  MOE_DEVICE void write_sets() const {
    // Memory that a peer reads stays, though this rank has given up waiting for it.
    if (has_sets() && !has_left(buffer_))
      write_token_sets(
          {params_.choices.asked_idx,
           params_.replicas.set_of_expert,
           reinterpret_cast<uint32_t*>(own_sets(device::load(&buffer_.state->epoch) + 1)),
           static_cast<int32_t>(params_.choices.num_tokens),
           params_.choices.num_topk,
           params_.replicas.num_experts,
           params_.replicas.num_shared,
           buffer_.num_ranks});
  }

  /// Says in the counts, and to the host, how many tokens of every rank are bound for each.
  /// @return false when the kernel is to leave.
  MOE_DEVICE bool count_tokens() const {
    bool has_come = true;
#pragma unroll 1
    for (int rank_idx = device::thread_idx(); rank_idx < buffer_.num_ranks;
         rank_idx += device::num_threads()) {
      std::byte* place = nullptr;
      const Row& peer_row = own_.row(epoch_, rank_idx);
      const int32_t num_tokens = is_active(rank_idx) ? device::load(&peer_row.num_tokens) : 0;
      if (num_tokens > 0)
        has_come = has_come && resolve(buffer_,
                                       site(layout::Phase::kOffers),
                                       peers_.set_owner(rank_idx),
                                       load_struct(&peer_row.weights_offer),
                                       &place);
      device::store(params_.replicas.set_places + rank_idx, reinterpret_cast<uint64_t>(place));
      device::store(params_.replicas.set_words + rank_idx, num_set_words(num_tokens));
    }
    if (!all(has_come))
      return false;
    const TokenCounts counts(buffer_, params_.replicas, params_.sets, params_.tables.counts);
    counts.cut_runs();
    counts.count([this](int src_rank, int dst_rank, int32_t num_bound) {
      // The mark of a rank that has failed stays for the host.
      if (params_.host_read == nullptr || !is_active(src_rank) || !is_active(dst_rank))
        return;
      const int64_t stride = Row::stride(buffer_.num_ranks, buffer_.num_experts);
      auto* const row = reinterpret_cast<Row*>(
          offset_ptr(reinterpret_cast<std::byte*>(params_.host_read + 1), src_rank, stride));
      device::store(row->counts() + buffer_.num_experts + dst_rank, num_bound);
    });
    return true;
  }

  // --- Waiting ----------------------------------------------------------------------------------

  MOE_DEVICE WaitSite site(layout::Phase phase) const {
    return WaitSite{phase, params_.arguments.operation, epoch_};
  }

  /// Nobody rewrites a ring entry that a peer may still read.
  MOE_DEVICE bool await_reuse() const {
    const auto depth = static_cast<uint64_t>(buffer_.depth);
    if (epoch_ < buffer_.first_epoch + depth)
      return true;
    const uint64_t former_epoch = epoch_ - depth;
    return await_all(
        layout::Phase::kReuse, former_epoch, buffer_.stall_limit_ns, [&](int rank_idx) {
          return &own_.done(former_epoch, rank_idx).epoch;
        });
  }

  MOE_DEVICE bool await_rows() const {
    return await_all(layout::Phase::kRows, epoch_, buffer_.arrival_limit_ns, [this](int rank_idx) {
      return &own_.row(epoch_, rank_idx).epoch;
    });
  }

  /// Waits for a flag of every active rank.
  template <typename FlagOf>
  MOE_DEVICE bool await_all(layout::Phase phase,
                            uint64_t expected,
                            uint64_t limit_ns,
                            const FlagOf& flag_of) const {
    const int num_rounds = peers_.has_far_ranks() ? 2 : 1;
#pragma unroll 1
    for (int round = 0; round < num_rounds; ++round) {
      const auto wants = [&](int rank_idx) {
        return is_active(rank_idx) && peers_.is_near(rank_idx) == (round == 0);
      };
      if (!block_await_flags(
              buffer_, site(phase), expected, limit_ns, narrow_scratch(), wants, flag_of))
        return false;
    }
    return true;
  }

  // --- Rows of all ranks ------------------------------------------------------------------------

  /// Returns whether the rows that this thread looks at are all right. All equal this rank's
  /// exactly where all equal each other. Not where a rank called without knowing that an operation
  /// before, on which this one may build, was found wrong.
  MOE_DEVICE bool agrees() const {
    bool agrees = true;
    const uint64_t refused_epoch = device::load(&buffer_.state->refused_epoch);
#pragma unroll 1
    for (int rank_idx = device::thread_idx(); rank_idx < buffer_.num_ranks;
         rank_idx += device::num_threads()) {
      if (!is_active(rank_idx))
        continue;
      const Row& peer_row = own_.row(epoch_, rank_idx);
      const int32_t status = device::load(&peer_row.status);
      if (status != static_cast<int32_t>(RowStatus::kOk))
        agrees = false;
      if (device::load(&peer_row.needed_bytes) < refused_epoch)
        agrees = false;
      const layout::OperationArguments arguments = load_struct(&peer_row.arguments);
      if (!arguments.is_same_as(params_.arguments))
        agrees = false;
      if (layout::GradientWord::do_clash(arguments.gradients, params_.arguments.gradients))
        agrees = false;
    }
    return agrees;
  }

  /// Returns whether no two other ranks exclude each other, where each gets along with this one. By
  /// all threads.
  MOE_DEVICE bool agrees_on_gradients() const {
    using layout::GradientWord;
    const int32_t own_word = params_.arguments.gradients;
    // A rank that needs a gradient, or can have none, would itself exclude one of the two.
    if (GradientWord::is_needed(own_word) || !GradientWord::is_enabled(own_word))
      return true;
    bool is_needed = false;
    bool is_apart = false;
#pragma unroll 1
    for (int rank_idx = device::thread_idx(); rank_idx < buffer_.num_ranks;
         rank_idx += device::num_threads()) {
      if (!is_active(rank_idx))
        continue;
      const int32_t word = device::load(&own_.row(epoch_, rank_idx).arguments.gradients);
      is_needed = is_needed || GradientWord::is_needed(word);
      is_apart = is_apart || GradientWord::are_apart(word, own_word);
    }
    return all(!is_needed) || all(!is_apart);
  }

  /// Copies rows to where they stay: their ring entry is written again after the done flags.
  MOE_DEVICE void take_rows(bool is_agreed) const {
    const int num_counts = Row::num_counts(buffer_.num_ranks, buffer_.num_experts);
    if (is_agreed && params_.with_counts != 0) {
      block_copy<int32_t>(
          buffer_.num_ranks * num_counts,
          [&](int i) { return own_.row(epoch_, i / num_counts).counts() + i % num_counts; },
          [&](int i) { return params_.tables.counts + i; },
          [&](int i) { return is_active(i / num_counts); });
      device::sync_block();
    }
    if (params_.host_read == nullptr)
      return;
    // Bytes of a row that may mean something.
    const int64_t stride = Row::stride(buffer_.num_ranks, buffer_.num_experts);
    const int64_t used_bytes =
        is_agreed && params_.with_counts == 0 ? static_cast<int64_t>(sizeof(Row)) : stride;
    const auto num_words = static_cast<int>(used_bytes / sizeof(device::Bytes16));
    auto* const host_rows = reinterpret_cast<std::byte*>(params_.host_read + 1);
    block_copy<device::Bytes16>(
        buffer_.num_ranks * num_words,
        [&](int i) {
          const Row& peer_row = own_.row(epoch_, i / num_words);
          return reinterpret_cast<const device::Bytes16*>(&peer_row) + i % num_words;
        },
        [&](int i) {
          std::byte* const host_row = offset_ptr(host_rows, i / num_words, stride);
          return reinterpret_cast<device::Bytes16*>(host_row) + i % num_words;
        },
        [&](int i) { return is_active(i / num_words); });
  }

  /// A cached dispatch has a matrix already.
  MOE_DEVICE void take_kept() const {
    block_copy<int32_t>(
        buffer_.num_ranks * Row::num_counts(buffer_.num_ranks, buffer_.num_experts),
        [&](int i) { return params_.kept_counts + i; },
        [&](int i) { return params_.tables.counts + i; },
        [](int) { return true; });
    device::sync_block();
    counts_.take_kept();
  }

  // --- Tables -----------------------------------------------------------------------------------

  MOE_DEVICE Offer offer_of(int rank_idx) const {
    return load_struct(&own_.row(epoch_, rank_idx).offer);
  }

  MOE_DEVICE OperationStatus lay_out_windows() {
    const int64_t num_recv_topk = counts_.num_recv_topk();
    const int own_rank = buffer_.rank_idx;
    const auto sends = [this](int src_rank, int dst_rank) {
      return counts_.sends_rows(src_rank, dst_rank);
    };
    bool has_come = true;
    bool is_short = false;
#pragma unroll 1
    for (int rank_idx = device::thread_idx(); rank_idx < buffer_.num_ranks;
         rank_idx += device::num_threads()) {
      Peer* const peer = params_.tables.peers + rank_idx;
      std::byte* rows = nullptr;
      const layout::ReceiveWindow window = window_of(rank_idx, num_recv_topk);
      const auto needed_bytes = static_cast<uint64_t>(window.bytes);
      // Before any wait, during which it would lie in registers.
      store_struct(&peer->window, window);
      if (is_active(rank_idx)) {
        const Offer offer = offer_of(rank_idx);
        if (needed_bytes > offer.bytes) {
          is_short = true;
          if (rank_idx == own_rank && params_.host_read != nullptr)
            show_phase(buffer_, layout::Phase::kGrowing);
        } else if (peers_.moves_rows(rank_idx, sends) ||
                   (rank_idx == own_rank && needed_bytes > 0)) {
          // This rank's own window has padding, whichever ranks send rows.
          has_come =
              has_come && resolve(buffer_, site(layout::Phase::kOffers), rank_idx, offer, &rows);
        }
      }
      device::store(&peer->rows, rows);
      device::store(&peer->is_sent_to, static_cast<int32_t>(sends(own_rank, rank_idx)));
      device::store(&peer->is_received_from, static_cast<int32_t>(sends(rank_idx, own_rank)));
    }
    counts_.fill(params_.tables, num_recv_topk);
    if (!all(has_come))
      return OperationStatus::kLeft;
    return all(!is_short) ? OperationStatus::kOk : OperationStatus::kShort;
  }

  MOE_DEVICE layout::ReceiveWindow window_of(int rank_idx, int64_t num_recv_topk) const {
    const int64_t num_rows = counts_.num_window_rows(rank_idx);
    const auto& arguments = params_.arguments;
    const auto scales = layout::ScaleMap::make(params_.arrangement.layout,
                                               num_rows,
                                               params_.arrangement.rows_per_expert,
                                               arguments.num_scales,
                                               arguments.scale_bytes,
                                               params_.is_column_major != 0);
    return layout::ReceiveWindow::make(params_.arrangement.layout,
                                       num_rows,
                                       arguments.row_bytes,
                                       scales,
                                       arguments.weight_bytes,
                                       num_recv_topk,
                                       params_.with_topk_idx != 0,
                                       params_.arrangement.has_origins);
  }

  /// A combine: rows and weights are pulled from where their owners offer them.
  MOE_DEVICE OperationStatus find_sources() const {
    const int num_columns = Row::num_counts(buffer_.num_ranks, buffer_.num_experts);
    const auto sends = [&](int src_rank, int dst_rank) {
      const int64_t column = buffer_.num_experts + dst_rank;
      return device::load(params_.kept_counts + int64_t{src_rank} * num_columns + column) > 0;
    };
    const WaitSite where = site(layout::Phase::kOffers);
    bool has_come = true;
#pragma unroll 1
    for (int rank_idx = device::thread_idx(); rank_idx < buffer_.num_ranks;
         rank_idx += device::num_threads()) {
      Peer peer{};
      peer.is_sent_to = static_cast<int32_t>(sends(buffer_.rank_idx, rank_idx));
      // One that has failed since the dispatch pulls nothing.
      peer.is_received_from =
          static_cast<int32_t>(is_active(rank_idx) && sends(rank_idx, buffer_.rank_idx));
      const bool has_offers = is_active(rank_idx) && peers_.moves_rows(rank_idx, sends);
      const bool is_asking = params_.adds_for_peers != 0 && peer.is_received_from != 0;
      if ((has_offers || is_asking) && params_.arguments.row_bytes > 0)
        has_come = has_come && resolve(buffer_, where, rank_idx, offer_of(rank_idx), &peer.rows);
      if (has_offers && params_.arguments.weight_bytes > 0) {
        const Offer offer = load_struct(&own_.row(epoch_, rank_idx).weights_offer);
        has_come = has_come && resolve(buffer_, where, rank_idx, offer, &peer.weights);
      }
      store_struct(params_.tables.peers + rank_idx, peer);
    }
    return all(has_come) ? OperationStatus::kOk : OperationStatus::kLeft;
  }

  // --- The end ----------------------------------------------------------------------------------

  MOE_DEVICE void conclude(OperationStatus status) const {
    const bool is_refused =
        status == OperationStatus::kRejected || status == OperationStatus::kOverflow;
    if (params_.is_dispatch != 0 && (is_refused || status == OperationStatus::kLeft))
      clear_counts();
    if (device::thread_idx() == 0) {
      if (is_refused)
        device::store(&buffer_.state->refused_epoch, epoch_);
      device::store(params_.tables.status, static_cast<int32_t>(status));
      device::store(params_.tables.status + 1, num_dropped_);
      device::store(params_.tables.may_move, int32_t{status == OperationStatus::kOk});
    }
    device::sync_block();
    // All ranks end here alike: this rank has read all rows and sends none.
    const bool is_settled =
        is_refused || (status == OperationStatus::kShort && params_.host_read == nullptr);
    if (is_settled)
      peers_.release_done(epoch_);
    peers_.end();
    if (params_.host_read != nullptr && device::thread_idx() == 0)
      give_ticket(params_.host_read, params_.ticket, status);
  }

  /// Kernels of the caller's that look at them do so before anybody can know.
  MOE_DEVICE void clear_counts() const {
    const int num_local = buffer_.num_local_experts;
#pragma unroll 1
    for (int i = device::thread_idx(); i <= num_local; i += device::num_threads()) {
      device::store(params_.tables.expert_offsets + i, int32_t{0});
      if (i < num_local)
        device::store(params_.tables.num_tokens_per_expert + i, int64_t{0});
    }
  }

  const ExchangeParams& params_;
  const Peers& peers_;
  const Buffer& buffer_;
  ExchangeSharedMap map_;
  layout::Workspace own_;
  ChunkSums chunk_sums_;
  CountBlock counts_;
  uint64_t epoch_ = 0;
  int64_t row_bytes_ = 0;
  int32_t num_dropped_ = 0;
};

}  // namespace moe::kernels
