#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace moe::simt::checker {

/// Mistakes that a run can be found to make.
enum class Kind : uint8_t {
  kRace,           ///< two accesses of a byte that nothing orders
  kScope,          ///< a flag that is written or read at a scope that leaves the other side out
  kProxy,          ///< bulk copies and ordinary accesses meet without a proxy fence
  kBounds,         ///< outside every region, or in one that is not this thread's
  kUninitialised,  ///< bytes that nobody has written
  kBulk,           ///< wrong use of a bulk copy or its barrier
  kBarrier,        ///< threads that do not all come to a barrier, or lanes to a vote
  kDeadlock,       ///< everybody waits
  kLivelock,       ///< far more steps than the case can need
  kResult,         ///< bytes, counts or a status other than the reference's
  kCrash,          ///< a signal ended the process
};

const char* kind_name(Kind kind);

struct Finding {
  Kind kind;
  std::string text;
};

/// Ends a schedule at once: what follows a finding says nothing.
class Abandoned : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Findings of one schedule.
class Findings {
 public:
  static constexpr size_t kMostKept = 8;

  void add(Kind kind, std::string text) {
    ++num_found_;
    if (kept_.size() < kMostKept)
      kept_.push_back({kind, std::move(text)});
  }
  bool empty() const { return num_found_ == 0; }
  int64_t num_found() const { return num_found_; }
  const std::vector<Finding>& kept() const { return kept_; }

 private:
  std::vector<Finding> kept_;
  int64_t num_found_ = 0;
};

}  // namespace moe::simt::checker
