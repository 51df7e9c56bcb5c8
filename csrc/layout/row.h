#pragma once

#include <cstdint>

#include "core/math.h"
#include "core/symmetric_memory.h"

namespace moe::layout {

enum class Operation : int32_t {
  kNone = 0,
  kDispatch = 1,
  kCachedDispatch = 2,
  kCombine = 3,
  kBatchedCopy = 4,
};

enum class Phase : int32_t {
  kIdle = 0,
  kRows = 1,
  kOffers = 2,
  kData = 3,
  kReuse = 4,
  kGrowing = 5,
  kVerdicts = 6,
};

enum class RowLayout : int32_t { kExpertMajor = 0, kRankMajor = 1, kLowLatency = 2 };

/// Treatment of rows beyond a capacity.
enum class OnOverflow : int32_t { kGrow = 0, kDrop = 1, kRaise = 2 };
inline constexpr const char* kOnOverflowNames[] = {"grow", "drop", "raise"};

enum class RowStatus : int32_t {
  kOk = 0,
  kInvalidArgument = 1,
  kInvalidType = 2,
  kNoCapacity = 3,
  kBadExpert = 4,  ///< found on a device: needed_bytes is the flat index, available_bytes the id
  /// found on a device: needed_bytes tokens are routed to rank available_bytes, which has failed
  kFailedRank = 5,
};

/// Words of a rank on gradients in one operation, as bits. Ranks may say different things:
/// each finds the same in all of them.
///
///   bits 0 to 4   see below
///   bits 8 to 15  combine: bytes of a weight that is applied while adding, 0 for none
struct GradientWord {
  /// This rank can run a backward: its gradients are enabled and the call is differentiable.
  static constexpr int32_t kEnabled = 1;
  static constexpr int32_t kNeedsRows = 2;     ///< it needs the gradient of what rows are made of
  static constexpr int32_t kNeedsWeights = 4;  ///< dispatch with weights: that of the weights
  /// combine: its rows come from those of its dispatch, whose backward follows its own
  static constexpr int32_t kReachesDispatch = 8;
  /// combine: its rows have a gradient and do not come from those of its dispatch
  static constexpr int32_t kLeavesDispatch = 16;
  static constexpr int32_t kOfBackward =
      kEnabled | kNeedsRows | kNeedsWeights | kReachesDispatch | kLeavesDispatch;
  static constexpr int kWeightBytesShift = 8;

  MOE_HOST_DEVICE static constexpr bool is_enabled(int32_t word) { return (word & kEnabled) != 0; }
  MOE_HOST_DEVICE static constexpr bool is_needed(int32_t word) {
    return (word & (kNeedsRows | kNeedsWeights)) != 0;
  }
  /// Returns whether no other rank can add to what this one says without an error: where it is not
  /// enabled nobody may need a gradient.
  MOE_HOST_DEVICE static constexpr bool is_final(int32_t word, int32_t needs) {
    return !is_enabled(word) || (word & needs) == needs;
  }
  /// Returns whether two ranks could not run one backward together.
  MOE_HOST_DEVICE static constexpr bool are_apart(int32_t word, int32_t other) {
    return !is_enabled(word) || !is_enabled(other) ||
           word >> kWeightBytesShift != other >> kWeightBytesShift;
  }
  /// Returns whether two ranks exclude each other. What a third one needs may still set them apart.
  MOE_HOST_DEVICE static constexpr bool do_clash(int32_t word, int32_t other) {
    return (is_needed(word) || is_needed(other)) && are_apart(word, other);
  }
};

/// Arguments of one operation; equal on every rank but for `gradients`, compared by every
/// rank.
///
/// Byte map (64 bytes): see the fields; all are written.
struct OperationArguments {
  int32_t operation = 0;
  int32_t layout = 0;
  int32_t expert_alignment = 0;
  int32_t dtype = 0;         ///< type of the rows as the caller has them
  int64_t row_bytes = 0;     ///< on the wire; 0 when no rows move
  int32_t weight_bytes = 0;  ///< per weight that travels with rows or is pulled; 0 for none
  int32_t quantization = 0;  ///< code of the format and its scale factors, 0 for none
  int32_t num_scales = 0;    ///< scale factors that travel with a row
  int32_t scale_bytes = 0;   ///< bytes of a scale factor
  int32_t on_overflow = 0;
  int32_t gradients = 0;         ///< GradientWord
  int64_t expert_capacity = -1;  ///< most rows of one expert; -1 for no limit
  uint64_t plan_hash = 0;        ///< hash of the handle's plan, see ops::PlanHeader; 0 without one

