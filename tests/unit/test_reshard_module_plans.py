"""Plans of modules, by ranks as threads: values that arrive, and errors that all ranks raise."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

from moe_comm.cli.reshard.model_shapes import (
    MoEShape,
    build_module,
    roster,
)
from moe_comm.peers.bootstrap import Bootstrap, RankThreads, bootstrap_for
from moe_comm.resharding.describe.disagreement import PlanError
from moe_comm.resharding.describe.parallelism import Parallelism
from moe_comm.resharding.plan import plan_check
from moe_comm.resharding.plan.reshard_plan import ReshardPlan
from moe_comm.resharding.planner import (
    build_centralized_reshard_plan,
    build_local_reshard_plan,
    build_plan_from_rosters,
    index_metadata_rosters,
)

TINY = MoEShape(
    num_layers=2,
    hidden=8,
    num_heads=4,
    num_query_groups=4,
    num_experts=4,
    expert_ffn=4,
    ffn=8,
    num_dense_layers=1,
    vocab=16,
)


T = TypeVar("T")


def on_ranks(num_ranks: int, body: Callable[[Bootstrap, int], T]) -> list[T]:
    """Results of `body` on each rank."""
    ranks = RankThreads(num_ranks)

    def be_rank(rank: int) -> T:
        try:
            return body(ranks[rank], rank)
        except BaseException:
            ranks.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(be_rank, range(num_ranks)))


def errors_of_all(num_ranks: int, body: Callable[[Bootstrap, int], object]) -> list[str]:
    """The message of every rank's PlanError."""

    def caught(group: Bootstrap, rank: int) -> str:
        with pytest.raises(PlanError) as info:
            body(group, rank)
        return str(info.value)

    return on_ranks(num_ranks, caught)


def module_of(text: str, num_ranks: int, rank: int, offset: int = 0) -> torch.nn.Module:
    layout = Parallelism.parse(text, num_ranks)
    return build_module(TINY, layout, rank, dtype=torch.bfloat16, rank_offset=offset)


def test_modules_on_other_ranks_than_their_copies() -> None:
    def plan(group: Bootstrap, rank: int) -> ReshardPlan:
        source = module_of("tp2.ep2", 4, rank) if rank < 4 else None
        destination = module_of("ep2.etp1", 2, rank - 4, 4) if rank >= 4 else None
        return build_local_reshard_plan(source, destination, num_experts=4, group=group)

    plans = dict(enumerate(on_ranks(6, plan)))
    plan_check.verify_plans(plans)
    assert all(plans[rank].send_ops for rank in range(4))
    pairs: list[Any] = [
        (roster(TINY, Parallelism.parse("tp2.ep2", 4), rank), []) for rank in range(4)
    ]
    for rank in range(2):
        pairs.append(([], roster(TINY, Parallelism.parse("ep2.etp1", 2), rank, 4)))
    rosters = index_metadata_rosters(pairs)
    for rank, made in plans.items():
        assert made == build_plan_from_rosters(*rosters, rank)


def test_ranks_are_those_of_the_group() -> None:
    """Also of a group that joins worlds that were initialized apart, in a process that has none."""
    assert not dist.is_initialized()
    member = bootstrap_for(dist.ProcessGroup(1, 3))
    assert (member.rank_idx, member.num_ranks) == (1, 3)


def test_a_bad_module_on_one_rank_is_an_error_on_all() -> None:
    def body(group: Bootstrap, rank: int) -> None:
        module = module_of("tp2", 2, rank)
        if rank == 1:
            del module.pg_collection
        build_local_reshard_plan(module, module, group=group)

    messages = errors_of_all(2, body)
    assert messages[0] == messages[1]
    assert "Module must have pg_collection" in messages[0]
    assert "rank 1" in messages[0]


def test_a_problem_that_one_rank_finds_is_an_error_on_all() -> None:
    """Rank 2 holds no part of the tensor whose shapes contradict each other."""

    def body(group: Bootstrap, rank: int) -> None:
        module = torch.nn.Module()
        module.pg_collection = Parallelism(3).groups(rank)  # type: ignore[assignment]
        name, size = ("a", 4 + rank) if rank < 2 else ("b", 3)
        module.register_parameter(name, torch.nn.Parameter(torch.zeros(size)))
        source = None if rank == 1 else module
        destination = None if rank == 0 else module
        build_local_reshard_plan(source, destination, group=group)

    messages = errors_of_all(3, body)
    assert len(set(messages)) == 1
    assert "a: shapes do not add up: source rank 0 holds (4,)" in messages[0]
    assert "; target rank 1 holds (5,)" in messages[0]
    assert "(seen by ranks 0, 1)" in messages[0]


def test_strict_plans_refuse_extra_sources() -> None:
    def body(group: Bootstrap, rank: int) -> None:
        module = module_of("tp2", 2, rank)
        smaller = torch.nn.Module()
        smaller.pg_collection = module.pg_collection
        smaller.register_parameter("other", None)
        assert build_local_reshard_plan(module, smaller, 4, group).recv_ops == []
        # One rank that asks for it is enough.
        build_local_reshard_plan(module, smaller, 4, group, strict=rank == 0)

    messages = errors_of_all(2, body)
    assert messages[0] == messages[1]
    assert " others (seen by" in messages[0]
    assert "source parameter 'decoder.final_layernorm.weight' on rank 0 has no" in messages[0]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("a", "'a' on rank 0 has no destination; strict=False takes the others (seen"),
        ("ab", "destination, nor has 'b'; strict=False takes the others (seen"),
    ],
)
def test_few_extra_sources(names: str, text: str) -> None:
    def body(group: Bootstrap, rank: int) -> None:
        module = torch.nn.Module()
        module.pg_collection = Parallelism(1).groups(rank)  # type: ignore[assignment]
        for name in names:
            module.register_parameter(name, torch.nn.Parameter(torch.zeros(3)))
        build_local_reshard_plan(module, None, group=group, strict=True)

    assert text in errors_of_all(1, body)[0]


