#pragma once

#include <vector>

#include "kernels/strided_copy.h"
#include "runtime/device.h"

namespace moe::runtime {

/// Puts a batch of copies between tensors of one device, in any order, into @p stream.
///
/// @param copies   Both sides of each have the same number of bytes; nothing is written twice.
/// @param num_sms  Blocks to use; 0 for all the device has.
void strided_copies(Device& device,
                    Stream& stream,
                    const std::vector<kernels::StridedCopy>& copies,
                    int num_sms);

}  // namespace moe::runtime
