#include "ops/copy_stream.h"

#include <algorithm>
#include <atomic>

#include "core/math.h"

namespace moe::ops {

namespace {

constexpr int64_t kLineBytes = 64;

}  // namespace

void CopyStream::add(const cpu::Place& src,
                     const cpu::Place& dst,
                     int64_t bytes,
                     uint64_t* checksum) {
  const int64_t position = round_up(end_, kLineBytes);
  pieces_.push_back({src, dst, bytes, position, checksum});
  end_ = position + bytes;
}

/// Calls @p copy(piece, from, bytes) for what of every piece lies between two positions.
template <typename Copy>
void CopyStream::for_parts(int64_t begin, int64_t end, Copy&& copy) const {
  auto piece =
      std::upper_bound(pieces_.begin(), pieces_.end(), begin, [](int64_t at, const Piece& entry) {
        return at < entry.position;
      });
  if (piece != pieces_.begin())
    --piece;
  for (; piece != pieces_.end() && piece->position < end; ++piece) {
    const int64_t from = std::max<int64_t>(0, begin - piece->position);
    const int64_t bytes = std::min(piece->bytes, end - piece->position) - from;
    if (bytes > 0)
      copy(*piece, from, bytes);
  }
}

void CopyStream::copy_piece(const cpu::RowKernels& kernels,
                            const Piece& piece,
                            int64_t from,
                            const cpu::Place& dst,
                            int64_t dst_from,
                            int64_t bytes,
                            cpu::StoreMode mode,
                            bool with_checksums) {
  if (!with_checksums) {
    cpu::copy_strided(kernels, piece.src, from, dst, dst_from, bytes, mode);
    return;
  }
  const uint64_t blocks =
      cpu::copy_with_checksum(kernels, piece.src, piece.bytes, from, dst, dst_from, bytes, mode);
  // Threads copy parts of one piece.
  std::atomic_ref<uint64_t>(*piece.checksum).fetch_add(blocks, std::memory_order_relaxed);
}

void CopyStream::copy(const cpu::RowKernels& kernels,
                      int64_t begin,
                      int64_t end,
                      cpu::StoreMode mode,
                      bool with_checksums) const {
  for_parts(begin, end, [&](const Piece& piece, int64_t from, int64_t bytes) {
    copy_piece(kernels, piece, from, piece.dst, from, bytes, mode, with_checksums);
  });
}

void CopyStream::pack(const cpu::RowKernels& kernels,
                      int64_t begin,
                      int64_t end,
                      std::byte* slot,
                      bool with_checksums) const {
  for_parts(begin, end, [&](const Piece& piece, int64_t from, int64_t bytes) {
    const cpu::Place packed{slot + (piece.position + from - begin), nullptr};
    copy_piece(kernels, piece, from, packed, 0, bytes, cpu::StoreMode::kCached, with_checksums);
  });
}

void CopyStream::unpack(const cpu::RowKernels& kernels,
                        int64_t begin,
                        int64_t end,
                        const std::byte* slot,
                        cpu::StoreMode mode) const {
  for_parts(begin, end, [&](const Piece& piece, int64_t from, int64_t bytes) {
    // A place that is only read.
    const cpu::Place packed{const_cast<std::byte*>(slot) + (piece.position + from - begin),
                            nullptr};
    cpu::copy_strided(kernels, packed, 0, piece.dst, from, bytes, mode);
  });
}

}  // namespace moe::ops
