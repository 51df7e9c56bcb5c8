#pragma once

#include <cstdint>

#include "device/launch.h"
#include "layout/strided.h"

namespace moe::kernels {

/// One copy of a batch. Both sides hold the same number of bytes; runs may be cut differently.
struct StridedCopy {
  const std::byte* source;
  std::byte* target;
  layout::StridedBytes source_shape;
  layout::StridedBytes target_shape;
};

struct StridedCopiesParams {
  const StridedCopy* copies = nullptr;   ///< device [num_copies]
  const int64_t* first_piece = nullptr;  ///< device [num_copies + 1]: pieces before each copy
  int64_t num_copies = 0;
  int64_t piece_bytes = 0;  ///< bytes of a copy that one warp moves at a time; a multiple of 16
  int32_t is_plain = 0;     ///< loads and stores instead of bulk copies
};

/// Pieces of a copy of @p bytes; none where there is nothing to move.
inline int64_t num_pieces(int64_t bytes, int64_t piece_bytes) {
  return (bytes + piece_bytes - 1) / piece_bytes;
}

/// Threads of a block, at most.
constexpr int kMaxStridedCopyThreads = 256;

/// Moves every copy, pieces shared out over all blocks. Local to the stream: the caller that gave
/// the addresses orders it after what wrote the sources.
void launch_strided_copies(const device::Launch& launch, const StridedCopiesParams& params);
size_t strided_copies_shared_bytes(const StridedCopiesParams& params, int num_threads);

}  // namespace moe::kernels
