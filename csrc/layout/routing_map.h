#pragma once

#include <cstddef>
#include <cstdint>

namespace moe::layout {

/// Choices as routers make them: a byte of 0 or 1 for every token and expert.
struct RoutingMap {
  const uint8_t* is_chosen;  ///< [num_tokens, num_experts]
  int64_t num_tokens;
  int64_t num_experts;

  /// The most experts of a token, at least 1.
  int64_t num_topk() const;

  /// Experts of every token, ascending, then -1.
  /// @param topk_idx  [num_tokens, num_topk] with num_topk() or more
  void list(int64_t num_topk, int64_t* topk_idx) const;
};

/// Values of choices out of a dense row per token; zero bytes at unused choices.
/// @param topk_idx  [num_tokens, num_topk], ids in [-1, num_experts)
/// @param dense     [num_tokens, num_experts] of @p value_bytes each: 1, 2, 4 or 8
/// @param values    [num_tokens, num_topk]
void gather_choices(const int64_t* topk_idx,
                    int64_t num_tokens,
                    int64_t num_topk,
                    const std::byte* dense,
                    int64_t num_experts,
                    int64_t value_bytes,
                    std::byte* values);

/// The inverse: values of choices into the columns of their experts. Columns of no choice are left.
/// @return the flat index of the first id that is not below num_experts, where it stopped, or -1.
int64_t scatter_choices(const int64_t* topk_idx,
                        int64_t num_tokens,
                        int64_t num_topk,
                        const std::byte* values,
                        int64_t num_experts,
                        int64_t value_bytes,
                        std::byte* dense);

}  // namespace moe::layout
