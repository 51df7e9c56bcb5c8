#include <pybind11/pybind11.h>

#include "bindings/shared/errors.h"

PYBIND11_MODULE(_simt, module) {
  module.doc() = "The GPU backend of moe_comm on an emulator: its kernels run on CPU fibers.";
  moe::bindings::register_errors();
}
