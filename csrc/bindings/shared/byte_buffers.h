#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/error.h"

namespace moe::bindings {

namespace py = pybind11;

/// Bytes of a Python object, which stays exported while this lives.
class Bytes {
 public:
  Bytes(const py::buffer& object, bool is_written) : info_(object.request(is_written)) {
    MOE_CHECK(info_.ndim == 1 && info_.itemsize == 1 && (info_.size < 2 || info_.strides[0] == 1),
              "expected a contiguous buffer of bytes with 1 dimension, got ",
              info_.ndim,
              " dimensions and elements of ",
              info_.itemsize,
              " bytes");
  }

  std::byte* data() const { return static_cast<std::byte*>(info_.ptr); }
  int64_t size() const { return info_.size; }

  void check(int64_t bytes, int64_t alignment, const char* what) const {
    MOE_CHECK(size() == bytes, what, ": expected ", bytes, " bytes, got ", size());
    const auto misalignment = reinterpret_cast<uintptr_t>(data()) % alignment;
    MOE_CHECK(misalignment == 0,
              what,
              ": expected an address aligned to ",
              alignment,
              " bytes, got one ",
              misalignment,
              " past");
  }

 private:
  py::buffer_info info_;
};

/// The addresses of several byte buffers of one size.
class ByteRows {
 public:
  ByteRows(const std::vector<py::buffer>& objects,
           int64_t bytes,
           int64_t alignment,
           bool is_written,
           const char* what) {
    rows_.reserve(objects.size());
    for (const py::buffer& object : objects) {
      rows_.emplace_back(object, is_written);
      rows_.back().check(bytes, alignment, what);
      addresses_.push_back(rows_.back().data());
    }
  }

  std::byte* const* data() const { return addresses_.data(); }
  int size() const { return static_cast<int>(addresses_.size()); }

 private:
  std::vector<Bytes> rows_;
  std::vector<std::byte*> addresses_;
};

}  // namespace moe::bindings
