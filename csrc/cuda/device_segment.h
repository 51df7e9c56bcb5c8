#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "heap/owned_fd.h"
#include "heap/wire.h"

namespace moe::cuda {

/// How memory of a device reaches another process.
enum class Sharing : uint32_t {
  kFileDescriptor = 1,  ///< cuMemCreate, a descriptor passed over the socket
  kFabric = 2,          ///< cuMemCreate, a handle that is valid in the whole NVLink domain
  kIpc = 3,             ///< cudaMalloc, cudaIpcMemHandle_t
};

const char* sharing_name(Sharing sharing);

/// How a peer opens a segment; the payload of its announcement.
///
/// Byte map (128 bytes):
///   [0, 4)     Sharing
///   [4, 8)     zero
///   [8, 24)    process token of the owner: ranks of that process share the pointer
///   [24, 40)   token of the owner's heap, which with the segment's number names the segment
///   [40, 56)   UUID of the device
///   [56, 120)  fabric or IPC handle; zero for a descriptor
///   [120, 128) zero
struct SegmentDescription {
  Sharing sharing = Sharing::kFileDescriptor;
  uint32_t reserved = 0;
  heap::Token process_token{};
  heap::Token heap_token{};
  std::array<uint8_t, 16> device_uuid{};
  std::array<uint8_t, 64> handle{};
  uint64_t reserved_tail = 0;

  std::string to_bytes() const;
  /// @throws InvalidArgument  another size than a description has.
  static SegmentDescription from_bytes(const std::string& bytes);
};
static_assert(sizeof(SegmentDescription) == 128);

/// Memory of a device mapped into this process, once for all ranks in it.
class DeviceSegment {
 public:
  virtual ~DeviceSegment() = default;
  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }

  /// Lets kernels of a device of this process reach it. Idempotent.
  /// @throws CudaError  the devices do not reach each other.
  virtual void allow(int device_idx) = 0;

 protected:
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
};

/// Memory of this rank, before it is announced.
struct NewDeviceSegment {
  std::shared_ptr<DeviceSegment> segment;
  SegmentDescription description;
  std::shared_ptr<heap::OwnedFd> fd;  ///< for peers; null unless the sharing is by descriptor
};

/// What segment sizes on a device are multiples of.
uint64_t segment_granularity(int device_idx);

/// Allocates device memory that peers can open, in the first way that works on this machine.
/// @param bytes  A multiple of segment_granularity().
/// @throws CapacityError  the device has no such memory.
/// @throws CudaError
NewDeviceSegment create_device_segment(int device_idx, uint64_t bytes);

/// Opens memory that another process announced, for kernels of @p device_idx.
/// @param fd  What came along; -1 for nothing.
/// @throws CudaError, InvalidArgument
std::shared_ptr<DeviceSegment> open_device_segment(const SegmentDescription& description,
                                                   int fd,
                                                   uint64_t bytes,
                                                   int device_idx);

}  // namespace moe::cuda