  /// Calls @p say with the name and value of every further option that says something, for the
  /// text in which ranks disagree: the words of moe_comm/ep/call_options.py.
  template <typename Say>
  void say_options(const Say& say) const {
    if (on_overflow > 0 && on_overflow < 3)
      say("on_overflow", kOnOverflowNames[on_overflow]);
    if (expert_capacity >= 0)
      say("num_rows_per_expert", expert_capacity);
  }

  bool operator==(const OperationArguments&) const = default;
  /// Returns whether two ranks do the same, whatever each says of gradients.
  MOE_HOST_DEVICE bool is_same_as(OperationArguments other) const {
    other.gradients = gradients;
    return *this == other;
  }
  /// All that a rank can say it needs of the operation's backward, as bits of a GradientWord.
  int32_t all_needs() const {
    if (operation == static_cast<int32_t>(Operation::kCombine))
      return GradientWord::kNeedsRows | GradientWord::kReachesDispatch;
    return GradientWord::kNeedsRows | (weight_bytes > 0 ? GradientWord::kNeedsWeights : 0);
  }
};
static_assert(sizeof(OperationArguments) == 64);

/// The small row every rank writes to every peer at the start of an operation, as it lies in the
/// reader's workspace.
///
/// Byte map (`row_stride` is a multiple of 64):
///   [0, 8)      epoch, the flag: stored last, released
///   [8, 12)     status; [12, 16) num_tokens of the sender
///   [16, 80)    arguments
///   [80, 104)   offer of rows: where the sender will receive (dispatch) or lets others pull
///               (combine)
///   [104, 128)  offer of weights to pull (combine), or of a TokenSetMap to read (dispatch by rank,
///               where counts decide on replicas)
///   [128, 144)  needed and available bytes (status kNoCapacity); status kOk, of a device: the
///               first 8 are heard_epoch()
///   [144, ...)  status kOk: a row of the count matrix, in an uncached dispatch;
///               else: a message of kMessageBytes, zero-terminated
struct Row {
  static constexpr int64_t kMessageBytes = 320;

  /// int32 numbers in a row of the count matrix, see CountMatrix.
  MOE_HOST_DEVICE static constexpr int num_counts(int num_ranks, int num_experts) {
    return num_experts + num_ranks + 2;
  }

  uint64_t epoch;
  int32_t status;
  int32_t num_tokens;
  OperationArguments arguments;
  Offer offer;
  Offer weights_offer;
  uint64_t needed_bytes;
  uint64_t available_bytes;

  /// Status kOk: the last operation of which the sender's caller had heard what came of it, when it
  /// called this one. An operation that was found wrong behind that is one that it may build on.
  static constexpr uint64_t kHeardAll = UINT64_MAX;
  MOE_HOST_DEVICE uint64_t heard_epoch() const { return needed_bytes; }

  MOE_HOST_DEVICE int32_t* counts() { return reinterpret_cast<int32_t*>(this + 1); }
  MOE_HOST_DEVICE const int32_t* counts() const {
    return reinterpret_cast<const int32_t*>(this + 1);
  }
  MOE_HOST_DEVICE char* message() { return reinterpret_cast<char*>(this + 1); }
  MOE_HOST_DEVICE const char* message() const { return reinterpret_cast<const char*>(this + 1); }

  MOE_HOST_DEVICE static int64_t stride(int num_ranks, int num_experts) {
    const int64_t count_bytes = int64_t{4} * num_counts(num_ranks, num_experts);
    const int64_t tail = count_bytes > kMessageBytes ? count_bytes : kMessageBytes;
    return round_up(static_cast<int64_t>(sizeof(Row)) + tail, 64);
  }
};
static_assert(sizeof(Row) == 144);

inline const char* operation_name(Operation operation) {
  switch (operation) {
    case Operation::kNone:
      return "none";
    case Operation::kDispatch:
      return "dispatch";
    case Operation::kCachedDispatch:
      return "cached dispatch";
    case Operation::kCombine:
      return "combine";
    case Operation::kBatchedCopy:
      return "batched copy";
  }
  return "unknown";
}

inline const char* layout_name(RowLayout layout) {
  switch (layout) {
    case RowLayout::kExpertMajor:
      return "EXPERT_MAJOR";
    case RowLayout::kRankMajor:
      return "RANK_MAJOR";
    case RowLayout::kLowLatency:
      return "LOW_LATENCY";
  }
  return "unknown";
}

inline const char* phase_name(Phase phase) {
  switch (phase) {
    case Phase::kIdle:
      return "idle";
    case Phase::kRows:
      return "rows";
    case Phase::kOffers:
      return "offers";
    case Phase::kData:
      return "data";
    case Phase::kReuse:
      return "reuse";
    case Phase::kGrowing:
      return "growing";
    case Phase::kVerdicts:
      return "verdicts";
  }
  return "unknown";
}

}  // namespace moe::layout
