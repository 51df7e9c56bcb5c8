#pragma once

#include <cstdint>
#include <vector>

#include "schedules/machine.h"
#include "schedules/seeded_scheduler.h"

namespace moe::simt::checker {

/// From now on memory.h acts on @p machine, for the fibers of @p scheduler.
void use_for_accesses(Machine& machine, SeededScheduler& scheduler);

/// Blocks get numbers as their shared memory is allocated, in order.
void forget_new_blocks();
std::vector<int64_t> take_new_blocks(int num_blocks);

}  // namespace moe::simt::checker
