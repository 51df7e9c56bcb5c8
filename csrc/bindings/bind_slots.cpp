#include "bindings/bind_slots.h"

#include "bindings/bindings.h"
#include "bindings/shared/tensor_view.h"
#include "ops/slot_signal.h"

namespace moe::bindings {

namespace py = pybind11;

namespace {

/// A vector of 64-bit integers; int64 and contiguity have been checked in Python.
const int64_t* view_numbers(py::handle tensor, int64_t num_numbers) {
  const TensorView view = view_tensor(tensor);
  MOE_CHECK(view.element_bytes == 8 && view.num_rows == num_numbers && view.row_elements == 1,
            "expected ",
            num_numbers,
            " 64-bit integers, got ",
            view.num_rows,
            " rows of ",
            view.row_bytes(),
            " bytes");
  return reinterpret_cast<const int64_t*>(view.data);
}

/// One 64-bit word of shared memory.
uint64_t& view_word(py::handle tensor) {
  const TensorView view = view_tensor(tensor);
  MOE_CHECK(view.bytes() == sizeof(uint64_t),
            "a signal is one word of 8 bytes, got ",
            view.bytes(),
            " bytes");
  return *reinterpret_cast<uint64_t*>(view.data);
}

void check_peer(const NativeGroup& native, int peer_rank) {
  native.group->check_process("signal");
  MOE_CHECK(peer_rank >= 0 && peer_rank < native.group->num_ranks(),
            "rank ",
            peer_rank,
            " is not a rank of a group of ",
            native.group->num_ranks());
}

void copy_chunks(
    NativeGroup& native, py::handle src, py::handle dst, py::handle bytes, bool is_streaming) {
  native.group->check_process("copy_chunks");
  const int64_t num_chunks = view_tensor(src).num_rows;
  const ops::ChunkList chunks{view_numbers(src, num_chunks),
                              view_numbers(dst, num_chunks),
                              view_numbers(bytes, num_chunks),
                              num_chunks};
  const py::gil_scoped_release no_gil;
  ops::copy_chunks(chunks, is_streaming);
}

void post_signal(NativeGroup& native, py::handle word, uint64_t value, int peer_rank) {
  check_peer(native, peer_rank);
  ops::post_signal(*native.group, view_word(word), value, peer_rank);
}

void await_signal(
    NativeGroup& native, py::handle word, uint64_t value, int peer_rank, const std::string& what) {
  check_peer(native, peer_rank);
  const uint64_t& seen = view_word(word);
  const py::gil_scoped_release no_gil;
  ops::await_signal(*native.group, seen, value, peer_rank, what, signal_check());
}

}  // namespace

void bind_slots(py::class_<NativeGroup, std::shared_ptr<NativeGroup>>& group) {
  group
      .def("copy_chunks",
           &copy_chunks,
           py::arg("src"),
           py::arg("dst"),
           py::arg("num_bytes"),
           py::arg("is_streaming"))
      .def("post_signal", &post_signal, py::arg("word"), py::arg("value"), py::arg("peer_rank"))
      .def("await_signal",
           &await_signal,
           py::arg("word"),
           py::arg("value"),
           py::arg("peer_rank"),
           py::arg("what"))
      .def(
          "give_up_slots",
          [](NativeGroup& self, const std::string& message) {
            self.group->check_fork("give_up_slots");
            ops::give_up_slots(*self.group, message);
          },
          py::arg("message"));
}

}  // namespace moe::bindings
