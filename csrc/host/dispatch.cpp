#include "host/dispatch.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "host/exchange.h"
#include "layout/window.h"

namespace moe::host {

namespace {

using layout::ReceiveWindow;
using layout::RowLayout;
using layout::RowStatus;
using layout::Slot;

constexpr int64_t kTokensPerProgress = 64;

/// One dispatch between its rows and its end.
class DispatchOperation {
 public:
  DispatchOperation(Endpoint& endpoint, const DispatchParams& params, Exchange& exchange)
      : endpoint_(endpoint),
        params_(params),
        exchange_(exchange),
        num_ranks_(endpoint.num_ranks()),
        with_topk_idx_(params.plan == nullptr && params.layout == RowLayout::kRankMajor),
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
    arguments.layout = static_cast<int32_t>(layout());
    arguments.expert_alignment = static_cast<int32_t>(alignment());
    arguments.dtype = params_.dtype;
    arguments.row_bytes = params_.row_bytes;
    arguments.weight_bytes = params_.weight_bytes;
    arguments.plan_hash = params_.plan ? params_.plan->hash : 0;
    return arguments;
  }

  RowLayout layout() const { return params_.plan ? params_.plan->layout : params_.layout; }
  int64_t alignment() const {
    return params_.plan ? params_.plan->expert_alignment : params_.expert_alignment;
  }

  /// Fills windows_ from the count matrix.
  void lay_out_windows(const layout::CountMatrix& counts) {
    total_rows_ = 0;
    for (int rank_idx = 0; rank_idx < num_ranks_; ++rank_idx) {
      const int64_t num_rows =
          layout::num_received_rows(counts, endpoint_.placement(), layout(), alignment(), rank_idx);
      total_rows_ += num_rows;
      windows_[static_cast<size_t>(rank_idx)] = ReceiveWindow::make(layout(),
                                                                    num_rows,
                                                                    params_.row_bytes,
                                                                    params_.weight_bytes,
                                                                    endpoint_.config().num_topk,
                                                                    with_topk_idx_);
    }
  }

  uint64_t needed(int rank_idx) const {
    return static_cast<uint64_t>(windows_[static_cast<size_t>(rank_idx)].bytes);
  }

