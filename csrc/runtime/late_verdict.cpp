#include "runtime/late_verdict.h"

#include <map>
#include <utility>

#include "core/sync.h"

namespace moe::runtime {

namespace {

constexpr int64_t kPatienceNs =
    200'000'000;  ///< before anybody asks who keeps an operation waiting

/// The latest operation of every caller's stream of this process, by device and handle.
struct StreamVerdicts {
  std::mutex mutex;
  std::map<std::pair<int32_t, void*>, std::weak_ptr<LateVerdict>> latest;
};

StreamVerdicts& stream_verdicts() {
  static StreamVerdicts verdicts;
  return verdicts;
}

std::pair<int32_t, void*> stream_of(const DeviceEndpoint& endpoint) {
  return {endpoint.device_idx(), endpoint.caller_stream().handle()};
}

/// Whether some peer never comes to @p epoch. One that has closed its buffer behind it has.
bool has_closed_peer(const DeviceEndpoint& endpoint, uint64_t epoch) {
  const layout::Workspace& workspace = endpoint.own_workspace();
  for (int peer_rank = 0; peer_rank < endpoint.num_ranks(); ++peer_rank) {
    const uint64_t closed_epoch = sync::load_acquire(workspace.closed(peer_rank).epoch);
    if (peer_rank != endpoint.rank_idx() && endpoint.group().is_active(peer_rank) &&
        closed_epoch != 0 && closed_epoch <= epoch)
      return true;
  }
  return false;
}

}  // namespace

LateVerdict::LateVerdict(DeviceEndpoint& endpoint, LeftRows left)
    : endpoint_(endpoint), start_ns_(sync::now_ns()), left_(std::move(left)) {}

std::shared_ptr<LateVerdict> LateVerdict::make(DeviceEndpoint& endpoint, LeftRows left) {
  const std::shared_ptr<LateVerdict> made(new LateVerdict(endpoint, std::move(left)));
  StreamVerdicts& verdicts = stream_verdicts();
  const std::lock_guard<std::mutex> lock(verdicts.mutex);
  std::erase_if(verdicts.latest, [](const auto& entry) { return entry.second.expired(); });
  verdicts.latest[stream_of(endpoint)] = made;
  return made;
}

void LateVerdict::hear_before(const DeviceEndpoint& endpoint,
                              const host::InterruptCheck& interrupt_check) {
  if (endpoint.is_host_caller())
    return;
  std::shared_ptr<LateVerdict> verdict;
  {
    StreamVerdicts& verdicts = stream_verdicts();
    const std::lock_guard<std::mutex> lock(verdicts.mutex);
    const auto entry = verdicts.latest.find(stream_of(endpoint));
    if (entry != verdicts.latest.end())
      verdict = entry->second.lock();
  }
  if (verdict == nullptr)
    return;
  const std::lock_guard<std::mutex> lock(verdict->mutex_);
  verdict->judge(interrupt_check);
}

void LateVerdict::join(const host::InterruptCheck& interrupt_check) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!is_judged_) {
    const auto active = endpoint_.device().activate_for_now();
    judge(interrupt_check);
  }
  is_told_ = true;
  if (error_)
    std::rethrow_exception(error_);
}

bool LateVerdict::is_complete() {
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock)
    return false;  // somebody waits for it
  return is_judged_ || endpoint_.group().is_aborted() || has_ticket();
}

bool LateVerdict::has_ticket() const {
  return sync::load_acquire(endpoint_.host_read()->ticket) >= left_.ticket;
}

std::exception_ptr LateVerdict::settle(const host::InterruptCheck& interrupt_check) {
  const std::lock_guard<std::mutex> lock(mutex_);
  judge(interrupt_check);
  return std::exchange(is_told_, true) ? nullptr : error_;
}

void LateVerdict::look(int64_t now_ns) {
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock || is_judged_)
    return;
  const host::LeftOperation& left = left_.operation;
  if (has_ticket() || now_ns - start_ns_ < kPatienceNs || !left.is_epoch_known) {
    arrivals_.reset();
    return;
  }
  const auto active = endpoint_.device().activate_for_now();
  if (has_closed_peer(endpoint_, left.epoch)) {
    judge({});
    return;
  }
  host::WaitSite site;
  site.operation = left.operation;
  site.phase = layout::Phase::kRows;
  site.epoch = static_cast<int64_t>(left.epoch);
  site.buffer_number = endpoint_.buffer_number();
  arrivals_.check(endpoint_, site, now_ns);
}

void LateVerdict::judge(const host::InterruptCheck& interrupt_check) {
  if (std::exchange(is_judged_, true))
    return;
  arrivals_.reset();
  try {
    const host::Group::OperationScope scope(endpoint_.group());
    DeviceExchange exchange(endpoint_, std::move(left_), interrupt_check);
    host::run_to_end(exchange, [&exchange] {
      exchange.hear_late();
      return true;
    });
  } catch (...) {
    error_ = std::current_exception();
  }
}

}  // namespace moe::runtime
