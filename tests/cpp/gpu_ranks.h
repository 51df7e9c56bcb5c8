#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <latch>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "cuda/cuda_device.h"
#include "cuda/cuda_heap.h"
#include "cuda_stand_in.h"
#include "emulated.h"
#include "ops/combine.h"
#include "runtime/device_combine.h"
#include "runtime/device_dispatch.h"
#include "runtime/device_endpoint.h"
#include "runtime/device_plan.h"
#include "runtime/dispatch_launches.h"
#include "thread_rank.h"

// Ranks with GPUs of the stand-in: threads or processes, a buffer of each, and what its operations
// have to bring.

namespace moe::cases {

using layout::RowLayout;

constexpr int kNumExperts = 4;  ///< two on each of the first two ranks
constexpr int64_t kNumTopk = kNumExperts;
constexpr int64_t kNumTokens = 4;
constexpr int64_t kHidden = 32;  // float32
constexpr int kConnections = 32;

/// A stream of the caller's, as torch makes them, or the default stream of a device.
class CallerStream {
 public:
  CallerStream() {
    device::check_cuda(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, 0),
                       "making a caller's stream");
  }
  explicit CallerStream(int default_of) : device_idx_(default_of) {}
  // Outlives the communicator, as docs/gpu.md asks.

  cudaStream_t get() const { return stream_; }
  void synchronize() const {
    const auto current =
        stream_ == nullptr ? std::make_optional<cuda::CurrentDevice>(device_idx_) : std::nullopt;
    device::check_cuda(cudaStreamSynchronize(stream_), "waiting for a caller's stream");
  }

 private:
  int device_idx_ = -1;
  cudaStream_t stream_ = nullptr;
};

/// Share of a rank of its GPU.
struct RankGpu {
  RankGpu(group::ThreadRank& rank, int device_idx, int max_connections)
      : device(cuda::CudaDevice::create(device_idx, max_connections)),
        heap(cuda::CudaHeap::create(rank.mesh, device, {})) {
    device->activate();
  }

  std::shared_ptr<cuda::CudaDevice> device;
  std::shared_ptr<cuda::CudaHeap> heap;
};

inline std::shared_ptr<group::Group> borrow(group::Group& group) {
  return {std::shared_ptr<void>(), &group};
}

/// One buffer of a rank, and inputs that every rank knows: row t of rank r is full of 10 r + t, and
/// every token goes to every expert.
struct Caller {
  Caller(int rank_idx,
         const std::shared_ptr<group::Group>& group,
         const RankGpu& gpu,
         int64_t num_max_tokens = kNumTokens,
         const CallerStream& stream = {})
      : rank_idx(rank_idx), num_ranks(group->num_ranks()), stream(stream) {
    runtime::DeviceEndpointConfig config;
    config.common.num_experts = kNumExperts;
    config.common.expert_rank = {0, 0, 1, 1};
    config.common.num_max_tokens = num_max_tokens;
    config.common.num_max_topk = kNumTopk;
    config.common.max_row_bytes = kHidden * 4;
    config.common.depth = 2;
    config.shape.num_sms = 2;
    config.shape.num_threads = 64;
    endpoint = runtime::DeviceEndpoint::create(group, gpu.heap, gpu.device, std::move(config), {});
    endpoint->order().set_caller(reinterpret_cast<uintptr_t>(stream.get()), {});
    x = gpu.device->allocate_unset(kNumTokens * kHidden * 4);
    topk_idx = gpu.device->allocate_unset(kNumTokens * kNumTopk * 8);
    fill(0);
    for (int64_t i = 0; i < kNumTokens * kNumTopk; ++i)
      reinterpret_cast<int64_t*>(topk_idx.get())[i] = i % kNumExperts;
  }

  /// Rows of another round: rows are full of 10 r + t + 100 round.
  void fill(int new_round) {
    round = new_round;
    for (int64_t i = 0; i < kNumTokens * kHidden; ++i)
      reinterpret_cast<float*>(x.get())[i] = value_of(rank_idx, i / kHidden);
  }

  float value_of(int64_t from_rank, int64_t token_idx) const {
    return static_cast<float>(10 * from_rank + token_idx + 100 * round);
  }

  ops::DispatchParams dispatch_params(RowLayout layout) const {
    ops::DispatchParams params;
    params.x = x.get();
    params.topk_idx = reinterpret_cast<const int64_t*>(topk_idx.get());
    params.num_tokens = kNumTokens;
    params.num_topk = kNumTopk;
    params.source_row_bytes = params.row_bytes = kHidden * 4;
    params.dtype = 2 << 8 | 32;
    params.layout = layout;
    params.copy_out = ops::CopyOut::kNever;
    return params;
  }

