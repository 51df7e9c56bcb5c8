#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "bindings/shared/errors.h"
#include "bindings/shared/heap_stats.h"
#include "core/error.h"
#include "heap/peer_mesh.h"
#include "heap/shm_heap.h"
#include "heap/window_allocator.h"
#include "host_testing.h"

namespace moe::testing {

namespace {

using heap::PeerMesh;
using heap::ShmHeap;
using heap::WindowAllocator;
using NoGil = py::call_guard<py::gil_scoped_release>;

/// Waits for the mesh to report a change, without the service thread ever needing the GIL.
class ChangeWaiter {
 public:
  explicit ChangeWaiter(std::shared_ptr<PeerMesh> mesh) : mesh_(std::move(mesh)) {
    id_ = mesh_->add_listener([this] {
      const std::lock_guard lock(mutex_);
      ++num_changes_;
      changed_.notify_all();
    });
  }
  ~ChangeWaiter() { mesh_->remove_listener(id_); }

  uint64_t num_changes() const {
    const std::lock_guard lock(mutex_);
    return num_changes_;
  }

  /// @return Whether more than @p seen changes were reported within @p timeout_s.
  bool wait_beyond(uint64_t seen, double timeout_s) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(
        lock, std::chrono::duration<double>(timeout_s), [&] { return num_changes_ > seen; });
  }

