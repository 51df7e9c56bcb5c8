"""Scripts of ranks in the conformance suite of copy services."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_comm.cli.reshard.model_shapes import MoEShape, build_module, fill, find_differences
from moe_comm.resharding.copy_services.base import CopyService
from moe_comm.resharding.copy_services.nvshmem_copy_service import NVSHMEMCopyService
from moe_comm.resharding.copy_services.symmetric_copy_service import SymmetricCopyService
from moe_comm.resharding.describe.parallelism import Parallelism
from moe_comm.resharding.hold.heap_parameters import place_in_heap
from moe_comm.resharding.move.execution import execute_reshard_plan
from moe_comm.resharding.plan.planner import build_local_reshard_plan
from moe_comm.testing import RankContext
from tests.helpers.copy_services import (
    SERVICES,
    Endpoints,
    InHeap,
    move,
    pattern,
    random_tasks,
    service_of,
)
from tests.helpers.wrong_arguments import outcome_of

SHAPE = MoEShape(
    num_layers=2,
    hidden=32,
    num_heads=4,
    num_query_groups=4,
    ffn=64,
    num_dense_layers=1,
    num_experts=8,
    expert_ffn=48,
    vocab=128,
)


def run_patterns(context: RankContext, name: str, names: Sequence[str]) -> None:
    """Several patterns with one service."""
    with service_of(name, context) as service:
        for pattern_name in names:
            move(service, pattern(pattern_name, context.num_ranks))


def run_random(context: RankContext, name: str, seeds: Sequence[int], num_tasks: int) -> None:
    with service_of(name, context) as service:
        for seed in seeds:
            move(service, random_tasks(context.num_ranks, num_tasks, seed), seed=seed)


def run_without_ids(context: RankContext, name: str) -> None:
    """Matched by order, pair by pair."""
    case = SERVICES[name]
    with service_of(name, context) as service:
        tasks = [
            task
            for task in random_tasks(context.num_ranks, 40, 5)
            if task.src != task.dst or case.takes_local_order
        ]
        move(service, tasks, has_ids=False)
        move(service, random_tasks(context.num_ranks, 10, 6))


def run_models(context: RankContext, name: str, layouts: Sequence[str]) -> None:
    """Weights from every layout to the next, twice each: other values, the same plan."""
    models = [
        build_module(
            SHAPE,
            Parallelism.parse(layout, context.num_ranks),
            context.rank_idx,
            dtype=torch.bfloat16,
        )
        for layout in layouts
    ]
    with service_of(name, context) as service:
        for src, dst in itertools.pairwise(models):
            if isinstance(service, InHeap):
                place_in_heap(dst, service.communicator)
            plan = build_local_reshard_plan(src, dst, SHAPE.num_experts, group=context.group)
            for seed in (1, 2):
                fill(src, seed)
                execute_reshard_plan(plan, src, dst, service, group=context.group)
                assert find_differences(dst, seed) == []


def run_two_services(context: RankContext, name: str) -> None:
    """Turns of two services, one of which stays when the other is closed."""
    with service_of(name, context) as one:
        with service_of(name, context) as other:
            for seed in range(3):
                move(one, random_tasks(context.num_ranks, 12, seed), num_rounds=1)
                move(other, random_tasks(context.num_ranks, 12, 50 + seed), num_rounds=1)
        move(one, pattern("all_to_all", context.num_ranks))


def run_prepared(context: RankContext, name: str) -> None:
    """One batch many times, at the same addresses; rank 1 prepares it anew before the last."""
    with service_of(name, context) as service:
        assert isinstance(service, (NVSHMEMCopyService, SymmetricCopyService))
        tasks = random_tasks(context.num_ranks, 50, 3)
        ends = Endpoints(service, tasks)
        for round_idx in range(4):
            if round_idx == 0 or (round_idx == 3 and service.rank == 1):
                ends.submit(service, random.Random(service.rank))
                prepared = service.prepare()
            if round_idx == 2:
                move(service, pattern("ring", context.num_ranks), num_rounds=1)
            ends.fill(round_idx)
            service.run_prepared(prepared)
            ends.check(round_idx)
            if isinstance(service, NVSHMEMCopyService):
                continue
            stats = service.last_stats
            by_rank = {
                peer: sum(
                    task.num_bytes for task in tasks if (task.src, task.dst) == (service.rank, peer)
                )
                for peer in range(context.num_ranks)
            }
            local_bytes = by_rank.pop(service.rank)
            assert stats.local_bytes == local_bytes
            sent = (stats.direct_bytes, stats.slot_bytes)
            total = sum(by_rank.values())
            assert sent == ((total, 0) if isinstance(service, InHeap) else (0, total))


def run_counted(context: RankContext, name: str) -> None:
    """A tensor that was saved for a backward is written by rank 0 and by oneself: whole, in columns, within a rank."""
    with service_of(name, context) as service:
        rank_idx, last = service.rank, context.num_ranks - 1
        memory = service.communicator.empty if isinstance(service, InHeap) else torch.empty
        whole, cut, local = (
            memory(3, 4, dtype=torch.float32).fill_(3).requires_grad_() for _ in range(3)
        )
        received = [whole.detach()[2], cut.detach()[:2, 1:3]] if rank_idx == last else []
        written = [whole, cut, local] if received else [local]
        for _ in range(2):
            losses = [(each * each).sum() for each in written]
            if rank_idx == 0:
                service.submit_send(torch.full((4,), 5.0), last, task_id=0)
                service.submit_send(torch.full((2, 2), 5.0), last, task_id=1)
            for task_id, tensor in enumerate(received):
                service.submit_recv(tensor, 0, task_id=task_id)
            service.submit_send(torch.full((3, 4), 5.0), rank_idx, task_id=7)
            service.submit_recv(local.detach(), rank_idx, task_id=7)
            service.run()
            assert all(tensor.eq(5).all() for tensor in (*received, local))
            for loss in losses:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward()


def run_bad(context: RankContext, name: str, mistake: str) -> list[tuple[str, str]]:
    """A batch that cannot run; then one that can, with the same service.

    Returns what submission and `run()` (or `abandon()`) raised.
    """
    with service_of(name, context) as service:
        untouched = torch.full((4,), 7.0)
        gives_up = mistake == "abandon" and service.rank == 0
        errors = [
            outcome_of(lambda: _submit_bad(service, mistake, torch.arange(4.0), untouched)),
            outcome_of(lambda: service.abandon("out of luck") if gives_up else service.run()),
        ]
        assert torch.equal(untouched, torch.full((4,), 7.0))
        move(service, random_tasks(context.num_ranks, 8, 1), num_rounds=1)
        return errors


def _submit_bad(service: CopyService, mistake: str, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Submit what is wrong, behind a pair of transfers that must not arrive although nothing is wrong with it."""
    good: list[End] = [(0, True, _src, 1, 4), (1, False, _dst, 0, 4)]
    ends = MISTAKES[mistake]
    for rank_idx, is_sent, make, peer, task_id in ends if mistake == ON_ONE_SIDE else good + ends:
        if service.rank == rank_idx:
            tensor = make(src, dst)
            (service.submit_send if is_sent else service.submit_recv)(tensor, peer, task_id)
            if mistake == "freed" and task_id == 9 and is_sent:  # after it was submitted
                tensor.untyped_storage().resize_(0)


