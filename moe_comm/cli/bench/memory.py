"""Resident memory, as the kernel counts it."""

from __future__ import annotations

import dataclasses
import re
import types
from pathlib import Path

from moe_comm.peers.communicator import Communicator

_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ [0-9a-f]+ \S+ (?P<inode>\d+)\s*(?P<name>.*)$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowMemory:
    """Shared segments that one process has mapped.

    Args:
        resident_bytes: Bytes of every segment (by inode) that are in memory.
        huge_page_bytes: Bytes of them in 2 MiB pages, over all segments.
    """

    resident_bytes: dict[int, int]
    huge_page_bytes: int


def parse_smaps(text: str, inode: int | None = None) -> WindowMemory:
    """Parse the anonymous shared segments (memfd) in `/proc/<pid>/smaps`.

    Args:
        text: The file.
        inode: Only the segment with this one; None for all.
    """
    resident: dict[int, int] = {}
    huge_page_bytes = 0
    mapped_inode: int | None = None
    for line in text.splitlines():
        mapping = _MAPPING.match(line)
        if mapping:
            is_segment = mapping["name"].startswith("/memfd:")
            mapped_inode = int(mapping["inode"]) if is_segment else None
            continue
        if mapped_inode is None or (inode is not None and mapped_inode != inode):
            continue
        key, _, value = line.partition(":")
        if key == "Rss":
            rss_bytes = int(value.split()[0]) * 1024
            resident[mapped_inode] = resident.get(mapped_inode, 0) + rss_bytes
        elif key == "ShmemPmdMapped":
            huge_page_bytes += int(value.split()[0]) * 1024
    return WindowMemory(resident_bytes=resident, huge_page_bytes=huge_page_bytes)


def window_memory() -> WindowMemory:
    """Return the memory of this process's windows."""
    return parse_smaps(Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace"))


def total_bytes(per_rank: list[WindowMemory]) -> int:
    """Memory of all ranks together: a segment that several ranks mapped counts once.

    A rank counts the pages it has touched itself, so the largest count of a segment is its owner's.
    """
    segments: dict[int, int] = {}
    for memory in per_rank:
        for inode, num_bytes in memory.resident_bytes.items():
            segments[inode] = max(segments.get(inode, 0), num_bytes)
    return sum(segments.values())


class PeakMemory:
    """Bytes that a block of code took besides what was there, at its peak; a context manager.

    Args:
        communicator: Communicator whose heap is looked at; None for no heap.

    Attributes:
        heap_bytes: Bytes of this rank's heap.
        private_bytes: Bytes of this process (those left at the end, if the kernel does not let it
            reset its highest mark), without shared memory: pages of a heap that were touched for
            the first time, this rank's or a peer's, do not count.
    """

    heap_bytes = 0
    private_bytes = 0

    def __init__(self, communicator: Communicator | None) -> None:
        self._communicator = communicator

    def __enter__(self) -> PeakMemory:
        # From here on the kernel keeps a new highest mark, where it lets this process say so.
        self._has_mark = True
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            self._has_mark = False
        self._before = _status_bytes()
        self._heap_before = self._heap()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        after, heap = _status_bytes(), self._heap()
        shared = max(0, after["RssShmem"] - self._before["RssShmem"])
        highest = after["VmHWM"] if self._has_mark else after["VmRSS"]
        self.private_bytes = max(0, highest - self._before["VmRSS"] - shared)
        live, peak = self._heap_before
        # The heap's own mark is of its whole life: where it has not moved, this took no more.
        heap_highest = heap[1] if heap[1] > peak else heap[0]
        self.heap_bytes = max(0, heap_highest - live)

    def _heap(self) -> tuple[int, int]:
        if self._communicator is None or self._communicator.native is None:
            return 0, 0
        stats = self._communicator.heap_stats()
        return stats.live_bytes, stats.peak_live_bytes


def _status_bytes() -> dict[str, int]:
    """Memory lines of `/proc/self/status`."""
    found = {}
    for line in (
        Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    ):
        key, _, value = line.partition(":")
        if value.endswith("kB"):
            found[key] = int(value.split()[0]) * 1024
    return found
