#pragma once

// Faults that a test build can switch on, one at a time, to prove that its checks find them. In
// every other build a fault is the constant false and leaves no code.

#if defined(MOE_WITH_MUTANTS)

namespace moe::simt {
/// Whether the fault of that name is switched on in this process.
bool is_mutant(const char* name);
}  // namespace moe::simt

#define MOE_MUTANT(name) (::moe::simt::is_mutant(#name))

#else

#define MOE_MUTANT(name) false

#endif
