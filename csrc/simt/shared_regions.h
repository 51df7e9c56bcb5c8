#pragma once

#include <memory>

#include "runtime/symmetric_regions.h"

namespace moe::simt {

/// Symmetric memory for emulated kernels: a file in memory for every rank, which the emulated
/// network card of every other rank maps. Kernels know the addresses of their own rank alone.
///
/// Ranks are processes that may look into each other's /proc entries (of one user, on one machine,
/// whatever nodes they stand for), or threads.
std::shared_ptr<runtime::SymmetricRegions> make_shared_regions();

}  // namespace moe::simt
