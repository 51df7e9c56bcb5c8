// Which calls of CUDA wait for a kernel that runs in another stream, and what this machine offers.
//
// A kernel spins until the host writes a word; beside it another thread makes one call. A call that
// has not returned when the word is written, after kPatience, waited for the kernel. Buffers of
// this package are made and destroyed while kernels of other ranks wait for each other: what waits
// here must not be called then (docs/gpu.md).
//
//   nvcc -std=c++20 -arch=sm_90a -o probe tests/gpu/probe.cu && ./probe
//
// Then, of the streams that ranks which are threads use on one GPU, for every ordered pair: whether
// work put into the second runs while a kernel of the first waits for it. And whether kernels that
// may start early do, and an event puts replays of graphs and other work in order.
//
// Prints JSON, a line for every call; its exit status is 1 where CUDA reports an error. What a
// machine may refuse is a line with "refused" instead.
#include <cuda.h>
#include <cuda_runtime.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kPatience = std::chrono::milliseconds(1500);
constexpr size_t kBytes = 64 << 20;

void check(cudaError_t code, const char* what) {
  if (code == cudaSuccess)
    return;
  std::printf("{\"error\": \"%s: %s\"}\n", what, cudaGetErrorString(code));
  std::exit(1);
}

void check(CUresult code, const char* what) {
  if (code == CUDA_SUCCESS)
    return;
  std::printf("{\"error\": \"%s: CUresult %d\"}\n", what, static_cast<int>(code));
  std::exit(1);
}

#define CHECK(call) check(call, #call)

/// A function of the driver, found at run time: a machine may lack the library to link with.
template <typename Function>
Function driver(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check(cudaGetDriverEntryPointByVersion(name, &function, 12040, cudaEnableDefault, &found), name);
  if (found != cudaDriverEntryPointSuccess)
    check(CUDA_ERROR_NOT_FOUND, name);
  return reinterpret_cast<Function>(function);
}

#define DRIVER(name) driver<decltype(&name)>(#name)

__global__ void spin(const volatile int* is_over) {
  while (*is_over == 0)
    __nanosleep(200);
}

// Each is launched once, so that its first launch loads it (CUDA_MODULE_LOADING=LAZY).
template <int kNumber>
__global__ void never_launched_before(int* word) {
  *word = kNumber;
}

/// What a kernel and the one behind it, which may start early, say of each other.
struct Words {
  int has_started;  ///< the second, before it waits
  int was_seen;     ///< has_started, as the first saw it
  int came_before;  ///< stored last by the first
  int was_told;     ///< came_before, as the second read it
};

__global__ void let_start(Words* words) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  const volatile int* const has_started = &words->has_started;
  for (int i = 0; i < 10000 && *has_started == 0; ++i)
    __nanosleep(1000);
  words->was_seen = *has_started;
  __nanosleep(100000);
  words->came_before = 7;
}

__global__ void start_early(Words* words) {
  *const_cast<volatile int*>(&words->has_started) = 1;
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  words->was_told = *const_cast<const volatile int*>(&words->came_before);
}

/// Says that this machine does not do it. @return whether it does
bool is_done(cudaError_t code, const char* what) {
  if (code == cudaSuccess)
    return true;
  cudaGetLastError();
  std::printf("{\"call\": \"%s\", \"refused\": \"%s\"}\n", what, cudaGetErrorName(code));
  std::fflush(stdout);
  return false;
}

