// Streams, events, memory and captured graphs of the emulated device.

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <thread>

#include "emulated.h"
#include "runtime/polling.h"
#include "runtime/stream_marks.h"
#include "simt/simt_device.h"

namespace {

using namespace moe;
using namespace moe::device;
using namespace moe::cases;

// --- Streams ------------------------------------------------------------------------------------

/// Pointers that aligned operator delete was given.
std::mutex g_freed_mutex;
std::vector<void*> g_freed;

bool was_freed(void* memory) {
  const std::lock_guard<std::mutex> lock(g_freed_mutex);
  return std::find(g_freed.begin(), g_freed.end(), memory) != g_freed.end();
}

struct AddParams {
  int* value;
  int factor;
  int summand;
  const uint32_t* gate = nullptr;  ///< waits until it is set
};

void add_kernel(AddParams params) {
  if (params.gate != nullptr)
    while (load_acquire<Scope::kSystem>(params.gate) == 0)
      pause(100);
  if (block_idx() == 0 && thread_idx() == 0)
    store(params.value, load(params.value) * params.factor + params.summand);
}

void launch_add(runtime::Stream& stream, const AddParams& params) {
  launch(add_kernel, {2, 32, 0, stream.handle()}, params);
}

void open_gate(uint32_t* gate) {
  std::atomic_ref(*gate).store(1);
}

MOE_CASE(stream_order) {
  simt::SimtDevice device;
  const auto first = device.create_stream();
  const auto second = device.create_stream();
  const auto host = device.caller_stream(0);
  uint32_t gate = 0;
  const auto value = device.allocate(64);
  auto* const number = reinterpret_cast<int*>(value.get());
  expect_equal(*number, 0, "fresh memory");
  int copied = 0;
  launch_add(*first, {number, 1, 3, &gate});
  launch_add(*first, {number, 10, 4});
  const auto event = first->record();
  second->wait(*event);
  second->copy(&copied, number, sizeof copied);
  second->fill(number, 0, sizeof copied);
  const auto end = second->record();
  expect(!event->is_complete() && !end->is_complete(), "nothing can have ended");
  expect(host->record()->is_complete(), "what the host did is done");
  open_gate(&gate);
  host->wait(*end);
  expect(event->is_complete() && end->is_complete(), "both streams have ended");
  expect_equal(copied, 34, "the value copied");
  expect_equal(*number, 0, "the value filled");
  launch_add(*host, {number, 1, 7});
  expect_equal(*number, 7, "a launch on the host's stream is synchronous");
  expect_error(message_of<InvalidArgument>([&] { device.caller_stream(5); }), {"got 5"});
  expect_error(message_of<InvalidArgument>([&] { first->copy(number, &copied, -1); }), {"-1"});
  const std::byte* const mapped = device.map_host(&copied, sizeof copied, nullptr);
  expect(mapped == reinterpret_cast<const std::byte*>(&copied), "host memory has moved");
}

MOE_CASE(kernel_error) {
  simt::SimtDevice device(/*rank_idx=*/3);
  const auto stream = device.create_stream();
  const auto other = device.create_stream();
  const auto host = device.caller_stream(0);
  int value = 0;
  launch_add(*stream, {&value, 1, 1});
  const auto before = stream->record();
  const std::function<void()> bad = [] {
    if (thread_idx() != 0)
      sync_block();
  };
  uint32_t gate = 0;
  launch_add(*stream, {&value, 1, 1, &gate});
  launch(run_body, {1, 32, 0, stream->handle()}, Body{&bad});
  launch_add(*stream, {&value, 1, 1});
  const auto after = stream->record();
  other->wait(*after);
  const auto behind = other->record();
  open_gate(&gate);
  const std::vector<std::string> parts = {"rank 3 Body block 0 thread 1"};
  expect_error(message_of<simt::EmulationError>([&] { host->wait(*after); }), parts);
  expect_error(message_of<simt::EmulationError>([&] { after->is_complete(); }), parts);
  expect_error(message_of<simt::EmulationError>([&] { host->wait(*behind); }), parts);
  expect_error(message_of<simt::EmulationError>([&] { launch_add(*stream, {&value, 1, 1}); }),
               parts);
  expect_error(message_of<simt::EmulationError>([&] { other->fill(&value, 0, 4); }), parts);
  expect(before->is_complete(), "what was before the error is complete");
  expect_equal(value, 2, "launches that ran");
  expect_error(message_of<InvalidArgument>(
                   [&] { launch_add(*host, {&value, 1, 1}), throw InvalidArgument("host"); }),
               {"host"});
  expect_equal(value, 3, "the host's stream is not concerned");
}

MOE_CASE(memory_lifetime) {
  simt::SimtDevice device;
  const auto stream = device.create_stream();
  uint32_t gate = 0;
  auto used = device.allocate(64);
  auto unused = device.allocate_host(64);
  void* const used_address = used.get();
  void* const unused_address = unused.get();
  expect_equal(reinterpret_cast<uintptr_t>(used_address) % 256, 0u, "alignment");
  unused.reset();
  expect(was_freed(unused_address), "memory of an idle device is freed at once");
  launch_add(*stream, {reinterpret_cast<int*>(used_address), 1, 1, &gate});
  const auto event = stream->record();
  used.reset();
  expect(!was_freed(used_address), "memory was freed under a kernel");
  open_gate(&gate);
  device.caller_stream(0)->wait(*event);
  // The stream sweeps after it has told of the end.
  while (!was_freed(used_address))
    std::this_thread::yield();
}

MOE_CASE(two_streams) {
  Handshake pair;
  simt::SimtDevice devices[2];
  const std::function<void()> bodies[2] = {[&] { pair.run(0); }, [&] { pair.run(1); }};
  std::vector<std::shared_ptr<runtime::Stream>> streams;
  for (int rank_idx = 0; rank_idx < 2; ++rank_idx) {
    streams.push_back(devices[rank_idx].create_stream());
    launch(run_body, {2, 64, 0, streams.back()->handle()}, Body{&bodies[rank_idx]});
  }
  for (const auto& stream : streams)
    devices[0].caller_stream(0)->wait(*stream->record());
  expect_equal(pair.flags[0] + pair.flags[1], 10u, "flags");
}

// --- Capture ------------------------------------------------------------------------------------

simt::DeviceStream& device_stream(const std::shared_ptr<runtime::Stream>& stream) {
  return dynamic_cast<simt::DeviceStream&>(*stream);
}

MOE_CASE(capture) {
  simt::SimtDevice device;
  const auto stream = device.create_stream();
  const auto host = device.caller_stream(0);
  int value = 1;
  int copied = 0;
  device_stream(stream).begin_capture();
  expect(stream->is_capturing() && !host->is_capturing(), "one stream is capturing");
  launch_add(*stream, {&value, 2, 1});
  stream->copy(&copied, &value, sizeof value);
  const auto inside = stream->record();
  expect_error(message_of<InvalidArgument>([&] { inside->is_complete(); }), {"graph"});
  expect_error(message_of<InvalidArgument>([&] { device_stream(stream).begin_capture(); }),
               {"capturing already"});
  const auto graph = device_stream(stream).end_capture();
  expect(!stream->is_capturing(), "capture is over");
  expect_equal(graph->num_nodes(), 2u, "nodes");
  host->wait(*stream->record());
  expect_equal(value, 1, "nothing runs while capturing");
  for (int round = 0; round < 4; ++round)
    graph->replay(device_stream(stream));
  host->wait(*stream->record());
  expect_equal(value, 31, "the value after four replays");
  expect_equal(copied, 31, "the copy");
  graph->replay(device_stream(host));
  expect_equal(value, 63, "replayed on the host's stream");
  expect_error(message_of<InvalidArgument>([&] { host->wait(*inside); }), {"complete"});
  expect_error(message_of<InvalidArgument>([&] { device_stream(stream).end_capture(); }),
               {"not capturing"});
}

MOE_CASE(capture_of_two_streams) {
  simt::SimtDevice device;
  const auto host = device.caller_stream(0);
  const auto side = device.create_stream();
  int value = 1;
  const auto outside = side->record();
  // The caller's stream captures; a stream that waits for it joins, and is waited for.
  device_stream(host).begin_capture();
  launch_add(*host, {&value, 2, 0});
  side->wait(*host->record());
  expect(side->is_capturing(), "the side stream takes part");
  launch_add(*side, {&value, 1, 5});
  expect_error(message_of<InvalidArgument>([&] { side->wait(*outside); }), {"outside"});
  host->wait(*side->record());
  launch_add(*host, {&value, 3, 0});
  const auto graph = device_stream(host).end_capture();
  expect(!side->is_capturing(), "capture is over for the side stream too");
  expect_equal(value, 1, "nothing runs while capturing");
  graph->replay(device_stream(side));
  host->wait(*side->record());
  expect_equal(value, 21, "replayed");

  // Work that the first stream does not wait for is a mistake.
  device_stream(host).begin_capture();
  side->wait(*host->record());
  launch_add(*side, {&value, 1, 5});
  expect_error(message_of<InvalidArgument>([&] { device_stream(side).end_capture(); }), {"begin"});
  expect_error(message_of<InvalidArgument>([&] { device_stream(host).end_capture(); }),
               {"1 operations", "waits for 0"});
  expect(!host->is_capturing() && !side->is_capturing(), "capture is over");
}

// --- Waiting ------------------------------------------------------------------------------------

/// The host stays awake as long as an operation takes, however often it looks, and sleeps only
/// then.
MOE_CASE(polling) {
  using runtime::Polling;
  Polling polling;
  for (int i = 0; i < Polling::kNumPauses; ++i)
    expect(polling.next(i) == Polling::Step::kPause, "it pauses first");
  for (int i = 0; i < 1'000'000; ++i)
    expect(polling.next(i) == Polling::Step::kYield, "then it gives its core away");
  expect(polling.next(Polling::kAwakeNs - 1) == Polling::Step::kYield, "for some milliseconds");
  expect(polling.next(Polling::kAwakeNs) == Polling::Step::kSleep, "then it sleeps");
  expect(Polling::kAwakeNs >= 5'000'000, "no operation among peers that have come takes longer");
  // Who looked rarely, because others had its core, has waited no shorter.
  Polling rare;
  expect(rare.next(Polling::kAwakeNs) == Polling::Step::kPause, "pauses are counted, not timed");
}

// --- Marks --------------------------------------------------------------------------------------

simt::DeviceStream& emulated(runtime::Stream& stream) {
  return dynamic_cast<simt::DeviceStream&>(stream);
}

/// Memory that was given back is free once streams have ended what they held, and not before;
/// events are recorded once for all of it, and none where streams are idle.
MOE_CASE(stream_marks) {
  simt::SimtDevice device;
  runtime::StreamMarks marks;
  const auto busy = device.create_stream();
  const auto idle = device.create_stream();
  const auto host = device.caller_stream(0);
  marks.watch(busy);
  marks.watch(idle);
  expect(marks.has_passed(*marks.mark()), "streams that hold nothing are passed at once");
  expect_equal(emulated(*busy).num_events(), 0, "events of a stream that holds nothing");

  uint32_t gate = 0;
  int value = 0;
  launch_add(*busy, {&value, 1, 1, &gate});
  const auto first = marks.mark();
  const auto second = marks.mark();
  expect_equal(emulated(*busy).num_events(), 0, "events that giving back records");
  for (int i = 0; i < 3; ++i)
    expect(!marks.has_passed(*first) && !marks.has_passed(*second), "the kernel waits");
  expect_equal(emulated(*busy).num_events(), 1, "events of two marks");
  expect_equal(emulated(*idle).num_events(), 0, "events of an idle stream");

  uint32_t later_gate = 0;
  launch_add(*busy, {&value, 1, 1, &later_gate});
  const auto later = marks.mark();
  open_gate(&gate);
  while (!marks.has_passed(*second))
    std::this_thread::yield();
  expect(marks.has_passed(*first), "both stand for the same");
  expect(!marks.has_passed(*later), "a kernel behind them waits");
  open_gate(&later_gate);
  host->wait(*busy->record());
  expect(marks.has_passed(*later), "all kernels have ended");
}

/// Work that a stream held before it was captured counts, though nothing can be recorded in it.
MOE_CASE(marks_of_captured_streams) {
  simt::SimtDevice device;
  runtime::StreamMarks marks;
  const auto stream = device.create_stream();
  const auto other = device.create_stream();
  marks.watch(stream);
  marks.watch(other);
  uint32_t gate = 0;
  int value = 0;
  launch_add(*stream, {&value, 1, 1, &gate});
  const auto recorded = marks.mark();
  expect(!marks.has_passed(*recorded), "the kernel waits");
  const auto mark = marks.mark();
  emulated(*stream).begin_capture();
  expect(!marks.has_passed(*mark), "what it held before waits");
  open_gate(&gate);
  while (!marks.has_passed(*recorded))
    std::this_thread::yield();
  expect(!marks.has_passed(*mark), "nobody can tell while it is captured");
  expect_equal(emulated(*stream).end_capture()->num_nodes(), size_t{0}, "nodes that marks added");
  expect(marks.has_passed(*mark), "it is idle");
}

/// A stream that ends takes nothing with it: what it still does counts.
MOE_CASE(marks_of_ended_streams) {
  simt::SimtDevice device;
  runtime::StreamMarks marks;
  auto stream = device.create_stream();
  const auto other = device.create_stream();
  marks.watch(stream);
  uint32_t gate = 0;
  int value = 0;
  launch_add(*other, {&value, 1, 1, &gate});
  stream->wait(*other->record());
  const auto mark = marks.mark();
  marks.unwatch(*stream);
  const std::weak_ptr<runtime::Stream> watched = stream;
  std::thread ending([&] { stream.reset(); });
  while (!watched.expired())
    std::this_thread::yield();
  expect(!marks.has_passed(*mark), "it has yet to end");
  open_gate(&gate);
  ending.join();
  expect(marks.has_passed(*mark), "it has ended");
}

// --- Processes ----------------------------------------------------------------------------------

MOE_CASE(fork) {
  auto device = std::make_unique<simt::SimtDevice>();
  auto stream = device->create_stream();
  int value = 0;
  launch_add(*stream, {&value, 1, 1});
  device->caller_stream(0)->wait(*stream->record());
  const pid_t child = fork();
  if (child == 0) {
    int status = 1;
    try {
      expect_error(message_of<InvalidArgument>([&] { launch_add(*stream, {&value, 1, 1}); }),
                   {concat(getppid()), concat(getpid())});
      stream.reset();
      device.reset();
      status = 0;
    } catch (const std::exception& error) {
      std::puts(error.what());
    }
    std::fflush(stdout);
    _exit(status);
  }
  int status = 0;
  waitpid(child, &status, 0);
  expect_equal(status, 0, "status of the child");
  launch_add(*stream, {&value, 1, 1});
  device->caller_stream(0)->wait(*stream->record());
  expect_equal(value, 2, "the parent's stream goes on");
}

/// A stream with work that never ends does not keep its process.
MOE_CASE(exit) {
  auto* const device = new simt::SimtDevice();
  auto* const stream = new std::shared_ptr<runtime::Stream>(device->create_stream());
  static uint32_t gate = 0;
  static int value = 0;
  launch_add(**stream, {&value, 1, 1, &gate});
}

}  // namespace

void operator delete(void* memory, std::align_val_t) noexcept {
  {
    const std::lock_guard<std::mutex> lock(g_freed_mutex);
    g_freed.push_back(memory);
  }
  std::free(memory);
}

int main(int argc, char** argv) {
  return cases::run_case(argc, argv);
}