  void exchange_rows() {
    std::vector<int32_t> counts(static_cast<size_t>(endpoint_.config().num_experts + num_ranks_));
    const int64_t bad_idx = layout::count_choices(params_.topk_idx,
                                                  params_.num_tokens,
                                                  endpoint_.config().num_topk,
                                                  endpoint_.placement(),
                                                  counts.data());
    if (bad_idx >= 0)
      reject_expert(bad_idx);
    reject_failed_ranks(counts.data() + endpoint_.config().num_experts);
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
    lay_out_windows(rows.counts);
    plan_ = std::make_shared<Plan>(Plan::make(layout(),
                                              alignment(),
                                              std::move(rows.counts),
                                              endpoint_.placement(),
                                              endpoint_.rank_idx(),
                                              params_.topk_idx,
                                              params_.num_tokens,
                                              endpoint_.config().num_topk));
    offers_.reserve(static_cast<size_t>(num_ranks_));
    for (const auto& header : rows.headers)
      offers_.push_back(header.offer);
    exchange_second_offers();
    endpoint_.remember_need(needed(endpoint_.rank_idx()));
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
    full.needed_rows =
        layout::received_rows(
            plan_->counts, endpoint_.placement(), layout(), alignment(), full.ranks.front())
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
    lay_out_windows(plan_->counts);
    for (int rank_idx = 0; rank_idx < num_ranks_; ++rank_idx)
      if (!endpoint_.group().is_active(rank_idx) &&
          layout::sends_rows(plan_->counts, endpoint_.rank_idx(), rank_idx))
        exchange_.reject(arguments(),
                         RowStatus::kInvalidArgument,
                         concat("the handle sends rows to rank ", rank_idx, ", which has failed"));
    try {
      window_ = exchange_.allocate(needed(endpoint_.rank_idx()));
    } catch (const CapacityError& error) {
      exchange_.reject(arguments(),
                       RowStatus::kNoCapacity,
                       error.what(),
                       error.needed_bytes,
                       error.available_bytes);
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
    const int64_t num_topk = endpoint_.config().num_topk;
    exchange_.reject(arguments(),
                     RowStatus::kInvalidArgument,
                     concat("topk_idx[",
                            bad_idx / num_topk,
                            ", ",
                            bad_idx % num_topk,
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
    const int64_t total_bytes = total_rows_ * params_.row_bytes;
    const StoreMode mode = endpoint_.store_mode(total_bytes);
    endpoint_.for_tokens(params_.num_tokens,
                         params_.num_tokens * plan_->num_slots * params_.row_bytes,
                         [&](int64_t begin, int64_t end) { write_tokens(begin, end, mode); });
  }

  void write_tokens(int64_t begin, int64_t end, StoreMode mode) {
    const auto& kernels = endpoint_.kernels();
    std::vector<std::byte*> places(static_cast<size_t>(plan_->num_slots));
    for (int64_t token_idx = begin; token_idx < end; ++token_idx) {
      const int64_t* const slots = plan_->slots.data() + token_idx * plan_->num_slots;
      int num_places = 0;
      for (int64_t i = 0; i < plan_->num_slots; ++i) {
        if (slots[i] == Slot::kNone)
          continue;
        places[static_cast<size_t>(num_places++)] =
            offset_ptr(base_of(slots[i]), Slot::row_idx(slots[i]), params_.row_bytes);
      }
      if (num_places > 0)
        kernels.fan_out(offset_ptr(params_.x, token_idx, params_.row_bytes),
                        places.data(),
                        num_places,
                        params_.row_bytes,
                        mode);
      if (params_.weight_bytes > 0 || with_topk_idx_)
        write_companions(token_idx, slots);
      if (token_idx % kTokensPerProgress != 0)
        continue;
      if (begin == 0)
        exchange_.progress();
      if (exchange_.is_aborted())
        break;
    }
    // Each thread fences its own streaming stores before its part counts as done.
    kernels.store_fence();
  }

  std::byte* base_of(int64_t slot) const {
    return bases_[static_cast<size_t>(Slot::rank_idx(slot))];
  }

  /// What travels beside a row: its weight, or in rank-major all weights and ids of that rank.
  void write_companions(int64_t token_idx, const int64_t* slots) {
    const int64_t num_topk = plan_->num_topk;
    const auto weight_bytes = static_cast<size_t>(params_.weight_bytes);
    const std::byte* const weights =
        offset_ptr(params_.weights, token_idx * num_topk, params_.weight_bytes);
    if (layout() == RowLayout::kExpertMajor) {
      for (int64_t k = 0; k < num_topk; ++k) {
        if (slots[k] == Slot::kNone)
          continue;
        const auto& window = windows_[static_cast<size_t>(Slot::rank_idx(slots[k]))];
        std::memcpy(base_of(slots[k]) + window.weights_offset +
                        Slot::row_idx(slots[k]) * params_.weight_bytes,
                    weights + k * params_.weight_bytes,
                    weight_bytes);
      }
      return;
    }
    const auto& placement = endpoint_.placement();
    const int64_t* const choices = plan_->topk_idx.data() + token_idx * num_topk;
    for (int64_t i = 0; i < plan_->num_slots && slots[i] != Slot::kNone; ++i) {
      const int dst_rank = Slot::rank_idx(slots[i]);
      const auto& window = windows_[static_cast<size_t>(dst_rank)];
      const int64_t first = Slot::row_idx(slots[i]) * num_topk;
      std::byte* const base = base_of(slots[i]);
      auto* const ids = reinterpret_cast<int64_t*>(base + window.topk_idx_offset) + first;
      for (int64_t k = 0; k < num_topk; ++k) {
        const int64_t expert_idx = choices[k];
        const bool is_there = expert_idx >= 0 && placement.expert_rank[expert_idx] == dst_rank;
        if (with_topk_idx_)
          ids[k] = is_there ? placement.local_expert_idx[expert_idx] : -1;
        if (weight_bytes == 0)
          continue;
        std::byte* const place = base + window.weights_offset + (first + k) * params_.weight_bytes;
        if (is_there)
          std::memcpy(place, weights + k * params_.weight_bytes, weight_bytes);
        else
          std::memset(place, 0, weight_bytes);
      }
    }
  }

  /// Padding belongs to the receiver: no sender writes there.
  void zero_padding() {
    if (layout() != RowLayout::kExpertMajor || alignment() == 1)
      return;
    const auto& received = plan_->received;
    const auto& window = windows_[static_cast<size_t>(endpoint_.rank_idx())];
    for (size_t e = 0; e < received.num_tokens_per_expert.size(); ++e) {
      const int64_t first = received.expert_offsets[e] + received.num_tokens_per_expert[e];
      const int64_t num_rows = received.expert_offsets[e + 1] - first;
      if (num_rows == 0)
        continue;
      std::memset(offset_ptr(window_->data(), first, params_.row_bytes),
                  0,
                  static_cast<size_t>(num_rows * params_.row_bytes));
      if (params_.weight_bytes > 0)
        std::memset(window_->data() + window.weights_offset + first * params_.weight_bytes,
                    0,
                    static_cast<size_t>(num_rows * params_.weight_bytes));
    }
  }

  DispatchOutcome outcome() {
    const auto& window = windows_[static_cast<size_t>(endpoint_.rank_idx())];
    DispatchOutcome outcome;
    outcome.plan = plan_;
    exchange_.withdraw_offers();
    if (!window_)
      window_ = endpoint_.group().memory().allocate(0);
    window_->shrink(needed(endpoint_.rank_idx()));
    outcome.owner = copy_out_window(endpoint_,
                                    std::move(window_),
                                    needed(endpoint_.rank_idx()),
                                    params_.copy_out,
                                    &outcome.rows);
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
  bool with_topk_idx_;
  std::shared_ptr<const Plan> plan_;
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