/// Times one call beside a kernel that spins. The word ends the kernel after kPatience at the
/// latest.
/// @param before  Called with the kernel's stream once it runs, on a thread of its own.
void probe(const char* name,
           const std::function<void()>& call,
           const std::function<void(cudaStream_t)>& before = nullptr) {
  int* is_over = nullptr;
  CHECK(cudaHostAlloc(&is_over, sizeof(int), cudaHostAllocMapped));
  *is_over = 0;
  cudaStream_t stream{};
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  spin<<<1, 1, 0, stream>>>(is_over);
  CHECK(cudaGetLastError());
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // it runs by now
  std::thread earlier;
  if (before) {
    earlier = std::thread([&] {
      CHECK(cudaSetDevice(0));
      before(stream);
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // it is in its call by now
  }
  std::atomic<bool> has_returned = false;
  const auto start = Clock::now();
  std::atomic<double> seconds = 0;
  std::thread caller([&] {
    CHECK(cudaSetDevice(0));
    call();
    seconds = std::chrono::duration<double>(Clock::now() - start).count();
    has_returned = true;
  });
  while (!has_returned && Clock::now() - start < kPatience)
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  const bool waits = !has_returned;
  *reinterpret_cast<volatile int*>(is_over) = 1;
  caller.join();
  if (earlier.joinable())
    earlier.join();
  CHECK(cudaStreamSynchronize(stream));
  std::printf("{\"call\": \"%s\", \"waits_for_kernels\": %s, \"us\": %.1f}\n",
              name,
              waits ? "true" : "false",
              seconds * 1e6);
  std::fflush(stdout);
  CHECK(cudaStreamDestroy(stream));
  CHECK(cudaFreeHost(is_over));
}

/// Page-locks memory that was page-locked at another place, as shared memory of the host is
/// (csrc/cuda/host_mapping.cpp).
void probe_second_registration(const char* name, void* first) {
  if (!is_done(cudaHostRegister(first, 4096, cudaHostRegisterMapped), name))
    return;
  void* const second = mremap(first, 0, 4096, MREMAP_MAYMOVE);
  if (second == MAP_FAILED) {
    std::printf("{\"call\": \"%s\", \"refused\": \"mremap\"}\n", name);
  } else {
    cudaError_t code = cudaSuccess;
    probe(name, [&] {
      code = cudaHostRegister(second, 4096, cudaHostRegisterMapped | cudaHostRegisterPortable);
    });
    if (is_done(code, name)) {
      void* address = nullptr;
      CHECK(cudaHostGetDevicePointer(&address, second, 0));
      CHECK(cudaHostUnregister(second));
    }
    munmap(second, 4096);
  }
  CHECK(cudaHostUnregister(first));
}

/// Memory that other processes may map, as a heap on the host is.
void probe_memfd() {
  const char* const name = "cudaHostRegister of memfd pages";
  const int fd = memfd_create("probe", 0);
  if (fd < 0 || ftruncate(fd, 4096) != 0) {
    std::printf("{\"call\": \"%s\", \"refused\": \"memfd_create\"}\n", name);
    return;
  }
  void* const pages = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  cudaError_t code = cudaSuccess;
  probe(name, [&] { code = cudaHostRegister(pages, 4096, cudaHostRegisterMapped); });
  if (is_done(code, name))
    CHECK(cudaHostUnregister(pages));
  munmap(pages, 4096);
  close(fd);
}

/// A second program of this file that opens what the first has exported: fork() would leave it
/// without a driver that works.
int import_here(int descriptor) {
  CHECK(cudaSetDevice(0));
  CHECK(cudaFree(nullptr));
  CUmemGenericAllocationHandle memory{};
  const CUresult code =
      DRIVER(cuMemImportFromShareableHandle)(&memory,
                                             reinterpret_cast<void*>(intptr_t{descriptor}),
                                             CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  if (code == CUDA_SUCCESS)
    CHECK(DRIVER(cuMemRelease)(memory));
  return code == CUDA_SUCCESS ? 0 : 2;
}

void probe_import(int descriptor) {
  fcntl(descriptor, F_SETFD, 0);  // stays open in the other program
  const auto start = Clock::now();
  const pid_t child = fork();
  if (child == 0) {
    const std::string number = std::to_string(descriptor);
    execl("/proc/self/exe", "probe", "--import", number.c_str(), nullptr);
    _exit(3);
  }
  int status = 0;
  waitpid(child, &status, 0);
  const bool is_good = WIFEXITED(status) && WEXITSTATUS(status) == 0;
  std::printf(
      "{\"call\": \"a child opens memory by its descriptor\", \"works\": %s, \"us\": %.1f}\n",
      is_good ? "true" : "false",
      std::chrono::duration<double>(Clock::now() - start).count() * 1e6);
  std::fflush(stdout);
}

/// Does what the first communicator of a process does, so that no first launch has to.
void probe_loading() {
  const char* const name = "cuFuncLoad of all kernels of a module";
  cudaFunction_t function{};
  if (!is_done(
          cudaGetFuncBySymbol(&function, reinterpret_cast<const void*>(&never_launched_before<3>)),
          name))
    return;
  CUresult code = CUDA_SUCCESS;
  probe(name, [&] {
    CUmodule module{};
    unsigned count = 0;
    std::vector<CUfunction> functions;
    code = DRIVER(cuFuncGetModule)(&module, function);
    if (code == CUDA_SUCCESS)
      code = DRIVER(cuModuleGetFunctionCount)(&count, module);
    functions.resize(count);
    if (code == CUDA_SUCCESS)
      code = DRIVER(cuModuleEnumerateFunctions)(functions.data(), count, module);
    for (CUfunction each : functions)
      if (code == CUDA_SUCCESS)
        code = DRIVER(cuFuncLoad)(each);
  });
  if (code != CUDA_SUCCESS)
    std::printf("{\"call\": \"%s\", \"refused\": \"CUresult %d\"}\n", name, static_cast<int>(code));
}

/// Cost of a graph beside a kernel: made, put into a stream for the first time and once more.
void probe_graph(cudaStream_t stream, int* word) {
  cudaGraph_t graph{};
  cudaGraphExec_t ready{};
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  never_launched_before<1><<<1, 1, 0, stream>>>(word);
  CHECK(cudaStreamEndCapture(stream, &graph));
  probe("cudaGraphInstantiate", [&] { CHECK(cudaGraphInstantiate(&ready, graph, 0)); });
  for (const char* name : {"first replay of a graph", "second replay of a graph"})
    probe(name, [&] {
      CHECK(cudaGraphLaunch(ready, stream));
      CHECK(cudaStreamSynchronize(stream));
    });
  CHECK(cudaGraphExecDestroy(ready));
  CHECK(cudaGraphDestroy(graph));
}

/// What csrc/runtime makes of programmatic dependent launch: device::Launch::is_dependent.
void probe_dependent(const char* name, cudaStream_t stream, bool has_event, bool is_captured) {
  Words* words = nullptr;
  CHECK(cudaMalloc(&words, sizeof(Words)));
  CHECK(cudaMemset(words, 0, sizeof(Words)));
  cudaEvent_t event{};
  CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  if (is_captured)
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  let_start<<<1, 1, 0, stream>>>(words);
  if (has_event)
    CHECK(cudaEventRecord(event, stream));
  cudaLaunchAttribute dependent{};
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = config.blockDim = dim3(1);
  config.stream = stream;
  config.attrs = &dependent;
  config.numAttrs = 1;
  CHECK(cudaLaunchKernelEx(&config, start_early, words));
  if (is_captured) {
    cudaGraph_t graph{};
    cudaGraphExec_t ready{};
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&ready, graph, 0));
    CHECK(cudaGraphLaunch(ready, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaGraphExecDestroy(ready));
    CHECK(cudaGraphDestroy(graph));
  }
  CHECK(cudaStreamSynchronize(stream));
  Words found{};
  CHECK(cudaMemcpy(&found, words, sizeof(Words), cudaMemcpyDeviceToHost));
  std::printf(
      "{\"dependent_launch\": \"%s\", \"starts_early\": %s, \"sees_what_came_before\": %s}\n",
      name,
      found.was_seen != 0 ? "true" : "false",
      found.was_told == 7 ? "true" : "false");
  std::fflush(stdout);
  CHECK(cudaEventDestroy(event));
  CHECK(cudaFree(words));
}

/// Order of a buffer's replays and other work, by an event that graphs wait for and record as one
/// of outside (runtime::Baton). Where such a graph waits for its own end, nothing runs from then
/// on.
void probe_baton(cudaStream_t stream, cudaStream_t other, int* word) {
  int* is_over = nullptr;
  CHECK(cudaHostAlloc(&is_over, sizeof(int), cudaHostAllocMapped));
  *is_over = 0;
  cudaEvent_t baton{};
  CHECK(cudaEventCreateWithFlags(&baton, cudaEventDisableTiming));
  CHECK(cudaEventRecord(baton, stream));
  cudaGraph_t graph{};
  cudaGraphExec_t ready{};
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  CHECK(cudaStreamWaitEvent(stream, baton, cudaEventWaitExternal));
  spin<<<1, 1, 0, stream>>>(is_over);
  CHECK(cudaEventRecordWithFlags(baton, stream, cudaEventRecordExternal));
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&ready, graph, 0));
  CHECK(cudaGraphLaunch(ready, stream));
  CHECK(cudaStreamWaitEvent(other, baton, cudaEventWaitDefault));
  never_launched_before<1><<<1, 1, 0, other>>>(word);
  CHECK(cudaGetLastError());
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const bool is_behind = cudaStreamQuery(other) == cudaErrorNotReady;
  *reinterpret_cast<volatile int*>(is_over) = 1;
  const auto start = Clock::now();
  while (cudaStreamQuery(other) == cudaErrorNotReady && Clock::now() - start < kPatience)
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  const bool has_ended = cudaStreamQuery(other) == cudaSuccess;
  std::printf(
      "{\"event_of_a_graph\": \"waited for and recorded\", \"work_is_behind_a_replay\": %s, "
      "\"ends\": %s}\n",
      is_behind ? "true" : "false",
      has_ended ? "true" : "false");
  std::fflush(stdout);
  if (!has_ended)
    std::_Exit(1);
  CHECK(cudaGraphExecDestroy(ready));
  CHECK(cudaGraphDestroy(graph));
  CHECK(cudaEventDestroy(baton));
  CHECK(cudaFreeHost(is_over));
}