def _tp2(rank: int, names: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    module = torch.nn.Module()
    module.pg_collection = Parallelism(4, tp=2).groups(rank)  # type: ignore[assignment]
    for name in names:
        param = torch.nn.Parameter(torch.zeros(4, dtype=dtype))
        param.tensor_model_parallel = name != "n"  # type: ignore[attr-defined]
        module.register_parameter(name, param)
    return module


@pytest.mark.parametrize("name", ["w", "n"])
def test_strict_targets_are_whole(name: str) -> None:
    def body(group: Bootstrap, rank: int) -> None:
        target = _tp2(rank, "a" if rank == 3 else "a" + name)
        build_local_reshard_plan(_tp2(rank, "a" + name), target, group=group)
        build_local_reshard_plan(_tp2(rank, "a" + name), target, group=group, strict=True)

    messages = errors_of_all(4, body)
    assert len(set(messages)) == 1
    text = f"{name}: rank 3 of the tensor parallel group [2, 3] does not hold it, rank 2 does"
    assert text in messages[0]


@pytest.mark.parametrize(
    ("odd", "group_text"),
    [((1,), "tensor parallel group [0, 1]"), ((2, 3), "data parallel group [0, 2]")],
)
def test_strict_targets_have_one_dtype(odd: tuple[int, ...], group_text: str) -> None:
    def body(group: Bootstrap, rank: int) -> None:
        target = _tp2(rank, "w", torch.bfloat16 if rank in odd else torch.float32)
        build_local_reshard_plan(_tp2(rank, "w"), target, group=group)
        build_local_reshard_plan(_tp2(rank, "w"), target, group=group, strict=True)

    messages = errors_of_all(4, body)
    assert len(set(messages)) == 1
    text = f"w: target rank 0 holds torch.float32, rank {odd[0]} of the same {group_text}"
    assert f"{text} holds torch.bfloat16" in messages[0]


def test_a_source_that_not_all_members_hold() -> None:
    """A replica supplies what one rank lacks; without one, the error says who lacks it."""

    def plan(group: Bootstrap, rank: int, lacking: tuple[int, ...]) -> None:
        source = _tp2(rank, "a" if rank in lacking else "aw")
        build_local_reshard_plan(source, _tp2(rank, "aw"), group=group, strict=True)

    on_ranks(4, lambda group, rank: plan(group, rank, (1,)))
    messages = errors_of_all(4, lambda group, rank: plan(group, rank, (1, 3)))
    assert len(set(messages)) == 1
    assert "w: no source rank holds elements [[4, 8]]" in messages[0]
    assert "; rank 1 of the tensor parallel group [0, 1] does not hold it" in messages[0]


def test_groups_outside_of_the_plan() -> None:
    def body(group: Bootstrap, rank: int) -> None:
        module = module_of("tp4", 4, rank)
        build_local_reshard_plan(module, module, num_experts=4, group=group)

    messages = errors_of_all(2, body)
    assert messages[0] == messages[1]
    assert (
        "tensor parallel group [0, 1, 2, 3] must be different ranks of a group of 2; 2 is not in "
        "[0, 2): the groups of a model"
    ) in messages[0]


@pytest.mark.parametrize(
    ("has_experts", "text"),
    [
        (False, "rank 2 is not in its own tensor parallel group [0, 1]; the groups of a model"),
        (True, "Rank 2 not found in process group [0]; the groups of a model"),
    ],
)
def test_groups_of_another_rank(has_experts: bool, text: str) -> None:
    """A model that begins at rank 2, whose groups were not told so."""

    def body(group: Bootstrap, rank: int) -> None:
        module = module_of("tp2", 2, rank % 2)
        if not has_experts:
            whole, module = module, torch.nn.Module()
            module.pg_collection = whole.pg_collection
            module.a = torch.nn.Parameter(torch.zeros(3))
        ends = (module, None) if rank < 2 else (None, module)
        build_local_reshard_plan(*ends, num_experts=4, group=group)

    messages = errors_of_all(4, body)
    assert len(set(messages)) == 1
    assert text in messages[0]
    assert "dst_rank_offset of the refit" in messages[0]


def test_destinations_that_overlap_in_memory() -> None:
    def body(group: Bootstrap, rank: int) -> None:
        memory = torch.zeros(10)
        module = torch.nn.Module()
        module.pg_collection = Parallelism(2).groups(rank)  # type: ignore[assignment]
        module.a = torch.nn.Parameter(memory[:6])
        module.b = torch.nn.Parameter(memory[5:] if rank else memory[6:])
        module.register_buffer("c", module.a.data)
        build_local_reshard_plan(module, module, group=group)

    messages = errors_of_all(2, body)
    assert "destination parameters a and b overlap in memory" in messages[0]
    assert "(seen by rank 1)" in messages[1]


def test_the_deprecated_name() -> None:
    module = module_of("single", 1, 0)
    with pytest.warns(DeprecationWarning, match="build_local_reshard_plan"):
        plan = build_centralized_reshard_plan(
            module, module, num_experts=4, group=RankThreads(1)[0]
        )
    assert plan == build_local_reshard_plan(module, module, num_experts=4, group=RankThreads(1)[0])
    assert all(op.peer_rank == 0 for op in itertools.chain(plan.send_ops, plan.recv_ops))
