"""What PEs check together before anything moves: everybody raises, or nobody."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence

from moe_comm.peers.agree import raise_together, raise_unequal, unlike_ends
from moe_comm.resharding.nvshmem_copy_service.nvshmem_types import (
    ReceiveRequest,
    SendRequest,
    WorkloadSummary,
)
from moe_comm.resharding.nvshmem_copy_service.planning.exchange import Exchange
from moe_comm.resharding.nvshmem_copy_service.planning.task_segmenter import (
    TaskSegmenter,
    name_of_task,
)

__all__ = ["abandon", "agree", "check_unique", "unmatched_tasks"]

_NUM_NAMED = 8


def agree(exchange: Exchange, call: str, settings: str, problem: str | None, epoch: int = 0) -> int:
    """Raise on every PE what is wrong on any. Collective.

    Args:
        exchange: Over which PEs talk.
        call: What this PE is doing; must be equal everywhere.
        settings: Must be equal everywhere too.
        problem: What is wrong on this PE, or None.
        epoch: A number of this PE.

    Returns:
        The largest `epoch`.

    Raises:
        ValueError: Something is wrong on some PE, which the message names.
    """
    said = exchange.all_gather((call, settings, problem, epoch))
    for pe, item in enumerate(said):
        if item is None:
            raise ValueError(f"rank {pe} has failed: a service includes every rank of its group")
    raise_together(problem for _, _, problem, _ in said)
    raise_unequal("ranks are in different calls", [its_call for its_call, *_ in said])
    raise_unequal("ranks have different settings", [its for _, its, *_ in said])
    return int(max(item[3] for item in said))


def abandon(exchange: Exchange, reason: str) -> None:
    """Make the `agree` of every other PE raise. Collective with it."""
    exchange.all_gather(("abandon", "", f"gave up: {reason}", 0))


def check_unique(preposition: str, tasks: Iterable[tuple[int, int]]) -> None:
    """Raise ValueError when a (PE, task id) comes twice."""
    for (pe, task_id), count in collections.Counter(tasks).items():
        if count > 1:
            raise ValueError(
                f"task {name_of_task(task_id)} is registered {count} times {preposition} PE {pe}"
            )


def unmatched_tasks(
    my_pe: int,
    send_requests: Sequence[SendRequest],
    receive_requests: Sequence[ReceiveRequest],
    summaries: Mapping[tuple[int, int, int], WorkloadSummary],
    segmenter: TaskSegmenter,
) -> str | None:
    """What PE `my_pe` is sent and does not receive, or the other way round; None when all agree.

    Args:
        my_pe: This PE.
        send_requests: As registered; those of this PE to itself count.
        receive_requests: As registered.
        summaries: What this PE is sent, by (source, destination, batch).
        segmenter: As on the senders.
    """
    # Bytes by task or segment, of each sender; segments of a task that is received become the task.
    sent: dict[int, dict[int, int]] = collections.defaultdict(dict)
    for (src_pe, dest_pe, _), summary in summaries.items():
        if dest_pe == my_pe:
            sent[src_pe].update(zip(summary.task_ids, summary.task_sizes, strict=True))
    for send in send_requests:
        if send.dest_pe == my_pe:
            sent[my_pe][send.task_id] = send.size
    received: dict[int, dict[int, int]] = collections.defaultdict(dict)
    for receive in receive_requests:
        received[receive.src_pe][receive.task_id] = receive.size
        size = _take(sent[receive.src_pe], receive.task_id, segmenter)
        if size is not None:
            sent[receive.src_pe][receive.task_id] = size
    unlike = {src_pe: unlike_ends(sizes, received[src_pe]) for src_pe, sizes in sent.items()}
    for src_pe, ends in unlike.items():
        for task_id, there, here in ends:
            if there is not None and here is not None:
                return (
                    f"task {task_id}: PE {src_pe} sends {there} bytes, PE {my_pe} receives {here}"
                )
    for src_pe, ends in unlike.items():
        if missing := [task_id for task_id, there, _ in ends if there is None]:
            return f"PE {my_pe} receives tasks that PE {src_pe} does not send: {_named(missing)}"
    for src_pe, ends in unlike.items():
        if ends:
            extra = (task_id for task_id, *_ in ends)
            return f"PE {src_pe} sends tasks that PE {my_pe} does not receive: {_named(extra)}"
    return None


def _take(sizes: dict[int, int], task_id: int, segmenter: TaskSegmenter) -> int | None:
    """Remove a task, whole or in segments, and return its bytes; None when it is not there."""
    if task_id in sizes:
        return sizes.pop(task_id)
    segment_sizes: list[int] = []
    while (key := segmenter._encode_segment_id(task_id, len(segment_sizes))) in sizes:
        segment_sizes.append(sizes.pop(key))
    return sum(segment_sizes) if segment_sizes else None


def _named(task_ids: Iterable[int]) -> str:
    keys = sorted(task_ids)
    shown = ", ".join(name_of_task(key) for key in keys[:_NUM_NAMED])
    return shown if len(keys) <= _NUM_NAMED else f"{shown} and {len(keys) - _NUM_NAMED} more"
