#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/agreement.h"
#include "ops/dispatch_rules.h"

namespace moe::ops {

/// Steps of a dispatch, the same on CPUs and on devices: publish a control row with this rank's
/// counts and an offered window, collect those of all ranks, judge them as every rank does, move
/// the rows. `Rows` here are control rows; mover().move() moves the data.
///
/// @tparam Engine  Has the types Endpoint, Exchange and Plan, and kReadsChoices: whether the host
///   reads topk_idx and turns experts into slots itself.
/// @tparam Mover   Derives from this, and implements, called in this order:
///   - begin(): before anything else
///   - count_choices(): uncached: what this rank sends where; rejects what is wrong with it
///   - take_plan(): cached: checks plan_; rejects what is wrong with it
///   - publish(offer): writes this rank's control row; may send data before it has read any other
///   - make_plan(judged): the plan of what is kept, from what count_choices() found
///   - count_tokens(rows): by rank with replicas: how many tokens of every rank are bound for each
///   - defer_counts(): the plan before counts are known, where Exchange::kMayDefer
///   - exchange_offers(short_ranks, own): second offers; `own` where this rank is one of those
///   - settle_overflow(error), settle_shortage(): ends the operation, which every rank rejects
///   - move(rows): moves the data, until this engine's caller may go on; `rows` is empty if the
///     control rows are read later
///   - outcome(): returns what arrived
template <typename Engine, typename Mover>
class DispatchSteps {
 public:
  DispatchOutcome run() {
    mover().begin();
    const Rows rows = params_.plan == nullptr ? exchange_rows() : exchange_cached_rows();
    mover().move(rows);
    return mover().outcome();
  }

 protected:
  using Endpoint = typename Engine::Endpoint;
  using Exchange = typename Engine::Exchange;
  using Plan = typename Engine::Plan;

  DispatchSteps(Endpoint& endpoint, const DispatchParams& params, Exchange& exchange)
      : endpoint_(endpoint),
        params_(params),
        exchange_(exchange),
        num_ranks_(endpoint.num_ranks()),
        arrangement_(params.plan
                         ? params.plan->arrangement
                         : arrangement_of(endpoint, params.layout, params.expert_alignment)) {}
  ~DispatchSteps() = default;

  layout::OperationArguments arguments() const { return dispatch_arguments(params_, arrangement_); }
  bool is_low_latency() const { return arrangement_.layout == layout::RowLayout::kLowLatency; }
  /// Bytes of the window of a rank, once the counts are known.
  uint64_t needed(int rank_idx) const {
    return static_cast<uint64_t>(windows_[static_cast<size_t>(rank_idx)].bytes);
  }
  const layout::ReceiveWindow& own_layout() const {
    return windows_[static_cast<size_t>(endpoint_.rank_idx())];
  }

  /// Moves this rank's choices out, by slot: call it once.
  std::vector<int64_t> take_choices() {
    if (params_.replicas != nullptr)
      return std::move(chosen_slots_);
    return {params_.topk_idx, params_.topk_idx + params_.num_tokens * params_.num_topk};
  }

  void reject_if(const std::string& problem) const { exchange_.reject_if(problem, arguments()); }

  Endpoint& endpoint_;
  const DispatchParams& params_;
  Exchange& exchange_;
  int num_ranks_;
  layout::Arrangement arrangement_;
  DispatchOutcome outcome_;
  std::shared_ptr<const Plan> plan_;
  std::shared_ptr<Window> window_;  ///< window of this rank; null where it receives nothing
  std::vector<Offer> offers_;       ///< offers of every rank; a second offer replaces the first
  std::vector<layout::ReceiveWindow> windows_;

 private:
  Mover& mover() { return static_cast<Mover&>(*this); }

  Rows exchange_rows() {
    mover().count_choices();
    window_ = is_low_latency() ? fixed_window() : endpoint_.guess_window();
    say();
    if (is_low_latency() && defers_agreement()) {
      if constexpr (Exchange::kMayDefer)
        assume_static_shape();
      return {};
    }
    Rows rows = exchange_.collect(true);
    judge(&rows);
    return rows;
  }

  Rows exchange_cached_rows() {
    plan_ = std::static_pointer_cast<const Plan>(params_.plan);
    windows_ = lay_out_windows(plan_->counts, endpoint_.placement(), arrangement_, params_);
    reject_if(find_failed_ranks(*plan_, endpoint_.group()));
    mover().take_plan();
    window_ = params_.window ? params_.window : allocate(needed(endpoint_.rank_idx()));
    say();
    if (defers_agreement())
      return {};
    Rows rows = exchange_.collect(false);
    take_headers(rows);
    return rows;
  }

  /// A low-latency window does not depend on counts: it is there before the rows are.
  std::shared_ptr<Window> fixed_window() {
    return params_.window
               ? params_.window
               : allocate(static_cast<uint64_t>(low_latency_window(endpoint_, params_).bytes));
  }

  /// Called before the control row is published; without memory, rejects the operation.
  std::shared_ptr<Window> allocate(uint64_t bytes) {
    if (is_low_latency())
      if (auto window = endpoint_.take_window(bytes, false))
        return window;
    try {
      return exchange_.allocate(bytes);
    } catch (const CapacityError& error) {
      exchange_.reject(arguments(), error);
    }
  }

