"""Copies over a Gloo group: any machine, any tensor, bytes through host memory."""

from __future__ import annotations

import contextlib
import datetime as dt
import queue
import threading
import time
from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist

from moe_comm.errors import has_timed_out
from moe_comm.peers.bootstrap import check_process_of
from moe_comm.resharding.copy_services.base import RecvOp, SendOp
from moe_comm.resharding.copy_services.distributed_copy_service import (
    DistributedCopyService,
    Message,
    peer_of,
    what_moves,
)
from moe_comm.resharding.copy_services.messages_in_flight import (
    GLOO_MESSAGE_BYTES,
    GLOO_MESSAGES,
)
from moe_comm.resharding.copy_services.process_group import timeout_of

__all__ = ["GlooCopyService"]

# Beyond the limit at which Gloo itself ends a wait.
_GRACE_S = 10.0

Ended: TypeAlias = "tuple[int, str, BaseException | None]"
"""A peer; of the work that failed, what it moved, and its error, None if all have ended."""


class GlooCopyService(DistributedCopyService):
    """Point-to-point messages of a CPU process group.

    Contiguous CPU tensors are sent and received where they are; others, and CUDA tensors, go
    through a buffer in (pinned) host memory, at most 64 MiB or one tensor per pair at a time. At most 64
    messages are in flight per pair and direction. Transfers without task ids are matched by their order per
    pair, not within a rank. CUDA copies are ordered before later work of the current stream.

    PeerFailedError names the ranks whose connections were closed: at once where Gloo tells a waiting message
    of it, else (a rank killed within a message, or one that is waited for through others) after the group's
    timeout. PeerTimeoutError names those waited for, no rank where ranks did not come to compare their ends;
    a rank whose limit ran out closes its connections, too. Destinations of the batch may be written until
    the group's timeout has passed; every later `run()` is a CommunicationError.

    Args:
        group: A process group with a CPU backend, of which this process is a member; it may be one
            that is not derived from the default group. None makes a Gloo group of the default
            group's ranks and timeout (collective), which `close()` destroys.

    Raises:
        ValueError: The group moves no CPU tensors.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._own_group: dist.ProcessGroup | None = None
        check_process_of(group, type(self).__name__)
        if group is None:
            # `new_group` would take the backend's default timeout, not that of the default group.
            timeout = timeout_of(dist.group.WORLD) if dist.group.WORLD is not None else None
            self._own_group = dist.new_group(backend="gloo", timeout=timeout)
        wire_group = group if group is not None else self._own_group
        assert wire_group is not None
        if torch.device("cpu") not in wire_group._device_types:
            raise ValueError(
                "GlooCopyService needs a group that moves CPU tensors, got one for "
                f"{[str(device) for device in wire_group._device_types]}"
            )
        stream = (
            torch.cuda.Stream()  # type: ignore[no-untyped-call]
            if torch.cuda.is_available()
            else None
        )
        super().__init__(
            group,
            wire_group,
            torch.device("cpu"),
            stream,
            max_messages=GLOO_MESSAGES,
            max_message_bytes=GLOO_MESSAGE_BYTES,
        )

    def close(self) -> None:
        """Destroy the group that the service made for itself. Idempotent."""
        if self._own_group is not None:
            # Destroying the default group has destroyed this one as well: a ValueError.
            with contextlib.suppress(ValueError):
                dist.destroy_process_group(self._own_group)
            self._own_group = None

    def _start(self, sends: Sequence[Message], recvs: Sequence[Message]) -> list[dist.Work]:
        # The methods of a process group count ranks in the group itself; dist.isend would look them
        # up among those of the default group, where a group of several worlds is not known.
        group = self._wire_group
        return [
            *(group.send([buffer], peer, 0) for buffer, peer in sends),
            *(group.recv([buffer], peer, 0) for buffer, peer in recvs),
        ]

    def _wait(
        self, round_idx: int, works: Sequence[dist.Work], ops: Sequence[SendOp | RecvOp]
    ) -> None:
        """Wait for all peers at once: the first that fails ends the round.

        A limit that runs out closes all connections of the group, so works cannot be asked one
        after the other for a moment each. Threads keep what they wait for alive.
        """
        timeout = timeout_of(self._wire_group)
        deadline = time.monotonic() + timeout.total_seconds()
        by_peer: dict[int, list[tuple[dist.Work, SendOp | RecvOp]]] = {}
        for work, op in zip(works, ops, strict=True):
            by_peer.setdefault(peer_of(op), []).append((work, op))
        ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()
        for peer, pending in by_peer.items():
            threading.Thread(
                target=_wait_for_peer,
                args=(peer, pending, deadline, ended, self._in_flight),
                daemon=True,
            ).start()
        waiting = set(by_peer)
        while waiting:
            try:
                # Gloo ends a wait at its limit: what does not end even so is told without it.
                peer, what, error = ended.get(
                    timeout=max(0.0, deadline - time.monotonic()) + _GRACE_S
                )
            except queue.Empty:
                late = TimeoutError(f"timed out: Gloo did not end its wait {_GRACE_S} s after that")
                peers = tuple(sorted(waiting))
                raise self._fail(f"messages of round {round_idx}", late, peers) from None
            if error is None:
                waiting.discard(peer)
                continue
            # A limit that runs out is that of all who have not finished.
            peers = tuple(sorted(waiting)) if has_timed_out(error) else (peer,)
            raise self._fail(what, error, peers) from error


def _wait_for_peer(
    peer: int,
    pending: Sequence[tuple[dist.Work, SendOp | RecvOp]],
    deadline: float,
    ended: queue.SimpleQueue[Ended],
    in_flight: object,
) -> None:
    """Wait for the works of one peer until they have ended or one fails.

    Args:
        peer: Rank of the peer.
        pending: The works and what they move.
        deadline: Time of `time.monotonic` until which to wait.
        ended: Queue that gets how it ended.
        in_flight: Memory that messages may still write, kept until then.
    """
    for work, op in pending:
        # Not 0, which means no limit.
        left = max(deadline - time.monotonic(), 0.001)
        try:
            work.wait(dt.timedelta(seconds=left))
        except BaseException as error:  # noqa: BLE001 # raised by the thread that runs the batch
            ended.put((peer, what_moves(op), error))
            return
    ended.put((peer, "", None))
