#include "host/combine.h"

#include <cstring>
#include <vector>

#include "core/math.h"
#include "host/combine_rules.h"
#include "host/exchange.h"

namespace moe::host {

namespace {

using layout::RowStatus;
using layout::Slot;

constexpr int64_t kTokensPerProgress = 64;

/// One combine between its start and its end.
class CombineOperation {
 public:
  CombineOperation(Endpoint& endpoint, const CombineParams& params, Exchange& exchange)
      : endpoint_(endpoint),
        params_(params),
        plan_(static_cast<const Plan&>(*params.plan)),
        exchange_(exchange),
        row_bytes_(combined_row_bytes(params)),
        sums_window_(sums_window(params)),
        row_bases_(static_cast<size_t>(endpoint.num_ranks())),
        weight_bases_(static_cast<size_t>(endpoint.num_ranks())) {}

  CombineOutcome run() {
    reject_failed_ranks();
    try {
      offer_rows();
      allocate_sums();
    } catch (const CapacityError& error) {
      exchange_.reject(arguments(), error);
    }
    exchange_.enter("rows");
    exchange_.publish(message_);
    const Rows rows = exchange_.collect(false);
    exchange_.enter("data");
    resolve_bases(rows);
    if (MOE_MUTANT(done_before_rows_are_read))
      exchange_.release_done();
    add_rows();
    pull_weights();
    exchange_.release_done();
    if (MOE_MUTANT(rows_given_back_early)) {
      exchange_.withdraw_offers();
      copied_rows_ = nullptr;
    }
    exchange_.enter("done");
    // Until every peer has pulled its rows they belong to the operation.
    for (int peer_rank = 0; peer_rank < endpoint_.num_ranks(); ++peer_rank)
      if (layout::sends_rows(plan_.counts, peer_rank, endpoint_.rank_idx()) &&
          !MOE_MUTANT(no_wait_for_pullers))
        exchange_.await_done(peer_rank);
    return outcome();
  }

 private:
  layout::OperationArguments arguments() const { return combine_arguments(params_); }

  void reject_failed_ranks() {
    const std::string problem = find_failed_sources(plan_, endpoint_.group());
    if (!problem.empty())
      exchange_.reject(arguments(), RowStatus::kInvalidArgument, problem);
  }

  /// In place where the rows lie in this rank's heap already; else copied in, once.
  void offer_rows() {
    message_.arguments = arguments();
    message_.num_tokens = plan_.num_tokens;
    if (row_bytes_ > 0 && plan_.num_rows() > 0)
      was_copied_in_ =
          offer_place(params_.x, plan_.num_rows() * row_bytes_, &message_.offer, &copied_rows_);
    const int64_t num_weights = num_row_weights(plan_);
    if (params_.row_weight_bytes > 0 && num_weights > 0)
      offer_place(params_.row_weights,
                  num_weights * params_.row_weight_bytes,
                  &message_.weights_offer,
                  &copied_weights_);
  }

  bool offer_place(const std::byte* source,
                   int64_t bytes,
                   Offer* offer,
                   std::shared_ptr<Window>* window) {
    if (endpoint_.group().memory().find(source, static_cast<uint64_t>(bytes), offer))
      return false;
    *window = exchange_.allocate(static_cast<uint64_t>(bytes));
    exchange_.offer(*window);
    const auto& kernels = endpoint_.kernels();
    const StoreMode mode = endpoint_.store_mode(bytes * endpoint_.num_ranks());
    constexpr int64_t kBlockBytes = int64_t{1} << 18;
    const int64_t num_blocks = (bytes + kBlockBytes - 1) / kBlockBytes;
    std::byte* const target = (*window)->data();
    endpoint_.for_tokens(num_blocks, bytes, [&](int64_t begin, int64_t end) {
      const int64_t first = begin * kBlockBytes;
      const int64_t last = end * kBlockBytes < bytes ? end * kBlockBytes : bytes;
      kernels.copy(source + first, target + first, last - first, mode);
      if (!MOE_MUTANT(no_store_fence_after_copying_in))
        kernels.store_fence();
    });
    *offer = (*window)->offer();
    return true;
  }

