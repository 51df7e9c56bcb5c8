#include "bindings/shared/call_options.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include "core/error.h"

namespace moe::bindings {

namespace {

/// Values by place; looking for names would take longer than the rest of a call.
class Values {
 public:
  Values(const py::tuple& values, const char* operation, size_t num_options) : values_(values) {
    MOE_CHECK(values.size() == num_options,
              "options of a ",
              operation,
              " must be ",
              num_options,
              ", got ",
              values.size());
  }

  py::handle at(int place) const { return PyTuple_GET_ITEM(values_.ptr(), place); }

  template <typename Value>
  Value as(int place) const {
    return at(place).cast<Value>();
  }

  ops::CopyOut copy_out(int place) const {
    if (!PyBool_Check(at(place).ptr()))
      return ops::CopyOut::kAuto;
    return as<bool>(place) ? ops::CopyOut::kAlways : ops::CopyOut::kNever;
  }

 private:
  const py::tuple& values_;
};

void read_capacity(py::handle capacity, ops::DispatchOptions* options) {
  if (capacity.is_none())
    return;
  const auto limit = [&](const char* name) {
    return capacity.attr(name).cast<std::optional<int64_t>>().value_or(-1);
  };
  options->fixed_rows = limit("num_rows");
  options->capacity.expert_capacity = limit("num_rows_per_expert");
  const auto on_overflow = capacity.attr("on_overflow").cast<std::string>();
  const auto* const name = std::ranges::find(layout::kOnOverflowNames, on_overflow);
  options->capacity.on_overflow =
      static_cast<layout::OnOverflow>(name - std::begin(layout::kOnOverflowNames));
}

ops::DispatchOptions read_dispatch(const py::tuple& tuple) {
  enum {
    kLayout,
    kExpertAlignment,
    kQuantization,
    kCapacity,
    kMaskedRanks,
    kCopyOut,
    kAsyncOp,
    kGradients,
    kNumOptions
  };
  const Values values(tuple, "dispatch", kNumOptions);
  ops::DispatchOptions options;
  options.layout = static_cast<layout::RowLayout>(values.as<int>(kLayout));
  options.expert_alignment = values.as<int64_t>(kExpertAlignment);
  read_capacity(values.at(kCapacity), &options);
  options.masked_ranks = values.as<std::vector<int>>(kMaskedRanks);
  options.copy_out = values.copy_out(kCopyOut);
  options.is_async = values.as<bool>(kAsyncOp);
  options.gradients = values.as<int32_t>(kGradients);
  return options;
}

ops::CombineOptions read_combine(const py::tuple& tuple) {
  enum { kCopyOut, kAsyncOp, kGradients, kNumOptions };
  const Values values(tuple, "combine", kNumOptions);
  ops::CombineOptions options;
  options.copy_out = values.copy_out(kCopyOut);
  options.is_async = values.as<bool>(kAsyncOp);
  options.gradients = values.as<int32_t>(kGradients);
  return options;
}

template <typename Options>
const Options* find_or_read(const py::tuple& values,
                            bool are_checked,
                            Options (*read)(const py::tuple&)) {
  // One for the whole process, never destroyed: Python's objects may not outlive it.
  static auto* const passed = new PassedOptions<Options>();
  if (const Options* known = passed->find(values))
    return known;
  return are_checked ? &passed->remember(values, read(values)) : nullptr;
}

}  // namespace

const ops::DispatchOptions* dispatch_options(const py::tuple& values, bool are_checked) {
  return find_or_read(values, are_checked, &read_dispatch);
}

const ops::CombineOptions* combine_options(const py::tuple& values, bool are_checked) {
  return find_or_read(values, are_checked, &read_combine);
}

}  // namespace moe::bindings
