#pragma once

#include <cstddef>

namespace moe::device {

/// The shape of a grid and the stream it is put into.
struct Launch {
  int num_blocks = 1;
  int num_threads = 32;     ///< per block, a multiple of 32
  size_t shared_bytes = 0;  ///< dynamic shared memory of a block
  void* stream = nullptr;   ///< a cudaStream_t, or a simt::Stream
};

}  // namespace moe::device
