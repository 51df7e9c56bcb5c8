#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "core/error.h"
#include "host/roof.h"
#include "host/row_kernels.h"

namespace py = pybind11;

namespace moe::bindings {
namespace {

using host::FloatingPointScope;
using host::RoofKernels;
using host::RowKernels;
using host::RowQuantization;
using host::ScaleFormat;
using host::StoreMode;

/// Bytes of a Python object, which stays exported while this lives.
class Bytes {
 public:
  Bytes(const py::buffer& object, bool is_written) : info_(object.request(is_written)) {
    MOE_CHECK(info_.ndim == 1 && info_.itemsize == 1 && (info_.size < 2 || info_.strides[0] == 1),
              "expected a contiguous buffer of bytes with 1 dimension, got ",
              info_.ndim,
              " dimensions and elements of ",
              info_.itemsize,
              " bytes");
  }

  std::byte* data() const { return static_cast<std::byte*>(info_.ptr); }
  int64_t size() const { return info_.size; }

  void check(int64_t bytes, int64_t alignment, const char* what) const {
    MOE_CHECK(size() == bytes, what, ": expected ", bytes, " bytes, got ", size());
    const auto misalignment = reinterpret_cast<uintptr_t>(data()) % alignment;
    MOE_CHECK(misalignment == 0,
              what,
              ": expected an address aligned to ",
              alignment,
              " bytes, got one ",
              misalignment,
              " past");
  }

 private:
  py::buffer_info info_;
};

/// The addresses of several byte buffers of one size.
class ByteRows {
 public:
  ByteRows(const std::vector<py::buffer>& objects,
           int64_t bytes,
           int64_t alignment,
           bool is_written,
           const char* what) {
    rows_.reserve(objects.size());
    for (const py::buffer& object : objects) {
      rows_.emplace_back(object, is_written);
      rows_.back().check(bytes, alignment, what);
      addresses_.push_back(rows_.back().data());
    }
  }

  std::byte* const* data() const { return addresses_.data(); }
  int size() const { return static_cast<int>(addresses_.size()); }

