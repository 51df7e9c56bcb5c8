"""Contents of a rank's symmetric heap, in numbers."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeapStats:
    """Bytes of this rank's symmetric heap.

    Args:
        segment_bytes: Sum over segments.
        resident_bytes: Bytes of segments that are backed by memory (`trim()` gives the free ones back).
        live_bytes: Bytes in windows that a tensor or an operation holds.
        quarantined_bytes: Kept aside after an abort, until `recover()`.
        peak_live_bytes: Most `live_bytes` so far.
        num_segments: Segments.
        num_windows: Windows held.
        num_allocations: Windows handed out since the heap was made.
        num_growths: Segments added since the heap was made.
        huge_page_bytes: Bytes in 2 MiB pages, as the kernel reports them.
        peer_segment_bytes: Bytes of peers' segments mapped here; their memory, not this rank's.
    """

    segment_bytes: int
    resident_bytes: int
    live_bytes: int
    quarantined_bytes: int
    peak_live_bytes: int
    num_segments: int
    num_windows: int
    num_allocations: int
    num_growths: int
    huge_page_bytes: int
    peer_segment_bytes: int
