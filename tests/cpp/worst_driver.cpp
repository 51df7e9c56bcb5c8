// csrc/cuda over the worst CUDA that NVIDIA's documents allow (cuda_stand_in.h): ranks that are
// threads, and ranks that are processes.

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <latch>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/device_segment.h"
#include "gpu_ranks.h"
#include "ops/operations_in_flight.h"
#include "runtime/device_plan.h"
#include "runtime/dispatch_launches.h"

namespace {

using namespace moe;
using namespace moe::cases;

void expect_no_waits(const std::map<std::string, int>& waits) {
  for (const auto& [call, count] : waits)
    throw std::runtime_error(concat(count, " calls of ", call, " in operations"));
}

void operations_of_threads(int num_devices) {
  run_ranks(2, num_devices, [](int rank_idx, group::ThreadRank& rank, RankGpu& gpu) {
    Caller caller(rank_idx, borrow(*rank.group), gpu);
    caller.run_all(RowLayout::kExpertMajor);
    caller.run_all(RowLayout::kLowLatency);
    expect_access(gpu, *rank.group);
    caller.endpoint->destroy({});
  });
}

MOE_CASE(threads_on_one_device) {
  operations_of_threads(1);
}

MOE_CASE(threads_on_two_devices) {
  operations_of_threads(2);
}

/// Devices as every rank finds them: the first of those it sees is another one on each.
void operations_of_processes(const std::string& sharing) {
  run_processes({{"0"}, {"1"}}, [&](int rank_idx, group::ThreadRank& rank, RankGpu& gpu) {
    const std::string& uuid = gpu.device->info().uuid;
    const auto uuids = rank.group->all_gather(uuid, {});
    expect(uuids[0] != uuids[1], "both processes use one device");
    Caller caller(rank_idx, borrow(*rank.group), gpu);
    expect(caller.endpoint->spans_devices(), "ranks do not see that they lie on two devices");
    expect_equal(gpu.heap->sharing(), sharing, "the way to share memory");
    expect_access(gpu, *rank.group);
    caller.run_all(RowLayout::kExpertMajor);
    caller.run_all(RowLayout::kLowLatency);
    // Windows that begin in one segment and end in another.
    Caller large(rank_idx, borrow(*rank.group), gpu, 1 << 16);
    large.run_all(RowLayout::kLowLatency);
    large.endpoint->destroy({});
    caller.endpoint->destroy({});
  });
}

MOE_CASE(processes) {
  operations_of_processes("descriptor");
}

MOE_CASE(processes_without_virtual_memory) {
  stand_in::machine().has_virtual_memory = false;
  operations_of_processes("ipc");
}

/// Memory of a process is opened for each device of another that sees two.
MOE_CASE(threads_and_a_process_on_three_devices) {
  stand_in::machine().num_devices = 3;
  stand_in::machine().has_virtual_memory = false;
  run_processes({{"0"}, {"1,2", 2}}, [](int rank_idx, group::ThreadRank& rank, RankGpu& gpu) {
    Caller caller(rank_idx, borrow(*rank.group), gpu);
    expect_equal(gpu.heap->sharing(), std::string("ipc"), "the way to share memory");
    expect_access(gpu, *rank.group);
    caller.run_all(RowLayout::kExpertMajor);
    caller.run_all(RowLayout::kLowLatency);
    caller.endpoint->destroy({});
  });
}

/// A process may be allowed few addresses: what was to lie there is not kept beside what is shared
/// otherwise.
MOE_CASE(addresses_that_are_refused) {
  stand_in::machine().refused = "cuMemAddressReserve";
  stand_in::take_calls();
  const auto made = cuda::create_device_segment(0, cuda::segment_granularity(0), nullptr, 0);
  expect_equal(
      std::string(cuda::sharing_name(made.description.sharing)), "ipc", "the way to share memory");
  std::map<std::string, int> calls = stand_in::take_calls();
  expect_equal(calls["cuMemCreate"], calls["cuMemRelease"], "memory that was given back");
}

/// GPUs that do not reach each other, of processes that see one each.
MOE_CASE(processes_without_p2p) {
  stand_in::machine().has_p2p = false;
  run_processes({{"0"}, {"1"}}, [](int rank_idx, group::ThreadRank& rank, RankGpu& gpu) {
    const auto call = [&] {
      Caller(rank_idx, borrow(*rank.group), gpu).run_all(RowLayout::kExpertMajor);
    };
    expect_error(message_of<std::exception>(call), {"peer-to-peer access, P2P"});
  });
}

/// A sandbox in which one process may open no memory of another's: all ranks hear which way failed.
MOE_CASE(process_that_may_not_import) {
  run_processes({{"0"}, {"1"}, {"0"}}, [](int rank_idx, group::ThreadRank& rank, RankGpu& gpu) {
    if (rank_idx == 1)
      stand_in::machine().refused = "cuMemImportFromShareableHandle";
    rank.group->all_gather("", {});  // nobody shares memory before
    expect_error(message_of<std::exception>([&] { Caller(rank_idx, borrow(*rank.group), gpu); }),
                 {" cannot be opened on rank 1: ",
                  "opening a peer's memory by its descriptor",
                  "needs none"});
  });
}

/// Both ranks hear what the first finds.
void expect_wrong_p2p(const std::string& finding) {
  run_processes({{"0"}, {"1"}}, [&](int rank_idx, group::ThreadRank& rank, RankGpu& gpu) {
    expect_error(message_of<std::exception>([&] { Caller(rank_idx, borrow(*rank.group), gpu); }),
                 {finding, "peer-to-peer access (P2P)"});
  });
}

MOE_CASE(processes_with_wrong_p2p) {
  stand_in::machine().loses_p2p_writes = true;
  expect_wrong_p2p("rank 0 finds 0 in its memory where rank 1 wrote 11");
  stand_in::machine().loses_p2p_writes = false;
  stand_in::machine().loses_p2p_reads = true;
  expect_wrong_p2p("rank 0 reads 0 from memory where rank 1 wrote 11");
}

/// Each rank that calls has a stream, as each buffer has.
MOE_CASE(more_streams_than_connections) {
  constexpr int kMost = 8;
  const auto expect_refused = [](const std::function<void()>& call) {
    expect_error(message_of<InvalidArgument>(call), {"this process uses 9 streams of device 0"});
  };
  std::vector<std::shared_ptr<cuda::CudaDevice>> devices;
  std::vector<std::shared_ptr<runtime::Stream>> streams;
  for (int rank_idx = 0; rank_idx < 3; ++rank_idx) {
    devices.push_back(cuda::CudaDevice::create(0, kMost));
    streams.push_back(devices.back()->create_stream());
  }
  devices.push_back(cuda::CudaDevice::create(0, kMost));
  expect_refused([&] { devices.back()->create_stream(); });
  expect_refused([&] { cuda::CudaDevice::create(0, kMost); });
  // Each device has its own, and a rank alone on it may use any number.
  cuda::CudaDevice::create(1, kMost)->create_stream();
  cuda::CudaDevice::create(0, 0)->create_stream();
  streams.pop_back();
  streams.push_back(devices.back()->create_stream());
  expect_refused([&] { cuda::CudaDevice::create(0, kMost); });
  devices.erase(devices.begin());
  cuda::CudaDevice::create(0, kMost);
  expect_no_violations();
}

/// A driver that has every function, of an earlier version than this module was compiled with.
MOE_CASE(driver_of_an_earlier_version) {
  stand_in::machine().driver_version = CUDART_VERSION - 10;
  if (CUDART_VERSION % 1000 == 0)
    stand_in::machine().driver_version = CUDART_VERSION - 910;  // 12.9 before 13.0
  operations_of_threads(1);
}

/// In a process of its own: what is known of a machine stays known.
void run_alone(const std::function<void()>& body) {
  const pid_t process = ::fork();
  if (process == 0) {
    try {
      body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      std::_Exit(1);
    }
    std::_Exit(0);
  }
  int status = 0;
  ::waitpid(process, &status, 0);
  expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a process failed");
}

/// A driver that does not load kernels in advance is right where it has loaded them all, else
/// refused before anything can wait.
MOE_CASE(refused_ways_of_loading) {
  const auto run = [&](const char* call, bool is_eager, const char* expected) {
    stand_in::machine().refused = call;
    stand_in::machine().is_eager = is_eager;
    const auto told = message_of<CudaError>([] { cuda::CudaDevice::create(0, 0); });
    expect(told.find(expected) != std::string::npos, concat("without ", call, ": ", told));
    expect_no_violations();
  };
  // Kernels that nobody can list cannot be given their shared memory either.
  for (const char* call : {"cudaGetFuncBySymbol",
                           "cuFuncGetModule",
                           "cuModuleGetFunctionCount",
                           "cuModuleEnumerateFunctions"})
    for (const bool is_eager : {false, true})
      run_alone([&] { run(call, is_eager, "kernel"); });
  for (const char* call : {"cuFuncLoad", "finding cuFuncLoad"}) {
    run_alone([&] { run(call, false, "CUDA_MODULE_LOADING=EAGER"); });
    run_alone([&] {
      stand_in::machine().refused = call;
      stand_in::machine().is_eager = true;
      operations_of_threads(1);
    });
  }
}

/// Events of outside, or of the default stream, which would order all blocking streams.
MOE_CASE(streams_of_callers_alone) {
  operations_of_threads(1);
  expect(!stand_in::has_default_stream(0), "the default stream was used");
}

/// Callers who use the default streams of their devices, whichever device is current meanwhile.
MOE_CASE(default_streams) {
  run_ranks(2, 2, [](int rank_idx, group::ThreadRank& rank, RankGpu& gpu) {
    Caller caller(rank_idx, borrow(*rank.group), gpu, kNumTokens, CallerStream(rank_idx));
    const auto use_other = [&] { cudaSetDevice(1 - rank_idx); };
    for (const RowLayout layout : {RowLayout::kExpertMajor, RowLayout::kLowLatency}) {
      use_other();
      caller.run_all(layout);
      ops::DispatchParams params = caller.dispatch_params(layout);
      params.is_async = true;
      const ops::DispatchOutcome outcome = runtime::dispatch(*caller.endpoint, params, {});
      use_other();
      outcome.end->join({});
      caller.check_rows(outcome);
      caller.check_sums(caller.combine(outcome));
      int device_idx = -1;
      cudaGetDevice(&device_idx);
      expect_equal(device_idx, 1 - rank_idx, "the device that was current");
    }
    gpu.device->activate();
    caller.endpoint->destroy({});
  });
}

/// Work put into the default stream of a device goes there where another one is current.
MOE_CASE(default_stream_of_another_device) {
  const auto device = cuda::CudaDevice::create(1, 0);
  device->activate();
  const auto caller = device->caller_stream(0);
  const auto from = device->allocate_unset(8);
  const auto to = device->allocate_unset(8);
  const auto event = device->create_stream()->record();
  cudaSetDevice(0);
  const std::map<std::string, std::function<void()>> uses = {
      {"wait", [&] { caller->wait(*event); }},
      {"copy", [&] { caller->copy(to.get(), from.get(), 8); }},
      {"fill", [&] { caller->fill(to.get(), 0, 8); }},
      {"record", [&] { caller->record(); }},
      {"is_idle", [&] { caller->is_idle(); }},
      {"is_capturing", [&] { caller->is_capturing(); }},
      {"join", [&] { runtime::CallOrder::join(caller, event)->join({}); }},
  };
  for (const auto& [name, use] : uses) {
    use();
    expect(!stand_in::has_default_stream(0),
           concat(name, " uses the default stream of the current device"));
  }
  CallerStream(1).synchronize();
  expect_no_violations();
}

MOE_CASE(event_of_outside_a_capture) {
  run_ranks(1, 1, [](int, group::ThreadRank&, RankGpu& gpu) {
    const CallerStream stream;
    const auto caller = gpu.device->caller_stream(reinterpret_cast<uintptr_t>(stream.get()));
    const auto event = gpu.device->create_stream()->record();
    cudaGraph_t graph = nullptr;
    cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal);
    expect_error(message_of<InvalidArgument>([&] { caller->wait(*event); }), {"outside a graph"});
    expect_error(stand_in::take_violations().at(0), {"cudaStreamWaitEvent"});
    cudaStreamEndCapture(stream.get(), &graph);
  });
}

