#include "bindings/shared/bind_combine.h"

namespace moe::bindings {

void bind_submitted_combine(py::module_& module) {
  py::class_<SubmittedCombine>(module, "SubmittedCombine", py::module_local())
      .def("is_complete", &SubmittedCombine::is_complete)
      .def("judge", &SubmittedCombine::judge)
      .def("was_copied_in", &SubmittedCombine::was_copied_in)
      .def("gradients", &SubmittedCombine::gradients)
      .def("wait_ns", &SubmittedCombine::wait_ns)
      .def("result", &SubmittedCombine::result);
}

}  // namespace moe::bindings
