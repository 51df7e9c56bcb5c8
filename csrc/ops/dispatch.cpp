#include "ops/dispatch.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "layout/token_sets.h"
#include "ops/cpu_engine.h"
#include "ops/dispatch_rules.h"
#include "ops/dispatch_steps.h"
#include "ops/internode_dispatch.h"
#include "ops/row_writer.h"

namespace moe::ops {

namespace {

using layout::ReceiveWindow;

/// One dispatch whose rows the CPU moves.
class DispatchOperation : public DispatchSteps<CpuEngine, DispatchOperation> {
 public:
  DispatchOperation(Endpoint& endpoint, const DispatchParams& params, Exchange& exchange)
      : DispatchSteps(endpoint, params, exchange),
        with_topk_idx_(params.with_topk_idx(arrangement_)),
        bases_(static_cast<size_t>(num_ranks_)) {}

 private:
  friend DispatchSteps;

  void begin() {}

  void count_choices() {
    const int num_experts = endpoint_.config().num_experts;
    counts_.resize(static_cast<size_t>(layout::Row::num_counts(num_ranks_, num_experts)));
    const int64_t bad_idx = layout::count_choices(params_.topk_idx,
                                                  params_.num_tokens,
                                                  params_.num_topk,
                                                  params_.replicas.get(),
                                                  endpoint_.placement(),
                                                  counts_.data(),
                                                  offers_sets() ? &sets_ : nullptr);
    if (bad_idx >= 0)
      reject_if(layout::describe_bad_expert(
          bad_idx,
          params_.num_topk,
          params_.topk_idx[bad_idx],
          layout::num_ids(params_.replicas.get(), endpoint_.placement())));
    int32_t* const to_rank = counts_.data() + num_experts;
    if (is_low_latency() || params_.replicas != nullptr)
      mask_ranks(params_.masked_ranks, endpoint_.group(), to_rank);
    if (!is_low_latency())
      reject_if(
          params_.replicas == nullptr
              ? find_failed_ranks(to_rank, endpoint_.group())
              : find_lost_experts(
                    counts_.data(), *params_.replicas, endpoint_.placement(), endpoint_.group()));
    to_rank[num_ranks_] = static_cast<int32_t>(params_.fixed_rows);
    to_rank[num_ranks_ + 1] = static_cast<int32_t>(params_.num_topk);
    if (!sets_.empty())
      offer_sets();
  }

  bool offers_sets() const { return params_.replicas != nullptr && arrangement_.is_by_rank(); }

  void offer_sets() {
    const uint64_t bytes = sets_.size() * sizeof(uint64_t);
    try {
      offered_sets_ = exchange_.allocate(bytes);
    } catch (const CapacityError& error) {
      exchange_.reject(arguments(), error);
    }
    sync::write_shared(offered_sets_->data(), sets_.data(), bytes);
  }

  void count_tokens(Rows* rows) { exchange_.count_tokens(sets_, *params_.replicas, rows); }

  void take_plan() {}

  void publish(const Offer& offer) {
    RowMessage message;
    message.arguments = arguments();
    message.num_tokens = params_.num_tokens;
    message.counts = counts_.empty() ? nullptr : counts_.data();
    message.offer = offer;
    if (exchange_.relay() != nullptr && offers_sets())
      exchange_.relay()->check_sets_by(*params_.replicas);
    if (offered_sets_ != nullptr) {
      message.weights_offer = offered_sets_->offer();
      message.sets = offered_sets_->data();
    }
    exchange_.publish(message);
    if (offered_sets_ != nullptr)
      endpoint_.keep_readable(exchange_.epoch(), std::move(offered_sets_));
  }

  std::shared_ptr<const Plan> make_plan(JudgedCounts judged) {
    return std::make_shared<Plan>(Plan::make(arrangement_,
                                             std::move(judged.kept),
                                             std::move(judged.asked),
                                             endpoint_.placement(),
                                             endpoint_.rank_idx(),
                                             take_choices(),
                                             params_.num_tokens,
                                             params_.num_topk));
  }