/// A buffer that takes part in a capture is called from another stream meanwhile.
MOE_CASE(other_stream_beside_a_capture) {
  run_ranks(2, 2, [](int rank_idx, group::ThreadRank& rank, RankGpu& gpu) {
    Caller caller(rank_idx, borrow(*rank.group), gpu);
    const CallerStream other;
    const auto call_from = [&](const CallerStream& stream) {
      caller.endpoint->order().set_caller(reinterpret_cast<uintptr_t>(stream.get()), {});
    };
    cudaGraph_t graph = nullptr;
    cudaStreamBeginCapture(caller.stream.get(), cudaStreamCaptureModeThreadLocal);
    const ops::DispatchOutcome outcome = caller.dispatch(RowLayout::kLowLatency);
    call_from(other);
    expect_error(message_of<InvalidArgument>([&] { caller.dispatch(RowLayout::kLowLatency); }),
                 {"outside a graph"});
    call_from(caller.stream);
    cudaStreamEndCapture(caller.stream.get(), &graph);
    rank.group->all_gather("", {});
    if (rank_idx == 0)
      for (const std::string& violation : stand_in::take_violations())
        expect_error(violation, {"cudaStreamWaitEvent"});
    caller.run_all(RowLayout::kLowLatency);
    caller.endpoint->destroy({});
  });
}

/// A rank is back from create() and waits for a row, while another is still in there.
MOE_CASE(first_operation_beside_create) {
  stand_in::dawdle(std::chrono::milliseconds(20), 0);
  operations_of_threads(1);
}

/// The same, where the other is about to open memory that the first was late to announce.
MOE_CASE(first_operation_beside_create_on_two_devices) {
  constexpr int64_t kManyTokens = 1 << 15;
  stand_in::dawdle(std::chrono::milliseconds(20), 1);
  run_ranks(2, 2, [](int rank_idx, group::ThreadRank& rank, RankGpu& gpu) {
    if (rank_idx == 0)
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
    Caller caller(rank_idx, borrow(*rank.group), gpu, kManyTokens);
    caller.run_all(RowLayout::kExpertMajor);
    caller.endpoint->destroy({});
  });
}

