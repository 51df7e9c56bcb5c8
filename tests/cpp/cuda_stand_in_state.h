#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.h"
#include "cuda_stand_in.h"
#include "simt/stream.h"

// What the functions of the stand-in share.
//
// Documents: RT is the CUDA Runtime API reference, DR the CUDA Driver API reference, PG the CUDA
// C++ Programming Guide, all of CUDA 13.0; sections by their titles.

/// A stream, as the package's kernels know one and as the runtime's functions do.
struct CUstream_st final : moe::simt::Stream {
  CUstream_st(int device, bool blocks)
      : device_idx(device),
        is_blocking(blocks),
        worker(std::make_unique<moe::simt::WorkerStream>(-1)) {}

  void launch(moe::simt::Kernel kernel) override;

  int device_idx;
  bool is_blocking;  ///< waits for the default stream, and is waited for
  std::unique_ptr<moe::simt::WorkerStream> worker;
  std::mutex names_mutex;
  std::map<uint64_t, std::string> names;  ///< names of kernels, by the number of the work
};

struct CUevent_st {
  int device_idx = 0;
  std::mutex mutex;
  /// Record in a capture, if there was one; else null.
  std::shared_ptr<moe::runtime::Event> captured;
  /// Its last record elsewhere, and those that runs of graphs make.
  std::shared_ptr<moe::simt::StreamBaton> records = std::make_shared<moe::simt::StreamBaton>();
};

struct CUgraph_st {
  std::shared_ptr<moe::simt::Graph> graph;
};

struct CUgraphExec_st {
  std::shared_ptr<moe::simt::Graph> graph;
  std::atomic<bool> is_uploaded{false};
};

namespace moe::stand_in {

constexpr int kUnset = 0x5A;  // what memory holds before somebody writes it

struct Foreign {
  std::string name;
  std::function<void()> body;
};

struct Memory {
  enum Kind { kDevice, kHost, kRegistered } kind = kDevice;
  size_t bytes = 0;
  int fd = -1;
  std::set<int> devices;    ///< devices whose kernels reach it; host memory all
  bool is_of_peer = false;  ///< opened by this process, not made
};

struct Reserved {
  size_t bytes = 0;
  std::map<CUdeviceptr, size_t> mapped;  ///< bytes by address

  bool has_mapped(CUdeviceptr address, size_t wanted) const {
    return std::any_of(mapped.begin(), mapped.end(), [&](const auto& part) {
      return part.first < address + wanted && address < part.first + part.second;
    });
  }
};

struct Physical {
  int fd = -1;
  size_t bytes = 0;
  bool may_be_exported = false;
};

struct OpenCapture {
  const simt::DeviceStream* origin;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
};

struct Context {
  bool is_active = false;
  std::mutex waiting;  ///< held by calls that wait for the device
  std::vector<std::shared_ptr<CUstream_st>> streams;
  std::vector<std::shared_ptr<CUstream_st>> ended;  ///< destroyed, maybe with work left
  std::shared_ptr<CUstream_st> legacy;
  std::set<const void*> loaded;
  std::map<const void*, int> shared_bytes;  ///< dynamic, that a function may have beyond the usual
};

struct State {
  std::mutex mutex;  ///< guards all that follows; never held while anything waits
  Machine machine;
  std::vector<int> visible;  ///< numbers of devices of the machine
  std::vector<Context> contexts;
  std::map<uintptr_t, Memory> memory;
  std::map<uintptr_t, Reserved> reserved;
  std::map<CUmemGenericAllocationHandle, Physical> physical;
  CUmemGenericAllocationHandle next_physical = 1;
  std::map<const void*, Foreign> foreign;
  std::vector<OpenCapture> captures;
  std::set<std::pair<int, int>> peers;
  std::set<const runtime::Baton*> ended_events;  ///< records that graphs still have of them
  std::vector<std::string> violations;
  std::map<std::string, int> waits;
  std::atomic<int64_t> dawdle_ms{0};
  std::atomic<int> dawdle_device{0};
  std::atomic<int> num_launches{0};
  std::once_flag once;
};

State& state();

struct ThreadState {
  int device_idx = 0;
  bool has_context = false;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  cudaError_t last_error = cudaSuccess;
  std::map<std::string, int> calls;
};
extern thread_local ThreadState this_thread;

/// Counts a call, and looks at the machine where it is the first.
void begin(const char* call);
/// Remembers a wrong call. @return @p code
cudaError_t fail(cudaError_t code, const char* call, const std::string& why);
CUresult refuse(CUresult code, const char* call, const std::string& why);
/// Returns whether this machine does not support a call.
bool is_refused(const char* call);
/// An error that a right call may get. @return @p code
cudaError_t answer(cudaError_t code);

int num_visible();
bool is_device(int device_idx);
Context& use_context();
bool is_prohibited();
/// A call waits until all that streams of the context were given by now has ended.
void drain(Context& context, const char* call);
/// The same of every context, where a call names addresses. @param device_idx  -1 where it is not
/// said
void drain_all(const char* call, int device_idx);
cudaError_t wait_for_device(const char* call);

std::shared_ptr<CUstream_st> find_stream(cudaStream_t handle);
bool is_legacy(const CUstream_st& stream);
bool has_implicit_capture(const CUstream_st& stream);
std::shared_ptr<CUstream_st> stream_for_work(cudaStream_t handle, const char* call);

enum class Place { kDevice, kHost, kPageable, kNowhere };

Place place_of(const void* address, size_t bytes);
/// Returns whether another process made the memory that lies there.
bool is_of_peer(const void* address);

/// This package's kernels are one module, and so many functions of it that have to be loaded.
extern const char* const kOwnModule;
constexpr int kNumOwnFunctions = 3;     // one, and two that only enumeration finds
constexpr int kStaticSharedBytes = 64;  // of each
extern char own_functions[kNumOwnFunctions];
/// Stands for the first where a symbol is asked for.
void own_kernel();
void load(const CUstream_st& stream, const void* module, const std::string& name);
void put_kernel(CUstream_st& stream, simt::Kernel kernel);

}  // namespace moe::stand_in