 private:
  std::vector<Bytes> rows_;
  std::vector<std::byte*> addresses_;
};

const RowKernels& row_kernels(const std::string& isa) {
  const RowKernels* kernels = host::find_row_kernels(isa);
  MOE_CHECK(kernels, "no row kernels named '", isa, "' on this machine");
  return *kernels;
}

const RoofKernels& roof_kernels(const std::optional<std::string>& isa) {
  if (!isa)
    return host::best_roof_kernels();
  const RoofKernels* kernels = host::find_roof_kernels(*isa);
  MOE_CHECK(kernels, "no roofs named '", *isa, "' on this machine");
  return *kernels;
}

DType parse_dtype(const std::string& name) {
  for (DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32, DType::kFloat64})
    if (name == dtype_name(dtype))
      return dtype;
  throw InvalidArgument(concat("expected a dtype that can be added, got '", name, "'"));
}

StoreMode store_mode(bool streaming) {
  return streaming ? StoreMode::kStreaming : StoreMode::kCached;
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const char* name : {"portable", "avx2", "avx512"})
    if (host::find_row_kernels(name))
      names.emplace_back(name);
  return names;
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

void zero(const std::string& isa, const py::buffer& dst, bool streaming) {
  const RowKernels& kernels = row_kernels(isa);
  const Bytes to(dst, true);
  const py::gil_scoped_release release;
  kernels.zero(to.data(), to.size(), store_mode(streaming));
  kernels.store_fence();
}

ScaleFormat parse_scale_format(const std::string& name) {
  if (name == "float32")
    return ScaleFormat::kFloat32;
  if (name == "float32_power_of_2")
    return ScaleFormat::kFloat32PowerOf2;
  if (name == "ue8m0")
    return ScaleFormat::kUe8m0;
  throw InvalidArgument(
      concat("expected float32, float32_power_of_2 or ue8m0 scale factors, got '", name, "'"));
}

void quantize_row(const std::string& isa,
                  const std::string& dtype_text,
                  int block,
                  const std::string& scale_format_text,
                  const py::buffer& src,
                  const std::vector<py::buffer>& dst,
                  const py::buffer& scales,
                  bool streaming) {
  const RowKernels& kernels = row_kernels(isa);
  RowQuantization quantization;
  quantization.dtype = parse_dtype(dtype_text);
  MOE_CHECK(quantization.dtype != DType::kFloat64, "expected bf16, fp16 or fp32, got float64");
  MOE_CHECK(block == 128 || block == 32, "block: expected 128 or 32, got ", block);
  quantization.block = block;
  quantization.scale_format = parse_scale_format(scale_format_text);
  const int64_t alignment = element_bytes(quantization.dtype);
  const Bytes row(src, false);
  quantization.hidden = row.size() / alignment;
  row.check(quantization.hidden * alignment, alignment, "row");
  const ByteRows copies(dst, quantization.hidden, 1, true, "destination");
  const int64_t scale_bytes = quantization.scale_format == ScaleFormat::kUe8m0 ? 1 : 4;
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

void check_lines(int64_t bytes, const char* what) {
  MOE_CHECK(bytes % 64 == 0, what, ": expected a multiple of 64 bytes, got ", bytes);
}

void roof_fan_out(const py::buffer& src,
                  int64_t row_bytes,
                  const std::vector<py::buffer>& dst,
                  const std::optional<std::string>& isa,
                  bool streaming,
                  int num_passes) {
  const RoofKernels& kernels = roof_kernels(isa);
  const Bytes rows(src, false);
  check_lines(row_bytes, "row");
  MOE_CHECK(row_bytes > 0 && rows.size() % row_bytes == 0,
            "source: expected whole rows of ",
            row_bytes,
            " bytes, got ",
            rows.size(),
            " bytes");
  rows.check(rows.size(), 64, "source");
  const ByteRows copies(dst, rows.size(), 64, true, "destination");
  const py::gil_scoped_release release;
  for (int i = 0; i < num_passes; ++i)
    kernels.fan_out(rows.data(),
                    rows.size() / row_bytes,
                    row_bytes,
                    copies.data(),
                    copies.size(),
                    store_mode(streaming));
}

void roof_sum(const std::vector<py::buffer>& src,
              const py::buffer& dst,
              const std::optional<std::string>& isa,
              bool streaming,
              int num_passes) {
  const RoofKernels& kernels = roof_kernels(isa);
  const Bytes sum(dst, true);
  check_lines(sum.size(), "sum");
  sum.check(sum.size(), 64, "sum");
  const ByteRows streams(src, sum.size(), 64, false, "source");
  const py::gil_scoped_release release;
  for (int i = 0; i < num_passes; ++i)
    kernels.sum(streams.data(), streams.size(), sum.size(), sum.data(), store_mode(streaming));
}

void roof_copy(const py::buffer& src,
               const py::buffer& dst,
               const std::optional<std::string>& isa,
               bool streaming,
               int num_passes) {
  const RoofKernels& kernels = roof_kernels(isa);
  const Bytes from(src, false);
  const Bytes to(dst, true);
  check_lines(from.size(), "source");
  from.check(from.size(), 64, "source");
  to.check(from.size(), 64, "destination");
  const py::gil_scoped_release release;
  for (int i = 0; i < num_passes; ++i)
    kernels.copy(from.data(), to.data(), from.size(), store_mode(streaming));
}

}  // namespace

/// Adds the submodule `kernels`: the row kernels of each instruction set (for tests) and the roofs
/// (for benchmarks, in `num_passes` over the same bytes). Every buffer is one-dimensional, of
/// bytes, and is used in place.
void bind_kernels(py::module_& parent) {
  py::module_ m = parent.def_submodule("kernels", "Inner loops over rows, and their roofs.");
  m.def("instruction_sets", &instruction_sets, "Names usable as `isa` here, slowest first.");
  m.def("best_instruction_set", [] { return host::best_row_kernels().name; });
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
  m.def("zero", &zero, py::arg("isa"), py::arg("dst"), py::kw_only(), py::arg("streaming"));
  m.def("quantize_row",
        &quantize_row,
        py::arg("isa"),
        py::arg("dtype"),
        py::arg("block"),
        py::arg("scale_format"),
        py::arg("src"),
        py::arg("dst"),
        py::arg("scales"),
        py::kw_only(),
        py::arg("streaming"));
  m.def("roof_fan_out",
        &roof_fan_out,
        py::arg("src"),
        py::arg("row_bytes"),
        py::arg("dst"),
        py::arg("isa") = py::none(),
        py::kw_only(),
        py::arg("streaming") = true,
        py::arg("num_passes") = 1);
  m.def("roof_sum",
        &roof_sum,
        py::arg("src"),
        py::arg("dst"),
        py::arg("isa") = py::none(),
        py::kw_only(),
        py::arg("streaming") = true,
        py::arg("num_passes") = 1);
  m.def("roof_copy",
        &roof_copy,
        py::arg("src"),
        py::arg("dst"),
        py::arg("isa") = py::none(),
        py::kw_only(),
        py::arg("streaming") = true,
        py::arg("num_passes") = 1);
}

}  // namespace moe::bindings
