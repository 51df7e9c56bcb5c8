#pragma once

#include <cstddef>

namespace moe::device {

/// The shape of a grid and the stream it is put into.
struct Launch {
  int num_blocks = 1;
  int num_threads = 32;     ///< per block, a multiple of 32
  size_t shared_bytes = 0;  ///< dynamic shared memory of a block
  void* stream = nullptr;   ///< a cudaStream_t, or a simt::Stream
  /// The kernel may start once every block of the kernel ahead of it in its stream has called
  /// device::launch_dependents() or ended. Its first statement is device::await_prerequisites().
  bool is_dependent = false;
};

}  // namespace moe::device
