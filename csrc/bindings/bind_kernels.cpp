#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/shared/byte_buffers.h"
#include "core/error.h"
#include "cpu/roof.h"
#include "cpu/row_kernels.h"

namespace moe::bindings {
namespace {

using cpu::RoofKernels;

const RoofKernels& roof_kernels(const std::optional<std::string>& isa) {
  if (!isa)
    return cpu::best_roof_kernels();
  const RoofKernels* kernels = cpu::find_roof_kernels(*isa);
  MOE_CHECK(kernels, "no roofs named '", *isa, "' on this machine");
  return *kernels;
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const char* name : {"portable", "avx2", "avx512"})
    if (cpu::find_row_kernels(name))
      names.emplace_back(name);
  return names;
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
                    cpu::store_mode(streaming));
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
    kernels.sum(streams.data(), streams.size(), sum.size(), sum.data(), cpu::store_mode(streaming));
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
    kernels.copy(from.data(), to.data(), from.size(), cpu::store_mode(streaming));
}

}  // namespace

/// Adds the submodule `kernels`: names of instruction sets, and the roofs for benchmarks (in
/// `num_passes` over the same bytes). Every buffer is one-dimensional, of bytes, and is used in
/// place.
void bind_kernels(py::module_& parent) {
  py::module_ m = parent.def_submodule("kernels", "Roofs of the inner loops over rows.");
  m.def("instruction_sets", &instruction_sets, "Names usable as `isa` here, slowest first.");
  m.def("best_instruction_set", [] { return cpu::best_row_kernels().name; });
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
