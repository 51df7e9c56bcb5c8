#include "ops/combine.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "core/math.h"
#include "ops/combine_steps.h"
#include "ops/cpu_engine.h"
#include "ops/internode_combine.h"

namespace moe::ops {

namespace {

using layout::Slot;

/// One combine whose rows the CPU adds.
class CombineOperation : public CombineSteps<CpuEngine, CombineOperation> {
 public:
  CombineOperation(Endpoint& endpoint, const CombineParams& params, Exchange& exchange)
      : CombineSteps(endpoint, params, exchange) {
    bases_.rows.resize(static_cast<size_t>(endpoint.num_ranks()));
    bases_.weights.resize(static_cast<size_t>(endpoint.num_ranks()));
  }

 private:
  friend CombineSteps;

  void begin() {}
  std::string find_problem() const { return ""; }
  /// All ranks read all memory alike: who adds for a token adds for its ranks, too.
  bool offers_sums(Offer* /*offer*/) const { return false; }

  void copy_in(std::byte* target, const std::byte* source, int64_t bytes) {
    const auto& kernels = endpoint_.kernels();
    const cpu::StoreMode mode = endpoint_.store_mode(bytes * endpoint_.num_ranks());
    constexpr int64_t kBlockBytes = int64_t{1} << 18;
    const int64_t num_blocks = (bytes + kBlockBytes - 1) / kBlockBytes;
    endpoint_.for_tokens(num_blocks, bytes, [&](int64_t begin, int64_t end) {
      const int64_t first = begin * kBlockBytes;
      const int64_t last = end * kBlockBytes < bytes ? end * kBlockBytes : bytes;
      kernels.copy(source + first, target + first, last - first, mode);
      kernels.store_fence();
    });
  }

  void publish(const RowMessage& message) {
    sums_ = sums();
    exchange_.publish(message);
  }

  void move(const Rows& rows) {
    exchange_.enter("data");
    resolve_bases(rows);
    widen_weights();
    if (exchange_.relay() == nullptr)
      add(0, plan_.num_tokens);
    else
      add_across_nodes();
    exchange_.release_done();
    exchange_.enter("done");
    // Until every peer has pulled its rows they belong to the operation. One that has failed since
    // the dispatch pulls none.
    for (int peer_rank = 0; peer_rank < endpoint_.num_ranks(); ++peer_rank)
      if (endpoint_.group().is_active(peer_rank) &&
          layout::sends_rows(plan_.counts, peer_rank, endpoint_.rank_idx()))
        exchange_.await_done(peer_rank);
  }

  void resolve_bases(const Rows& rows) {
    for (int peer_rank = 0; peer_rank < endpoint_.num_ranks(); ++peer_rank) {
      if (!InternodeCombine::is_pulled_here(plan_, endpoint_.group(), peer_rank))
        continue;
      const auto& header = rows.headers[static_cast<size_t>(peer_rank)];
      if (row_bytes_ > 0)
        bases_.rows[static_cast<size_t>(peer_rank)] = exchange_.resolve(peer_rank, header.offer);
      if (params_.row_weight_bytes > 0)
        bases_.weights[static_cast<size_t>(peer_rank)] =
            exchange_.resolve(peer_rank, header.weights_offer);
    }
  }

  void add_across_nodes() {
    const layout::PulledRow pulled{row_bytes_, params_.row_weight_bytes, 1};
    std::optional<Addition> addition;
    if (is_reduced())
      addition = {params_.dtype,
                  params_.hidden,
                  added_weights_,
                  plan_.arrangement.is_by_rank() ? 0 : added_bytes()};
    remote_.emplace(endpoint_, plan_, exchange_, pulled, bases_, addition);
    remote_->run([&](int64_t begin, int64_t end) { add(begin, end); });
  }

  bool is_reduced() const { return endpoint_.config().node_reduction && row_bytes_ > 0; }
  /// Bytes of one number of the type that rows are added in.
  int64_t added_bytes() const { return params_.dtype == DType::kFloat64 ? 8 : 4; }

  /// float32 weights of float64 rows become float64.
  void widen_weights() {
    added_weights_ = params_.weights;
    if (params_.weights == nullptr || params_.weight_bytes == added_bytes())
      return;
    const int64_t num_weights = plan_.num_tokens * plan_.num_topk;
    wide_weights_.resize(static_cast<size_t>(num_weights));
    for (int64_t i = 0; i < num_weights; ++i) {
      float narrow;
      std::memcpy(&narrow, params_.weights + i * 4, sizeof(narrow));
      wide_weights_[static_cast<size_t>(i)] = narrow;
    }
    added_weights_ = reinterpret_cast<const std::byte*>(wide_weights_.data());
  }

  void add(int64_t begin, int64_t end) {
    add_rows(begin, end);
    pull_weights(begin, end);
  }

