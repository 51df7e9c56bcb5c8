#pragma once

#include <cstdint>

#include "device/warp.h"
#include "kernels/dispatch.h"
#include "kernels/token_sets.h"
#include "layout/routing.h"

// Slots of the rows of one token: what layout::assign_slots says, found by a warp from the counts
// of its chunk and the tables of the exchange.

namespace moe::kernels {

/// Finds the slots of the tokens of one rank. All lanes of a warp call together.
class SlotFinder {
 public:
  MOE_DEVICE explicit SlotFinder(const DispatchParams& params)
      : params_(params),
        num_columns_(params.buffer.num_experts + params.buffer.num_ranks),
        kept_(params.tables.counts +
              int64_t{params.buffer.rank_idx} *
                  layout::Row::num_counts(params.buffer.num_ranks, params.buffer.num_experts)) {}

  /// Writes the slots of a token to @p slots (shared, [num_slots]) and, where no handle has them
  /// already, to DispatchParams::slots.
  /// @param is_first  Whether it is the first of the warps that ask for this token: the others
  ///   leave DispatchParams::slots, and of replicas Choices::topk_idx, which the first may read
  /// @return whether there are any, the same on every lane; lanes may then read @p slots.
  MOE_DEVICE bool find(int64_t token_idx, int64_t* slots, bool is_first = true) const {
    const Choices& choices = params_.choices;
    const bool has_any = params_.is_cached != 0 || choices.is_by_rank == 0
                             ? find_by_choice(token_idx, slots, is_first)
                         : params_.sets.base != nullptr
                             ? find_bound_ranks(token_idx, slots, is_first)
                             : find_by_rank(token_idx, slots, is_first);
    device::sync_warp();
    return has_any;
  }

 private:
  /// A lane finds the slot of one choice, or reads what the handle says.
  MOE_DEVICE bool find_by_choice(int64_t token_idx, int64_t* slots, bool is_first) const {
    const int num_slots = params_.choices.num_slots;
    bool has_any = false;
    for (int first = 0; first < num_slots; first += device::kWarpSize) {
      const int i = first + device::lane_idx();
      int64_t slot = layout::Slot::kNone;
      if (i < num_slots) {
        int64_t* const place = params_.slots + token_idx * num_slots + i;
        if (params_.is_cached != 0) {
          slot = device::load(place);
        } else {
          const int64_t entry = token_idx * params_.choices.num_topk + i;
          slot = params_.replicas.num_experts > 0
                     ? slot_of_replica(choose_replica(token_idx, entry, is_first))
                     : slot_of(token_idx, i, device::load(params_.choices.topk_idx + entry));
          if (is_first)
            device::store(place, slot);
        }
        device::store(slots + i, slot);
      }
      has_any = device::any(slot != layout::Slot::kNone) || has_any;
    }
    return has_any;
  }

  MOE_DEVICE int64_t slot_of(int64_t token_idx, int choice_idx, int64_t expert_idx) const {
    if (expert_idx < 0)
      return layout::Slot::kNone;
    const int dst_rank = device::load_constant(params_.buffer.expert_rank + expert_idx);
    const auto column = static_cast<int>(expert_idx);
    const int64_t entry = token_idx * params_.choices.num_slots + choice_idx;
    return pack(place_of(token_idx, entry, column), column, column, dst_rank);
  }

  struct ChosenReplica {
    int32_t slot = -1;  ///< slot of an expert, -1 for none
    int32_t place = 0;  ///< among this rank's rows there
  };

  /// Does what layout::choose_slots says: of this rank's choices of an expert, in order, the first
  /// go to its lowest slot, and so on.
  /// @param entry  entry of Choices::topk_idx, which gets the slot that was chosen
  MOE_DEVICE ChosenReplica choose_replica(int64_t token_idx, int64_t entry, bool is_first) const {
    const Choices& choices = params_.choices;
    const layout::ReplicaTable& table = params_.replicas.table;
    const int64_t expert_idx = device::load(choices.asked_idx + entry);
    int32_t chosen = -1;
    int32_t place = 0;
    if (expert_idx >= 0) {
      place = place_of(token_idx, entry, static_cast<int>(expert_idx));
      int32_t begin = 0;
      const int end = device::load_constant(table.expert_begin + expert_idx + 1);
#pragma unroll 1
      for (int j = device::load_constant(table.expert_begin + expert_idx); j < end; ++j) {
        const int32_t next = device::load_constant(table.expert_slots + j);
        const int32_t next_begin = device::load(params_.replicas.run_begins + next);
        if (next_begin > place)
          break;
        chosen = next;
        begin = next_begin;
      }
      place -= begin;
    }
    if (is_first)
      device::store(choices.topk_idx + entry, int64_t{chosen});
    return {chosen, place};
  }

  MOE_DEVICE int64_t slot_of_replica(const ChosenReplica& chosen) const {
    if (chosen.slot < 0)
      return layout::Slot::kNone;
    const int dst_rank = device::load_constant(params_.replicas.table.slot_rank + chosen.slot);
    return pack(chosen.place, chosen.slot, chosen.slot, dst_rank);
  }

