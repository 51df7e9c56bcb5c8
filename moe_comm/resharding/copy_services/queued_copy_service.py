"""Queue of what is submitted to a copy service, checked and put in order."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Sequence
from typing import NoReturn

import torch
import torch.distributed as dist

from moe_comm.arguments import check_resolved
from moe_comm.peers.agree import mismatched_transfers
from moe_comm.peers.bootstrap import Bootstrap
from moe_comm.peers.communicator import Communicator
from moe_comm.resharding.copy_services.base import (
    CopyService,
    RecvOp,
    SendOp,
    match_local_ops_by_task_id,
)
from moe_comm.resharding.copy_services.batched_copy import problem_with_overlaps
from moe_comm.resharding.copy_services.matched_transfers import Transfer, agree
from moe_comm.tensors.memory import problem_with_memory
from moe_comm.tensors.memory_overlap import has_element_twice

__all__ = ["Batch", "QueuedCopyService", "check_either", "copy_pair"]


@dataclasses.dataclass
class Batch:
    """Batch of what one rank submitted for one `run()`.

    Args:
        sends: Sends by destination rank, in task id order; in the order of submission where ids are None.
        recvs: Receives by source rank, likewise.
        streams: CUDA streams that were current when CUDA tensors were submitted: what they hold is
            ready when these have reached this point.
        problem: Message about what is wrong with the batch, or None.
    """

    sends: list[list[SendOp]]
    recvs: list[list[RecvOp]]
    streams: set[torch.cuda.Stream]
    problem: str | None


class QueuedCopyService(CopyService):
    """Collects what is submitted until `run()`.

    A bad argument raises at once. It also spoils the batch: `run()` of every rank then raises with
    the same message, whether this rank calls `run()` or `abandon()`.

    Args:
        group: A process group; None for the default group. Not used with `ranks`.
        ranks: Ranks of the service in place of those of `group`; None for those.
    """

    device_types: tuple[str, ...] = ("cpu", "cuda")
    """Types of devices on which tensors may lie."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        ranks: Communicator | Bootstrap | None = None,
    ) -> None:
        self.ranks = ranks
        """Ranks of the service where `group` does not say them."""
        if ranks is None:
            super().__init__(group)
        else:
            self.group = ranks.group if isinstance(ranks, Communicator) else None
            self.rank = ranks.rank_idx
            self.world_size = ranks.num_ranks
        self._sends: list[SendOp] = []
        self._recvs: list[RecvOp] = []
        self._streams: set[torch.cuda.Stream] = set()
        self._problem: str | None = None

    def submit_send(
        self, src_tensor: torch.Tensor, dest_rank: int, task_id: int | None = None
    ) -> None:
        """Register `src_tensor` to be sent to `dest_rank` by the next `run()`.

        It must not change before `run()` returns. Where it shares bytes with a destination of the
        batch, `run()` refuses, unless both are the two ends of one copy in the same place.

        Raises:
            TypeError: It is no tensor, or a rank or id is no integer.
            ValueError: It is no tensor that this service moves, or there is no such rank.
        """
        task_id = self._check(src_tensor, "dest_rank", dest_rank, task_id)
        self._sends.append(SendOp(task_id, src_tensor.detach(), dest_rank))

    def submit_recv(
        self, dest_tensor: torch.Tensor, src_rank: int, task_id: int | None = None
    ) -> None:
        """Register `dest_tensor` to be received from `src_rank` by the next `run()`.

        It is written in place, whatever its strides are.

        Raises:
            TypeError: It is no tensor, or a rank or id is no integer.
            ValueError: It is no tensor that this service moves, or there is no such rank.
        """
        task_id = self._check(dest_tensor, "src_rank", src_rank, task_id)
        if not dest_tensor.is_contiguous() and has_element_twice(dest_tensor):
            self._refuse(
                ValueError(
                    "a destination must not have two elements in one place, got shape "
                    f"{tuple(dest_tensor.shape)} with strides {dest_tensor.stride()}"
                )
            )
        self._recvs.append(RecvOp(task_id, dest_tensor.detach(), src_rank))

    def _check(
        self, tensor: torch.Tensor, rank_name: str, rank_idx: int, task_id: int | None
    ) -> int | None:
        """The task id as a plain integer."""
        if not isinstance(tensor, torch.Tensor):
            self._refuse(TypeError(f"expected a torch.Tensor, got {type(tensor).__name__}"))
        if isinstance(rank_idx, bool) or not isinstance(rank_idx, int):
            self._refuse(TypeError(f"{rank_name} must be an int, got {rank_idx!r}"))
        if not 0 <= rank_idx < self.world_size:
            self._refuse(
                ValueError(f"{rank_name} must be in [0, {self.world_size}), got {rank_idx}")
            )
        if tensor.layout is not torch.strided or tensor.is_quantized:
            kind = "quantized" if tensor.is_quantized else str(tensor.layout)
            self._refuse(ValueError(f"only dense tensors are moved, got a {kind} tensor"))
        if hasattr(tensor, "__tensor_flatten__"):
            self._refuse(
                ValueError(
                    "only plain tensors are moved (of a DTensor, its local tensor), got "
                    f"{type(tensor).__name__}"
                )
            )
        try:
            check_resolved("tensor", tensor)
        except ValueError as error:
            self._refuse(error)
        if tensor.device.type not in self.device_types:
            self._refuse(
                ValueError(
                    f"{type(self).__name__} moves tensors on {' and '.join(self.device_types)}, "
                    f"got one on {tensor.device}"
                )
            )
        if (problem := problem_with_memory(tensor)) is not None:
            self._refuse(ValueError(f"the tensor of shape {tuple(tensor.shape)} {problem}"))
        if task_id is not None:
            if isinstance(task_id, bool) or not hasattr(task_id, "__index__"):
                self._refuse(TypeError(f"task_id must be an int or None, got {task_id!r}"))
            task_id = operator.index(task_id)
            if not 0 <= task_id < 1 << 63:
                self._refuse(ValueError(f"task_id must be in [0, 2^63), got {task_id}"))
        if tensor.is_cuda:
            self._streams.add(torch.cuda.current_stream(tensor.device))
        return task_id

    def _refuse(self, error: Exception) -> NoReturn:
        if self._problem is None:
            self._problem = str(error)
        raise error

    def _take(self) -> Batch:
        """Take everything that was submitted, as one batch; the next submission begins another."""
        sends: list[list[SendOp]] = [[] for _ in range(self.world_size)]
        recvs: list[list[RecvOp]] = [[] for _ in range(self.world_size)]
        for send in self._sends:
            sends[send.dest_rank].append(send)
        for recv in self._recvs:
            recvs[recv.src_rank].append(recv)
        problems = [] if self._problem is None else [self._problem]
        for peer_rank in range(self.world_size):
            for what, found in (
                (f"sends to rank {peer_rank}", _sort(sends[peer_rank])),
                (f"receives from rank {peer_rank}", _sort(recvs[peer_rank])),
            ):
                if found is not None:
                    problems.append(f"{what}: {found}")
        ops: list[SendOp | RecvOp] = [*self._sends, *self._recvs]
        problems.extend(
            f"task {op.task_id}: the tensor of shape {tuple(op.tensor.shape)} {problem}"
            for op in ops
            if (problem := problem_with_memory(op.tensor)) is not None
        )
        shared = problem_with_overlaps(
            [(op.task_id, op.tensor, op.dest_rank) for op in self._sends],
            [(op.task_id, op.tensor, op.src_rank) for op in self._recvs],
            self.rank,
        )
        if shared is not None:
            problems.append(shared)
        batch = Batch(sends, recvs, self._streams, problems[0] if problems else None)
        self._sends, self._recvs, self._streams, self._problem = [], [], set(), None
        return batch

    def _gather(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, all equally long, for services that call `_agree`."""
        raise NotImplementedError(f"{type(self).__name__} does not gather")

    def _pairs_within(self, batch: Batch) -> list[tuple[SendOp, RecvOp]]:
        """Both ends of this rank's copies to itself. What is wrong with them spoils the batch."""
        if batch.problem is None:
            try:
                return _match_pairs(
                    batch.sends[self.rank], batch.recvs[self.rank], type(self).__name__, self.rank
                )
            except RuntimeError as error:
                batch.problem = str(error)
        return []

    def _agree(self, batch: Batch) -> None:
        """Compare both ends of all transfers between ranks. Collective.

        Raises:
            ValueError: The batch of a rank has a problem, or two ends disagree; on every rank.
        """
        sends, recvs = _transfers_of(batch.sends), _transfers_of(batch.recvs)
        # Copies within a rank are matched there.
        sends[self.rank], recvs[self.rank] = [], []
        agree(self.rank, sends, recvs, batch.problem, self._gather)


def _sort(ops: list[SendOp] | list[RecvOp]) -> str | None:
    """Put the transfers of one pair into task id order; what is wrong with their ids, or None."""
    ids = [op.task_id for op in ops if op.task_id is not None]
    if not ids:
        return None
    if len(ids) < len(ops):
        return f"{len(ids)} have a task_id, such as {ids[0]}, and {len(ops) - len(ids)} have none"
    ops.sort(key=lambda op: op.task_id or 0)
    ids.sort()
    for first_id, second_id in itertools.pairwise(ids):
        if first_id == second_id:
            return f"task_id {first_id} comes twice"
    return None


def check_either(group: object, communicator: object) -> None:
    """Raise ValueError where both say who the ranks of a service are."""
    if group is not None and communicator is not None:
        raise ValueError(
            f"group and communicator both say who the ranks are, got {group} and {communicator}"
        )


def _transfers_of(by_peer: Sequence[Sequence[SendOp | RecvOp]]) -> list[list[Transfer]]:
    """Return the facts of every transfer that its two ends compare."""
    return [[(op.task_id, *_bytes_and_dtype(op.tensor)) for op in ops] for ops in by_peer]


def _bytes_and_dtype(tensor: torch.Tensor) -> tuple[int, str]:
    """Return the two facts that both ends of a transfer must have alike."""
    return tensor.numel() * tensor.element_size(), str(tensor.dtype)


def _match_pairs(
    sends: Sequence[SendOp], recvs: Sequence[RecvOp], backend_name: str, rank: int
) -> list[tuple[SendOp, RecvOp]]:
    """`match_local_ops_by_task_id`, and sizes and dtypes compared.

    Raises:
        RuntimeError: A copy of this rank to itself has no partner, or differs from it.
    """
    pairs = match_local_ops_by_task_id(sends, recvs, backend_name, rank)
    sent = {recv.task_id: send.tensor for send, recv in pairs}
    received = {recv.task_id: recv.tensor for _, recv in pairs}
    for task_id, *_ in mismatched_transfers(sent, received, _bytes_and_dtype):
        raise RuntimeError(
            f"{backend_name} copy service, rank {rank}: task {task_id} sends "
            f"{tuple(sent[task_id].shape)} of {sent[task_id].dtype} and receives "
            f"{tuple(received[task_id].shape)} of {received[task_id].dtype}"
        )
    return pairs


def copy_pair(src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copy the elements of `src` in order, whatever the two shapes and strides are."""
    is_device_copy = src.is_cuda or dst.is_cuda
    dst.copy_(
        src if src.shape == dst.shape else src.reshape(dst.shape), non_blocking=is_device_copy
    )
