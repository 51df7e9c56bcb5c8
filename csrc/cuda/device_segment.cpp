#include "cuda/device_segment.h"

#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <set>
#include <utility>

#include "core/error.h"
#include "cuda/driver.h"
#include "heap/fork_guard.h"

namespace moe::cuda {
namespace {

CUmemAllocationProp memory_of(int device_idx, CUmemAllocationHandleType type) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = type;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device_idx;
  return properties;
}

// No device has so much memory, and addresses cost nothing.
constexpr uint64_t kRangeBytes = uint64_t{1} << 39;

/// Physical memory mapped in a range of addresses.
class MappedSegment final : public DeviceSegment {
 public:
  /// @param memory  Adopted.
  MappedSegment(int device_idx,
                CUmemGenericAllocationHandle memory,
                uint64_t bytes,
                std::shared_ptr<AddressRange> range,
                uint64_t offset)
      : device_idx_(device_idx), memory_(memory) {
    try {
      MOE_CHECK(range != nullptr, "a segment came before the first of its range");
      range_ = std::move(range);
      MOE_CHECK(offset <= range_->bytes() && bytes <= range_->bytes() - offset,
                "a segment of ",
                bytes,
                " bytes at ",
                offset,
                " of a range of ",
                range_->bytes());
      data_ = range_->data() + offset;
      bytes_ = bytes;
      check_driver(driver().mem_map(reinterpret_cast<CUdeviceptr>(data_), bytes, 0, memory, 0),
                   concat("mapping ", bytes, " bytes of device memory"));
      is_mapped_ = true;
    } catch (...) {
      release();
      throw;
    }
  }
  ~MappedSegment() override {
    if (!origin_.is_forked_child())  // where the driver has no context
      release();
  }

  void allow(int device_idx) override {
    const std::lock_guard lock(mutex_);
    if (allowed_.count(device_idx) != 0)
      return;
    CUmemAccessDesc access{};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device_idx;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    const CurrentDevice current(device_idx);  // the mesh's thread may have called nothing yet
    const RelaxedCapture relaxed;
    check_driver(
        driver().mem_set_access(reinterpret_cast<CUdeviceptr>(data_), bytes_, &access, 1),
        concat("letting device ", device_idx, " reach ", bytes_, " bytes of device memory"));
    allowed_.insert(device_idx);
  }

 private:
  /// At exit the driver answers with an error; the memory ends with the process.
  void release() noexcept {
    try {
      const CurrentDevice current(device_idx_);
      const RelaxedCapture relaxed;
      if (is_mapped_)
        driver().mem_unmap(reinterpret_cast<CUdeviceptr>(data_), bytes_);
      driver().mem_release(memory_);
    } catch (const CudaError&) {
    }
  }

  heap::ForkOrigin origin_;
  int device_idx_;  ///< through which this process reaches the memory
  CUmemGenericAllocationHandle memory_;
  bool is_mapped_ = false;
  std::mutex mutex_;
  std::set<int> allowed_;
};

/// Memory of cudaMalloc: this process's own, or opened by its IPC handle for one device.
class IpcSegment final : public DeviceSegment {
 public:
  IpcSegment(int device_idx, void* data, uint64_t bytes, bool is_own)
      : device_idx_(device_idx), is_own_(is_own) {
    data_ = static_cast<std::byte*>(data);
    bytes_ = bytes;
  }
  ~IpcSegment() override {
    if (origin_.is_forked_child())
      return;
    try {
      const CurrentDevice current(device_idx_);  // each device has a mapping of its own
      const RelaxedCapture relaxed;
      if (is_own_)
        cudaFree(data_);
      else
        cudaIpcCloseMemHandle(data_);
    } catch (const CudaError&) {  // as in MappedSegment::release()
    }
  }

  void allow(int device_idx) override {
    if (device_idx == device_idx_)
      return;
    MOE_CHECK(is_own_,
              "a peer's memory that was opened for device ",
              device_idx_,
              " is not reached from device ",
              device_idx);
    const CurrentDevice current(device_idx);
    const cudaError_t code = cudaDeviceEnablePeerAccess(device_idx_, 0);
    if (code == cudaErrorPeerAccessAlreadyEnabled)
      cudaGetLastError();
    else
      device::check_cuda(code, "letting a device reach another's memory");
  }

