#pragma once

#include "kernels/combine.h"
#include "kernels/internode.h"

namespace moe::kernels {

/// launch_combine() across nodes. This rank asks the ranks of its rail for the rows that lie on
/// their nodes, chunk by chunk, answers what they ask for, and adds the rows of every token in the
/// same order as within one node: same bits.
///
/// Blocks have at most kMaxInternodeThreads threads; all of them must be able to run at a time.
/// `is_plain` is not looked at. An area (Rails::map) must have internode_combine_bytes(), which
/// does not depend on the rank.
void launch_internode_combine(const device::Launch& launch,
                              const CombineParams& params,
                              const Rails& rails);
size_t internode_combine_shared_bytes(const CombineParams& params,
                                      const Rails& rails,
                                      int num_threads);
/// Least bytes of an area: requests of all chunks, and one chunk of rows. Where an area has more,
/// more chunks are under way at a time.
int64_t internode_combine_bytes(const CombineParams& params, const Rails& rails);

}  // namespace moe::kernels
