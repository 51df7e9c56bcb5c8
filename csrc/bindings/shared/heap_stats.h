#pragma once

#include <pybind11/pybind11.h>

#include "heap/shm_heap.h"

namespace moe::bindings {

/// The fields of Python's `HeapStats`, by name.
inline pybind11::dict heap_stats_dict(const heap::HeapStats& stats) {
  pybind11::dict values;
  values["segment_bytes"] = stats.segment_bytes;
  values["resident_bytes"] = stats.resident_bytes;
  values["live_bytes"] = stats.live_bytes;
  values["quarantined_bytes"] = stats.quarantined_bytes;
  values["peak_live_bytes"] = stats.peak_live_bytes;
  values["num_segments"] = stats.num_segments;
  values["num_windows"] = stats.num_windows;
  values["num_allocations"] = stats.num_allocations;
  values["num_growths"] = stats.num_growths;
  values["huge_page_bytes"] = stats.huge_page_bytes;
  values["peer_segment_bytes"] = stats.peer_segment_bytes;
  return values;
}

}  // namespace moe::bindings
