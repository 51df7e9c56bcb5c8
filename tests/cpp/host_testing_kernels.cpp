#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/shared/byte_buffers.h"
#include "core/error.h"
#include "cpu/checksum_lanes.h"
#include "cpu/row_kernels.h"
#include "host_testing.h"
#include "layout/wire_format.h"

namespace moe::testing {
namespace {

using bindings::ByteRows;
using bindings::Bytes;
using cpu::FloatingPointScope;
using cpu::RowKernels;
using cpu::RowQuantization;
using cpu::store_mode;

const RowKernels& row_kernels(const std::string& isa) {
  const RowKernels* kernels = cpu::find_row_kernels(isa);
  MOE_CHECK(kernels, "no row kernels named '", isa, "' on this machine");
  return *kernels;
}

DType parse_dtype(const std::string& name) {
  for (DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32, DType::kFloat64})
    if (name == dtype_name(dtype))
      return dtype;
  throw InvalidArgument(concat("expected a dtype that can be added, got '", name, "'"));
}

void fan_out(const std::string& isa,
             const py::buffer& src,
             const std::vector<py::buffer>& dst,
             bool streaming) {
  const RowKernels& kernels = row_kernels(isa);
  const Bytes row(src, false);
  MOE_CHECK(row.size() % 16 == 0, "row: expected a multiple of 16 bytes, got ", row.size());
  const ByteRows copies(dst, row.size(), 16, true, "destination");
  const py::gil_scoped_release release;
  kernels.fan_out(row.data(), copies.data(), copies.size(), row.size(), store_mode(streaming));
  kernels.store_fence();
}

void sum_rows(const std::string& isa,
              const std::string& dtype_text,
              const std::vector<py::buffer>& src,
              const std::optional<py::buffer>& weights,
              const py::buffer& dst,
              bool streaming,
              const std::vector<py::buffer>& prefetch,
              const std::optional<std::pair<int, int>>& group) {
  const RowKernels& kernels = row_kernels(isa);
  const DType dtype = parse_dtype(dtype_text);
  const int64_t alignment = element_bytes(dtype);
  const Bytes sum(dst, true);
  MOE_CHECK(sum.size() % alignment == 0,
            "sum: expected whole elements of ",
            alignment,
            " bytes, got ",
            sum.size(),
            " bytes");
  sum.check(sum.size(), alignment, "sum");
  const ByteRows rows(src, sum.size(), alignment, false, "source");
  const ByteRows next_rows(prefetch, sum.size(), 1, false, "prefetch");
  std::optional<Bytes> factors;
  if (weights) {
    const int64_t weight_bytes = dtype == DType::kFloat64 ? 8 : 4;
    factors.emplace(*weights, false);
    factors->check(rows.size() * weight_bytes, weight_bytes, "weights");
  }
  if (group)
    MOE_CHECK(0 <= group->first && group->first <= group->second && group->second <= rows.size(),
              "group: expected a part of ",
              rows.size(),
              " sources, got [",
              group->first,
              ", ",
              group->second,
              ")");
  const void* const applied = factors ? factors->data() : nullptr;
  const int64_t hidden = sum.size() / alignment;
  const py::gil_scoped_release release;
  const FloatingPointScope scope;
  if (group)
    kernels.sum_grouped_rows(dtype,
                             rows.data(),
                             applied,
                             rows.size(),
                             {group->first, group->second},
                             hidden,
                             sum.data(),
                             store_mode(streaming));
  else
    kernels.sum_rows(dtype,
                     rows.data(),
                     applied,
                     rows.size(),
                     hidden,
                     sum.data(),
                     store_mode(streaming),
                     next_rows.data(),
                     next_rows.size());
  kernels.store_fence();
}

double scale_and_dot(const std::string& isa,
                     const std::string& dtype_text,
                     const py::buffer& gradient,
                     const py::buffer& value,
                     double weight) {
  const RowKernels& kernels = row_kernels(isa);
  const DType dtype = parse_dtype(dtype_text);
  const int64_t alignment = element_bytes(dtype);
  const Bytes gradients(gradient, true);
  const Bytes values(value, false);
  const int64_t hidden = gradients.size() / alignment;
  gradients.check(hidden * alignment, alignment, "gradient");
  values.check(hidden * alignment, alignment, "value");
  const py::gil_scoped_release release;
  const FloatingPointScope scope;
  return kernels.scale_and_dot(dtype, gradients.data(), values.data(), weight, hidden);
}

void copy(const std::string& isa, const py::buffer& src, const py::buffer& dst, bool streaming) {
  const RowKernels& kernels = row_kernels(isa);
  const Bytes from(src, false);
  const Bytes to(dst, true);
  to.check(from.size(), 1, "destination");
  const py::gil_scoped_release release;
  kernels.copy(from.data(), to.data(), from.size(), store_mode(streaming));
  kernels.store_fence();
}

/// @param lanes  kChecksumLanes numbers of 8 bytes, which become those that have taken @p src.
/// @param dst    Buffer as long as @p src, or none.
void absorb_copy(const std::string& isa,
                 const py::buffer& src,
                 const std::optional<py::buffer>& dst,
                 const py::buffer& lanes,
                 bool streaming) {
  const RowKernels& kernels = row_kernels(isa);
  const Bytes from(src, false);
  const Bytes words(lanes, true);
  MOE_CHECK_EQ(from.size() % cpu::kChecksumRoundBytes, 0, "bytes behind whole rounds");
  words.check(8 * cpu::kChecksumLanes, alignof(uint64_t), "lanes");
  std::optional<Bytes> to;
  if (dst) {
    to.emplace(*dst, true);
    to->check(from.size(), 1, "destination");
  }
  const py::gil_scoped_release release;
  kernels.absorb_copy(from.data(),
                      to ? to->data() : nullptr,
                      from.size(),
                      store_mode(streaming),
                      from.data(),
                      reinterpret_cast<const uint64_t*>(words.data()),
                      reinterpret_cast<uint64_t*>(words.data()));
  kernels.store_fence();
}

void zero(const std::string& isa, const py::buffer& dst, bool streaming) {
  const RowKernels& kernels = row_kernels(isa);
  const Bytes to(dst, true);
  const py::gil_scoped_release release;
  kernels.zero(to.data(), to.size(), store_mode(streaming));
  kernels.store_fence();
}

layout::ScaleFormat parse_scale_format(const std::string& name) {
  for (size_t number = 0; number < layout::scale_table().size(); ++number)
    if (name == layout::scale_table()[number].name)
      return static_cast<layout::ScaleFormat>(number);
  throw InvalidArgument(concat("no scale factors are named '", name, "'"));
}

void quantize_row(const std::string& isa,
                  const std::string& dtype_text,
                  int block,
                  float least_amax,
                  const std::string& scale_format_text,
                  const py::buffer& src,
                  const std::vector<py::buffer>& dst,
                  const py::buffer& scales,
                  bool streaming) {
  const RowKernels& kernels = row_kernels(isa);
  RowQuantization quantization;
  quantization.dtype = parse_dtype(dtype_text);
  MOE_CHECK(quantization.dtype != DType::kFloat64, "expected bf16, fp16 or fp32, got float64");
  MOE_CHECK(
      block == 128 || block == 64 || block == 32, "block: expected 128, 64 or 32, got ", block);
  quantization.block = block;
  quantization.least_amax = least_amax;
  quantization.scale_format = parse_scale_format(scale_format_text);
  const int64_t alignment = element_bytes(quantization.dtype);
  const Bytes row(src, false);
  quantization.hidden = row.size() / alignment;
  row.check(quantization.hidden * alignment, alignment, "row");
  const ByteRows copies(dst, quantization.hidden, 1, true, "destination");
  const int64_t scale_bytes =
      layout::scale_table()[static_cast<size_t>(quantization.scale_format)].bytes;
  const Bytes factors(scales, true);
  factors.check(quantization.num_blocks() * scale_bytes, scale_bytes, "scales");
  const py::gil_scoped_release release;
  const FloatingPointScope scope;
  kernels.quantize_row(quantization,
                       row.data(),
                       copies.data(),
                       copies.size(),
                       factors.data(),
                       store_mode(streaming));
  kernels.store_fence();
}

}  // namespace