  void allocate_sums() {
    window_ = sums_window_.bytes == 0
                  ? endpoint_.group().memory().allocate(0)
                  : exchange_.allocate(static_cast<uint64_t>(sums_window_.bytes));
    sums_ = params_.out != nullptr ? params_.out : window_->data();
  }

  void resolve_bases(const Rows& rows) {
    for (int peer_rank = 0; peer_rank < endpoint_.num_ranks(); ++peer_rank) {
      if (!layout::sends_rows(plan_.counts, endpoint_.rank_idx(), peer_rank))
        continue;
      const auto& header = rows.headers[static_cast<size_t>(peer_rank)];
      if (row_bytes_ > 0)
        row_bases_[static_cast<size_t>(peer_rank)] = exchange_.resolve(peer_rank, header.offer);
      if (params_.row_weight_bytes > 0)
        weight_bases_[static_cast<size_t>(peer_rank)] =
            exchange_.resolve(peer_rank, header.weights_offer);
    }
  }

  void add_rows() {
    if (row_bytes_ == 0)
      return;
    const int64_t pulled_bytes = plan_.num_tokens * plan_.num_slots * row_bytes_;
    const StoreMode mode = endpoint_.store_mode(pulled_bytes * endpoint_.num_ranks());
    endpoint_.for_tokens(plan_.num_tokens, pulled_bytes, [&](int64_t begin, int64_t end) {
      const FloatingPointScope scope;
      add_tokens(begin, end, mode);
    });
  }

  /// Addresses of the rows of a token, in the order they are added; @return how many.
  int gather(int64_t token_idx, const std::byte** places, std::byte* weights) const {
    const int64_t* const slots = plan_.slots.data() + token_idx * plan_.num_slots;
    int num_places = 0;
    for (int64_t i = 0; i < plan_.num_slots; ++i) {
      if (slots[i] == Slot::kNone)
        continue;
      if (weights != nullptr)
        std::memcpy(weights + num_places * params_.weight_bytes,
                    params_.weights + (token_idx * plan_.num_topk + i) * params_.weight_bytes,
                    static_cast<size_t>(params_.weight_bytes));
      places[num_places++] = offset_ptr(row_bases_[static_cast<size_t>(Slot::rank_idx(slots[i]))],
                                        Slot::row_idx(slots[i]),
                                        row_bytes_);
    }
    return num_places;
  }

  void add_tokens(int64_t begin, int64_t end, StoreMode mode) {
    const auto& kernels = endpoint_.kernels();
    const auto num_slots = static_cast<size_t>(plan_.num_slots);
    std::vector<const std::byte*> places(num_slots);
    std::vector<const std::byte*> next_places(num_slots);
    std::vector<std::byte> raw_weights(params_.weight_bytes > 0 ? num_slots * 8 : 0);
    std::vector<std::byte> next_raw_weights(raw_weights.size());
    std::vector<double> wide_weights(raw_weights.empty() ? 0 : num_slots);
    const auto weights_or_null = [](std::vector<std::byte>& raw) {
      return raw.empty() ? nullptr : raw.data();
    };
    int num_next =
        begin < end ? gather(begin, next_places.data(), weights_or_null(next_raw_weights)) : 0;
    for (int64_t token_idx = begin; token_idx < end; ++token_idx) {
      places.swap(next_places);
      raw_weights.swap(next_raw_weights);
      const int num_places = num_next;
      num_next = token_idx + 1 < end
                     ? gather(token_idx + 1, next_places.data(), weights_or_null(next_raw_weights))
                     : 0;
      kernels.sum_rows(params_.dtype,
                       places.data(),
                       weights_of(raw_weights, num_places, &wide_weights),
                       num_places,
                       params_.hidden,
                       offset_ptr(sums_, token_idx, row_bytes_),
                       mode,
                       mode == StoreMode::kStreaming ? next_places.data() : nullptr,
                       mode == StoreMode::kStreaming ? num_next : 0);
      if (token_idx % kTokensPerProgress != 0)
        continue;
      if (begin == 0)
        exchange_.progress();
      if (exchange_.is_aborted())
        break;
    }
    kernels.store_fence();
  }

