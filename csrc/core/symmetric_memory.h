#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace moe {

/// A place in the heap of one rank, as it travels to peers. Never an address.
///
/// Byte map (24 bytes):
///   [0, 4)    segment_idx, of the owner's list of segments
///   [4, 8)    zero
///   [8, 16)   offset into the segment
///   [16, 24)  bytes offered from there
struct Offer {
  uint32_t segment_idx = 0;
  uint32_t reserved = 0;
  uint64_t offset = 0;
  uint64_t bytes = 0;
};
static_assert(sizeof(Offer) == 24);

/// Bytes of this rank's heap that belong to the holder of the window.
///
/// The destructor gives them back to the heap. It takes no lock that is held across a system call,
/// talks to nobody and may run on any thread, also while the heap's owner is being destroyed.
class Window {
 public:
  virtual ~Window() = default;

  std::byte* data() const { return data_; }
  uint64_t bytes() const { return offer_.bytes; }
  const Offer& offer() const { return offer_; }

  /// Gives the tail behind the first @p bytes back to the heap.
  virtual void shrink(uint64_t bytes) = 0;

  /// From now on the destructor keeps the bytes aside until `SymmetricMemory::end_quarantine()`: a
  /// peer that has not heard of an aborted operation may still write there.
  virtual void quarantine() = 0;

 protected:
  std::byte* data_ = nullptr;
  Offer offer_;
};

/// Ordinary memory of this process whose whole pages are pages of the heap as well.
///
/// Bytes before the first whole page and behind the last have a place in the heap, too, and are
/// copied between both by begin_writes() and end_writes().
class SharedPages {
 public:
  virtual ~SharedPages() = default;

  /// Place in the heap of an address of the memory; null once it is shared no more.
  virtual std::byte* in_heap(const std::byte* address) const = 0;

  /// Keeps the place in the heap. Null once the memory is shared no more.
  virtual std::shared_ptr<Window> window() const = 0;

  /// From now until end_writes() peers may write to the memory's place in the heap, and this rank
  /// through in_heap() alone. @return Whether the memory is still shared; if not, nothing begins.
  virtual bool begin_writes() = 0;

  /// Has the memory show what was written, unless @p is_failed.
  virtual void end_writes(bool is_failed) = 0;
};

/// Memory that every rank of one communicator tree can address; what operations need of a heap.
///
/// Thread-safe. Ranks are those of the widest communicator.
class SymmetricMemory {
 public:
  virtual ~SymmetricMemory() = default;

  /// @param bytes  Any size; 0 gives a window without memory.
  /// @return Memory aligned to 4096 bytes (64 when smaller than 4096), faulted in, contents
  ///   undefined. Recently freed memory first; a new segment is added when nothing fits.
  /// @throws CapacityError  the byte limit or the machine does not allow it.
  virtual std::shared_ptr<Window> allocate(uint64_t bytes) = 0;

  /// The largest window not above @p most_bytes that is free without growing; empty if none.
  virtual std::shared_ptr<Window> allocate_free(uint64_t most_bytes) = 0;

  /// Address of a peer's (or this rank's own) place, or null while the peer's announcement of that
  /// segment has not arrived yet. Never blocks.
  virtual std::byte* try_resolve(int rank_idx, const Offer& offer) = 0;

  /// Returns whether [address, address + bytes) lies whole in this rank's own heap; if so sets @p
  /// offer.
  virtual bool find(const void* address, uint64_t bytes, Offer* offer) const = 0;

  /// The shared pages that hold [address, address + bytes) of this process's ordinary memory; null
  /// where there are none.
  virtual std::shared_ptr<SharedPages> find_shared(const void* /*address*/,
                                                   uint64_t /*bytes*/) const {
    return nullptr;
  }

  /// Grows whenever memory becomes shared.
  virtual uint64_t num_shared() const { return 0; }

  /// Bytes that could still be had, as far as the byte limit goes: free ones plus room for growth.
  virtual uint64_t available_bytes() const = 0;

  /// A window of so many bytes can be had for certain, as far as the byte limit goes.
  virtual uint64_t largest_available_bytes() const = 0;

  /// Frees what quarantined windows left behind.
  virtual void end_quarantine() = 0;
};

}  // namespace moe
