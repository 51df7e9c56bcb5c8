#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "cuda_stand_in_state.h"

// Memory: of the runtime, shared by processes, and of the driver's virtual addresses.

using namespace moe::stand_in;

namespace {

constexpr size_t kGranularity = size_t{2} << 20;
constexpr size_t kPage = 4096;

int make_file(size_t bytes) {
  const int fd = ::memfd_create("stand-in", MFD_CLOEXEC);
  if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(bytes)) != 0)
    return -1;
  return fd;
}

void add_memory(void* data, Memory memory) {
  const std::lock_guard lock(state().mutex);
  state().memory[reinterpret_cast<uintptr_t>(data)] = std::move(memory);
}

/// The reserved range that [address, address + bytes) lies in; null for none. Under the mutex.
Reserved* range_of(CUdeviceptr address, size_t bytes) {
  auto entry = state().reserved.upper_bound(address);
  if (entry == state().reserved.begin())
    return nullptr;
  --entry;
  const bool is_within = address + bytes <= entry->first + entry->second.bytes;
  return is_within ? &entry->second : nullptr;
}

size_t round_to_page(size_t bytes) {
  return (std::max<size_t>(bytes, 1) + kPage - 1) / kPage * kPage;
}

}  // namespace

extern "C" {

// --- Memory -------------------------------------------------------------------------------------

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  begin("cudaMemGetInfo");
  *free_bytes = *total_bytes = size_t{1} << 30;
  return cudaSuccess;
}

/// PG, Asynchronous Concurrent Execution, Implicit Synchronization: nothing that was issued before
/// a device memory allocation runs beside what is issued after it.
cudaError_t cudaMalloc(void** data, size_t bytes) {
  begin("cudaMalloc");
  if (const cudaError_t code = wait_for_device("cudaMalloc"); code != cudaSuccess)
    return code;
  const size_t mapped_bytes = round_to_page(bytes);
  const int fd = make_file(mapped_bytes);
  *data = ::mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (fd < 0 || *data == MAP_FAILED)
    return answer(cudaErrorMemoryAllocation);
  std::memset(*data, kUnset, mapped_bytes);
  add_memory(*data, {Memory::kDevice, mapped_bytes, fd, {this_thread.device_idx}});
  return cudaSuccess;
}

/// RT, Memory Management, cudaFree: may synchronize implicitly.
cudaError_t cudaFree(void* data) {
  begin("cudaFree");
  if (const cudaError_t code = wait_for_device("cudaFree"); code != cudaSuccess)
    return code;
  const std::lock_guard lock(state().mutex);
  const auto entry = state().memory.find(reinterpret_cast<uintptr_t>(data));
  if (entry == state().memory.end())
    return answer(cudaErrorInvalidValue);
  ::munmap(data, entry->second.bytes);
  ::close(entry->second.fd);
  state().memory.erase(entry);
  return cudaSuccess;
}

/// PG, Implicit Synchronization: as cudaMalloc, "a page-locked host memory allocation".
cudaError_t cudaHostAlloc(void** data, size_t bytes, unsigned flags) {
  begin("cudaHostAlloc");
  if (const cudaError_t code = wait_for_device("cudaHostAlloc"); code != cudaSuccess)
    return code;
  if ((flags & cudaHostAllocMapped) == 0)
    return fail(cudaErrorInvalidValue, "cudaHostAlloc", "kernels do not see it");
  const size_t mapped_bytes = round_to_page(bytes);
  *data = ::mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (*data == MAP_FAILED)
    return answer(cudaErrorMemoryAllocation);
  std::memset(*data, kUnset, mapped_bytes);
  add_memory(*data, {Memory::kHost, mapped_bytes, -1, {}});
  return cudaSuccess;
}

/// The same: page-locking what exists already.
cudaError_t cudaHostRegister(void* data, size_t bytes, unsigned flags) {
  begin("cudaHostRegister");
  if (const cudaError_t code = wait_for_device("cudaHostRegister"); code != cudaSuccess)
    return code;
  const auto start = reinterpret_cast<uintptr_t>(data);
  if (start % kPage != 0 || bytes % kPage != 0 || (flags & cudaHostRegisterMapped) == 0)
    return fail(cudaErrorInvalidValue, "cudaHostRegister", "no whole pages that kernels see");
  const std::lock_guard lock(state().mutex);
  for (const auto& [other, memory] : state().memory)
    if (other < start + bytes && start < other + memory.bytes)
      return answer(cudaErrorHostMemoryAlreadyRegistered);
  state().memory[start] = Memory{Memory::kRegistered, bytes, -1, {}};
  return cudaSuccess;
}