  /// Weights in the type the rows are added in.
  const void* weights_of(const std::vector<std::byte>& raw,
                         int count,
                         std::vector<double>* wide) const {
    if (raw.empty())
      return nullptr;
    if (params_.dtype != DType::kFloat64 || params_.weight_bytes == 8)
      return raw.data();
    for (int i = 0; i < count; ++i) {
      float narrow;
      std::memcpy(&narrow, raw.data() + i * 4, sizeof(narrow));
      (*wide)[static_cast<size_t>(i)] = narrow;
    }
    return wide->data();
  }

  void pull_weights() {
    const auto weight_bytes = static_cast<size_t>(params_.row_weight_bytes);
    if (weight_bytes == 0)
      return;
    std::byte* target = window_->data() + sums_window_.weights_offset;
    sync::fill_shared(
        target, 0, static_cast<size_t>(plan_.num_tokens * plan_.num_topk) * weight_bytes);
    const bool is_rank_major = plan_.arrangement.is_by_rank();
    for (int64_t token_idx = 0; token_idx < plan_.num_tokens; ++token_idx) {
      const int64_t* const slots = plan_.slots.data() + token_idx * plan_.num_slots;
      for (int64_t k = 0; k < plan_.num_topk; ++k, target += weight_bytes) {
        const int64_t slot = is_rank_major ? slot_of_choice(token_idx, k, slots) : slots[k];
        if (slot == Slot::kNone)
          continue;
        const int64_t weight_idx =
            is_rank_major ? Slot::row_idx(slot) * plan_.num_recv_topk + k : Slot::row_idx(slot);
        std::byte weight[sizeof(double)];
        sync::pull_shared(weight,
                          offset_ptr(weight_bases_[static_cast<size_t>(Slot::rank_idx(slot))],
                                     weight_idx,
                                     params_.row_weight_bytes),
                          weight_bytes);
        sync::write_shared(target, weight, weight_bytes);
      }
    }
  }

  int64_t slot_of_choice(int64_t token_idx, int64_t k, const int64_t* slots) const {
    const int64_t expert_idx = plan_.topk_idx[static_cast<size_t>(token_idx * plan_.num_topk + k)];
    if (expert_idx < 0)
      return Slot::kNone;
    const int32_t owner = endpoint_.placement().expert_rank[static_cast<size_t>(expert_idx)];
    for (int64_t i = 0; i < plan_.num_slots; ++i)
      if (slots[i] != Slot::kNone && Slot::rank_idx(slots[i]) == owner)
        return slots[i];
    return Slot::kNone;
  }

  CombineOutcome outcome() {
    CombineOutcome outcome;
    outcome.was_copied_in = was_copied_in_;
    outcome.waited_ns = exchange_.take_waited_ns();
    outcome.waited_ns.resize(static_cast<size_t>(endpoint_.num_ranks()));
    std::byte* base = nullptr;
    outcome.owner = copy_out_window(endpoint_,
                                    std::move(window_),
                                    static_cast<uint64_t>(sums_window_.bytes),
                                    params_.copy_out,
                                    &base);
    if (row_bytes_ > 0)
      outcome.sums = params_.out != nullptr ? params_.out : base;
    if (params_.row_weight_bytes > 0)
      outcome.weights = base + sums_window_.weights_offset;
    return outcome;
  }

  Endpoint& endpoint_;
  const CombineParams& params_;
  const Plan& plan_;
  Exchange& exchange_;
  int64_t row_bytes_;
  SumsWindow sums_window_;
  RowMessage message_;
  std::shared_ptr<Window> copied_rows_;
  std::shared_ptr<Window> copied_weights_;
  std::shared_ptr<Window> window_;
  std::byte* sums_ = nullptr;
  bool was_copied_in_ = false;
  std::vector<std::byte*> row_bases_;
  std::vector<std::byte*> weight_bases_;
};

}  // namespace

CombineOutcome combine(Endpoint& endpoint,
                       const CombineParams& params,
                       const InterruptCheck& interrupt_check) {
  return run_operation<Exchange>(
      endpoint, layout::Operation::kCombine, interrupt_check, [&](Exchange& exchange) {
        return CombineOperation(endpoint, params, exchange).run();
      });
}

}  // namespace moe::host
