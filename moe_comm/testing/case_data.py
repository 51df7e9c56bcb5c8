"""Inputs of a case's calls, made alike on every rank, and the definition applied to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from moe_comm.ep.config import Layout
from moe_comm.ep.spec import Dispatch, Received, quantize_rows
from moe_comm.tensors.quantization import Quantization
from moe_comm.testing.cases import Case, RankInput, random_weights, rows_of_case, seeded

_MakeRows = Callable[[int, torch.Generator], torch.Tensor]


def as_sent(
    rows: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor] | None,
    quantization: Quantization | None,
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor] | None]:
    """Rows and scale factors of every rank as they travel: quantized where they are to be."""
    if quantization is None or scales is not None:
        return rows, scales
    pairs = [quantize_rows(x, quantization) for x in rows]
    return [data for data, _ in pairs], [factors for _, factors in pairs]


class CaseData:
    """A case with one set of inputs: what every rank puts in and must get.

    Args:
        case: Its configuration.
        inputs: Inputs of every rank.
    """

    def __init__(self, case: Case, inputs: Sequence[RankInput]) -> None:
        self.case = case
        self.inputs = inputs
        is_low_latency = case.layout is Layout.LOW_LATENCY
        self.dispatch = Dispatch(
            topk_idx=[rank.topk_idx for rank in inputs],
            expert_rank=case.config.resolve_expert_rank(case.num_ranks).tolist(),
            layout=case.layout,
            expert_alignment=case.expert_alignment,
            num_places_per_expert=case.num_ranks * case.num_max_tokens if is_low_latency else 0,
            capacities=case.capacities or (),
            masked_ranks=frozenset(peer for ranks in case.masked_ranks or () for peer in ranks),
        )
        assert not self.dispatch.overflows, "the case asks for more than its limits allow"

    def received(
        self,
        rank_idx: int,
        rows: Sequence[torch.Tensor],
        topk_weights: Sequence[torch.Tensor] | None,
        *,
        scales: Sequence[torch.Tensor] | None = None,
        quantization: Quantization | None = None,
        is_cached: bool = False,
    ) -> Received:
        """Return the tensors that a rank receives when every rank r sends `rows[r]` and `topk_weights[r]`.

        Args:
            rank_idx: Rank of the receiver.
            rows: `[T, hidden]` of every rank.
            topk_weights: `[T, K]` of every rank, or None.
            scales: `[T, num_scales]` of every rank where rows are quantized already.
            quantization: Quantization of the rows, and the order of scale factors.
            is_cached: Whether rows go to the places of an earlier dispatch.
        """
        rows, scales = as_sent(rows, scales, quantization)
        dispatch = self.dispatch.again if is_cached else self.dispatch
        is_column_major = quantization is not None and quantization.is_column_major
        return dispatch.received(
            rank_idx, rows, topk_weights, x_sf=scales, is_column_major=is_column_major
        )

    def sums(
        self,
        rank_idx: int,
        expert_out: Sequence[torch.Tensor],
        topk_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the sums that a rank gets back from the expert outputs of every rank."""
        num_local_ranks = self.case.num_local_ranks if self.case.node_reduction else None
        return self.dispatch.sums(
            rank_idx,
            expert_out,
            topk_weights,
            num_local_ranks=num_local_ranks,
            rank_reduction=self.case.rank_reduction,
        )

    def rows(self, key: object, hidden: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Rows `[T, hidden]` for every rank to dispatch; in rank order independent of the ranks."""
        sizes = list(self.case.num_tokens)
        rows = rows_of_case(self.case, sum(sizes), hidden, dtype, seeded("rows", key))
        return [some.clone() for some in torch.split(rows, sizes)]

    def expert_outputs(self, key: object, hidden: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """`[M, hidden]` of every rank. By expert, whoever has it (not RANK_MAJOR); NaN elsewhere."""
        plain = dataclasses.replace(self.case, quantization=None)
        return self._windows_of(
            key, lambda num_rows, made: rows_of_case(plain, num_rows, hidden, dtype, made)
        )

    def row_weights(self, key: object, dtype: torch.dtype) -> list[torch.Tensor]:
        """`[M, K]` (RANK_MAJOR) or `[M]` of every rank, NaN where there is no row."""
        by_rank = self.case.layout is Layout.RANK_MAJOR
        more = (self.case.num_recv_topk,) if by_rank else ()
        special = self.case.has_special_values
        return self._windows_of(
            key,
            lambda num_rows, made: random_weights(
                (num_rows, *more), dtype, made, has_special_values=special
            ),
        )

    def _windows_of(self, key: object, make: _MakeRows) -> list[torch.Tensor]:
        windows = []
        for rank_idx, window in enumerate(self.dispatch.windows):
            num_rows = len(window.rows)
            if self.case.layout is Layout.RANK_MAJOR:
                windows.append(make(num_rows, seeded(key, "rank", rank_idx)))
                continue
            rows = make(0, seeded(key))
            rows = rows.new_full((num_rows, *rows.shape[1:]), float("nan"))
            for expert_idx, start, size in zip(
                self.dispatch.experts_of(rank_idx),
                window.expert_offsets[:-1],
                window.num_tokens_per_expert,
                strict=True,
            ):
                rows[start : start + size] = make(size, seeded(key, "expert", expert_idx))
            windows.append(rows)
        return windows
