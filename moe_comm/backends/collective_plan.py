"""A plan of the `collective` backend: places, and the order in which rows travel."""

from __future__ import annotations

import dataclasses

import torch

from moe_comm.backends import routing
from moe_comm.backends.base import PlanTensors
from moe_comm.backends.routing import Placement, RowOrder, Window

__all__ = ["CollectivePlan"]


@dataclasses.dataclass(frozen=True, eq=False)
class CollectivePlan:
    """A plan with what the two directions need of it.

    Args:
        tensors: Own their memory.
        order: Of received rows.
        window: What this rank receives.
        send_order: int64 `[num_sent]`, flat places in `slots` of the rows it sends, ascending by slot.
        send_splits: Rows it sends to every rank.
        recv_splits: Rows it receives from every rank.
    """

    tensors: PlanTensors
    order: RowOrder
    window: Window
    send_order: torch.Tensor
    send_splits: list[int]
    recv_splits: list[int]

    @classmethod
    def of(
        cls, tensors: PlanTensors, rank_idx: int, placement: Placement, order: RowOrder
    ) -> CollectivePlan:
        """Derive everything from the tensors."""
        window = routing.window_of(rank_idx, tensors.counts, placement, order)
        slots = tensors.slots.flatten()
        by_slot = slots.argsort()[int((slots < 0).sum()) :]
        slot_rank, _ = routing.decode_slots(slots[by_slot])
        return cls(
            tensors=tensors,
            order=order,
            window=window,
            send_order=by_slot,
            send_splits=torch.bincount(slot_rank, minlength=placement.num_ranks).tolist(),
            recv_splits=window.num_rows_per_source.tolist(),
        )

    @property
    def num_tokens(self) -> int:
        """Tokens this rank dispatched."""
        return self.tensors.topk_idx.shape[0]

    @property
    def num_topk(self) -> int:
        """Choices per token of this rank."""
        return self.tensors.topk_idx.shape[1]

    @property
    def num_recv_topk(self) -> int:
        """Largest number of choices per token of all ranks."""
        return int(self.tensors.counts[:, -1].max())

    @property
    def num_recv_tokens(self) -> int:
        """Rows this rank received, padding included."""
        return self.window.num_recv_tokens

    @property
    def send_token_idx(self) -> torch.Tensor:
        """The token of every row this rank sends, int64 `[num_sent]`."""
        return self.send_order // max(1, self.tensors.slots.shape[1])

    def sent_positions(self, slots: torch.Tensor) -> torch.Tensor:
        """Where among the rows it sends every slot of `slots` is, -1 for a slot of -1."""
        ascending = self.tensors.slots.flatten()[self.send_order]
        return torch.where(slots < 0, -1, torch.searchsorted(ascending, slots))

    def to_tensors(self) -> PlanTensors:
        """A copy of the tensors."""
        return dataclasses.replace(
            self.tensors,
            counts=self.tensors.counts.clone(),
            slots=self.tensors.slots.clone(),
            topk_idx=self.tensors.topk_idx.clone(),
        )
