#include "host/dispatch.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "host/exchange.h"
#include "host/row_writer.h"

namespace moe::host {

namespace {

using layout::ReceiveWindow;
using layout::RowLayout;
using layout::RowStatus;

ReceiveWindow window_of(const layout::Arrangement& arrangement,
                        const DispatchParams& params,
                        int64_t num_rows,
                        int64_t num_recv_topk,
                        bool with_topk_idx) {
  const auto scales = layout::ScaleMap::make(arrangement.layout,
                                             num_rows,
                                             arrangement.rows_per_expert,
                                             params.num_scales,
                                             params.scale_bytes,
                                             params.is_column_major());
  return ReceiveWindow::make(arrangement.layout,
                             num_rows,
                             params.row_bytes,
                             scales,
                             params.weight_bytes,
                             num_recv_topk,
                             with_topk_idx);
}

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
        with_topk_idx_(params.plan == nullptr && arrangement_.is_by_rank()),
        bases_(static_cast<size_t>(num_ranks_)),
        windows_(static_cast<size_t>(num_ranks_)) {}

  DispatchOutcome run() {
    if (params_.plan == nullptr)
      exchange_rows();
    else
      exchange_cached_rows();
    exchange_.enter("data");
    resolve_bases();
    write_rows();
    exchange_.release_done();
    zero_padding();
    exchange_.enter("done");
    for (int src_rank = 0; src_rank < num_ranks_; ++src_rank)
      if (layout::sends_rows(plan_->counts, src_rank, endpoint_.rank_idx()))
        exchange_.await_done(src_rank);
    return outcome();
  }

 private:
  layout::OperationArguments arguments() const {
    layout::OperationArguments arguments;
    arguments.operation = static_cast<int32_t>(params_.plan ? layout::Operation::kCachedDispatch
                                                            : layout::Operation::kDispatch);
    arguments.layout = static_cast<int32_t>(arrangement_.layout);
    arguments.expert_alignment = static_cast<int32_t>(arrangement_.expert_alignment);
    arguments.dtype = params_.dtype;
    arguments.row_bytes = params_.row_bytes;
    arguments.weight_bytes = params_.weight_bytes;
    arguments.quantization = params_.quantization_code;
    arguments.num_scales = static_cast<int32_t>(params_.num_scales);
    arguments.scale_bytes = params_.scale_bytes;
    arguments.on_overflow = static_cast<int32_t>(params_.capacity.on_overflow);
    arguments.expert_capacity = params_.capacity.expert_capacity;
    arguments.plan_hash = params_.plan ? params_.plan->hash : 0;
    return arguments;
  }

  bool is_low_latency() const { return arrangement_.layout == RowLayout::kLowLatency; }

