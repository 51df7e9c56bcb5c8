"""The Megatron dispatcher and its manager, without Megatron."""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moe_comm import Communicator
from moe_comm.dispatcher.megatron import MegatronManager, MegatronTokenDispatcher, alignment_of
from moe_comm.ep.group_buffers import group_buffers
from moe_comm.peers.bootstrap import RankThreads
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.failing_ranks import HANG_S
from tests.helpers.routed import Batch, expected_rows, make_batches

BACKENDS = ["host", "reference"]
NUM_EXPERTS = 6


def config_of(**options: Any) -> Any:
    return types.SimpleNamespace(num_moe_experts=NUM_EXPERTS, moe_router_topk=2, **options)


def groups_of(context: RankContext) -> Any:
    solo = types.SimpleNamespace(num_ranks=1, rank_idx=0, all_gather=lambda item: [item])
    return types.SimpleNamespace(ep=context.group, expt_tp=solo, tp_ep=context.group)


def make_dispatcher(context: RankContext, **options: Any) -> MegatronTokenDispatcher:
    backend = options.pop("backend", None)
    held = backend and group_buffers(Communicator(context.group, backend=backend))
    num_local = NUM_EXPERTS // context.num_ranks
    indices = range(context.rank_idx * num_local, (context.rank_idx + 1) * num_local)
    made = MegatronTokenDispatcher(num_local, indices, config_of(**options), groups_of(context))
    del held  # by the dispatcher now
    return made


