#include "host/dispatch.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "host/dispatch_rules.h"
#include "host/exchange.h"
#include "host/internode_dispatch.h"
#include "host/row_writer.h"

namespace moe::host {

namespace {

using layout::ReceiveWindow;
using layout::RowLayout;
using layout::RowStatus;

/// One dispatch between its rows and its end.
class DispatchOperation {
 public:
  DispatchOperation(Endpoint& endpoint, const DispatchParams& params, Exchange& exchange)
      : endpoint_(endpoint),
        params_(params),
        exchange_(exchange),
        num_ranks_(endpoint.num_ranks()),
        arrangement_(params.plan
                         ? params.plan->arrangement
                         : arrangement_of(endpoint, params.layout, params.expert_alignment)),
        with_topk_idx_(params.with_topk_idx(arrangement_)),
        bases_(static_cast<size_t>(num_ranks_)) {}

  DispatchOutcome run() {
    if (params_.plan == nullptr)
      exchange_rows();
    else
      exchange_cached_rows();
    exchange_.enter("data");
    resolve_bases();
    write_rows();
    exchange_.enter("done");
    for (int src_rank = 0; src_rank < num_ranks_; ++src_rank)
      if (layout::sends_rows(plan_->counts, src_rank, endpoint_.rank_idx()))
        exchange_.await_done(src_rank);
    return outcome();
  }

 private:
  layout::OperationArguments arguments() const { return dispatch_arguments(params_, arrangement_); }
  bool is_low_latency() const { return arrangement_.layout == RowLayout::kLowLatency; }

  void lay_out(const layout::CountMatrix& counts) {
    windows_ = lay_out_windows(counts, endpoint_.placement(), arrangement_, params_);
    total_rows_ = 0;
    for (int rank_idx = 0; rank_idx < num_ranks_; ++rank_idx)
      total_rows_ += layout::num_window_rows(counts, endpoint_.placement(), arrangement_, rank_idx);
  }

  uint64_t needed(int rank_idx) const {
    return static_cast<uint64_t>(windows_[static_cast<size_t>(rank_idx)].bytes);
  }

  void exchange_rows() {
    const int num_experts = endpoint_.config().num_experts;
    std::vector<int32_t> counts(
        static_cast<size_t>(layout::Row::num_counts(num_ranks_, num_experts)));
    const int64_t bad_idx = layout::count_choices(params_.topk_idx,
                                                  params_.num_tokens,
                                                  params_.num_topk,
                                                  endpoint_.placement(),
                                                  counts.data());
    if (bad_idx >= 0)
      reject_expert(bad_idx);
    int32_t* const to_rank = counts.data() + num_experts;
    if (is_low_latency())
      mask_ranks(params_.masked_ranks, endpoint_.group(), to_rank);
    else
      reject_failed_ranks(find_failed_ranks(to_rank, endpoint_.group()));
    to_rank[num_ranks_] = static_cast<int32_t>(params_.fixed_rows);
    to_rank[num_ranks_ + 1] = static_cast<int32_t>(params_.num_topk);
    if (is_low_latency())
      window_ = fixed_window();
    else
      window_ = endpoint_.guess_window();
    if (window_)
      exchange_.offer(window_);
    RowMessage message;
    message.arguments = arguments();
    message.num_tokens = params_.num_tokens;
    message.counts = counts.data();
    if (window_)
      message.offer = window_->offer();
    exchange_.enter("rows");
    exchange_.publish(message);
    Rows rows = exchange_.collect(true);
    outcome_.gradients = unite_gradients(rows, endpoint_.group());
    const int own_rank = endpoint_.rank_idx();
    outcome_.num_required_rows =
        layout::num_required_rows(rows.counts, endpoint_.placement(), arrangement_, own_rank);
    outcome_.num_dropped_per_expert =
        choices_of_own_experts(rows.counts, endpoint_.placement(), own_rank);
    if (!is_low_latency())
      check_overflows(rows.counts);
    layout::CountMatrix kept = layout::keep_rows(
        std::move(rows.counts), endpoint_.placement(), arrangement_, params_.capacity);
    // What a masked rank asks for takes no place of an expert.
    if (is_low_latency())
      check_overflows(kept);
    lay_out(kept);
    plan_ = std::make_shared<Plan>(Plan::make(arrangement_,
                                              std::move(kept),
                                              endpoint_.placement(),
                                              own_rank,
                                              params_.topk_idx,
                                              params_.num_tokens,
                                              params_.num_topk));
    const auto& kept_choices = plan_->received.num_tokens_per_expert;
    for (size_t e = 0; e < kept_choices.size(); ++e)
      outcome_.num_dropped_per_expert[e] -= kept_choices[e];
    offers_.reserve(static_cast<size_t>(num_ranks_));
    for (const auto& header : rows.headers)
      offers_.push_back(header.offer);
    exchange_second_offers();
    endpoint_.remember_need(needed(own_rank));
  }