  /// Fills windows_ from the count matrix.
  void lay_out_windows(const layout::CountMatrix& counts) {
    total_rows_ = 0;
    const int64_t num_recv_topk = counts.num_recv_topk();
    for (int rank_idx = 0; rank_idx < num_ranks_; ++rank_idx) {
      const int64_t num_rows =
          layout::num_window_rows(counts, endpoint_.placement(), arrangement_, rank_idx);
      total_rows_ += num_rows;
      windows_[static_cast<size_t>(rank_idx)] =
          window_of(arrangement_, params_, num_rows, num_recv_topk, with_topk_idx_);
    }
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
      mask_ranks(to_rank);
    else
      reject_failed_ranks(to_rank);
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
    const int own_rank = endpoint_.rank_idx();
    outcome_.num_required_rows =
        layout::num_required_rows(rows.counts, endpoint_.placement(), arrangement_, own_rank);
    outcome_.num_dropped_per_expert = choices_of_own_experts(rows.counts);
    if (!is_low_latency())
      check_overflows(rows.counts);
    layout::CountMatrix kept = layout::keep_rows(
        std::move(rows.counts), endpoint_.placement(), arrangement_, params_.capacity);
    // What a masked rank asks for takes no place of an expert.
    if (is_low_latency())
      check_overflows(kept);
    lay_out_windows(kept);
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

  std::vector<int64_t> choices_of_own_experts(const layout::CountMatrix& counts) const {
    std::vector<int64_t> choices;
    for (const int32_t expert_idx :
         endpoint_.placement().local_experts[static_cast<size_t>(endpoint_.rank_idx())])
      choices.push_back(counts.to_expert(expert_idx));
    return choices;
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
    if (!is_low_latency() && params_.capacity.on_overflow != layout::OnOverflow::kRaise)
      return;
    const auto overflows =
        layout::find_overflows(asked, endpoint_.placement(), arrangement_, params_.capacity);
    if (overflows.empty())
      return;
    exchange_.settle();
    std::string message;
    CapacityError error("", 0, 0);
    for (const auto& overflow : overflows) {
      message += message.empty() ? "" : "; ";
      if (overflow.expert_idx >= 0)
        message += concat("expert ", overflow.expert_idx, " on rank ", overflow.rank_idx);
      else
        message += concat("rank ", overflow.rank_idx);
      message += concat(" would receive ",
                        overflow.needed_rows,
                        " rows, it has room for ",
                        overflow.available_rows);
      if (error.ranks.empty() || error.ranks.back() != overflow.rank_idx)
        error.ranks.push_back(overflow.rank_idx);
      if (error.needed_bytes != 0)
        continue;
      error.needed_bytes = static_cast<uint64_t>(overflow.needed_rows * params_.row_bytes);
      error.available_bytes = static_cast<uint64_t>(overflow.available_rows * params_.row_bytes);
    }
    if (is_low_latency())
      throw InvalidArgument(message);
    CapacityError full(message, error.needed_bytes, error.available_bytes);
    full.ranks = error.ranks;
    full.needed_rows =
        layout::received_rows(asked, endpoint_.placement(), arrangement_, full.ranks.front())
            .num_tokens_per_expert;
    throw full;
  }

  /// Who is masked is agreed on in the count matrix; who has failed is masked by everybody.
  void mask_ranks(int32_t* to_rank) const {
    for (const int rank_idx : params_.masked_ranks)
      to_rank[rank_idx] = layout::CountMatrix::kMasked;
    for (int rank_idx = 0; rank_idx < num_ranks_; ++rank_idx)
      if (!endpoint_.group().is_active(rank_idx))
        to_rank[rank_idx] = layout::CountMatrix::kMasked;
  }

  /// A rank whose offer is too small obtains memory; everybody sees who that is in the same matrix.
  void exchange_second_offers() {
    const int own_rank = endpoint_.rank_idx();
    std::vector<int> short_ranks;
    for (int rank_idx = 0; rank_idx < num_ranks_; ++rank_idx)
      if (endpoint_.group().is_active(rank_idx) &&
          needed(rank_idx) > offers_[static_cast<size_t>(rank_idx)].bytes)
        short_ranks.push_back(rank_idx);
    if (!short_ranks.empty() && needed(own_rank) > offers_[static_cast<size_t>(own_rank)].bytes)
      make_second_offer();
    if (!short_ranks.empty())
      exchange_.enter("offers");
    CapacityError error("", 0, 0);
    std::string message;
    for (const int rank_idx : short_ranks) {
      const layout::SecondOffer& second = exchange_.await_second_offer(rank_idx);
      offers_[static_cast<size_t>(rank_idx)] = second.offer;
      if (second.offer.bytes >= needed(rank_idx))
        continue;
      error.ranks.push_back(rank_idx);
      error.needed_bytes = second.needed_bytes;
      error.available_bytes = second.available_bytes;
      message += concat(message.empty() ? "" : "; ",
                        "rank ",
                        rank_idx,
                        " needs ",
                        second.needed_bytes,
                        " bytes for the rows it would receive, ",
                        second.available_bytes,
                        " can be had");
    }
    if (error.ranks.empty())
      return;
    exchange_.settle();
    CapacityError full(message, error.needed_bytes, error.available_bytes);
    full.ranks = error.ranks;
    full.needed_rows = layout::received_rows(
                           plan_->counts, endpoint_.placement(), arrangement_, full.ranks.front())
                           .num_tokens_per_expert;
    throw full;
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
    }
    exchange_.publish_second_offer(offer, bytes, available_bytes);
  }

