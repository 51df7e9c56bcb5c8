#include "schedules/kernel_case.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "layout/wire_format.h"

namespace moe::simt::checker {

using layout::Slot;

layout::Arrangement KernelCase::arrangement() const {
  layout::Arrangement arrangement;
  arrangement.layout = layout;
  arrangement.expert_alignment = expert_alignment;
  if (layout == layout::RowLayout::kLowLatency)
    arrangement.rows_per_expert = num_ranks * (num_max_tokens + num_spare_tokens);
  arrangement.has_origins = has_origins();
  return arrangement;
}

layout::Replicas KernelCase::replicas(const layout::Placement& placement) const {
  return layout::Replicas(slot_expert,
                          num_logical_experts,
                          num_local_ranks > 0 ? num_local_ranks : num_ranks,
                          placement);
}

int64_t KernelCase::origin_of(int rank_idx, const int64_t* slots, int64_t i) const {
  const int dst_rank = Slot::rank_idx(slots[i]);
  for (int64_t j = 0; is_elsewhere(rank_idx, dst_rank) && j < i; ++j)
    if (slots[j] != Slot::kNone && Slot::rank_idx(slots[j]) == dst_rank)
      return Slot::row_idx(slots[j]);
  return Slot::row_idx(slots[i]);
}

cpu::RowQuantization quantization_named(std::string_view name, DType dtype, int64_t hidden) {
  const auto& formats = layout::format_table();
  const auto format = std::find_if(
      formats.begin(), formats.end(), [&](const auto& each) { return each.name == name; });
  return cpu::row_quantization(*format, format->scale_formats.front(), dtype, hidden);
}

void ExpectedBytes::set(int64_t offset, const void* from, int64_t num_bytes) {
  std::memcpy(bytes.data() + offset, from, static_cast<size_t>(num_bytes));
  std::fill_n(is_defined.begin() + offset, num_bytes, uint8_t{1});
}

void ExpectedBytes::fill(int64_t offset, int value, int64_t num_bytes) {
  std::fill_n(bytes.begin() + offset, num_bytes, static_cast<std::byte>(value));
  std::fill_n(is_defined.begin() + offset, num_bytes, uint8_t{1});
}

// --- Inputs ------------------------------------------------------------------------------------

namespace {

float draw_number(Random* random) {
  constexpr uint32_t kSpecial[] = {0x7F800000u, 0xFFC00000u, 0x80000000u, 0x00010000u, 0x00000001u};
  if (random->chance(1, 64))
    return std::bit_cast<float>(kSpecial[random->below(std::size(kSpecial))]);
  const uint32_t exponent = 120 + random->below(14);
  return std::bit_cast<float>(random->below(2) << 31 | exponent << 23 |
                              static_cast<uint32_t>(random->next() & 0x7FFFFF));
}

RankInputs draw_inputs(const KernelCase& shape, Random* random) {
  RankInputs inputs;
  inputs.num_topk = shape.num_topk;
  const int64_t num_choices = random->between(0, shape.num_max_tokens) * shape.num_topk;
  // Now and then all tokens want few experts.
  const int num_wanted =
      random->chance(1, 4) ? 1 + static_cast<int>(random->below(2)) : shape.num_ids();
  for (int64_t i = 0; i < num_choices; ++i) {
    const bool is_none = random->chance(1, 8);
    const uint32_t expert_idx =
        random->below(static_cast<uint32_t>(std::min(num_wanted, shape.num_ids())));
    inputs.topk_idx.push_back(is_none ? int64_t{-1} : int64_t{expert_idx});
    inputs.weights.push_back(draw_number(random));
  }
  inputs.x = draw_rows(shape.dtype, inputs.num_tokens() * shape.hidden, random);
  inputs.is_masked.assign(static_cast<size_t>(shape.num_ranks), 0);
  if (shape.with_masks && random->chance(1, 3))
    inputs.is_masked[random->below(static_cast<uint32_t>(shape.num_ranks))] = 1;
  if (shape.has_fixed_rows)
    inputs.fixed_rows =
        shape.expert_alignment *
        random->between(0, shape.num_max_tokens * shape.num_topk / shape.expert_alignment);
  return inputs;
}

// --- What a dispatch delivers ------------------------------------------------------------------

layout::CountMatrix asked_counts(const KernelCase& shape,
                                 const layout::Placement& placement,
                                 const std::vector<RankInputs>& inputs) {
  layout::CountMatrix counts(shape.num_ranks, shape.num_experts);
  for (int rank_idx = 0; rank_idx < shape.num_ranks; ++rank_idx) {
    const RankInputs& own = inputs[static_cast<size_t>(rank_idx)];
    int32_t* const row = counts.row(rank_idx);
    layout::count_choices(own.topk_idx.data(), own.num_tokens(), shape.num_topk, placement, row);
    int32_t* const to_rank = row + shape.num_experts;
    for (int peer_rank = 0; peer_rank < shape.num_ranks; ++peer_rank)
      if (own.is_masked[static_cast<size_t>(peer_rank)] != 0)
        to_rank[peer_rank] = layout::CountMatrix::kMasked;
    to_rank[shape.num_ranks] = static_cast<int32_t>(own.fixed_rows);
    to_rank[shape.num_ranks + 1] = shape.num_topk;
  }
  return counts;
}

/// Makes slots of what ranks pass; tests/unit/test_replicas.py holds these functions to the
/// definition.
void choose_replicas(const KernelCase& shape,
                     const layout::Placement& placement,
                     std::vector<RankInputs>* inputs) {
  const layout::Replicas replicas = shape.replicas(placement);
  layout::CountMatrix counts = asked_counts(shape, placement, *inputs);
  layout::share_rows(replicas, placement, &counts);
  for (int rank_idx = 0; rank_idx < shape.num_ranks; ++rank_idx) {
    RankInputs& own = (*inputs)[static_cast<size_t>(rank_idx)];
    own.topk_idx = layout::choose_slots(
        own.passed_idx.data(), std::ssize(own.passed_idx), replicas, counts.row(rank_idx));
  }
}

/// Rows that share_rows() leaves where tokens bound for a rank were: rows, kept or not, where any
/// is kept.
void count_rows_to_ranks(const layout::Placement& placement,
                         const std::vector<RankInputs>& inputs,
                         layout::CountMatrix* kept) {
  for (int src_rank = 0; src_rank < kept->num_ranks; ++src_rank)
    for (int dst_rank = 0; dst_rank < kept->num_ranks; ++dst_rank) {
      int32_t& to_rank = kept->row(src_rank)[kept->num_experts + dst_rank];
      const auto& chosen = inputs[static_cast<size_t>(src_rank)].topk_idx;
      if (to_rank > 0)
        to_rank = static_cast<int32_t>(std::ranges::count_if(chosen, [&](int64_t slot) {
          return slot >= 0 && placement.expert_rank[static_cast<size_t>(slot)] == dst_rank;
        }));
    }
}

/// Takes away choices of every expert beyond its capacity, or beyond one more, and gives every rank
/// with fixed rows as many as it needs, or so many less that one row has no place.
void move_to_limits(const KernelCase& shape,
                    const layout::Placement& placement,
                    std::vector<RankInputs>* inputs,
                    Random* random) {
  const int64_t most = shape.rule.expert_capacity < 0
                           ? shape.num_ranks * shape.num_max_tokens * shape.num_topk
                           : shape.rule.expert_capacity + static_cast<int64_t>(random->below(2));
  std::vector<int64_t> totals(static_cast<size_t>(shape.num_experts));
  for (RankInputs& own : *inputs)
    for (int64_t& expert_idx : own.topk_idx)
      if (expert_idx >= 0 && ++totals[static_cast<size_t>(expert_idx)] > most)
        expert_idx = -1;
  if (!shape.has_fixed_rows)
    return;
  const layout::CountMatrix asked = asked_counts(shape, placement, *inputs);
  for (int rank_idx = 0; rank_idx < shape.num_ranks; ++rank_idx) {
    const int64_t needed =
        layout::num_required_rows(asked, placement, shape.arrangement(), rank_idx);
    const int64_t missing = random->chance(1, 2) ? 0 : shape.expert_alignment;
    (*inputs)[static_cast<size_t>(rank_idx)].fixed_rows = std::max<int64_t>(needed - missing, 0);
  }
}

layout::ReceiveWindow window_of(const KernelCase& shape, const Step& step, int64_t num_rows) {
  const auto arrangement = shape.arrangement();
  const auto scales = layout::ScaleMap::make(shape.layout,
                                             num_rows,
                                             arrangement.rows_per_expert,
                                             shape.num_scales(),
                                             shape.scale_bytes(),
                                             shape.is_column_major);
  return layout::ReceiveWindow::make(shape.layout,
                                     num_rows,
                                     shape.row_bytes(),
                                     scales,
                                     shape.with_weights ? 4 : 0,
                                     step.num_recv_topk,
                                     shape.is_by_rank(),
                                     shape.has_origins());
}

/// Zeroes of a row that nobody sends.
void fill_padding(const KernelCase& shape,
                  const Step& step,
                  ExpectedDispatch* to,
                  int64_t row_idx) {
  const layout::ReceiveWindow& window = to->window;
  const int64_t per_row = shape.is_by_rank() ? step.num_recv_topk : 1;
  to->bytes.fill(row_idx * shape.row_bytes(), 0, shape.row_bytes());
  for (int64_t i = 0; i < window.scales.num_scales; ++i)
    to->bytes.fill(window.scales_offset + window.scales.place(row_idx) + i * window.scales.step(),
                   0,
                   window.scales.scale_bytes);
  if (shape.with_weights)
    to->bytes.fill(window.weights_offset + row_idx * per_row * 4, 0, per_row * 4);
  if (shape.is_by_rank())
    to->bytes.fill(window.topk_idx_offset + row_idx * per_row * 8, 0xFF, per_row * 8);
  if (shape.has_origins()) {
    const auto origin = static_cast<int32_t>(row_idx);
    to->bytes.set(window.origins_offset + row_idx * 4, &origin, 4);
  }
}

void fill_all_padding(const KernelCase& shape, const Step& step, ExpectedDispatch* to, int rank) {
  if (shape.layout == layout::RowLayout::kLowLatency)
    return;
  const std::vector<Origin>& rows = step.spec->rows(rank);
  for (int64_t row_idx = 0; row_idx < std::ssize(rows); ++row_idx) {
    if (rows[static_cast<size_t>(row_idx)].is_nothing())
      fill_padding(shape, step, to, row_idx);
    else
      ++to->num_filled_rows;
  }
}

void deliver_choices(const KernelCase& shape,
                     const layout::Placement& placement,
                     const Step& step,
                     const RankInputs& from,
                     int64_t token_idx,
                     int64_t slot,
                     ExpectedDispatch* to) {
  const layout::ReceiveWindow& window = to->window;
  const int64_t row_idx = Slot::row_idx(slot);
  for (int64_t k = 0; k < step.num_recv_topk; ++k) {
    const int64_t expert_idx =
        k < shape.num_topk ? from.topk_idx[static_cast<size_t>(token_idx * shape.num_topk + k)]
                           : -1;
    const bool is_there =
        expert_idx >= 0 &&
        placement.expert_rank[static_cast<size_t>(expert_idx)] == Slot::rank_idx(slot);
    const int64_t local_idx =
        is_there ? placement.local_expert_idx[static_cast<size_t>(expert_idx)] : -1;
    const float weight =
        is_there ? from.weights[static_cast<size_t>(token_idx * shape.num_topk + k)] : 0.0f;
    const int64_t place = row_idx * step.num_recv_topk + k;
    to->bytes.set(window.topk_idx_offset + place * 8, &local_idx, 8);
    if (shape.with_weights)
      to->bytes.set(window.weights_offset + place * 4, &weight, 4);
  }
}

void deliver_token(const KernelCase& shape,
                   const layout::Placement& placement,
                   const RankInputs& from,
                   int rank_idx,
                   int64_t token_idx,
                   const int64_t* slots,
                   int64_t num_slots,
                   Step* step) {
  const cpu::RowKernels& kernels = *cpu::find_row_kernels("portable");
  const std::byte* row = from.x.data() + token_idx * shape.source_row_bytes();
  std::vector<std::byte> codes(static_cast<size_t>(shape.row_bytes()));
  std::vector<std::byte> scales(static_cast<size_t>(shape.num_scales() * 4));
  if (shape.is_quantized) {
    std::byte* const to = codes.data();
    kernels.quantize_row(shape.quantization, row, &to, 1, scales.data(), cpu::StoreMode::kCached);
    row = codes.data();
  }
  for (int64_t i = 0; i < num_slots; ++i) {
    const int64_t slot = slots[i];
    if (slot == Slot::kNone)
      continue;
    ExpectedDispatch& to = step->dispatched[static_cast<size_t>(Slot::rank_idx(slot))];
    const layout::ReceiveWindow& window = to.window;
    const int64_t row_idx = Slot::row_idx(slot);
    to.bytes.set(row_idx * shape.row_bytes(), row, shape.row_bytes());
    for (int64_t s = 0; s < shape.num_scales(); ++s)
      to.bytes.set(window.scales_offset + window.scales.place(row_idx) + s * window.scales.step(),
                   scales.data() + s * shape.scale_bytes(),
                   shape.scale_bytes());
    if (shape.has_origins()) {
      const auto origin = static_cast<int32_t>(shape.origin_of(rank_idx, slots, i));
      to.bytes.set(window.origins_offset + row_idx * 4, &origin, 4);
    }
    if (shape.is_by_rank())
      deliver_choices(shape, placement, *step, from, token_idx, slot, &to);
    else if (shape.with_weights)
      to.bytes.set(window.weights_offset + row_idx * 4,
                   &from.weights[static_cast<size_t>(token_idx * shape.num_topk + i)],
                   4);
  }
}

/// Everything that follows from the inputs and what the spec makes of them.
void deliver(const KernelCase& shape, const layout::Placement& placement, Step* step) {
  const cpu::FloatingPointScope floating_point;
  step->num_recv_topk = step->kept.num_recv_topk();
  step->dispatched.resize(static_cast<size_t>(shape.num_ranks));
  for (int rank_idx = 0; rank_idx < shape.num_ranks; ++rank_idx) {
    ExpectedDispatch& own = step->dispatched[static_cast<size_t>(rank_idx)];
    own.received = step->spec->received(rank_idx);
    own.window = window_of(shape, *step, own.received.num_rows);
    own.bytes = ExpectedBytes(own.window.bytes);
    fill_all_padding(shape, *step, &own, rank_idx);
  }
  for (int rank_idx = 0; rank_idx < shape.num_ranks; ++rank_idx) {
    const RankInputs& from = step->inputs[static_cast<size_t>(rank_idx)];
    ExpectedDispatch& own = step->dispatched[static_cast<size_t>(rank_idx)];
    own.num_slots = layout::num_slots_per_token(shape.layout, shape.num_topk, shape.num_ranks);
    own.slots = step->spec->slots(rank_idx);
    for (int64_t token_idx = 0; token_idx < from.num_tokens(); ++token_idx)
      deliver_token(shape,
                    placement,
                    from,
                    rank_idx,
                    token_idx,
                    own.slots.data() + token_idx * own.num_slots,
                    own.num_slots,
                    step);
  }
}

}  // namespace

std::vector<std::byte> draw_rows(DType dtype, int64_t num_elements, Random* random) {
  std::vector<std::byte> rows(static_cast<size_t>(num_elements * element_bytes(dtype)));
  std::byte* to = rows.data();
  for (int64_t i = 0; i < num_elements; ++i) {
    const float number = draw_number(random);
    const auto put = [&](auto value) {
      std::memcpy(to, &value, sizeof(value));
      to += sizeof(value);
    };
    if (dtype == DType::kBFloat16)
      put(float_to_bfloat16(number));
    else if (dtype == DType::kFloat16)
      put(float_to_float16(number));
    else if (dtype == DType::kFloat32)
      put(number);
    else
      put(static_cast<double>(number) * 1.0000000001);
  }
  return rows;
}

layout::Placement draw_placement(const KernelCase& shape, Random* random) {
  std::vector<int32_t> expert_rank(static_cast<size_t>(shape.num_experts));
  const bool is_scattered = !shape.has_replicas() && random->chance(1, 2);
  for (int expert_idx = 0; expert_idx < shape.num_experts; ++expert_idx)
    expert_rank[static_cast<size_t>(expert_idx)] =
        is_scattered ? static_cast<int32_t>(random->below(static_cast<uint32_t>(shape.num_ranks)))
                     : expert_idx * shape.num_ranks / shape.num_experts;
  return layout::Placement(std::move(expert_rank), shape.num_ranks);
}

Step draw_step(const KernelCase& shape, const layout::Placement& placement, Random* random) {
  Step step;
  for (int rank_idx = 0; rank_idx < shape.num_ranks; ++rank_idx)
    step.inputs.push_back(draw_inputs(shape, random));
  if (shape.is_at_limits)
    move_to_limits(shape, placement, &step.inputs, random);
  for (RankInputs& inputs : step.inputs)
    inputs.passed_idx = inputs.topk_idx;
  if (shape.has_replicas())
    choose_replicas(shape, placement, &step.inputs);
  step.spec = std::make_shared<DispatchSpec>(
      shape.arrangement(),
      shape.rule,
      placement.expert_rank,
      std::vector<AskedOfRank>(step.inputs.begin(), step.inputs.end()));
  step.difference_of_layout =
      step.spec->difference_of_layout(asked_counts(shape, placement, step.inputs));
  step.kept = step.spec->counts();
  if (shape.has_replicas() && !shape.is_by_rank())
    count_rows_to_ranks(placement, step.inputs, &step.kept);
  if (step.spec->has_overflow()) {
    step.status = kernels::OperationStatus::kOverflow;
    return step;
  }
  if (shape.has_bad_choice) {
    auto& inputs = step.inputs[random->below(static_cast<uint32_t>(shape.num_ranks))];
    if (!inputs.passed_idx.empty()) {
      inputs.passed_idx[random->below(static_cast<uint32_t>(inputs.passed_idx.size()))] =
          random->chance(1, 2) ? int64_t{shape.num_ids()} : int64_t{-2};
      step.status = kernels::OperationStatus::kRejected;
      return step;
    }
  }
  deliver(shape, placement, &step);
  return step;
}

Step draw_cached_step(const KernelCase& shape,
                      const layout::Placement& placement,
                      const Step& step,
                      Random* random) {
  Step cached = step;
  for (RankInputs& inputs : cached.inputs) {
    inputs.x = draw_rows(shape.dtype, inputs.num_tokens() * shape.hidden, random);
    for (float& weight : inputs.weights)
      weight = draw_number(random);
  }
  cached.dispatched.clear();
  deliver(shape, placement, &cached);
  // Nobody says again which choices came: the handle's owner knows.
  if (shape.is_by_rank())
    for (ExpectedDispatch& own : cached.dispatched) {
      own.window = layout::ReceiveWindow::make(shape.layout,
                                               own.received.num_rows,
                                               shape.row_bytes(),
                                               own.window.scales,
                                               shape.with_weights ? 4 : 0,
                                               cached.num_recv_topk,
                                               false,
                                               false);
      own.bytes.bytes.resize(static_cast<size_t>(own.window.bytes));
      own.bytes.is_defined.resize(static_cast<size_t>(own.window.bytes));
    }
  return cached;
}

// --- What a combine delivers -------------------------------------------------------------------

namespace {

using Sum = std::vector<std::byte>;

Sum add(DType dtype,
        const std::vector<const std::byte*>& rows,
        const std::vector<float>* weights,
        int64_t hidden) {
  Sum sum(static_cast<size_t>(hidden * element_bytes(dtype)));
  cpu::find_row_kernels("portable")
      ->sum_rows(dtype,
                 rows.data(),
                 weights == nullptr ? nullptr : weights->data(),
                 static_cast<int>(rows.size()),
                 hidden,
                 sum.data(),
                 cpu::StoreMode::kCached,
                 nullptr,
                 0);
  return sum;
}

/// As float32.
Sum widen(DType dtype, const std::byte* row, int64_t hidden) {
  std::vector<float> numbers;
  for (int64_t i = 0; i < hidden; ++i) {
    uint32_t bits = 0;
    std::memcpy(&bits, row + i * element_bytes(dtype), static_cast<size_t>(element_bytes(dtype)));
    numbers.push_back(dtype == DType::kBFloat16  ? bfloat16_to_float(static_cast<uint16_t>(bits))
                      : dtype == DType::kFloat16 ? float16_to_float(static_cast<uint16_t>(bits))
                                                 : std::bit_cast<float>(bits));
  }
  Sum wide(numbers.size() * sizeof(float));
  std::memcpy(wide.data(), numbers.data(), wide.size());
  return wide;
}

Sum narrow(DType dtype, const Sum& wide) {
  if (dtype == DType::kFloat32)
    return wide;
  Sum row(wide.size() / 2);
  for (size_t i = 0; i < row.size() / 2; ++i) {
    float number;
    std::memcpy(&number, wide.data() + 4 * i, sizeof(number));
    const uint16_t bits =
        dtype == DType::kBFloat16 ? float_to_bfloat16(number) : float_to_float16(number);
    std::memcpy(row.data() + 2 * i, &bits, sizeof(bits));
  }
  return row;
}

/// Rows of one token that lie on one node, in the order of slots.
struct NodeRows {
  std::vector<const std::byte*> rows;
  std::vector<float> weights;
};

/// Sums of other nodes are rounded, the own one is not.
/// @param own_node  -1 where each is rounded
Sum add_nodes(const KernelCase& shape,
              const std::vector<NodeRows>& nodes,
              int own_node,
              bool is_weighted) {
  std::vector<Sum> sums;
  for (int node_idx = 0; node_idx < std::ssize(nodes); ++node_idx) {
    const NodeRows& node = nodes[static_cast<size_t>(node_idx)];
    const std::vector<float>* const weights = is_weighted ? &node.weights : nullptr;
    if (node_idx != own_node) {
      const Sum sum = add(shape.dtype, node.rows, weights, shape.hidden);
      sums.push_back(widen(shape.dtype, sum.data(), shape.hidden));
      continue;
    }
    std::vector<Sum> wide;
    std::vector<const std::byte*> rows;
    for (const std::byte* const row : node.rows)
      wide.push_back(widen(shape.dtype, row, shape.hidden));
    for (const Sum& row : wide)
      rows.push_back(row.data());
    sums.push_back(add(DType::kFloat32, rows, weights, shape.hidden));
  }
  std::vector<const std::byte*> rows;
  for (const Sum& sum : sums)
    rows.push_back(sum.data());
  return narrow(shape.dtype, add(DType::kFloat32, rows, nullptr, shape.hidden));
}

}  // namespace

ExpectedBytes expected_sums(const KernelCase& shape,
                            const Step& step,
                            const std::vector<std::vector<std::byte>>& outputs,
                            int rank_idx,
                            bool is_weighted) {
  const cpu::FloatingPointScope floating_point;
  const RankInputs& inputs = step.inputs[static_cast<size_t>(rank_idx)];
  const int64_t row_bytes = shape.source_row_bytes();
  // Without a reduction all ranks are as one node, with that of ranks each is one.
  const int num_local_ranks = shape.adds_by_rank()   ? 1
                              : shape.node_reduction ? shape.num_local_ranks
                                                     : shape.num_ranks;
  const bool is_reduced = shape.adds_by_rank() || shape.node_reduction;
  const int own_node = shape.adds_by_rank() ? -1 : rank_idx / num_local_ranks;
  ExpectedBytes sums(inputs.num_tokens() * row_bytes);
  for (int64_t token_idx = 0; token_idx < inputs.num_tokens(); ++token_idx) {
    std::vector<NodeRows> nodes(static_cast<size_t>(shape.num_ranks / num_local_ranks));
    for (const Term& term : step.spec->terms(rank_idx, token_idx)) {
      NodeRows& node = nodes[static_cast<size_t>(term.rank_idx / num_local_ranks)];
      node.rows.push_back(outputs[static_cast<size_t>(term.rank_idx)].data() +
                          term.row_idx * row_bytes);
      if (is_weighted)
        node.weights.push_back(
            inputs.weights[static_cast<size_t>(token_idx * shape.num_topk + term.topk_pos)]);
    }
    const Sum sum = is_reduced ? add_nodes(shape, nodes, own_node, is_weighted)
                               : add(shape.dtype,
                                     nodes[0].rows,
                                     is_weighted ? &nodes[0].weights : nullptr,
                                     shape.hidden);
    sums.set(token_idx * row_bytes, sum.data(), row_bytes);
  }
  return sums;
}

ExpectedBytes expected_pulled(const KernelCase& shape,
                              const layout::Placement& placement,
                              const Step& step,
                              const std::vector<std::vector<float>>& row_weights,
                              int rank_idx) {
  const RankInputs& inputs = step.inputs[static_cast<size_t>(rank_idx)];
  const int64_t num_choices = inputs.num_tokens() * shape.num_topk;
  ExpectedBytes pulled(num_choices * 4);
  for (int64_t choice = 0; choice < num_choices; ++choice) {
    float weight = 0.0f;
    const int64_t expert_idx = inputs.topk_idx[static_cast<size_t>(choice)];
    const int64_t token_idx = choice / shape.num_topk;
    const int64_t k = choice % shape.num_topk;
    for (const Term& term : step.spec->terms(rank_idx, token_idx)) {
      if (expert_idx < 0)
        continue;
      const auto& there = row_weights[static_cast<size_t>(term.rank_idx)];
      if (shape.is_by_rank() &&
          placement.expert_rank[static_cast<size_t>(expert_idx)] == term.rank_idx)
        weight = there[static_cast<size_t>(term.row_idx * step.num_recv_topk + k)];
      else if (!shape.is_by_rank() && term.topk_pos == k)
        weight = there[static_cast<size_t>(term.row_idx)];
    }
    pulled.set(choice * 4, &weight, 4);
  }
  return pulled;
}

}  // namespace moe::simt::checker
