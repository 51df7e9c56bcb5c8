#pragma once

#include <cstdint>

#include "device/primitives.h"
#include "device/warp.h"
#include "kernels/buffer.h"
#include "layout/control.h"
#include "layout/row.h"

// Waits of kernels for flags of peers. No wait is without an end: it leaves when the communicator
// is aborted or the peer exceeds its limit, and says for whom it waited.

namespace moe::kernels {

/// Object of a wait, as it is reported when the wait ends without it.
struct WaitSite {
  layout::Phase phase = layout::Phase::kIdle;
  int32_t operation = 0;  ///< layout::Operation
  uint64_t epoch = 0;     ///< epoch of the operation that waits
  /// Counts in WaitTotals; not where several threads wait for one rank at a time.
  bool counts_waits = true;
};

/// Returns whether an earlier kernel of the buffer left early. All threads of the block call and
/// get the same answer; no kernel sets the word while another of its blocks may still ask.
MOE_DEVICE bool has_left(const Buffer& buffer) {
  const bool left = device::load_relaxed<device::Scope::kDevice>(&buffer.state->has_left) != 0;
  // Nobody waits, and hence leaves, before all have asked.
  device::sync_block();
  return left;
}

/// Returns whether a kernel of the buffer left early, as all threads of the block see it alike
/// while other blocks of this kernel may leave. @param scratch  shared, a word
MOE_DEVICE bool block_has_left(const Buffer& buffer, int32_t* scratch) {
  if (device::thread_idx() == 0)
    device::store(scratch,
                  static_cast<int32_t>(
                      device::load_relaxed<device::Scope::kDevice>(&buffer.state->has_left)));
  device::sync_block();
  const bool has_left = device::load(scratch) != 0;
  device::sync_block();
  return has_left;
}

MOE_DEVICE bool is_aborted(const Buffer& buffer) {
  const uint32_t word = device::load_relaxed<device::Scope::kSystem>(buffer.abort_word);
  return layout::AbortRecord::is_set(word) &&
         layout::AbortRecord::generation(word) >= buffer.abort_generation;
}

MOE_DEVICE layout::Workspace workspace(const Buffer& buffer, int rank_idx) {
  return buffer.workspace(device::load_constant(buffer.workspaces + rank_idx));
}

/// Raised by one thread of a rank while rows move: peers that wait see progress.
MOE_DEVICE void show_progress(const Buffer& buffer) {
  auto& progress = workspace(buffer, buffer.rank_idx).activity().progress;
  device::store_relaxed<device::Scope::kSystem>(
      &progress, device::load_relaxed<device::Scope::kSystem>(&progress) + 1);
}

/// Raised now and then by one warp of the rank, for peers that wait.
class ProgressReporter {
 public:
  MOE_DEVICE explicit ProgressReporter(const Buffer& buffer) : buffer_(buffer) {}
  /// All lanes call, once per row that was moved or added.
  MOE_DEVICE void tick() {
    constexpr int kRowsPerProgress = 16;
    const bool shows = device::block_idx() == 0 && device::thread_idx() == 0;
    if (shows && ++num_rows_ % kRowsPerProgress == 0)
      show_progress(buffer_);
  }

 private:
  const Buffer& buffer_;
  int num_rows_ = 0;
};

/// Does the work of leave(); called with values, as what is referred to would lie in memory.
MOE_DEVICE_CALLED void report_leaving(BufferState* state,
                                      WaitReport* report,
                                      Cause cause,
                                      int peer_rank,
                                      WaitSite site,
                                      uint64_t expected,
                                      uint64_t seen) {
  if (device::add_relaxed<device::Scope::kDevice>(&state->has_left, uint32_t{1}) != 0)
    return;
  device::store(&report->peer_rank, static_cast<int32_t>(peer_rank));
  device::store(&report->phase, static_cast<int32_t>(site.phase));
  device::store(&report->operation, site.operation);
  device::store(&report->epoch, site.epoch);
  device::store(&report->expected, expected);
  device::store(&report->seen, seen);
  device::store_release<device::Scope::kSystem>(&report->cause, static_cast<uint32_t>(cause));
}

/// Makes this and all later kernels of the buffer leave. The first thread to do so reports.
MOE_DEVICE void leave(const Buffer& buffer,
                      Cause cause,
                      int peer_rank,
                      const WaitSite& site,
                      uint64_t expected,
                      uint64_t seen) {
  report_leaving(buffer.state, buffer.report, cause, peer_rank, site, expected, seen);
}

/// Books one wait for a rank. What was booked before is read when the wait begins, so that nobody
/// stands still for it at the end.
class WaitMeter {
 public:
  MOE_DEVICE WaitMeter(const Buffer& buffer, const WaitSite& site, int peer_rank, uint64_t start_ns)
      : totals_(buffer.waits == nullptr || !site.counts_waits ? nullptr : buffer.waits + peer_rank),
        start_ns_(start_ns) {
    if (totals_ == nullptr)
      return;
    waited_ns_ = device::load(&totals_->waited_ns);
    num_waits_ = device::load(&totals_->num_waits);
  }
  MOE_DEVICE void end() const {
    if (totals_ == nullptr)
      return;
    // The host may look at any time.
    device::store_relaxed<device::Scope::kSystem>(&totals_->waited_ns,
                                                  waited_ns_ + (device::now_ns() - start_ns_));
    device::store_relaxed<device::Scope::kSystem>(&totals_->num_waits, num_waits_ + 1);
  }