  void add_rows(int64_t first, int64_t last) {
    if (row_bytes_ == 0)
      return;
    const int64_t pulled_bytes = plan_.num_slots * row_bytes_;
    const cpu::StoreMode mode =
        endpoint_.store_mode(plan_.num_tokens * pulled_bytes * endpoint_.num_ranks());
    endpoint_.for_tokens(last - first, (last - first) * pulled_bytes, [&](auto begin, auto end) {
      const cpu::FloatingPointScope scope;
      if (remote_ && is_reduced())
        add_tokens_by_node(first + begin, first + end, begin == 0, mode);
      else if (adds_by_rank(endpoint_.config(), params_))
        add_tokens_by_rank(first + begin, first + end, begin == 0, mode);
      else
        add_tokens(first + begin, first + end, begin == 0, mode);
    });
  }

  /// Terms of one token with EpConfig.node_reduction, in the order of the nodes.
  struct NodeTerms {
    std::vector<const std::byte*> places;
    std::vector<std::byte> weights;             ///< one by one; those of sums are 1
    cpu::SourceGroup own;                       ///< rows of the own node
    std::vector<std::pair<int, int64_t>> sums;  ///< other nodes, and the position of a slot there
  };

  void list_terms(int64_t token_idx, NodeTerms* terms) const {
    const NodeLayout& nodes = endpoint_.group().nodes();
    const int own_node = nodes.node_idx(endpoint_.rank_idx());
    const int64_t* const slots = plan_.slots.data() + token_idx * plan_.num_slots;
    terms->places.clear();
    terms->weights.clear();
    terms->sums.clear();
    for (int64_t i = 0; i < plan_.num_slots; ++i) {
      const int node_idx =
          slots[i] == Slot::kNone ? own_node : nodes.node_idx(Slot::rank_idx(slots[i]));
      if (node_idx != own_node)
        terms->sums.emplace_back(node_idx, i);
    }
    // One slot of each node is enough: all of them have the node's sum.
    std::sort(terms->sums.begin(), terms->sums.end());
    const auto is_same_node = [](const auto& a, const auto& b) { return a.first == b.first; };
    terms->sums.erase(std::unique(terms->sums.begin(), terms->sums.end(), is_same_node),
                      terms->sums.end());
    auto next = terms->sums.begin();
    for (; next != terms->sums.end() && next->first < own_node; ++next)
      add_term(remote_->row(token_idx, next->second), nullptr, terms);
    terms->own.begin = static_cast<int>(terms->places.size());
    for (int64_t i = 0; i < plan_.num_slots; ++i) {
      if (slots[i] == Slot::kNone || nodes.node_idx(Slot::rank_idx(slots[i])) != own_node)
        continue;
      const std::byte* const base = bases_.rows[static_cast<size_t>(Slot::rank_idx(slots[i]))];
      const std::byte* const weight =
          added_weights_ == nullptr
              ? nullptr
              : offset_ptr(added_weights_, token_idx * plan_.num_topk + i, added_bytes());
      add_term(offset_ptr(base, Slot::row_idx(slots[i]), row_bytes_), weight, terms);
    }
    terms->own.end = static_cast<int>(terms->places.size());
    for (; next != terms->sums.end(); ++next)
      add_term(remote_->row(token_idx, next->second), nullptr, terms);
  }

  /// @param weight  Null for one.
  void add_term(const std::byte* place, const std::byte* weight, NodeTerms* terms) const {
    constexpr float kNarrowOne = 1;
    constexpr double kWideOne = 1;
    terms->places.push_back(place);
    if (added_weights_ == nullptr)
      return;
    if (weight == nullptr)
      weight = reinterpret_cast<const std::byte*>(
          added_bytes() == 8 ? static_cast<const void*>(&kWideOne) : &kNarrowOne);
    terms->weights.insert(terms->weights.end(), weight, weight + added_bytes());
  }

  void add_tokens_by_node(int64_t begin, int64_t end, bool shows_progress, cpu::StoreMode mode) {
    NodeTerms terms;
    for (int64_t token_idx = begin; token_idx < end; ++token_idx) {
      list_terms(token_idx, &terms);
      endpoint_.kernels().sum_grouped_rows(params_.dtype,
                                           terms.places.data(),
                                           terms.weights.empty() ? nullptr : terms.weights.data(),
                                           static_cast<int>(terms.places.size()),
                                           terms.own,
                                           params_.hidden,
                                           offset_ptr(sums_, token_idx, row_bytes_),
                                           mode);
      if (!go_on(token_idx, shows_progress))
        break;
    }
    endpoint_.kernels().store_fence();
  }

