#include "device/primitives.h"
#include "kernels/finish.h"
#include "kernels/publish.h"
#include "kernels/wait.h"

namespace moe::kernels {

namespace {

using layout::SecondOffer;

/// Second offers of one dispatch, by the threads of one block.
class OffersBlock {
 public:
  MOE_DEVICE explicit OffersBlock(const OffersParams& params)
      : params_(params),
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
    const bool have_come = block_await_flags(
        buffer_,
        site(),
        epoch_,
        buffer_.stall_limit_ns,
        scratch(),
        [this](int rank_idx) { return is_short(rank_idx) && !MOE_MUTANT(no_wait_for_offers); },
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
    for (int i = device::thread_idx(); i < buffer_.num_ranks; i += device::num_threads()) {
      const int peer_rank = (buffer_.rank_idx + 1 + i) % buffer_.num_ranks;
      if (device::load_constant(buffer_.is_active + peer_rank) == 0)
        continue;
      SecondOffer& second = workspace(buffer_, peer_rank).second_offer(epoch_, buffer_.rank_idx);
      if (MOE_MUTANT(offer_flag_before_body))
        raise_flag(&second.epoch, epoch_);
      store_struct(&second.offer, params_.own.offer);
      device::store(&second.needed_bytes, params_.own.needed_bytes);
      device::store(&second.available_bytes, params_.own.available_bytes);
      raise_flag(&second.epoch, epoch_);
    }
  }

  /// Offers as they came; zero where none was due.
  MOE_DEVICE void copy_to_host() const {
    if (params_.host_read == nullptr)
      return;
    auto* const seconds = reinterpret_cast<SecondOffer*>(params_.host_read + 1);
    for (int rank_idx = device::thread_idx(); rank_idx < buffer_.num_ranks;
         rank_idx += device::num_threads())
      store_struct(seconds + rank_idx, is_short(rank_idx) ? second_offer(rank_idx) : SecondOffer{});
  }

  /// @return kShort when some rank could not obtain what it needs: no row moves then.
  MOE_DEVICE OperationStatus take() const {
    bool has_come = true;
    bool has_room = true;
    for (int rank_idx = device::thread_idx(); rank_idx < buffer_.num_ranks;
         rank_idx += device::num_threads()) {
      if (!is_short(rank_idx))
        continue;
      Peer* const peer = params_.tables.peers + rank_idx;
      const Offer offer = second_offer(rank_idx).offer;
      if (offer.bytes < static_cast<uint64_t>(device::load(&peer->window.bytes))) {
        has_room = has_room && MOE_MUTANT(failed_offer_ignored);
        continue;
      }
      if (device::load(&peer->is_sent_to) == 0 && rank_idx != buffer_.rank_idx)
        continue;
      std::byte* place = nullptr;
      has_come = has_come && resolve(buffer_, site(), rank_idx, offer, &place);
      if (!MOE_MUTANT(second_offer_not_taken))
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
    if (status == OperationStatus::kShort && !MOE_MUTANT(no_done_without_rows))
      release_done(buffer_, epoch_);
    if (params_.host_read != nullptr && device::thread_idx() == 0)
      give_ticket(params_.host_read, params_.ticket, epoch_, status);
  }

  const OffersParams& params_;
  const Buffer& buffer_;
  layout::Workspace own_;
  uint64_t epoch_;
};

MOE_KERNEL void exchange_offers(OffersParams params) {
  OffersBlock(params).run();
}

}  // namespace

void launch_offers(const device::Launch& launch, const OffersParams& params) {
  constexpr size_t kMaxWarps = 32;
  device::Launch shape = launch;
  shape.num_blocks = 1;
  shape.shared_bytes = kMaxWarps * sizeof(int32_t);
  device::launch(exchange_offers, shape, params);
}

}  // namespace moe::kernels