 private:
  WaitTotals* totals_;
  uint64_t start_ns_;
  uint64_t waited_ns_ = 0;
  uint64_t num_waits_ = 0;
};

/// Waits until has_come() says so, for @p peer_rank. Progress of the peer extends the limit; so
/// does memory that it obtains.
/// @param expected, seen  of the peer's flag, for the report; has_come() may change @p seen
/// @return false when the kernel is to leave.
template <typename HasCome>
MOE_DEVICE bool await_until(const Buffer& buffer,
                            const WaitSite& site,
                            int peer_rank,
                            uint64_t expected,
                            const uint64_t& seen,
                            uint64_t limit_ns,
                            const HasCome& has_come) {
  constexpr int kPollsPerCheck = 16;
  constexpr uint32_t kLongestPauseNs = 512;
  if (has_come())
    return true;
  const layout::Activity& activity = workspace(buffer, peer_rank).activity();
  uint64_t moved_ns = device::now_ns();
  const WaitMeter meter(buffer, site, peer_rank, moved_ns);
  uint64_t seen_progress = device::load_relaxed<device::Scope::kSystem>(&activity.progress);
  uint32_t pause_ns = 16;
#pragma unroll 1
  for (int num_polls = 1;; ++num_polls) {
    device::pause(pause_ns);
    if (has_come()) {
      meter.end();
      return true;
    }
    if (num_polls % kPollsPerCheck != 0)
      continue;
    pause_ns = pause_ns < kLongestPauseNs ? 2 * pause_ns : kLongestPauseNs;
    if (is_aborted(buffer)) {
      leave(buffer, Cause::kAborted, peer_rank, site, expected, seen);
      return false;
    }
    const uint64_t now_ns = device::now_ns();
    if (now_ns - moved_ns <= limit_ns)
      continue;
    const uint64_t progress = device::load_relaxed<device::Scope::kSystem>(&activity.progress);
    if (progress != seen_progress) {
      seen_progress = progress;
      moved_ns = now_ns;
      continue;
    }
    const bool is_growing = device::load_relaxed<device::Scope::kSystem>(&activity.phase) ==
                            static_cast<int32_t>(layout::Phase::kGrowing);
    if (is_growing && now_ns - moved_ns <= buffer.arrival_limit_ns)
      continue;
    leave(buffer, Cause::kTimedOut, peer_rank, site, expected, seen);
    return false;
  }
}

/// Waits until @p *flag, which @p peer_rank raises, is at least @p expected, and acquires what the
/// peer wrote before. @return false when the kernel is to leave.
MOE_DEVICE bool await_flag(const Buffer& buffer,
                           const WaitSite& site,
                           int peer_rank,
                           const uint64_t* flag,
                           uint64_t expected,
                           uint64_t limit_ns) {
  uint64_t seen = 0;
  return await_until(buffer, site, peer_rank, expected, seen, limit_ns, [&] {
    seen = device::load_acquire<device::Scope::kSystem>(flag);
    return seen >= expected;
  });
}

/// A block waits for a flag of every rank that @p wants(rank_idx) names, one thread per rank.
/// Lets all threads read afterwards what each of them acquired.
/// @param flag_of  flag_of(rank_idx), the flag's address
/// @param scratch  shared, a word per warp
/// @return the same on every thread: false when the kernel is to leave.
template <typename Wants, typename FlagOf>
MOE_DEVICE bool block_await_flags(const Buffer& buffer,
                                  const WaitSite& site,
                                  uint64_t expected,
                                  uint64_t limit_ns,
                                  int32_t* scratch,
                                  const Wants& wants,
                                  const FlagOf& flag_of) {
  bool has_come = true;
#pragma unroll 1
  for (int rank_idx = device::thread_idx(); rank_idx < buffer.num_ranks && has_come;
       rank_idx += device::num_threads())
    if (wants(rank_idx))
      has_come = await_flag(buffer, site, rank_idx, flag_of(rank_idx), expected, limit_ns);
  return device::block_all(has_come, scratch);
}

}  // namespace moe::kernels