/// Operations whose sizes a buffer is configured for ask for nothing that may wait.
MOE_CASE(nothing_waits_in_operations) {
  std::latch all_ready(2);
  std::latch all_done(2);
  run_ranks(2, 1, [&](int rank_idx, group::ThreadRank& rank, RankGpu& gpu) {
    Caller caller(rank_idx, borrow(*rank.group), gpu);
    all_ready.arrive_and_wait();
    if (rank_idx == 0)
      stand_in::take_waits();
    rank.group->all_gather("", {});
    caller.run_all(RowLayout::kExpertMajor);
    caller.run_all(RowLayout::kLowLatency);
    all_done.arrive_and_wait();
    expect_no_waits(stand_in::take_waits());
    caller.endpoint->destroy({});
  });
}

/// The same of operations far larger than what the driver is asked for at least.
MOE_CASE(nothing_waits_for_large_operations) {
  constexpr int64_t kManyTokens = 1 << 17;
  constexpr int kNumOperations = 4;  // of a buffer whose depth is 2
  run_ranks(2, 1, [](int rank_idx, group::ThreadRank& rank, RankGpu& gpu) {
    Caller caller(rank_idx, borrow(*rank.group), gpu, kManyTokens);
    rank.group->all_gather("", {});
    stand_in::take_waits();
    rank.group->all_gather("", {});
    runtime::DeviceEndpoint& endpoint = *caller.endpoint;
    const kernels::Buffer buffer = endpoint.control().buffer();
    endpoint.buffer_memory().scratch(runtime::chunk_bytes(
        buffer, endpoint.launcher().tokens_per_chunk(), kManyTokens, kNumTopk, {}));
    std::vector<std::shared_ptr<void>> held;
    const auto take = [&gpu](int64_t bytes) { return gpu.device->allocate_unset(bytes); };
    for (int i = 0; i < kNumOperations; ++i) {
      held.push_back(runtime::DevicePlan::allocate(
          buffer, RowLayout::kExpertMajor, kManyTokens, kNumTopk, take));
      held.push_back(runtime::DispatchTables::allocate(buffer, {}, nullptr, take).memory);
    }
    const auto rows = gpu.heap->allocate(kManyTokens * kNumTopk * kHidden * 4);
    const auto sums = gpu.heap->allocate(kManyTokens * kHidden * 4);
    expect_no_waits(stand_in::take_waits());
    rank.group->all_gather("", {});
    caller.endpoint->destroy({});
  });
}

constexpr int kNumPairs = 10;