def dispatch(
    dispatcher: MegatronTokenDispatcher, batch: Batch, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden, probs = dispatcher.dispatch_preprocess(batch.x, batch.routing_map, batch.probs)
    hidden, row_probs = dispatcher.token_dispatch(hidden, probs, **options)
    rows, counts, row_probs = dispatcher.dispatch_postprocess(hidden, row_probs)
    assert counts is not None
    assert row_probs is not None
    return rows, counts, row_probs


def combine(
    dispatcher: MegatronTokenDispatcher, rows: torch.Tensor, **options: Any
) -> torch.Tensor:
    rows = dispatcher.token_combine(dispatcher.combine_preprocess(rows), **options)
    return dispatcher.combine_postprocess(rows)


class Shared:
    """Shared experts that note when they are called, and give ones."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.shape = torch.Size()

    def pre_forward_comm(self, hidden_states: torch.Tensor) -> None:
        self.shape = hidden_states.shape
        self.calls.append("pre")

    def linear_fc1_forward_and_act(self, overlapped: torch.Tensor | None = None) -> None:
        self.calls.append("fc1")

    def linear_fc2_forward(self, overlapped: torch.Tensor | None = None) -> None:
        self.calls.append("fc2")

    def post_forward_comm(self) -> None:
        self.calls.append("post")

    def get_output(self) -> torch.Tensor:
        self.calls.append("output")
        return torch.ones(self.shape)


def six_calls(context: RankContext, backend: str, is_async: bool) -> None:
    dispatcher = make_dispatcher(context, backend=backend, fp8="e4m3", fp8_recipe="delayed")
    shared = Shared()
    dispatcher.set_shared_experts(shared)
    num_local = dispatcher.num_local_experts
    experts = range(context.rank_idx * num_local, (context.rank_idx + 1) * num_local)
    batches = make_batches([6, 4], NUM_EXPERTS, None, dtype=torch.float32)
    mine = batches[context.rank_idx]
    x = mine.x.view(2, -1, 16).clone().requires_grad_()
    probs = mine.probs.clone().requires_grad_()
    rows, counts, row_probs = dispatch(
        dispatcher, Batch(x, mine.routing_map, probs), async_finish=is_async
    )
    expected = expected_rows(batches, experts, 16)
    want = [torch.zeros(16) if row is None else batches[row[0]].x[row[1]] for row in expected]
    assert torch.equal(rows, torch.stack(want))
    assert int(counts.sum()) == len(expected)
    assert all(count % 16 == 0 for count in counts.tolist())
    assert row_probs.dtype is torch.float32
    for buffer in dispatcher.get_expert_zero_copy_buffers(torch.float32):
        assert buffer.shape == rows.shape
    # The call of Megatron's layer, whose experts need not take such memory.
    assert dispatcher.get_expert_zero_copy_buffers() == (None, None)
    out = dispatcher.get_expert_zero_copy_buffers(torch.float32)[0]
    assert out is not None
    with torch.no_grad():
        torch.mul(rows, row_probs[:, None], out=out)
    factor = torch.ones(1, requires_grad=True)  # ties the sums to the rows
    y = combine(dispatcher, rows * row_probs[:, None] * factor, async_finish=is_async)
    assert y.shape == x.shape
    assert torch.equal(y.view(-1, 16), mine.x * mine.probs.sum(1, keepdim=True) + 1)
    assert shared.calls == ["pre", "fc1", "fc2", "post", "output"]
    y.sum().backward()
    assert dispatcher.get_expert_zero_copy_buffers(torch.float32) == (None, None)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])
def test_six_calls(backend: str, is_async: bool) -> None:
    run_ranks(six_calls, 2, backend, is_async, mode="threads")


def two_in_flight(context: RankContext) -> None:
    """Two micro-batches, each of whose operations overlaps with one of the other."""
    first, second = make_dispatcher(context), make_dispatcher(context)
    batches = [
        make_batches([6, 3], NUM_EXPERTS, 2, dtype=torch.float32, seed=seed)[context.rank_idx]
        for seed in range(2)
    ]
    started = []
    for dispatcher, batch in zip((first, second), batches, strict=True):
        hidden, probs = dispatcher.dispatch_preprocess(batch.x, batch.routing_map, batch.probs)
        started.append(dispatcher.token_dispatch(hidden, probs))
    combining = []
    for dispatcher, (hidden, row_probs) in zip((first, second), started, strict=True):
        rows, _, row_probs = dispatcher.dispatch_postprocess(hidden, row_probs)
        combining.append(dispatcher.token_combine(rows * row_probs[:, None]))
    sums = [d.combine_postprocess(c) for d, c in zip((first, second), combining, strict=True)]
    for y, batch in zip(sums, batches, strict=True):
        assert torch.equal(y, batch.x * batch.probs.sum(1, keepdim=True))


def test_two_operations_in_flight() -> None:
    run_ranks(two_in_flight, 2, mode="threads")
    run_ranks(two_in_flight, 2)


@pytest.mark.parametrize(
    ("num_tokens", "router_topk", "factor", "alignment", "num_rows"),
    # The rule of `setup_metadata` of Megatron's hybrid manager (0.19.2): cut to a whole number, then aligned up.
    [
        (7, 1, 1.5, 1, 10),
        (7, 1, 1.5, 8, 16),
        (16, 1, 1.5, 8, 24),
        (3, 2, 0.1, 1, 0),
        (0, 2, 9.9, 4, 0),
    ],
)
def test_budget_is_cut_down_and_aligned_up(
    num_tokens: int, router_topk: int, factor: float, alignment: int, num_rows: int
) -> None:
    manager = MegatronManager(
        RankThreads(1)[0],
        4,
        router_topk=router_topk,
        expert_alignment=alignment,
        rank_capacity_factor=factor,
    )
    assert manager.budget(num_tokens) == num_rows


def over_budget(context: RankContext, backend: str) -> None:
    dispatcher = make_dispatcher(context, backend=backend, moe_expert_rank_capacity_factor=0.5)
    manager = dispatcher._comm_manager
    generous = make_batches([8, 8], NUM_EXPERTS, 2, dtype=torch.float32)
    num_local = NUM_EXPERTS // context.num_ranks
    # Two tokens only, then eight: within the budget of 8 rows, then beyond it.
    small = [Batch(b.x, b.routing_map & (torch.arange(8) < 2)[:, None], b.probs) for b in generous]
    flag = dispatcher.check_over_budget()
    rows, _, _ = dispatch(dispatcher, small[context.rank_idx])
    combine(dispatcher, rows)
    assert rows.shape[0] == manager.budget(8) == 8
    assert flag.tolist() == [False]
    needed = 0
    for batches in (generous, small):  # what was reported stays reported
        rows, _, _ = dispatch(dispatcher, batches[context.rank_idx])
        combine(dispatcher, rows)
        experts = range(context.rank_idx * num_local, (context.rank_idx + 1) * num_local)
        needed = max(needed, len(expected_rows(batches, experts, 1)))
        assert rows.shape[0] == 8
        assert flag.tolist() == [needed > 8]
        assert dispatcher.check_required_capacity().tolist() == [needed]
    required = max(group_buffers(context.group).communicator.bootstrap.all_gather(needed))
    # Megatron's paged stash has a step run again without a budget, and then with the former one.
    manager.moe_expert_rank_capacity_factor = None
    assert manager.budget(8) is None
    manager.moe_expert_rank_capacity_factor = 0.5
    assert manager.budget(8) == 8
    dispatcher.grow_ep_recv_capacity(required)
    with pytest.raises(ValueError, match=f"beyond {required}, got {required}"):
        dispatcher.grow_ep_recv_capacity(required)
    dispatcher.reset_over_budget()
    dispatcher.invalidate_ep_bootstrap()
    assert dispatcher.check_required_capacity().tolist() == [0]
    rows, _, probs = dispatch(dispatcher, generous[context.rank_idx])
    assert rows.shape[0] == required
    assert flag.tolist() == [False]
    batch = generous[context.rank_idx]
    assert torch.equal(
        combine(dispatcher, rows * probs[:, None]), batch.x * batch.probs.sum(1, keepdim=True)
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_beyond_the_budget_is_reported(backend: str) -> None:
    run_ranks(over_budget, 2, backend, mode="threads")


def out_of_order(context: RankContext) -> None:
    manager = MegatronManager(context.group, 3)
    batch = make_batches([4, 4], NUM_EXPERTS, 2)[context.rank_idx]
    with pytest.raises(RuntimeError, match="setup_metadata"):
        manager.dispatch(batch.x)
    with pytest.raises(RuntimeError, match="handle"):
        manager.combine(batch.x)
    manager.setup_metadata(batch.routing_map.view(4, 2, 3), batch.probs.view(4, 2, 3))
    hidden = manager.dispatch(batch.x, async_finish=True)
    with pytest.raises(RuntimeError, match="in flight"):
        manager.dispatch(batch.x)
    rows, _ = manager.get_permuted_hidden_states_by_experts(hidden)
    assert manager.handle[-1].tolist() == [0]
    assert torch.equal(manager.combine(rows), batch.x * 2)
    manager.grow_recv_capacity(7)  # without a budget: nothing to grow
    assert manager.budget(4) is None
    with pytest.raises(ValueError, match="places for experts, num_moe_experts x TP ranks is 6"):
        MegatronTokenDispatcher(
            6,
            range(6),
            config_of(),
            types.SimpleNamespace(
                ep=RankThreads(1)[0],
                tp_ep=context.group,
                expt_tp=RankThreads(1)[0],
            ),
        )
    with pytest.raises(ValueError, match="num_moe_experts = 6"):
        MegatronTokenDispatcher(2, range(2), config_of(), groups_of(context))
    with pytest.raises(ValueError, match=r"got \[1, 2, 3\]"):
        MegatronTokenDispatcher(3, [1, 2, 3], config_of(), groups_of(context))
    for options, message in (
        ({"expert_alignment": 0}, "expert_alignment"),
        ({"rank_capacity_factor": 1.0}, "router_topk"),
        ({"rank_capacity_factor": 0.0, "router_topk": 2}, "> 0"),
    ):
        with pytest.raises(ValueError, match=message):
            MegatronManager(context.group, 3, **options)  # type: ignore[arg-type]


def test_mistakes() -> None:
    run_ranks(out_of_order, 2, mode="threads")


def transform_on_rank_0(context: RankContext) -> None:
    manager = MegatronManager(context.group, 3)
    batch = make_batches([4, 4], NUM_EXPERTS, 2)[context.rank_idx]

    def rows(x: torch.Tensor) -> torch.Tensor:
        manager.setup_metadata(batch.routing_map, batch.probs)
        return manager.dispatch(x)

    def refused(call: Callable[[torch.Tensor], torch.Tensor], given: torch.Tensor) -> None:
        with pytest.raises(ValueError, match="rank 0: a transform of torch"):
            torch.func.vmap(call)(given[None]) if context.rank_idx == 0 else call(given)

    refused(rows, batch.x)
    refused(manager.combine, rows(batch.x))
    assert torch.equal(manager.combine(rows(batch.x)), batch.x * 2)


def test_a_transform_of_functions_is_refused_on_every_rank() -> None:
    run_ranks(transform_on_rank_0, 2, mode="threads")


def default_group(context: RankContext) -> None:
    """Without `pg_collection`: the default group, no TP."""
    num_local = NUM_EXPERTS // context.num_ranks
    indices = range(context.rank_idx * num_local, (context.rank_idx + 1) * num_local)
    dispatcher = MegatronTokenDispatcher(num_local, indices, config_of())
    assert (dispatcher.tp_size, dispatcher.ep_size) == (1, context.num_ranks)
    batch = make_batches([4, 0], NUM_EXPERTS, 2)[context.rank_idx]
    rows, _, _ = dispatch(dispatcher, batch)
    assert torch.equal(combine(dispatcher, rows), batch.x * 2)


def test_the_default_group() -> None:
    run_ranks(default_group, 2)


def test_alignment_of_a_configuration() -> None:
    assert alignment_of(config_of()) == 1
    assert alignment_of(config_of(fp8=None, fp4=None)) == 1
    assert alignment_of(config_of(fp8="e4m3", fp8_recipe="delayed")) == 16
    assert alignment_of(config_of(fp8="e4m3", fp8_recipe="mxfp8")) == 32
    assert alignment_of(config_of(fp4="e2m1", fp4_recipe="nvfp4")) == 128
    assert alignment_of(config_of(moe_use_grouped_tensor=True, fp8="e4m3")) == 256
    assert alignment_of(config_of(use_transformer_engine_op_fuser=True)) == 256


class InTurn:
    """Threads that enter a block one after the other, the next when the one before has left it."""

    def __init__(self, num_ranks: int) -> None:
        self.has_left = [threading.Event() for _ in range(num_ranks)]

    @contextlib.contextmanager
    def turn(self, rank_idx: int) -> Iterator[None]:
        if rank_idx:
            assert self.has_left[rank_idx - 1].wait(HANG_S), "a rank waits inside for its peers"
        yield
        self.has_left[rank_idx].set()


def test_operations_begin_without_their_peers() -> None:
    """`async_finish` returns on one rank before the others have come, so shared experts run meanwhile."""
    dispatching, combining = InTurn(2), InTurn(2)

    def rank_main(context: RankContext) -> None:
        dispatcher = make_dispatcher(context)
        batch = make_batches([4, 3], NUM_EXPERTS, 2)[context.rank_idx]
        hidden, probs = dispatcher.dispatch_preprocess(batch.x, batch.routing_map, batch.probs)
        with dispatching.turn(context.rank_idx):
            hidden, row_probs = dispatcher.token_dispatch(hidden, probs)
        rows, _, _ = dispatcher.dispatch_postprocess(hidden, row_probs)
        with combining.turn(context.rank_idx):
            rows = dispatcher.token_combine(rows)
        assert torch.equal(dispatcher.combine_postprocess(rows), batch.x * 2)

    run_ranks(rank_main, 2, mode="threads")
