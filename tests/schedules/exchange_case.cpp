#include "schedules/exchange_case.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace moe::simt::checker {

namespace {

using kernels::OperationStatus;
using layout::OnOverflow;
using layout::Operation;
using layout::RowLayout;
using layout::RowStatus;

constexpr int64_t kMostTokens = 9;

class Draw {
 public:
  Draw(Random& random, const layout::Placement& placement, const std::vector<uint8_t>& is_active)
      : random_(random), placement_(placement), is_active_(is_active) {}

  ExchangeCase run() {
    draw_rules();
    for (int rank_idx = 0; rank_idx < num_ranks(); ++rank_idx)
      draw_rank();
    if (random_.chance(1, 8))
      spoil();
    count();
    expect();
    return std::move(case_);
  }

 private:
  int num_ranks() const { return placement_.num_ranks; }
  bool is_active(int rank_idx) const { return is_active_[static_cast<size_t>(rank_idx)] != 0; }
  RankInput& input(int rank_idx) { return case_.ranks[static_cast<size_t>(rank_idx)]; }

  void draw_rules() {
    constexpr Operation kOperations[] = {Operation::kDispatch,
                                         Operation::kDispatch,
                                         Operation::kCachedDispatch,
                                         Operation::kCombine};
    case_.operation = kOperations[random_.below(4)];
    auto& arrangement = case_.arrangement;
    arrangement.layout = static_cast<RowLayout>(random_.below(3));
    const bool is_low_latency = arrangement.layout == RowLayout::kLowLatency;
    if (arrangement.layout == RowLayout::kExpertMajor)
      arrangement.expert_alignment = int64_t{1} << random_.below(4);
    if (is_low_latency)
      arrangement.rows_per_expert =
          random_.chance(1, 4) ? random_.between(1, 12) : num_ranks() * kMostTokens * 4;
    if (!is_low_latency && random_.chance(2, 3)) {
      case_.rule.on_overflow = static_cast<OnOverflow>(random_.below(3));
      if (arrangement.is_by_rank() && case_.rule.on_overflow == OnOverflow::kDrop)
        case_.rule.on_overflow = OnOverflow::kGrow;  // nobody drops rows of that layout
      if (arrangement.layout == RowLayout::kExpertMajor && random_.chance(1, 2))
        case_.rule.expert_capacity = random_.between(0, 10);
    }
    case_.is_column_major = random_.chance(1, 3);
    case_.with_topk_idx = case_.is_counted() && arrangement.is_by_rank();
    case_.has_host_read = random_.chance(1, 2);
    routing_ = static_cast<int>(random_.below(4));
    has_fixed_rows_ = !is_low_latency && random_.chance(1, 3);
    has_gradients_ = random_.chance(1, 3);
  }

  void draw_rank() {
    RankInput& own = case_.ranks.emplace_back();
    const int64_t num_tokens = random_.chance(1, 5) ? 0 : random_.between(0, kMostTokens);
    own.num_topk = random_.between(1, 4);
    own.tokens_per_chunk = static_cast<int>(random_.between(1, 5));
    for (int64_t i = 0; i < num_tokens * own.num_topk; ++i)
      own.topk_idx.push_back(draw_expert());
    own.is_masked.resize(static_cast<size_t>(num_ranks()));
    if (case_.arrangement.layout == RowLayout::kLowLatency && random_.chance(1, 4))
      own.is_masked[random_.below(static_cast<uint32_t>(num_ranks()))] = 1;
    if (has_fixed_rows_ && random_.chance(3, 4))
      own.fixed_rows = random_.between(0, 30);
    auto& arguments = own.arguments;
    arguments.operation = static_cast<int32_t>(case_.operation);
    arguments.layout = static_cast<int32_t>(case_.arrangement.layout);
    arguments.expert_alignment = static_cast<int32_t>(case_.arrangement.expert_alignment);
    arguments.row_bytes = 48;
    arguments.weight_bytes = 4;
    arguments.num_scales = 3;
    arguments.scale_bytes = 4;
    arguments.on_overflow = static_cast<int32_t>(case_.rule.on_overflow);
    arguments.expert_capacity = case_.rule.expert_capacity;
    arguments.plan_hash = case_.is_counted() ? 0 : 77;
    arguments.gradients = draw_gradients();
  }

  /// Seldom of no gradients at all, which excludes all who need one.
  int32_t draw_gradients() {
    using layout::GradientWord;
    if (!has_gradients_ || random_.chance(1, 6))
      return 0;
    const int32_t word = GradientWord::kEnabled;
    if (random_.chance(1, 8))
      return word | 4 << GradientWord::kWeightBytesShift;
    const bool is_needed = random_.chance(1, 3);
    return is_needed ? word | GradientWord::kNeedsRows | draw_origin() : word;
  }

