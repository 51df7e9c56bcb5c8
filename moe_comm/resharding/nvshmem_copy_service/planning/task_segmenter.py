"""Tasks that are larger than a slot, cut into segments that fit."""

from __future__ import annotations

import dataclasses
import logging
from typing import TypeVar

from moe_comm.resharding.nvshmem_copy_service.nvshmem_types import (
    MAX_SEGMENT_SIZE,
    ReceiveRequest,
    SendRequest,
)

__all__ = ["TaskSegmenter", "name_of_task"]

logger = logging.getLogger(__name__)

REQUEST_ID_BASE = 1000000000
SEGMENT_ID_MULTIPLIER = 1000
MAX_REQUESTS = 1000000
MAX_SEGMENTS_PER_REQUEST = 1000

# Keys of segments that the arithmetic above has no room for are below zero, where no task id is.
_WIDE_SEGMENT_BITS = 40

Request = TypeVar("Request", SendRequest, ReceiveRequest)


class TaskSegmenter:
    """Cuts requests at multiples of `segment_bytes`, equally on both ends.

    A segment is known by a key in place of the task id. For task ids below 1,000,000 and the first
    1,000 segments it is `1_000_000_000 + task_id * 1000 + segment`; for others a number below zero
    that holds both, so that it equals no task id and no key of another task.

    Args:
        segment_bytes: Most bytes of a segment.
        max_segments: Most segments of a task; None for as many as make
            1,000 * `MAX_SEGMENT_SIZE` bytes.
    """

    def __init__(
        self, segment_bytes: int = MAX_SEGMENT_SIZE, max_segments: int | None = None
    ) -> None:
        if segment_bytes < 1:
            raise ValueError(f"segment_bytes must be >= 1, got {segment_bytes}")
        self.segment_bytes = segment_bytes
        self.max_segments = (
            -(-MAX_SEGMENTS_PER_REQUEST * MAX_SEGMENT_SIZE // segment_bytes)
            if max_segments is None
            else max_segments
        )

    def _encode_segment_id(self, task_id: int, segment_index: int) -> int:
        """The key of a segment.

        Example:
            `_encode_segment_id(42, 1) == 1_000_042_001`.
        """
        if task_id < MAX_REQUESTS and segment_index < SEGMENT_ID_MULTIPLIER:
            return REQUEST_ID_BASE + task_id * SEGMENT_ID_MULTIPLIER + segment_index
        return -1 - (task_id << _WIDE_SEGMENT_BITS | segment_index)

    def _calculate_num_segments(self, size: int) -> int:
        return -(-size // self.segment_bytes)

    def _validate_segmentation(self, task_id: int, size: int) -> bool:
        num_segments = self._calculate_num_segments(size)
        if num_segments > self.max_segments:
            logger.error(
                "task %d has %d segments, more than %d", task_id, num_segments, self.max_segments
            )
        elif task_id < 0:
            logger.error("task id %d is negative", task_id)
        return num_segments <= self.max_segments and task_id >= 0

    def segment_send_request(self, req: SendRequest) -> list[SendRequest]:
        """`req` itself when it fits in a segment, otherwise its segments in order.

        Raises:
            ValueError: It has too many segments, or a negative task id.
        """
        return [
            dataclasses.replace(req, task_id=key, src_pos=req.src_pos + offset, size=size)
            for key, offset, size in self._segments(req)
        ] or [req]

    def segment_receive_request(self, req: ReceiveRequest) -> list[ReceiveRequest]:
        """Segment a receive, see `segment_send_request`."""
        return [
            dataclasses.replace(req, task_id=key, dest_pos=req.dest_pos + offset, size=size)
            for key, offset, size in self._segments(req)
        ] or [req]

    def _segments(self, req: SendRequest | ReceiveRequest) -> list[tuple[int, int, int]]:
        """(key, offset, bytes) of each segment; none for a request that needs no cut."""
        if req.size <= self.segment_bytes:
            return []
        if not self._validate_segmentation(req.task_id, req.size):
            raise ValueError(
                f"Task {req.task_id} validation failed: {req.size} bytes are "
                f"{self._calculate_num_segments(req.size)} segments of {self.segment_bytes}; at "
                f"most {self.max_segments}, and no negative task id, are possible"
            )
        return [
            (
                self._encode_segment_id(req.task_id, segment),
                offset,
                min(self.segment_bytes, req.size - offset),
            )
            for segment, offset in enumerate(range(0, req.size, self.segment_bytes))
        ]


def name_of_task(key: int) -> str:
    """Return the name of a task or a segment in messages.

    Example:
        `name_of_task(1_000_042_001) == "1000042001 (or segment 1 of task 42)"`.
    """
    if key < 0:
        task_id, segment = divmod(-1 - key, 1 << _WIDE_SEGMENT_BITS)
        return f"segment {segment} of task {task_id}"
    if 0 <= key - REQUEST_ID_BASE < MAX_REQUESTS * SEGMENT_ID_MULTIPLIER:
        task_id, segment = divmod(key - REQUEST_ID_BASE, SEGMENT_ID_MULTIPLIER)
        return f"{key} (or segment {segment} of task {task_id})"
    return str(key)
