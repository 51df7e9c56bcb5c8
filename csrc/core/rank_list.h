#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moe {

/// "rank 2" or "ranks 0, 2", for a message.
inline std::string rank_list(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i)
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  return text;
}

/// [num_ranks], 1 for each of @p ranks and 0 for the others.
inline std::vector<uint8_t> rank_flags(const std::vector<int>& ranks, int num_ranks) {
  std::vector<uint8_t> flags(static_cast<size_t>(num_ranks));
  for (const int rank_idx : ranks)
    flags[static_cast<size_t>(rank_idx)] = 1;
  return flags;
}

}  // namespace moe
