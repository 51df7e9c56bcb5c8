#include "layout/wire_format.h"

// The table of formats. Whatever names them, sizes their rows or lists them reads it.

namespace moe::layout {

const std::vector<ScaleRecord>& scale_table() {
  static const std::vector<ScaleRecord> records = {
      {.name = "FLOAT32", .dtype = "float32", .bytes = 4},
      {.name = "FLOAT32_POWER_OF_2", .dtype = "float32", .bytes = 4},
      {.name = "UE8M0", .dtype = "float8_e8m0fnu", .bytes = 1},
  };
  return records;
}

const std::vector<WireFormat>& format_table() {
  static const std::vector<WireFormat> records = {
      {.name = "FP8_BLOCK128",
       .dtype = "float8_e4m3fn",
       .element_bits = 8,
       .block = 128,
       .least_amax = 1e-4f,
       .packs_exponents = true,
       .scale_formats = {ScaleFormat::kFloat32,
                         ScaleFormat::kFloat32PowerOf2,
                         ScaleFormat::kUe8m0}},
      {.name = "MXFP8",
       .dtype = "float8_e4m3fn",
       .element_bits = 8,
       .block = 32,
       .least_amax = 0.0f,
       .packs_exponents = false,
       .scale_formats = {ScaleFormat::kUe8m0}},
  };
  return records;
}

}  // namespace moe::layout