  void say() {
    if (window_)
      exchange_.offer(window_);
    exchange_.enter("rows");
    mover().publish(window_ ? window_->offer() : Offer{});
  }

  /// Returns whether this engine hands the operation out before it has heard the other ranks.
  bool defers_agreement() {
    if constexpr (Exchange::kMayDefer) {
      // An asynchronous dispatch outside of graphs collects the control rows when it is received.
      const bool is_left = params_.is_async && !endpoint_.has_graphs();
      if (!is_left && exchange_.defers_agreement(arguments())) {
        outcome_.gradients = params_.arguments.gradients;  // to which no rank can add
        return true;
      }
    }
    return false;
  }

  /// Sets what a low-latency dispatch knows without counts. The plan of mover().defer_counts() is
  /// completed when the control rows have been read.
  void assume_static_shape() {
    windows_.resize(static_cast<size_t>(num_ranks_));
    windows_[static_cast<size_t>(endpoint_.rank_idx())] = low_latency_window(endpoint_, params_);
    endpoint_.remember_need(needed(endpoint_.rank_idx()));
    plan_ = mover().defer_counts();
  }

  void take_headers(const Rows& rows) {
    outcome_.gradients = unite_gradients(rows, endpoint_.group());
    offers_.reserve(static_cast<size_t>(num_ranks_));
    for (const auto& header : rows.headers)
      offers_.push_back(header.offer);
  }

  /// Reaches the same result on every rank, from the same control rows, before any data is kept.
  void judge(Rows* rows) {
    take_headers(*rows);
    if (params_.replicas != nullptr)
      choose_replicas(rows);
    JudgedCounts judged = judge_counts(
        std::move(rows->counts), endpoint_, arrangement_, params_.capacity(), params_.row_bytes);
    if (judged.overflow) {
      mover().settle_overflow(judged.overflow);
      std::rethrow_exception(judged.overflow);
    }
    windows_ = lay_out_windows(judged.kept, endpoint_.placement(), arrangement_, params_);
    plan_ = mover().make_plan(std::move(judged));
    exchange_second_offers();
    endpoint_.remember_need(needed(endpoint_.rank_idx()));
  }

  void choose_replicas(Rows* rows) {
    layout::share_rows(*params_.replicas, endpoint_.placement(), &rows->counts);
    if constexpr (Engine::kReadsChoices) {
      chosen_slots_ = layout::choose_slots(params_.topk_idx,
                                           params_.num_tokens * params_.num_topk,
                                           *params_.replicas,
                                           rows->counts.row(endpoint_.rank_idx()));
      // Failed ranks take no rows. Outside of low latency only they are marked kMasked.
      for (int rank_idx = 0; !is_low_latency() && rank_idx < num_ranks_; ++rank_idx) {
        int32_t* const to_rank = rows->counts.row(rank_idx) + rows->counts.num_experts;
        std::replace(to_rank, to_rank + num_ranks_, layout::CountMatrix::kMasked, 0);
      }
    }
    if (arrangement_.is_by_rank())
      mover().count_tokens(rows);
  }

  /// A rank whose offer is too small allocates again. All ranks find these in the count matrix.
  void exchange_second_offers() {
    const std::vector<int> short_ranks = find_short_ranks(windows_, offers_, endpoint_.group());
    if (short_ranks.empty())
      return;
    const bool is_short = std::find(short_ranks.begin(), short_ranks.end(), endpoint_.rank_idx()) !=
                          short_ranks.end();
    std::optional<layout::SecondOffer> own;
    if (is_short)
      own = make_second_offer();
    exchange_.enter("offers");
    const std::vector<layout::SecondOffer> seconds = mover().exchange_offers(short_ranks, own);
    for (size_t i = 0; i < short_ranks.size(); ++i)
      offers_[static_cast<size_t>(short_ranks[i])] = seconds[i].offer;
    if (const std::exception_ptr error = find_shortage(
            short_ranks, seconds, windows_, plan_->counts, endpoint_.placement(), arrangement_)) {
      mover().settle_shortage();
      throw_shortage(error);
    }
  }

  layout::SecondOffer make_second_offer() {
    layout::SecondOffer own{};
    own.needed_bytes = needed(endpoint_.rank_idx());
    // No rank writes to an offer that is too small, so it can be withdrawn.
    window_ = nullptr;
    exchange_.withdraw_offers();
    try {
      window_ = exchange_.allocate(own.needed_bytes);
      exchange_.offer(window_);
      own.offer = window_->offer();
    } catch (const CapacityError& error) {
      own.available_bytes = error.available_bytes;
      shortage_cause_ = error.what();
    }
    return own;
  }

  /// Adds, on the rank that is short, why it has no more memory: an offer has no room for it.
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

  /// Slots that were chosen, if there are replicas to choose from.
  std::vector<int64_t> chosen_slots_;
  /// Reason why this rank could not make its second offer; "" for none.
  std::string shortage_cause_;
};

}  // namespace moe::ops
