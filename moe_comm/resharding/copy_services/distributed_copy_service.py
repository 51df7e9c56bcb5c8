"""A batch of copies as point-to-point messages of torch.distributed."""

from __future__ import annotations

import abc
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from moe_comm.errors import CommunicationError
from moe_comm.peers.bootstrap import check_process_of
from moe_comm.resharding.copy_services.base import RecvOp, SendOp
from moe_comm.resharding.copy_services.process_group import all_gather_bytes, failure_of
from moe_comm.resharding.copy_services.queued_copy_service import (
    Batch,
    QueuedCopyService,
    copy_pair,
)
from moe_comm.tensors.memory import bytes_of

__all__ = ["DistributedCopyService", "Message", "peer_of", "what_moves"]

Message: TypeAlias = tuple[torch.Tensor, int]
"""Bytes (uint8, contiguous) and the rank of the group at the other end."""

Round: TypeAlias = tuple[list[SendOp], list[RecvOp]]


def peer_of(op: SendOp | RecvOp) -> int:
    """The other end of a transfer."""
    return op.dest_rank if isinstance(op, SendOp) else op.src_rank


def what_moves(op: SendOp | RecvOp) -> str:
    """A transfer, for error messages."""
    verb = "to" if isinstance(op, SendOp) else "from"
    return f"task {op.task_id} {verb} rank {peer_of(op)}"