  ops::DispatchOutcome dispatch(RowLayout layout = RowLayout::kExpertMajor,
                                std::shared_ptr<const ops::PlanHeader> plan = nullptr) const {
    ops::DispatchParams params = dispatch_params(layout);
    params.plan = std::move(plan);
    return runtime::dispatch(*endpoint, params, {});
  }

  ops::CombineOutcome combine(const ops::DispatchOutcome& dispatched) const {
    ops::CombineParams params;
    params.x = dispatched.rows;
    params.has_rows = true;
    params.dtype = DType::kFloat32;
    params.hidden = kHidden;
    params.plan = dispatched.plan;
    params.copy_out = ops::CopyOut::kNever;
    return runtime::combine(*endpoint, params, {});
  }

  /// Every expert has the rows of all ranks, in their order.
  void check_rows(const ops::DispatchOutcome& outcome) const {
    stream.synchronize();
    const int64_t num_rows = num_ranks * kNumTokens;  // of an expert
    const layout::Arrangement& arrangement = outcome.plan->arrangement;
    for (int64_t i = 0; rank_idx < 2 && i < 2 * num_rows; ++i) {
      const int64_t row_idx = i % num_rows;
      const int64_t place = i / num_rows * arrangement.expert_rows(num_rows) + row_idx;
      float value = 0.0f;
      std::memcpy(&value, outcome.rows + place * kHidden * 4, sizeof value);
      expect_equal(value,
                   value_of(row_idx / kNumTokens, row_idx % kNumTokens),
                   concat("row ", place, " of rank ", rank_idx));
    }
  }

  /// Experts return what they got.
  void check_sums(const ops::CombineOutcome& outcome) const {
    stream.synchronize();
    for (int64_t token_idx = 0; token_idx < kNumTokens; ++token_idx) {
      float value = 0.0f;
      std::memcpy(&value, outcome.sums + token_idx * kHidden * 4, sizeof value);
      expect_equal(value,
                   kNumTopk * value_of(rank_idx, token_idx),
                   concat("sum ", token_idx, " of rank ", rank_idx));
    }
  }

  void run_all(RowLayout layout) {
    for (int i = 0; i < 2; ++i) {
      const ops::DispatchOutcome outcome = dispatch(layout);
      check_rows(outcome);
      check_sums(combine(outcome));
      fill(round + 1);
      const ops::DispatchOutcome again = dispatch(layout, outcome.plan);
      check_rows(again);
      check_sums(combine(again));
      fill(round + 1);
    }
  }

  int rank_idx;
  int num_ranks;
  CallerStream stream;
  std::shared_ptr<runtime::DeviceEndpoint> endpoint;
  std::shared_ptr<std::byte> x;
  std::shared_ptr<std::byte> topk_idx;
  int round = 0;
};

inline void expect_no_violations() {
  std::string text;
  for (const std::string& violation : stand_in::take_violations())
    text += violation + "\n";
  expect_equal(text, std::string(), "wrong calls");
}

/// Ranks that are threads, on @p num_devices in turn.
inline void run_ranks(int num_ranks,
                      int num_devices,
                      const std::function<void(int, group::ThreadRank&, RankGpu&)>& body) {
  group::run_group(num_ranks, [&](int rank_idx, group::ThreadRank& rank) {
    try {
      RankGpu gpu(rank, rank_idx % num_devices, num_ranks > num_devices ? kConnections : 0);
      body(rank_idx, rank, gpu);
    } catch (const std::exception& error) {
      group::fail(concat("rank ", rank_idx, ": ", error.what()));
    }
  });
  expect_no_violations();
}

/// Memory of every rank is open to the GPU of this one, by what this process asked for.
inline void expect_access(const RankGpu& gpu, group::Group& group) {
  const auto window = gpu.heap->allocate(8);
  const auto said = group.all_gather(
      std::string(reinterpret_cast<const char*>(&window->offer()), sizeof(Offer)), {});
  for (int rank_idx = 0; rank_idx < group.num_ranks(); ++rank_idx) {
    Offer offer;
    std::memcpy(&offer, said[static_cast<size_t>(rank_idx)].data(), sizeof offer);
    const std::byte* const there = group.resolve(*gpu.heap, rank_idx, offer, {});
    expect(stand_in::can_access(there, gpu.device->device_idx()),
           concat("memory of rank ", rank_idx, " is closed"));
  }
  group.all_gather("", {});  // nobody gives memory back before
}