  /// Origin of the rows of a combine.
  int32_t draw_origin() {
    using layout::GradientWord;
    if (case_.is_counted())
      return 0;
    return random_.chance(1, 2) ? GradientWord::kReachesDispatch : GradientWord::kLeavesDispatch;
  }

  int64_t draw_expert() {
    const auto num_experts = static_cast<uint32_t>(placement_.num_experts);
    switch (routing_) {
      case 0:  // everything to one expert
        return 0;
      case 1:  // few experts, so that a token chooses one twice
        return random_.below(num_experts < 2 ? num_experts : 2);
      case 2:
        return random_.between(-1, placement_.num_experts - 1);
      default:
        return random_.below(num_experts);
    }
  }

  /// One rank does something wrong.
  void spoil() {
    RankInput& culprit = input(static_cast<int>(random_.below(static_cast<uint32_t>(num_ranks()))));
    switch (random_.below(3)) {
      case 0:
        culprit.status =
            random_.chance(1, 2) ? RowStatus::kInvalidArgument : RowStatus::kNoCapacity;
        culprit.message = concat("x has ", random_.below(100), " columns");
        break;
      case 1:
        culprit.arguments.row_bytes = 64;
        break;
      default:
        if (case_.is_counted() && !culprit.topk_idx.empty()) {
          const auto place = random_.below(static_cast<uint32_t>(culprit.topk_idx.size()));
          culprit.topk_idx[place] = random_.chance(1, 2) ? placement_.num_experts : -2;
        }
    }
  }

  /// Rows of the count matrix, and what the device finds wrong with them.
  void count() {
    case_.asked = layout::CountMatrix(num_ranks(), placement_.num_experts);
    case_.bad_value.assign(static_cast<size_t>(num_ranks()), -1);
    for (int rank_idx = 0; rank_idx < num_ranks(); ++rank_idx) {
      RankInput& own = input(rank_idx);
      case_.row_status.push_back(own.status);
      if (!is_active(rank_idx))
        continue;
      int32_t* const row = case_.asked.row(rank_idx);
      const int64_t bad_idx = layout::count_choices(
          own.topk_idx.data(), own.num_tokens(), own.num_topk, placement_, row);
      int32_t* const to_rank = row + placement_.num_experts;
      to_rank[num_ranks()] = static_cast<int32_t>(own.fixed_rows);
      to_rank[num_ranks() + 1] = static_cast<int32_t>(own.num_topk);
      if (!case_.is_counted()) {
        // What a handle says: nobody in it has failed.
        for (int dst_rank = 0; dst_rank < num_ranks(); ++dst_rank)
          if (!is_active(dst_rank))
            clear_rank(row, dst_rank);
        continue;
      }
      if (bad_idx >= 0 && own.status == RowStatus::kOk) {
        case_.row_status.back() = RowStatus::kBadExpert;
        case_.bad_value[static_cast<size_t>(rank_idx)] = bad_idx;
        continue;
      }
      apply_failures(rank_idx, to_rank);
    }
  }

  void clear_rank(int32_t* row, int dst_rank) const {
    for (const int32_t expert_idx : placement_.local_experts[static_cast<size_t>(dst_rank)])
      row[expert_idx] = 0;
    row[placement_.num_experts + dst_rank] = 0;
  }

  void apply_failures(int rank_idx, int32_t* to_rank) {
    RankInput& own = input(rank_idx);
    for (int dst_rank = 0; dst_rank < num_ranks(); ++dst_rank) {
      const bool is_masked =
          !is_active(dst_rank) || own.is_masked[static_cast<size_t>(dst_rank)] != 0;
      if (case_.arrangement.layout == RowLayout::kLowLatency) {
        if (is_masked)
          to_rank[dst_rank] = layout::CountMatrix::kMasked;
      } else if (!is_active(dst_rank) && to_rank[dst_rank] > 0 &&
                 case_.row_status.back() == RowStatus::kOk) {
        case_.row_status.back() = RowStatus::kFailedRank;
        case_.bad_value[static_cast<size_t>(rank_idx)] = to_rank[dst_rank];
      }
    }
  }

