// The table of formats with three more in it, for a module that is linked from this file instead of
// csrc/layout/wire_format.cpp: nothing else of the package knows them.

#include "layout/wire_format.h"

// The tables of the package, by other names.
#define scale_table package_scale_table
#define format_table package_format_table
namespace moe::layout {
const std::vector<ScaleRecord>& package_scale_table();
const std::vector<WireFormat>& package_format_table();
}  // namespace moe::layout
#include "layout/wire_format.cpp"
#undef scale_table
#undef format_table

namespace moe::layout {

constexpr auto kE4m3 = static_cast<ScaleFormat>(3);

const std::vector<ScaleRecord>& scale_table() {
  static const std::vector<ScaleRecord> records = [] {
    std::vector<ScaleRecord> all = package_scale_table();
    all.push_back({.name = "E4M3", .dtype = "float8_e4m3fn", .bytes = 1});
    return all;
  }();
  return records;
}

const std::vector<WireFormat>& format_table() {
  static const std::vector<WireFormat> records = [] {
    std::vector<WireFormat> all = package_format_table();
    // What every engine has loops for.
    all.push_back({.name = "FP8_BLOCK64",
                   .dtype = "float8_e4m3fn",
                   .element_bits = 8,
                   .block = 64,
                   .least_amax = 0.25f,
                   .packs_exponents = false,
                   .scale_formats = {
                       ScaleFormat::kFloat32PowerOf2, ScaleFormat::kUe8m0, ScaleFormat::kFloat32}});
    // Blocks that kernels of devices have, and loops of CPUs have not.
    all.push_back({.name = "FP8_BLOCK256",
                   .dtype = "float8_e4m3fn",
                   .element_bits = 8,
                   .block = 256,
                   .least_amax = 1e-4f,
                   .packs_exponents = true,
                   .scale_formats = {ScaleFormat::kUe8m0}});
    // What nobody has arithmetic for.
    all.push_back({.name = "NVFP4",
                   .dtype = "float4_e2m1fn_x2",
                   .element_bits = 4,
                   .block = 16,
                   .least_amax = 0.0f,
                   .packs_exponents = false,
                   .scale_formats = {kE4m3}});
    return all;
  }();
  return records;
}

}  // namespace moe::layout
