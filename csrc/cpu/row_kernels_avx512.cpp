#if defined(__x86_64__)

#include "cpu/simd_avx512.h"
// Written in the vocabulary of the line above.
#include "cpu/roof_impl.h"
#include "cpu/row_kernels_impl.h"
#include "cpu/row_kernels_tables.h"

namespace moe::cpu {

constinit const RowKernels kAvx512RowKernels = make_row_kernels("avx512");
constinit const RoofKernels kAvx512RoofKernels = make_roof_kernels("avx512");

}  // namespace moe::cpu

#endif
