#include "ops/agreement.h"

#include <algorithm>

#include "core/rank_list.h"
#include "layout/wire_format.h"

namespace moe::ops {

namespace {

using layout::GradientWord;
using layout::Row;
using layout::RowStatus;

std::string dtype_text(int32_t dlpack_type) {
  constexpr const char* kFamilies[] = {
      "int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
  const int32_t code = dlpack_type >> 8;
  if (code < 0 || code > 6)
    return concat("opaque type ", dlpack_type);
  return kFamilies[code] + std::to_string(dlpack_type & 0xFF);
}

/// Bytes of a row as the caller has it, who may let it be quantized.
int64_t caller_row_bytes(const layout::OperationArguments& arguments) {
  const layout::WireFormat* const format =
      layout::QuantizationCode{arguments.quantization}.find_format();
  if (format == nullptr)
    return arguments.row_bytes;
  return arguments.row_bytes * (arguments.dtype & 0xFF) / format->element_bits;
}

/// Scale factors that come with rows, or are made of them.
std::string scales_text(const layout::OperationArguments& arguments) {
  const layout::QuantizationCode quantization{arguments.quantization};
  const layout::WireFormat* const format = quantization.find_format();
  const layout::ScaleRecord* const scale = quantization.find_scale();
  if (quantization.code == 0)
    return "";
  if (scale == nullptr || (format == nullptr && quantization.is_quantized_here()))
    return concat(" of format ", quantization.code);
  const char* const order = quantization.is_column_major() ? " in columns" : " in rows";
  if (format == nullptr)
    return concat(
        ", ", arguments.num_scales, " scale factors of ", arguments.scale_bytes, " bytes", order);
  return concat(
      " to be quantized to ", format->name, " with ", scale->name, " scale factors", order);
}

/// Names and values of a config_text() that begins at @p from.
std::vector<std::string> split_config(const std::string& text, size_t from) {
  std::vector<std::string> parts;
  while (from < text.size()) {
    const size_t end = text.find('\0', from);
    parts.push_back(text.substr(from, end - from));
    from = end + 1;
  }
  return parts;
}

bool is_agreed(const Rows& rows, const group::Group& group) {
  const Row* first = nullptr;
  bool is_needed = false;
  bool is_apart = false;
  for (int peer_rank = 0; peer_rank < group.num_ranks(); ++peer_rank) {
    if (!group.is_active(peer_rank))
      continue;
    const Row& header = rows.headers[static_cast<size_t>(peer_rank)];
    if (first == nullptr)
      first = &header;
    if (header.status != static_cast<int32_t>(RowStatus::kOk) ||
        !header.arguments.is_same_as(first->arguments))
      return false;
    is_needed = is_needed || GradientWord::is_needed(header.arguments.gradients);
    is_apart =
        is_apart || GradientWord::are_apart(header.arguments.gradients, first->arguments.gradients);
  }
  return !(is_needed && is_apart);
}

/// Text of what keeps ranks that do the same from running its backward together, "" for nothing.
std::string describe_gradient_clash(const Rows& rows, const group::Group& group) {
  std::vector<int> disabled;
  std::vector<int> needing;
  int first_rank = -1;
  int other_rank = -1;
  const auto word = [&rows](int rank_idx) {
    return rows.headers[static_cast<size_t>(rank_idx)].arguments.gradients;
  };
  const auto weight_bytes = [&word](int rank_idx) {
    return word(rank_idx) >> GradientWord::kWeightBytesShift;
  };
  for (int peer_rank = 0; peer_rank < group.num_ranks(); ++peer_rank) {
    if (!group.is_active(peer_rank))
      continue;
    if (!GradientWord::is_enabled(word(peer_rank)))
      disabled.push_back(peer_rank);
    if (GradientWord::is_needed(word(peer_rank)))
      needing.push_back(peer_rank);
    if (first_rank < 0)
      first_rank = peer_rank;
    else if (other_rank < 0 && weight_bytes(peer_rank) != weight_bytes(first_rank))
      other_rank = peer_rank;
  }
  if (needing.empty())
    return "";
  const auto operation = static_cast<layout::Operation>(
      rows.headers[static_cast<size_t>(first_rank)].arguments.operation);
  if (!disabled.empty())
    return concat("ranks disagree: a gradient of this ",
                  layout::operation_name(operation),
                  " is needed on ",
                  rank_list(needing),
                  ", and gradients are disabled on ",
                  rank_list(disabled),
                  " (torch.no_grad, inference mode, or an EpBuffer's own ",
                  layout::operation_name(operation),
                  "): every rank runs its backward or none does");
  if (other_rank < 0)
    return "";
  const auto weights = [&weight_bytes](int rank_idx) {
    const int32_t bytes = weight_bytes(rank_idx);
    return bytes == 0 ? std::string("no weights") : concat("float", bytes * 8, " weights");
  };
  return concat("ranks disagree: a combine whose backward is needed on ",
                rank_list(needing),
                " applies ",
                weights(first_rank),
                " on rank ",
                first_rank,
                " and ",
                weights(other_rank),
                " on rank ",
                other_rank);
}

}  // namespace

std::string config_text(const std::vector<std::pair<std::string, std::string>>& config) {
  std::string text;
  for (const auto& [name, value] : config)
    text += name + '\0' + value + '\0';
  return text;
}

void check_same_config(const char* noun,
                       const std::vector<std::string>& payloads,
                       size_t header_bytes) {
  size_t first_rank = 0;
  while (payloads[first_rank].empty())
    ++first_rank;
  const auto expected = split_config(payloads[first_rank], header_bytes);
  for (size_t peer_rank = first_rank + 1; peer_rank < payloads.size(); ++peer_rank) {
    if (payloads[peer_rank].empty())
      continue;
    const auto found = split_config(payloads[peer_rank], header_bytes);
    MOE_CHECK(found.size() == expected.size(),
              "rank ",
              first_rank,
              " configures ",
              expected.size() / 2,
              " values, rank ",
              peer_rank,
              " ",
              found.size() / 2);
    for (size_t i = 0; i + 1 < expected.size(); i += 2)
      MOE_CHECK(expected[i + 1] == found[i + 1] && expected[i] == found[i],
                "ranks configure the ",
                noun,
                " differently: ",
                expected[i],
                " is ",
                expected[i + 1],
                " on rank ",
                first_rank,
                " and ",
                found[i + 1],
                " on rank ",
                peer_rank);
  }
}

std::string describe(const layout::OperationArguments& arguments) {
  const auto operation = static_cast<layout::Operation>(arguments.operation);
  std::string text = layout::operation_name(operation);
  text += concat("(",
                 layout::layout_name(static_cast<layout::RowLayout>(arguments.layout)),
                 ", expert_alignment=",
                 arguments.expert_alignment);
  if (arguments.row_bytes > 0)
    text += concat(", ",
                   dtype_text(arguments.dtype),
                   " rows of ",
                   caller_row_bytes(arguments),
                   " bytes",
                   scales_text(arguments));
  if (arguments.weight_bytes > 0)
    text += concat(", float", arguments.weight_bytes * 8, " weights");
  else
    text += ", no weights";
  arguments.say_options(
      [&text](const char* name, const auto& value) { text += concat(", ", name, "=", value); });
  if (arguments.plan_hash != 0)
    text += concat(", handle ", arguments.plan_hash % 1000000);
  return text + ")";
}

int32_t unite_gradients(const Rows& rows, const group::Group& group) {
  using layout::GradientWord;
  int32_t united = 0;
  for (int peer_rank = 0; peer_rank < group.num_ranks(); ++peer_rank) {
    if (!group.is_active(peer_rank))
      continue;
    const int32_t word = rows.headers[static_cast<size_t>(peer_rank)].arguments.gradients;
    if (!GradientWord::is_enabled(word))
      return 0;
    united |= word;
  }
  return united & GradientWord::kOfBackward;
}

std::exception_ptr join_problems(const std::vector<RankProblem>& problems) {
  std::string message;
  auto worst = RowStatus::kOk;
  std::vector<int> short_ranks;
  uint64_t needed_bytes = 0;
  uint64_t available_bytes = 0;
  for (size_t rank_idx = 0; rank_idx < problems.size(); ++rank_idx) {
    const RankProblem& problem = problems[rank_idx];
    if (problem.status == RowStatus::kOk)
      continue;
    message += concat(message.empty() ? "" : "; ", "rank ", rank_idx, ": ", problem.text);
    // Mistakes come before shortages, the lowest rank's kind decides the exception's type.
    if (worst == RowStatus::kOk || worst == RowStatus::kNoCapacity)
      worst = problem.status;
    if (problem.status != RowStatus::kNoCapacity)
      continue;
    short_ranks.push_back(static_cast<int>(rank_idx));
    needed_bytes = std::max(needed_bytes, problem.needed_bytes);
    available_bytes = problem.available_bytes;
  }
  if (worst == RowStatus::kOk)
    return nullptr;
  if (worst == RowStatus::kInvalidType)
    return std::make_exception_ptr(InvalidType(message));
  if (worst != RowStatus::kNoCapacity)
    return std::make_exception_ptr(InvalidArgument(message));
  CapacityError error(message, needed_bytes, available_bytes);
  error.ranks = std::move(short_ranks);
  return std::make_exception_ptr(error);
}

std::string describe_other_choices(int rank_idx) {
  return concat("rank ", rank_idx, " offers choices that are not those it counts");
}

std::exception_ptr find_disagreement(const Rows& rows, const group::Group& group) {
  if (is_agreed(rows, group)) [[likely]]
    return nullptr;
  if (auto error = join_problems(rows.problems))
    return error;
  int first_rank = -1;
  for (int peer_rank = 0; peer_rank < group.num_ranks(); ++peer_rank) {
    if (!group.is_active(peer_rank))
      continue;
    if (first_rank < 0)
      first_rank = peer_rank;
    const auto& first = rows.headers[static_cast<size_t>(first_rank)].arguments;
    const auto& other = rows.headers[static_cast<size_t>(peer_rank)].arguments;
    if (!other.is_same_as(first))
      return std::make_exception_ptr(InvalidArgument(concat("ranks disagree: ",
                                                            describe(first),
                                                            " on rank ",
                                                            first_rank,
                                                            " met ",
                                                            describe(other),
                                                            " on rank ",
                                                            peer_rank)));
  }
  const std::string clash = describe_gradient_clash(rows, group);
  return clash.empty() ? nullptr : std::make_exception_ptr(InvalidArgument(clash));
}

}  // namespace moe::ops
