// Kernels without peers: strided copies, and gradients of weights.

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "core/error.h"
#include "cpu/row_kernels.h"
#include "cpu/strided_copy.h"
#include "kernels/combine.h"
#include "kernels/strided_copy.h"
#include "schedules/kernel_case.h"
#include "schedules/run.h"

namespace moe::simt::checker {
namespace {

using layout::StridedBytes;

/// Offset of a logical byte.
int64_t place_of(const StridedBytes& shape, int64_t byte) {
  int64_t offset = byte % shape.run_bytes;
  int64_t run = byte / shape.run_bytes;
  for (int dim = shape.num_dims - 1; dim >= 0; --dim) {
    offset += run % shape.sizes[dim] * shape.strides[dim];
    run /= shape.sizes[dim];
  }
  return offset;
}

/// A tensor of these sizes whose dimensions lie in any order in memory, with gaps now and then.
StridedBytes draw_shape(const std::vector<int64_t>& sizes, int64_t element_bytes, Random* random) {
  std::vector<size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  if (random->chance(1, 2))
    for (size_t i = order.size() - 1; i > 0; --i)
      std::swap(order[i], order[random->below(static_cast<uint32_t>(i + 1))]);
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = order.size(); i-- > 0;) {
    strides[order[i]] = stride;
    stride *= sizes[order[i]] + (random->chance(1, 4) ? random->between(1, 3) : 0);
  }
  return layout::make_strided(
      sizes.data(), strides.data(), static_cast<int>(sizes.size()), element_bytes);
}

std::vector<int64_t> draw_sizes(Random* random) {
  if (random->chance(1, 3))
    return {random->between(1, 6) * 4096 + random->between(0, 2) * 16};
  if (random->chance(1, 3))
    return {random->between(200, 600)};
  std::vector<int64_t> sizes;
  for (int64_t i = random->between(1, 3); i > 0; --i)
    sizes.push_back(random->between(1, 7));
  return sizes;
}

/// By stores of the host, which a peer's bulk copies may read only behind a proxy fence.
void fill_with_noise(std::byte* to, int64_t bytes, Random* random) {
  constexpr int64_t kUnit = 16;
  for (int64_t offset = 0; offset < bytes; offset += kUnit) {
    const uint64_t noise[] = {random->next(), random->next()};
    const auto* const from = reinterpret_cast<const std::byte*>(noise);
    if (offset + kUnit <= bytes)
      memory::store(to + offset, from, kUnit);
    else
      for (int64_t i = offset; i < bytes; ++i)
        memory::store(to + i, from + (i - offset), 1);
  }
}

MOE_SCENARIO(strided_copies, "a batch of copies between tensors of any strides") {
  Random& random = run.random();
  GuestMemory& guest = run.guest();
  const auto num_copies = static_cast<size_t>(random.between(1, 4));
  std::vector<kernels::StridedCopy> copies(num_copies);
  std::vector<int64_t> first_piece = {0};
  std::vector<std::pair<std::byte*, int64_t>> sources;
  kernels::StridedCopiesParams params;
  params.piece_bytes = random.chance(1, 2) ? 8192 : 32768;
  params.is_plain = random.chance(1, 3);
  for (kernels::StridedCopy& copy : copies) {
    const auto sizes = draw_sizes(&random);
    const int64_t element_bytes = sizes.size() == 1 ? 1 : int64_t{1} << random.below(4);
    copy.source_shape = draw_shape(sizes, element_bytes, &random);
    copy.target_shape = draw_shape(sizes, element_bytes, &random);
    const int64_t shift = element_bytes * random.between(0, 3);
    const int64_t source_bytes = copy.source_shape.span() + shift;
    std::byte* const source =
        guest.allocate(source_bytes, Ownership::kHeap, 1, "copy source", true);
    sources.push_back({source, source_bytes});
    copy.source = source + shift;
    const int64_t target_shift = random.chance(1, 2) ? shift : 0;
    copy.target =
        guest.allocate(
            copy.target_shape.span() + target_shift, Ownership::kHeap, 0, "copy target", false) +
        target_shift;
    first_piece.push_back(first_piece.back() +
                          kernels::num_pieces(copy.source_shape.bytes, params.piece_bytes));
  }
  const auto put = [&](const char* name, const auto& values) {
    const auto bytes = static_cast<int64_t>(values.size() * sizeof(values[0]));
    std::byte* const place = guest.allocate(bytes, Ownership::kDevice, 0, name, true);
    std::memcpy(guest.real(place), values.data(), static_cast<size_t>(bytes));
    return place;
  };
  params.copies = reinterpret_cast<const kernels::StridedCopy*>(put("copies", copies));
  params.first_piece = reinterpret_cast<const int64_t*>(put("first_piece", first_piece));
  params.num_copies = static_cast<int64_t>(num_copies);
  RankStream stream(run, 0);
  device::Launch launch;
  launch.num_blocks = static_cast<int>(random.between(1, 2));
  launch.num_threads = random.chance(1, 4) ? 64 : 32;
  launch.stream = static_cast<simt::Stream*>(&stream);
  launch.shared_bytes = kernels::strided_copies_shared_bytes(params, launch.num_threads);
  const auto check = [&] {
    for (const kernels::StridedCopy& copy : copies)
      for (int64_t i = 0; i < copy.source_shape.bytes; ++i) {
        const std::byte* const target = copy.target + place_of(copy.target_shape, i);
        const std::byte expected = guest.real(copy.source)[place_of(copy.source_shape, i)];
        // Runs of bytes are looked at once per granule: nothing else is shared.
        std::byte got = *guest.real(target);
        if (i % 16 == 0 || i + 1 == copy.source_shape.bytes)
          memory::load(target, &got, 1);
        if (got != expected) {
          run.report(Kind::kResult, concat("copied byte ", i, " at ", guest.describe(target)));
          return;
        }
      }
  };
  auto* const flag = guest.allocate(64, Ownership::kHeap, 0, "flag", true);
  // A peer writes the sources; this rank's host hears of it and launches.
  run.start_host(1, "writes sources", [&] {
    for (const auto& [source, bytes] : sources)
      fill_with_noise(source, bytes, &random);
    memory::atomic_store(flag, 1, 8, Order::kRelease, Reach::kSystem);
  });
  run.start_host(0, "launches", [&] {
    while (memory::atomic_load(flag, 8, Order::kAcquire, Reach::kSystem) == 0)
      run.scheduler().idle(1000);
    kernels::launch_strided_copies(launch, params);
    stream.call("check of copies", check);
  });
  run.scheduler().run();
}

MOE_SCENARIO(checksums, "equal parts of a tensor change places, which its checksum shows") {
  Random& random = run.random();
  // Words, lines, what is staged of a tensor that is not contiguous, and blocks.
  constexpr int64_t kPartBytes[] = {1, 8, 64, 512, 4096, 8192, cpu::kChecksumBlockBytes};
  const int64_t part_bytes = kPartBytes[random.below(7)];
  const int64_t num_parts = random.between(2, 6);
  const int64_t bytes = num_parts * part_bytes;
  // A tensor with gaps: its elements come in the same order as where there are none.
  layout::StridedBytes shape;
  shape.num_dims = 1;
  shape.bytes = bytes;
  shape.run_bytes = part_bytes;
  shape.sizes[0] = num_parts;
  shape.strides[0] = part_bytes + random.between(0, 24);
  const bool is_strided = random.chance(1, 2);
  const int64_t step = is_strided ? shape.strides[0] : part_bytes;
  std::vector<std::byte> memory(static_cast<size_t>(num_parts * step));
  for (std::byte& byte : memory)
    byte = static_cast<std::byte>(random.below(256));
  const auto first = static_cast<int64_t>(random.below(static_cast<uint32_t>(num_parts - 1)));
  const int64_t second = random.between(first + 1, num_parts - 1);
  std::byte* const left = memory.data() + first * step;
  std::byte* const right = memory.data() + second * step;
  *left ^= std::byte{1};
  if (std::equal(left, left + part_bytes, right))
    *left ^= std::byte{2};
  const cpu::Place place{memory.data(), is_strided ? &shape : nullptr};
  const uint64_t before = cpu::checksum(place, bytes);
  std::swap_ranges(left, left + part_bytes, right);
  if (cpu::checksum(place, bytes) == before)
    run.report(Kind::kResult,
               concat("parts ", first, " and ", second, " of ", part_bytes, " bytes are alike"));
  std::swap_ranges(left, left + part_bytes, right);
  if (cpu::checksum(place, bytes) != before)
    run.report(Kind::kResult, "a checksum depends on more than its bytes");
}

MOE_SCENARIO(weighted_gradient, "gradients scaled in place, and their dot products with outputs") {
  constexpr DType kDtypes[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32, DType::kFloat64};
  Random& random = run.random();
  GuestMemory& guest = run.guest();
  kernels::WeightedGradientParams params;
  params.dtype = kDtypes[random.below(4)];
  params.num_rows = random.between(0, 6);
  params.hidden = random.between(1, 80);
  params.weight_bytes = params.dtype == DType::kFloat64 ? 8 : 4;
  const int64_t num_elements = params.num_rows * params.hidden;
  std::vector<std::byte> gradient = draw_rows(params.dtype, num_elements, &random);
  const std::vector<std::byte> values = draw_rows(params.dtype, num_elements, &random);
  const std::vector<std::byte> weights = draw_rows(
      params.weight_bytes == 8 ? DType::kFloat64 : DType::kFloat32, params.num_rows, &random);
  const auto put = [&](const char* name, const std::vector<std::byte>& bytes) {
    std::byte* const place =
        guest.allocate(static_cast<int64_t>(bytes.size()), Ownership::kDevice, 0, name, true);
    std::copy(bytes.begin(), bytes.end(), guest.real(place));
    return place;
  };
  params.gradient = put("gradient", gradient);
  params.values = put("values", values);
  params.weights = put("weights", weights);
  params.dots =
      guest.allocate(params.num_rows * params.weight_bytes, Ownership::kDevice, 0, "dots", false);
  RankStream stream(run, 0);
  device::Launch launch;
  launch.num_blocks = static_cast<int>(random.between(1, 3));
  launch.num_threads = random.chance(1, 2) ? 64 : 32;
  launch.stream = static_cast<simt::Stream*>(&stream);
  kernels::launch_weighted_gradient(launch, params);
  run.scheduler().run();
  const cpu::FloatingPointScope floating_point;
  const int64_t row_bytes = params.hidden * element_bytes(params.dtype);
  for (int64_t row_idx = 0; row_idx < params.num_rows; ++row_idx) {
    double weight = 0;
    double got = 0;
    const std::byte* const dot = guest.real(params.dots) + row_idx * params.weight_bytes;
    if (params.weight_bytes == 8) {
      std::memcpy(&weight, weights.data() + row_idx * 8, 8);
      std::memcpy(&got, dot, 8);
    } else {
      float narrow = 0;
      std::memcpy(&narrow, weights.data() + row_idx * 4, 4);
      weight = narrow;
      std::memcpy(&narrow, dot, 4);
      got = narrow;
    }
    const double expected = cpu::find_row_kernels("portable")
                                ->scale_and_dot(params.dtype,
                                                gradient.data() + row_idx * row_bytes,
                                                values.data() + row_idx * row_bytes,
                                                weight,
                                                params.hidden);
    const bool is_same = got == expected || (got != got && expected != expected);
    if (!is_same || std::memcmp(gradient.data() + row_idx * row_bytes,
                                guest.real(params.gradient) + row_idx * row_bytes,
                                static_cast<size_t>(row_bytes)) != 0)
      run.report(Kind::kResult, concat("gradient of row ", row_idx));
  }
}

}  // namespace
}  // namespace moe::simt::checker
