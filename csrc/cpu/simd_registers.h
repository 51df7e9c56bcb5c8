#pragma once

#include <cstddef>
#include <cstdint>

/// For functions that must not exist on their own in an object file built for one instruction set:
/// the linker could hand such a copy to code that runs on any machine.
#define MOE_FORCE_INLINE inline __attribute__((always_inline))

namespace moe::cpu {

/// Vector types of @p kBytes. GCC and clang give them arithmetic, shifts, comparison and selection,
/// element by element, with the instructions that the translation unit is compiled for.
template <int kBytes>
struct Registers {
  static constexpr int kRegisterBytes = kBytes;
  typedef uint32_t Words __attribute__((vector_size(kBytes)));
  typedef uint64_t Longs __attribute__((vector_size(kBytes)));
  typedef int32_t Ints __attribute__((vector_size(kBytes)));
  typedef int16_t Shorts __attribute__((vector_size(kBytes)));
  typedef float Floats __attribute__((vector_size(kBytes)));
  typedef double Doubles __attribute__((vector_size(kBytes)));
};

}  // namespace moe::cpu
