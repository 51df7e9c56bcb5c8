"""Combine on several nodes: in chunks, with the bytes it claims.

Bits of every other shape are held to the definition by `test_conformance_nodes`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

import moe_comm
from moe_comm import EpBuffer, EpConfig, Layout
from tests.helpers.configs import ep_config
from tests.helpers.internode_traffic import agreement_bytes, counted_combines, rows_of
from tests.helpers.rank_threads import on_ranks

pytest.importorskip("moe_comm._host")

NODE_LAYOUTS = [
    pytest.param(4, 2, id="2-nodes-of-2"),
    pytest.param(6, 2, id="3-nodes-of-2"),
    pytest.param(3, 1, id="3-nodes-of-1"),
]
# Tokens of a rank, in turns: ragged, one rank without any.
NUM_TOKENS = (33, 0, 60, 17)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One shape; data follow from the rank."""

    layout: Layout = Layout.EXPERT_MAJOR
    num_experts: int = 12
    num_topk: int = 4
    hidden: int = 64
    dtype: torch.dtype = torch.bfloat16
    num_tokens: tuple[int, ...] = NUM_TOKENS

    @property
    def config(self) -> EpConfig:
        return ep_config(
            self.num_experts, self.num_topk, self.hidden, max(self.num_tokens), dtype=self.dtype
        )

    def batch(self, rank_idx: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x, topk_idx (with -1, and a repeated id) and weights of one rank."""
        draw = torch.Generator().manual_seed(rank_idx)
        num_tokens = self.num_tokens[rank_idx % len(self.num_tokens)]
        x = torch.randn(num_tokens, self.hidden, generator=draw).to(self.dtype)
        topk_idx = torch.randint(
            0, self.num_experts, (num_tokens, self.num_topk), generator=draw
        ).masked_fill(torch.rand(num_tokens, self.num_topk, generator=draw) < 0.15, -1)
        return x, topk_idx, torch.rand(num_tokens, self.num_topk, generator=draw)


def same_bits_as_with_one_node(
    num_ranks: int,
    num_local_ranks: int,
    body: Callable[[moe_comm.Communicator], list[torch.Tensor]],
    num_threads: int = 1,
) -> None:
    one_node = on_ranks(num_ranks, body)
    nodes = on_ranks(
        num_ranks, body, num_local_ranks=num_local_ranks, rail="sockets", num_threads=num_threads
    )
    for rank_idx, (expected, got) in enumerate(zip(one_node, nodes, strict=True)):
        assert len(expected) == len(got) > 0
        for i, (a, b) in enumerate(zip(expected, got, strict=True)):
            assert a.shape == b.shape
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), (rank_idx, i)


@pytest.mark.parametrize(
    "case",
    [
        # A chunk holds 128 rows: tens of chunks to and from every rank, several times round the ring.
        # `make test` goes round it with sums of nodes.
        pytest.param(
            Case(hidden=4096, num_tokens=(700, 0, 650), num_experts=6, num_topk=6),
            marks=pytest.mark.full,
        ),
        # A row is wider than a chunk should be, and one token takes a whole chunk.
        pytest.param(
            Case(hidden=300_000, dtype=torch.float32, num_tokens=(9, 4), num_topk=4, num_experts=4),
            marks=pytest.mark.full,
        ),
    ],
    ids=["many-chunks", "wide-rows"],
)
def test_many_chunks(case: Case) -> None:
    def body(comm: moe_comm.Communicator) -> list[torch.Tensor]:
        x, topk_idx, weights = case.batch(comm.rank_idx)
        with EpBuffer(comm, case.config) as buffer:
            found = []
            for _ in range(2):
                result = buffer.dispatch(x, topk_idx)
                rows = rows_of(result.x, comm.rank_idx)
                found.append(buffer.combine(rows, result.handle, topk_weights=weights).clone())
            return found

    same_bits_as_with_one_node(4, 2, body, num_threads=2)


def num_rows_on_node(case: Case, num_ranks: int, num_local_ranks: int, src: int, node: int) -> int:
    """Rows of the tokens of `src` on `node`, counted one by one."""
    experts_per_rank = case.num_experts // num_ranks
    num_rows = 0
    for choices in case.batch(src)[1].tolist():
        ranks = [expert // experts_per_rank for expert in choices if expert >= 0]
        if case.layout is Layout.RANK_MAJOR:
            ranks = list(set(ranks))
        num_rows += sum(rank // num_local_ranks == node for rank in ranks)
    return num_rows


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("num_ranks", "num_local_ranks"), NODE_LAYOUTS)
@pytest.mark.parametrize("layout", list(Layout))
def test_bytes_are_those_of_the_formula(
    num_ranks: int, num_local_ranks: int, layout: Layout
) -> None:
    case = Case(layout=layout)
    num_nodes = num_ranks // num_local_ranks

    def body(comm: moe_comm.Communicator) -> list[tuple[int, int]]:
        return counted_combines(comm, case.config, case.batch(comm.rank_idx), layout)

    row = agreement_bytes(case.num_experts, num_ranks)
    row_bytes = case.hidden * case.dtype.itemsize
    weight_bytes = 4 * (case.num_topk if layout is Layout.RANK_MAJOR else 1)
    counted = on_ranks(num_ranks, body, num_local_ranks=num_local_ranks, rail="sockets")
    for rank_idx, found in enumerate(counted):
        own_node, local_rank = divmod(rank_idx, num_local_ranks)
        for (sent, received), with_row, with_weight in zip(
            found, (1, 1, 0), (0, 1, 1), strict=False
        ):
            pulled_bytes = with_row * row_bytes + with_weight * weight_bytes
            expected_sent = expected_received = 0
            for node in range(num_nodes):
                if node == own_node:
                    continue
                peer = node * num_local_ranks + local_rank
                wanted = num_rows_on_node(case, num_ranks, num_local_ranks, rank_idx, node)
                supplied = num_rows_on_node(case, num_ranks, num_local_ranks, peer, own_node)
                expected_sent += row + 8 * wanted + pulled_bytes * supplied
                expected_received += row + 8 * supplied + pulled_bytes * wanted
            assert (sent, received) == (expected_sent, expected_received)


def test_a_rank_that_left_is_named_on_every_rank() -> None:
    case = Case()

    def body(comm: moe_comm.Communicator) -> list[int]:
        x, topk_idx, _ = case.batch(comm.rank_idx)
        buffer = EpBuffer(comm, case.config)
        result = buffer.dispatch(x, topk_idx)
        comm.bootstrap.all_gather(None)  # nobody is in the dispatch any more
        if comm.rank_idx == 3:
            comm.destroy()
            named = [3]
        else:
            with pytest.raises(moe_comm.PeerFailedError) as failure:
                buffer.combine(rows_of(result.x, comm.rank_idx), result.handle)
            named = list(failure.value.ranks)
        # The buffer is destroyed once all have raised: who still waited would name who destroyed it.
        comm.bootstrap.all_gather(None)
        return named

    assert on_ranks(4, body, num_local_ranks=2, rail="sockets") == [[3]] * 4
