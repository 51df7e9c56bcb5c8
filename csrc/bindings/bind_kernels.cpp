#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/shared/byte_buffers.h"
#include "bindings/shared/signature.h"
#include "core/error.h"
#include "core/sync.h"
#include "cpu/crc32c.h"
#include "cpu/roof.h"
#include "cpu/row_kernels.h"

namespace moe::bindings {
namespace {

using cpu::RoofKernels;

const RoofKernels& roof_kernels(const std::optional<std::string>& isa) {
  if (!isa)
    return cpu::best_roof_kernels();
  const RoofKernels* kernels = cpu::find_roof_kernels(*isa);
  MOE_CHECK(kernels, "no roofs named '", *isa, "' on this machine");
  return *kernels;
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const char* name : {"portable", "avx2", "avx512"})
    if (cpu::find_row_kernels(name))
      names.emplace_back(name);
  return names;
}

uint32_t crc32c(const py::buffer& data, const std::optional<std::string>& isa, uint32_t crc) {
  const cpu::Crc32c* const found = isa ? cpu::find_crc32c(*isa) : &cpu::best_crc32c();
  MOE_CHECK(found, "no crc32c named '", *isa, "' on this machine");
  const Bytes bytes(data, false);
  return found->extend(crc, bytes.data(), static_cast<size_t>(bytes.size()));
}

std::vector<std::string> checksum_instruction_sets() {
  std::vector<std::string> names;
  for (const char* name : {"portable", "sse4.2", "avx512", "armv8-crc"})
    if (cpu::find_crc32c(name))
      names.emplace_back(name);
  return names;
}

void check_lines(int64_t bytes, const char* what) {
  MOE_CHECK(bytes % 64 == 0, what, ": expected a multiple of 64 bytes, got ", bytes);
}

class FanOut {
 public:
  FanOut(const py::buffer& src, int64_t row_bytes, const std::vector<py::buffer>& dst)
      : rows_(src, false),
        row_bytes_(row_bytes),
        copies_(dst, rows_.size(), 64, true, "destination") {
    check_lines(row_bytes, "row");
    MOE_CHECK(row_bytes > 0 && rows_.size() % row_bytes == 0,
              "source: expected whole rows of ",
              row_bytes,
              " bytes, got ",
              rows_.size(),
              " bytes");
    rows_.check(rows_.size(), 64, "source");
  }

  void run(const RoofKernels& kernels, cpu::StoreMode mode) const {
    kernels.fan_out(
        rows_.data(), rows_.size() / row_bytes_, row_bytes_, copies_.data(), copies_.size(), mode);
  }

 private:
  Bytes rows_;
  int64_t row_bytes_;
  ByteRows copies_;
};

class Sum {
 public:
  Sum(const std::vector<py::buffer>& src, const py::buffer& dst)
      : sum_(dst, true), streams_(src, sum_.size(), 64, false, "source") {
    check_lines(sum_.size(), "sum");
    sum_.check(sum_.size(), 64, "sum");
  }

  void run(const RoofKernels& kernels, cpu::StoreMode mode) const {
    kernels.sum(streams_.data(), streams_.size(), sum_.size(), sum_.data(), mode);
  }

 private:
  Bytes sum_;
  ByteRows streams_;
};

void roof_fan_out(const py::buffer& src,
                  int64_t row_bytes,
                  const std::vector<py::buffer>& dst,
                  const std::optional<std::string>& isa,
                  bool streaming,
                  int num_passes) {
  const RoofKernels& kernels = roof_kernels(isa);
  const FanOut fan_out(src, row_bytes, dst);
  const py::gil_scoped_release release;
  for (int i = 0; i < num_passes; ++i)
    fan_out.run(kernels, cpu::store_mode(streaming));
}

void roof_sum(const std::vector<py::buffer>& src,
              const py::buffer& dst,
              const std::optional<std::string>& isa,
              bool streaming,
              int num_passes) {
  const RoofKernels& kernels = roof_kernels(isa);
  const Sum sum(src, dst);
  const py::gil_scoped_release release;
  for (int i = 0; i < num_passes; ++i)
    sum.run(kernels, cpu::store_mode(streaming));
}

void roof_copy(const py::buffer& src,
               const py::buffer& dst,
               const std::optional<std::string>& isa,
               bool streaming,
               int num_passes) {
  const RoofKernels& kernels = roof_kernels(isa);
  const Bytes from(src, false);
  const Bytes to(dst, true);
  check_lines(from.size(), "source");
  from.check(from.size(), 64, "source");
  to.check(from.size(), 64, "destination");
  const py::gil_scoped_release release;
  for (int i = 0; i < num_passes; ++i)
    kernels.copy(from.data(), to.data(), from.size(), cpu::store_mode(streaming));
}

/// Meets the ranks of a machine: each raises its own word and yields its core until all have.
class MeetingPlace {
 public:
  /// @param words  A cache line for every rank, shared by all: how often it has come.
  MeetingPlace(std::span<uint64_t> words, int rank_idx)
      : words_(words), own_(static_cast<size_t>(rank_idx) * kLineWords) {
    MOE_CHECK(rank_idx >= 0 && own_ < words.size(),
              "rank ",
              rank_idx,
              " has no word among ",
              words.size() / kLineWords);
    num_met_ = words[own_];  // which nobody else writes
  }

