#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "group/wait_policy.h"

// Views of a rank on the others while survivors of failures agree: one byte per rank.

namespace moe::group {

inline constexpr char kFailed = 1;
inline constexpr char kEnded = 2;  // it cannot become part of another group

// The first character of the text of a refusal.
inline constexpr char kMistake = 'a';
inline constexpr char kFailure = 'm';

inline std::vector<int> ranks_with(const std::string& members, char bit) {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < members.size(); ++rank)
    if ((members[rank] & bit) != 0)
      ranks.push_back(static_cast<int>(rank));
  return ranks;
}

inline std::vector<int> ranks_without(const std::string& members, char bit) {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < members.size(); ++rank)
    if ((members[rank] & bit) == 0)
      ranks.push_back(static_cast<int>(rank));
  return ranks;
}

/// Returns whether both take the same ranks for failed.
inline bool have_same_failed(const std::string& members, const std::string& others) {
  return std::equal(members.begin(), members.end(), others.begin(), [](char left, char right) {
    return (left & kFailed) == (right & kFailed);
  });
}

/// Returns whether those who would go on are the only ones who can: more than half of those not
/// known to have ended, or half of them with the lowest.
inline bool have_majority(const std::string& members) {
  const std::vector<int> survivors = ranks_without(members, kFailed);
  const std::vector<int> possible = ranks_without(members, kEnded);
  const size_t twice = 2 * survivors.size();
  return twice > possible.size() ||
         (twice == possible.size() && !survivors.empty() && survivors[0] == possible[0]);
}

/// Number of the message of one exchange between survivors. Ballots have others, which bear the
/// attempt, counted from 0. The number of the exchange may wrap within its round: nobody is more
/// than one exchange ahead of another, and what is older has been taken.
inline uint64_t gather_sequence(uint32_t attempt, uint32_t round, uint32_t gather_idx) {
  const uint32_t wrapped = gather_idx % (1u << kGatherBits);
  return (uint64_t{attempt} + 1) << 40 | ((uint64_t{round} << kGatherBits) + wrapped);
}

inline void unite(std::string* members, const std::string& others) {
  for (size_t rank = 0; rank < members->size(); ++rank)
    (*members)[rank] = static_cast<char>((*members)[rank] | others[rank]);
}

}  // namespace moe::group