/// Messages between processes before they are ranks.
class Pipe {
 public:
  Pipe() { expect(::pipe(ends_) == 0, "no pipe"); }
  void send(const std::string& text) const {
    const size_t size = text.size();
    expect(::write(ends_[1], &size, sizeof size) == sizeof size, "a pipe is broken");
    expect(::write(ends_[1], text.data(), size) == static_cast<ssize_t>(size), "a pipe is broken");
  }
  std::string receive() const {
    size_t size = 0;
    expect(::read(ends_[0], &size, sizeof size) == sizeof size, "a pipe is broken");
    std::string text(size, '\0');
    for (size_t at = 0; at < size;) {
      const ssize_t count = ::read(ends_[0], text.data() + at, size - at);
      expect(count > 0, "a pipe is broken");
      at += static_cast<size_t>(count);
    }
    return text;
  }

 private:
  int ends_[2];
};

/// Ranks of one process are threads, each with one of the devices that the process sees.
struct RankProcess {
  std::string mask;  ///< mask of devices
  int num_ranks = 1;
};

/// Ranks in @p processes, numbered in their order.
inline void run_processes(const std::vector<RankProcess>& processes,
                          const std::function<void(int, group::ThreadRank&, RankGpu&)>& body) {
  size_t num_ranks = 0;
  for (const RankProcess& process : processes)
    num_ranks += static_cast<size_t>(process.num_ranks);
  std::vector<Pipe> to_parent(num_ranks);
  std::vector<Pipe> to_rank(num_ranks);
  const auto run = [&](size_t idx, int device_idx) {
    const auto rank_idx = static_cast<int>(idx);
    try {
      group::ThreadRank rank;
      rank.mesh = heap::PeerMesh::create();
      to_parent[idx].send(rank.mesh->address());
      std::vector<std::string> addresses;
      for (size_t i = 0; i < num_ranks; ++i)
        addresses.push_back(to_rank[idx].receive());
      rank.connect(rank_idx, addresses);
      rank.make_group();
      {
        RankGpu gpu(rank, device_idx, 0);
        body(rank_idx, rank, gpu);
      }
      rank.leave();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "rank %d: %s\n", rank_idx, error.what());
      std::_Exit(1);
    }
  };
  std::vector<pid_t> started;
  size_t first = 0;
  for (const RankProcess& process : processes) {
    started.push_back(::fork());
    if (started.back() == 0) {
      ::setenv("CUDA_VISIBLE_DEVICES", process.mask.c_str(), 1);
      std::vector<std::thread> ranks;
      for (int i = 0; i < process.num_ranks; ++i)
        ranks.emplace_back(run, first + static_cast<size_t>(i), i);
      for (std::thread& rank : ranks)
        rank.join();
      try {
        expect_no_violations();
      } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        std::_Exit(1);
      }
      std::_Exit(0);
    }
    first += static_cast<size_t>(process.num_ranks);
  }
  for (const Pipe& from : to_parent) {
    const std::string address = from.receive();
    for (const Pipe& to : to_rank)
      to.send(address);
  }
  for (const pid_t process : started) {
    int status = 0;
    ::waitpid(process, &status, 0);
    expect_equal(status, 0, "the status of a rank");
  }
}

inline void await_kernel() {
  while (!stand_in::has_kernel())
    std::this_thread::sleep_for(std::chrono::microseconds(100));
}

/// Records dispatch and combine into a graph.
struct Recorded {
  Recorded(Caller& caller, RowLayout layout, cudaStreamCaptureMode mode) {
    device::check_cuda(cudaStreamBeginCapture(caller.stream.get(), mode), "beginning a capture");
    ops::DispatchParams params = caller.dispatch_params(layout);
    if (layout != RowLayout::kLowLatency) {
      params.fixed_rows = 2 * caller.num_ranks * kNumTokens;
      params.arguments.on_overflow = static_cast<int32_t>(layout::OnOverflow::kDrop);
    }
    dispatched = runtime::dispatch(*caller.endpoint, params, {});
    combined = caller.combine(dispatched);
    device::check_cuda(cudaStreamEndCapture(caller.stream.get(), &graph), "ending a capture");
  }

  /// Before it is replayed. While no rank of this device waits for another, as this may wait for
  /// all of the device.
  void make(const Caller& caller) {
    device::check_cuda(cudaGraphInstantiate(&executable, graph, 0), "making a graph");
    device::check_cuda(cudaGraphUpload(executable, caller.stream.get()), "uploading a graph");
  }

  void replay(Caller& caller) const {
    device::check_cuda(cudaGraphLaunch(executable, caller.stream.get()), "launching a graph");
    caller.check_rows(dispatched);
    caller.check_sums(combined);
  }

  ops::DispatchOutcome dispatched;
  ops::CombineOutcome combined;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
};

}  // namespace moe::cases
