#include "bindings/shared/call_options.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include "core/error.h"

namespace moe::bindings {

namespace {

/// Values by name, each taken once. Quickest in the order of their fields.
class Values {
 public:
  Values(const py::tuple& values, const char* operation)
      : values_(values), operation_(operation), names_(values.attr("_fields")) {
    MOE_CHECK(values.size() == names_.size(),
              "options of a ",
              operation,
              " must be ",
              names_.size(),
              ", got ",
              values.size());
  }

  py::handle take(const char* name) {
    for (size_t i = 0; i < names_.size(); ++i) {
      const size_t place = (next_ + i) % names_.size();
      if (PyUnicode_CompareWithASCIIString(name_at(place).ptr(), name) != 0)
        continue;
      next_ = place + 1;
      taken_ |= uint64_t{1} << place;
      return PyTuple_GET_ITEM(values_.ptr(), static_cast<Py_ssize_t>(place));
    }
    throw InvalidArgument(concat("options of a ", operation_, " have no ", name));
  }

  template <typename Value>
  Value take_as(const char* name) {
    return take(name).cast<Value>();
  }

  ops::CopyOut take_copy_out() {
    const py::handle mode = take("copy_out");
    if (!PyBool_Check(mode.ptr()))
      return ops::CopyOut::kAuto;
    return mode.cast<bool>() ? ops::CopyOut::kAlways : ops::CopyOut::kNever;
  }

  void check_all_taken() const {
    for (size_t place = 0; place < names_.size(); ++place)
      MOE_CHECK((taken_ >> place & 1) != 0,
                "call_options.cpp reads no ",
                name_at(place).cast<std::string>(),
                " of a ",
                operation_);
  }

 private:
  py::handle name_at(size_t place) const {
    return PyTuple_GET_ITEM(names_.ptr(), static_cast<Py_ssize_t>(place));
  }

  const py::tuple& values_;
  const char* operation_;
  py::tuple names_;
  uint64_t taken_ = 0;  ///< bits of places
  size_t next_ = 0;
};

void read_capacity(py::handle capacity, ops::DispatchOptions* options) {
  if (capacity.is_none())
    return;
  const auto limit = [&](const char* name) {
    return capacity.attr(name).cast<std::optional<int64_t>>().value_or(-1);
  };
  options->fixed_rows = limit("num_rows");
  options->arguments.expert_capacity = limit("num_rows_per_expert");
  const auto on_overflow = capacity.attr("on_overflow").cast<std::string>();
  const auto* const name = std::ranges::find(layout::kOnOverflowNames, on_overflow);
  options->arguments.on_overflow =
      static_cast<int32_t>(name - std::begin(layout::kOnOverflowNames));
}

ops::DispatchOptions read_dispatch(const py::tuple& tuple) {
  Values values(tuple, "dispatch");
  ops::DispatchOptions options;
  options.layout = static_cast<layout::RowLayout>(values.take_as<int>("layout"));
  options.expert_alignment = values.take_as<int64_t>("expert_alignment");
  values.take("quantization");  // comes with its scale factors
  read_capacity(values.take("capacity"), &options);
  options.masked_ranks = values.take_as<std::vector<int>>("masked_ranks");
  options.copy_out = values.take_copy_out();
  options.is_async = values.take_as<bool>("async_op");
  options.arguments.gradients = values.take_as<int32_t>("gradients");
  values.check_all_taken();
  return options;
}

ops::CombineOptions read_combine(const py::tuple& tuple) {
  Values values(tuple, "combine");
  ops::CombineOptions options;
  options.copy_out = values.take_copy_out();
  options.is_async = values.take_as<bool>("async_op");
  options.arguments.gradients = values.take_as<int32_t>("gradients");
  values.check_all_taken();
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
