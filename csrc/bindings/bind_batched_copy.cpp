#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/shared/count_writes.h"
#include "bindings/shared/native_group.h"
#include "bindings/shared/signature.h"
#include "bindings/shared/submitted.h"
#include "bindings/shared/tensor_view.h"
#include "bindings/shared/without_gil.h"
#include "cpu/strided_copy.h"
#include "cpu/this_machine.h"
#include "cpu/thread_pool.h"
#include "layout/strided.h"
#include "ops/batched_copy.h"
#include "ops/marked_ranges.h"
#include "ops/piece_checksums.h"

namespace moe::bindings {

namespace py = pybind11;
using layout::ReceiveEntry;
using ops::BatchedCopy;
using ops::CopyItem;
using ops::PieceChecksums;
using ops::PreparedCopies;

namespace {

/// Attribute names, made once: a lookup by an interned name compares addresses.
struct TensorNames {
  PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* is_conj = PyUnicode_InternFromString("is_conj");
  PyObject* is_cpu = PyUnicode_InternFromString("is_cpu");
  PyObject* itemsize = PyUnicode_InternFromString("itemsize");
  PyObject* shape = PyUnicode_InternFromString("shape");
  PyObject* stride = PyUnicode_InternFromString("stride");
};

const TensorNames& tensor_names() {
  static const TensorNames interned;
  return interned;
}

py::object attribute(py::handle object, PyObject* name) {
  auto value = py::reinterpret_steal<py::object>(PyObject_GetAttr(object.ptr(), name));
  if (!value)
    throw py::error_already_set();
  return value;
}

py::object call(py::handle object, PyObject* name) {
  auto value = py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(object.ptr(), name));
  if (!value)
    throw py::error_already_set();
  return value;
}

/// Reads tensors; dtypes, of which there are few, are looked at once each.
class TensorReader {
 public:
  /// Fills in all of @p item but the ends' ranks and task. @throws InvalidArgument
  void read(py::handle tensor, CopyItem* item) {
    const Dtype& dtype = find_dtype(attribute(tensor, tensor_names().dtype));
    MOE_CHECK(attribute(tensor, tensor_names().is_cpu).cast<bool>(),
              "a tensor must be in CPU memory, got device ",
              py::str(tensor.attr("device")).cast<std::string>());
    MOE_CHECK(!(dtype.is_complex && call(tensor, tensor_names().is_conj).cast<bool>()) &&
                  !is_negated(tensor),
              "a tensor's conjugate or negative is not in its memory; resolve it first");
    const py::tuple shape = attribute(tensor, tensor_names().shape);
    const py::tuple strides = call(tensor, tensor_names().stride);
    sizes_.clear();
    strides_.clear();
    for (const py::handle size : shape)
      sizes_.push_back(PyLong_AsLongLong(size.ptr()));
    for (const py::handle stride : strides)
      strides_.push_back(PyLong_AsLongLong(stride.ptr()));
    item->data =
        reinterpret_cast<std::byte*>(call(tensor, tensor_names().data_ptr).cast<uintptr_t>());
    item->shape = layout::make_strided(
        sizes_.data(), strides_.data(), static_cast<int>(sizes_.size()), dtype.bytes);
    check_memory(tensor, item->data, item->shape.span(), dtype.bytes);
    std::memcpy(item->dtype, dtype.name, sizeof(dtype.name));
  }

 private:
  struct Dtype {
    char name[ReceiveEntry::kNameBytes] = {};
    int64_t bytes = 0;
    bool is_complex = false;
  };

  const Dtype& find_dtype(const py::object& object) {
    const auto found = dtypes_.find(object.ptr());
    if (found != dtypes_.end())
      return found->second;
    Dtype dtype;
    const auto text = py::str(object).cast<std::string>();
    const size_t dot = text.rfind('.');
    const std::string name = dot == std::string::npos ? text : text.substr(dot + 1);
    std::memcpy(dtype.name, name.data(), std::min(name.size(), sizeof(dtype.name)));
    dtype.bytes = attribute(object, tensor_names().itemsize).cast<int64_t>();
    dtype.is_complex = object.attr("is_complex").cast<bool>();
    return dtypes_.emplace(object.ptr(), dtype).first->second;
  }