/// Four ranks have a stream of the caller's and one of a buffer each, and one in which memory is
/// zeroed: for each ordered pair of them, whether a store in the second ends a spin in the first.
void probe_pairs() {
  constexpr int kNumStreams = 9;
  cudaStream_t streams[kNumStreams];
  for (cudaStream_t& stream : streams)
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  int* word = nullptr;
  CHECK(cudaHostAlloc(&word, sizeof(int), cudaHostAllocMapped));
  const volatile int* const seen = word;
  int num_blocked = 0;
  std::string blocked;
  for (int first = 0; first < kNumStreams; ++first)
    for (int second = 0; second < kNumStreams; ++second) {
      if (first == second)
        continue;
      *word = 0;
      spin<<<1, 1, 0, streams[first]>>>(word);
      never_launched_before<1><<<1, 1, 0, streams[second]>>>(word);
      CHECK(cudaGetLastError());
      const auto start = Clock::now();
      while (*seen == 0 && Clock::now() - start < std::chrono::milliseconds(100))
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      if (*seen == 0) {
        ++num_blocked;
        blocked += (blocked.empty() ? "" : ", ") + std::string("[") + std::to_string(first) + ", " +
                   std::to_string(second) + "]";
        *reinterpret_cast<volatile int*>(word) = 1;
      }
      CHECK(cudaDeviceSynchronize());
    }
  const char* const connections = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  std::printf(
      "{\"pairs_of_streams\": %d, \"that_wait_for_each_other\": %d, \"which\": [%s], "
      "\"connections\": \"%s\"}\n",
      kNumStreams * (kNumStreams - 1),
      num_blocked,
      blocked.c_str(),
      connections == nullptr ? "not set" : connections);
  std::fflush(stdout);
  for (cudaStream_t stream : streams)
    CHECK(cudaStreamDestroy(stream));
  CHECK(cudaFreeHost(word));
}