class DistributedCopyService(QueuedCopyService):
    """Copies over a process group of `torch.distributed`, whose memory is that of one device.

    `run()` compares task ids, sizes and dtypes of all pairs before it sends anything, then moves the
    transfers of every pair in task id order, a limited number at a time. Contiguous tensors on the
    device of the wire are sent and received where they are; others go through a buffer on it. Kinds
    of groups differ in how messages are started (`_start`), and may in how they are waited for
    (`_wait`).

    Args:
        group: The ranks.
        wire_group: The process group whose messages are used.
        wire_device: Device whose memory these messages are read from and written to.
        stream: Stream on which copies of CUDA tensors run; None without CUDA.
        max_messages: Most messages in flight between two ranks in one direction.
        max_message_bytes: Most bytes of them, unless one message alone is larger.
    """

    takes_strided_tensors = True

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        wire_group: dist.ProcessGroup,
        wire_device: torch.device,
        stream: torch.cuda.Stream | None,
        *,
        max_messages: int,
        max_message_bytes: int,
    ) -> None:
        super().__init__(group)
        self._wire_group = wire_group
        self._wire_device = wire_device
        self._stream = stream
        self._max_messages = max_messages
        self._max_message_bytes = max_message_bytes
        # The failure as text, and whom it concerned. An error itself has the frames of the callers, and with
        # them their models.
        self._failure: tuple[str, Sequence[int]] | None = None
        self._in_flight: object = None

    @abc.abstractmethod
    def _start(self, sends: Sequence[Message], recvs: Sequence[Message]) -> list[dist.Work]:
        """Begin all messages; the works of the receives come last, or one is of everything."""

    def _check(
        self, tensor: torch.Tensor, rank_name: str, rank_idx: int, task_id: int | None
    ) -> int | None:
        task_id = super()._check(tensor, rank_name, rank_idx, task_id)
        if tensor.is_cuda and self._stream is not None and tensor.device != self._stream.device:
            self._refuse(
                ValueError(
                    f"this {type(self).__name__} was made for {self._stream.device}, got a tensor "
                    f"on {tensor.device}"
                )
            )
        return task_id

    def check_usable(self) -> None:
        """Raise CommunicationError where an operation failed before. Local."""
        if self._failure is not None:
            text, ranks = self._failure
            raise CommunicationError(
                f"{type(self).__name__} failed before and must be made anew, with a new process "
                f"group: {text}",
                ranks=ranks,
                operation="reshard",
            )

    def run(self) -> None:
        """Execute everything submitted since the last `run()`. Collective over the group.

        Raises:
            ValueError: A rank's input is bad or two ends disagree; on every rank, before any data
                moves. The service stays usable.
            PeerFailedError: A peer closed its connection: it died, or gave up. The service is not
                usable any more, like after every error below.
            PeerTimeoutError: A round of messages took longer than the group's timeout.
            CommunicationError: Another error of a message, or the service failed before.
        """
        self.check_usable()
        batch = self._take()
        pairs = self._pairs_within(batch)
        self._agree(batch)
        try:
            with torch.no_grad(), self._on_stream(batch):
                for send, recv in pairs:
                    copy_pair(send.tensor, recv.tensor)
                for round_idx, (sends, recvs) in enumerate(self._rounds(batch)):
                    self._move(round_idx, sends, recvs)
        except BaseException as error:
            # Peers may be left in the middle of a message.
            self._end(error)
            raise

    def abandon(self, reason: str) -> None:
        """Make the next `run()` of every other rank raise with `reason`."""
        batch = self._take()
        if self._failure is None:
            batch.problem = reason
            with contextlib.suppress(ValueError, CommunicationError):
                self._agree(batch)

    def _gather(self, payload: bytes) -> list[bytes]:
        check_process_of(self._wire_group, type(self).__name__)
        with self._failing("the exchange of task ids", ()):
            return all_gather_bytes(self._wire_group, self._wire_device, payload)

    def _rounds(self, batch: Batch) -> Iterator[Round]:
        """Messages that are in flight together.

        Both ends of a pair cut their list alike, so the n-th round of one never waits for another
        round than the n-th of its peer: no circle of waiting ranks can arise.
        """
        send_parts = [self._parts(ops) for peer, ops in enumerate(batch.sends) if peer != self.rank]
        recv_parts = [self._parts(ops) for peer, ops in enumerate(batch.recvs) if peer != self.rank]
        for parts in itertools.zip_longest(*send_parts, *recv_parts, fillvalue=[]):
            yield (
                [op for part in parts for op in part if isinstance(op, SendOp)],
                [op for part in parts for op in part if isinstance(op, RecvOp)],
            )

    def _parts(self, ops: Sequence[SendOp] | Sequence[RecvOp]) -> list[list[SendOp | RecvOp]]:
        """The transfers of one pair, cut where the limits are reached; empty ones left out."""
        parts: list[list[SendOp | RecvOp]] = []
        num_bytes = 0
        for op in ops:
            size = op.tensor.numel() * op.tensor.element_size()
            if size == 0:
                continue
            if (
                not parts
                or len(parts[-1]) == self._max_messages
                or num_bytes + size > self._max_message_bytes
            ):
                parts.append([])
                num_bytes = 0
            parts[-1].append(op)
            num_bytes += size
        return parts

    def _move(self, round_idx: int, sends: Sequence[SendOp], recvs: Sequence[RecvOp]) -> None:
        outgoing = [(self._message(op.tensor), op.dest_rank) for op in sends]
        incoming = [(self._wire_buffer(op.tensor), op.src_rank) for op in recvs]
        if self._stream is not None and self._wire_device.type == "cpu":
            # Messages are sent by the host: copies into them must be there. A device orders its own.
            self._stream.synchronize()
        peers = tuple(sorted({peer for _, peer in (*outgoing, *incoming)}))
        # Targets of messages count as written from here on: torch.distributed does not count it.
        increment_version(
            op.tensor
            for (buffer, _), op in zip(incoming, recvs, strict=True)
            if buffer.data_ptr() == op.tensor.data_ptr()
        )
        with self._failing(f"messages of round {round_idx}", peers):
            works = self._start(outgoing, incoming)
        # Works may write into their buffers until all have ended, or the connections have.
        self._in_flight = (works, outgoing, incoming)
        self._wait(round_idx, works, [*sends, *recvs])
        self._in_flight = None
        for (buffer, _), op in zip(incoming, recvs, strict=True):
            if buffer.data_ptr() != op.tensor.data_ptr():
                copy_pair(buffer.view(op.tensor.dtype), op.tensor)

    def _wait(
        self, round_idx: int, works: Sequence[dist.Work], ops: Sequence[SendOp | RecvOp]
    ) -> None:
        """Wait for the works of a round; a backend may give one for all of its messages."""
        for position, work in enumerate(works):
            if len(works) == len(ops):
                with self._failing(what_moves(ops[position]), (peer_of(ops[position]),)):
                    work.wait()
            else:
                peers = tuple(sorted({peer_of(op) for op in ops}))
                with self._failing(f"messages of round {round_idx}", peers):
                    work.wait()

    def _message(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements of `tensor` in order, as uint8 where the wire takes them."""
        buffer = self._wire_buffer(tensor)
        if buffer.data_ptr() != tensor.data_ptr():
            copy_pair(tensor, buffer.view(tensor.dtype))
        return buffer

    def _wire_buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        """The memory of `tensor` itself, as uint8, or as much where the wire reaches it."""
        if tensor.device == self._wire_device and tensor.is_contiguous():
            return bytes_of(tensor)
        # Copies between pinned memory and a device run beside each other.
        return torch.empty(
            tensor.numel() * tensor.element_size(),
            dtype=torch.uint8,
            device=self._wire_device,
            pin_memory=self._stream is not None and self._wire_device.type == "cpu",
        )

    @contextlib.contextmanager
    def _failing(self, what: str, peers: tuple[int, ...]) -> Iterator[None]:
        """Say which ranks an error of torch.distributed concerns, and remember it."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise self._fail(what, error, peers) from error

    def _fail(self, what: str, error: BaseException, peers: tuple[int, ...]) -> CommunicationError:
        """The exception that an error of torch.distributed becomes; the service ends with it."""
        what = f"{type(self).__name__}, rank {self.rank}: {what} failed"
        failure = failure_of(self._wire_group, what, error, peers)
        self._end(failure)
        return failure

    def _end(self, error: BaseException) -> None:
        self._failure = str(error), getattr(error, "ranks", ())

    @contextlib.contextmanager
    def _on_stream(self, batch: Batch) -> Iterator[None]:
        """Run CUDA work after everything that produced the batch, before whatever comes next."""
        if self._stream is None:
            yield
            return
        current = torch.cuda.current_stream(self._stream.device)
        for stream in {*batch.streams, current}:
            self._stream.wait_stream(stream)
        tensors = [
            *(op.tensor for ops in batch.sends for op in ops),
            *(op.tensor for ops in batch.recvs for op in ops),
        ]
        for tensor in tensors:
            if tensor.is_cuda:
                # Its memory must not be given to others before this stream is done with it.
                tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)
