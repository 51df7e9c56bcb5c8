#include "ops/copy_stream.h"

#include <algorithm>

#include "core/math.h"

namespace moe::ops {

namespace {

constexpr int64_t kLineBytes = 64;

}  // namespace

void CopyStream::add(const cpu::Place& src, const cpu::Place& dst, int64_t bytes) {
  const int64_t position = round_up(end_, kLineBytes);
  pieces_.push_back({src, dst, bytes, position});
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

void CopyStream::copy(const cpu::RowKernels& kernels,
                      int64_t begin,
                      int64_t end,
                      cpu::StoreMode mode) const {
  for_parts(begin, end, [&](const Piece& piece, int64_t from, int64_t bytes) {
    cpu::copy_strided(kernels, piece.src, from, piece.dst, from, bytes, mode);
  });
}

void CopyStream::pack(const cpu::RowKernels& kernels,
                      int64_t begin,
                      int64_t end,
                      std::byte* slot) const {
  for_parts(begin, end, [&](const Piece& piece, int64_t from, int64_t bytes) {
    const cpu::Place packed{slot + (piece.position + from - begin), nullptr};
    cpu::copy_strided(kernels, piece.src, from, packed, 0, bytes, cpu::StoreMode::kCached);
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