  /// A low-latency window does not depend on counts: it is there before the rows are.
  std::shared_ptr<Window> fixed_window() {
    if (params_.window)
      return params_.window;
    try {
      return exchange_.allocate(
          static_cast<uint64_t>(low_latency_window(endpoint_, params_).bytes));
    } catch (const CapacityError& error) {
      exchange_.reject(arguments(), error);
    }
  }

  /// Every rank finds the same in the same matrix, before any row moves.
  void check_overflows(const layout::CountMatrix& asked) {
    if (const std::exception_ptr error =
            find_overflow(asked, endpoint_.placement(), arrangement_, params_)) {
      exchange_.settle();
      std::rethrow_exception(error);
    }
  }

  /// A rank whose offer is too small obtains memory; everybody sees who that is in the same matrix.
  void exchange_second_offers() {
    const std::vector<int> short_ranks = find_short_ranks(windows_, offers_, endpoint_.group());
    if (short_ranks.empty())
      return;
    exchange_.expect_second_offers(short_ranks);
    if (std::find(short_ranks.begin(), short_ranks.end(), endpoint_.rank_idx()) !=
        short_ranks.end())
      make_second_offer();
    exchange_.enter("offers");
    std::vector<layout::SecondOffer> seconds;
    for (const int rank_idx : short_ranks) {
      seconds.push_back(exchange_.await_second_offer(rank_idx));
      offers_[static_cast<size_t>(rank_idx)] = seconds.back().offer;
    }
    if (const std::exception_ptr error = find_shortage(
            short_ranks, seconds, windows_, plan_->counts, endpoint_.placement(), arrangement_)) {
      exchange_.settle();
      throw_shortage(error);
    }
  }

  /// The rank that is short also says what keeps it from more, which the offer has no room for.
  [[noreturn]] void throw_shortage(const std::exception_ptr& error) const {
    try {
      std::rethrow_exception(error);
    } catch (CapacityError& shortage) {
      if (shortage_cause_.empty())
        throw;
      CapacityError full(concat(shortage.what(), "; here: ", shortage_cause_),
                         shortage.needed_bytes,
                         shortage.available_bytes);
      full.ranks = shortage.ranks;
      full.needed_rows = shortage.needed_rows;
      throw full;
    }
  }

  void make_second_offer() {
    const uint64_t bytes = needed(endpoint_.rank_idx());
    Offer offer;
    uint64_t available_bytes = 0;
    // Nobody has learned of the first offer's use: with it too small, no rank writes there.
    window_ = nullptr;
    exchange_.withdraw_offers();
    try {
      window_ = exchange_.allocate(bytes);
      exchange_.offer(window_);
      offer = window_->offer();
    } catch (const CapacityError& error) {
      available_bytes = error.available_bytes;
      shortage_cause_ = error.what();
    }
    exchange_.publish_second_offer(offer, bytes, available_bytes);
  }

  void exchange_cached_rows() {
    plan_ = std::static_pointer_cast<const Plan>(params_.plan);
    outcome_.num_required_rows = layout::num_required_rows(
        plan_->counts, endpoint_.placement(), arrangement_, endpoint_.rank_idx());
    outcome_.num_dropped_per_expert.resize(plan_->received.num_tokens_per_expert.size());
    lay_out(plan_->counts);
    reject_failed_ranks(find_failed_ranks(*plan_, endpoint_.group()));
    try {
      window_ = params_.window ? params_.window : exchange_.allocate(needed(endpoint_.rank_idx()));
    } catch (const CapacityError& error) {
      exchange_.reject(arguments(), error);
    }
    exchange_.offer(window_);
    RowMessage message;
    message.arguments = arguments();
    message.num_tokens = params_.num_tokens;
    message.offer = window_->offer();
    exchange_.enter("rows");
    exchange_.publish(message);
    const Rows rows = exchange_.collect(false);
    outcome_.gradients = unite_gradients(rows, endpoint_.group());
    for (const auto& header : rows.headers)
      offers_.push_back(header.offer);
  }