def _src(src: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return src


def _dst(_: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
    return dst


def _new(*shape: int, dtype: torch.dtype = torch.float32) -> Make:
    return lambda *_: torch.ones(shape, dtype=dtype)


def _fake(*_: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(4)


def _freed_view(*_: torch.Tensor) -> torch.Tensor:
    """A destination at an offset, freed before it is submitted."""
    memory = torch.zeros(8)
    view = memory[4:]
    memory.untyped_storage().resize_(0)
    return view


Make = Callable[[torch.Tensor, torch.Tensor], Any]
"""Makes the tensor of an end of a transfer; gets source and destination of the good pair."""
End = tuple[int, bool, Make, int, int | None]
"""Rank, whether it sends, its tensor, the other rank (3: none), task id."""
ON_ONE_SIDE = "ids on one side"
MISTAKES: dict[str, list[End]] = {
    "no receiver": [(0, True, _src, 1, 5)],
    "no sender": [(1, False, _new(3), 0, 6)],
    "sizes": [(0, True, _src, 1, 9), (1, False, _new(3), 0, 9)],
    "dtypes": [(0, True, _src, 1, 9), (1, False, _new(4, dtype=torch.int32), 0, 9)],
    "duplicate": [(0, True, _src, 1, 4), (1, False, _dst, 0, 4)],
    "fake": [(0, True, _fake, 1, 9)],
    "freed": [(0, True, _new(4), 1, 9), (1, False, _new(4), 0, 9)],
    "freed view": [(0, True, _new(4), 1, 9), (1, False, _freed_view, 0, 9)],
    "local": [(1, False, _new(4), 1, 17)],
    "some ids": [(0, True, _src, 1, None), (1, False, _new(4), 0, None)],
    ON_ONE_SIDE: [(0, True, _src, 1, 0), (1, False, _dst, 0, None)],
    "no such rank": [(1, True, _src, 3, 3)],
    "sparse": [(0, True, lambda *_: torch.eye(3).to_sparse(), 1, 3)],
    "no tensor": [(0, True, lambda *_: [1.0], 1, 3)],
    "expanded": [(1, False, lambda *_: torch.zeros(1).expand(4), 0, 3)],
    "overlap": [
        (0, True, lambda src, _: src[:2], 1, 5),
        (1, False, lambda _, dst: dst[2:], 0, 5),
    ],
    "overlap with oneself": [
        (0, True, _new(2, 3), 1, 5),
        (1, False, lambda *_: torch.zeros(5).as_strided((2, 3), (2, 1)), 0, 5),
    ],
    "abandon": [],
}
