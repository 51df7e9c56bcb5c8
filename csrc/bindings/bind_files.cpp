#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>

#include "bindings/bindings.h"
#include "bindings/shared/byte_buffers.h"
#include "bindings/shared/signature.h"
#include "bindings/shared/without_gil.h"
#include "core/error.h"
#include "cpu/file_rows.h"

namespace moe::bindings {
namespace {

std::optional<int64_t> read_rows(int descriptor,
                                 int64_t offset,
                                 int64_t num_runs,
                                 int64_t run_bytes,
                                 int64_t step,
                                 const py::buffer& memory,
                                 int64_t cached_bytes,
                                 int64_t max_gap_bytes) {
  const cpu::FileRows rows{offset, num_runs, run_bytes, step};
  MOE_CHECK(run_bytes > 0 && step >= run_bytes, "runs of ", run_bytes, " bytes every ", step);
  const Bytes bytes(memory, true);
  bytes.check(num_runs * run_bytes, 1, "memory");
  const int64_t end = without_gil([&] {
    return cpu::read_file_rows(descriptor, rows, bytes.data(), {cached_bytes, max_gap_bytes});
  });
  return end < 0 ? std::nullopt : std::optional(end);
}

}  // namespace

void bind_files(py::module_& parent) {
  py::module_ m = parent.def_submodule("files", "Calls of files that Python lacks.");
  m.def("read_rows",
        &read_rows,
        "Reads `num_runs` runs of neighbors; returns where the file ends, if that is before.",
        Signature("descriptor, offset, num_runs, run_bytes, step, memory, cached_bytes, "
                  "max_gap_bytes"));
  m.def("begin_writeback",
        &cpu::begin_writeback,
        Signature("descriptor, offset, num_bytes"),
        NoGil());
  m.def("reserve", &cpu::reserve_file, Signature("descriptor, num_bytes"), NoGil());
}

}  // namespace moe::bindings