  std::unordered_map<PyObject*, Dtype> dtypes_;
  std::vector<int64_t> sizes_;
  std::vector<int64_t> strides_;
};

/// Fills in task and peer. @return the tensor between them. @throws InvalidType
py::handle read_fields(py::handle entry, const char* what, CopyItem* item) {
  if (py::isinstance<py::tuple>(entry) && py::len(entry) == 3) {
    PyObject* const* fields = &PyTuple_GET_ITEM(entry.ptr(), 0);
    try {
      item->task_id = py::handle(fields[0]).cast<int64_t>();
      item->peer_rank = py::handle(fields[2]).cast<int>();
      return fields[1];
    } catch (const py::cast_error&) {
      // named below
    }
  }
  throw InvalidType(concat("an item of the ",
                           what,
                           "s must be (task_id, tensor, peer_rank), got ",
                           py::repr(entry).cast<std::string>()));
}

/// Items `(task_id, tensor, peer_rank)`. What is wrong with a tensor goes to @p problem.
std::vector<CopyItem> read_items(const py::list& list,
                                 const char* what,
                                 TensorReader* reader,
                                 std::string* problem) {
  std::vector<CopyItem> items;
  items.reserve(list.size());
  for (const py::handle entry : list) {
    CopyItem item;
    const py::handle tensor = read_fields(entry, what, &item);
    try {
      reader->read(tensor, &item);
    } catch (const InvalidArgument& error) {
      if (problem->empty())
        *problem = concat("task ", item.task_id, " of the ", what, "s: ", error.what());
    }
    items.push_back(item);
  }
  return items;
}

std::shared_ptr<PreparedCopies> prepare(const BatchedCopy& engine,
                                        const py::list& sends,
                                        const py::list& receives) {
  TensorReader reader;
  std::string problem;
  auto send_items = read_items(sends, "send", &reader, &problem);
  auto receive_items = read_items(receives, "receive", &reader, &problem);
  auto owner = keep_alive(py::make_tuple(sends, receives));
  const py::gil_scoped_release no_gil;
  return std::make_shared<PreparedCopies>(std::move(send_items),
                                          std::move(receive_items),
                                          engine.rank_idx(),
                                          engine.num_ranks(),
                                          std::move(problem),
                                          std::move(owner));
}

py::dict run(BatchedCopy& engine,
             const std::shared_ptr<PreparedCopies>& prepared,
             bool with_checksums) {
  const auto stats =
      without_gil([&] { return engine.run(prepared, with_checksums, signal_check()); });
  py::dict values;
  values["direct_bytes"] = stats.direct_bytes;
  values["slot_bytes"] = stats.slot_bytes;
  values["local_bytes"] = stats.local_bytes;
  values["copy_ns"] = stats.copy_ns;
  values["total_ns"] = stats.total_ns;
  return values;
}

/// Copies tensors of this process to others of the same dtypes and sizes, past the cache where it
/// would not hold them.
void copy_tensors(const py::list& sources, const py::list& destinations, int num_threads) {
  constexpr int64_t kPartBytes = int64_t{1} << 20;
  MOE_CHECK_EQ(destinations.size(), sources.size(), "destinations");
  TensorReader reader;
  std::vector<CopyItem> from(sources.size());
  std::vector<CopyItem> to(sources.size());
  ops::CopyStream stream;
  for (size_t i = 0; i < from.size(); ++i) {
    reader.read(sources[i], &from[i]);
    reader.read(destinations[i], &to[i]);
    MOE_CHECK(
        std::strcmp(from[i].dtype, to[i].dtype) == 0 && from[i].shape.bytes == to[i].shape.bytes,
        "destination ",
        i,
        " must have ",
        from[i].shape.bytes,
        " bytes of ",
        from[i].dtype,
        " as its source has, got ",
        to[i].shape.bytes,
        " of ",
        to[i].dtype);
    if (from[i].shape.bytes > 0)
      stream.add(from[i].place(), to[i].place(), from[i].shape.bytes, nullptr);
  }
  {
    const py::gil_scoped_release no_gil;
    const cpu::StoreMode mode =
        cpu::store_mode_of_copies(2 * stream.end(), cpu::last_level_cache_bytes());
    const cpu::RowKernels& kernels = cpu::best_row_kernels();
    cpu::ThreadPool(stream.end() < cpu::kBytesWorthAThread ? 1 : num_threads)
        .parallel_for((stream.end() + kPartBytes - 1) / kPartBytes,
                      [&](int64_t begin, int64_t end) {
                        stream.copy(kernels,
                                    begin * kPartBytes,
                                    std::min(end * kPartBytes, stream.end()),
                                    mode,
                                    false);
                        kernels.store_fence();
                      });
  }
  count_writes(destinations);
}

uint64_t checksum_of(py::handle tensor) {
  TensorReader reader;
  CopyItem item;
  reader.read(tensor, &item);
  const py::gil_scoped_release no_gil;
  return cpu::checksum(item.place(), item.shape.bytes);
}

std::shared_ptr<PieceChecksums> make_piece_checksums(const py::list& pieces) {
  TensorReader reader;
  std::string problem;
  auto items = read_items(pieces, "piece", &reader, &problem);
  if (!problem.empty())
    throw InvalidArgument(problem);
  return std::make_shared<PieceChecksums>(std::move(items), keep_alive(py::make_tuple(pieces)));
}

/// Numbers of 8 bytes.
py::bytes piece_checksums(const PieceChecksums& self,
                          const std::vector<std::shared_ptr<PreparedCopies>>& sent,
                          int num_threads) {
  const auto checksums = without_gil([&] { return self.compute(sent, num_threads); });
  return {reinterpret_cast<const char*>(checksums.data()), checksums.size() * sizeof(uint64_t)};
}

/// Memory of @p buffer. @throws InvalidArgument  It has not @p bytes.
std::byte* memory_of(const char* name, const py::buffer& buffer, int64_t bytes, bool is_written) {
  const py::buffer_info view = buffer.request(is_written);
  MOE_CHECK(view.size * view.itemsize == bytes,
            name,
            " must have ",
            bytes,
            " bytes, got ",
            view.size * view.itemsize);
  return static_cast<std::byte*>(view.ptr);
}

int64_t count_blocks(const PieceChecksums& self, size_t first, size_t end, int64_t block_bytes) {
  MOE_CHECK(block_bytes > 0 && block_bytes % cpu::kChecksumBlockBytes == 0,
            "block_bytes must be a multiple of ",
            cpu::kChecksumBlockBytes,
            ", got ",
            block_bytes);
  int64_t num_blocks = 0;
  for (size_t idx = first; idx < end; ++idx)
    num_blocks += self.num_blocks(idx, block_bytes);
  return num_blocks;
}

void block_checksums(const PieceChecksums& self,
                     int64_t block_bytes,
                     const py::buffer& sums,
                     const std::optional<py::buffer>& wanted,
                     int num_threads) {
  const int64_t num_blocks = count_blocks(self, 0, self.num_pieces(), block_bytes);
  std::byte* const values = memory_of("sums", sums, num_blocks * 8, true);
  const std::byte* const flags = wanted ? memory_of("wanted", *wanted, num_blocks, false) : nullptr;
  const py::gil_scoped_release no_gil;
  self.compute_blocks(block_bytes,
                      reinterpret_cast<const uint8_t*>(flags),
                      num_threads,
                      reinterpret_cast<uint64_t*>(values));
}

py::bytes checksums_of_blocks(const PieceChecksums& self,
                              int64_t block_bytes,
                              const py::buffer& sums) {
  const int64_t num_blocks = count_blocks(self, 0, self.num_pieces(), block_bytes);
  const std::byte* const values = memory_of("sums", sums, num_blocks * 8, false);
  const auto checksums = self.of_blocks(block_bytes, reinterpret_cast<const uint64_t*>(values));
  return {reinterpret_cast<const char*>(checksums.data()), checksums.size() * sizeof(uint64_t)};
}

void move_blocks(const PieceChecksums& self,
                 size_t first,
                 size_t end,
                 int64_t block_bytes,
                 const py::buffer& wanted,
                 const py::buffer& packed,
                 bool is_packing,
                 int num_threads) {
  MOE_CHECK(first <= end && end <= self.num_pieces(), "no pieces ", first, " to ", end);
  const int64_t num_blocks = count_blocks(self, first, end, block_bytes);
  const std::byte* const flags = memory_of("wanted", wanted, num_blocks, false);
  const int64_t bytes = packed.request().size;
  std::byte* const memory = memory_of("packed", packed, bytes, is_packing);
  const py::gil_scoped_release no_gil;
  self.move_blocks(first,
                   end,
                   block_bytes,
                   reinterpret_cast<const uint8_t*>(flags),
                   memory,
                   bytes,
                   is_packing,
                   num_threads);
}

/// Marks blocks whose masks have a flag set.
/// @param masks  Bytes of each mask, with its ranges: rows of four numbers, blocks [first, end) and
///   bytes [first, end).
void mark_ranges(const std::vector<std::pair<py::buffer, py::buffer>>& masks,
                 const py::buffer& marked) {
  const py::buffer_info blocks = marked.request(true);
  for (const auto& [mask, ranges] : masks) {
    const py::buffer_info flags = mask.request();
    const py::buffer_info rows = ranges.request();
    MOE_CHECK(rows.itemsize == 8 && rows.ndim == 2 && rows.shape[1] == 4,
              "ranges must be rows of 4 numbers of 8 bytes");
    const py::gil_scoped_release no_gil;
    ops::mark_ranges(
        {static_cast<const uint8_t*>(flags.ptr), static_cast<size_t>(flags.size)},
        {static_cast<const ops::MarkedRange*>(rows.ptr), static_cast<size_t>(rows.shape[0])},
        {static_cast<uint8_t*>(blocks.ptr), static_cast<size_t>(blocks.size)});
  }
}

}  // namespace