int attribute(CUdevice_attribute which) {
  CUdevice device{};
  CHECK(DRIVER(cuDeviceGet)(&device, 0));
  int value = 0;
  CHECK(DRIVER(cuDeviceGetAttribute)(&value, which, device));
  return value;
}

void describe() {
  int driver = 0, runtime = 0, num_devices = 0;
  CHECK(cudaDriverGetVersion(&driver));
  CHECK(cudaRuntimeGetVersion(&runtime));
  CHECK(cudaGetDeviceCount(&num_devices));
  std::printf(
      "{\"driver\": %d, \"runtime\": %d, \"devices\": %d, \"memory_by_descriptor\": %d, "
      "\"memory_by_fabric\": %d, \"host_registers\": %d, \"mps_daemon\": %s}\n",
      driver,
      runtime,
      num_devices,
      attribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED),
      attribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED),
      attribute(CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM),
      std::system("command -v nvidia-cuda-mps-control >/dev/null") == 0 ? "true" : "false");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3 && std::string(argv[1]) == "--import")
    return import_here(std::atoi(argv[2]));
  CHECK(cudaSetDevice(0));
  CHECK(cudaFree(nullptr));
  describe();

  void *device_memory = nullptr, *page_locked = nullptr;
  CHECK(cudaMalloc(&device_memory, kBytes));
  CHECK(cudaHostAlloc(&page_locked, kBytes, cudaHostAllocDefault));
  void* const pageable = std::calloc(kBytes, 1);
  void* const page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  cudaStream_t other{};
  CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  cudaEvent_t event{};
  CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));

  void* made = nullptr;
  probe("cudaMalloc", [&] { CHECK(cudaMalloc(&made, kBytes)); });
  probe("cudaFree", [&] { CHECK(cudaFree(made)); });
  probe("cudaHostAlloc", [&] { CHECK(cudaHostAlloc(&made, 1 << 20, cudaHostAllocMapped)); });
  probe("cudaFreeHost", [&] { CHECK(cudaFreeHost(made)); });
  probe("cudaHostRegister", [&] {
    CHECK(cudaHostRegister(page, 4096, cudaHostRegisterMapped | cudaHostRegisterPortable));
  });
  probe("cudaHostUnregister", [&] { CHECK(cudaHostUnregister(page)); });
  probe_second_registration("cudaHostRegister of pages that are page-locked elsewhere", page);
  probe_memfd();
  cudaStream_t made_stream{};
  probe("cudaStreamCreate",
        [&] { CHECK(cudaStreamCreateWithFlags(&made_stream, cudaStreamNonBlocking)); });
  probe("cudaStreamDestroy", [&] { CHECK(cudaStreamDestroy(made_stream)); });
  probe("event recorded in the legacy stream",
        [&] { CHECK(cudaEventRecord(event, cudaStreamLegacy)); });
  probe("memset in a stream, waited for", [&] {
    CHECK(cudaMemsetAsync(device_memory, 0, kBytes, other));
    CHECK(cudaStreamSynchronize(other));
  });
  probe("copy to page-locked memory, waited for", [&] {
    CHECK(cudaMemcpyAsync(page_locked, device_memory, kBytes, cudaMemcpyDeviceToHost, other));
    CHECK(cudaStreamSynchronize(other));
  });
  probe("copy to pageable memory", [&] {
    CHECK(cudaMemcpyAsync(pageable, device_memory, kBytes, cudaMemcpyDeviceToHost, other));
    CHECK(cudaStreamSynchronize(other));
  });
  probe("first launch of a kernel", [&] {
    never_launched_before<1><<<1, 1, 0, other>>>(static_cast<int*>(device_memory));
    CHECK(cudaGetLastError());
    CHECK(cudaStreamSynchronize(other));
  });
  cudaFuncAttributes attributes{};
  probe("cudaFuncGetAttributes of a kernel not yet loaded",
        [&] { CHECK(cudaFuncGetAttributes(&attributes, never_launched_before<2>)); });
  probe("cudaFuncSetAttribute", [&] {
    CHECK(cudaFuncSetAttribute(
        never_launched_before<1>, cudaFuncAttributeMaxDynamicSharedMemorySize, 64 << 10));
  });
  const auto copy_to_pageable = [&](cudaStream_t behind) {
    CHECK(cudaMemcpyAsync(pageable, device_memory, kBytes, cudaMemcpyDeviceToHost, behind));
  };
  probe_loading();
  probe(
      "cudaMalloc while another thread's copy to pageable memory is behind the kernel",
      [&] { CHECK(cudaMalloc(&made, kBytes)); },
      copy_to_pageable);
  CHECK(cudaFree(made));
  cudaStream_t third{};
  CHECK(cudaStreamCreateWithFlags(&third, cudaStreamNonBlocking));
  probe(
      "launch while another thread's copy to pageable memory is behind the kernel",
      [&] {
        never_launched_before<1><<<1, 1, 0, third>>>(static_cast<int*>(device_memory));
        CHECK(cudaGetLastError());
        CHECK(cudaStreamSynchronize(third));
      },
      copy_to_pageable);
  probe_graph(third, static_cast<int*>(device_memory));
  probe_pairs();
  probe_dependent("plain", third, false, false);
  probe_dependent("behind an event", third, true, false);
  probe_dependent("in a graph", third, false, true);
  probe_baton(third, other, static_cast<int*>(device_memory));

  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  CUmemGenericAllocationHandle memory{};
  CUdeviceptr address = 0;
  CUmemAccessDesc access{};
  access.location = properties.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  probe("cuMemCreate", [&] { CHECK(DRIVER(cuMemCreate)(&memory, kBytes, &properties, 0)); });
  int descriptor = -1;
  probe("cuMemExportToShareableHandle", [&] {
    CHECK(DRIVER(cuMemExportToShareableHandle)(
        &descriptor, memory, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  });
  probe_import(descriptor);
  close(descriptor);
  probe("cuMemAddressReserve",
        [&] { CHECK(DRIVER(cuMemAddressReserve)(&address, kBytes, 0, 0, 0)); });
  probe("cuMemMap", [&] { CHECK(DRIVER(cuMemMap)(address, kBytes, 0, memory, 0)); });
  probe("cuMemSetAccess", [&] { CHECK(DRIVER(cuMemSetAccess)(address, kBytes, &access, 1)); });
  probe("cuMemUnmap", [&] { CHECK(DRIVER(cuMemUnmap)(address, kBytes)); });
  probe("cuMemRelease", [&] { CHECK(DRIVER(cuMemRelease)(memory)); });
  return 0;
}
