// The dispatch kernel under the emulator against rows that plain loops put where layout/ says:
// every byte of every window, written or not. Prints "ok <number of cases>", or what differs. A
// fault of the kernel can be switched on by name.

#include "dispatch_rig.h"

#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "schedules/fault.h"

namespace {
std::string g_fault;
}  // namespace

bool moe::simt::is_fault_on(const char* name) {
  return g_fault == name;
}

namespace {

using namespace moe;
using dispatch_rig::Case;
using dispatch_rig::Rig;
using layout::RowLayout;

Case quantized(Case test,
               DType dtype,
               int64_t hidden,
               const layout::WireFormat& format,
               layout::ScaleFormat scale) {
  test.quantize = {1, dtype, format.block, format.least_amax, scale};
  test.source_row_bytes = hidden * element_bytes(dtype);
  test.row_bytes = format.row_bytes(hidden);
  test.num_scales = static_cast<int>(format.num_scales(hidden, scale));
  test.scale_bytes = format.scale_bytes(scale);
  test.name += concat(" ",
                      dtype_name(dtype),
                      " hidden ",
                      hidden,
                      " block ",
                      format.block,
                      " format ",
                      static_cast<int>(scale));
  return test;
}

/// The kernel on 24 SMs.
device::Launch usual_launch() {
  device::Launch launch;
  launch.num_blocks = 24;
  launch.num_threads = 256;
  return launch;
}

int parts_of(int64_t num_tokens, int64_t row_bytes, bool is_quantized) {
  kernels::DispatchParams params;
  params.choices.num_tokens = num_tokens;
  params.source_row_bytes = row_bytes;
  params.quantize.is_on = is_quantized ? 1 : 0;
  return kernels::num_row_parts(usual_launch(), params);
}

void expect_parts(int found, int wanted, const char* what) {
  if (found != wanted)
    throw InvalidArgument(concat(found, " warps share ", what, ", wanted ", wanted));
}

void check_parts() {
  expect_parts(parts_of(4096, 14336, false), 1, "a row of many");
  expect_parts(parts_of(128, 14336, false), 1, "a row of 128");
  expect_parts(parts_of(96, 14336, false), 2, "a row of 96");
  expect_parts(parts_of(8, 14336, false), 24, "a row of 8");
  expect_parts(parts_of(1, 14336, false), 28, "the only row");
  expect_parts(parts_of(8, 14336, true), 14, "a quantized row of 8");
  expect_parts(parts_of(8, 1000, false), 1, "a short row");
  expect_parts(parts_of(0, 14336, false), 1, "no row");
}

/// Stages of parts fit where those of whole rows do.
void check_shared_bytes() {
  constexpr size_t kMostBytes = 227 * 1024;
  const device::Launch launch = usual_launch();
  kernels::DispatchParams params;
  params.choices.num_slots = 8;
  params.quantize.is_on = 1;
  for (const auto dtype : {DType::kBFloat16, DType::kFloat32})
    for (int64_t hidden = 512; hidden < 20000; hidden += 504)
      for (const int num_tokens : {1, 8, 50, 96, 192}) {
        params.quantize.dtype = dtype;
        params.row_bytes = hidden;
        params.source_row_bytes = hidden * element_bytes(dtype);
        params.choices.num_tokens = num_tokens;
        params.num_parts = kernels::num_row_parts(launch, params);
        const size_t bytes = kernels::dispatch_shared_bytes(params, launch.num_threads);
        if (bytes > kMostBytes)
          throw InvalidArgument(concat(params.num_parts,
                                       " parts of ",
                                       hidden,
                                       " numbers take ",
                                       bytes,
                                       " bytes of shared memory, wanted at most ",
                                       kMostBytes));
      }
}

/// @p test with more warps than rows.
Case few(Case test) {
  test.num_tokens = {1, 3};
  test.num_blocks = 5;
  test.num_threads = 96;
  test.name += " few";
  return test;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const auto add = [&](Case test, const std::string& name) {
    test.name = name + " " + test.name;
    for (const bool is_plain : {false, true}) {
      test.is_plain = is_plain;
      all.push_back(test);
      all.back().name += is_plain ? " plain" : " bulk";
    }
  };
  for (const auto layout : {RowLayout::kExpertMajor, RowLayout::kRankMajor, RowLayout::kLowLatency})
    for (const bool is_cached : {false, true}) {
      Case test;
      test.layout = layout;
      test.is_cached = is_cached;
      test.name = concat(layout::layout_name(layout), is_cached ? " cached" : "");
      add(test, "bytes");
      test.num_ranks = 1;
      test.num_tokens = {4};
      test.num_blocks = 1;
      test.num_threads = 32;
      test.weight_bytes = 8;
      add(test, "one rank, one warp");
      test.num_ranks = 6;
      test.num_experts = 40;
      test.num_tokens = {0, 7, 1, 12, 3, 2};
      test.num_topk = 36;
      test.weight_bytes = 4;
      test.num_blocks = 3;
      add(test, "many choices");
      test.num_topk = 3;
      test.weight_bytes = 0;
      test.num_ranks = 2;
      test.num_experts = 3;
      test.num_tokens = {4, 3};
      test.source_row_bytes = test.row_bytes = 3 * 8192 + 16;
      add(test, "long rows");
      add(few(test), "long rows");
      test.source_row_bytes = test.row_bytes = 1027;
      add(few(test), "odd rows");
      test.source_row_bytes = test.row_bytes = 10;
      add(test, "odd rows");
      test.num_scales = 3;
      for (const int scale_bytes : {1, 2, 4, 8})
        for (const bool is_column_major : {false, true}) {
          test.source_row_bytes = test.row_bytes = 32;
          test.weight_bytes = 4;
          test.scale_bytes = scale_bytes;
          test.is_column_major = is_column_major;
          add(test, concat("pairs of ", scale_bytes, " column-major ", is_column_major));
          test.source_row_bytes = test.row_bytes = 1600;
          add(few(test), concat("pairs of ", scale_bytes, " column-major ", is_column_major));
        }
    }
  Case limited;
  limited.expert_alignment = 4;
  limited.fixed_rows = 12;
  limited.rule.on_overflow = layout::OnOverflow::kDrop;
  limited.rule.expert_capacity = 3;
  limited.num_tokens = {9, 6};
  add(limited, "drop");
  limited.rule = {};
  limited.fixed_rows = 64;
  add(limited, "padding");
  limited.layout = RowLayout::kRankMajor;
  add(limited, "padding by rank");
  limited.is_misaligned = true;
  add(limited, "misaligned");

  Case rows;
  rows.expert_alignment = 3;
  rows.num_tokens = {5, 2};
  for (const auto dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32})
    for (const int64_t hidden : {16, 136, 640, 5000, 8200, 20})
      for (const bool is_column_major : {false, true}) {
        rows.is_column_major = is_column_major;
        rows.is_misaligned = hidden == 136 && is_column_major;
        rows.layout = is_column_major ? RowLayout::kExpertMajor : RowLayout::kRankMajor;
        rows.name = concat(is_column_major ? "columns" : "rows", rows.is_misaligned ? " off" : "");
        const auto add_both = [&](const Case& test) {
          add(test, "quantized");
          if (hidden >= 640)
            add(few(test), "quantized");
        };
        for (const layout::WireFormat& format : layout::format_table())
          for (const auto scale : format.scale_formats)
            add_both(quantized(rows, dtype, hidden, format, scale));
      }
  rows.layout = RowLayout::kLowLatency;
  rows.name = "low-latency";
  const layout::WireFormat& first = layout::format_table().front();
  add(quantized(rows, DType::kBFloat16, 256, first, first.scale_formats.front()), "quantized");
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1)
    g_fault = argv[1];
  int num_cases = 0;
  int num_failed = 0;
  try {
    check_parts();
    check_shared_bytes();
  } catch (const std::exception& error) {
    ++num_failed;
    std::printf("%s\n", error.what());
  }
  for (const Case& test : cases()) {
    ++num_cases;
    try {
      Rig(test, static_cast<uint32_t>(num_cases)).run();
    } catch (const std::exception& error) {
      ++num_failed;
      std::printf("%s: %s\n", test.name.c_str(), error.what());
      if (argc > 1)  // the fault has been seen
        return 1;
    }
  }
  if (num_failed == 0)
    std::printf("ok %d\n", num_cases);
  return num_failed == 0 ? 0 : 1;
}
