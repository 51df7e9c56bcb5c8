#include "core/error.h"
#include "device/numbers.h"
#include "device/warp.h"
#include "kernels/combine.h"

namespace moe::kernels {

namespace {

/// Elements of one lane whose loads are under way together.
constexpr int kElementsAtOnce = 8;

/// Scales elements [first, first + kElementsAtOnce * 32) of a row, those of them below @p hidden,
/// and adds the products of this lane's to @p dot in ascending order.
template <typename Number, bool kWhole>
MOE_DEVICE void scale_and_dot(typename Number::Bits* gradient,
                              const typename Number::Bits* values,
                              int64_t first,
                              int64_t hidden,
                              typename Number::Scalar weight,
                              typename Number::Scalar* dot) {
  using Bits = typename Number::Bits;
  using Scalar = typename Number::Scalar;
  Bits gradient_bits[kElementsAtOnce] = {};
  Bits value_bits[kElementsAtOnce] = {};
#pragma unroll
  for (int i = 0; i < kElementsAtOnce; ++i) {
    const int64_t element = first + i * device::kWarpSize + device::lane_idx();
    if (kWhole || element < hidden) {
      gradient_bits[i] = device::load(gradient + element);
      value_bits[i] = device::load(values + element);
    }
  }
#pragma unroll
  for (int i = 0; i < kElementsAtOnce; ++i) {
    const int64_t element = first + i * device::kWarpSize + device::lane_idx();
    if (kWhole || element < hidden) {
      const Scalar factor = Number::widen(gradient_bits[i]);
      const Scalar scaled = device::multiply(factor, weight);
      *dot = device::add(*dot, device::multiply(factor, Number::widen(value_bits[i])));
      device::store(gradient + element, Number::narrow(scaled));
    }
  }
}

// Grid: any number of blocks; a warp takes a row after another. Lane i of the warp is lane i of the
//   dot product: it has elements i, i + 32, ... Nobody else touches the rows.
template <typename Number, typename Weight>
MOE_KERNEL void weighted_gradient(const WeightedGradientParams params) {
  using Bits = typename Number::Bits;
  using Scalar = typename Number::Scalar;
  const int64_t num_warps = static_cast<int64_t>(device::num_blocks()) * device::num_warps();
  for (int64_t row =
           static_cast<int64_t>(device::block_idx()) * device::num_warps() + device::warp_idx();
       row < params.num_rows;
       row += num_warps) {
    Bits* const gradient = reinterpret_cast<Bits*>(params.gradient) + row * params.hidden;
    const Bits* const values = reinterpret_cast<const Bits*>(params.values) + row * params.hidden;
    const auto weight = static_cast<Scalar>(device::load_constant(
        reinterpret_cast<const typename Weight::Scalar*>(params.weights) + row));
    constexpr int64_t kStep = int64_t{kElementsAtOnce} * device::kWarpSize;
    Scalar dot = 0;
    int64_t first = 0;
    for (; first + kStep <= params.hidden; first += kStep)
      scale_and_dot<Number, true>(gradient, values, first, params.hidden, weight, &dot);
    if (first < params.hidden)
      scale_and_dot<Number, false>(gradient, values, first, params.hidden, weight, &dot);
    for (int half = device::kWarpSize / 2; half > 0; half /= 2)
      dot = device::add(dot, device::shuffle_xor(dot, half));
    if (device::lane_idx() == 0)
      device::store(reinterpret_cast<typename Weight::Bits*>(params.dots) + row,
                    Weight::narrow(static_cast<typename Weight::Scalar>(dot)));
  }
}

template <typename Number>
void launch_of(const device::Launch& launch, const WeightedGradientParams& params) {
  if (params.weight_bytes == 8)
    device::launch(&weighted_gradient<Number, device::Float64>, launch, params);
  else
    device::launch(&weighted_gradient<Number, device::Float32>, launch, params);
}

}  // namespace

void launch_weighted_gradient(const device::Launch& launch, const WeightedGradientParams& params) {
  switch (params.dtype) {
    case DType::kBFloat16:
      return launch_of<device::BFloat16>(launch, params);
    case DType::kFloat16:
      return launch_of<device::Float16>(launch, params);
    case DType::kFloat32:
      return launch_of<device::Float32>(launch, params);
    case DType::kFloat64:
      return launch_of<device::Float64>(launch, params);
    case DType::kBytes:
      break;
  }
  throw InvalidArgument("rows of bytes have no gradient");
}

}  // namespace moe::kernels