 private:
  std::shared_ptr<PeerMesh> mesh_;
  int id_ = -1;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t num_changes_ = 0;
};

py::tuple to_tuple(const Offer& offer) {
  return py::make_tuple(offer.segment_idx, offer.offset, offer.bytes);
}

Offer to_offer(const py::tuple& values) {
  return Offer{
      values[0].cast<uint32_t>(), 0, values[1].cast<uint64_t>(), values[2].cast<uint64_t>()};
}

/// A class that `_host` has bound, to be given further methods. They are virtual: what runs is the
/// code of `_host`, with its state.
template <typename T>
py::class_<T, std::shared_ptr<T>> bound_class() {
  return py::reinterpret_borrow<py::class_<T, std::shared_ptr<T>>>(py::type::of<T>());
}

void extend_mesh(py::module_& module) {
  py::enum_<PeerState>(module, "PeerState")
      .value("ALIVE", PeerState::kAlive)
      .value("LEFT", PeerState::kLeft)
      .value("DEAD", PeerState::kDead);
  bound_class<PeerMesh>()
      .def_property_readonly("rank_idx", &PeerMesh::rank_idx)
      .def_property_readonly("num_ranks", &PeerMesh::num_ranks)
      .def("state", &PeerMesh::state, py::arg("rank_idx"))
      .def("post",
           &PeerMesh::post,
           py::arg("rank_idx"),
           py::arg("channel"),
           py::arg("sequence"),
           py::arg("payload"),
           NoGil())
      .def(
          "take",
          [](PeerMesh& self, int rank_idx, uint64_t channel, uint64_t sequence) -> py::object {
            std::string payload;
            if (!self.take(rank_idx, channel, sequence, &payload))
              return py::none();
            return py::bytes(payload);
          },
          py::arg("rank_idx"),
          py::arg("channel"),
          py::arg("sequence"))
      .def("peer_segment_bytes", &PeerMesh::peer_segment_bytes);
  py::class_<ChangeWaiter, std::shared_ptr<ChangeWaiter>>(module, "ChangeWaiter")
      .def(py::init<std::shared_ptr<PeerMesh>>())
      .def_property_readonly("num_changes", &ChangeWaiter::num_changes)
      .def("wait_beyond",
           &ChangeWaiter::wait_beyond,
           py::arg("seen"),
           py::arg("timeout_s"),
           NoGil());
}

void extend_heap(py::module_& module) {
  py::class_<Window, std::shared_ptr<Window>>(module, "Window", py::buffer_protocol())
      .def_property_readonly("offer", [](const Window& self) { return to_tuple(self.offer()); })
      .def_property_readonly("bytes", &Window::bytes)
      .def_property_readonly(
          "address", [](const Window& self) { return reinterpret_cast<uintptr_t>(self.data()); })
      .def("shrink", &Window::shrink, py::arg("bytes"))
      .def("quarantine", &Window::quarantine)
      .def_buffer([](Window& self) {
        return py::buffer_info(reinterpret_cast<uint8_t*>(self.data()),
                               static_cast<py::ssize_t>(self.bytes()));
      });
  bound_class<ShmHeap>()
      .def("allocate", &ShmHeap::allocate, py::arg("bytes"), NoGil())
      .def("allocate_free", &ShmHeap::allocate_free, py::arg("most_bytes"), NoGil())
      .def(
          "resolve",
          // The peer's bytes themselves: writes through the view are seen by the owner.
          [](ShmHeap& self, int rank_idx, const py::tuple& offer) -> py::object {
            const Offer place = to_offer(offer);
            std::byte* data = self.try_resolve(rank_idx, place);
            if (data == nullptr)
              return py::none();
            return py::memoryview::from_memory(data, static_cast<py::ssize_t>(place.bytes));
          },
          py::arg("rank_idx"),
          py::arg("offer"),
          py::keep_alive<0, 1>())
      .def(
          "find",
          [](const ShmHeap& self, uintptr_t address, uint64_t bytes) -> py::object {
            Offer offer;
            if (!self.find(reinterpret_cast<const void*>(address), bytes, &offer))
              return py::none();
            return to_tuple(offer);
          },
          py::arg("address"),
          py::arg("bytes"))
      .def("available_bytes", &ShmHeap::available_bytes)
      .def("end_quarantine", &ShmHeap::end_quarantine)
      .def("reserve", &ShmHeap::reserve, py::arg("bytes"), NoGil())
      .def("trim", &ShmHeap::trim, NoGil())
      .def(
          "stats",
          [](const ShmHeap& self, bool verify_huge_pages) {
            heap::HeapStats stats;
            {
              const py::gil_scoped_release no_gil;
              stats = self.stats(verify_huge_pages);
            }
            return py::module_::import("types").attr("SimpleNamespace")(
                **bindings::heap_stats_dict(stats));
          },
          py::arg("verify_huge_pages") = false);
}

/// A block by number: Python holds no pointers into the allocator.
class NumberedAllocator {
 public:
  void add_segment(uint32_t segment_idx, uint64_t bytes, uint64_t offset) {
    allocator_.add_segment(segment_idx, bytes, offset);
  }
  void extend(uint32_t segment_idx, uint64_t bytes, bool is_upper) {
    allocator_.extend(segment_idx, bytes, end_of(is_upper));
  }
  uint64_t missing_bytes(uint32_t segment_idx, uint64_t bytes, bool is_upper) const {
    return allocator_.missing_bytes(segment_idx, bytes, end_of(is_upper));
  }

  py::object allocate(uint64_t bytes) { return number(allocator_.allocate(bytes)); }
  py::object allocate_largest(uint64_t bytes) { return number(allocator_.allocate_largest(bytes)); }
  void free(size_t block_idx) {
    allocator_.free(block(block_idx));
    blocks_[block_idx] = nullptr;
  }
  void shrink(size_t block_idx, uint64_t bytes) { allocator_.shrink(block(block_idx), bytes); }
  void quarantine(size_t block_idx) { allocator_.quarantine(block(block_idx)); }
  void end_quarantine() { allocator_.end_quarantine(); }
  uint64_t largest_free_bytes() const { return allocator_.largest_free_bytes(); }
  py::tuple place(size_t block_idx) {
    const WindowAllocator::Block* found = block(block_idx);
    return py::make_tuple(found->segment_idx, found->offset, found->bytes);
  }

  /// (offset, bytes, is_free) of every block of a segment.
  py::list blocks(uint32_t segment_idx) const {
    py::list found;
    for (const WindowAllocator::Block* block : allocator_.blocks(segment_idx))
      found.append(py::make_tuple(
          block->offset, block->bytes, block->state == WindowAllocator::BlockState::kFree));
    return found;
  }