/// The same. (What frees page-locked memory has to know that no kernel uses it.)
cudaError_t cudaHostUnregister(void* data) {
  begin("cudaHostUnregister");
  if (const cudaError_t code = wait_for_device("cudaHostUnregister"); code != cudaSuccess)
    return code;
  const std::lock_guard lock(state().mutex);
  const auto entry = state().memory.find(reinterpret_cast<uintptr_t>(data));
  if (entry == state().memory.end() || entry->second.kind != Memory::kRegistered)
    return answer(cudaErrorHostMemoryNotRegistered);
  state().memory.erase(entry);
  return cudaSuccess;
}

cudaError_t cudaHostGetDevicePointer(void** mapped, void* data, unsigned) {
  begin("cudaHostGetDevicePointer");
  if (place_of(data, 1) != Place::kHost)
    return fail(cudaErrorInvalidValue, "cudaHostGetDevicePointer", "memory is not page-locked");
  *mapped = data;
  return cudaSuccess;
}

/// RT, API synchronization behavior, Memcpy: of pageable memory the call may wait for its stream;
/// of all other memory it does not. PG, Stream and Event Behavior: the stream may be of any device.
cudaError_t cudaMemcpyAsync(
    void* target, const void* source, size_t bytes, cudaMemcpyKind, cudaStream_t handle) {
  begin("cudaMemcpyAsync");
  const Place to = place_of(target, bytes);
  const Place from = place_of(source, bytes);
  if (to == Place::kNowhere || from == Place::kNowhere)
    return fail(cudaErrorInvalidValue, "cudaMemcpyAsync", "beyond the end of an allocation");
  const auto stream = stream_for_work(handle, "cudaMemcpyAsync");
  if (stream == nullptr)
    return this_thread.last_error;
  if ((state().machine.loses_p2p_writes && is_of_peer(target)) ||
      (state().machine.loses_p2p_reads && is_of_peer(source)))
    return cudaSuccess;
  if (to != Place::kPageable && from != Place::kPageable) {
    stream->worker->copy(target, source, static_cast<int64_t>(bytes));
    return cudaSuccess;
  }
  if (stream->worker->is_capturing())
    return fail(cudaErrorStreamCaptureUnsupported, "cudaMemcpyAsync", "pageable, in a capture");
  drain(use_context(), "cudaMemcpyAsync of pageable memory");
  std::memcpy(target, source, bytes);
  return cudaSuccess;
}

/// The same, Memset: the asynchronous versions never wait.
cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t handle) {
  begin("cudaMemsetAsync");
  const Place to = place_of(target, bytes);
  if (to == Place::kNowhere || to == Place::kPageable)
    return fail(cudaErrorInvalidValue, "cudaMemsetAsync", "no memory of kernels");
  const auto stream = stream_for_work(handle, "cudaMemsetAsync");
  if (stream == nullptr)
    return this_thread.last_error;
  stream->worker->fill(target, value, static_cast<int64_t>(bytes));
  return cudaSuccess;
}

// --- Memory that processes share ----------------------------------------------------------------