  /// With EpConfig.rank_reduction: the rows of each rank, rounded as where only their sum crosses;
  /// these in the order of the ranks.
  void add_tokens_by_rank(int64_t begin, int64_t end, bool shows_progress, cpu::StoreMode mode) {
    const auto num_slots = static_cast<size_t>(plan_.num_slots);
    std::vector<std::pair<int, int64_t>> by_rank;  ///< rank and position of a slot
    std::vector<const std::byte*> rows(num_slots);
    std::vector<std::byte> weights(
        added_weights_ != nullptr ? num_slots * static_cast<size_t>(added_bytes()) : 0);
    std::vector<std::byte> sums(num_slots * static_cast<size_t>(row_bytes_));
    std::vector<const std::byte*> terms;
    for (int64_t token_idx = begin; token_idx < end; ++token_idx) {
      const int64_t* const slots = plan_.slots.data() + token_idx * plan_.num_slots;
      by_rank.clear();
      for (int64_t i = 0; i < plan_.num_slots; ++i)
        if (slots[i] != Slot::kNone)
          by_rank.emplace_back(Slot::rank_idx(slots[i]), i);
      std::sort(by_rank.begin(), by_rank.end());
      terms.clear();
      for (size_t first = 0; first < by_rank.size();) {
        const int rank_idx = by_rank[first].first;
        int num_rows = 0;
        for (; first < by_rank.size() && by_rank[first].first == rank_idx; ++first, ++num_rows) {
          const int64_t i = by_rank[first].second;
          rows[static_cast<size_t>(num_rows)] = offset_ptr(
              bases_.rows[static_cast<size_t>(rank_idx)], Slot::row_idx(slots[i]), row_bytes_);
          if (added_weights_ != nullptr)
            std::memcpy(weights.data() + num_rows * added_bytes(),
                        offset_ptr(added_weights_, token_idx * plan_.num_topk + i, added_bytes()),
                        static_cast<size_t>(added_bytes()));
        }
        // A row alone is its sum.
        if (num_rows == 1 && added_weights_ == nullptr) {
          terms.push_back(rows[0]);
          continue;
        }
        std::byte* const sum =
            offset_ptr(sums.data(), static_cast<int64_t>(terms.size()), row_bytes_);
        endpoint_.kernels().sum_rows(params_.dtype,
                                     rows.data(),
                                     weights.empty() ? nullptr : weights.data(),
                                     num_rows,
                                     params_.hidden,
                                     sum,
                                     cpu::StoreMode::kCached,
                                     nullptr,
                                     0);
        terms.push_back(sum);
      }
      endpoint_.kernels().sum_rows(params_.dtype,
                                   terms.data(),
                                   nullptr,
                                   static_cast<int>(terms.size()),
                                   params_.hidden,
                                   offset_ptr(sums_, token_idx, row_bytes_),
                                   mode,
                                   nullptr,
                                   0);
      if (!go_on(token_idx, shows_progress))
        break;
    }
    endpoint_.kernels().store_fence();
  }

  /// Now and then shows progress; @return false once the operation has been aborted.
  bool go_on(int64_t token_idx, bool shows_progress) {
    if (token_idx % kTokensPerProgress != 0)
      return true;
    if (shows_progress)
      exchange_.progress();
    return !exchange_.is_aborted();
  }

  /// Addresses of the rows of a token, in the order they are added; @return how many.
  int gather(int64_t token_idx, const std::byte** places, std::byte* weights) const {
    const int64_t* const slots = plan_.slots.data() + token_idx * plan_.num_slots;
    int num_places = 0;
    for (int64_t i = 0; i < plan_.num_slots; ++i) {
      if (slots[i] == Slot::kNone)
        continue;
      if (weights != nullptr)
        std::memcpy(weights + num_places * added_bytes(),
                    offset_ptr(added_weights_, token_idx * plan_.num_topk + i, added_bytes()),
                    static_cast<size_t>(added_bytes()));
      const std::byte* const base = bases_.rows[static_cast<size_t>(Slot::rank_idx(slots[i]))];
      places[num_places++] = base != nullptr ? offset_ptr(base, Slot::row_idx(slots[i]), row_bytes_)
                                             : remote_->row(token_idx, i);
    }
    return num_places;
  }

