#include "bindings/device/bind_strided_copies.h"

#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings/shared/count_writes.h"
#include "bindings/shared/tensor_view.h"
#include "core/error.h"
#include "layout/strided.h"
#include "runtime/device_copies.h"

namespace moe::bindings {

namespace py = pybind11;

namespace {

struct StridedTensor {
  std::byte* data;
  layout::StridedBytes shape;
};

StridedTensor view_strided(py::handle tensor) {
  const auto sizes = py::cast<std::vector<int64_t>>(py::tuple(tensor.attr("shape")));
  const auto strides = py::cast<std::vector<int64_t>>(py::tuple(tensor.attr("stride")()));
  StridedTensor view{};
  const auto element_bytes = tensor.attr("element_size")().cast<int64_t>();
  view.data = reinterpret_cast<std::byte*>(tensor.attr("data_ptr")().cast<uintptr_t>());
  view.shape = layout::make_strided(
      sizes.data(), strides.data(), static_cast<int>(sizes.size()), element_bytes);
  check_memory(tensor, view.data, view.shape.span(), element_bytes);
  return view;
}

std::string describe(py::handle tensor) {
  return concat(py::str(tensor.attr("dtype")).cast<std::string>(),
                " ",
                py::str(py::tuple(tensor.attr("shape"))).cast<std::string>());
}

kernels::StridedCopy copy_of(py::handle target, py::handle source, size_t idx) {
  const StridedTensor to = view_strided(target);
  const StridedTensor from = view_strided(source);
  MOE_CHECK(target.attr("dtype").equal(source.attr("dtype")) && to.shape.bytes == from.shape.bytes,
            "copy ",
            idx,
            " goes from ",
            describe(source),
            " to ",
            describe(target),
            ": dtypes and numbers of elements must be equal");
  MOE_CHECK(!to.shape.may_overlap(),
            "copy ",
            idx,
            " goes to ",
            describe(target),
            " with strides ",
            py::str(py::tuple(target.attr("stride")())).cast<std::string>(),
            ", whose elements overlap");
  return {from.data, to.data, from.shape, to.shape};
}

}  // namespace

void strided_copies(runtime::Device& device,
                    const py::list& targets,
                    const py::list& sources,
                    uintptr_t stream,
                    int num_sms) {
  MOE_CHECK(targets.size() == sources.size(),
            "as many targets as sources are needed, got ",
            targets.size(),
            " and ",
            sources.size());
  std::vector<kernels::StridedCopy> copies;
  copies.reserve(targets.size());
  for (size_t i = 0; i < targets.size(); ++i)
    copies.push_back(copy_of(targets[i], sources[i], i));
  count_writes(targets);
  const py::gil_scoped_release no_gil;
  runtime::strided_copies(device, *device.caller_stream(stream), copies, num_sms);
}

}  // namespace moe::bindings
