#include "runtime/device_watch.h"

#include <chrono>
#include <utility>

#include "core/process.h"
#include "core/sync.h"
#include "runtime/absent_peers.h"

namespace moe::runtime {

namespace {

constexpr auto kLookEvery = std::chrono::milliseconds(20);

bool has_ended(const Event& work) {
  try {
    return work.is_complete();
  } catch (...) {
    return true;  // a kernel failed in itself: the next call on the host says so
  }
}

}  // namespace

DeviceWatch::DeviceWatch(const ops::EndpointBase& endpoint,
                         Device& device,
                         const ControlMemory& control,
                         const OperationRing& operations)
    : endpoint_(endpoint), device_(device), control_(control), operations_(operations) {
  take_active();
}

DeviceWatch::~DeviceWatch() {
  stop();
}

void DeviceWatch::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_stopping_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable())
    thread_.join();
}

void DeviceWatch::follow(std::shared_ptr<const Event> work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  // A thread that has work to look at comes by itself.
  const bool has_work = std::exchange(work_, std::move(work)) != nullptr;
  if (!has_work)
    start();
}

void DeviceWatch::follow_always() {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_endless_ = true;
  start();
}

void DeviceWatch::pause(const std::function<void()>& change) {
  const std::lock_guard<std::mutex> lock(look_mutex_);
  change();
  take_active();
}

void DeviceWatch::take_active() {
  const auto& group = endpoint_.group();
  const auto count = static_cast<size_t>(group.num_ranks());
  is_active_.assign(count, 0);
  gone_.assign(count, {});
  for (int peer_rank = 0; peer_rank < group.num_ranks(); ++peer_rank)
    is_active_[static_cast<size_t>(peer_rank)] =
        static_cast<uint8_t>(group.is_active(peer_rank) && peer_rank != group.rank_idx());
}

void DeviceWatch::start() {
  if (!thread_.joinable() && !is_stopping_)
    thread_ = start_quiet_thread("watches kernels", [this] { run(); });
  changed_.notify_all();
}

void DeviceWatch::run() {
  try {
    // Else asking about work would make a context on the first device, whichever this rank uses.
    device_.activate();
  } catch (...) {
    // The next call on the host says why.
  }
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return is_stopping_ || is_endless_ || work_ != nullptr; });
    if (is_stopping_)
      return;
    const std::shared_ptr<const Event> work = work_;
    lock.unlock();
    // First: a report is there before the kernel that wrote it has ended.
    const bool is_over = work != nullptr && has_ended(*work);
    try {
      look();
    } catch (...) {
      // It has aborted, or the device answers no more: the next call on the host says why.
    }
    lock.lock();
    if (is_over && work_ == work)
      work_ = nullptr;
    changed_.wait_for(lock, kLookEvery, [this] { return is_stopping_; });
  }
}

void DeviceWatch::look() {
  const std::lock_guard<std::mutex> lock(look_mutex_);
  if (endpoint_.group().is_aborted() || endpoint_.group().is_destroyed())
    return;
  const kernels::WaitReport& report = control_.report();
  if (static_cast<kernels::Cause>(sync::load_acquire(report.cause)) == kernels::Cause::kTimedOut)
    give_up_timed_out(endpoint_.group(), endpoint_.buffer_number(), report);
  operations_.look(sync::now_ns());
  look_for_gone(sync::now_ns());
}

void DeviceWatch::look_for_gone(int64_t now_ns) {
  for (int peer_rank = 0; peer_rank < endpoint_.num_ranks(); ++peer_rank) {
    const auto idx = static_cast<size_t>(peer_rank);
    if (is_active_[idx] == 0 || endpoint_.group().state(peer_rank) == PeerState::kAlive)
      continue;
    // Here a rank of this node has a grace too: which operation the kernels are in, and what they
    // lack, are read one after the other while they run.
    const bool is_local = endpoint_.group().is_local(peer_rank);
    if (!gone_[idx].has_passed(now_ns, is_local ? group::kDeathGraceNs : group::kRemoteGraceNs))
      continue;
    device_.activate();
    group::WaitSite where;
    if (control_.lacks(peer_rank, &where))
      group::give_up_gone(endpoint_.group(), where, peer_rank);
  }
}

}  // namespace moe::runtime
