#include "layout/strided.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/error.h"

namespace moe::layout {

bool StridedBytes::may_overlap() const {
  std::vector<std::pair<int64_t, int64_t>> dims;  // (stride, size)
  dims.reserve(kMaxDims);
  for (int dim = 0; dim < num_dims; ++dim)
    dims.emplace_back(strides[dim], sizes[dim]);
  std::sort(dims.begin(), dims.end());
  int64_t inner_span = run_bytes;
  for (const auto& [stride, size] : dims) {
    if (stride < inner_span)
      return bytes > 0;
    inner_span += (size - 1) * stride;
  }
  return false;
}

StridedBytes make_strided(const int64_t* sizes,
                          const int64_t* strides,
                          int num_dims,
                          int64_t element_bytes) {
  StridedBytes strided;
  strided.bytes = element_bytes;
  for (int dim = 0; dim < num_dims; ++dim)
    strided.bytes *= sizes[dim];
  if (strided.bytes == 0)
    return strided;
  // From the innermost dimension outwards, as (size, stride in bytes).
  std::vector<std::pair<int64_t, int64_t>> merged;
  strided.run_bytes = element_bytes;
  for (int dim = num_dims - 1; dim >= 0; --dim) {
    const int64_t size = sizes[dim];
    const int64_t stride = strides[dim] * element_bytes;
    if (size == 1)
      continue;
    if (merged.empty() && stride == strided.run_bytes)
      strided.run_bytes *= size;
    else if (!merged.empty() && stride == merged.back().first * merged.back().second)
      merged.back().first *= size;
    else
      merged.emplace_back(size, stride);
  }
  MOE_CHECK(merged.size() <= StridedBytes::kMaxDims,
            "a tensor has ",
            merged.size(),
            " dimensions that cannot be merged, at most ",
            StridedBytes::kMaxDims,
            " can be copied; make it contiguous");
  strided.num_dims = static_cast<int32_t>(merged.size());
  for (size_t i = 0; i < merged.size(); ++i) {
    const size_t dim = merged.size() - 1 - i;
    strided.sizes[dim] = merged[i].first;
    strided.strides[dim] = merged[i].second;
  }
  return strided;
}

}  // namespace moe::layout
