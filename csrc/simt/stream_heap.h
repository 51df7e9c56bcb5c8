#pragma once

#include <memory>

#include "core/symmetric_memory.h"
#include "simt/stream.h"

namespace moe::simt {

/// @p heap for the kernels of a device whose callers are streams: a window that is given back is
/// handed out again once the streams of @p order have ended what they held by then, as that of a
/// GPU's heap is. Windows of @p heap itself are the host's, and are free at once.
std::shared_ptr<SymmetricMemory> make_stream_heap(std::shared_ptr<SymmetricMemory> heap,
                                                  std::shared_ptr<StreamOrder> order);

}  // namespace moe::simt
