#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "group/peer_wait.h"
#include "runtime/control_memory.h"
#include "runtime/operation_ring.h"

namespace moe::runtime {

/// Looks after kernels that nobody on the host waits for.
///
/// A thread that sleeps while nothing is in flight. Otherwise it looks now and then whether an
/// operation waits for a peer that is gone, or has run into a limit, and aborts the communicator by
/// that name: kernels of all ranks leave, and the next call on the host says why. Kernels know
/// neither that a process has died nor how to tell peers that wait for others.
///
/// Thread-safe. Its thread starts when there is something to look after, and takes neither signals
/// nor the interpreter's lock.
class DeviceWatch {
 public:
  /// All of them outlive this.
  DeviceWatch(const ops::EndpointBase& endpoint,
              Device& device,
              const ControlMemory& control,
              const OperationRing& operations);
  ~DeviceWatch();
  DeviceWatch(const DeviceWatch&) = delete;
  DeviceWatch& operator=(const DeviceWatch&) = delete;

  /// Looks until @p work has ended.
  void follow(std::shared_ptr<const Event> work);
  /// Looks from now on: work of the stream is a graph's, and nobody says when that runs.
  void follow_always();
  /// Runs @p change, of what this looks at, while it does not look; then takes the peers that are
  /// active for those to look at.
  void pause(const std::function<void()>& change);
  /// Ends its thread for good. Idempotent.
  void stop();

 private:
  void start();
  void run();
  void look();
  void look_for_gone(int64_t now_ns);
  void take_active();

  const ops::EndpointBase& endpoint_;
  Device& device_;
  const ControlMemory& control_;
  const OperationRing& operations_;
  std::mutex look_mutex_;  ///< held while it looks; never taken under mutex_
  std::vector<uint8_t> is_active_;
  std::vector<group::GraceClock> gone_;  ///< by rank, since it was first seen to be gone

  std::mutex mutex_;
  std::condition_variable changed_;
  std::shared_ptr<const Event> work_;  ///< latest of the stream; null for none
  bool is_endless_ = false;
  bool is_stopping_ = false;
  std::thread thread_;
};

}  // namespace moe::runtime
