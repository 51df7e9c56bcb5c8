#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "runtime/device.h"
#include "simt/grid.h"

namespace moe::simt {

class Capture;
class Graph;
class StreamBaton;
class StreamEvent;

/// One piece of a stream's work; grids run on the scheduler it is given.
using Work = std::function<void(Scheduler& scheduler)>;

/// A step of a graph: work, or a baton that is taken or given.
struct Step {
  Work work;
  std::shared_ptr<StreamBaton> taken;
  std::shared_ptr<StreamBaton> given;
};

/// Progress of a stream. Shared with its events, which outlive it.
class Progress {
 public:
  /// The next piece of work. @return its number, from 1 on.
  uint64_t add(Work work);
  uint64_t num_added() const;
  /// Returns whether the first @p number pieces have ended, well or not.
  bool has_ended(uint64_t number) const;
  /// The same. @throws what one of them threw; those behind it were not run.
  bool is_complete(uint64_t number) const;
  /// Waits until they have. @throws what one of them threw.
  void await(uint64_t number) const;
  /// @throws what a piece of work threw.
  void check() const;
  /// Drops @p owned once what was added so far has ended, well or not.
  void drop(std::shared_ptr<const void> owned);

  /// Runs work until stop() was called and nothing is left.
  void run();
  void stop();

 private:
  void check_until(uint64_t number) const;

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::deque<Work> waiting_;
  uint64_t num_added_ = 0;
  uint64_t num_ended_ = 0;
  uint64_t failed_ = 0;  ///< number of the piece of work that threw, 0 for none
  std::exception_ptr error_;
  bool is_stopping_ = false;
};

/// The streams of a device.
class StreamOrder {
 public:
  void watch(const std::shared_ptr<Progress>& progress);
  /// Drops @p owned once every stream has ended what it holds now: at once, or on the thread of the
  /// stream that ends last. Thread-safe.
  void drop(const std::shared_ptr<const void>& owned);

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<Progress>> streams_;
};

/// A stream of the emulated device.
///
/// Ends the work of a stream by what a kernel of it throws: whatever was put in behind it is not
/// run, events recorded behind it throw the same from is_complete(), and so does every further
/// launch, copy, fill and wait. record() never throws.
class DeviceStream : public runtime::Stream,
                     public Stream,
                     public std::enable_shared_from_this<DeviceStream> {
 public:
  /// The living stream that has @p handle.
  static std::shared_ptr<DeviceStream> of_handle(void* handle);

  /// @throws InvalidArgument  the shape is not one that a device takes.
  void launch(Kernel kernel) override;
  void* handle() const override;
  std::shared_ptr<runtime::Event> record() override;
  void wait(const runtime::Event& event) override;
  void take(runtime::Baton& baton) override;
  void give(runtime::Baton& baton) override;
  void copy(void* target, const void* source, int64_t bytes) override;
  void fill(void* target, int value, int64_t bytes) override;
  bool is_capturing() const override;
  bool is_idle() const override { return !is_capturing() && has_run_all(); }
  std::shared_ptr<const runtime::CapturePoint> capture_point() const override;
  bool is_behind(const runtime::CapturePoint& point) const override;
  /// Puts @p function into the stream, to be called on its thread; into a graph while capturing.
  void call(std::function<void()> function);

  // Calls of each, for tests of what operations cost the host.
  int64_t num_launches() const { return num_launches_.load(); }
  int64_t num_copies() const { return num_copies_.load(); }
  int64_t num_events() const { return num_events_.load(); }

  /// From now on work put into this stream, and into streams that wait for what was recorded in it,
  /// goes into a graph instead of being run. As on a GPU, events of outside cannot be waited for
  /// meanwhile, and events of inside have no state.
  /// @throws InvalidArgument  it is capturing already.
  void begin_capture();
  /// @throws InvalidArgument  capture did not begin on this stream, or another stream has work in
  ///   the graph that this one does not wait for; the capture is over in either case.
  std::shared_ptr<Graph> end_capture();

 protected:
  explicit DeviceStream(int rank_idx) : rank_idx_(rank_idx) {}

  /// Puts work behind what is in the stream, or runs it at once.
  virtual void run(Work work) = 0;
  virtual std::shared_ptr<StreamEvent> record_progress() = 0;
  virtual void wait_for(const StreamEvent& event) = 0;
  virtual bool has_run_all() const = 0;
  /// While it lives no other thread puts anything in.
  virtual std::unique_lock<std::recursive_mutex> hold() { return {}; }

 private:
  friend class Graph;

  void put(Work work);
  bool put_into_graph(Step step);
  std::shared_ptr<Capture> capture() const;

  const int rank_idx_;
  std::atomic<int64_t> num_launches_{0};
  std::atomic<int64_t> num_copies_{0};  ///< and fills
  std::atomic<int64_t> num_events_{0};
  mutable std::mutex mutex_;
  std::shared_ptr<Capture> capture_;  ///< the last one it took part in
};

/// Runs its work in order on a thread of its own, which starts with the first piece of work.
class WorkerStream final : public DeviceStream {
 public:
  explicit WorkerStream(int rank_idx);
  /// Waits until all work has ended.
  ~WorkerStream() override;

