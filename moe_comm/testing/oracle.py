"""What every rank must get, computed without peers from what all ranks put in."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch

from moe_comm.backends import reference, routing
from moe_comm.backends.base import CombineOutput, DispatchOutput, PlanTensors
from moe_comm.backends.routing import Placement, Window
from moe_comm.config import Layout
from moe_comm.testing.cases import Case, RankInput, random_rows, random_weights, seeded

__all__ = ["Oracle"]

_MakeRows = Callable[[int, torch.Generator], torch.Tensor]


@dataclasses.dataclass(frozen=True, eq=False)
class Oracle:
    """The specification applied to one set of inputs.

    Args:
        case: Its configuration.
        inputs: Of every rank.
    """

    case: Case
    inputs: Sequence[RankInput]

    @functools.cached_property
    def placement(self) -> Placement:
        """Of the experts."""
        num_ranks = self.case.num_ranks
        return Placement.of(self.case.config.resolve_expert_rank(num_ranks), num_ranks)

    @functools.cached_property
    def plans(self) -> list[PlanTensors]:
        """Of every rank."""
        return reference.plan_dispatch(
            [rank.topk_idx for rank in self.inputs],
            self.placement,
            self.case.layout,
            self.case.expert_alignment,
        )

    @functools.cached_property
    def windows(self) -> list[Window]:
        """What every rank receives."""
        return [
            routing.window_of(
                rank_idx,
                self.plans[0].counts,
                self.placement,
                self.case.layout,
                self.case.expert_alignment,
            )
            for rank_idx in range(self.case.num_ranks)
        ]

    def dispatched(
        self,
        rank_idx: int,
        rows: Sequence[torch.Tensor],
        topk_weights: Sequence[torch.Tensor] | None,
        *,
        is_cached: bool = False,
    ) -> DispatchOutput:
        """What a rank receives when every rank sends `rows[r]` and `topk_weights[r]`."""
        sent = [
            reference.Sent(
                x, None if topk_weights is None else topk_weights[rank], self.plans[rank]
            )
            for rank, x in enumerate(rows)
        ]
        return reference.received(rank_idx, sent, self.placement, is_cached=is_cached)

    def combined(
        self,
        rank_idx: int,
        expert_out: Sequence[torch.Tensor] | None,
        topk_weights: torch.Tensor | None,
        row_weights: Sequence[torch.Tensor] | None,
    ) -> CombineOutput:
        """What a rank gets back from the expert outputs and row weights of every rank."""
        return reference.combined(
            self.plans[rank_idx], topk_weights, expert_out, row_weights, self.placement
        )

    def rows(self, key: object, hidden: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Rows `[T, hidden]` for every rank to dispatch; in rank order independent of the ranks."""
        sizes = self.case.num_tokens
        special = self.case.has_special_values
        rows = random_rows(
            sum(sizes), hidden, dtype, seeded("rows", key), has_special_values=special
        )
        return [some.clone() for some in torch.split(rows, list(sizes))]

    def expert_outputs(self, key: object, hidden: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """`[M, hidden]` of every rank. EXPERT_MAJOR: by expert, whoever has it; NaN in padding."""
        return self._windows_of(
            key,
            lambda num_rows, generator: random_rows(
                num_rows,
                hidden,
                dtype,
                generator,
                has_special_values=self.case.has_special_values,
            ),
        )

    def row_weights(self, key: object, dtype: torch.dtype) -> list[torch.Tensor]:
        """`[M]` (EXPERT_MAJOR, NaN in padding) or `[M, K]` (RANK_MAJOR) of every rank."""
        by_choice = self.case.layout is Layout.RANK_MAJOR
        more = (self.case.num_topk,) if by_choice else ()
        return self._windows_of(
            key,
            lambda num_rows, generator: random_weights(
                (num_rows, *more),
                dtype,
                generator,
                has_special_values=self.case.has_special_values,
            ),
        )

    def _windows_of(self, key: object, make: _MakeRows) -> list[torch.Tensor]:
        windows = []
        for rank_idx, window in enumerate(self.windows):
            if self.case.layout is Layout.RANK_MAJOR:
                windows.append(make(window.num_recv_tokens, seeded(key, "rank", rank_idx)))
                continue
            pieces = [make(0, seeded(key))]
            sizes = window.num_tokens_per_expert.tolist()
            padded = window.expert_offsets.diff().tolist()
            experts = self.placement.experts_of(rank_idx).tolist()
            for expert_idx, size, padded_size in zip(experts, sizes, padded, strict=True):
                rows = make(size, seeded(key, "expert", expert_idx))
                pieces += [rows, rows.new_full((padded_size - size, *rows.shape[1:]), float("nan"))]
            windows.append(torch.cat(pieces))
        return windows
