#include "simt/stream.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "core/error.h"
#include "core/process.h"
#include "cpu/row_kernels.h"

namespace moe::simt {

// --- Progress -----------------------------------------------------------------------------------

uint64_t Progress::add(Work work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  waiting_.push_back(std::move(work));
  changed_.notify_all();
  return ++num_added_;
}

uint64_t Progress::num_added() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return num_added_;
}

bool Progress::has_ended(uint64_t number) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return num_ended_ >= number;
}

bool Progress::is_complete(uint64_t number) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  check_until(number);
  return num_ended_ >= number;
}

void Progress::await(uint64_t number) const {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return num_ended_ >= number; });
  check_until(number);
}

void Progress::check() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  check_until(num_added_);
}

void Progress::check_until(uint64_t number) const {
  if (failed_ != 0 && failed_ <= number)
    std::rethrow_exception(error_);
}

void Progress::drop(std::shared_ptr<const void> owned) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (num_ended_ == num_added_)
    return;  // the caller's, which goes when no lock is held
  waiting_.push_back([owned = std::move(owned)](Scheduler&) {});
  ++num_added_;
}

void Progress::run() {
  const cpu::FloatingPointScope floating_point;
  Scheduler scheduler;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return is_stopping_ || !waiting_.empty(); });
    if (waiting_.empty())
      return;
    Work work = std::move(waiting_.front());
    waiting_.pop_front();
    const bool is_run = failed_ == 0;
    lock.unlock();
    std::exception_ptr error;
    try {
      if (is_run)
        work(scheduler);
    } catch (...) {
      error = std::current_exception();
    }
    work = nullptr;  // what it kept alive goes before events see its end
    lock.lock();
    ++num_ended_;
    if (error) {
      failed_ = num_ended_;
      error_ = error;
    }
    changed_.notify_all();
  }
}

void Progress::stop() {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_stopping_ = true;
  changed_.notify_all();
}

// --- StreamOrder --------------------------------------------------------------------------------

void StreamOrder::watch(const std::shared_ptr<Progress>& progress) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(streams_, [](const auto& stream) { return stream.expired(); });
  streams_.push_back(progress);
}

void StreamOrder::drop(const std::shared_ptr<const void>& owned) {
  std::vector<std::shared_ptr<Progress>> streams;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& weak : streams_)
      if (auto stream = weak.lock())
        streams.push_back(std::move(stream));
  }
  for (const auto& stream : streams)
    stream->drop(owned);
}

// --- Capture ------------------------------------------------------------------------------------

/// Work on its way into a graph. Streams that take part hold it; the lock is for streams of several
/// threads.
class Capture {
 public:
  using Counts = std::map<const DeviceStream*, size_t>;

  explicit Capture(const DeviceStream* origin) : origin_(origin) { known_[origin]; }

  bool is_open() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return is_open_;
  }

  bool add(const DeviceStream* stream, Step step) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!is_open_)
      return false;
    steps_.push_back(std::move(step));
    known_[stream][stream] = ++num_of_stream_[stream];
    return true;
  }

  Counts known_to(const DeviceStream* stream) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = known_.find(stream);
    return found == known_.end() ? Counts{} : found->second;
  }

  void join(const DeviceStream* stream, const Counts& before) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Counts& known = known_[stream];
    for (const auto& [other, number] : before)
      known[other] = std::max(known[other], number);
  }

  Counts all() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return num_of_stream_;
  }

  std::vector<Step> end(const DeviceStream* stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    MOE_CHECK(stream == origin_, "capture did not begin on the stream that it is to end on");
    is_open_ = false;
    Counts& known = known_[origin_];
    for (const auto& [other, number] : num_of_stream_)
      MOE_CHECK(known[other] == number,
                "a stream has put ",
                number,
                " operations into the graph, and the stream that began it waits for ",
                known[other],
                " of them");
    return std::move(steps_);
  }

 private:
  mutable std::mutex mutex_;
  const DeviceStream* origin_;
  bool is_open_ = true;
  std::vector<Step> steps_;
  Counts num_of_stream_;
  std::map<const DeviceStream*, Counts> known_;  ///< by stream: what it comes after
};

namespace {

struct CaptureCounts final : runtime::CapturePoint {
  CaptureCounts(std::shared_ptr<Capture> of, Capture::Counts counted)
      : capture(std::move(of)), counts(std::move(counted)) {}
  std::shared_ptr<Capture> capture;
  Capture::Counts counts;
};

}  // namespace

// --- DeviceStream -------------------------------------------------------------------------------