 private:
  heap::ForkOrigin origin_;
  int device_idx_;  ///< device that holds the memory, or for which this process opened it
  bool is_own_;
};

bool is_supported(int device_idx, Sharing sharing) {
  if (sharing == Sharing::kIpc)
    return true;
  const CUdevice_attribute needed =
      sharing == Sharing::kFileDescriptor
          ? CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
          : CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED;
  return device_attribute(device_idx, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) !=
             0 &&
         device_attribute(device_idx, needed) != 0;
}

[[noreturn]] void throw_out_of_memory(int device_idx, uint64_t bytes) {
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  cudaMemGetInfo(&free_bytes, &total_bytes);
  throw CapacityError(concat("device ",
                             device_idx,
                             " cannot give a segment of ",
                             bytes,
                             " bytes: ",
                             free_bytes,
                             " of its ",
                             total_bytes,
                             " are free"),
                      bytes,
                      free_bytes);
}

NewDeviceSegment create_mapped(int device_idx,
                               uint64_t bytes,
                               std::shared_ptr<AddressRange> range,
                               uint64_t offset,
                               Sharing sharing) {
  const bool by_fd = sharing == Sharing::kFileDescriptor;
  const CUmemAllocationHandleType type =
      by_fd ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_FABRIC;
  NewDeviceSegment made;
  // Addresses first: memory without any would be lost.
  if (range == nullptr) {
    made.description.begins_range = 1;
    range = AddressRange::reserve(device_idx, bytes);
    // Room at both ends.
    offset = (range->bytes() - bytes) / 2 / segment_granularity(device_idx) *
             segment_granularity(device_idx);
  }
  const CUmemAllocationProp properties = memory_of(device_idx, type);
  CUmemGenericAllocationHandle memory{};
  const CUresult code = driver().mem_create(&memory, bytes, &properties, 0);
  if (code == CUDA_ERROR_OUT_OF_MEMORY)
    throw_out_of_memory(device_idx, bytes);
  check_driver(code, concat("allocating ", bytes, " bytes on device ", device_idx));
  made.description.offset = offset;
  made.segment =
      std::make_shared<MappedSegment>(device_idx, memory, bytes, std::move(range), offset);
  made.segment->allow(device_idx);
  made.description.sharing = sharing;
  if (by_fd) {
    int fd = -1;
    CUresult exported = CUDA_SUCCESS;
    made.fd = std::make_shared<heap::OwnedFd>(heap::OwnedFd::open([&] {
      exported = driver().mem_export(&fd, memory, type, 0);
      if (exported != CUDA_SUCCESS)
        return -1;
      ::fcntl(fd, F_SETFD, FD_CLOEXEC);
      return fd;
    }));
    check_driver(exported, "exporting device memory as a descriptor");
  } else {
    static_assert(sizeof(CUmemFabricHandle) == sizeof made.description.handle);
    check_driver(driver().mem_export(made.description.handle.data(), memory, type, 0),
                 "exporting device memory as a fabric handle");
  }
  return made;
}

NewDeviceSegment create_for_ipc(int device_idx, uint64_t bytes) {
  void* data = nullptr;
  const cudaError_t code = cudaMalloc(&data, bytes);
  if (code == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    throw_out_of_memory(device_idx, bytes);
  }
  if (code != cudaSuccess)
    device::throw_cuda_error(code, concat("allocating ", bytes, " bytes on device ", device_idx));
  NewDeviceSegment made;
  made.segment = std::make_shared<IpcSegment>(device_idx, data, bytes, true);
  made.description.sharing = Sharing::kIpc;
  cudaIpcMemHandle_t handle{};
  device::check_cuda(cudaIpcGetMemHandle(&handle, data), "exporting device memory for IPC");
  static_assert(sizeof handle == sizeof made.description.handle);
  std::memcpy(made.description.handle.data(), &handle, sizeof handle);
  return made;
}

std::shared_ptr<DeviceSegment> open_segment(const SegmentDescription& description,
                                            int fd,
                                            uint64_t bytes,
                                            int device_idx,
                                            std::shared_ptr<AddressRange> range) {
  const CurrentDevice current(device_idx);
  const RelaxedCapture relaxed;
  if (description.sharing == Sharing::kIpc) {
    cudaIpcMemHandle_t handle{};
    std::memcpy(&handle, description.handle.data(), sizeof handle);
    void* data = nullptr;
    device::check_cuda(cudaIpcOpenMemHandle(&data, handle, cudaIpcMemLazyEnablePeerAccess),
                       "opening a peer's memory by its IPC handle");
    return std::make_shared<IpcSegment>(device_idx, data, bytes, false);
  }
  if (description.begins_range != 0)
    range = AddressRange::reserve(device_idx, description.offset + bytes);
  CUmemGenericAllocationHandle memory{};
  if (description.sharing == Sharing::kFileDescriptor) {
    MOE_CHECK(fd >= 0, "a segment shared by descriptor came without one");
    check_driver(driver().mem_import(&memory,
                                     reinterpret_cast<void*>(static_cast<intptr_t>(fd)),
                                     CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
                 "opening a peer's memory by its descriptor");
  } else {
    MOE_CHECK(description.sharing == Sharing::kFabric,
              "unknown way to share memory: ",
              static_cast<uint32_t>(description.sharing));
    auto handle = description.handle;
    check_driver(driver().mem_import(&memory, handle.data(), CU_MEM_HANDLE_TYPE_FABRIC),
                 "opening a peer's memory by its fabric handle");
  }
  auto segment = std::make_shared<MappedSegment>(
      device_idx, memory, bytes, std::move(range), description.offset);
  segment->allow(device_idx);
  return segment;
}

}  // namespace

AddressRange::AddressRange(int device_idx, uint64_t bytes)
    : device_idx_(device_idx), bytes_(bytes) {
  CUdeviceptr address = 0;
  check_driver(driver().mem_address_reserve(&address, bytes, segment_granularity(device_idx), 0, 0),
               concat("reserving ", bytes, " bytes of addresses"));
  data_ = reinterpret_cast<std::byte*>(address);
}

AddressRange::~AddressRange() {
  if (origin_.is_forked_child())  // where the driver has no context
    return;
  try {
    const CurrentDevice current(device_idx_);
    const RelaxedCapture relaxed;
    driver().mem_address_free(reinterpret_cast<CUdeviceptr>(data_), bytes_);
  } catch (const CudaError&) {  // as in MappedSegment::release()
  }
}

std::shared_ptr<AddressRange> AddressRange::reserve(int device_idx, uint64_t least_bytes) {
  try {
    return std::shared_ptr<AddressRange>(
        new AddressRange(device_idx, std::max(kRangeBytes, least_bytes)));
  } catch (const CudaError&) {  // a process may be allowed fewer
    return std::shared_ptr<AddressRange>(new AddressRange(device_idx, least_bytes));
  }
}

const char* sharing_name(Sharing sharing) {
  switch (sharing) {
    case Sharing::kFileDescriptor:
      return "descriptor";
    case Sharing::kFabric:
      return "fabric";
    case Sharing::kIpc:
      return "ipc";
  }
  return "unknown";
}

std::string SegmentDescription::to_bytes() const {
  return {reinterpret_cast<const char*>(this), sizeof *this};
}

SegmentDescription SegmentDescription::from_bytes(const std::string& bytes) {
  SegmentDescription description;
  MOE_CHECK(bytes.size() == sizeof description,
            "a segment's description must have ",
            sizeof description,
            " bytes, got ",
            bytes.size());
  std::memcpy(&description, bytes.data(), sizeof description);
  return description;
}

uint64_t segment_granularity(int device_idx) {
  constexpr uint64_t kIpcBytes = uint64_t{2} << 20;  // what cudaMalloc rounds to
  if (!is_supported(device_idx, Sharing::kFileDescriptor) &&
      !is_supported(device_idx, Sharing::kFabric))
    return kIpcBytes;
  const CUmemAllocationProp properties =
      memory_of(device_idx, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  size_t granularity = 0;
  check_driver(driver().mem_get_allocation_granularity(
                   &granularity, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
               "asking how device memory is cut");
  return std::max<uint64_t>(granularity, kIpcBytes);
}

NewDeviceSegment create_device_segment(int device_idx,
                                       uint64_t bytes,
                                       const std::shared_ptr<AddressRange>& range,
                                       uint64_t offset) {
  const CurrentDevice current(device_idx);
  const RelaxedCapture relaxed;
  for (const Sharing sharing : {Sharing::kFileDescriptor, Sharing::kFabric}) {
    if (!is_supported(device_idx, sharing))
      continue;
    try {
      return create_mapped(device_idx, bytes, range, offset, sharing);
    } catch (const CudaError&) {
      // Containers and virtual machines forbid one or the other. What is said of the last way
      // counts.
    }
  }
  return create_for_ipc(device_idx, bytes);
}

std::shared_ptr<DeviceSegment> open_device_segment(const SegmentDescription& description,
                                                   int fd,
                                                   uint64_t bytes,
                                                   int device_idx,
                                                   std::shared_ptr<AddressRange> range) {
  try {
    return open_segment(description, fd, bytes, device_idx, std::move(range));
  } catch (const CudaError& error) {
    throw CudaError(
        concat(error.what(),
               " (memory of another GPU is reached by peer-to-peer access, P2P, which NVLink or "
               "PCIe and the driver must offer: nvidia-smi topo -p2p r tells; backend=\"host\" "
               "needs none)"),
        error.code());
  }
}

}  // namespace moe::cuda
