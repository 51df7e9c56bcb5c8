#include "schedules/host_layer.h"

#include <cstring>
#include <utility>

#include "core/error.h"
#include "core/math.h"
#include "core/sync.h"
#include "layout/token_sets.h"

namespace moe::simt::checker {

namespace {

/// Factor of the row of a choice in combine: large numbers that cancel, and small ones that
/// are lost beside them.
float factor_of(int64_t choice) {
  constexpr float kFactors[] = {16777216.0f, 1.0f, -16777216.0f};
  return kFactors[choice % 3];
}

}  // namespace

HostLayer::Tokens HostLayer::tokens_of(int rank_idx, int64_t step, int64_t values) const {
  Random random(rank_.world().seed() * 1009 + static_cast<uint64_t>(step) * 31 +
                static_cast<uint64_t>(rank_idx));
  Tokens tokens;
  if ((excluded_ >> rank_idx & 1) != 0)
    return tokens;
  tokens.num_tokens = random.between(0, shape_.most_tokens);
  for (int64_t token_idx = 0; token_idx < tokens.num_tokens; ++token_idx) {
    // Small whole numbers: sums are exact in any order.
    for (int64_t i = 0; i < shape_.hidden; ++i)
      tokens.x.push_back(static_cast<float>(1 + rank_idx * 1000 + token_idx * 100 + i + values));
    for (int64_t i = 0; i < scale_row_bytes(); ++i)
      tokens.scales.push_back(
          static_cast<std::byte>(1 + (rank_idx * 83 + token_idx * 17 + i * 5 + values) % 255));
    for (int64_t k = 0; k < shape_.num_topk; ++k) {
      const int64_t expert_idx = random.between(-1, shape_.num_experts - 1);
      const bool is_there = expert_idx >= 0 && (excluded_ >> rank_of(expert_idx) & 1) == 0;
      tokens.topk_idx.push_back(is_there ? expert_idx : -1);
      tokens.weights.push_back(static_cast<float>(token_idx * 16 + k + 1));
    }
  }
  return tokens;
}

DispatchSpec HostLayer::spec_of(int64_t step) const {
  layout::Arrangement arrangement;
  arrangement.layout = shape_.layout;
  arrangement.expert_alignment = shape_.alignment;
  std::vector<AskedOfRank> asked;
  for (int rank_idx = 0; rank_idx < rank_.num_ranks(); ++rank_idx)
    asked.push_back({tokens_of(rank_idx, step, 0).topk_idx, shape_.num_topk, {}, -1});
  if (const layout::Replicas* const replicas = endpoint_->replicas().get())
    choose_slots(*replicas, &asked);
  return DispatchSpec(arrangement, {}, endpoint_->placement().expert_rank, std::move(asked));
}

/// By csrc/layout, which replica_spec.py holds.
void HostLayer::choose_slots(const layout::Replicas& replicas,
                             std::vector<AskedOfRank>* asked) const {
  const layout::Placement& placement = endpoint_->placement();
  layout::CountMatrix counts(placement.num_ranks, placement.num_experts);
  for (int rank_idx = 0; rank_idx < placement.num_ranks; ++rank_idx) {
    const AskedOfRank& of_rank = (*asked)[static_cast<size_t>(rank_idx)];
    layout::count_choices(of_rank.topk_idx.data(),
                          of_rank.num_tokens(),
                          of_rank.num_topk,
                          &replicas,
                          placement,
                          counts.row(rank_idx),
                          nullptr);
  }
  layout::share_rows(replicas, placement, &counts);
  for (int rank_idx = 0; rank_idx < placement.num_ranks; ++rank_idx) {
    std::vector<int64_t>& chosen = (*asked)[static_cast<size_t>(rank_idx)].topk_idx;
    chosen =
        layout::choose_slots(chosen.data(), std::ssize(chosen), replicas, counts.row(rank_idx));
  }
}

ops::DispatchOutcome HostLayer::dispatch(const Tokens& tokens,
                                         const std::shared_ptr<const ops::PlanHeader>& plan) {
  ops::DispatchParams params;
  params.x = reinterpret_cast<const std::byte*>(tokens.x.data());
  params.topk_idx = tokens.topk_idx.data();
  params.num_tokens = tokens.num_tokens;
  params.num_topk = shape_.num_topk;
  params.source_row_bytes = row_bytes();
  params.row_bytes = row_bytes();
  params.dtype = dlpack_type(DType::kFloat32);
  if (shape_.with_weights) {
    params.weights = reinterpret_cast<const std::byte*>(tokens.weights.data());
    params.weight_bytes = 4;
  }
  if (shape_.num_scales > 0) {
    params.quantization = {1 | (shape_.has_scale_columns ? 2 : 0)};
    params.num_scales = shape_.num_scales;
    params.scale_bytes = shape_.scale_bytes;
    params.scales = tokens.scales.data();
    params.scale_row_stride = scale_row_bytes();
    params.scale_step = shape_.scale_bytes;
  }
  params.layout = shape_.layout;
  params.expert_alignment = shape_.alignment;
  params.copy_out = shape_.copy_out;
  params.plan = plan;
  if (plan == nullptr)
    params.replicas = endpoint_->replicas();
  ops::DispatchOutcome outcome = ops::dispatch(*endpoint_, params, interrupt_check_);
  ++num_completed_;
  return outcome;
}

void HostLayer::check_row(const ops::DispatchOutcome& outcome,
                          int64_t row_idx,
                          const float* expected,
                          const char* what) const {
  const std::byte* const row = offset_ptr(outcome.rows, row_idx, row_bytes());
  std::vector<float> found(static_cast<size_t>(shape_.hidden));
  sync::read_shared(found.data(), row, static_cast<size_t>(row_bytes()));
  const float first = expected == nullptr ? 0.0f : *expected;
  for (int64_t i = 0; i < shape_.hidden; ++i)
    if (found[static_cast<size_t>(i)] != (expected == nullptr ? 0.0f : expected[i]))
      return rank_.fail(
          concat(what, ": row ", row_idx, " holds ", found[0], " instead of ", first));
}

/// @param expected  Null for padding, which is zero.
void HostLayer::check_scales(const ops::DispatchOutcome& outcome,
                             int64_t row_idx,
                             const std::byte* expected) const {
  const auto bytes = static_cast<size_t>(shape_.scale_bytes);
  for (int64_t i = 0; i < shape_.num_scales; ++i) {
    std::vector<std::byte> found(bytes);
    std::vector<std::byte> wanted(bytes);
    sync::read_shared(
        found.data(),
        outcome.scales + outcome.scale_map.place(row_idx) + i * outcome.scale_map.step(),
        bytes);
    if (expected != nullptr)
      std::memcpy(wanted.data(), expected + i * shape_.scale_bytes, bytes);
    if (found != wanted)
      return rank_.fail(concat("scale factor ", i, " of row ", row_idx, " is not its own"));
  }
}

void HostLayer::check_rows(const ops::DispatchOutcome& outcome,
                           int64_t step,
                           int64_t values) const {
  std::vector<Tokens> all;
  for (int rank_idx = 0; rank_idx < rank_.num_ranks(); ++rank_idx)
    all.push_back(tokens_of(rank_idx, step, values));
  const DispatchSpec spec = spec_of(step);
  const std::vector<Origin>& rows = spec.rows(rank_.rank_idx());
  if (std::ssize(rows) != outcome.plan->num_rows())
    return rank_.fail(
        concat("dispatch gives ", outcome.plan->num_rows(), " rows instead of ", rows.size()));
  for (int64_t row_idx = 0; row_idx < std::ssize(rows); ++row_idx) {
    const Origin& origin = rows[static_cast<size_t>(row_idx)];
    if (origin.is_nothing()) {
      check_scales(outcome, row_idx, nullptr);
      check_row(outcome, row_idx, nullptr, "padding");
      continue;
    }
    const Tokens& tokens = all[static_cast<size_t>(origin.rank_idx)];
    if (shape_.with_weights && shape_.layout != layout::RowLayout::kRankMajor) {
      float weight = 0.0f;
      sync::read_shared(&weight, outcome.weights + row_idx * 4, sizeof(weight));
      if (weight !=
          tokens.weights[static_cast<size_t>(origin.token_idx * shape_.num_topk + origin.topk_pos)])
        rank_.fail(concat("weight of row ", row_idx, " is ", weight));
    }
    check_scales(outcome, row_idx, tokens.scales.data() + origin.token_idx * scale_row_bytes());
    check_row(outcome, row_idx, tokens.x.data() + origin.token_idx * shape_.hidden, "dispatch");
  }
}

void HostLayer::combine(const ops::DispatchOutcome& outcome, int64_t step, const Tokens& tokens) {
  const int64_t bytes = outcome.plan->num_rows() * row_bytes();
  std::shared_ptr<Window> window;
  std::vector<std::byte> private_rows(static_cast<size_t>(bytes));
  sync::read_shared(private_rows.data(), outcome.rows, private_rows.size());
  ops::CombineParams params;
  params.x = private_rows.data();
  if (shape_.is_in_place) {
    window = rank_.heap().allocate(static_cast<uint64_t>(bytes));
    sync::write_shared(window->data(), private_rows.data(), private_rows.size());
    params.x = window->data();
  }
  params.has_rows = true;
  params.dtype = DType::kFloat32;
  params.hidden = shape_.hidden;
  params.plan = outcome.plan;
  params.copy_out = shape_.copy_out;
  if (shape_.with_weights) {
    params.row_weights = outcome.weights;
    params.row_weight_bytes = 4;
  }
  std::vector<float> factors;
  if (shape_.with_factors) {
    for (size_t i = 0; i < tokens.topk_idx.size(); ++i)
      factors.push_back(factor_of(static_cast<int64_t>(i)));
    params.weights = reinterpret_cast<const std::byte*>(factors.data());
    params.weight_bytes = 4;
  }
  const ops::CombineOutcome sums = ops::combine(*endpoint_, params, interrupt_check_);
  ++num_completed_;
  read_elsewhere(sums.sums, tokens.num_tokens * row_bytes());
  if (window)
    sync::fill_shared(window->data(), 0x7F, private_rows.size());
  const DispatchSpec spec = spec_of(step);
  std::vector<float> row(static_cast<size_t>(shape_.hidden));
  for (int64_t token_idx = 0; token_idx < tokens.num_tokens; ++token_idx) {
    for (int64_t k = 0; shape_.with_weights && k < shape_.num_topk; ++k) {
      const auto choice = static_cast<size_t>(token_idx * shape_.num_topk + k);
      if (tokens.topk_idx[choice] < 0)
        continue;
      float weight = 0.0f;
      sync::read_shared(&weight, sums.weights + choice * 4, sizeof(weight));
      if (weight != tokens.weights[choice])
        rank_.fail(concat("combine: weight ", choice, " is ", weight));
    }
    sync::read_shared(row.data(), sums.sums + token_idx * row_bytes(), row.size() * 4);
    const float expected = sum_of(tokens, token_idx, spec.terms(rank_.rank_idx(), token_idx));
    if (row[0] != expected)
      rank_.fail(concat("combine: token ", token_idx, " is ", row[0], " instead of ", expected));
  }
}

float HostLayer::sum_of(const Tokens& tokens,
                        int64_t token_idx,
                        const std::vector<Term>& terms) const {
  const NodeLayout& nodes = endpoint_->group().nodes();
  const bool by_rank = endpoint_->config().rank_reduction;
  const bool by_node = endpoint_->config().node_reduction;
  const int num_parts = by_rank ? endpoint_->num_ranks() : by_node ? nodes.num_nodes() : 1;
  const auto part_of = [&](int rank_idx) {
    return by_rank ? rank_idx : by_node ? nodes.node_idx(rank_idx) : 0;
  };
  const float value = tokens.x[static_cast<size_t>(token_idx * shape_.hidden)];
  float sum = 0.0f;
  for (int part_idx = 0; part_idx < num_parts; ++part_idx) {
    float partial = 0.0f;
    for (const Term& term : terms)
      if (part_of(term.rank_idx) == part_idx)
        partial += shape_.with_factors
                       ? value * factor_of(token_idx * shape_.num_topk + term.topk_pos)
                       : value;
    sum += partial;
  }
  return sum;
}

/// The caller of an operation may pass its result on with no more than a release.
void HostLayer::read_elsewhere(const std::byte* begin, int64_t bytes) const {
  if (!shape_.is_read_elsewhere)
    return;
  rank_.start("reader", [begin, bytes] {
    std::vector<std::byte> copy(static_cast<size_t>(bytes));
    sync::read_shared(copy.data(), begin, copy.size());
  });
  rank_.join_all();
}

void HostLayer::run(int64_t step) {
  const Tokens tokens = tokens_of(rank_.rank_idx(), step, 0);
  const ops::DispatchOutcome outcome = dispatch(tokens, nullptr);
  read_elsewhere(outcome.rows, outcome.plan->num_rows() * row_bytes());
  check_rows(outcome, step, 0);
  combine(outcome, step, tokens);
}

void HostLayer::run_twice(int64_t step) {
  constexpr int64_t kOtherValues = 7;
  const Tokens tokens = tokens_of(rank_.rank_idx(), step, 0);
  const ops::DispatchOutcome first = dispatch(tokens, nullptr);
  const Tokens others = tokens_of(rank_.rank_idx(), step, kOtherValues);
  const ops::DispatchOutcome second = dispatch(others, first.plan);
  check_rows(first, step, 0);
  check_rows(second, step, kOtherValues);
  combine(second, step, others);
}

void HostLayer::run_dispatch(int64_t step) {
  check_rows(dispatch(tokens_of(rank_.rank_idx(), step, 0), nullptr), step, 0);
}

void HostLayer::run_combines(int64_t step) {
  const Tokens tokens = tokens_of(rank_.rank_idx(), step, 0);
  const ops::DispatchOutcome outcome = dispatch(tokens, nullptr);
  while (true)
    combine(outcome, step, tokens);
}

void HostLayer::run_rejected(int64_t step, int bad_rank) {
  Tokens tokens = tokens_of(rank_.rank_idx(), step, 0);
  if (rank_.rank_idx() == bad_rank) {
    tokens = Tokens{1, std::vector<float>(static_cast<size_t>(shape_.hidden)), {}, {}, {}};
    tokens.topk_idx.assign(static_cast<size_t>(shape_.num_topk), shape_.num_experts);
    tokens.weights.assign(static_cast<size_t>(shape_.num_topk), 1.0f);
  }
  try {
    dispatch(tokens, nullptr);
  } catch (const InvalidArgument& error) {
    const std::string text = error.what();
    if (text.find(concat("rank ", bad_rank, ": topk_idx[0, 0] = ", shape_.num_experts)) != 0)
      rank_.fail(concat("another rejection: ", text));
    return;
  }
  rank_.fail("a bad expert id was not rejected");
}

}  // namespace moe::simt::checker
