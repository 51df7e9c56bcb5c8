#pragma once

namespace moe::simt {
/// Returns whether the fault of that name is switched on in this process. Each program has its own.
bool is_fault_on(const char* name);
}  // namespace moe::simt

/// Stands in copies of the sources; fault_catalogue.py puts it there.
#define MOE_FAULT(name) (::moe::simt::is_fault_on(#name))
