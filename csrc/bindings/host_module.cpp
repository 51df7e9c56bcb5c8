#include "bindings/bindings.h"
#include "bindings/shared/errors.h"
#include "bindings/shared/warnings.h"

PYBIND11_MODULE(_host, module) {
  using namespace moe::bindings;
  module.doc() = "CPU backend of moe_comm: heap, rows, dispatch and combine, batched copies.";
  register_errors();
  bind_warnings(module);
  bind_kernels(module);
  bind_files(module);
  bind_heap(module);
  bind_group(module);
  bind_rail(module);
  bind_buffer(module);
  bind_layout(module);
  bind_internode(module);
  bind_batched_copy(module);
  bind_tensor_table(module);
  bind_routing_map(module);
}