  std::vector<layout::SecondOffer> exchange_offers(const std::vector<int>& short_ranks,
                                                   const std::optional<layout::SecondOffer>& own) {
    exchange_.expect_second_offers(short_ranks);
    if (own)
      exchange_.publish_second_offer(own->offer, own->needed_bytes, own->available_bytes);
    std::vector<layout::SecondOffer> seconds;
    for (const int rank_idx : short_ranks)
      seconds.push_back(exchange_.await_second_offer(rank_idx));
    return seconds;
  }

  void settle_overflow(const std::exception_ptr& /*error*/) { exchange_.settle(); }
  void settle_shortage() { exchange_.settle(); }

  void move(const Rows& /*rows*/) {
    exchange_.enter("data");
    resolve_bases();
    write_rows();
    exchange_.enter("done");
    for (int src_rank = 0; src_rank < num_ranks_; ++src_rank)
      if (layout::sends_rows(plan_->counts, src_rank, endpoint_.rank_idx()))
        exchange_.await_done(src_rank);
  }

  /// Resolves addresses on ranks of this node that this rank writes to, for own or relayed rows.
  void resolve_bases() {
    const auto& counts = plan_->counts;
    for (int dst_rank = 0; dst_rank < num_ranks_; ++dst_rank) {
      bool is_written = layout::sends_rows(counts, endpoint_.rank_idx(), dst_rank);
      if (const Relay* const relay = exchange_.relay()) {
        if (!endpoint_.group().is_local(dst_rank))
          continue;
        for (const int node_idx : relay->nodes())
          is_written =
              is_written || layout::sends_rows(counts, relay->rail_rank(node_idx), dst_rank);
      }
      if (is_written)
        bases_[static_cast<size_t>(dst_rank)] =
            exchange_.resolve(dst_rank, offers_[static_cast<size_t>(dst_rank)]);
    }
  }

  void write_rows() {
    int64_t rows_bytes = 0;
    for (const ReceiveWindow& window : windows_)
      rows_bytes += window.scales_offset;  // where its rows end
    const cpu::StoreMode mode = endpoint_.store_mode(rows_bytes);
    const RowTargets targets{windows_, bases_, with_topk_idx_};
    if (exchange_.relay() != nullptr) {
      InternodeDispatch(endpoint_, params_, *plan_, targets, exchange_).run(mode, [this] {
        end_rows();
      });
      return;
    }
    RowWriter writer(endpoint_, params_, SlotTable::of(*plan_), targets, exchange_);
    writer.write(0, params_.num_tokens, mode);
    end_rows();
  }

  void end_rows() {
    exchange_.release_done();
    zero_padding();
  }

  /// Padding belongs to the receiver: no sender writes there.
  void zero_padding() {
    if (is_low_latency())
      return;  // what is not filled is undefined
    const auto& received = plan_->received;
    if (arrangement_.is_by_rank()) {
      const int64_t num_filled = layout::num_required_rows(
          plan_->counts, endpoint_.placement(), arrangement_, endpoint_.rank_idx());
      zero_rows(num_filled, received.num_rows - num_filled);
      return;
    }
    const bool is_padded = arrangement_.expert_alignment != 1;
    for (size_t e = 0; is_padded && e < received.num_tokens_per_expert.size(); ++e) {
      const int64_t first = received.expert_offsets[e] + received.num_tokens_per_expert[e];
      zero_rows(first, received.expert_offsets[e + 1] - first);
    }
    zero_rows(received.expert_offsets.back(), received.num_rows - received.expert_offsets.back());
  }

