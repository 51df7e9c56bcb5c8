#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "layout/scale_format.h"

namespace moe::layout {

/// A scale factor as it is stored, one of scale_table().
struct ScaleRecord {
  std::string_view name;
  std::string_view dtype;  ///< torch's name of it
  int32_t bytes = 0;
};

/// A format that rows are quantized to while they are dispatched, one of format_table().
///
/// Example: FP8_BLOCK128, 200 channels: 200 bytes, and 2 scale factors of 4 bytes, or with kUe8m0 2
/// exponent bytes in one int32.
struct WireFormat {
  std::string_view name;
  std::string_view dtype;    ///< torch's name of what the elements are stored as
  int32_t element_bits = 8;  ///< a byte, of which a row has whole ones, holds 8 / element_bits
  int32_t block = 0;         ///< channels that share a scale factor; the last block may be shorter
  float least_amax = 0;      ///< least value that the greatest magnitude of a block counts as
  bool packs_exponents = false;  ///< kUe8m0: four to an int32, block 0 lowest
  /// Formats of scale factors that go with it, the default first.
  std::vector<ScaleFormat> scale_formats;

  int64_t row_bytes(int64_t hidden) const { return (hidden * element_bits + 7) / 8; }
  bool is_packed(ScaleFormat scale) const {
    return packs_exponents && scale == ScaleFormat::kUe8m0;
  }
  /// Bytes of one scale factor as it travels, or of one pack of them.
  int32_t scale_bytes(ScaleFormat scale) const;
  /// Scale factors of a row, or packs of them.
  int64_t num_scales(int64_t hidden, ScaleFormat scale) const {
    const int64_t channels = block * (is_packed(scale) ? 4 : 1);
    return (hidden + channels - 1) / channels;
  }
  /// Returns whether docs/quantization.md has its arithmetic, which engines write for certain
  /// blocks. A block of zeros has no float32 factor unless its amax counts as more.
  bool is_e4m3(ScaleFormat scale) const {
    return dtype == "float8_e4m3fn" && element_bits == 8 && scale <= ScaleFormat::kUe8m0 &&
           (scale != ScaleFormat::kFloat32 || std::isfinite(448.0f / least_amax));
  }
};

/// All scale factors, by the number of their ScaleFormat.
const std::vector<ScaleRecord>& scale_table();

/// All formats; the number of one, which ranks compare, is one more than its place.
const std::vector<WireFormat>& format_table();

inline int32_t WireFormat::scale_bytes(ScaleFormat scale) const {
  return is_packed(scale) ? 4 : layout::scale_table()[static_cast<size_t>(scale)].bytes;
}

/// Quantization of rows, here or by the caller, in one word that ranks compare.
///
/// Bits: 0 set; 1 scale factors in columns; [4, 8) number of the format, 0 for rows that come with
/// their scale factors; [8, 12) scale format.
struct QuantizationCode {
  int32_t code = 0;

  bool is_column_major() const { return (code & 2) != 0; }
  bool is_quantized_here() const { return format_number() != 0; }
  int32_t format_number() const { return (code >> 4) & 15; }
  ScaleFormat scale() const { return static_cast<ScaleFormat>((code >> 8) & 15); }
  const ScaleRecord* find_scale() const {
    const auto number = static_cast<size_t>(scale());
    return number < scale_table().size() ? &scale_table()[number] : nullptr;
  }
  /// Null for rows that come with their scale factors, and for a number that no format has.
  const WireFormat* find_format() const {
    const auto number = static_cast<size_t>(format_number());
    return number - 1 < format_table().size() ? &format_table()[number - 1] : nullptr;
  }
};

}  // namespace moe::layout
