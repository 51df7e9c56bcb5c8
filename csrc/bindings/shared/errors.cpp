#include "bindings/shared/errors.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <exception>
#include <string_view>

#include "core/error.h"

namespace moe::bindings {

namespace py = pybind11;

namespace {

py::object error_class(const char* name) {
  return py::module_::import("moe_comm.errors").attr(name);
}

/// A message may have come from a peer: what is no UTF-8 in it is replaced.
py::object text_of(const std::exception& error) {
  const std::string_view text = error.what();
  return py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

/// Raises what @p make() gives. To make an error of moe_comm.errors runs Python, and so the handler
/// of a signal that has come meanwhile: what that raises is raised, with the error as its context.
/// Nothing may leave a translator, or pybind11 raises a RuntimeError.
template <typename Make>
void raise_made(const Make& make) {
  try {
    const py::object error = make();
    PyErr_SetObject(py::type::handle_of(error).ptr(), error.ptr());
  } catch (py::error_already_set& interrupt) {
    try {
      py::object error = make();
      PyException_SetContext(error.ptr(), PyException_GetContext(interrupt.value().ptr()));
      PyException_SetContext(interrupt.value().ptr(), error.release().ptr());
    } catch (const py::error_already_set&) {  // interrupted again: the first is raised alone
    }
    interrupt.restore();
  }
}

template <typename Error>
void raise(const char* name, const Error& error) {
  raise_made([&] {
    return error_class(name)(text_of(error),
                             py::arg("ranks") = error.site.ranks,
                             py::arg("operation") = error.site.operation,
                             py::arg("phase") = error.site.phase,
                             py::arg("epoch") = error.site.epoch);
  });
}

void raise(const CapacityError& error) {
  raise_made([&] {
    return error_class("CapacityError")(text_of(error),
                                        py::arg("needed_bytes") = error.needed_bytes,
                                        py::arg("available_bytes") = error.available_bytes,
                                        py::arg("ranks") = error.ranks,
                                        py::arg("needed_rows") = error.needed_rows);
  });
}

/// Raises a class of Python's own, which takes nothing but C.
void raise_builtin(PyObject* type, const std::exception& error) {
  PyErr_SetObject(type, text_of(error).ptr());
}

void translate(std::exception_ptr pointer) {
  try {
    std::rethrow_exception(pointer);
  } catch (const InvalidArgument& error) {
    raise_builtin(PyExc_ValueError, error);
  } catch (const InvalidType& error) {
    raise_builtin(PyExc_TypeError, error);
  } catch (const PeerFailed& error) {
    raise("PeerFailedError", error);
  } catch (const PeerTimeout& error) {
    raise("PeerTimeoutError", error);
  } catch (const Evicted& error) {
    raise("EvictedError", error);
  } catch (const CapacityError& error) {
    raise(error);
  } catch (const SystemError& error) {
    const py::tuple arguments = py::make_tuple(error.error_number(), text_of(error));
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
  } catch (const ConcurrentUse& error) {
    raise_builtin(PyExc_RuntimeError, error);
  }
}

}  // namespace

void register_errors() {
  py::register_local_exception_translator(&translate);
}

}  // namespace moe::bindings
