#pragma once

#include <cstdint>

#include "device/primitives.h"
#include "kernels/exchange.h"
#include "kernels/node_peers.h"
#include "kernels/publish.h"
#include "kernels/wait.h"

// Second offers, within one node or across nodes.

namespace moe::kernels {

constexpr size_t kOffersSharedBytes = 32 * sizeof(int32_t);  ///< a word per warp

/// Second offers of one dispatch, by the threads of one block; see ExchangeBlock.
template <typename Peers>
class OffersBlock {
  using SecondOffer = layout::SecondOffer;

 public:
  MOE_DEVICE OffersBlock(const OffersParams& params, const Peers& peers)
      : params_(params),
        peers_(peers),
        buffer_(params.buffer),
        own_(workspace(buffer_, buffer_.rank_idx)),
        epoch_(device::load(params.tables.epoch)) {}

  MOE_DEVICE void run() const { conclude(has_left(buffer_) ? OperationStatus::kLeft : exchange()); }

 private:
  MOE_DEVICE static int32_t* scratch() {
    return reinterpret_cast<int32_t*>(device::shared_memory());
  }
  MOE_DEVICE bool is_short(int rank_idx) const {
    return device::load_constant(params_.short_ranks + rank_idx) != 0;
  }
  MOE_DEVICE SecondOffer second_offer(int rank_idx) const {
    return load_struct(&own_.second_offer(epoch_, rank_idx));
  }

  MOE_DEVICE OperationStatus exchange() const {
    if (params_.is_short != 0)
      publish();
    const auto is_short_rank = [this](int rank_idx) { return is_short(rank_idx); };
    if (!peers_.relay_offers(site(), scratch(), is_short_rank))
      return OperationStatus::kLeft;
    const bool have_come = block_await_flags(
        buffer_,
        site(),
        epoch_,
        buffer_.stall_limit_ns,
        scratch(),
        [this](int rank_idx) { return is_short(rank_idx); },
        [this](int rank_idx) { return &own_.second_offer(epoch_, rank_idx).epoch; });
    if (!have_come)
      return OperationStatus::kLeft;
    copy_to_host();
    return take();
  }

  MOE_DEVICE WaitSite site() const {
    return WaitSite{
        layout::Phase::kOffers, static_cast<int32_t>(layout::Operation::kDispatch), epoch_};
  }

  MOE_DEVICE void publish() const {
    if (device::thread_idx() == 0)
      show_phase(buffer_, layout::Phase::kIdle);
    SecondOffer second{};
    second.offer = params_.own.offer;
    second.needed_bytes = params_.own.needed_bytes;
    second.available_bytes = params_.own.available_bytes;
    peers_.publish_offer(epoch_, second);
  }

  /// Offers as they came; zero where none was due.
  MOE_DEVICE void copy_to_host() const {
    if (params_.host_read == nullptr)
      return;
    auto* const seconds = reinterpret_cast<SecondOffer*>(params_.host_read + 1);
#pragma unroll 1
    for (int rank_idx = device::thread_idx(); rank_idx < buffer_.num_ranks;
         rank_idx += device::num_threads())
      store_struct(seconds + rank_idx, is_short(rank_idx) ? second_offer(rank_idx) : SecondOffer{});
  }

  /// @return kShort when some rank could not obtain what it needs: no row moves then.
  MOE_DEVICE OperationStatus take() const {
    const int num_columns = layout::Row::num_counts(buffer_.num_ranks, buffer_.num_experts);
    const auto sends = [&](int src_rank, int dst_rank) {
      const int64_t column = buffer_.num_experts + dst_rank;
      return device::load(params_.tables.counts + int64_t{src_rank} * num_columns + column) > 0;
    };
    bool has_come = true;
    bool has_room = true;
#pragma unroll 1
    for (int rank_idx = device::thread_idx(); rank_idx < buffer_.num_ranks;
         rank_idx += device::num_threads()) {
      if (!is_short(rank_idx))
        continue;
      Peer* const peer = params_.tables.peers + rank_idx;
      const Offer offer = second_offer(rank_idx).offer;
      if (offer.bytes < static_cast<uint64_t>(device::load(&peer->window.bytes))) {
        has_room = false;
        continue;
      }
      if (!peers_.moves_rows(rank_idx, sends) && rank_idx != buffer_.rank_idx)
        continue;
      std::byte* place = nullptr;
      has_come = has_come && resolve(buffer_, site(), rank_idx, offer, &place);
      device::store(&peer->rows, place);
    }
    if (!device::block_all(has_come, scratch()))
      return OperationStatus::kLeft;
    return device::block_all(has_room, scratch()) ? OperationStatus::kOk : OperationStatus::kShort;
  }

  MOE_DEVICE void conclude(OperationStatus status) const {
    if (device::thread_idx() == 0) {
      device::store(params_.tables.status, static_cast<int32_t>(status));
      device::store(params_.tables.may_move, int32_t{status == OperationStatus::kOk});
    }
    device::sync_block();
    if (status == OperationStatus::kShort)
      peers_.release_done(epoch_);
    peers_.end();
    if (params_.host_read != nullptr && device::thread_idx() == 0) {
      device::store_relaxed<device::Scope::kSystem>(&params_.host_read->epoch, epoch_);
      give_ticket(params_.host_read, params_.ticket, status);
    }
  }

  const OffersParams& params_;
  const Peers& peers_;
  const Buffer& buffer_;
  layout::Workspace own_;
  uint64_t epoch_;
};

}  // namespace moe::kernels