  void meet() {
    sync::store_release(words_[own_], ++num_met_);
    for (size_t peer = 0; peer < words_.size(); peer += kLineWords)
      for (int64_t num_yields = 0; sync::load_acquire(words_[peer]) < num_met_; ++num_yields)
        yield(num_yields, peer / kLineWords);
  }

 private:
  static constexpr size_t kLineWords = 8;
  static constexpr int64_t kYieldsPerLook = 4096;
  static constexpr std::chrono::seconds kMostWait{60};

  void yield(int64_t num_yields, size_t peer_rank) {
    sync::yield();
    const auto now = [] { return std::chrono::steady_clock::now(); };
    if (num_yields == 0)
      since_ = now();
    MOE_CHECK(num_yields % kYieldsPerLook != 0 || now() - since_ < kMostWait,
              "rank ",
              peer_rank,
              " did not come to meeting ",
              num_met_,
              " of a roof in ",
              kMostWait.count(),
              " s");
  }

  std::span<uint64_t> words_;
  size_t own_;
  uint64_t num_met_ = 0;
  std::chrono::steady_clock::time_point since_;
};

void roof_of_meeting_ranks(
    const std::vector<std::pair<py::buffer, std::vector<py::buffer>>>& fan_outs,
    const std::vector<std::pair<std::vector<py::buffer>, py::buffer>>& sums,
    int64_t row_bytes,
    const py::buffer& words,
    int rank_idx,
    const std::optional<std::string>& isa,
    bool streaming,
    int num_passes) {
  const RoofKernels& kernels = roof_kernels(isa);
  const cpu::StoreMode mode = cpu::store_mode(streaming);
  std::vector<FanOut> dispatch;
  for (const auto& [src, dst] : fan_outs)
    dispatch.emplace_back(src, row_bytes, dst);
  std::vector<Sum> combine;
  for (const auto& [src, dst] : sums)
    combine.emplace_back(src, dst);
  const Bytes lines(words, true);
  lines.check(lines.size(), alignof(uint64_t), "words");
  MeetingPlace place(
      {reinterpret_cast<uint64_t*>(lines.data()), static_cast<size_t>(lines.size()) / 8}, rank_idx);
  const py::gil_scoped_release release;
  for (int i = 0; i < num_passes; ++i) {
    place.meet();  // who sends how much where
    for (const FanOut& part : dispatch)
      part.run(kernels, mode);
    place.meet();  // all rows have arrived
    place.meet();  // all experts are done
    for (const Sum& part : combine)
      part.run(kernels, mode);
    place.meet();  // all rows have been read
  }
}

}  // namespace

/// Adds the submodule `kernels`: names of instruction sets, and the roofs for benchmarks (in
/// `num_passes` over the same bytes). Every buffer is one-dimensional, of bytes, and is used in
/// place.
void bind_kernels(py::module_& parent) {
  py::module_ m = parent.def_submodule("kernels", "Roofs of the inner loops over rows.");
  m.def("instruction_sets", &instruction_sets, "Names usable as `isa` here, slowest first.");
  m.def("best_instruction_set", [] { return cpu::best_row_kernels().name; });
  m.def("checksum_instruction_sets",
        &checksum_instruction_sets,
        "Names usable as `isa` of crc32c() here.");
  m.def("crc32c", &crc32c, Signature("data, isa=None, crc=0"));
  m.def("roof_fan_out",
        &roof_fan_out,
        Signature("src, row_bytes, dst, isa=None, *, streaming=True, num_passes=1"));
  m.def("roof_sum", &roof_sum, Signature("src, dst, isa=None, *, streaming=True, num_passes=1"));
  m.def("roof_copy", &roof_copy, Signature("src, dst, isa=None, *, streaming=True, num_passes=1"));
  m.def(
      "roof_of_meeting_ranks",
      &roof_of_meeting_ranks,
      "A dispatch and a combine by ranks that do no more than move their bytes and meet; words: a "
      "cache line for each of them, shared, zero at first.",
      Signature("fan_outs, sums, row_bytes, words, rank_idx, isa=None, *, "
                "streaming=True, num_passes=1"));
}

}  // namespace moe::bindings
