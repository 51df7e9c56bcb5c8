#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "runtime/device.h"

namespace moe::runtime {

/// When memory of a device that was given back may be used again: once all work has ended that its
/// streams held by then.
///
/// Giving back costs nothing. A thread that wants the memory again asks, and the first to ask
/// records an event in every stream that has work; these serve all memory that was given back until
/// then. Thread-safe.
class StreamMarks {
 public:
  /// All that the streams held at some time. Its members belong to StreamMarks.
  class Mark {
    friend class StreamMarks;
    bool is_open_ = true;  ///< no events were recorded yet
    std::vector<std::shared_ptr<Event>> events_;
  };

  /// Marks that are open also stand for work in @p stream from now on.
  void watch(const std::shared_ptr<Stream>& stream);
  /// @p stream is about to end; what it still does counts until it is done.
  void unwatch(Stream& stream);

  /// Stands for what the streams hold now, and maybe for some of what follows.
  std::shared_ptr<Mark> mark();
  /// Returns whether the work of @p mark has ended. Does not wait. While a stream is captured
  /// nothing can be recorded in it, and what it held before cannot be told from what it was given
  /// since: marks that nobody has asked about by then are not passed until the capture ends.
  /// @throws what work in the streams ended by.
  bool has_passed(Mark& mark);
  /// Returns whether no stream has work, as far as that can be told: not while one is captured.
  /// @throws what work in the streams ended by.
  bool are_idle();

 private:
  bool close(Mark& mark);

  std::mutex mutex_;
  std::vector<std::weak_ptr<Stream>> streams_;
  std::vector<std::shared_ptr<Event>> last_events_;  ///< last events of streams that have ended
  std::shared_ptr<Mark> open_;                       ///< null for none
};

}  // namespace moe::runtime