  /// By rank, of replicas: entry i is for the i-th rank that the token is bound for, ascending.
  MOE_DEVICE bool find_bound_ranks(int64_t token_idx, int64_t* slots, bool is_first) const {
    const Choices& choices = params_.choices;
    for (int k = device::lane_idx(); is_first && k < choices.num_topk; k += device::kWarpSize)
      choose_replica(token_idx, token_idx * choices.num_topk + k, true);
    const int32_t num_words = num_set_words(choices.num_tokens);
    const auto bit_idx = static_cast<int>(token_idx % device::kWarpSize);
    const auto put = [&](int i, int64_t slot) {
      if (is_first)
        device::store(params_.slots + token_idx * choices.num_slots + i, slot);
      device::store(slots + i, slot);
    };
    int num_bound = 0;
#pragma unroll 1
    for (int first = 0; first < params_.buffer.num_ranks; first += device::kWarpSize) {
      const int rank_idx = first + device::lane_idx();
      const int64_t word = int64_t{rank_idx} * num_words + token_idx / device::kWarpSize;
      const bool is_rank = rank_idx < params_.buffer.num_ranks;
      const uint32_t tokens = is_rank ? device::load(params_.sets.bound_tokens + word) : 0;
      const bool is_bound = (tokens >> bit_idx & 1) != 0;
      const uint32_t ranks = device::ballot(is_bound);
      const uint32_t lower_ranks = ranks & ((uint32_t{1} << device::lane_idx()) - 1);
      const int i = num_bound + device::population(lower_ranks);
      if (is_bound && i < choices.num_slots) {
        const int32_t place = device::load(params_.sets.bound_before + word) +
                              device::population(tokens & ((uint32_t{1} << bit_idx) - 1));
        put(i, pack(place, params_.buffer.num_experts + rank_idx, rank_idx, rank_idx));
      }
      num_bound += device::population(ranks);
    }
    for (int i = num_bound + device::lane_idx(); i < choices.num_slots; i += device::kWarpSize)
      put(i, layout::Slot::kNone);
    return num_bound > 0;
  }

  /// Entry i is for the i-th distinct rank, ascending: each is the least that is above the last.
  MOE_DEVICE bool find_by_rank(int64_t token_idx, int64_t* slots, bool is_first) const {
    const int num_slots = params_.choices.num_slots;
    const int own = rank_of_choice(token_idx, device::lane_idx());
    int last = -1;
    for (int i = 0; i < num_slots; ++i) {
      int least = own > last ? own : params_.buffer.num_ranks;
      for (int k = device::kWarpSize + device::lane_idx(); k < params_.choices.num_topk;
           k += device::kWarpSize) {
        const int rank_idx = rank_of_choice(token_idx, k);
        least = rank_idx > last && rank_idx < least ? rank_idx : least;
      }
      least = -device::warp_max(-least);
      int64_t slot = layout::Slot::kNone;
      if (least < params_.buffer.num_ranks) {
        const int column = params_.buffer.num_experts + least;
        slot = pack(place_of(token_idx, token_idx * num_slots + i, column), column, least, least);
      }
      if (device::lane_idx() == 0) {
        if (is_first)
          device::store(params_.slots + token_idx * num_slots + i, slot);
        device::store(slots + i, slot);
      }
      last = least;
    }
    // A token without ranks has none as its first.
    device::sync_warp();
    return device::load(slots) != layout::Slot::kNone;
  }

  /// -1 for none.
  MOE_DEVICE int rank_of_choice(int64_t token_idx, int choice_idx) const {
    const int num_topk = params_.choices.num_topk;
    if (choice_idx >= num_topk)
      return -1;
    const int64_t expert_idx =
        device::load(params_.choices.topk_idx + token_idx * num_topk + choice_idx);
    return expert_idx < 0 ? -1 : device::load_constant(params_.buffer.expert_rank + expert_idx);
  }

  /// Number of this rank's before it that are counted in the same column.
  /// @param column  column of the count matrix: an expert, or num_experts and a rank.
  /// @param entry   entry of Choices::place_in_chunk
  MOE_DEVICE int32_t place_of(int64_t token_idx, int64_t entry, int column) const {
    const Choices& choices = params_.choices;
    const int64_t chunk_idx = token_idx / choices.tokens_per_chunk;
    int32_t place = device::load(choices.place_in_chunk + entry);
    place += device::load(choices.chunk_counts + chunk_idx * num_columns_ + column);
    return place;
  }

  /// @param place   place of the row, among those of this rank in the column
  /// @param stream  stream of Tables::stream_starts
  MOE_DEVICE int64_t pack(int32_t place, int column, int stream, int dst_rank) const {
    const int32_t num_kept = device::load(kept_ + column);
    if (place >= num_kept)
      return layout::Slot::kNone;
    const int64_t start = device::load(params_.tables.stream_starts + stream);
    return layout::Slot::pack(dst_rank, start + place);
  }

  const DispatchParams& params_;
  int num_columns_;
  const int32_t* kept_;
};

}  // namespace moe::kernels
