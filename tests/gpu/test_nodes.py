"""Ranks on several nodes that share one GPU, as PEs of NVSHMEM: what one node gives, bit for bit.

Ranks are processes, and a process is a PE of one number among a fixed number of them: a run of this
file takes one layout (`-k 2x2`).
"""

from __future__ import annotations

import functools

import pytest
import torch

from moe_comm import Communicator, EpBuffer, EpConfig
from moe_comm.peers import nvshmem
from moe_comm.testing import RankContext, run_ranks
from moe_comm.testing.case_list import CASES
from moe_comm.testing.cases import Case
from moe_comm.testing.conformance import check_case
from moe_comm.testing.target import Target
from tests.helpers.on_device import connect_nodes_to_gpu, make_across_nodes

# (nodes, ranks of a node)
LAYOUTS = [(2, 1), (3, 1), (2, 2)]

pytestmark = pytest.mark.gpu(1)


@pytest.fixture(autouse=True)
def _with_nvshmem() -> None:
    reason = nvshmem.unusable_reason()
    if reason is not None:
        pytest.skip(reason)


def target(num_local_ranks: int) -> Target:
    connect = functools.partial(connect_nodes_to_gpu, num_local_ranks=num_local_ranks)
    return Target(name="nvshmem", make=make_across_nodes, connect=connect)


@pytest.mark.parametrize(
    ("num_local_ranks", "case"),
    [
        pytest.param(num_local_ranks, case, id=f"{num_nodes}x{num_local_ranks}-{case.name}")
        for num_nodes, num_local_ranks in LAYOUTS
        for case in CASES
        if case.num_ranks == num_nodes * num_local_ranks
    ],
)
def test_case(num_local_ranks: int, case: Case) -> None:
    check_case(target(num_local_ranks), case)


def _round(comm: Communicator) -> list[torch.Tensor]:
    """The bytes of one dispatch and combine."""
    config = EpConfig(num_experts=16, num_topk=4, hidden=512, num_max_tokens_per_rank=300)
    buffer = EpBuffer(comm, config)
    generator = torch.Generator().manual_seed(comm.rank_idx)
    num_tokens = 300 - 40 * comm.rank_idx
    x = torch.randn(num_tokens, 512, generator=generator).bfloat16().cuda()
    topk_idx = torch.rand(num_tokens, 16, generator=generator).topk(4).indices.cuda()
    topk_weights = torch.rand(num_tokens, 4, generator=generator).cuda()
    result = buffer.dispatch(x, topk_idx, topk_weights, expert_alignment=8)
    y = buffer.combine(result.x, result.handle, topk_weights=topk_weights)
    assert isinstance(y, torch.Tensor)
    return [tensor.cpu().view(torch.uint8) for tensor in (result.x, result.topk_weights, y)]


def _both(context: RankContext, num_local_ranks: int) -> bool:
    with Communicator(context.group, device="cuda", backend="cuda") as comm:
        expected = _round(comm)
        comm.all_gather(b"")  # nobody leaves while others are at it
    with connect_nodes_to_gpu(context.group, num_local_ranks) as comm:
        assert comm.num_nodes == context.num_ranks // num_local_ranks
        found = _round(comm)
        comm.all_gather(b"")
    return all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


@pytest.mark.parametrize(
    ("num_nodes", "num_local_ranks"),
    [pytest.param(*sizes, id="{}x{}".format(*sizes)) for sizes in LAYOUTS],
)
def test_the_bits_are_those_of_one_node(num_nodes: int, num_local_ranks: int) -> None:
    assert all(run_ranks(_both, num_nodes * num_local_ranks, num_local_ranks))
