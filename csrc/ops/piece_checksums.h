#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ops/prepared_copies.h"

namespace moe::ops {

/// Checksums of pieces of this rank's tensors and of their blocks, computed as often as asked for,
/// and copies of the blocks that changed.
class PieceChecksums {
 public:
  /// @param owner  Keeps the tensors.
  PieceChecksums(std::vector<CopyItem> pieces, std::shared_ptr<void> owner);

  /// Checksums of all pieces, in their order. One that some of @p sent has hashed where it lies, as
  /// it was sent, is not read again.
  /// @param num_threads  Threads that read, the caller included.
  std::vector<uint64_t> compute(const std::vector<std::shared_ptr<PreparedCopies>>& sent,
                                int num_threads) const;

  /// Number of blocks of @p block_bytes of a piece, the last of which may be shorter.
  int64_t num_blocks(size_t piece_idx, int64_t block_bytes) const {
    return (pieces_[piece_idx].shape.bytes + block_bytes - 1) / block_bytes;
  }
  size_t num_pieces() const { return pieces_.size(); }

  /// For every block of every piece, in order, the part of the piece's checksum that is of this
  /// block: parts of a piece add up to what cpu::finish_checksum() takes.
  /// @param block_bytes  A multiple of cpu::kChecksumBlockBytes.
  /// @param wanted       [blocks], the blocks to read; null for all. Others keep what is there.
  /// @param sums         [blocks]
  void compute_blocks(int64_t block_bytes,
                      const uint8_t* wanted,
                      int num_threads,
                      uint64_t* sums) const;

  /// The checksum of each piece, of what compute_blocks() gave for all blocks.
  std::vector<uint64_t> of_blocks(int64_t block_bytes, const uint64_t* sums) const;

  /// Copies blocks of pieces [@p first, @p end), one behind the other, to @p packed or from there.
  /// @param wanted  Mask of the blocks of these pieces, in order.
  /// @param packed_bytes  Bytes of all of them. @throws InvalidArgument
  void move_blocks(size_t first,
                   size_t end,
                   int64_t block_bytes,
                   const uint8_t* wanted,
                   std::byte* packed,
                   int64_t packed_bytes,
                   bool is_packing,
                   int num_threads) const;

 private:
  /// Calls @p read(piece_idx, from, bytes) for the bytes of @p to_read, split between threads in
  /// multiples of @p block_bytes.
  template <typename Read>
  void for_blocks(const std::vector<size_t>& to_read,
                  int64_t block_bytes,
                  int num_threads,
                  Read&& read) const;

  std::vector<CopyItem> pieces_;
  std::shared_ptr<void> owner_;
  int64_t bytes_ = 0;  ///< bytes of all pieces
};

}  // namespace moe::ops
