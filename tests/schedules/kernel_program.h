#pragma once

#include "schedules/kernel_world.h"

namespace moe::simt::checker {

/// Dispatch and combine, then the same again with the handle, and what they must deliver; bytes
/// that were moved are those of the formulas of tests/schedules/README.md.
void run_operations(Run& run,
                    const KernelCase& shape,
                    int num_rounds,
                    bool has_dispatches_only = false);

/// @p shape whose experts are slots: every logical expert has one, and some have more.
KernelCase with_replicas(Run& run, KernelCase shape);

/// Dispatches whose hosts wait for sizes; ranks that are short make second offers.
void run_host_reads(Run& run, const KernelCase& shape);

/// Dispatches of all ranks but one, which never comes, or until they are aborted.
void run_to_an_early_end(Run& run, const KernelCase& shape, bool is_aborted);

/// A combine of two ranks, one of which does nothing more behind its exchange, or until they are
/// aborted.
void run_to_an_early_end_of_sums(Run& run, const KernelCase& shape, bool is_aborted);

}  // namespace moe::simt::checker
