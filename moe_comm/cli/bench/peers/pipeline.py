"""Dispatch and combine over a plain all-to-all, giving the same expert-major rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from moe_comm.cli.bench.case import BenchCase, make_topk_idx
from moe_comm.cli.bench.oracle import num_window_rows
from moe_comm.cli.bench.traffic import rank_traffic
from moe_comm.ep.config import Layout, default_expert_rank

Transport = Callable[[torch.Tensor, torch.Tensor, Sequence[int], Sequence[int]], None]
"""All-to-all of rows, int64 `[n, words]`: what is received, what is sent, rows from and to every rank, in order."""


class AllToAllPipeline:
    """Pipeline that one builds from an all-to-all, tuned.

    Every large buffer is allocated and touched once; rows move as bytes; the expert-major order is
    made by one copy per (source rank, expert) block; sums come from the library's own gather-and-add.

    Args:
        case: EXPERT_MAJOR.
        rank_idx: This rank.
        x: `[num_tokens, hidden]`.
        transport: The all-to-all.
    """

    def __init__(
        self, case: BenchCase, rank_idx: int, x: torch.Tensor, transport: Transport
    ) -> None:
        if case.layout != Layout.EXPERT_MAJOR:
            raise ValueError(f"peers give expert-major rows, got layout {case.layout.name}")
        self.case = case
        self.rank_idx = rank_idx
        self.x = x
        self.transport = transport
        self.topk_idx = make_topk_idx(case, rank_idx)
        expert_rank = default_expert_rank(case.num_experts, case.num_ranks)
        self.num_local_experts = torch.bincount(
            expert_rank.to(torch.int64), minlength=case.num_ranks
        ).tolist()

        num_choices = case.num_tokens * case.num_topk
        traffic = rank_traffic(case, rank_idx)
        # One zero row behind the others stands for choices that are -1.
        self.send = _touched(case, num_choices + 1)
        self.recv = _touched(case, traffic.num_recv_rows)
        self.expert_x = _touched(case, num_window_rows(case, rank_idx))
        self.send_position = torch.empty(num_choices, dtype=torch.int64)
        self.send_counts: list[int] = []
        self.recv_counts: list[int] = []
        self.blocks: list[tuple[int, int, int]] = []

    def dispatch(self) -> torch.Tensor:
        """Send rows; returns `expert_x`, `[M, hidden]`, expert-major with zero padding."""
        case = self.case
        choice = self.topk_idx.view(-1)
        expert_sorted, order = torch.sort(choice, stable=True)
        num_unused = int(torch.searchsorted(expert_sorted, 0))
        order = order[num_unused:]
        num_sent = order.numel()
        self.send_position.fill_(num_sent)
        self.send_position[order] = torch.arange(num_sent)
        token_idx = order // case.num_topk
        torch.index_select(self.x, 0, token_idx, out=self.send[:num_sent])
        self.send[num_sent:].zero_()

        counts = torch.bincount(choice[choice >= 0], minlength=case.num_experts)
        num_local = self.num_local_experts[self.rank_idx]
        recv_expert_counts = torch.empty(case.num_ranks, num_local, dtype=torch.int64)
        self.transport(
            recv_expert_counts.view(-1, 1),
            counts.view(-1, 1),
            [num_local] * case.num_ranks,
            self.num_local_experts,
        )
        ends = torch.tensor(self.num_local_experts).cumsum(0)
        rows_before = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        self.send_counts = (
            rows_before[ends].diff(prepend=torch.zeros(1, dtype=torch.int64)).tolist()
        )
        self.recv_counts = recv_expert_counts.sum(dim=1).tolist()
        num_recv = sum(self.recv_counts)
        self.transport(
            _words(self.recv[:num_recv]),
            _words(self.send[:num_sent]),
            self.recv_counts,
            self.send_counts,
        )
        self._place_blocks(recv_expert_counts)
        for recv_row, expert_row, num_rows in self.blocks:
            self.expert_x[expert_row : expert_row + num_rows] = self.recv[
                recv_row : recv_row + num_rows
            ]
        return self.expert_x

    def combine(self, expert_out: torch.Tensor) -> torch.Tensor:
        """Return rows and add them in top-k order; `[num_tokens, hidden]`.

        Args:
            expert_out: `[M, hidden]`, of the last dispatch.
        """
        for recv_row, expert_row, num_rows in self.blocks:
            self.recv[recv_row : recv_row + num_rows] = expert_out[
                expert_row : expert_row + num_rows
            ]
        num_sent = sum(self.send_counts)
        self.transport(
            _words(self.send[:num_sent]),
            _words(self.recv[: sum(self.recv_counts)]),
            self.send_counts,
            self.recv_counts,
        )
        # One pass over the rows; index_select and add per choice take three times as long.
        return torch.nn.functional.embedding_bag(
            self.send_position.view(-1, self.case.num_topk), self.send, mode="sum"
        )

    def _place_blocks(self, recv_expert_counts: torch.Tensor) -> None:
        """Find the positions of every (source rank, local expert) block in `recv` and in `expert_x`."""
        alignment = self.case.expert_alignment
        totals = recv_expert_counts.sum(dim=0)
        padded = -(-totals // alignment) * alignment
        starts = (padded.cumsum(0) - padded).tolist()
        ends = (padded.cumsum(0)).tolist()
        next_row = list(starts)
        recv_row = 0
        self.blocks.clear()
        for source_counts in recv_expert_counts.tolist():
            for local_expert_idx, num_rows in enumerate(source_counts):
                self.blocks.append((recv_row, next_row[local_expert_idx], num_rows))
                recv_row += num_rows
                next_row[local_expert_idx] += num_rows
        for row, end in zip(next_row, ends, strict=True):
            self.expert_x[row:end] = 0


def _touched(case: BenchCase, num_rows: int) -> torch.Tensor:
    return torch.zeros(num_rows, case.hidden, dtype=case.torch_dtype)


def _words(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(torch.int64)