/// A rank that waits where it is not to leaves the other here.
void await_other(const std::latch& other) {
  for (int i = 0; !other.try_wait(); ++i) {
    expect(i < 2000, "the other rank does not come");
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

/// Low-latency pairs of a rank whose peer is yet to begin: the host waits for none of them, no call
/// waits for the device, and windows go to later ones while earlier ones are in flight.
MOE_CASE(host_runs_ahead) {
  std::latch has_run(1);
  run_ranks(2, 2, [&](int rank_idx, group::ThreadRank& rank, RankGpu& gpu) {
    Caller caller(rank_idx, borrow(*rank.group), gpu);
    caller.run_all(RowLayout::kLowLatency);
    std::vector<std::shared_ptr<std::byte>> inputs;
    for (int i = 0; i < kNumPairs; ++i) {
      inputs.push_back(gpu.device->allocate_unset(kNumTokens * kHidden * 4));
      caller.x = inputs.back();
      caller.fill(i);
    }
    rank.group->all_gather("", {});
    if (rank_idx == 0)
      stand_in::take_waits();
    const int64_t before = caller.endpoint->operations().num_host_waits();
    rank.group->all_gather("", {});
    if (rank_idx == 1)
      await_other(has_run);
    std::vector<ops::CombineOutcome> sums;
    std::set<const std::byte*> windows;
    for (const auto& input : inputs) {
      caller.x = input;
      const ops::DispatchOutcome dispatched = caller.dispatch(RowLayout::kLowLatency);
      windows.insert(dispatched.rows);
      sums.push_back(caller.combine(dispatched));
    }
    expect_equal(windows.size(), size_t{1}, "windows of results that are dropped");
    if (rank_idx == 0) {
      expect_equal(
          caller.endpoint->operations().num_host_waits() - before, int64_t{0}, "host waits");
      has_run.count_down();
    }
    for (int i = 0; i < kNumPairs; ++i) {
      caller.round = i;
      caller.check_sums(sums[static_cast<size_t>(i)]);
    }
    expect_no_waits(stand_in::take_waits());
    rank.group->all_gather("", {});
    caller.endpoint->destroy({});
  });
}

/// Memory of as many pairs as may be in flight at a time is there from the making on.
MOE_CASE(memory_of_operations_in_flight) {
  constexpr int64_t kManyTokens = 1 << 15;
  constexpr int kMostPairs = ops::kMostUnheard / 2;
  run_ranks(2, 2, [](int rank_idx, group::ThreadRank& rank, RankGpu& gpu) {
    Caller caller(rank_idx, borrow(*rank.group), gpu, kManyTokens);
    rank.group->all_gather("", {});
    stand_in::take_waits();
    rank.group->all_gather("", {});
    std::vector<std::shared_ptr<void>> held;
    for (int i = 0; i < kMostPairs; ++i) {
      held.push_back(runtime::DevicePlan::allocate(
          caller.endpoint->control().buffer(),
          RowLayout::kLowLatency,
          kManyTokens,
          kNumTopk,
          [&gpu](int64_t bytes) { return gpu.device->allocate_unset(bytes); }));
      held.push_back(gpu.heap->allocate(kManyTokens * kHidden * 4));
    }
    expect_no_waits(stand_in::take_waits());
    rank.group->all_gather("", {});
    caller.endpoint->destroy({});
  });
}

/// The device of one rank finds an id in the middle of what both hosts have called: what is behind
/// it is refused on both, and counts that the caller's kernels may look at are none.
MOE_CASE(refused_behind_a_bad_id) {
  constexpr int kNumCalls = 2 * kNumPairs;
  constexpr int kWrong = 4;
  std::latch has_run(1);
  run_ranks(2, 2, [&](int rank_idx, group::ThreadRank& rank, RankGpu& gpu) {
    Caller caller(rank_idx, borrow(*rank.group), gpu);
    const auto good_idx = caller.topk_idx;
    const auto bad_idx = gpu.device->allocate_unset(kNumTokens * kNumTopk * 8);
    std::memcpy(bad_idx.get(), good_idx.get(), kNumTokens * kNumTopk * 8);
    reinterpret_cast<int64_t*>(bad_idx.get())[kNumTopk] = kNumExperts + 3;
    const int64_t offsets_bytes = (kNumExperts / 2 + 1) * 4;
    int num_errors = 0;
    const auto call = [&](const auto& operation) {
      try {
        operation();
        return true;
      } catch (const InvalidArgument& error) {
        expect(std::string(error.what()).find("rank 1: ") != std::string::npos &&
                   std::string(error.what()).find("7") != std::string::npos,
               error.what());
        ++num_errors;
        return false;
      }
    };
    rank.group->all_gather("", {});
    if (rank_idx == 1)
      await_other(has_run);
    std::vector<ops::DispatchOutcome> dispatched;
    std::vector<ops::CombineOutcome> sums;
    std::optional<ops::DispatchOutcome> last;
    for (int i = 0; i < kNumCalls; i += 2) {
      caller.topk_idx = i == kWrong && rank_idx == 1 ? bad_idx : good_idx;
      call([&] { last = caller.dispatch(RowLayout::kLowLatency); });
      call([&] { sums.push_back(caller.combine(*last)); });
      if (i == kWrong)
        dispatched.push_back(*last);
    }
    if (rank_idx == 0) {
      expect_equal(num_errors, 0, "errors of calls ahead");
      has_run.count_down();
      caller.stream.synchronize();
      const std::vector<int32_t> zeros(kNumExperts / 2 + 1);
      expect(std::memcmp(dispatched.at(0).expert_offsets.get(),
                         zeros.data(),
                         static_cast<size_t>(offsets_bytes)) == 0,
             "counts of a dispatch that was refused");
    }
    for (int i = 0; i < kWrong / 2; ++i)
      caller.check_sums(sums[static_cast<size_t>(i)]);
    // Now both know, once all ranks are in one and the same call.
    caller.topk_idx = good_idx;
    caller.stream.synchronize();
    expect(!call([&] { caller.combine(*last); }), "nobody was told");
    expect(num_errors > 0, "nobody was told");
    caller.run_all(RowLayout::kLowLatency);
    caller.run_all(RowLayout::kExpertMajor);
    caller.endpoint->destroy({});
  });
}

/// Low-latency results of the configured size, as many at once as the buffer has windows, and rows
/// that a combine copies in, ask for nothing that may wait. A further result has memory of its own.
void low_latency_results(int64_t num_max_tokens, bool copies_in) {
  run_ranks(2, 1, [=](int rank_idx, group::ThreadRank& rank, RankGpu& gpu) {
    Caller caller(rank_idx, borrow(*rank.group), gpu, num_max_tokens);
    const int64_t num_rows = 2 * rank.group->num_ranks() * num_max_tokens;
    const auto outside =
        gpu.device->allocate_unset(copies_in ? num_rows * kHidden * int64_t{sizeof(float)} : 1);
    const auto take_waits = [&] {
      rank.group->all_gather("", {});
      const auto waits = rank_idx == 0 ? stand_in::take_waits() : std::map<std::string, int>();
      rank.group->all_gather("", {});
      return waits;
    };
    const auto dispatch = [&](int round) {
      caller.stream.synchronize();
      caller.fill(round);
      return caller.dispatch(RowLayout::kLowLatency);
    };
    std::vector<ops::CombineOutcome> sums;  // held
    const auto finish = [&](ops::DispatchOutcome outcome, int round) {
      caller.round = round;
      caller.check_rows(outcome);
      if (copies_in) {
        std::memcpy(outside.get(), outcome.rows, static_cast<size_t>(num_rows) * kHidden * 4);
        outcome.rows = outside.get();
      }
      sums.push_back(caller.combine(outcome));
      caller.check_sums(sums.back());
    };
    take_waits();
    ops::DispatchOutcome held = dispatch(0);
    for (int round = 1; round < 5; ++round) {
      // As a loop does that assigns to one variable, or as two microbatches do.
      ops::DispatchOutcome outcome = dispatch(round);
      if (!copies_in)
        finish(held, round - 1);
      held = std::move(outcome);
      finish(held, round);
    }
    expect_no_waits(take_waits());
    if (!copies_in) {
      const ops::DispatchOutcome second = dispatch(5);
      const ops::DispatchOutcome third = dispatch(6);
      finish(third, 6);
      finish(held, 4);
      finish(second, 5);
    }
    caller.stream.synchronize();
    caller.endpoint->destroy({});
  });
}

MOE_CASE(low_latency_results_of_a_quarter_gigabyte) {
  low_latency_results(1 << 19, false);
}

MOE_CASE(low_latency_results_and_rows_copied_in) {
  low_latency_results(1 << 16, true);
}

/// Every rank is told, where windows do not fit on one, how many bytes are needed and there.
MOE_CASE(low_latency_windows_that_do_not_fit) {
  constexpr int64_t kManyTokens = 1 << 16;
  constexpr uint64_t kLimitBytes = 48 << 20;
  heap::HeapOptions options;
  options.limit_bytes = kLimitBytes;
  std::vector<group::ThreadRank> others(2);
  const auto addresses = group::make_meshes(&others);
  run_ranks(2, 1, [&](int rank_idx, group::ThreadRank&, RankGpu& gpu) {
    group::ThreadRank& other = others[static_cast<size_t>(rank_idx)];
    other.connect(rank_idx, addresses);
    other.make_group();
    RankGpu limited = gpu;
    limited.heap = cuda::CudaHeap::create(
        other.mesh, gpu.device, rank_idx == 1 ? options : heap::HeapOptions{});
    const auto group = borrow(*other.group);
    const std::string text =
        message_of<CapacityError>([&] { Caller(rank_idx, group, limited, kManyTokens); });
    // 2 experts, 2 ranks, 128 bytes a row.
    const uint64_t least_bytes = 2 * 2 * 2 * kManyTokens * 128;
    expect_error(text, {"rank 1 needs ", "2 low-latency windows", " can be had"});
    const uint64_t needed = std::stoull(text.substr(text.find("needs ") + 6));
    expect(needed > least_bytes && needed < least_bytes + least_bytes / 4, text);
    Caller caller(rank_idx, group, limited);
    caller.run_all(RowLayout::kLowLatency);
    caller.endpoint->destroy({});
    caller.endpoint.reset();
    limited.heap.reset();
    other.leave();
  });
}

/// Windows whose sizes creep, two at a time, as those of batches that grow: the heap joins what is
/// given back, whichever segments it lies in.
MOE_CASE(creeping_sizes) {
  run_ranks(1, 1, [](int, group::ThreadRank&, RankGpu& gpu) {
    std::shared_ptr<Window> held[2];
    double bytes = 20 << 20;
    uint64_t most_live_bytes = 0;
    for (int i = 0; i < 120; ++i, bytes *= 1.02) {
      held[i % 2].reset();
      held[i % 2] = gpu.heap->allocate(static_cast<uint64_t>(bytes));
      const heap::HeapStats stats = gpu.heap->stats();
      most_live_bytes = std::max(most_live_bytes, stats.live_bytes);
      expect(i == 0 || 2 * stats.segment_bytes <= 3 * most_live_bytes,
             concat(stats.segment_bytes,
                    " bytes of segments where at most ",
                    most_live_bytes,
                    " were live, at window ",
                    i));
    }
  });
}

/// More windows than kernels address segments, each larger than what the driver gives at least.
MOE_CASE(many_windows) {
  constexpr int kNumWindows = 300;
  constexpr uint64_t kWindowBytes = 9 << 20;
  run_ranks(2, 2, [](int rank_idx, group::ThreadRank& rank, RankGpu& gpu) {
    Caller caller(rank_idx, borrow(*rank.group), gpu);
    std::vector<std::shared_ptr<Window>> held;
    for (int i = 0; i < kNumWindows; ++i)
      held.push_back(gpu.heap->allocate(kWindowBytes));
    const std::string offer(reinterpret_cast<const char*>(&held.back()->offer()), sizeof(Offer));
    held.front() = nullptr;  // what operations may use
    const auto offers = rank.group->all_gather(offer, {});
    for (int peer_rank = 0; peer_rank < 2; ++peer_rank) {
      Offer said;
      std::memcpy(&said, offers[static_cast<size_t>(peer_rank)].data(), sizeof(said));
      while (gpu.heap->try_resolve(peer_rank, said) == nullptr)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    rank.group->all_gather("", {});
    caller.run_all(RowLayout::kExpertMajor);
    caller.run_all(RowLayout::kLowLatency);
    held.clear();
    const uint64_t segment_bytes = gpu.heap->stats().segment_bytes;
    held.push_back(gpu.heap->allocate(kNumWindows * kWindowBytes));
    expect_equal(gpu.heap->stats().segment_bytes, segment_bytes, "bytes of segments");
    rank.group->all_gather("", {});
    caller.run_all(RowLayout::kExpertMajor);
    caller.endpoint->destroy({});
  });
}

/// A further buffer is made while a kernel of the first waits for a rank that makes it, too.
MOE_CASE(second_buffer_beside_a_kernel) {
  run_ranks(2, 1, [](int rank_idx, group::ThreadRank& rank, RankGpu& gpu) {
    const auto group = borrow(*rank.group);
    Caller first(rank_idx, group, gpu);
    std::thread operations;
    if (rank_idx == 0)
      operations = std::thread([&] { first.check_rows(first.dispatch()); });
    await_kernel();
    Caller second(rank_idx, group, gpu);
    if (rank_idx == 1)
      first.check_rows(first.dispatch());
    else
      operations.join();
    second.run_all(RowLayout::kExpertMajor);
    first.endpoint->destroy({});
    second.endpoint->destroy({});
  });
}

/// A window that was given back is not free while a kernel of any stream runs that was put there
/// before, and who asks for its memory is told so.
MOE_CASE(memory_that_a_kernel_holds) {
  constexpr uint64_t kWindowBytes = 6 << 20;
  heap::HeapOptions options;
  options.limit_bytes = 8 << 20;
  std::vector<group::ThreadRank> others(1);
  others[0].connect(0, group::make_meshes(&others));
  run_ranks(2, 1, [&](int rank_idx, group::ThreadRank& rank, RankGpu& gpu) {
    Caller caller(rank_idx, borrow(*rank.group), gpu);
    if (rank_idx == 1) {
      const auto heap = cuda::CudaHeap::create(others[0].mesh, gpu.device, options);
      auto window = heap->allocate(kWindowBytes);
      rank.group->all_gather("", {});
      await_kernel();
      window.reset();
      expect_error(message_of<CapacityError>([&] { heap->allocate(kWindowBytes); }),
                   {concat("a window of ", kWindowBytes),
                    concat(kWindowBytes, " were given back and are still held")});
      caller.check_rows(caller.dispatch());
      caller.stream.synchronize();
      expect(heap->allocate(kWindowBytes) != nullptr, "memory is held when kernels have ended");
    } else {
      rank.group->all_gather("", {});
      caller.check_rows(caller.dispatch());
    }
    caller.endpoint->destroy({});
  });
}

/// Ranks leave a communicator with its last buffer while a kernel of another waits for them.
MOE_CASE(last_buffer_ends_beside_a_kernel) {
  std::vector<group::ThreadRank> others(2);
  const auto addresses = group::make_meshes(&others);
  run_ranks(3, 1, [&](int rank_idx, group::ThreadRank& rank, RankGpu& gpu) {
    Caller stays(rank_idx, borrow(*rank.group), gpu);
    if (rank_idx == 0) {
      rank.group->all_gather("", {});
    } else {
      group::ThreadRank& other = others[static_cast<size_t>(rank_idx - 1)];
      other.connect(rank_idx - 1, addresses);
      other.make_group();
      auto other_gpu = std::make_optional<RankGpu>(other, 0, kConnections);
      auto leaves = std::make_optional<Caller>(rank_idx - 1, borrow(*other.group), *other_gpu);
      leaves->run_all(RowLayout::kExpertMajor);
      rank.group->all_gather("", {});  // no kernel runs
      await_kernel();
      leaves->endpoint->destroy({});
      leaves.reset();
      other_gpu.reset();
      other.leave();
    }
    stays.run_all(RowLayout::kExpertMajor);
    stays.endpoint->destroy({});
  });
}

/// A rank waits in an operation while another records, and eager operations come between replays.
void captured_of(RowLayout layout, cudaStreamCaptureMode mode) {
  std::latch all_recorded(2);
  std::latch all_made(2);
  run_ranks(2, 1, [&](int rank_idx, group::ThreadRank& rank, RankGpu& gpu) {
    Caller caller(rank_idx, borrow(*rank.group), gpu);
    // A capture for all threads is no time to look at another stream.
    const bool is_beside_a_kernel = mode != cudaStreamCaptureModeGlobal;
    if (rank_idx == 0 && is_beside_a_kernel)
      caller.run_all(layout);
    if (rank_idx == 1 && is_beside_a_kernel)
      await_kernel();
    Recorded recorded(caller, layout, mode);
    if (rank_idx == 1 && is_beside_a_kernel)
      caller.run_all(layout);
    all_recorded.arrive_and_wait();
    recorded.make(caller);
    all_made.arrive_and_wait();
    for (int i = 0; i < 3; ++i) {
      recorded.replay(caller);
      caller.fill(caller.round + 1);
      caller.run_all(layout);
      caller.fill(caller.round + 1);
      recorded.replay(caller);
      caller.fill(caller.round + 1);
    }
    caller.endpoint->destroy({});
  });
}

/// An operation behind a graph is put behind it, and waits for nobody.
MOE_CASE(operation_behind_a_graph) {
  std::latch all_recorded(2);
  run_ranks(2, 1, [&](int rank_idx, group::ThreadRank& rank, RankGpu& gpu) {
    Caller caller(rank_idx, borrow(*rank.group), gpu);
    Recorded recorded(caller, RowLayout::kLowLatency, cudaStreamCaptureModeThreadLocal);
    recorded.make(caller);
    const int num_launched = stand_in::num_launches();
    all_recorded.arrive_and_wait();
    if (rank_idx == 1)
      for (int i = 0; stand_in::num_launches() == num_launched; ++i) {
        expect(i < 10'000, "nothing is launched behind a graph that waits for a peer");
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    device::check_cuda(cudaGraphLaunch(recorded.executable, caller.stream.get()), "a graph");
    const ops::DispatchOutcome outcome = caller.dispatch();
    caller.check_rows(outcome);
    caller.check_rows(recorded.dispatched);
    caller.check_sums(recorded.combined);
    // The host has learned of the epochs that the graph took.
    expect_equal(caller.endpoint->next_epoch(), caller.endpoint->epochs().next, "the next epoch");
    caller.run_all(RowLayout::kExpertMajor);
    expect_equal(caller.endpoint->next_epoch(), caller.endpoint->epochs().next, "the next epoch");
    caller.endpoint->destroy({});
  });
}

const void* g_foreign = nullptr;

void launch_foreign(cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.stream = stream;
  device::check_cuda(cudaLaunchKernelExC(&config, g_foreign, nullptr), "launching");
}

/// Dispatch and combine of a buffer, or an asynchronous dispatch alone, issued in any stream.
class Issued {
 public:
  enum class Way { kEager, kAsynchronous, kCaptured };
  struct Kind {
    Way way;
    RowLayout layout;
    std::string name() const {
      return concat(way == Way::kEager          ? "eager"
                    : way == Way::kAsynchronous ? "asynchronous"
                                                : "captured",
                    layout == RowLayout::kLowLatency ? " low latency" : "");
    }
  };

  Issued(Caller& caller, const RankGpu& gpu, Kind kind) : caller_(caller), kind_(kind) {
    caller.x = x_ = gpu.device->allocate_unset(kNumTokens * kHidden * 4);
    caller.fill(0);
    if (kind.way != Way::kCaptured)
      return;
    recorded_.emplace(caller, kind.layout, cudaStreamCaptureModeThreadLocal);
    recorded_->make(caller);
  }

  void issue(const CallerStream& stream, int round) {
    caller_.x = x_;
    caller_.fill(round_ = round);
    if (recorded_) {
      device::check_cuda(cudaGraphLaunch(recorded_->executable, stream.get()), "launching a graph");
      return;
    }
    caller_.endpoint->order().set_caller(reinterpret_cast<uintptr_t>(stream.get()), {});
    ops::DispatchParams params = caller_.dispatch_params(kind_.layout);
    params.is_async = kind_.way == Way::kAsynchronous;
    dispatched_ = runtime::dispatch(*caller_.endpoint, params, {});
    if (!params.is_async)
      combined_ = caller_.combine(dispatched_);
  }
  void join() const {
    if (dispatched_.end)
      dispatched_.end->join({});
  }
  void check() const {
    caller_.round = round_;
    caller_.check_rows(recorded_ ? recorded_->dispatched : dispatched_);
    if (kind_.way != Way::kAsynchronous)
      caller_.check_sums(recorded_ ? recorded_->combined : combined_);
  }

 private:
  Caller& caller_;
  Kind kind_;
  std::shared_ptr<std::byte> x_;
  int round_ = 0;
  std::optional<Recorded> recorded_;
  ops::DispatchOutcome dispatched_;
  ops::CombineOutcome combined_;
};

/// One operation behind another, which is not waited for, in the order of the host's calls: in one
/// stream or two, from one thread or two. Now and then a stream of one rank is slow.
void pair_of(const Issued::Kind& former,
             const Issued::Kind& later,
             int rank_idx,
             const std::shared_ptr<group::Group>& group,
             const RankGpu& gpu) {
  Caller caller(rank_idx, group, gpu);
  Issued first(caller, gpu, former);
  Issued second(caller, gpu, later);
  const CallerStream other;
  const CallerStream* const streams[] = {&caller.stream, &other};
  int round = 0;
  group->all_gather("", {});  // graphs are made
  for (const CallerStream* const stream : streams)
    for (const bool has_thread : {false, true})
      for (int slow = 0; slow < 4; ++slow) {
        const std::string what = concat(later.name(),
                                        " behind ",
                                        former.name(),
                                        stream == &other ? ", other stream" : "",
                                        has_thread ? ", other thread" : "",
                                        ", slow: ",
                                        slow);
        try {
          if (slow % 2 == rank_idx % 2)
            launch_foreign((slow < 2 ? caller.stream : *stream).get());
          first.issue(caller.stream, ++round);
          const int second_round = ++round;
          if (has_thread)
            std::thread([&] { second.issue(*stream, second_round); }).join();
          else
            second.issue(*stream, second_round);
          first.join();
          second.join();
          other.synchronize();
          caller.stream.synchronize();
          first.check();
          second.check();
        } catch (const std::exception& error) {
          throw std::runtime_error(concat(what, ": ", error.what()));
        }
        // Inputs are written anew, and peers may still read what a combine pulls.
        group->all_gather("", {});
      }
  caller.endpoint->destroy({});
}

using Pairs = std::vector<std::pair<Issued::Kind, Issued::Kind>>;

void pairs_on(int num_devices, const Pairs& pairs) {
  g_foreign = stand_in::make_foreign_kernel(
      "slow", [] { std::this_thread::sleep_for(std::chrono::microseconds(50)); });  // of 32 threads
  run_ranks(2, num_devices, [&](int rank_idx, group::ThreadRank& rank, RankGpu& gpu) {
    const CallerStream stream;
    launch_foreign(stream.get());  // loads it
    stream.synchronize();
    const auto group = borrow(*rank.group);
    for (const auto& [former, later] : pairs)
      pair_of(former, later, rank_idx, group, gpu);
  });
}

Pairs all_pairs() {
  std::vector<Issued::Kind> kinds;
  for (const RowLayout layout : {RowLayout::kExpertMajor, RowLayout::kLowLatency})
    for (const auto way : {Issued::Way::kEager, Issued::Way::kAsynchronous, Issued::Way::kCaptured})
      kinds.push_back({way, layout});
  Pairs pairs;
  for (const Issued::Kind& former : kinds)
    for (const Issued::Kind& later : kinds)
      pairs.emplace_back(former, later);
  return pairs;
}

MOE_CASE(pairs_of_operations) {
  pairs_on(1, all_pairs());
}

MOE_CASE(pairs_of_operations_on_two_devices) {
  pairs_on(2, all_pairs());
}

MOE_CASE(replay_beside_async) {
  Pairs pairs;
  for (const RowLayout layout : {RowLayout::kExpertMajor, RowLayout::kLowLatency})
    pairs.push_back({{Issued::Way::kAsynchronous, layout}, {Issued::Way::kCaptured, layout}});
  pairs_on(2, pairs);
}

MOE_CASE(eager_of_another_stream_behind_a_graph) {
  constexpr auto kLayout = RowLayout::kExpertMajor;
  pairs_on(2, {{{Issued::Way::kCaptured, kLayout}, {Issued::Way::kEager, kLayout}}});
}

/// The first graph of a buffer runs behind what that has been given before, in whichever stream.
MOE_CASE(graph_behind_former_operations) {
  static std::atomic<int> num_ended;
  stand_in::machine().graphs_wait = false;  // or it would have ended
  g_foreign = stand_in::make_foreign_kernel("part of an operation", [] {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ++num_ended;
  });
  run_ranks(2, 2, [](int rank_idx, group::ThreadRank& rank, RankGpu& gpu) {
    Caller caller(rank_idx, borrow(*rank.group), gpu);
    launch_foreign(caller.stream.get());  // loads it
    caller.stream.synchronize();
    rank.group->all_gather("", {});
    num_ended = 0;
    rank.group->all_gather("", {});
    launch_foreign(static_cast<cudaStream_t>(caller.endpoint->order().stream()->handle()));
    Recorded recorded(caller, RowLayout::kExpertMajor, cudaStreamCaptureModeThreadLocal);
    recorded.make(caller);
    recorded.replay(caller);
    expect_equal(num_ended.load(), 2 * simt::kWarpSize, "threads of both ranks that have ended");
    caller.endpoint->destroy({});
  });
}

/// A rank that ends a buffer, or takes up its group again, waits for replays in other streams as
/// well.
MOE_CASE(end_behind_a_replay) {
  static std::atomic<bool> may_end;
  static std::atomic<int> num_ended;
  g_foreign = stand_in::make_foreign_kernel("the caller's", [] {
    while (!may_end)
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ++num_ended;
  });
  run_ranks(2, 2, [](int rank_idx, group::ThreadRank& rank, RankGpu& gpu) {
    Caller caller(rank_idx, borrow(*rank.group), gpu);
    Recorded recorded(caller, RowLayout::kLowLatency, cudaStreamCaptureModeThreadLocal);
    recorded.make(caller);
    may_end = true;
    launch_foreign(caller.stream.get());  // loads it
    recorded.replay(caller);
    expect(caller.endpoint->is_idle(), "a buffer is busy behind a replay that has ended");
    rank.group->all_gather("", {});
    may_end = false;
    num_ended = 0;
    rank.group->all_gather("", {});
    launch_foreign(caller.stream.get());
    device::check_cuda(cudaGraphLaunch(recorded.executable, caller.stream.get()), "a graph");
    const bool is_idle = caller.endpoint->is_idle();
    rank.group->all_gather("", {});
    may_end = true;
    caller.endpoint->destroy({});
    expect(!is_idle, "a buffer is idle beside a replay");
    expect_equal(num_ended.load(), 2 * simt::kWarpSize, "threads of both ranks that have ended");
    caller.stream.synchronize();
  });
}

MOE_CASE(captured) {
  captured_of(RowLayout::kExpertMajor, cudaStreamCaptureModeThreadLocal);
}

MOE_CASE(captured_low_latency) {
  captured_of(RowLayout::kLowLatency, cudaStreamCaptureModeThreadLocal);
}

MOE_CASE(captured_for_all_threads) {
  captured_of(RowLayout::kLowLatency, cudaStreamCaptureModeGlobal);
}

/// Calls that put work into a stream, and those that only look at the host's state. A host that
/// waits long for rows records one event more and asks for that, again and again, and each time for
/// a capture before, which is not counted.
struct NumCalls {
  explicit NumCalls(const std::map<std::string, int>& calls) {
    for (const auto& [call, number] : calls)
      if (call == "cudaSetDevice" || call == "cudaGetDevice" || call == "cudaStreamIsCapturing")
        of_state += number;
      else if (call != "cudaThreadExchangeStreamCaptureMode" && call != "cudaEventQuery")
        of_work += number;
    if (const auto asked = calls.find("cudaEventQuery"); asked != calls.end()) {
      --of_work;
      of_state -= asked->second;
    }
  }
  auto operator<=>(const NumCalls&) const = default;

  int of_work = 0;
  int of_state = 0;
};

/// Calls of the calling thread for an operation as a rule: a line for each, with calls of work,
/// of the host's state, and which they are. Now and then streams are asked what memory they are
/// done with.
/// @param has_default_streams  Callers use the default streams of their devices.
void host_calls_on(int num_devices, bool has_default_streams) {
  // A host that waits for long asks about an event, too: on a busy machine in most rounds.
  constexpr size_t kNumRounds = 200;
  std::vector<std::string> lines;
  run_ranks(2, num_devices, [&](int rank_idx, group::ThreadRank& rank, RankGpu& gpu) {
    Caller caller(rank_idx,
                  borrow(*rank.group),
                  gpu,
                  kNumTokens,
                  has_default_streams ? CallerStream(rank_idx) : CallerStream());
    caller.run_all(RowLayout::kExpertMajor);
    caller.run_all(RowLayout::kLowLatency);
    const auto count = [&](const std::string& name, const std::function<void()>& operation) {
      std::vector<std::map<std::string, int>> rounds;
      for (size_t i = 0; i < kNumRounds; ++i) {
        caller.stream.synchronize();
        rank.group->all_gather("", {});
        stand_in::take_calls();
        operation();
        rounds.push_back(stand_in::take_calls());
      }
      // Where memory that was given back is looked for, other events are asked, too.
      std::erase_if(rounds, [](const auto& calls) { return calls.contains("cudaStreamQuery"); });
      expect(!rounds.empty(), concat("every ", name, " asks its streams for memory"));
      const auto& usual =
          *std::min_element(rounds.begin(), rounds.end(), [](const auto& a, const auto& b) {
            return NumCalls(a) < NumCalls(b);
          });
      const NumCalls num_calls(usual);
      std::string names;
      for (const auto& [call, number] : usual)
        names += concat(" ", call, "=", number);
      if (rank_idx == 0)
        lines.push_back(concat(name, " ", num_calls.of_work, " ", num_calls.of_state, names));
    };
    ops::DispatchOutcome outcome;
    for (const RowLayout layout : {RowLayout::kExpertMajor, RowLayout::kLowLatency}) {
      const std::string suffix = layout == RowLayout::kLowLatency ? "_low_latency" : "";
      count("dispatch" + suffix, [&] { outcome = caller.dispatch(layout); });
      count("combine" + suffix, [&] { caller.combine(outcome); });
      count("cached_dispatch" + suffix, [&] { caller.dispatch(layout, outcome.plan); });
    }
    if (!has_default_streams) {  // which are not captured
      Recorded recorded(caller, RowLayout::kLowLatency, cudaStreamCaptureModeThreadLocal);
      recorded.make(caller);
      count("replay", [&] { cudaGraphLaunch(recorded.executable, caller.stream.get()); });
    }
    caller.stream.synchronize();
    caller.endpoint->destroy({});
  });
  for (const std::string& line : lines)
    std::puts(line.c_str());
}

MOE_CASE(host_calls_with_one_device) {
  stand_in::machine().num_devices = 1;
  host_calls_on(1, false);
}

MOE_CASE(host_calls_on_two_devices) {
  host_calls_on(2, false);
}

MOE_CASE(host_calls_of_default_streams) {
  host_calls_on(2, true);
}

// --- The stand-in itself: what it must find -----------------------------------------------------

/// Rank 1 does @p what while a kernel of rank 0 waits for it, and nobody may be that patient.
void beside_a_kernel(const std::function<void(Caller&)>& what) {
  stand_in::machine().patience = std::chrono::milliseconds(300);
  run_ranks(2, 1, [&](int rank_idx, group::ThreadRank& rank, RankGpu& gpu) {
    Caller caller(rank_idx, borrow(*rank.group), gpu);
    if (rank_idx == 1) {
      await_kernel();
      what(caller);
    }
    caller.run_all(RowLayout::kExpertMajor);
    caller.endpoint->destroy({});
  });
}

MOE_CASE(foreign_kernel_that_is_loaded) {
  g_foreign = stand_in::make_foreign_kernel("foreign", [] {});
  run_ranks(2, 1, [&](int rank_idx, group::ThreadRank& rank, RankGpu& gpu) {
    Caller caller(rank_idx, borrow(*rank.group), gpu);
    launch_foreign(caller.stream.get());
    rank.group->all_gather("", {});
    if (rank_idx == 1) {
      await_kernel();
      launch_foreign(caller.stream.get());
    }
    caller.run_all(RowLayout::kExpertMajor);
    caller.endpoint->destroy({});
  });
}

MOE_CASE(deadlock_by_a_foreign_kernel) {
  g_foreign = stand_in::make_foreign_kernel("foreign", [] {});
  beside_a_kernel([](Caller& caller) { launch_foreign(caller.stream.get()); });
}

MOE_CASE(deadlock_by_kernels_that_are_not_loaded) {
  beside_a_kernel([](Caller&) { stand_in::unload_kernels(); });
}

MOE_CASE(deadlock_by_pageable_memory) {
  beside_a_kernel([](Caller& caller) {
    const int64_t word = 0;
    cudaMemcpyAsync(caller.topk_idx.get(), &word, 8, cudaMemcpyDefault, caller.stream.get());
  });
}

MOE_CASE(deadlock_by_an_allocation) {
  beside_a_kernel([](Caller&) {
    void* data = nullptr;
    cudaMalloc(&data, 8);
  });
}

/// A graph of nothing.
cudaGraph_t record_nothing(const Caller& caller) {
  cudaGraph_t graph = nullptr;
  cudaStreamBeginCapture(caller.stream.get(), cudaStreamCaptureModeThreadLocal);
  cudaStreamEndCapture(caller.stream.get(), &graph);
  return graph;
}

MOE_CASE(deadlock_by_making_a_graph) {
  beside_a_kernel([](Caller& caller) {
    cudaGraphExec_t executable = nullptr;
    cudaGraphInstantiate(&executable, record_nothing(caller), 0);
  });
}

MOE_CASE(deadlock_by_a_first_replay) {
  stand_in::machine().graphs_wait = false;
  beside_a_kernel([](Caller& caller) {
    cudaGraphExec_t executable = nullptr;
    cudaGraphInstantiate(&executable, record_nothing(caller), 0);
    stand_in::machine().graphs_wait = true;
    cudaGraphLaunch(executable, caller.stream.get());
  });
}

/// @p wrong is found, and by that name.
void expect_violation(const std::string& name, const std::function<void()>& wrong) {
  wrong();
  const auto violations = stand_in::take_violations();
  expect(!violations.empty(), concat("not found: ", name));
  expect_error(violations.front(), {name});
}

/// Kernels may have the shared memory of a block on every device that was made, and a launch asks
/// for nothing.
MOE_CASE(shared_memory_of_kernels) {
  for (const int device_idx : {0, 1}) {
    cudaSetDevice(device_idx);
    const CallerStream stream;
    const auto launch = [&](size_t shared_bytes) {
      device::Launch shape;
      shape.shared_bytes = shared_bytes;
      static_cast<simt::Stream*>(static_cast<void*>(stream.get()))
          ->launch({"LargeParams", shape, [] {}});
      stream.synchronize();
    };
    expect_violation("LargeParams with 65536 bytes", [&] { launch(size_t{64} << 10); });
    const auto device = cuda::CudaDevice::create(device_idx, kConnections);
    stand_in::take_calls();
    launch(size_t{200} << 10);
    const auto calls = stand_in::take_calls();
    expect(calls.at("cudaLaunchKernelExC") == 1 && !calls.contains("cuFuncSetAttribute"),
           "a launch sets attributes");
    expect_no_violations();
  }
}

MOE_CASE(wrong_calls) {
  void* data = nullptr;
  cudaSetDevice(0);
  const CallerStream stream;
  const CallerStream second;
  cudaEvent_t event = nullptr;
  cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  cudaGraph_t graph = nullptr;
  cudaMalloc(&data, 4096);
  expect_violation("cudaMemcpyAsync: beyond",
                   [&] { cudaMemcpyAsync(data, data, 8192, cudaMemcpyDefault, stream.get()); });
  expect_violation("cudaHostGetDevicePointer", [&] {
    int64_t word = 0;
    cudaHostGetDevicePointer(&data, &word, 0);
  });
  expect_violation("cudaGetDriverEntryPointByVersion", [&] {
    cudaDriverEntryPointQueryResult result{};
    cudaGetDriverEntryPointByVersion("cuMemMap", &data, CUDART_VERSION + 10, 0, &result);
  });
  for (const auto mode : {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal}) {
    cudaStreamBeginCapture(stream.get(), mode);
    expect_violation("cudaMalloc: while", [&] { cudaMalloc(&data, 8); });
    expect_violation("cudaStreamQuery: in a capture", [&] { cudaStreamQuery(second.get()); });
    std::thread([&] {
      if (mode == cudaStreamCaptureModeGlobal)
        expect_violation("cudaHostAlloc: while",
                         [&] { cudaHostAlloc(&data, 8, cudaHostAllocMapped); });
      else
        cudaHostAlloc(&data, 8, cudaHostAllocMapped);
    }).join();
    cudaStreamEndCapture(stream.get(), &graph);
  }
  cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeRelaxed);
  cudaMalloc(&data, 8);
  cudaEventRecord(event, stream.get());
  expect_violation("cudaEventQuery: the event belongs", [&] { cudaEventQuery(event); });
  cudaStreamWaitEvent(second.get(), event, cudaEventWaitDefault);  // takes part from here on
  cudaMemsetAsync(data, 0, 8, second.get());
  expect_violation("cudaStreamEndCapture", [&] { cudaStreamEndCapture(stream.get(), &graph); });
  cudaEventRecord(event, stream.get());
  cudaStreamBeginCapture(second.get(), cudaStreamCaptureModeRelaxed);
  expect_violation("cudaStreamWaitEvent",
                   [&] { cudaStreamWaitEvent(second.get(), event, cudaEventWaitDefault); });
  cudaStreamEndCapture(second.get(), &graph);
  cudaEvent_t outside = nullptr;
  cudaEventCreateWithFlags(&outside, cudaEventDisableTiming);
  expect_violation("cudaEventRecordWithFlags: no stream", [&] {
    cudaEventRecordWithFlags(outside, stream.get(), cudaEventRecordExternal);
  });
  expect_violation("cudaStreamWaitEvent: no event of outside",
                   [&] { cudaStreamWaitEvent(stream.get(), outside, cudaEventWaitExternal); });
  cudaGraphExec_t executable = nullptr;
  cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeRelaxed);
  cudaStreamWaitEvent(stream.get(), outside, cudaEventWaitExternal);
  cudaEventRecordWithFlags(outside, stream.get(), cudaEventRecordExternal);
  cudaStreamEndCapture(stream.get(), &graph);
  cudaGraphInstantiate(&executable, graph, 0);
  cudaGraphLaunch(executable, stream.get());
  cudaEventDestroy(outside);
  expect_violation("cudaGraphLaunch: an event of it has ended",
                   [&] { cudaGraphLaunch(executable, stream.get()); });
  cudaSetDevice(1);
  cudaEvent_t event_there = nullptr;
  cudaEventCreateWithFlags(&event_there, cudaEventDisableTiming);
  expect_violation("cudaEventRecord: the stream is of another",
                   [&] { cudaEventRecord(event_there, stream.get()); });
  expect_violation("ForeignParams for device 0 where device 1", [&] {
    static_cast<simt::Stream*>(static_cast<void*>(stream.get()))->launch({"ForeignParams", {}, [] {
                                                                          }});
  });
  expect_no_violations();
}

}  // namespace

int main(int argc, char** argv) {
  return run_case(argc, argv);
}