  /// @param shows_progress  True for one of the threads that add.
  void add_tokens(int64_t begin, int64_t end, bool shows_progress, cpu::StoreMode mode) {
    const auto& kernels = endpoint_.kernels();
    const auto num_slots = static_cast<size_t>(plan_.num_slots);
    std::vector<const std::byte*> places(num_slots);
    std::vector<const std::byte*> next_places(num_slots);
    std::vector<std::byte> weights(
        added_weights_ != nullptr ? num_slots * static_cast<size_t>(added_bytes()) : 0);
    std::vector<std::byte> next_weights(weights.size());
    const auto or_null = [](std::vector<std::byte>& bytes) {
      return bytes.empty() ? nullptr : bytes.data();
    };
    int num_next = begin < end ? gather(begin, next_places.data(), or_null(next_weights)) : 0;
    for (int64_t token_idx = begin; token_idx < end; ++token_idx) {
      places.swap(next_places);
      weights.swap(next_weights);
      const int num_places = num_next;
      num_next = token_idx + 1 < end
                     ? gather(token_idx + 1, next_places.data(), or_null(next_weights))
                     : 0;
      kernels.sum_rows(params_.dtype,
                       places.data(),
                       or_null(weights),
                       num_places,
                       params_.hidden,
                       offset_ptr(sums_, token_idx, row_bytes_),
                       mode,
                       mode == cpu::StoreMode::kStreaming ? next_places.data() : nullptr,
                       mode == cpu::StoreMode::kStreaming ? num_next : 0);
      if (!go_on(token_idx, shows_progress))
        break;
    }
    kernels.store_fence();
  }

  void pull_weights(int64_t begin, int64_t end) {
    const auto weight_bytes = static_cast<size_t>(params_.row_weight_bytes);
    if (weight_bytes == 0)
      return;
    const auto token_bytes = static_cast<size_t>(plan_.num_topk) * weight_bytes;
    std::byte* target =
        window_->data() + sums_window_.weights_offset + static_cast<size_t>(begin) * token_bytes;
    sync::fill_shared(target, 0, static_cast<size_t>(end - begin) * token_bytes);
    const bool is_rank_major = plan_.arrangement.is_by_rank();
    for (int64_t token_idx = begin; token_idx < end; ++token_idx) {
      const int64_t* const slots = plan_.slots.data() + token_idx * plan_.num_slots;
      for (int64_t k = 0; k < plan_.num_topk; ++k, target += weight_bytes) {
        const int64_t slot_pos = is_rank_major ? slot_pos_of_choice(token_idx, k, slots) : k;
        if (slot_pos < 0 || slots[slot_pos] == Slot::kNone)
          continue;
        std::byte weight[sizeof(double)];
        sync::pull_shared(
            weight, weight_of(token_idx, slot_pos, is_rank_major ? k : 0), weight_bytes);
        sync::write_shared(target, weight, weight_bytes);
      }
    }
  }

  /// Address of one of the weights beside a row.
  const std::byte* weight_of(int64_t token_idx, int64_t slot_pos, int64_t weight_idx) const {
    const int64_t slot = plan_.slots[static_cast<size_t>(token_idx * plan_.num_slots + slot_pos)];
    const std::byte* const base = bases_.weights[static_cast<size_t>(Slot::rank_idx(slot))];
    if (base == nullptr)
      return offset_ptr(
          remote_->weights(token_idx, slot_pos), weight_idx, params_.row_weight_bytes);
    const int64_t num_weights = plan_.arrangement.is_by_rank() ? plan_.num_recv_topk : 1;
    return offset_ptr(
        base, Slot::row_idx(slot) * num_weights + weight_idx, params_.row_weight_bytes);
  }

  /// Slot of a token that holds choice @p k, -1 for none (rank-major).
  int64_t slot_pos_of_choice(int64_t token_idx, int64_t k, const int64_t* slots) const {
    const int64_t expert_idx = plan_.topk_idx[static_cast<size_t>(token_idx * plan_.num_topk + k)];
    if (expert_idx < 0)
      return -1;
    const int32_t owner = endpoint_.placement().expert_rank[static_cast<size_t>(expert_idx)];
    for (int64_t i = 0; i < plan_.num_slots; ++i)
      if (slots[i] != Slot::kNone && Slot::rank_idx(slots[i]) == owner)
        return i;
    return -1;
  }

  CombineOutcome outcome() {
    outcome_.waited_ns = exchange_.take_waited_ns();
    outcome_.waited_ns.resize(static_cast<size_t>(endpoint_.num_ranks()));
    std::byte* base = nullptr;
    outcome_.owner = copy_out_window(endpoint_,
                                     std::move(window_),
                                     static_cast<uint64_t>(sums_window_.bytes),
                                     params_.copy_out,
                                     &base);
    point_into_sums(params_, base, &outcome_);
    return std::move(outcome_);
  }

  std::byte* sums_ = nullptr;
  PullBases bases_;
  /// Weights as params_.weights has them, of added_bytes() each.
  const std::byte* added_weights_ = nullptr;
  std::vector<double> wide_weights_;  ///< widened weights, if they differ from params_.weights
  std::optional<InternodeCombine> remote_;
};

}  // namespace

CombineOutcome combine(Endpoint& endpoint,
                       const CombineParams& params,
                       const group::InterruptCheck& interrupt_check) {
  return run_operation<Exchange>(
      endpoint, layout::Operation::kCombine, interrupt_check, [&](Exchange& exchange) {
        return CombineOperation(endpoint, params, exchange).run();
      });
}

}  // namespace moe::ops
