#pragma once

#include <cstdint>
#include <vector>

#include "cpu/strided_copy.h"

namespace moe::ops {

/// Pieces that are copied one after another, and places in that order.
///
/// A position counts bytes as they lie packed, each piece from a multiple of 64: parts of a stream
/// can be copied in any order and by any thread.
class CopyStream {
 public:
  /// @p src and @p dst have @p bytes > 0 logical bytes; one of them is unused where parts are
  /// packed or unpacked. Shapes must outlive the stream, as must @p checksum, which becomes the sum
  /// of the blocks of the source's checksum where they are asked for; null where they never are.
  void add(const cpu::Place& src, const cpu::Place& dst, int64_t bytes, uint64_t* checksum);

  int64_t end() const { return end_; }

  /// Copies what lies between two positions from its source to its destination.
  void copy(const cpu::RowKernels& kernels,
            int64_t begin,
            int64_t end,
            cpu::StoreMode mode,
            bool with_checksums) const;

  /// Copies sources between two positions to @p slot, which holds them from @p begin on.
  void pack(const cpu::RowKernels& kernels,
            int64_t begin,
            int64_t end,
            std::byte* slot,
            bool with_checksums) const;

  /// Copies @p slot to the destinations between two positions.
  void unpack(const cpu::RowKernels& kernels,
              int64_t begin,
              int64_t end,
              const std::byte* slot,
              cpu::StoreMode mode) const;

 private:
  struct Piece {
    cpu::Place src;
    cpu::Place dst;
    int64_t bytes;
    int64_t position;
    uint64_t* checksum;
  };

  static void copy_piece(const cpu::RowKernels& kernels,
                         const Piece& piece,
                         int64_t from,
                         const cpu::Place& dst,
                         int64_t dst_from,
                         int64_t bytes,
                         cpu::StoreMode mode,
                         bool with_checksums);

  template <typename Copy>
  void for_parts(int64_t begin, int64_t end, Copy&& copy) const;

  std::vector<Piece> pieces_;
  int64_t end_ = 0;
};

}  // namespace moe::ops
