#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "heap/fork_guard.h"
#include "heap/owned_fd.h"
#include "heap/wire.h"

namespace moe::cuda {

/// Way of a device's memory to another process.
enum class Sharing : uint32_t {
  kFileDescriptor = 1,  ///< cuMemCreate, a descriptor passed over the socket
  kFabric = 2,          ///< cuMemCreate, a handle that is valid in the whole NVLink domain
  kIpc = 3,             ///< cudaMalloc, cudaIpcMemHandle_t
};

const char* sharing_name(Sharing sharing);

/// Description by which a peer opens a segment; the payload of its announcement.
///
/// Byte map (128 bytes):
///   [0, 4)     Sharing
///   [4, 8)     1 for the first of a range of addresses
///   [8, 24)    process token of the owner: ranks of that process share the pointer
///   [24, 40)   token of the owner's heap, which with the segment's number names the segment
///   [40, 56)   UUID of the device
///   [56, 120)  fabric or IPC handle; zero for a descriptor
///   [120, 128) where it lies in its range
struct SegmentDescription {
  Sharing sharing = Sharing::kFileDescriptor;
  uint32_t begins_range = 0;
  heap::Token process_token{};
  heap::Token heap_token{};
  std::array<uint8_t, 16> device_uuid{};
  std::array<uint8_t, 64> handle{};
  uint64_t offset = 0;

  std::string to_bytes() const;
  /// @throws InvalidArgument  another size than a description has.
  static SegmentDescription from_bytes(const std::string& bytes);
};
static_assert(sizeof(SegmentDescription) == 128);

/// Addresses for segments that lie beside each other, so that one window may span several.
class AddressRange {
 public:
  /// Far more than any device has, or @p least_bytes where there are not so many.
  static std::shared_ptr<AddressRange> reserve(int device_idx, uint64_t least_bytes);
  ~AddressRange();
  AddressRange(const AddressRange&) = delete;
  AddressRange& operator=(const AddressRange&) = delete;

  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }

 private:
  AddressRange(int device_idx, uint64_t bytes);

  heap::ForkOrigin origin_;
  int device_idx_;
  std::byte* data_ = nullptr;
  uint64_t bytes_;
};

/// Memory of a device mapped into this process, once for all ranks in it; a peer's that is shared
/// by IPC, once for those of a device.
class DeviceSegment {
 public:
  virtual ~DeviceSegment() = default;
  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  /// That it lies in; null where it has addresses of its own.
  const std::shared_ptr<AddressRange>& range() const { return range_; }
  /// Begin of the addresses that it and the segments before it share.
  std::byte* base() const { return range_ == nullptr ? data_ : range_->data(); }
  /// Bytes from there to its start, and to its end.
  uint64_t offset() const { return static_cast<uint64_t>(data_ - base()); }
  uint64_t end() const { return offset() + bytes_; }

  /// Lets kernels of a device of this process reach it. Idempotent.
  /// @throws CudaError        the devices do not reach each other.
  /// @throws InvalidArgument  it was opened by IPC for another one.
  virtual void allow(int device_idx) = 0;

 protected:
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
  std::shared_ptr<AddressRange> range_;
};

/// Memory of this rank, before it is announced.
struct NewDeviceSegment {
  std::shared_ptr<DeviceSegment> segment;
  SegmentDescription description;
  std::shared_ptr<heap::OwnedFd> fd;  ///< for peers; null unless the sharing is by descriptor
};

/// Bytes of which segment sizes on a device are multiples.
uint64_t segment_granularity(int device_idx);

/// Allocates device memory that peers can open, in the first way that works on this machine.
/// @param bytes   A multiple of segment_granularity().
/// @param range   Range that the memory is to lie in, if that way works; null for a new one.
/// @param offset  Offset in @p range.
/// @throws CapacityError  the device has no such memory.
/// @throws CudaError
NewDeviceSegment create_device_segment(int device_idx,
                                       uint64_t bytes,
                                       const std::shared_ptr<AddressRange>& range,
                                       uint64_t offset);

/// Opens memory that another process announced, for kernels of @p device_idx.
/// @param fd     Descriptor that came along; -1 for none.
/// @param range  Range of the segments before it; null if it begins one.
/// @throws CudaError, InvalidArgument
std::shared_ptr<DeviceSegment> open_device_segment(const SegmentDescription& description,
                                                   int fd,
                                                   uint64_t bytes,
                                                   int device_idx,
                                                   std::shared_ptr<AddressRange> range);

}  // namespace moe::cuda
