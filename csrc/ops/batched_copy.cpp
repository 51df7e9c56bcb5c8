#include "ops/batched_copy.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "core/math.h"
#include "cpu/this_machine.h"
#include "ops/copy_run.h"

namespace moe::ops {

namespace {

constexpr int kDefaultNumSlots = 4;
constexpr int64_t kSlotAlignment = 64;
constexpr int64_t kLeastDefaultSlotBytes = int64_t{64} << 10;
constexpr int64_t kMostDefaultSlotBytes = int64_t{512} << 10;
// Slots share the cache with what is read and written past them. Larger ones outlast a rank that
// waits for a core, smaller ones leave the cache to others.
constexpr int64_t kCacheShare = 2;

/// Slots of all pairs together stay in the last-level cache: bytes then go through memory once.
int64_t default_slot_bytes(int num_ranks, int num_slots) {
  const int64_t num_pairs = std::max<int64_t>(1, int64_t{num_ranks} * (num_ranks - 1));
  const int64_t bytes = cpu::last_level_cache_bytes() / kCacheShare / (num_pairs * num_slots);
  return round_up(std::clamp(bytes, kLeastDefaultSlotBytes, kMostDefaultSlotBytes), 4096);
}

/// Introduction of a rank's end when it is made.
struct Introduction {
  Offer workspace;
  uint64_t needed_bytes;  ///< bytes that its heap cannot hold; what is wrong follows. 0 where it
                          ///< can, then its configuration follows
  uint64_t available_bytes;
};

/// Throws that heaps are too small, as every rank does, where @p payloads say so.
void raise_shortage(const std::vector<std::string>& payloads) {
  std::vector<RankProblem> problems(payloads.size());
  for (size_t rank_idx = 0; rank_idx < payloads.size(); ++rank_idx) {
    Introduction found{};
    if (payloads[rank_idx].empty())
      continue;  // excluded
    std::memcpy(&found, payloads[rank_idx].data(), sizeof(found));
    if (found.needed_bytes != 0)
      problems[rank_idx] = {layout::RowStatus::kNoCapacity,
                            payloads[rank_idx].substr(sizeof(found)),
                            found.needed_bytes,
                            found.available_bytes};
  }
  if (const std::exception_ptr error = join_problems(problems))
    std::rethrow_exception(error);
}

class RunGuard {
 public:
  explicit RunGuard(std::atomic<std::thread::id>& runner) : runner_(runner) {
    std::thread::id nobody;
    if (!runner_.compare_exchange_strong(nobody, std::this_thread::get_id()))
      throw ConcurrentUse("one batched copy is run from two threads at once");
  }
  ~RunGuard() { runner_.store(std::thread::id()); }
  RunGuard(const RunGuard&) = delete;
  RunGuard& operator=(const RunGuard&) = delete;

