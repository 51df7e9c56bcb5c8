#include "runtime/deferred_agreement.h"

#include <unistd.h>

#include <chrono>
#include <map>
#include <utility>

#include "core/error.h"
#include "core/sync.h"
#include "ops/buffer_operation.h"

namespace moe::runtime {

namespace {

constexpr int64_t kPatienceNs =
    200'000'000;  ///< before anybody asks who keeps an operation waiting

/// The latest operation of every caller's stream of this process, by device and handle.
struct StreamVerdicts {
  std::mutex mutex;
  std::map<std::pair<int32_t, void*>, std::weak_ptr<DeferredAgreement>> latest;
};

StreamVerdicts& stream_verdicts() {
  static StreamVerdicts verdicts;
  return verdicts;
}

}  // namespace

DeferredAgreement::DeferredAgreement(UnheardOperation left)
    : group_(&left.endpoint.group()),
      start_ns_(sync::now_ns()),
      process_id_(::getpid()),
      left_(std::move(left)) {}

std::shared_ptr<DeferredAgreement> DeferredAgreement::make(UnheardOperation left,
                                                           const Stream& caller) {
  const std::pair<int32_t, void*> place{left.device.device_idx(), caller.handle()};
  const std::shared_ptr<DeferredAgreement> made(new DeferredAgreement(std::move(left)));
  StreamVerdicts& verdicts = stream_verdicts();
  const std::lock_guard<std::mutex> lock(verdicts.mutex);
  std::erase_if(verdicts.latest, [](const auto& entry) { return entry.second.expired(); });
  verdicts.latest[place] = made;
  return made;
}

std::shared_ptr<DeferredAgreement> DeferredAgreement::of_another(const ops::EndpointBase& endpoint,
                                                                 const Stream& caller) {
  if (endpoint.is_host_caller())
    return nullptr;
  StreamVerdicts& verdicts = stream_verdicts();
  const std::lock_guard<std::mutex> lock(verdicts.mutex);
  const auto entry = verdicts.latest.find({endpoint.device_idx(), caller.handle()});
  std::shared_ptr<DeferredAgreement> verdict;
  if (entry != verdicts.latest.end())
    verdict = entry->second.lock();
  // Operations of this buffer are in one order on every rank.
  return verdict == nullptr || &verdict->left_.endpoint == &endpoint ? nullptr : verdict;
}

void DeferredAgreement::hear_for(const ops::EndpointBase& endpoint,
                                 const group::InterruptCheck& interrupt_check) {
  await_judged(interrupt_check);
  // The caller hears of an abort in the operation that it is in.
  if (group_ == &endpoint.group() && endpoint.group().is_aborted())
    is_told_.store(true, std::memory_order_relaxed);
}

void DeferredAgreement::join(const group::InterruptCheck& interrupt_check) {
  if (!is_judged_.load(std::memory_order_acquire)) {
    const auto active = left_.device.activate_for_now();
    await_judged(interrupt_check);
  }
  is_told_.store(true, std::memory_order_relaxed);
  if (error_)
    std::rethrow_exception(error_);
}

bool DeferredAgreement::is_complete() {
  if (is_judged_.load(std::memory_order_acquire))
    return true;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (is_judged_)
    return true;
  if (busy_ != std::thread::id() && busy_ != std::this_thread::get_id())
    return false;  // somebody waits for it
  return left_.endpoint.group().is_aborted() || has_ticket();
}

bool DeferredAgreement::has_ticket() const {
  return left_.mailbox->has_ticket(left_.ticket);
}

uint64_t DeferredAgreement::epoch() const {
  return left_.first_epoch != 0 ? left_.first_epoch : left_.mailbox->epoch();
}

std::shared_ptr<DeferredAgreement> DeferredAgreement::former() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return left_.former == nullptr || left_.former->has_ended() ? nullptr : left_.former;
}

