#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/symmetric_memory.h"

namespace moe::runtime {

/// Windows of one size that a buffer has from its making on, for rows that no count decides the
/// number of. Whoever takes one uses it in the order of the buffer's stream, so that it is free
/// again as soon as nobody holds it, whatever the device is still to do.
///
/// One thread takes windows; any thread may drop one. What was taken outlives the ring.
class WindowRing {
 public:
  WindowRing() = default;
  /// @throws CapacityError  they do not fit; its numbers are those of all windows.
  WindowRing(SymmetricMemory& memory, int num_windows, uint64_t bytes);

  /// The first @p bytes of a window that nobody holds; null where all are held or smaller.
  std::shared_ptr<Window> take(uint64_t bytes);
  /// @p window belonged to one operation, whose work is in the stream: others may take it, though
  /// it is still held to be set aside should the operation fail. Nothing for windows of elsewhere.
  static void end_use(Window& window);
  /// Returns whether @p window is of such a ring.
  static bool owns(const Window& window);
  /// Holder of the memory of @p window, set aside for others to take.
  static std::shared_ptr<Window> memory_of(std::shared_ptr<Window> window);

  /// Bytes of each window; 0 where there is none.
  uint64_t bytes() const;
  /// Offer of the window that peers hear of last; nothing where there is none.
  Offer last_offer() const;
  /// Keeps none any more.
  void clear() { slots_.clear(); }

 private:
  struct Slot;
  class Taken;

  std::vector<std::shared_ptr<Slot>> slots_;
};

}  // namespace moe::runtime
