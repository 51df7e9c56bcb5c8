#if defined(__x86_64__)

#include "cpu/simd_avx2.h"
// Written in the vocabulary of the line above.
#include "cpu/roof_impl.h"
#include "cpu/row_kernels_impl.h"
#include "cpu/row_kernels_tables.h"

namespace moe::cpu {

constinit const RowKernels kAvx2RowKernels = make_row_kernels("avx2");
constinit const RoofKernels kAvx2RoofKernels = make_roof_kernels("avx2");

}  // namespace moe::cpu

#endif