void DeferredAgreement::look(int64_t now_ns) {
  if (const auto former = this->former(); former != nullptr && !former->hear_if_there())
    return;
  try_alone([&] {
    const auto active = left_.device.activate_for_now();
    const uint64_t epoch = this->epoch();
    if (has_ticket() || now_ns - start_ns_ < kPatienceNs || epoch == 0) {
      arrivals_.reset();
      return;
    }
    const int closed_rank =
        ops::find_closed_peer(left_.endpoint.group(), epoch, [this](int rank_idx) {
          return left_.endpoint.closed_epoch(rank_idx);
        });
    if (closed_rank >= 0) {
      judge({});
      return;
    }
    group::WaitSite site;
    site.operation = left_.operation;
    site.phase = layout::Phase::kRows;
    site.epoch = static_cast<int64_t>(epoch);
    site.buffer_number = left_.endpoint.buffer_number();
    arrivals_.check(left_.endpoint.group(), left_.control, site, now_ns);
  });
}

bool DeferredAgreement::hear_if_there() {
  if (has_ended())
    return true;
  if (const auto former = this->former(); former != nullptr && !former->hear_if_there())
    return false;
  try_alone([this] {
    const auto active = left_.device.activate_for_now();
    if (has_ticket())
      judge({});
  });
  return has_ended();
}

void DeferredAgreement::try_alone(const std::function<void()>& body) {
  struct Turn {
    DeferredAgreement& verdict;
    ~Turn() {
      const std::lock_guard<std::mutex> lock(verdict.mutex_);
      verdict.busy_ = std::thread::id();
      verdict.changed_.notify_all();
    }
  };
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_judged_ || busy_ != std::thread::id())
      return;
    busy_ = std::this_thread::get_id();
  }
  const Turn turn{*this};
  body();
}

void DeferredAgreement::await_judged(const group::InterruptCheck& interrupt_check) {
  constexpr auto kAnswerEvery = std::chrono::milliseconds(50);
  if (is_judged_.load(std::memory_order_acquire))
    return;
  // No kernel writes to a forked child, and its lock may belong to no thread of it.
  MOE_CHECK(::getpid() == process_id_,
            "what the ranks say of an operation is heard in process ",
            process_id_,
            ", and this is its forked child ",
            ::getpid());
  if (const auto former = this->former())
    former->await_judged(interrupt_check);
  std::unique_lock<std::mutex> lock(mutex_);
  while (!is_judged_) {
    if (busy_ == std::this_thread::get_id())
      throw ConcurrentUse("this thread waits for what the ranks say of that operation already");
    const bool is_mine = busy_ == std::thread::id();
    if (!is_mine)
      changed_.wait_for(lock, kAnswerEvery);
    lock.unlock();
    if (is_mine)
      try_alone([&] { judge(interrupt_check); });
    else if (interrupt_check)
      interrupt_check();
    lock.lock();
  }
}

/// @throws what a handler of a signal raised: the caller hears that, whoever asks later hears of
/// the abort it has led to.
void DeferredAgreement::judge(const group::InterruptCheck& interrupt_check) {
  bool is_interrupted = false;
  const group::InterruptCheck check = [&] {
    if (!interrupt_check)
      return;
    try {
      interrupt_check();
    } catch (...) {
      is_interrupted = true;
      throw;
    }
  };
  arrivals_.reset();
  try {
    left_.hear(check);
    finish(nullptr, false);
  } catch (...) {
    if (!is_interrupted) {
      finish(std::current_exception(), false);
      return;
    }
    std::exception_ptr error = std::current_exception();
    try {
      left_.endpoint.group().check_abort();
    } catch (...) {
      error = std::current_exception();
    }
    finish(error, true);
    throw;
  }
}

void DeferredAgreement::finish(std::exception_ptr error, bool is_told) {
  const std::lock_guard<std::mutex> lock(mutex_);
  left_.former = nullptr;
  is_abort_ = error != nullptr && group_->is_aborted();
  error_ = std::move(error);
  is_told_.store(is_told, std::memory_order_relaxed);
  is_judged_.store(true, std::memory_order_release);
}

}  // namespace moe::runtime
