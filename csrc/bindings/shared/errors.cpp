#include "bindings/shared/errors.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "core/error.h"

namespace moe::bindings {

namespace py = pybind11;

namespace {

py::object error_class(const char* name) {
  return py::module_::import("moe_comm.errors").attr(name);
}

void raise(const char* name, const std::string& message, const FailureSite& site) {
  const py::object type = error_class(name);
  const py::object error = type(message,
                                py::arg("ranks") = py::cast(site.ranks),
                                py::arg("operation") = site.operation,
                                py::arg("phase") = site.phase,
                                py::arg("epoch") = site.epoch);
  PyErr_SetObject(type.ptr(), error.ptr());
}

void raise(const CapacityError& error) {
  const py::object type = error_class("CapacityError");
  const py::object raised = type(std::string(error.what()),
                                 py::arg("needed_bytes") = error.needed_bytes,
                                 py::arg("available_bytes") = error.available_bytes,
                                 py::arg("ranks") = py::cast(error.ranks),
                                 py::arg("needed_rows") = py::cast(error.needed_rows));
  PyErr_SetObject(type.ptr(), raised.ptr());
}

void translate(std::exception_ptr pointer) {
  try {
    std::rethrow_exception(pointer);
  } catch (const InvalidArgument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const InvalidType& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
  } catch (const PeerFailed& error) {
    raise("PeerFailedError", error.what(), error.site);
  } catch (const PeerTimeout& error) {
    raise("PeerTimeoutError", error.what(), error.site);
  } catch (const Evicted& error) {
    raise("EvictedError", error.what(), error.site);
  } catch (const CapacityError& error) {
    raise(error);
  } catch (const SystemError& error) {
    const py::tuple arguments = py::make_tuple(error.error_number(), std::string(error.what()));
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
  } catch (const ConcurrentUse& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

}  // namespace

void register_errors() {
  py::register_local_exception_translator(&translate);
}

}  // namespace moe::bindings
