#include "layout/routing_map.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace moe::layout {

namespace {

constexpr int64_t kBytesOfWord = 8;
constexpr uint64_t kOnes = 0x0101010101010101;

/// Bytes [begin, begin + 8) of a row that ends at @p end; those past the end are 0. Most words of a
/// map are 0, and looking at eight pairs at once is what makes a large one cheap.
uint64_t word_at(const uint8_t* row, int64_t begin, int64_t end) {
  uint64_t word = 0;
  std::memcpy(&word, row + begin, static_cast<size_t>(std::min(kBytesOfWord, end - begin)));
  return word & kOnes;
}

/// Calls @p body(flat index of a choice, flat index of its expert's column); ids below 0 have none.
/// @return as scatter_choices().
template <typename Body>
int64_t for_choices(
    const int64_t* topk_idx, int64_t num_tokens, int64_t num_topk, int64_t num_experts, Body body) {
  for (int64_t token_idx = 0; token_idx < num_tokens; ++token_idx)
    for (int64_t k = token_idx * num_topk; k < (token_idx + 1) * num_topk; ++k) {
      if (topk_idx[k] >= num_experts)
        return k;
      if (topk_idx[k] >= 0)
        body(k, token_idx * num_experts + topk_idx[k]);
    }
  return -1;
}

template <typename Value>
int64_t scatter(const int64_t* topk_idx,
                int64_t num_tokens,
                int64_t num_topk,
                const std::byte* values,
                int64_t num_experts,
                std::byte* dense) {
  const auto* from = reinterpret_cast<const Value*>(values);
  auto* to = reinterpret_cast<Value*>(dense);
  return for_choices(topk_idx, num_tokens, num_topk, num_experts, [&](int64_t k, int64_t column) {
    to[column] = from[k];
  });
}

template <typename Value>
void gather(const int64_t* topk_idx,
            int64_t num_tokens,
            int64_t num_topk,
            const std::byte* dense,
            int64_t num_experts,
            std::byte* values) {
  const auto* from = reinterpret_cast<const Value*>(dense);
  auto* to = reinterpret_cast<Value*>(values);
  std::fill_n(to, num_tokens * num_topk, Value{0});
  for_choices(topk_idx, num_tokens, num_topk, num_experts, [&](int64_t k, int64_t column) {
    to[k] = from[column];
  });
}

/// Calls @p run with a value of the type that has so many bytes.
template <typename Run>
auto with_value_of(int64_t value_bytes, Run run) {
  return value_bytes == 8   ? run(uint64_t{})
         : value_bytes == 4 ? run(uint32_t{})
         : value_bytes == 2 ? run(uint16_t{})
                            : run(uint8_t{});
}

}  // namespace

int64_t RoutingMap::num_topk() const {
  int64_t most = 1;
  for (int64_t token_idx = 0; token_idx < num_tokens; ++token_idx) {
    const uint8_t* const row = is_chosen + token_idx * num_experts;
    int64_t count = 0;
    for (int64_t at = 0; at < num_experts; at += kBytesOfWord)
      count += std::popcount(word_at(row, at, num_experts));
    most = std::max(most, count);
  }
  return most;
}

void RoutingMap::list(int64_t num_topk, int64_t* topk_idx) const {
  std::fill_n(topk_idx, num_tokens * num_topk, int64_t{-1});
  for (int64_t token_idx = 0; token_idx < num_tokens; ++token_idx) {
    const uint8_t* const row = is_chosen + token_idx * num_experts;
    int64_t* next = topk_idx + token_idx * num_topk;
    for (int64_t at = 0; at < num_experts; at += kBytesOfWord)
      for (uint64_t word = word_at(row, at, num_experts); word != 0; word &= word - 1)
        *next++ = at + std::countr_zero(word) / 8;
  }
}

void gather_choices(const int64_t* topk_idx,
                    int64_t num_tokens,
                    int64_t num_topk,
                    const std::byte* dense,
                    int64_t num_experts,
                    int64_t value_bytes,
                    std::byte* values) {
  with_value_of(value_bytes, [&](auto value) {
    gather<decltype(value)>(topk_idx, num_tokens, num_topk, dense, num_experts, values);
  });
}

int64_t scatter_choices(const int64_t* topk_idx,
                        int64_t num_tokens,
                        int64_t num_topk,
                        const std::byte* values,
                        int64_t num_experts,
                        int64_t value_bytes,
                        std::byte* dense) {
  return with_value_of(value_bytes, [&](auto value) {
    return scatter<decltype(value)>(topk_idx, num_tokens, num_topk, values, num_experts, dense);
  });
}

}  // namespace moe::layout
