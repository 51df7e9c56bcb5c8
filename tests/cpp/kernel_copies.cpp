// Strided copies by kernels, run by the emulator: see kernel_rows.cpp.

#include <algorithm>
#include <string>
#include <vector>

#include "core/error.h"
#include "cpu/row_kernels.h"
#include "cpu/strided_copy.h"
#include "kernel_rows.h"
#include "kernels/strided_copy.h"
#include "layout/strided.h"

namespace moe::kernel_rows {

namespace {

/// A tensor with gaps, dimensions in any order in memory.
struct Tensor {
  layout::StridedBytes shape;
  int64_t span = 0;

  const layout::StridedBytes* shape_or_null() const {
    return shape.is_contiguous() ? nullptr : &shape;
  }
};

Tensor draw_tensor(const std::vector<int64_t>& sizes, int64_t unit, bool may_repeat) {
  const auto num_dims = sizes.size();
  std::vector<size_t> order(num_dims);
  for (size_t i = 0; i < num_dims; ++i)
    order[i] = i;
  if (draw(2) == 1)
    std::shuffle(order.begin(), order.end(), g_random);
  std::vector<int64_t> strides(num_dims);
  int64_t stride = 1;
  for (size_t i = num_dims; i-- > 0;) {
    if (draw(3) == 0)
      stride += draw(4);
    strides[order[i]] = stride;
    stride *= sizes[order[i]];
  }
  if (may_repeat && num_dims > 0 && draw(6) == 0)
    strides[static_cast<size_t>(draw(static_cast<int64_t>(num_dims)))] = 0;
  Tensor tensor;
  tensor.shape =
      layout::make_strided(sizes.data(), strides.data(), static_cast<int>(num_dims), unit);
  tensor.span = tensor.shape.span();
  return tensor;
}

/// The same number of elements as @p sizes, cut otherwise.
std::vector<int64_t> recut(std::vector<int64_t> sizes) {
  if (sizes.size() > 1 && draw(2) == 1) {
    const auto at = static_cast<size_t>(draw(static_cast<int64_t>(sizes.size()) - 1));
    sizes[at] *= sizes[at + 1];
    sizes.erase(sizes.begin() + static_cast<ptrdiff_t>(at) + 1);
  }
  return sizes;
}

}  // namespace

void check_strided_copies() {
  struct Planned {
    Guarded source;
    Guarded target;
    Guarded want;
    Tensor from;
    Tensor to;
  };
  std::vector<Planned> planned;
  const int64_t num_copies = draw(8);
  for (int64_t i = 0; i < num_copies; ++i) {
    const int64_t unit = draw_one_of<int64_t>({1, 2, 2, 4, 8, 16});
    std::vector<int64_t> sizes;
    int64_t most = 40000 / unit;
    for (int64_t dim = draw(6); dim > 0; --dim) {
      const int64_t size = dim == 1 && draw(2) == 1 ? most : 1 + draw(std::min<int64_t>(most, 12));
      sizes.push_back(size);
      most = std::max<int64_t>(most / size, 1);
    }
    if (draw(10) == 0)
      sizes.push_back(0);
    const Tensor from = draw_tensor(sizes, unit, true);
    const Tensor to = draw_tensor(recut(sizes), unit, false);
    const bool is_aligned = draw(2) == 1;
    const int64_t source_at = is_aligned ? 0 : unit * draw(16);
    const int64_t target_at = is_aligned ? 0 : draw(2) == 1 ? source_at : unit * draw(16);
    planned.push_back({Guarded(from.span, source_at % 256),
                       Guarded(to.span, target_at % 256),
                       Guarded(to.span, target_at % 256),
                       from,
                       to});
    for (int64_t byte = 0; byte < from.span; ++byte)
      planned.back().source.data()[byte] = static_cast<std::byte>(draw(256));
  }
  kernels::StridedCopiesParams params;
  params.piece_bytes = draw_one_of<int64_t>({16, 1008, 4096, 1 << 16});
  params.is_plain = static_cast<int32_t>(draw(2));
  std::vector<kernels::StridedCopy> copies;
  std::vector<int64_t> first_piece = {0};
  for (const Planned& plan : planned) {
    copies.push_back({plan.source.data(), plan.target.data(), plan.from.shape, plan.to.shape});
    first_piece.push_back(first_piece.back() +
                          kernels::num_pieces(plan.from.shape.bytes, params.piece_bytes));
    cpu::copy_strided(cpu::best_row_kernels(),
                      {plan.source.data(), plan.from.shape_or_null()},
                      0,
                      {plan.want.data(), plan.to.shape_or_null()},
                      0,
                      plan.from.shape.bytes,
                      cpu::StoreMode::kCached);
  }
  params.copies = copies.data();
  params.first_piece = first_piece.data();
  params.num_copies = static_cast<int64_t>(copies.size());
  device::Launch launch = draw_launch();
  launch.shared_bytes = kernels::strided_copies_shared_bytes(params, launch.num_threads);
  kernels::launch_strided_copies(launch, params);
  for (size_t i = 0; i < planned.size(); ++i)
    if (!planned[i].target.equals(planned[i].want) || !planned[i].target.is_intact_around())
      fail(concat("copy ",
                  i,
                  " of ",
                  planned.size(),
                  " differs: ",
                  planned[i].from.shape.bytes,
                  " bytes, runs of ",
                  planned[i].from.shape.run_bytes,
                  " and ",
                  planned[i].to.shape.run_bytes,
                  ", ",
                  planned[i].from.shape.num_dims,
                  " and ",
                  planned[i].to.shape.num_dims,
                  " dimensions, plain ",
                  params.is_plain,
                  ", ",
                  describe(launch)));
}

}  // namespace moe::kernel_rows
