// Which calls of CUDA wait for a kernel that runs in another stream, and what this machine offers.
//
// A kernel spins until the host writes a word; beside it another thread makes one call. A call that
// has not returned when the word is written, after kPatience, waited for the kernel. Buffers of
// this package are made and destroyed while kernels of other ranks wait for each other: what waits
// here must not be called then (docs/gpu.md).
//
//   nvcc -std=c++20 -arch=sm_90a -o probe tests/gpu/probe.cu && ./probe
//
// Prints JSON, a line for every call; its exit status is 1 where CUDA reports an error.
#include <cuda.h>
#include <cuda_runtime.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>

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

/// Times one call beside a kernel that spins. The word ends the kernel after kPatience at the
/// latest.
void probe(const char* name, const std::function<void()>& call) {
  int* is_over = nullptr;
  CHECK(cudaHostAlloc(&is_over, sizeof(int), cudaHostAllocMapped));
  *is_over = 0;
  cudaStream_t stream{};
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  spin<<<1, 1, 0, stream>>>(is_over);
  CHECK(cudaGetLastError());
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // it runs by now
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
  CHECK(cudaStreamSynchronize(stream));
  std::printf("{\"call\": \"%s\", \"waits_for_kernels\": %s, \"us\": %.1f}\n",
              name,
              waits ? "true" : "false",
              seconds * 1e6);
  std::fflush(stdout);
  CHECK(cudaStreamDestroy(stream));
  CHECK(cudaFreeHost(is_over));
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

int main() {
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
  probe("cuMemAddressReserve",
        [&] { CHECK(DRIVER(cuMemAddressReserve)(&address, kBytes, 0, 0, 0)); });
  probe("cuMemMap", [&] { CHECK(DRIVER(cuMemMap)(address, kBytes, 0, memory, 0)); });
  probe("cuMemSetAccess", [&] { CHECK(DRIVER(cuMemSetAccess)(address, kBytes, &access, 1)); });
  probe("cuMemUnmap", [&] { CHECK(DRIVER(cuMemUnmap)(address, kBytes)); });
  probe("cuMemRelease", [&] { CHECK(DRIVER(cuMemRelease)(memory)); });
  return 0;
}
