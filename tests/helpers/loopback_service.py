"""A copy service of one rank with itself: what was submitted, matched by task id and copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from moe_comm.resharding.copy_services.base import CopyService
from moe_comm.resharding.plan.reshard_plan import ReshardPlan
from moe_comm.resharding.plan.transfer_op import TransferOp


class LoopbackService(CopyService):
    """Has what every service must have, and no constructor of the base class."""

    requires_process_group_barrier = False

    def __init__(self, fail: Exception | None = None, num_copies_before: int = 1 << 30) -> None:
        self.sends: dict[Any, torch.Tensor] = {}
        self.recvs: dict[Any, torch.Tensor] = {}
        self.fail = fail
        self.num_copies_before = num_copies_before
        self.num_runs = 0
        self.submitted: list[tuple[str, Any, torch.Tensor]] = []
        self.abandoned: list[str] = []

    def submit_send(
        self, src_tensor: torch.Tensor, dest_rank: int, task_id: int | None = None
    ) -> None:
        assert task_id not in self.sends
        self.sends[task_id] = src_tensor
        self.submitted.append(("send", task_id, src_tensor))

    def submit_recv(
        self, dest_tensor: torch.Tensor, src_rank: int, task_id: int | None = None
    ) -> None:
        assert task_id not in self.recvs
        self.recvs[task_id] = dest_tensor
        self.submitted.append(("recv", task_id, dest_tensor))

    def run(self) -> None:
        sends, recvs = self.sends, self.recvs
        self.sends, self.recvs = {}, {}
        self.copy(sends, recvs)

    def copy(self, sends: dict[Any, torch.Tensor], recvs: dict[Any, torch.Tensor]) -> None:
        self.num_runs += 1
        for position, task_id in enumerate(recvs.keys() & sends.keys()):
            if self.fail is not None and position == self.num_copies_before:
                break
            src, dst = sends[task_id], recvs[task_id]
            assert (src.shape, src.dtype) == (dst.shape, dst.dtype)
            assert type(self).takes_strided_tensors or src.is_contiguous()
            assert type(self).takes_strided_tensors or dst.is_contiguous()
            dst.copy_(src)
        if self.fail is not None:
            raise self.fail

    def abandon(self, reason: str) -> None:
        self.abandoned.append(reason)


class StridedService(LoopbackService):
    """Takes tensors of any strides."""

    takes_strided_tensors = True


class RepeatingService(StridedService):
    """Can run a batch again."""

    def __init__(self, fail: Exception | None = None) -> None:
        super().__init__(fail)
        self.num_prepared = 0

    def prepare(self) -> Any:
        self.num_prepared += 1
        prepared = (self.sends, self.recvs)
        self.sends, self.recvs = {}, {}
        return prepared

    def run_prepared(self, prepared: Any) -> None:
        self.copy(*prepared)


def module_of(**tensors: torch.Tensor) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_parameter(
            name, nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
        )
    return module


def whole(tensor: torch.Tensor) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in tensor.shape)


Slices = tuple[slice, ...]


def plan_of(*pieces: tuple[str, Slices, Slices], **fields: Any) -> ReshardPlan:
    """A plan of one rank with itself.

    Args:
        *pieces: (name, of the source, of the destination).
        **fields: Of every op, `src_` or `dst_` first where they differ: of the sender's own end.
    """
    src = {name[4:]: value for name, value in fields.items() if name.startswith("src_")}
    dst = {name[4:]: value for name, value in fields.items() if name.startswith("dst_")}
    both = {name: v for name, v in fields.items() if name[:4] not in ("src_", "dst_")}

    def ends(mine: dict[str, Any], peer: dict[str, Any]) -> dict[str, Any]:
        return (
            both
            | {f"my_{name}": value for name, value in mine.items()}
            | {f"peer_{name}": value for name, value in peer.items()}
        )

    return ReshardPlan(
        [
            TransferOp(name, 0, True, mine, theirs, i, **ends(src, dst))
            for i, (name, mine, theirs) in enumerate(pieces)
        ],
        [
            TransferOp(name, 0, False, theirs, mine, i, **ends(dst, src))
            for i, (name, mine, theirs) in enumerate(pieces)
        ],
    )


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*args: Any, **options: Any) -> Any:
        raise error

    return fail