  [[noreturn]] void reject_expert(int64_t bad_idx) {
    exchange_.reject(
        arguments(),
        RowStatus::kInvalidArgument,
        describe_bad_expert(
            bad_idx, params_.num_topk, params_.topk_idx[bad_idx], endpoint_.config().num_experts));
  }

  void reject_failed_ranks(const std::string& problem) {
    if (!problem.empty())
      exchange_.reject(arguments(), RowStatus::kInvalidArgument, problem);
  }

  /// Of ranks of this node that this rank writes to, its own rows or those it relays.
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
    const StoreMode mode = endpoint_.store_mode(total_rows_ * params_.row_bytes);
    if (exchange_.relay() != nullptr) {
      InternodeDispatch(endpoint_, params_, *plan_, windows_, bases_, with_topk_idx_, exchange_)
          .run(mode, [this] { end_rows(); });
      return;
    }
    RowWriter writer(
        endpoint_, params_, SlotTable::of(*plan_), windows_, bases_, with_topk_idx_, exchange_);
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
    for (size_t e = 0; e < received.num_tokens_per_expert.size(); ++e) {
      const int64_t first = received.expert_offsets[e] + received.num_tokens_per_expert[e];
      zero_rows(first, received.expert_offsets[e + 1] - first);
    }
    zero_rows(received.expert_offsets.back(), received.num_rows - received.expert_offsets.back());
  }

  void zero_rows(int64_t first, int64_t num_rows) {
    if (num_rows <= 0)
      return;
    const auto& window = windows_[static_cast<size_t>(endpoint_.rank_idx())];
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
    const auto& window = windows_[static_cast<size_t>(endpoint_.rank_idx())];
    DispatchOutcome outcome = std::move(outcome_);
    outcome.plan = plan_;
    outcome.waited_ns = exchange_.take_waited_ns();
    outcome.waited_ns.resize(static_cast<size_t>(num_ranks_));
    exchange_.withdraw_offers();
    if (!window_)
      window_ = endpoint_.group().memory().allocate(0);
    if (!is_low_latency())
      window_->shrink(needed(endpoint_.rank_idx()));
    outcome.owner = copy_out_window(endpoint_,
                                    std::move(window_),
                                    needed(endpoint_.rank_idx()),
                                    is_low_latency() ? CopyOut::kNever : params_.copy_out,
                                    &outcome.rows);
    outcome.scale_map = window.scales;
    if (params_.num_scales > 0)
      outcome.scales = outcome.rows + window.scales_offset;
    if (params_.weight_bytes > 0)
      outcome.weights = outcome.rows + window.weights_offset;
    outcome.has_topk_idx = with_topk_idx_;
    if (with_topk_idx_)
      outcome.topk_idx = outcome.rows + window.topk_idx_offset;
    return outcome;
  }

  Endpoint& endpoint_;
  const DispatchParams& params_;
  Exchange& exchange_;
  int num_ranks_;
  layout::Arrangement arrangement_;
  bool with_topk_idx_;
  DispatchOutcome outcome_;
  std::shared_ptr<const Plan> plan_;
  std::string shortage_cause_;  ///< where this rank could not make its second offer
  std::shared_ptr<Window> window_;
  std::vector<Offer> offers_;
  std::vector<std::byte*> bases_;
  std::vector<ReceiveWindow> windows_;
  int64_t total_rows_ = 0;
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
  const StoreMode store_mode = endpoint.store_mode(static_cast<int64_t>(bytes));
  endpoint.kernels().copy(window->data(), copy, static_cast<int64_t>(bytes), store_mode);
  endpoint.kernels().store_fence();
  *data = copy;
  return owner;
}

DispatchOutcome dispatch(Endpoint& endpoint,
                         const DispatchParams& params,
                         const InterruptCheck& interrupt_check) {
  const auto operation =
      params.plan ? layout::Operation::kCachedDispatch : layout::Operation::kDispatch;
  return run_operation<Exchange>(endpoint, operation, interrupt_check, [&](Exchange& exchange) {
    return DispatchOperation(endpoint, params, exchange).run();
  });
}

}  // namespace moe::host
