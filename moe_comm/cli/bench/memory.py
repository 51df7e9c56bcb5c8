"""Resident memory of windows, as the kernel counts it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

__all__ = ["WindowMemory", "parse_smaps", "total_bytes", "window_memory"]

_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ [0-9a-f]+ \S+ (?P<inode>\d+)\s*(?P<name>.*)$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowMemory:
    """Shared segments that one process has mapped.

    Args:
        resident_bytes: Bytes of every segment (by inode) that are in memory.
        huge_page_bytes: Of those, in 2 MiB pages, over all segments.
    """

    resident_bytes: dict[int, int]
    huge_page_bytes: int


def parse_smaps(text: str, inode: int | None = None) -> WindowMemory:
    """What `/proc/<pid>/smaps` says about anonymous shared segments (memfd).

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
    """Of this process."""
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