namespace {

template <typename Word>
bool copy_word(void* target, const void* source, int64_t bytes) {
  const auto addresses = reinterpret_cast<uintptr_t>(target) | reinterpret_cast<uintptr_t>(source);
  if (bytes != sizeof(Word) || addresses % sizeof(Word) != 0)
    return false;
  const std::atomic_ref from(*static_cast<Word*>(const_cast<void*>(source)));
  std::atomic_ref(*static_cast<Word*>(target))
      .store(from.load(std::memory_order_acquire), std::memory_order_release);
  return true;
}

/// A word is moved whole: kernels may be writing it.
void copy_bytes(void* target, const void* source, int64_t bytes) {
  if (!copy_word<uint64_t>(target, source, bytes) && !copy_word<uint32_t>(target, source, bytes))
    std::memmove(target, source, static_cast<size_t>(bytes));
}

}  // namespace

std::shared_ptr<DeviceStream> DeviceStream::of_handle(void* handle) {
  return dynamic_cast<DeviceStream&>(*static_cast<simt::Stream*>(handle)).shared_from_this();
}

std::shared_ptr<Capture> DeviceStream::capture() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return capture_ && capture_->is_open() ? capture_ : nullptr;
}

bool DeviceStream::is_capturing() const {
  return capture() != nullptr;
}

bool DeviceStream::put_into_graph(Step step) {
  const auto open = capture();
  return open && open->add(this, std::move(step));
}

std::shared_ptr<const runtime::CapturePoint> DeviceStream::capture_point() const {
  const std::shared_ptr<Capture> open = capture();
  return open == nullptr ? nullptr : std::make_shared<CaptureCounts>(open, open->all());
}

bool DeviceStream::is_behind(const runtime::CapturePoint& point) const {
  const auto& counted = dynamic_cast<const CaptureCounts&>(point);
  if (capture() != counted.capture)
    return true;
  const Capture::Counts known = counted.capture->known_to(this);
  return std::ranges::all_of(counted.counts, [&](const auto& entry) {
    const auto found = known.find(entry.first);
    return found != known.end() && found->second >= entry.second;
  });
}

void DeviceStream::put(Work work) {
  if (!put_into_graph({work, nullptr, nullptr}))
    run(std::move(work));
}

void DeviceStream::take(runtime::Baton& baton) {
  auto& own = dynamic_cast<StreamBaton&>(baton);
  if (put_into_graph({nullptr, own.shared_from_this(), nullptr}))
    return;
  if (const auto last = own.last())
    wait_for(*last);
}

void DeviceStream::give(runtime::Baton& baton) {
  auto& own = dynamic_cast<StreamBaton&>(baton);
  if (!put_into_graph({nullptr, nullptr, own.shared_from_this()}))
    own.give(record_progress());
}

void DeviceStream::launch(Kernel kernel) {
  check_shape(kernel);
  num_launches_.fetch_add(1, std::memory_order_relaxed);
  kernel.rank_idx = rank_idx_;
  put([kernel = std::move(kernel)](Scheduler& scheduler) {
    launch_grid(scheduler, kernel);
    scheduler.run();
  });
}

void* DeviceStream::handle() const {
  return static_cast<simt::Stream*>(const_cast<DeviceStream*>(this));
}

void DeviceStream::copy(void* target, const void* source, int64_t bytes) {
  MOE_CHECK(bytes >= 0, "a copy of ", bytes, " bytes");
  num_copies_.fetch_add(1, std::memory_order_relaxed);
  if (bytes > 0)
    put([=](Scheduler&) { copy_bytes(target, source, bytes); });
}

void DeviceStream::fill(void* target, int value, int64_t bytes) {
  MOE_CHECK(bytes >= 0, "a fill of ", bytes, " bytes");
  num_copies_.fetch_add(1, std::memory_order_relaxed);
  if (bytes > 0)
    put([=](Scheduler&) { std::memset(target, value, static_cast<size_t>(bytes)); });
}

void DeviceStream::call(std::function<void()> function) {
  put([function = std::move(function)](Scheduler&) { function(); });
}

std::shared_ptr<runtime::Event> DeviceStream::record() {
  num_events_.fetch_add(1, std::memory_order_relaxed);
  if (const auto open = capture())
    return std::make_shared<StreamEvent>(open, open->known_to(this));
  return record_progress();
}

void DeviceStream::wait(const runtime::Event& event) {
  const auto* const own = dynamic_cast<const StreamEvent*>(&event);
  MOE_CHECK(own != nullptr, "the event belongs to another device");
  const std::shared_ptr<Capture> open = capture();
  if (own->capture() == nullptr) {
    MOE_CHECK(open == nullptr, "an event of outside a graph cannot be waited for while capturing");
    wait_for(*own);
    return;
  }
  MOE_CHECK(own->capture()->is_open(), "the event was recorded into a graph that is complete");
  MOE_CHECK(open == nullptr || open == own->capture(),
            "the event was recorded into another graph than the one that is being captured");
  own->capture()->join(this, own->before());
  const std::lock_guard<std::mutex> lock(mutex_);
  capture_ = own->capture();
}

