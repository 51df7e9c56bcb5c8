#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "device/launch.h"

namespace moe::runtime {

/// A point in a stream. Copyable; outlives its stream.
class Event {
 public:
  virtual ~Event() = default;
  /// Returns whether everything put into the stream before it has ended. Never blocks.
  virtual bool is_complete() const = 0;
};

/// Baton that work hands on to work of any stream, so that it runs in the order in which the host
/// issued it, graphs included. Outlives the runs of graphs that hand it on.
class Baton {
 public:
  virtual ~Baton() = default;
  /// Returns whether everything has ended before which it was given last, by now. Never blocks.
  virtual bool is_complete() const = 0;
};

/// All that streams had put into a graph by some time.
class CapturePoint {
 public:
  virtual ~CapturePoint() = default;
};

/// Work in order. Streams run beside each other.
class Stream {
 public:
  virtual ~Stream() = default;

  /// Handle that device::Launch::stream wants.
  virtual void* handle() const = 0;
  virtual std::shared_ptr<Event> record() = 0;
  /// The same of a stream that is not captured, as the caller knows, so that nobody has to ask.
  virtual std::shared_ptr<Event> record_uncaptured() { return record(); }
  /// Work put in from now on runs after @p event. Does not block the host, except on a stream that
  /// stands for the host itself.
  virtual void wait(const Event& event) = 0;
  /// The same behind what gave @p baton last, by now; of a graph that is captured, by the time each
  /// of its runs is put into a stream.
  virtual void take(Baton& baton) = 0;
  /// Makes whoever takes @p baton from now on wait for what the stream holds; of a captured graph,
  /// from when each of its runs is put into a stream.
  virtual void give(Baton& baton) = 0;
  /// @p source and @p target are device, heap or page-locked memory. In order, asynchronous.
  virtual void copy(void* target, const void* source, int64_t bytes) = 0;
  virtual void fill(void* target, int value, int64_t bytes) = 0;
  /// Returns whether work is being recorded into a graph instead of run.
  virtual bool is_capturing() const = 0;
  /// Returns whether everything put into it has ended. Never blocks; false while it is captured.
  virtual bool is_idle() const = 0;
  /// Point in the graph that it is captured into; null outside of one, and where the device cannot
  /// tell.
  virtual std::shared_ptr<const CapturePoint> capture_point() const { return nullptr; }
  /// Returns whether what is put into it from now on runs behind that, as in other graphs it does.
  virtual bool is_behind(const CapturePoint& /*point*/) const { return true; }
};

/// One GPU, or the emulator: what operations need besides kernels and the heap. Thread-safe.
class Device {
 public:
  virtual ~Device() = default;

  /// DLPack's device type and number of tensors in its memory.
  virtual int32_t dlpack_type() const = 0;
  virtual int32_t device_idx() const = 0;
  /// The same for the ranks, of any process, that use this device, and for no others.
  using Identity = std::array<uint8_t, 16>;
  virtual Identity identity() const = 0;
  /// Returns whether callers are the host itself, whose tensors are ready and which waits for
  /// results.
  virtual bool has_host_caller() const = 0;
  /// Returns whether other ranks of this process use it, too: what one calls may wait for kernels
  /// that wait for the other.
  virtual bool is_shared() const = 0;

  virtual int num_sms() const = 0;
  virtual size_t max_shared_bytes() const = 0;  ///< most bytes of a block, dynamic
  /// Tells how kernels were compiled: with them they have dependent launches, too.
  virtual bool has_bulk_copies() const = 0;

  /// Memory private to this rank, zeroed, aligned to 256 bytes; freed once the last owner is gone
  /// and work put into any stream by then has ended.
  virtual std::shared_ptr<std::byte> allocate(int64_t bytes) = 0;
  /// The same holding anything, for a caller that writes all of it: zeroing has the host wait.
  virtual std::shared_ptr<std::byte> allocate_unset(int64_t bytes) = 0;
  /// Page-locked host memory, zeroed, that kernels reach at the same address.
  virtual std::shared_ptr<std::byte> allocate_host(int64_t bytes) = 0;
  /// Sees to it that allocations of so many bytes of either kind, beside those that others have
  /// reserved, ask the driver for nothing, which may wait for every kernel on the device.
  /// @return What stands for it, as long as it lives.
  virtual std::shared_ptr<const void> reserve(int64_t bytes, int64_t host_bytes) = 0;
  /// The address under which kernels reach shared memory of the host that exists already; valid as
  /// long as @p owner lives, at least.
  virtual const std::byte* map_host(const void* memory,
                                    int64_t bytes,
                                    const std::shared_ptr<const void>& owner) = 0;

  /// Keeper of @p inputs, tensors of a caller that is a stream: they go when no stream
  /// reads them any more. Where their allocator knows of streams that is as soon as nobody has
  /// them.
  virtual std::shared_ptr<void> keep(std::shared_ptr<void> inputs) = 0;

  virtual std::shared_ptr<Stream> create_stream() = 0;
  virtual std::shared_ptr<Baton> create_baton() = 0;
  /// For copies of a few bytes that wait for nothing. One for all ranks of a process, where streams
  /// are few; in the emulator the host's.
  virtual std::shared_ptr<Stream> side_stream() = 0;
  /// The caller's stream, by the number that Python knows it by. Where the caller is the host there
  /// is only 0, which stands for it: what waits there blocks, what was recorded there is complete.
  virtual std::shared_ptr<Stream> caller_stream(uintptr_t handle) = 0;

  /// Streams of this rank that were asked for by their numbers.
  virtual std::vector<std::shared_ptr<Stream>> caller_streams() = 0;

  /// Makes the device current on the calling thread.
  virtual void activate() = 0;
  /// The same while the result lives, for a thread of the caller's.
  virtual std::shared_ptr<void> activate_for_now() = 0;
};

/// Gives blocks the shared memory that they need, and half as many threads, and half again, until
/// it is there or a warp is left.
/// @param bytes_of  (int num_threads) -> what a block of so many needs
template <typename BytesOf>
void fit_shared_memory(const Device& device, device::Launch& launch, const BytesOf& bytes_of) {
  launch.shared_bytes = bytes_of(launch.num_threads);
  while (launch.shared_bytes > device.max_shared_bytes() && launch.num_threads > 32) {
    launch.num_threads = launch.num_threads / 64 * 32;
    launch.shared_bytes = bytes_of(launch.num_threads);
  }
}

}  // namespace moe::runtime