void bind_row_kernels(py::module_& parent) {
  py::module_ m = parent.def_submodule("kernels", "Inner loops over rows.");
  m.def("fan_out",
        &fan_out,
        py::arg("isa"),
        py::arg("src"),
        py::arg("dst"),
        py::kw_only(),
        py::arg("streaming"));
  m.def("sum_rows",
        &sum_rows,
        py::arg("isa"),
        py::arg("dtype"),
        py::arg("src"),
        py::arg("weights"),
        py::arg("dst"),
        py::kw_only(),
        py::arg("streaming"),
        py::arg("prefetch") = std::vector<py::buffer>{},
        py::arg("group") = std::nullopt);
  m.def("scale_and_dot",
        &scale_and_dot,
        py::arg("isa"),
        py::arg("dtype"),
        py::arg("gradient"),
        py::arg("value"),
        py::arg("weight"));
  m.def("copy",
        &copy,
        py::arg("isa"),
        py::arg("src"),
        py::arg("dst"),
        py::kw_only(),
        py::arg("streaming"));
  m.def("absorb_copy",
        &absorb_copy,
        py::arg("isa"),
        py::arg("src"),
        py::arg("dst"),
        py::arg("lanes"),
        py::kw_only(),
        py::arg("streaming"));
  m.def("zero", &zero, py::arg("isa"), py::arg("dst"), py::kw_only(), py::arg("streaming"));
  m.def("quantize_row",
        &quantize_row,
        py::arg("isa"),
        py::arg("dtype"),
        py::arg("block"),
        py::arg("least_amax"),
        py::arg("scale_format"),
        py::arg("src"),
        py::arg("dst"),
        py::arg("scales"),
        py::kw_only(),
        py::arg("streaming"));
}

}  // namespace moe::testing