  void zero_rows(int64_t first, int64_t num_rows) {
    if (num_rows <= 0)
      return;
    const ReceiveWindow& window = own_layout();
    std::byte* const base = window_->data();
    const auto clear = [&](int64_t offset, int64_t bytes, int value) {
      sync::fill_shared(base + offset, value, static_cast<size_t>(bytes));
    };
    endpoint_.kernels().zero(offset_ptr(base, first, params_.row_bytes),
                             num_rows * params_.row_bytes,
                             endpoint_.store_mode(num_rows * params_.row_bytes));
    endpoint_.kernels().store_fence();
    const auto& scales = window.scales;
    const int64_t scales_at = window.scales_offset + scales.place(first);
    if (!scales.is_column_major)
      clear(scales_at, num_rows * scales.num_scales * scales.scale_bytes, 0);
    else
      for (int64_t block = 0; block < scales.num_scales; ++block)
        clear(scales_at + block * scales.step(), num_rows * scales.scale_bytes, 0);
    const int64_t per_row = arrangement_.is_by_rank() ? plan_->num_recv_topk : 1;
    clear(window.weights_offset + first * per_row * params_.weight_bytes,
          num_rows * per_row * params_.weight_bytes,
          0);
    if (with_topk_idx_)
      clear(window.topk_idx_offset + first * per_row * 8, num_rows * per_row * 8, -1);
  }

  DispatchOutcome outcome() {
    outcome_.waited_ns = exchange_.take_waited_ns();
    outcome_.waited_ns.resize(static_cast<size_t>(num_ranks_));
    exchange_.withdraw_offers();
    if (!window_)
      window_ = endpoint_.memory().allocate(0);
    if (!is_low_latency())
      window_->shrink(needed(endpoint_.rank_idx()));
    outcome_.owner = copy_out_window(endpoint_,
                                     std::move(window_),
                                     needed(endpoint_.rank_idx()),
                                     is_low_latency() ? CopyOut::kNever : params_.copy_out,
                                     &outcome_.rows);
    outcome_.plan = plan_;
    point_into_window(params_, arrangement_, own_layout(), &outcome_);
    return std::move(outcome_);
  }

  bool with_topk_idx_;
  std::vector<int32_t> counts_;  ///< this rank's row of the count matrix, uncached
  std::vector<std::byte*> bases_;
  std::vector<uint64_t> sets_;            ///< by rank with replicas, see layout::TokenSetMap
  std::shared_ptr<Window> offered_sets_;  ///< until they are published
};

}  // namespace

std::shared_ptr<void> copy_out_window(Endpoint& endpoint,
                                      std::shared_ptr<Window> window,
                                      uint64_t bytes,
                                      CopyOut mode,
                                      std::byte** data) {
  if (!is_copied_out(endpoint, bytes, mode)) {
    *data = window->data();
    return window;
  }
  constexpr size_t kAlignment = 64;
  auto* const copy = static_cast<std::byte*>(
      std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment));
  if (copy == nullptr)
    throw std::bad_alloc();
  std::shared_ptr<void> owner(copy, [](void* memory) { std::free(memory); });
  const cpu::StoreMode store_mode = endpoint.store_mode(static_cast<int64_t>(bytes));
  endpoint.kernels().copy(window->data(), copy, static_cast<int64_t>(bytes), store_mode);
  endpoint.kernels().store_fence();
  *data = copy;
  return owner;
}

void point_into_window(const DispatchParams& params,
                       const layout::Arrangement& arrangement,
                       const layout::ReceiveWindow& window,
                       DispatchOutcome* outcome) {
  outcome->scale_map = window.scales;
  if (params.num_scales > 0)
    outcome->scales = outcome->rows + window.scales_offset;
  if (params.weight_bytes > 0)
    outcome->weights = outcome->rows + window.weights_offset;
  outcome->has_topk_idx = params.with_topk_idx(arrangement);
  if (outcome->has_topk_idx)
    outcome->topk_idx = outcome->rows + window.topk_idx_offset;
}

DispatchOutcome dispatch(Endpoint& endpoint,
                         const DispatchParams& params,
                         const group::InterruptCheck& interrupt_check) {
  const auto operation =
      params.plan ? layout::Operation::kCachedDispatch : layout::Operation::kDispatch;
  return run_operation<Exchange>(endpoint, operation, interrupt_check, [&](Exchange& exchange) {
    return DispatchOperation(endpoint, params, exchange).run();
  });
}

}  // namespace moe::ops
