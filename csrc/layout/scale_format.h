#pragma once

#include <cstdint>

namespace moe::layout {

/// How a scale factor follows from the greatest magnitude of its block: docs/quantization.md.
enum class ScaleFormat : int32_t { kFloat32 = 0, kFloat32PowerOf2 = 1, kUe8m0 = 2 };

struct WireFormat;  // wire_format.h

}  // namespace moe::layout