  py::dict counters() const {
    const WindowAllocator::Counters& counters = allocator_.counters();
    py::dict values;
    values["free_bytes"] = counters.free_bytes;
    values["live_bytes"] = counters.live_bytes;
    values["quarantined_bytes"] = counters.quarantined_bytes;
    values["peak_live_bytes"] = counters.peak_live_bytes;
    values["num_live"] = counters.num_live;
    values["num_allocations"] = counters.num_allocations;
    return values;
  }

 private:
  static WindowAllocator::End end_of(bool is_upper) {
    return is_upper ? WindowAllocator::End::kUpper : WindowAllocator::End::kLower;
  }

  py::object number(WindowAllocator::Block* block) {
    if (block == nullptr)
      return py::none();
    blocks_.push_back(block);
    return py::int_(blocks_.size() - 1);
  }

  WindowAllocator::Block* block(size_t block_idx) const {
    MOE_CHECK(block_idx < blocks_.size() && blocks_[block_idx] != nullptr,
              "block ",
              block_idx,
              " is not live; ",
              blocks_.size(),
              " were ever made");
    return blocks_[block_idx];
  }

  WindowAllocator allocator_;
  std::vector<WindowAllocator::Block*> blocks_;
};

void bind_allocator(py::module_& module) {
  py::class_<NumberedAllocator>(module, "WindowAllocator")
      .def(py::init<>())
      .def("add_segment",
           &NumberedAllocator::add_segment,
           py::arg("segment_idx"),
           py::arg("bytes"),
           py::arg("offset") = 0)
      .def("extend", &NumberedAllocator::extend)
      .def("missing_bytes", &NumberedAllocator::missing_bytes)
      .def("allocate", &NumberedAllocator::allocate, py::arg("bytes"))
      .def("allocate_largest", &NumberedAllocator::allocate_largest, py::arg("most_bytes"))
      .def("free", &NumberedAllocator::free, py::arg("block_idx"))
      .def("shrink", &NumberedAllocator::shrink, py::arg("block_idx"), py::arg("bytes"))
      .def("quarantine", &NumberedAllocator::quarantine, py::arg("block_idx"))
      .def("end_quarantine", &NumberedAllocator::end_quarantine)
      .def("largest_free_bytes", &NumberedAllocator::largest_free_bytes)
      .def("place", &NumberedAllocator::place, py::arg("block_idx"))
      .def("blocks", &NumberedAllocator::blocks, py::arg("segment_idx"))
      .def("counters", &NumberedAllocator::counters)
      .def_static("rounded_bytes", &WindowAllocator::rounded_bytes, py::arg("bytes"));
}

/// Throws what the package throws, by the name of the class.
void throw_error(const std::string& kind, const std::string& message) {
  const FailureSite site{{1, 3}, "dispatch", "rows", 7};
  if (kind == "InvalidArgument")
    throw InvalidArgument(message);
  if (kind == "InvalidType")
    throw InvalidType(message);
  if (kind == "PeerFailed")
    throw PeerFailed(message, site);
  if (kind == "PeerTimeout")
    throw PeerTimeout(message, site);
  if (kind == "Evicted")
    throw Evicted(message, site);
  if (kind == "SystemError")
    throw SystemError(message, 12);
  if (kind == "ConcurrentUse")
    throw ConcurrentUse(message);
  CapacityError error(message, 64, 32);
  error.ranks = {2};
  error.needed_rows = {5, 6};
  throw error;
}

}  // namespace

}  // namespace moe::testing

PYBIND11_MODULE(_host_testing, module) {
  using namespace moe::testing;
  module.doc() = "What tests need of the CPU backend and the package does not offer.";
  py::module_::import("moe_comm._host");
  moe::bindings::register_errors();
  extend_mesh(module);
  extend_heap(module);
  bind_allocator(module);
  bind_row_kernels(module);
  module.def("throw_error", [](const std::string& kind, const py::bytes& message) {
    throw_error(kind, std::string(message));
  });
}