/// RT, Device Management, cudaIpcOpenMemHandle: not in the process that made the handle, and with
/// peer access enabled lazily, between the device that is current and the one that has the memory.
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* data) {
  begin("cudaIpcGetMemHandle");
  const std::lock_guard lock(state().mutex);
  const auto entry = state().memory.find(reinterpret_cast<uintptr_t>(data));
  if (entry == state().memory.end() || entry->second.fd < 0)
    return answer(cudaErrorInvalidValue);
  const int64_t words[] = {::getpid(), entry->second.fd, static_cast<int64_t>(entry->second.bytes)};
  std::memcpy(handle, words, sizeof words);
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void** data, cudaIpcMemHandle_t handle, unsigned flags) {
  begin("cudaIpcOpenMemHandle");
  if (const cudaError_t code = wait_for_device("cudaIpcOpenMemHandle"); code != cudaSuccess)
    return code;
  int64_t words[3];
  std::memcpy(words, &handle, sizeof words);
  if (words[0] == ::getpid())
    return fail(cudaErrorDeviceUninitialized, "cudaIpcOpenMemHandle", "in its own process");
  if (flags != cudaIpcMemLazyEnablePeerAccess)
    return fail(cudaErrorInvalidValue, "cudaIpcOpenMemHandle", "wrong flags");
  const int fd =
      ::open(moe::concat("/proc/", words[0], "/fd/", words[1]).c_str(), O_RDWR | O_CLOEXEC);
  const auto bytes = static_cast<size_t>(words[2]);
  *data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (fd < 0 || *data == MAP_FAILED)
    return answer(cudaErrorMapBufferObjectFailed);
  add_memory(*data, {Memory::kDevice, bytes, fd, {this_thread.device_idx}, true});
  return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void* data) {
  begin("cudaIpcCloseMemHandle");
  return cudaFree(data);
}

// --- Virtual addresses of the driver -------------------------------------------------------------

CUresult cuMemGetAllocationGranularity(size_t* bytes,
                                       const CUmemAllocationProp*,
                                       CUmemAllocationGranularity_flags) {
  begin("cuMemGetAllocationGranularity");
  *bytes = kGranularity;
  return CUDA_SUCCESS;
}

/// DR, Virtual Memory Management, cuMemCreate: sizes are multiples of the granularity, and only
/// what was asked for at first can be exported.
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle,
                     size_t bytes,
                     const CUmemAllocationProp* properties,
                     unsigned long long) {
  begin("cuMemCreate");
  if (bytes == 0 || bytes % kGranularity != 0)
    return refuse(CUDA_ERROR_INVALID_VALUE, "cuMemCreate", moe::concat(bytes, " bytes"));
  const int fd = make_file(bytes);
  if (fd < 0)
    return CUDA_ERROR_OUT_OF_MEMORY;
  const bool by_fd =
      (properties->requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0;
  const std::lock_guard lock(state().mutex);
  *handle = state().next_physical++;
  state().physical[*handle] = Physical{fd, bytes, by_fd};
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  begin("cuMemRelease");
  const std::lock_guard lock(state().mutex);
  const auto entry = state().physical.find(handle);
  if (entry == state().physical.end()) {
    state().violations.push_back("cuMemRelease: the memory is none");
    return CUDA_ERROR_INVALID_VALUE;
  }
  ::close(entry->second.fd);  // what is mapped stays
  state().physical.erase(entry);
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(
    CUdeviceptr* address, size_t bytes, size_t alignment, CUdeviceptr, unsigned long long) {
  begin("cuMemAddressReserve");
  if (is_refused("cuMemAddressReserve"))
    return CUDA_ERROR_OUT_OF_MEMORY;
  if (bytes % kGranularity != 0)
    return refuse(CUDA_ERROR_INVALID_VALUE, "cuMemAddressReserve", moe::concat(bytes, " bytes"));
  const size_t mapped_bytes = bytes + alignment;
  void* const data =
      ::mmap(nullptr, mapped_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED)
    return CUDA_ERROR_OUT_OF_MEMORY;
  const auto start = reinterpret_cast<uintptr_t>(data);
  *address = (start + alignment - 1) / alignment * alignment;
  const std::lock_guard lock(state().mutex);
  state().reserved[*address] = Reserved{bytes, {}};
  return CUDA_SUCCESS;
}

/// The same, cuMemAddressFree: the whole range, of which nothing is mapped.
CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  begin("cuMemAddressFree");
  const std::lock_guard lock(state().mutex);
  const auto entry = state().reserved.find(address);
  if (entry == state().reserved.end() || entry->second.bytes != bytes ||
      !entry->second.mapped.empty()) {
    state().violations.push_back("cuMemAddressFree: no such range, or it is mapped");
    return CUDA_ERROR_INVALID_VALUE;
  }
  ::munmap(reinterpret_cast<void*>(address), bytes);
  state().reserved.erase(entry);
  return CUDA_SUCCESS;
}

/// The same, cuMemMap: a part of a reserved range once, and nobody has access then.
CUresult cuMemMap(CUdeviceptr address,
                  size_t bytes,
                  size_t offset,
                  CUmemGenericAllocationHandle handle,
                  unsigned long long) {
  begin("cuMemMap");
  const std::lock_guard lock(state().mutex);
  Reserved* const range = range_of(address, bytes);
  const auto memory = state().physical.find(handle);
  if (range == nullptr || range->has_mapped(address, bytes) || memory == state().physical.end() ||
      offset != 0 || bytes > memory->second.bytes || address % kGranularity != 0) {
    state().violations.push_back("cuMemMap: no such range or memory");
    return CUDA_ERROR_INVALID_VALUE;
  }
  void* const data = ::mmap(reinterpret_cast<void*>(address),
                            bytes,
                            PROT_NONE,
                            MAP_SHARED | MAP_FIXED,
                            memory->second.fd,
                            0);
  if (data == MAP_FAILED)
    return CUDA_ERROR_OUT_OF_MEMORY;
  range->mapped[address] = bytes;
  state().memory[address] = Memory{Memory::kDevice, bytes, -1, {}, !memory->second.may_be_exported};
  return CUDA_SUCCESS;
}

/// The same, cuMemUnmap: of what was mapped at once. Its note says that it is synchronous for most
/// uses.
CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
  begin("cuMemUnmap");
  drain_all("cuMemUnmap", -1);
  const std::lock_guard lock(state().mutex);
  Reserved* const range = range_of(address, bytes);
  if (range == nullptr || !range->mapped.contains(address) || range->mapped[address] != bytes) {
    state().violations.push_back("cuMemUnmap: no such range");
    return CUDA_ERROR_INVALID_VALUE;
  }
  ::mmap(reinterpret_cast<void*>(address),
         bytes,
         PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE,
         -1,
         0);
  range->mapped.erase(address);
  state().memory.erase(address);
  return CUDA_SUCCESS;
}

