#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace moe::simt {

/// Network card of the module _simt: symmetric memory that puts of this process reach.
///
/// A put is made by a fiber of its own at some later moment, in another order than puts were
/// issued, its signal after its bytes. It has been made when the grids of its scheduler have ended.
/// Thread-safe; several ranks may live in one process.
class Nic {
 public:
  /// From now on [@p own, + @p bytes) stands for the same places of @p peers[pe], addresses here of
  /// that memory of every rank; null for ranks that nothing is put to.
  static void connect(std::byte* own, int64_t bytes, std::vector<std::byte*> peers);
  /// No kernel uses [@p own, ...) any more.
  static void disconnect(std::byte* own);
  /// Payload of puts from that memory so far, signals not counted.
  static uint64_t sent_bytes(const std::byte* own);
};

}  // namespace moe::simt
