"""A plan of the `collective` backend: places, and the order in which rows travel."""

from __future__ import annotations

import dataclasses

import torch

from moe_comm import _host
from moe_comm.ep.backends.base import PlanTensors
from moe_comm.ep.backends.expert_ranks import Placement
from moe_comm.ep.config import Layout


@dataclasses.dataclass(frozen=True, eq=False)
class CollectivePlan(PlanTensors):
    """A plan with what the two directions need of it. Rows to a rank travel by ascending slot.

    Args:
        num_tokens_per_expert: int64 `[num_local_experts]`, kept choices of every local expert.
        expert_offsets: int32 `[num_local_experts + 1]`, padded starts, last is the padded total.
        num_places_per_expert: LOW_LATENCY: rows that every expert has, filled or not; else 0.
        send_splits: Rows it sends to every rank.
        recv_splits: Rows it receives from every rank.
        sent_slots: int64 `[num_sent]`, flat places in `slots` of the rows that it sends, in order.
        source_rows: int64 `[num_received]`, the window row of every arriving row, in order.
        slot_positions: int64, shape of `slots`: where among the rows sent every slot is, or -1.
        choice_positions: int64, shape of `topk_idx`: the same of every choice, or -1. RANK_MAJOR:
            choices on one rank share a row.
    """

    num_tokens_per_expert: torch.Tensor
    expert_offsets: torch.Tensor
    num_places_per_expert: int
    send_splits: list[int]
    recv_splits: list[int]
    sent_slots: torch.Tensor
    source_rows: torch.Tensor
    slot_positions: torch.Tensor
    choice_positions: torch.Tensor

    @classmethod
    def of(
        cls,
        counts: torch.Tensor,
        topk_idx: torch.Tensor,
        asked: torch.Tensor,
        layout: Layout,
        expert_alignment: int,
        *,
        rank_idx: int,
        placement: Placement,
        arrangement: _host.layout.Arrangement,
    ) -> CollectivePlan:
        """The plan of a rank.

        Args:
            counts: int32, as in `PlanTensors`; kept.
            topk_idx: int64 `[T, K]`, contiguous; kept.
            asked: As in `PlanTensors`; kept.
            layout: As in `PlanTensors`.
            expert_alignment: As in `PlanTensors`.
            rank_idx: This rank.
            placement: Placement of the experts.
            arrangement: Arrangement of the rows.

        Raises:
            ValueError: `counts` and `topk_idx` do not fit each other or the placement.
        """
        where = (placement.native, arrangement, rank_idx)
        slots = _host.layout.assign_slots(topk_idx, counts, *where)
        send_splits, recv_splits, sent_slots, source_rows, slot_positions, choice_positions = (
            _host.layout.row_streams(topk_idx, slots, counts, *where)
        )
        num_choices, offsets, num_rows = _host.layout.received_rows(counts, *where)
        return cls(
            counts=counts,
            slots=slots,
            topk_idx=topk_idx,
            layout=layout,
            expert_alignment=expert_alignment,
            num_recv_tokens=num_rows,
            asked=asked,
            num_tokens_per_expert=num_choices,
            expert_offsets=offsets,
            num_places_per_expert=arrangement.num_places_per_expert,
            send_splits=send_splits,
            recv_splits=recv_splits,
            sent_slots=sent_slots,
            source_rows=source_rows,
            slot_positions=slot_positions,
            choice_positions=choice_positions,
        )

    @property
    def sent_token_idx(self) -> torch.Tensor:
        """The token of every row that this rank sends, int64 `[num_sent]`."""
        return self.sent_slots // max(1, self.slots.shape[1])