  void exchange_cached_rows() {
    plan_ = params_.plan;
    outcome_.num_required_rows = layout::num_required_rows(
        plan_->counts, endpoint_.placement(), arrangement_, endpoint_.rank_idx());
    outcome_.num_dropped_per_expert.resize(plan_->received.num_tokens_per_expert.size());
    lay_out_windows(plan_->counts);
    for (int rank_idx = 0; rank_idx < num_ranks_; ++rank_idx)
      if (!endpoint_.group().is_active(rank_idx) &&
          layout::sends_rows(plan_->counts, endpoint_.rank_idx(), rank_idx))
        exchange_.reject(arguments(),
                         RowStatus::kInvalidArgument,
                         concat("the handle sends rows to rank ", rank_idx, ", which has failed"));
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
    for (const auto& header : rows.headers)
      offers_.push_back(header.offer);
  }

  [[noreturn]] void reject_expert(int64_t bad_idx) {
    exchange_.reject(arguments(),
                     RowStatus::kInvalidArgument,
                     concat("topk_idx[",
                            bad_idx / params_.num_topk,
                            ", ",
                            bad_idx % params_.num_topk,
                            "] = ",
                            params_.topk_idx[bad_idx],
                            " is not an expert id in [-1, ",
                            endpoint_.config().num_experts,
                            ")"));
  }

  void reject_failed_ranks(const int32_t* to_rank) {
    for (int rank_idx = 0; rank_idx < num_ranks_; ++rank_idx)
      if (!endpoint_.group().is_active(rank_idx) && to_rank[rank_idx] > 0)
        exchange_.reject(arguments(),
                         RowStatus::kInvalidArgument,
                         concat(to_rank[rank_idx],
                                " tokens are routed to experts of rank ",
                                rank_idx,
                                ", which has failed"));
  }

  void resolve_bases() {
    for (int dst_rank = 0; dst_rank < num_ranks_; ++dst_rank)
      if (layout::sends_rows(plan_->counts, endpoint_.rank_idx(), dst_rank))
        bases_[static_cast<size_t>(dst_rank)] =
            exchange_.resolve(dst_rank, offers_[static_cast<size_t>(dst_rank)]);
  }

  void write_rows() {
    RowWriter writer(endpoint_, params_, *plan_, windows_, bases_, with_topk_idx_, exchange_);
    writer.write(endpoint_.store_mode(total_rows_ * params_.row_bytes));
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
      std::memset(base + offset, value, static_cast<size_t>(bytes));
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
  std::shared_ptr<Window> window_;
  std::vector<Offer> offers_;
  std::vector<std::byte*> bases_;
  std::vector<ReceiveWindow> windows_;
  int64_t total_rows_ = 0;
};

}  // namespace

layout::Arrangement arrangement_of(const Endpoint& endpoint,
                                   layout::RowLayout layout,
                                   int64_t expert_alignment) {
  layout::Arrangement arrangement;
  arrangement.layout = layout;
  arrangement.expert_alignment = expert_alignment;
  if (layout == RowLayout::kLowLatency)
    arrangement.rows_per_expert = endpoint.num_ranks() * endpoint.config().num_max_tokens;
  return arrangement;
}

int64_t num_low_latency_rows(const Endpoint& endpoint) {
  const auto& owned = endpoint.placement().local_experts[static_cast<size_t>(endpoint.rank_idx())];
  return static_cast<int64_t>(owned.size()) *
         arrangement_of(endpoint, RowLayout::kLowLatency, 1).rows_per_expert;
}

ReceiveWindow low_latency_window(const Endpoint& endpoint, const DispatchParams& params) {
  return window_of(arrangement_of(endpoint, RowLayout::kLowLatency, 1),
                   params,
                   num_low_latency_rows(endpoint),
                   0,
                   false);
}

std::shared_ptr<void> copy_out_window(Endpoint& endpoint,
                                      std::shared_ptr<Window> window,
                                      uint64_t bytes,
                                      CopyOut mode,
                                      std::byte** data) {
  // Routing differs a little from step to step, and so will the further window that is to stay
  // free.
  const uint64_t further_bytes = std::max(bytes, endpoint.largest_recent_need());
  if (mode == CopyOut::kNever || bytes == 0 ||
      (mode == CopyOut::kAuto &&
       endpoint.group().memory().largest_available_bytes() >= further_bytes + further_bytes / 8)) {
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
  return run_operation(endpoint, operation, interrupt_check, [&](Exchange& exchange) {
    return DispatchOperation(endpoint, params, exchange).run();
  });
}

}  // namespace moe::host
