#pragma once

#include <cstdint>

// Blocks and threads of kernels, where the configuration leaves them open.

namespace moe::runtime {

/// Shape of the launches of one buffer's kernels.
struct LaunchShape {
  int num_sms = 0;           ///< blocks that move rows; 0 for the device's own choice
  int num_threads = 0;       ///< threads of every block; 0 for what each kernel is made for
  int tokens_per_chunk = 0;  ///< tokens that one block counts at a time, at least; 0 for 64
};

/// Threads of a block of most kernels; `combine_launches` has those of combine.
inline constexpr int kUsualThreads = 256;

inline constexpr int kDefaultTokensPerChunk = 64;

/// Blocks of kernels that nobody waits for inside, and that count or add: as many as hide the
/// latency of memory.
inline constexpr int kBlocksPerSm = 4;

}  // namespace moe::runtime