  void expect() {
    const layout::OperationArguments* first = nullptr;
    bool is_rejected = false;
    bool is_needed = false;
    bool is_apart = false;
    for (int rank_idx = 0; rank_idx < num_ranks(); ++rank_idx) {
      if (!is_active(rank_idx))
        continue;
      const RankInput& own = input(rank_idx);
      first = first == nullptr ? &own.arguments : first;
      is_rejected = is_rejected || !own.arguments.is_same_as(*first) ||
                    case_.row_status[static_cast<size_t>(rank_idx)] != RowStatus::kOk;
      is_needed = is_needed || (own.arguments.gradients & layout::GradientWord::kNeedsRows) != 0;
      // Needs and origins aside, words are all alike.
      using layout::GradientWord;
      const int32_t alike = ~GradientWord::kOfBackward | GradientWord::kEnabled;
      is_apart = is_apart || ((own.arguments.gradients ^ first->gradients) & alike) != 0;
    }
    is_rejected = is_rejected || (is_needed && is_apart);
    if (is_rejected)
      return end(OperationStatus::kRejected);
    ask_spec();
    if (case_.is_counted() && case_.spec->has_overflow())
      return end(OperationStatus::kOverflow);
    case_.kept = case_.spec->counts();
    if (case_.is_dispatch())
      offer_windows();
  }

  void ask_spec() {
    std::vector<AskedOfRank> asked;
    for (int rank_idx = 0; rank_idx < num_ranks(); ++rank_idx) {
      const RankInput& own = input(rank_idx);
      AskedOfRank& said = asked.emplace_back();
      if (!is_active(rank_idx)) {
        said.fixed_rows = 0;
        continue;
      }
      said = own;
      said.is_masked.clear();
      for (int64_t& expert_idx : said.topk_idx)
        if (expert_idx >= 0 && !case_.is_counted() &&
            !is_active(placement_.expert_rank[static_cast<size_t>(expert_idx)]))
          expert_idx = -1;
      if (case_.is_counted() && case_.arrangement.layout == RowLayout::kLowLatency)
        for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank)
          said.is_masked.push_back(!is_active(peer_rank) ||
                                   own.is_masked[static_cast<size_t>(peer_rank)] != 0);
    }
    // What a handle holds was within its limits once.
    layout::CapacityRule rule = case_.rule;
    if (!case_.is_counted() && rule.on_overflow == OnOverflow::kRaise)
      rule.on_overflow = OnOverflow::kGrow;
    case_.spec = std::make_shared<DispatchSpec>(
        case_.arrangement, rule, placement_.expert_rank, std::move(asked));
    case_.difference_of_layout = case_.spec->difference_of_layout(case_.asked);
  }

  void end(OperationStatus status) { case_.first_status = case_.last_status = status; }

  void offer_windows() {
    case_.is_short.resize(static_cast<size_t>(num_ranks()));
    for (int rank_idx = 0; rank_idx < num_ranks(); ++rank_idx) {
      const int64_t num_rows = case_.spec->received(rank_idx).num_rows;
      const auto scales = layout::ScaleMap::make(case_.arrangement.layout,
                                                 num_rows,
                                                 case_.arrangement.rows_per_expert,
                                                 3,
                                                 4,
                                                 case_.is_column_major);
      case_.windows.push_back(layout::ReceiveWindow::make(case_.arrangement.layout,
                                                          num_rows,
                                                          input(rank_idx).arguments.row_bytes,
                                                          scales,
                                                          4,
                                                          case_.kept.num_recv_topk(),
                                                          case_.with_topk_idx,
                                                          false));
      const auto needed = static_cast<uint64_t>(case_.windows.back().bytes);
      RankInput& own = input(rank_idx);
      own.offered_bytes = needed + random_.below(3) * 64;
      own.second_bytes = needed;
      if (!case_.is_counted() || needed == 0 || !is_active(rank_idx) || random_.chance(3, 4))
        continue;
      own.offered_bytes = random_.chance(1, 2) ? needed - 1 : 0;
      case_.is_short[static_cast<size_t>(rank_idx)] = 1;
      case_.first_status = OperationStatus::kShort;
      if (random_.chance(1, 4)) {
        own.second_bytes = 0;
        case_.last_status = OperationStatus::kShort;
      }
    }
    if (!case_.has_host_read)
      case_.last_status = case_.first_status;
  }

  Random& random_;
  const layout::Placement& placement_;
  const std::vector<uint8_t>& is_active_;
  ExchangeCase case_;
  int routing_ = 0;
  bool has_fixed_rows_ = false;
  bool has_gradients_ = false;
};

}  // namespace

ExchangeCase draw_exchange_case(Random& random,
                                const layout::Placement& placement,
                                const std::vector<uint8_t>& is_active) {
  return Draw(random, placement, is_active).run();
}

}  // namespace moe::simt::checker
