#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "ops/combine.h"
#include "ops/dispatch.h"

// The options of a call: a DispatchOptions or a CombineOptions of moe_comm/ep/call_options.py, read
// by name. Rules are Python's alone. A call with options that have passed them before, which is
// nearly every call, is known by their values, and nobody reads them again.

namespace moe::bindings {

namespace py = pybind11;

/// Options that have passed every rule, as operations take them, by the values that Python has.
/// Called with the GIL.
template <typename Options>
class PassedOptions {
 public:
  /// Null where the options have not passed yet. Valid while the GIL is held.
  const Options* find(py::handle values) const {
    // By place, and held: comparing may run Python, and with it remember() of another thread.
    for (size_t i = 0; i < entries_.size(); ++i) {
      const py::tuple known = entries_[i].first;
      if (are_alike(known, values) && entries_[i].first.is(known))
        return &entries_[i].second;
    }
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
  /// @throws py::error_already_set  what a signal raised meanwhile that is no Exception.
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
      if (!are_equal(one, other))
        return false;
    }
    return true;
  }

  static bool are_equal(PyObject* one, PyObject* other) {
    // The fields of a plain object, a Capacity for one: its __eq__ is Python, where signals are
    // handled and other threads go on.
    const PyTypeObject* const type = Py_TYPE(one);
    if (type->tp_base == &PyBaseObject_Type && type->tp_dictoffset != 0) {
      const py::dict fields = py::handle(one).attr("__dict__");
      const py::dict others = py::handle(other).attr("__dict__");
      return compare(fields.ptr(), others.ptr());
    }
    return compare(one, other);
  }

  static bool compare(PyObject* one, PyObject* other) {
    const int equal = PyObject_RichCompareBool(one, other, Py_EQ);
    if (equal >= 0)
      return equal == 1;
    if (!PyErr_ExceptionMatches(PyExc_Exception))
      throw py::error_already_set();
    PyErr_Clear();
    return false;
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
