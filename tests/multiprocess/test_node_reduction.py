"""One partial sum a token and node instead of its rows: bits, bytes, gradients, and who refuses it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import pytest
import torch

import moe_comm
from moe_comm import EpBuffer, EpConfig, Layout
from moe_comm.ep.autograd import combine, dispatch
from moe_comm.testing.case_list import NODE_REDUCTION_CASES
from moe_comm.testing.cases import Case
from moe_comm.testing.conformance import check_case
from moe_comm.testing.target import Target
from tests.helpers.configs import ep_config
from tests.helpers.internode_traffic import agreement_bytes, counted_combines, rows_of
from tests.helpers.rank_threads import on_ranks

pytest.importorskip("moe_comm._host")

# Backend, how ranks run (threads: over sockets, processes: over Gloo).
RUNS = [("host", "threads"), ("host", "processes"), ("collective", "processes")]
NODE_LAYOUTS = [
    pytest.param(4, 2, id="2-nodes-of-2"),
    pytest.param(6, 2, id="3-nodes-of-2"),
    pytest.param(3, 1, id="3-nodes-of-1"),
    pytest.param(6, 3, id="2-nodes-of-3"),
]


RUNS_OF_CASES = [
    pytest.param(*run, case, id=f"{'-'.join(run)}-{case.name}")
    for run in RUNS
    for case in NODE_REDUCTION_CASES
]


@pytest.mark.sampled(1, of=("name", "mode", "layout", "rows", "dtype"))
@pytest.mark.parametrize(("name", "mode", "case"), RUNS_OF_CASES)
def test_case(name: str, mode: str, case: Case) -> None:
    check_case(Target(name=name), case, mode=mode)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Data of a rank follow from its number; the second rank has no tokens."""

    layout: Layout = Layout.EXPERT_MAJOR
    num_experts: int = 12
    num_topk: int = 5
    hidden: int = 64
    num_tokens: int = 40
    node_reduction: bool = True

    @property
    def config(self) -> EpConfig:
        return ep_config(
            self.num_experts,
            self.num_topk,
            self.hidden,
            self.num_tokens,
            node_reduction=self.node_reduction,
        )

    def batch(self, rank_idx: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x, topk_idx (with -1, and repeated ids) and weights of one rank."""
        draw = torch.Generator().manual_seed(rank_idx)
        num_tokens = 0 if rank_idx == 1 else self.num_tokens
        x = torch.randn(num_tokens, self.hidden, generator=draw).to(torch.bfloat16)
        shape = (num_tokens, self.num_topk)
        topk_idx = torch.randint(0, self.num_experts, shape, generator=draw)
        topk_idx = topk_idx.masked_fill(torch.rand(shape, generator=draw) < 0.2, -1)
        return x, topk_idx, torch.rand(shape, generator=draw)

    def ranks_of_tokens(self, src: int, num_ranks: int) -> list[list[int]]:
        """Ranks that the rows of every token of a rank lie on."""
        tokens = []
        for choices in self.batch(src)[1].tolist():
            ranks = [choice * num_ranks // self.num_experts for choice in choices if choice >= 0]
            tokens.append(sorted(set(ranks)) if self.layout is Layout.RANK_MAJOR else ranks)
        return tokens


@contextlib.contextmanager
def buffer_on(comm: moe_comm.Communicator, shape: Shape, backend: str) -> Iterator[EpBuffer]:
    """A buffer of the ranks of `comm`, with the same nodes."""
    with contextlib.ExitStack() as until_the_end:
        if backend != comm.backend:
            nodes = {"num_local_ranks": comm.num_local_ranks}
            other = moe_comm.Communicator(comm.bootstrap, backend=backend, **nodes)
            comm = until_the_end.enter_context(other)
        yield until_the_end.enter_context(EpBuffer(comm, shape.config))


def combined_on(comm: moe_comm.Communicator, shape: Shape, backend: str) -> torch.Tensor:
    x, topk_idx, weights = shape.batch(comm.rank_idx)
    with buffer_on(comm, shape, backend) as buffer:
        result = buffer.dispatch(x, topk_idx, layout=shape.layout)
        return buffer.combine(
            rows_of(result.x, comm.rank_idx), result.handle, topk_weights=weights
        ).clone()


def test_one_node_changes_nothing() -> None:
    plain, reduced, nodes = (
        on_ranks(4, lambda comm, shape=shape: combined_on(comm, shape, "host"), **options)
        for shape, options in (
            (Shape(node_reduction=False), {}),
            (Shape(), {}),
            (Shape(), {"num_local_ranks": 2, "rail": "sockets"}),
        )
    )
    for a, b in zip(plain, reduced, strict=True):
        assert torch.equal(a.view(torch.int16), b.view(torch.int16))
    # Else this test, and the option, would be of no use.
    assert any(not torch.equal(a, b) for a, b in zip(plain, nodes, strict=True))


@pytest.mark.parametrize("num_threads", [pytest.param(1, marks=pytest.mark.full), 3])
def test_many_chunks(num_threads: int) -> None:
    """A chunk holds 128 sums: the ring goes round, on one thread and several."""
    shape = Shape(hidden=4096, num_tokens=700, num_topk=6)

    def body(comm: moe_comm.Communicator) -> list[torch.Tensor]:
        return [combined_on(comm, shape, name) for name in ("host", "reference")]

    options = {"num_local_ranks": 2, "rail": "sockets", "num_threads": num_threads}
    for got, expected in on_ranks(4, body, **options):
        assert torch.equal(got.view(torch.int16), expected.view(torch.int16))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("num_ranks", "num_local_ranks"), NODE_LAYOUTS)
@pytest.mark.parametrize("layout", list(Layout))
def test_bytes_are_those_of_the_formula(
    num_ranks: int, num_local_ranks: int, layout: Layout
) -> None:
    shape = Shape(layout=layout)

    def body(comm: moe_comm.Communicator) -> list[tuple[int, int]]:
        return counted_combines(comm, shape.config, shape.batch(comm.rank_idx), layout)

    row = agreement_bytes(shape.num_experts, num_ranks)
    by_rank = layout is Layout.RANK_MAJOR

    def rows_and_sums(src: int, node: int) -> tuple[int, int]:
        on_node = [
            sum(rank // num_local_ranks == node for rank in ranks)
            for ranks in shape.ranks_of_tokens(src, num_ranks)
        ]
        return sum(on_node), sum(count > 0 for count in on_node)

    counted = on_ranks(num_ranks, body, num_local_ranks=num_local_ranks, rail="sockets")
    for rank_idx, found in enumerate(counted):
        own_node, local_rank = divmod(rank_idx, num_local_ranks)
        for (sent, received), has_rows, has_weights in zip(
            found, (1, 1, 0), (0, 1, 1), strict=False
        ):
            asked = 8 + (0 if by_rank or not has_rows else 4)
            pulled = 4 * has_weights * (shape.num_topk if by_rank else 1)
            want_sent = want_received = 0
            for node in range(num_ranks // num_local_ranks):
                if node == own_node:
                    continue
                peer = node * num_local_ranks + local_rank
                wanted, wanted_sums = rows_and_sums(rank_idx, node)
                supplied, supplied_sums = rows_and_sums(peer, own_node)
                sum_bytes = has_rows * 2 * shape.hidden
                want_sent += row + asked * wanted + sum_bytes * supplied_sums + pulled * supplied
                want_received += row + asked * supplied + sum_bytes * wanted_sums + pulled * wanted
            assert (sent, received) == (want_sent, want_received)


@pytest.mark.parametrize("layout", [Layout.EXPERT_MAJOR, Layout.RANK_MAJOR])
def test_gradients_have_the_bits_of_the_reference(layout: Layout) -> None:
    """Backward of dispatch adds rows of gradients, and pulls those of weights one by one."""
    shape = Shape(layout=layout)
    applies = layout is Layout.EXPERT_MAJOR

    def body(comm: moe_comm.Communicator) -> list[list[torch.Tensor]]:
        found = []
        for name in ("host", "reference"):
            x, topk_idx, weights = shape.batch(comm.rank_idx)
            x.requires_grad_()
            weights.requires_grad_()
            with buffer_on(comm, shape, name) as buffer:
                received = dispatch(x, topk_idx, weights, buffer=buffer, layout=layout)
                out = received.x * (1.0 + 0.125 * comm.rank_idx) + 0.25
                if not applies:
                    out = out * received.topk_weights.sum(dim=1, keepdim=True).to(out.dtype)
                y = combine(
                    out,
                    received.handle,
                    buffer=buffer,
                    topk_weights=weights if applies else None,
                )
                (y.float() * torch.linspace(-2, 3, shape.hidden)).sum().backward()
            found.append([y.detach().clone(), x.grad.clone(), weights.grad.clone()])
        return found

    for host, reference in on_ranks(4, body, num_local_ranks=2, rail="sockets"):
        for got, expected in zip(host, reference, strict=True):
            assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def test_ranks_that_differ_are_refused() -> None:
    def body(comm: moe_comm.Communicator) -> str:
        shape = Shape(node_reduction=comm.rank_idx == 1)
        with pytest.raises(ValueError, match="node_reduction") as error:
            EpBuffer(comm, shape.config)
        return str(error.value)

    assert len(set(on_ranks(2, body, num_local_ranks=1, rail="sockets"))) == 1


def test_deep_ep_refuses_it() -> None:
    def body(comm: moe_comm.Communicator) -> None:
        with (
            pytest.raises(ValueError, match="the deep_ep backend has no node_reduction"),
            buffer_on(comm, Shape(), "deep_ep"),
        ):
            pass

    on_ranks(1, body)
