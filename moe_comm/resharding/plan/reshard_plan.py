"""Parts of a reshard plan: pure data, equal on all ranks, printable and picklable."""

from __future__ import annotations

import dataclasses

import torch

from moe_comm.resharding.plan.transfer_op import TransferOp
from moe_comm.resharding.plan.transform_protocol import ReshardTransform


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor that a plan reads or writes."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class PartialReduction:
    """A source tensor that is a pending sum (`Partial` placement of a DTensor).

    The source ranks reduce a copy of it, in its own dtype, before any piece of it is read.

    Args:
        param_name: Name in this rank's own module.
        mesh_dims: Dimensions of the tensor's device mesh to reduce over, in this order.
        op: "sum", "avg", "min", "max" or "product".
    """

    param_name: str
    mesh_dims: tuple[int, ...]
    op: str


@dataclasses.dataclass
class ReshardPlan:
    """Plan of what one rank sends and receives.

    Args:
        send_ops: Sends in task id order.
        recv_ops: Receives in task id order.
        transform: Transform that `execute_reshard_plan` applies when it is given no other.
        buffer_dtypes: Dtypes that persistent buffers of the target take over, by name.
        sources: Tensors of this rank that are read, by name.
        destinations: Tensors of this rank that are written, by name.
        reductions: Reductions in the order in which every source rank runs them.
        num_ranks: Ranks of the group; 0 where the plan's maker did not know.
        rank: This rank in the group; -1 where the plan's maker did not know.
        batches: The sends and receives in parts that are executed one after the other, as many on every
            rank; empty where all are executed at once.
    """

    send_ops: list[TransferOp]
    recv_ops: list[TransferOp]
    transform: ReshardTransform | None = None
    buffer_dtypes: dict[str, torch.dtype] | None = None
    sources: dict[str, TensorSpec] = dataclasses.field(default_factory=dict)
    destinations: dict[str, TensorSpec] = dataclasses.field(default_factory=dict)
    reductions: list[PartialReduction] = dataclasses.field(default_factory=list)
    num_ranks: int = 0
    rank: int = -1
    batches: list[ReshardPlan] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        return f"ReshardPlan(sends={len(self.send_ops)}, recvs={len(self.recv_ops)})"
