#pragma once

#include "cpu/roof.h"
#include "cpu/row_kernels.h"

namespace moe::cpu {

// One pair of tables per instruction set, each defined in row_kernels_<name>.cpp. They are
// constants: nothing of a translation unit runs before find_row_kernels() has asked the processor.
extern const RowKernels kPortableRowKernels;
extern const RoofKernels kPortableRoofKernels;
#if defined(__x86_64__)
extern const RowKernels kAvx2RowKernels;
extern const RoofKernels kAvx2RoofKernels;
extern const RowKernels kAvx512RowKernels;
extern const RoofKernels kAvx512RoofKernels;
#endif

}  // namespace moe::cpu