  const std::shared_ptr<Progress>& progress() const { return progress_; }

 private:
  void run(Work work) override;
  std::shared_ptr<StreamEvent> record_progress() override;
  void wait_for(const StreamEvent& event) override;
  bool has_run_all() const override { return progress_->is_complete(progress_->num_added()); }
  std::unique_lock<std::recursive_mutex> hold() override {
    return std::unique_lock<std::recursive_mutex>(order_mutex_);
  }

  std::recursive_mutex order_mutex_;
  std::shared_ptr<Progress> progress_ = std::make_shared<Progress>();
  const pid_t process_;
  std::mutex start_mutex_;
  std::thread thread_;
};

/// Stands for the host: work runs on the calling thread before the call returns.
class HostStream final : public DeviceStream {
 public:
  explicit HostStream(int rank_idx) : DeviceStream(rank_idx) {}

 private:
  void run(Work work) override;
  std::shared_ptr<StreamEvent> record_progress() override;
  void wait_for(const StreamEvent& event) override;
  bool has_run_all() const override { return true; }
};

/// A point in a stream, or in a graph that is being captured.
class StreamEvent final : public runtime::Event {
 public:
  /// Whatever `progress` has by then; null for a point that is complete.
  StreamEvent(std::shared_ptr<const Progress> progress, uint64_t number)
      : progress_(std::move(progress)), number_(number) {}
  explicit StreamEvent(std::shared_ptr<Capture> capture,
                       std::map<const DeviceStream*, size_t> before)
      : capture_(std::move(capture)), before_(std::move(before)) {}

  /// @throws what a kernel before it threw.
  /// @throws InvalidArgument  it was recorded into a graph.
  bool is_complete() const override;
  /// Returns whether what was before it has ended, well or not. Of no event of a graph.
  bool has_ended() const;
  /// Waits. @throws as is_complete().
  void await() const;

  const std::shared_ptr<Capture>& capture() const { return capture_; }
  /// By stream: how many nodes of the graph come before.
  const std::map<const DeviceStream*, size_t>& before() const { return before_; }

 private:
  std::shared_ptr<const Progress> progress_;
  uint64_t number_ = 0;
  std::shared_ptr<Capture> capture_;
  std::map<const DeviceStream*, size_t> before_;
};

/// Baton that knows which work gave it last.
class StreamBaton final : public runtime::Baton, public std::enable_shared_from_this<StreamBaton> {
 public:
  bool is_complete() const override;
  void give(std::shared_ptr<StreamEvent> end);
  /// Null before anybody has.
  std::shared_ptr<StreamEvent> last() const;

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<StreamEvent> last_;
};

/// Work that was captured, in an order that its streams allow.
class Graph {
 public:
  explicit Graph(const std::vector<Step>& steps);

  size_t num_nodes() const { return num_nodes_; }
  /// Batons that its runs take or give.
  std::vector<std::shared_ptr<StreamBaton>> batons() const;
  /// Puts all of it into @p stream. Any number of times; the graph may be gone before it has run.
  void replay(DeviceStream& stream) const;

 private:
  std::vector<Step> steps_;  ///< work between batons is one
  size_t num_nodes_ = 0;
};

}  // namespace moe::simt
