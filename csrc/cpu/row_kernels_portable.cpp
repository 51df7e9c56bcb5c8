#include "cpu/simd_portable.h"
// Written in the vocabulary of the line above.
#include "cpu/roof_impl.h"
#include "cpu/row_kernels_impl.h"
#include "cpu/row_kernels_tables.h"

namespace moe::cpu {

constinit const RowKernels kPortableRowKernels = make_row_kernels("portable");
constinit const RoofKernels kPortableRoofKernels = make_roof_kernels("portable");

}  // namespace moe::cpu
