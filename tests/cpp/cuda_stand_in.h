#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

// A CUDA runtime and driver for tests, linked in the place of NVIDIA's: the worst that NVIDIA's
// documents allow. Streams run on threads of this process, kernels on the emulator.
//
// - Whatever may wait for the device waits until all work that any stream of the context was given
//   before has ended, under a lock that the other calls of that kind want too.
// - A kernel that was not loaded is loaded by its first launch, which may wait likewise.
// - A wrong call is remembered by name, besides the error that it returns.
//
// Each rule names the document that it is from, above the function that keeps it. What is assumed,
// because no document says that it waits: cuMemCreate, cuMemMap, cuMemSetAccess and what undoes
// them, making and ending streams and events, cudaMemcpyAsync of page-locked and device memory,
// cudaMemsetAsync, and launches of kernels that are loaded.
//
// This package's kernels come in by simt::Stream, as which the emulator's vocabulary puts them into
// a stream: a cudaStream_t points to one.

namespace moe::stand_in {

/// Devices that this process finds. To be set before the first call, as CUDA_VISIBLE_DEVICES is to
/// be: its numbers are those of the machine's devices.
struct Machine {
  int num_devices = 2;
  int driver_version = 0;  ///< 0 for that of the headers
  bool has_virtual_memory = true;
  /// Whether making a graph or uploading it waits, as its first launch does.
  bool graphs_wait = true;
  bool loses_p2p_writes = false;  ///< whether copies to a peer's memory are lost, without an error
  bool loses_p2p_reads = false;   ///< whether copies from one are, likewise
  bool has_p2p = true;            ///< whether a process gets access to memory of another's
  std::string refused;            ///< a call by name that is not supported
  bool is_eager = false;          ///< CUDA_MODULE_LOADING=EAGER
  /// So long a call waits for the device before the program ends, with "deadlock: <call> waits for
  /// <kernel>" and status 3.
  std::chrono::milliseconds patience{20'000};
};
Machine& machine();

/// Wrong calls since the last time, as "cudaMalloc: ..."; empty is good.
std::vector<std::string> take_violations();

/// Calls of the calling thread, by name, since the last time; launches of this package's
/// kernels count as cudaLaunchKernelExC.
std::map<std::string, int> take_calls();
/// The same of calls that may wait for the device, by all threads.
std::map<std::string, int> take_waits();

/// From now on a call for @p device_idx that may wait first looks for so long whether a kernel
/// comes to run, as if threads of other devices were always faster; until one has.
void dawdle(std::chrono::milliseconds limit, int device_idx);

/// Returns whether a kernel runs, or is about to, on any device.
bool has_kernel();

/// Launches of this package's kernels by all threads, outside captures.
int num_launches();

/// Returns whether anybody has used the default stream of a device.
bool has_default_stream(int device_idx);

/// Forgets which kernels were loaded on the current device.
void unload_kernels();

/// Bytes at @p address that kernels of @p device_idx may use.
bool can_access(const void* address, int device_idx);

/// A kernel of somebody else's, by the address that cudaLaunchKernelExC takes. Made before any
/// call; @p body is what its one thread runs.
const void* make_foreign_kernel(const std::string& name, std::function<void()> body);

}  // namespace moe::stand_in
