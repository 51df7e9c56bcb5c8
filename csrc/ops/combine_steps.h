#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ops/agreement.h"
#include "ops/combine_rules.h"

namespace moe::ops {

/// The steps of a combine of every engine: a rank says where those rows lie that peers pull,
/// hears the same of all, and has them added.
///
/// @tparam Engine  Names the types Endpoint, Exchange and Plan.
/// @tparam Mover   Derives from this, and says how its engine does the parts, in this order:
///   - begin(): before anything else
///   - find_problem(): what is wrong with this combine for this engine alone, "" for nothing
///   - offers_sums(offer): where rows are added on this rank before peers pull them, offers where
///     their sums will lie; false where the rows themselves are pulled
///   - copy_in(target, source, bytes): rows from outside the heap
///   - publish(message): writes this rank's row; may let sums follow before a row has been read
///   - move(rows): the sums, until what this engine's caller waits for is there; not where rows are
///     heard later
///   - outcome(): hands out the sums
template <typename Engine, typename Mover>
class CombineSteps {
 public:
  CombineOutcome run() {
    mover().begin();
    RowMessage message;
    message.arguments = combine_arguments(params_);
    exchange_.reject_if(find_failed_sources(plan_, endpoint_.group()), message.arguments);
    exchange_.reject_if(mover().find_problem(), message.arguments);
    message.num_tokens = plan_.num_tokens;
    try {
      const bool offers_sums = mover().offers_sums(&message.offer);
      offer_rows(
          params_,
          offers_sums ? 0 : row_bytes_,
          endpoint_.memory(),
          [this](const std::byte* source, int64_t bytes) { return copy_to_window(source, bytes); },
          &message.offer,
          &message.weights_offer);
      window_ = sums_window_.bytes == 0
                    ? endpoint_.memory().allocate(0)
                    : exchange_.allocate(static_cast<uint64_t>(sums_window_.bytes));
    } catch (const CapacityError& error) {
      exchange_.reject(message.arguments, error);
    }
    exchange_.enter("rows");
    mover().publish(message);
    if constexpr (Exchange::kMayDefer) {
      if (exchange_.defers_agreement(message.arguments)) {
        outcome_.gradients = params_.arguments.gradients;  // to which no rank can add
        return mover().outcome();
      }
    }
    const Rows rows = exchange_.collect(false);
    outcome_.gradients = unite_gradients(rows, endpoint_.group());
    mover().move(rows);
    return mover().outcome();
  }

 protected:
  using Endpoint = typename Engine::Endpoint;
  using Exchange = typename Engine::Exchange;
  using Plan = typename Engine::Plan;

  CombineSteps(Endpoint& endpoint, const CombineParams& params, Exchange& exchange)
      : endpoint_(endpoint),
        params_(params),
        plan_(static_cast<const Plan&>(*params.plan)),
        exchange_(exchange),
        row_bytes_(combined_row_bytes(params)),
        sums_window_(sums_window(params)) {}
  ~CombineSteps() = default;

  /// Allocates a window for rows that peers pull; see EndpointBase::take_window().
  std::shared_ptr<Window> allocate(uint64_t bytes) {
    if (plan_.layout() == layout::RowLayout::kLowLatency)
      if (auto window = endpoint_.take_window(bytes, false))
        return window;
    return exchange_.allocate(bytes);
  }
  /// Destination of the sums, once the window is there.
  std::byte* sums() const { return params_.out != nullptr ? params_.out : window_->data(); }

  Endpoint& endpoint_;
  const CombineParams& params_;
  const Plan& plan_;
  Exchange& exchange_;
  int64_t row_bytes_;
  SumsWindow sums_window_;
  std::vector<std::shared_ptr<Window>> copied_in_;  ///< windows that peers pull from
  std::shared_ptr<Window> window_;                  ///< window of sums and pulled weights
  CombineOutcome outcome_;

 private:
  Mover& mover() { return static_cast<Mover&>(*this); }

  Offer copy_to_window(const std::byte* source, int64_t bytes) {
    auto window = allocate(static_cast<uint64_t>(bytes));
    // Until every peer has pulled its rows they belong to the operation.
    exchange_.offer(window);
    mover().copy_in(window->data(), source, bytes);
    copied_in_.push_back(window);
    return window->offer();
  }
};

}  // namespace moe::ops