 private:
  std::atomic<std::thread::id>& runner_;
};

}  // namespace

std::shared_ptr<BatchedCopy> BatchedCopy::create(std::shared_ptr<group::Group> group,
                                                 BatchedCopyConfig config,
                                                 const group::InterruptCheck& interrupt_check) {
  const auto engine = share_buffer(new BatchedCopy(std::move(group), config));
  try {
    engine->connect(interrupt_check);
  } catch (const InvalidArgument&) {
    throw;  // on every rank alike: nobody has an end that could write here
  } catch (const CapacityError&) {
    throw;  // likewise
  } catch (...) {
    if (engine->own_window_)
      engine->own_window_->quarantine();
    throw;
  }
  engine->group().add_recoverable(engine->buffer_number(), engine);
  return engine;
}

BatchedCopy::BatchedCopy(std::shared_ptr<group::Group> group, BatchedCopyConfig config)
    : BufferBase(std::move(group)),
      config_(config),
      kernels_(&cpu::best_row_kernels()),
      cache_bytes_(cpu::last_level_cache_bytes()),
      workspaces_(static_cast<size_t>(this->group().num_ranks())),
      threads_(this->group().num_threads()) {
  if (config_.num_slots == 0)
    config_.num_slots = kDefaultNumSlots;
  if (config_.slot_bytes == 0)
    config_.slot_bytes = default_slot_bytes(this->group().num_ranks(), config_.num_slots);
}

BatchedCopy::~BatchedCopy() {
  destroy();
}

void BatchedCopy::connect(const group::InterruptCheck& interrupt_check) {
  group().check_usable(layout::Operation::kNone);
  const int64_t bytes = layout::CopyWorkspace::bytes(num_ranks());
  Introduction own{};
  std::string text = config_text({{"slot_bytes", std::to_string(config_.slot_bytes)},
                                  {"num_slots", std::to_string(config_.num_slots)}});
  try {
    own_window_ = group().memory().allocate(static_cast<uint64_t>(bytes));
    sync::fill_shared(own_window_->data(), 0, static_cast<size_t>(bytes));
    own.workspace = own_window_->offer();
  } catch (const CapacityError& error) {
    own.needed_bytes = std::max<uint64_t>(1, error.needed_bytes);
    own.available_bytes = error.available_bytes;
    text = error.what();
  }
  take_number();
  const auto payloads = group().all_gather(
      std::string(reinterpret_cast<const char*>(&own), sizeof(own)) + text, interrupt_check);
  raise_shortage(payloads);
  check_same_config(noun(), payloads, sizeof(own));
  // Compared before it is looked at, so that a mistake is found on every rank alike.
  MOE_CHECK(config_.slot_bytes > 0 && config_.slot_bytes % kSlotAlignment == 0,
            "slot_bytes must be a positive multiple of ",
            kSlotAlignment,
            ", got ",
            config_.slot_bytes);
  MOE_CHECK(config_.num_slots > 0, "num_slots must be >= 1, got ", config_.num_slots);
  MOE_CHECK(config_.slot_bytes <= std::numeric_limits<int64_t>::max() / config_.num_slots,
            config_.num_slots,
            " slots of ",
            config_.slot_bytes,
            " bytes are beyond any machine");
  group::WaitSite site;
  site.interrupt_check = &interrupt_check;
  for (int peer_rank = 0; peer_rank < num_ranks(); ++peer_rank) {
    if (!group().is_active(peer_rank))
      continue;
    Introduction peer{};
    std::memcpy(&peer, payloads[static_cast<size_t>(peer_rank)].data(), sizeof(peer));
    workspaces_[static_cast<size_t>(peer_rank)] =
        layout::CopyWorkspace(group().resolve(peer_rank, peer.workspace, site), num_ranks());
  }
}

CopyStats BatchedCopy::run(const std::shared_ptr<PreparedCopies>& prepared,
                           bool with_checksums,
                           const group::InterruptCheck& interrupt_check) {
  const RunGuard guard(runner_);
  return run_operation<CopyRun>(
      *this, layout::Operation::kBatchedCopy, interrupt_check, [&](CopyRun& run) {
        return run.execute(prepared, with_checksums);
      });
}

void BatchedCopy::reject(const std::string& message, const group::InterruptCheck& interrupt_check) {
  const RunGuard guard(runner_);
  run_rejected<CopyRun>(*this,
                        layout::Operation::kBatchedCopy,
                        layout::RowStatus::kInvalidArgument,
                        message,
                        interrupt_check);
}

const Window& BatchedCopy::slots(const std::vector<int>& readers, int64_t bytes) {
  const int64_t header_bytes = layout::CopySlots::header_bytes(num_ranks());
  const int64_t num_needed = std::min((bytes + config_.slot_bytes - 1) / config_.slot_bytes,
                                      config_.num_slots * static_cast<int64_t>(readers.size()));
  const auto needed_bytes = static_cast<uint64_t>(
      header_bytes + (num_needed == 1
                          ? round_up(std::min(bytes, config_.slot_bytes), kSlotAlignment)
                          : num_needed * config_.slot_bytes));
  auto& window = slots_[readers];
  if (!window || window->bytes() < needed_bytes) {
    window = nullptr;
    window = group().memory().allocate(needed_bytes);
    sync::fill_shared(window->data(), 0, static_cast<size_t>(header_bytes));
  }
  return *window;
}

void BatchedCopy::quarantine_slots() {
  for (auto& [readers, window] : slots_)
    group().retired().quarantine(std::move(window));
  slots_.clear();
}

void BatchedCopy::end_run() {
  const auto give_up = [this] {
    group().abort(layout::AbortCause::kPeerFailed,
                  group::WaitSite{layout::Operation::kBatchedCopy},
                  {rank_idx()},
                  concat("rank ",
                         rank_idx(),
                         " destroyed batched copy of buffer ",
                         buffer_number(),
                         " while it ran"));
  };
  const int64_t limit_ns = sync::now_ns() + group().stall_timeout_ns();
  for (std::thread::id runner; (runner = runner_.load()) != std::thread::id();) {
    const bool is_own = runner == std::this_thread::get_id();  // from a handler of a signal
    if (is_own || sync::now_ns() > limit_ns)
      give_up();
    if (is_own) {
      quarantine_slots();
      return;
    }
    sync::sleep_ns(1'000'000);
  }
}

void BatchedCopy::destroy() {
  if (is_destroyed() || group().is_forked_child())
    return;
  end_run();
  if (!become_destroyed())
    return;
  if (!own_window_ || own_workspace().base() == nullptr)
    return;
  // Peers may still be in the last run, and read slots that were filled for them.
  std::vector<std::shared_ptr<Window>> windows = {std::move(own_window_)};
  for (auto& [readers, window] : slots_)
    if (window)
      windows.push_back(std::move(window));
  slots_.clear();
  close_control(std::move(windows), [this](int owner, int rank) -> uint64_t* {
    const layout::CopyWorkspace& area = workspace(owner);
    return area.base() == nullptr ? nullptr : &area.closed(rank).value;
  });
}

}  // namespace moe::ops
