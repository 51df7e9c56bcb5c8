#pragma once

#include <cstdint>

namespace moe::layout {

/// Rule from the greatest magnitude of a block to its scale factor: docs/quantization.md.
enum class ScaleFormat : int32_t { kFloat32 = 0, kFloat32PowerOf2 = 1, kUe8m0 = 2 };

struct WireFormat;  // wire_format.h

}  // namespace moe::layout
