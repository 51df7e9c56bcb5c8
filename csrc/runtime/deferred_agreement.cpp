#include "runtime/deferred_agreement.h"

#include <unistd.h>

#include <chrono>
#include <map>
#include <utility>

#include "core/error.h"
#include "core/sync.h"

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

std::pair<int32_t, void*> stream_of(const DeviceEndpoint& endpoint) {
  return {endpoint.device_idx(), endpoint.caller_stream().handle()};
}

}  // namespace

DeferredAgreement::DeferredAgreement(DeviceEndpoint& endpoint, RemainingRows left)
    : endpoint_(endpoint),
      group_(&endpoint.group()),
      start_ns_(sync::now_ns()),
      process_id_(::getpid()),
      number_(left.number),
      first_epoch_(left.operation.is_epoch_known ? left.operation.epoch : 0),
      left_(std::move(left)),
      former_(endpoint.verdicts().newest()) {}

std::shared_ptr<DeferredAgreement> DeferredAgreement::make(DeviceEndpoint& endpoint,
                                                           RemainingRows left) {
  const std::shared_ptr<DeferredAgreement> made(new DeferredAgreement(endpoint, std::move(left)));
  StreamVerdicts& verdicts = stream_verdicts();
  const std::lock_guard<std::mutex> lock(verdicts.mutex);
  std::erase_if(verdicts.latest, [](const auto& entry) { return entry.second.expired(); });
  verdicts.latest[stream_of(endpoint)] = made;
  return made;
}

std::shared_ptr<DeferredAgreement> DeferredAgreement::of_another(const DeviceEndpoint& endpoint) {
  if (endpoint.is_host_caller())
    return nullptr;
  StreamVerdicts& verdicts = stream_verdicts();
  const std::lock_guard<std::mutex> lock(verdicts.mutex);
  const auto entry = verdicts.latest.find(stream_of(endpoint));
  std::shared_ptr<DeferredAgreement> verdict;
  if (entry != verdicts.latest.end())
    verdict = entry->second.lock();
  // Operations of this buffer are in one order on every rank.
  return verdict == nullptr || &verdict->endpoint_ == &endpoint ? nullptr : verdict;
}

void DeferredAgreement::hear_for(const DeviceEndpoint& endpoint,
                                 const group::InterruptCheck& interrupt_check) {
  await_judged(interrupt_check);
  // The caller hears of an abort in the operation that it is in.
  if (group_ == &endpoint.group() && endpoint.group().is_aborted())
    is_told_.store(true, std::memory_order_relaxed);
}

void DeferredAgreement::join(const group::InterruptCheck& interrupt_check) {
  if (!is_judged_.load(std::memory_order_acquire)) {
    const auto active = endpoint_.device().activate_for_now();
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
  return endpoint_.group().is_aborted() || has_ticket();
}

bool DeferredAgreement::has_ticket() const {
  return left_.mailbox->has_ticket(left_.ticket);
}

uint64_t DeferredAgreement::epoch() const {
  return first_epoch_ != 0 ? first_epoch_ : left_.mailbox->epoch();
}

std::shared_ptr<DeferredAgreement> DeferredAgreement::former() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return former_ == nullptr || former_->has_ended() ? nullptr : former_;
}

void DeferredAgreement::look(int64_t now_ns) {
  if (const auto former = this->former(); former != nullptr && !former->hear_if_there())
    return;
  try_alone([&] {
    const auto active = endpoint_.device().activate_for_now();
    const uint64_t epoch = this->epoch();
    if (has_ticket() || now_ns - start_ns_ < kPatienceNs || epoch == 0) {
      arrivals_.reset();
      return;
    }
    const int closed_rank = ops::find_closed_peer(endpoint_.group(), epoch, [this](int rank_idx) {
      return endpoint_.closed_epoch(rank_idx);
    });
    if (closed_rank >= 0) {
      judge({});
      return;
    }
    group::WaitSite site;
    site.operation = left_.operation.operation;
    site.phase = layout::Phase::kRows;
    site.epoch = static_cast<int64_t>(epoch);
    site.buffer_number = endpoint_.buffer_number();
    arrivals_.check(endpoint_, site, now_ns);
  });
}

bool DeferredAgreement::hear_if_there() {
  if (has_ended())
    return true;
  if (const auto former = this->former(); former != nullptr && !former->hear_if_there())
    return false;
  try_alone([this] {
    const auto active = endpoint_.device().activate_for_now();
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
    const group::Group::OperationScope scope(endpoint_.group());
    DeviceExchange exchange(endpoint_, std::move(left_), check);
    ops::run_to_end(exchange, [&exchange] {
      exchange.finish_deferred();
      return true;
    });
    finish(nullptr, false);
  } catch (...) {
    if (!is_interrupted) {
      finish(std::current_exception(), false);
      return;
    }
    std::exception_ptr error = std::current_exception();
    try {
      endpoint_.group().check_abort();
    } catch (...) {
      error = std::current_exception();
    }
    finish(error, true);
    throw;
  }
}

void DeferredAgreement::finish(std::exception_ptr error, bool is_told) {
  const std::lock_guard<std::mutex> lock(mutex_);
  former_ = nullptr;
  is_abort_ = error != nullptr && group_->is_aborted();
  error_ = std::move(error);
  is_told_.store(is_told, std::memory_order_relaxed);
  is_judged_.store(true, std::memory_order_release);
}

}  // namespace moe::runtime
