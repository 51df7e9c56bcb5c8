#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/symmetric_memory.h"
#include "layout/strided.h"

namespace moe::layout {

/// Receive of a rank under one task id: sizes, and where a sender may write.
///
/// Byte map (80 bytes):
///   [0, 8)    task_id, told apart from others of the same sender
///   [8, 16)   bytes
///   [16, 32)  name of the dtype, zero-padded
///   [32, 56)  place, the span of the destination in the receiver's heap; meaningless for slots
///   [56, 64)  run_bytes of the destination
///   [64, 72)  first_dim, index of its first dimension in the table's list
///   [72, 76)  num_dims
///   [76, 80)  is_in_heap: 1 where the sender writes in place, 0 where it uses slots
struct ReceiveEntry {
  static constexpr int kNameBytes = 16;

  int64_t task_id;
  int64_t bytes;
  char dtype[kNameBytes];
  Offer place;
  int64_t run_bytes;
  int64_t first_dim;
  int32_t num_dims;
  uint32_t is_in_heap;
};
static_assert(sizeof(ReceiveEntry) == 80);

/// One dimension of a destination: [0, 8) size; [8, 16) stride in bytes.
struct TableDim {
  int64_t size;
  int64_t stride;
};
static_assert(sizeof(TableDim) == 16);

/// Everything a rank receives in one batched copy, in its own heap; senders read it in place.
///
/// Byte map, N entries and D dimensions:
///   [0, 8) N; [8, 16) D; rest of 64 unused
///   N entries, those of one sender adjacent and in ascending order of their task ids
///   D dimensions
///   N uint32, written by senders: indices, in a sender's share, of the entries whose bytes come
///     through slots, in their order there; those of its first slots, then those of its next
class ReceiveTable {
 public:
  ReceiveTable() = default;
  explicit ReceiveTable(std::byte* base) : base_(base) {}

  static int64_t bytes(int64_t num_entries, int64_t num_dims) {
    return kHeaderBytes + num_entries * static_cast<int64_t>(sizeof(ReceiveEntry) + 4) +
           num_dims * static_cast<int64_t>(sizeof(TableDim));
  }
  void set_counts(int64_t num_entries, int64_t num_dims) const {
    std::memset(base_, 0, kHeaderBytes);
    std::memcpy(base_, &num_entries, sizeof(num_entries));
    std::memcpy(base_ + 8, &num_dims, sizeof(num_dims));
  }
  int64_t num_entries() const { return count(0); }
  int64_t num_dims() const { return count(8); }

  ReceiveEntry* entries() const { return reinterpret_cast<ReceiveEntry*>(base_ + kHeaderBytes); }
  TableDim* dims() const { return reinterpret_cast<TableDim*>(entries() + num_entries()); }
  uint32_t* order() const { return reinterpret_cast<uint32_t*>(dims() + num_dims()); }

 private:
  static constexpr int64_t kHeaderBytes = 64;

  int64_t count(int64_t offset) const {
    int64_t value = 0;
    std::memcpy(&value, base_ + offset, sizeof(value));
    return value;
  }

  std::byte* base_ = nullptr;
};

}  // namespace moe::layout