void DeviceStream::begin_capture() {
  MOE_CHECK(!is_capturing(), "the stream is capturing already");
  const std::lock_guard<std::mutex> lock(mutex_);
  capture_ = std::make_shared<Capture>(this);
}

std::shared_ptr<Graph> DeviceStream::end_capture() {
  const std::shared_ptr<Capture> open = capture();
  MOE_CHECK(open != nullptr, "the stream is not capturing");
  return std::make_shared<Graph>(open->end(this));
}

// --- WorkerStream -------------------------------------------------------------------------------

WorkerStream::WorkerStream(int rank_idx) : DeviceStream(rank_idx), process_(getpid()) {}

WorkerStream::~WorkerStream() {
  if (getpid() != process_) {
    // A forked child has no such thread, and may have its locks in any state.
    new std::thread(std::move(thread_));
    new std::shared_ptr<Progress>(progress_);
    return;
  }
  progress_->stop();
  if (thread_.joinable())
    thread_.join();
}

void WorkerStream::run(Work work) {
  MOE_CHECK(getpid() == process_,
            "the stream was made in process ",
            process_,
            ", which forked this one, ",
            getpid());
  progress_->check();
  {
    const auto held = hold();
    progress_->add(std::move(work));
  }
  const std::lock_guard<std::mutex> lock(start_mutex_);
  if (!thread_.joinable())
    thread_ = start_quiet_thread("runs a stream", [progress = progress_] { progress->run(); });
}

std::shared_ptr<StreamEvent> WorkerStream::record_progress() {
  const auto held = hold();
  return std::make_shared<StreamEvent>(progress_, progress_->num_added());
}

void WorkerStream::wait_for(const StreamEvent& event) {
  if (!event.has_ended() || !event.is_complete())
    run([event](Scheduler&) { event.await(); });
}

// --- HostStream ---------------------------------------------------------------------------------

void HostStream::run(Work work) {
  Scheduler scheduler;
  work(scheduler);
}

std::shared_ptr<StreamEvent> HostStream::record_progress() {
  return std::make_shared<StreamEvent>(nullptr, 0);
}

void HostStream::wait_for(const StreamEvent& event) {
  event.await();
}

// --- StreamEvent, StreamBaton, Graph
// -------------------------------------------------------------------------

bool StreamEvent::is_complete() const {
  MOE_CHECK(capture_ == nullptr, "an event of a graph has no state");
  return progress_ == nullptr || progress_->is_complete(number_);
}

bool StreamEvent::has_ended() const {
  return progress_ == nullptr || progress_->has_ended(number_);
}

void StreamEvent::await() const {
  MOE_CHECK(capture_ == nullptr, "an event of a graph has no state");
  if (progress_ != nullptr)
    progress_->await(number_);
}

bool StreamBaton::is_complete() const {
  const auto end = last();
  return end == nullptr || end->is_complete();
}

void StreamBaton::give(std::shared_ptr<StreamEvent> end) {
  const std::lock_guard<std::mutex> lock(mutex_);
  last_ = std::move(end);
}

std::shared_ptr<StreamEvent> StreamBaton::last() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return last_;
}

Graph::Graph(const std::vector<Step>& steps) {
  std::shared_ptr<std::vector<Work>> nodes;
  for (const Step& step : steps) {
    if (!step.work) {
      steps_.push_back(step);
      nodes = nullptr;
      continue;
    }
    if (nodes == nullptr) {
      nodes = std::make_shared<std::vector<Work>>();
      steps_.push_back({[nodes](Scheduler& scheduler) {
                          for (const Work& node : *nodes)
                            node(scheduler);
                        },
                        nullptr,
                        nullptr});
    }
    nodes->push_back(step.work);
    ++num_nodes_;
  }
}

std::vector<std::shared_ptr<StreamBaton>> Graph::batons() const {
  std::vector<std::shared_ptr<StreamBaton>> batons;
  for (const Step& step : steps_)
    if (!step.work)
      batons.push_back(step.taken ? step.taken : step.given);
  return batons;
}

void Graph::replay(DeviceStream& stream) const {
  const auto held = stream.hold();
  for (const Step& step : steps_) {
    if (step.taken)
      stream.take(*step.taken);
    else if (step.given)
      stream.give(*step.given);
    else
      stream.put(step.work);
  }
}

}  // namespace moe::simt