void bind_batched_copy(py::module_& module) {
  py::class_<PreparedCopies, std::shared_ptr<PreparedCopies>>(module, "PreparedCopies")
      .def_property_readonly("problem", &PreparedCopies::problem);
  py::class_<BatchedCopy, std::shared_ptr<BatchedCopy>>(module, "BatchedCopy")
      .def_static(
          "create",
          [](const std::shared_ptr<NativeGroup>& native, int64_t slot_bytes, int num_slots) {
            const py::gil_scoped_release no_gil;
            return BatchedCopy::create(native->group, {slot_bytes, num_slots}, signal_check());
          },
          Signature("group, slot_bytes, num_slots"))
      .def_property_readonly("slot_bytes",
                             [](const BatchedCopy& self) { return self.config().slot_bytes; })
      .def_property_readonly("num_slots",
                             [](const BatchedCopy& self) { return self.config().num_slots; })
      .def("prepare", &prepare, Signature("sends, receives"))
      .def("run", &run, Signature("prepared, with_checksums=False"))
      .def(
          "reject",
          [](BatchedCopy& self, const std::string& message) {
            self.reject(message, signal_check());
          },
          py::arg("message"),
          NoGil())
      .def("destroy", &BatchedCopy::destroy, NoGil());
  py::class_<PieceChecksums, std::shared_ptr<PieceChecksums>>(module, "PieceChecksums")
      .def(py::init(&make_piece_checksums), py::arg("pieces"))
      .def("compute", &piece_checksums, Signature("sent, num_threads"))
      .def("compute_blocks", &block_checksums, Signature("block_bytes, sums, wanted, num_threads"))
      .def("of_blocks", &checksums_of_blocks, Signature("block_bytes, sums"))
      .def("move_blocks",
           &move_blocks,
           Signature("first, end, block_bytes, wanted, packed, is_packing, num_threads"));
  module.def("checksum", &checksum_of, py::arg("tensor"));
  module.def("mark_ranges", &mark_ranges, Signature("masks, marked"));
  module.def("copy_tensors", &copy_tensors, Signature("sources, destinations, num_threads"));
}

}  // namespace moe::bindings
