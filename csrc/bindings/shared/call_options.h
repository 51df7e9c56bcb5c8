#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "ops/combine.h"
#include "ops/dispatch.h"

// The options of a call: a DispatchOptions or a CombineOptions of moe_comm/ep/options.py, read by
// place. Rules are Python's alone. A call with options that have passed them before, which is
// nearly every call, is known by their values, and nobody reads them again.

namespace moe::bindings {

namespace py = pybind11;

/// Options that have passed every rule, as operations take them, by the values that Python has.
/// Called with the GIL.
template <typename Options>
class PassedOptions {
 public:
  /// Null where the options have not passed yet. Valid until the next call of remember().
  const Options* find(py::handle values) const {
    for (const auto& [known, options] : entries_)
      if (are_alike(known, values))
        return &options;
    return nullptr;
  }

  /// @param values  They have passed.
  const Options& remember(py::tuple values, Options options) {
    if (entries_.size() < kMost) {
      entries_.emplace_back(std::move(values), std::move(options));
      return entries_.back().second;
    }
    next_ = (next_ + 1) % kMost;
    entries_[next_] = {std::move(values), std::move(options)};
    return entries_[next_].second;
  }

 private:
  static constexpr size_t kMost = 16;

  /// Equal values of equal types: no rule tells them apart.
  static bool are_alike(py::handle known, py::handle values) {
    const Py_ssize_t size = PyTuple_GET_SIZE(known.ptr());
    if (PyTuple_GET_SIZE(values.ptr()) != size)
      return false;
    for (Py_ssize_t i = 0; i < size; ++i) {
      PyObject* const one = PyTuple_GET_ITEM(known.ptr(), i);
      PyObject* const other = PyTuple_GET_ITEM(values.ptr(), i);
      if (one == other)
        continue;
      if (Py_TYPE(one) != Py_TYPE(other))
        return false;
      const int equal = PyObject_RichCompareBool(one, other, Py_EQ);
      if (equal < 0)
        PyErr_Clear();
      if (equal != 1)
        return false;
    }
    return true;
  }

  std::vector<std::pair<py::tuple, Options>> entries_;
  size_t next_ = 0;
};

/// Null where the rules have not passed them.
/// @param are_checked  The rules have passed them just now.
const ops::DispatchOptions* dispatch_options(const py::tuple& values, bool are_checked);

/// Likewise.
const ops::CombineOptions* combine_options(const py::tuple& values, bool are_checked);

}  // namespace moe::bindings