/// The same, cuMemSetAccess, with the same note. That it needs a context is assumed.
CUresult cuMemSetAccess(CUdeviceptr address,
                        size_t bytes,
                        const CUmemAccessDesc* descriptions,
                        size_t count) {
  begin("cuMemSetAccess");
  if (!this_thread.has_context)
    return refuse(CUDA_ERROR_INVALID_CONTEXT, "cuMemSetAccess", "no context is current");
  drain_all("cuMemSetAccess", descriptions->location.id);
  const std::lock_guard lock(state().mutex);
  const auto entry = state().memory.find(address);
  if (entry == state().memory.end() || entry->second.bytes != bytes) {
    state().violations.push_back("cuMemSetAccess: nothing is mapped there");
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (entry->second.is_of_peer && !state().machine.has_p2p)
    return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  ::mprotect(reinterpret_cast<void*>(address), bytes, PROT_READ | PROT_WRITE);
  for (size_t i = 0; i < count; ++i)
    entry->second.devices.insert(descriptions[i].location.id);
  return CUDA_SUCCESS;
}

CUresult cuMemExportToShareableHandle(void* shareable,
                                      CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type,
                                      unsigned long long) {
  begin("cuMemExportToShareableHandle");
  const std::lock_guard lock(state().mutex);
  const auto entry = state().physical.find(handle);
  if (entry == state().physical.end() || !entry->second.may_be_exported ||
      type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
    state().violations.push_back("cuMemExportToShareableHandle: memory was not made for that");
    return CUDA_ERROR_INVALID_VALUE;
  }
  *static_cast<int*>(shareable) = ::dup(entry->second.fd);
  return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle,
                                        void* shareable,
                                        CUmemAllocationHandleType type) {
  begin("cuMemImportFromShareableHandle");
  if (is_refused("cuMemImportFromShareableHandle"))
    return CUDA_ERROR_NOT_SUPPORTED;
  const int fd = ::dup(static_cast<int>(reinterpret_cast<intptr_t>(shareable)));
  if (fd < 0 || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
    return refuse(
        CUDA_ERROR_INVALID_VALUE, "cuMemImportFromShareableHandle", "no descriptor of memory");
  const auto bytes = static_cast<size_t>(::lseek(fd, 0, SEEK_END));
  const std::lock_guard lock(state().mutex);
  *handle = state().next_physical++;
  state().physical[*handle] = Physical{fd, bytes, false};
  return CUDA_SUCCESS;
}

}  // extern "C"
