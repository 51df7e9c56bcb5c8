#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace moe::simt {

/// Symmetric memory of one rank, as the emulated network card knows it: a put names a place in it,
/// which stands for the same place of another rank. Known while this lives.
///
/// Thread-safe. Ranks that are threads of one process have one of their own each.
class SymmetricMapping {
 public:
  /// @param own    Of the rank whose kernels name places in it.
  /// @param by_pe  The memory of every PE, as this process has it mapped.
  SymmetricMapping(const std::byte* own, size_t bytes, std::vector<std::byte*> by_pe);
  ~SymmetricMapping();
  SymmetricMapping(const SymmetricMapping&) = delete;
  SymmetricMapping& operator=(const SymmetricMapping&) = delete;

  /// Where @p pe has [place, place + bytes).
  /// @throws EmulationError  it does not lie whole in symmetric memory, or there is no such PE.
  static std::byte* find(int pe, const void* place, size_t bytes);

 private:
  const std::byte* own_;
};

}  // namespace moe::simt
