"""Weights of experts that change their slots, and sums of replicas' gradients, on ranks that are threads."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from typing import Any

import pytest
import torch

from moe_comm import CapacityError, Communicator, EpBuffer, EpConfig, Placement
from moe_comm.replicas import (
    Prefetch,
    ReplicaCopies,
    ReplicaPlan,
    owners_of,
    plan_replicas,
)
from moe_comm.resharding import share_in_place
from moe_comm.resharding.copy_services.batched_copy import CopyStats
from tests.helpers.rank_threads import on_ranks

STALE = 99


def random_pair(rng: random.Random, num_ranks: int, num_experts: int) -> list[Placement]:
    """Two placements of the same slots: of ranks without any, with empty ones and with replicas."""
    sizes = [rng.choice((0, 1, 2, 4)) for _ in range(num_ranks)]
    sizes[rng.randrange(num_ranks)] = num_experts + rng.choice((0, 2))
    pair = []
    for _ in range(2):
        slots = [
            rng.sample([*range(num_experts), *[-1] * size], size)
            if size < num_experts
            else rng.sample([*range(num_experts), *[-1] * (size - num_experts)], size)
            for size in sizes
        ]
        pair.append(Placement(slots, num_experts))
    return pair


def values(
    expert_idx: int, tensor_idx: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * expert_idx + tensor_idx)
    return torch.randint(0, 50, shape, generator=generator).to(dtype)


SHAPES: list[tuple[tuple[int, ...], torch.dtype]] = [
    ((6, 5), torch.bfloat16),
    ((), torch.float32),
    ((3, 0), torch.float32),
    ((7,), torch.uint8),
    ((2, 3, 4), torch.float64),
]


def filled(held: tuple[int, ...], comm: Communicator) -> list[torch.Tensor]:
    """Weights of a rank in ordinary memory, with strides, and in the heap; empty slots are stale."""
    tensors = []
    for tensor_idx, (shape, dtype) in enumerate(SHAPES):
        if tensor_idx % 2:
            tensor = comm.empty(len(held), *shape, dtype=dtype)
        else:
            wide = torch.empty(len(held), *shape, 2, dtype=dtype)
            tensor = (
                wide.transpose(1, 2)[..., 0].transpose(1, -1) if len(shape) > 1 else wide[..., 0]
            )
            tensor = tensor if tensor.shape[1:] == shape else wide[..., 1]
        for slot_idx, expert_idx in enumerate(held):
            of_expert = values(expert_idx, tensor_idx, shape, dtype) if expert_idx >= 0 else STALE
            tensor[slot_idx] = of_expert
        tensors.append(tensor)
    return tensors


def check_filled(held: tuple[int, ...], tensors: list[torch.Tensor]) -> None:
    for tensor_idx, (shape, dtype) in enumerate(SHAPES):
        for slot_idx, expert_idx in enumerate(held):
            if expert_idx >= 0:
                expected = values(expert_idx, tensor_idx, shape, dtype)
                assert torch.equal(tensors[tensor_idx][slot_idx], expected), (tensor_idx, slot_idx)


def finish(prefetch: Prefetch) -> None:
    while not prefetch.step():
        pass
    prefetch.commit()


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_wanted_placement_holds_and_the_present_one_until_then(num_ranks: int) -> None:
    def body(comm: Communicator) -> None:
        copies = ReplicaCopies(comm)
        rng = random.Random(num_ranks)
        for _ in range(8):
            present, wanted = random_pair(rng, num_ranks, 5)
            held, then = (each.slots[comm.rank_idx] for each in (present, wanted))
            weights = filled(held, comm)
            step_bytes = rng.choice((None, 1, 40, 1000))
            prefetch = copies.prefetch(
                plan_replicas(present, wanted), weights, step_bytes=step_bytes
            )
            assert bool(step_bytes) or prefetch.num_steps <= 1
            while not prefetch.step():
                check_filled(held, weights)
            check_filled(held, weights)
            assert prefetch.is_complete
            assert prefetch.num_steps_done == prefetch.num_steps
            prefetch.commit()
            check_filled(then, weights)
            assert prefetch.is_committed
            assert not prefetch.is_complete
            for tensor_idx, (_, dtype) in enumerate(SHAPES):  # what nobody wants stays
                for slot_idx, (before, after) in enumerate(zip(held, then, strict=True)):
                    if before == after == -1:
                        stale = torch.tensor(STALE).to(dtype)
                        assert bool((weights[tensor_idx][slot_idx] == stale).all())

    on_ranks(num_ranks, body)


def test_a_commit_counts_as_an_operation_in_place() -> None:
    def body(comm: Communicator) -> None:
        present, wanted = Placement([[0, 1], [1, 0]], 2), Placement([[1, 0], [0, 1]], 2)
        weight = torch.tensor([*present.slots[comm.rank_idx]], dtype=torch.float32)
        squared = (weight * torch.ones(2, requires_grad=True)).square().sum()
        prefetch = ReplicaCopies(comm).prefetch(plan_replicas(present, wanted), [weight])
        finish(prefetch)
        assert tuple(weight.tolist()) == wanted.slots[comm.rank_idx]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            squared.backward()

    on_ranks(2, body)


def test_slots_of_shared_memory_are_written_by_those_who_send() -> None:
    def body(comm: Communicator) -> None:
        layer = torch.nn.Module()
        layer.weight = torch.nn.Parameter(torch.empty(2, 1 << 16), requires_grad=False)
        present, wanted = Placement([[0, -1], [1, -1]], 2), Placement([[0, 1], [1, 0]], 2)
        copies = ReplicaCopies(comm)
        direct_bytes = []
        run = copies.engine.run

        def counted(*args: Any, **kwargs: Any) -> CopyStats:
            stats = run(*args, **kwargs)
            direct_bytes.append(stats.direct_bytes)
            return stats

        copies.engine.run = counted  # type: ignore[method-assign]
        for _ in range(2):  # private again in the second round
            with share_in_place(layer, comm) if not direct_bytes else contextlib.nullcontext():
                layer.weight[0], layer.weight[1] = comm.rank_idx, STALE
                finish(copies.prefetch(plan_replicas(present, wanted), [layer.weight]))
                assert layer.weight[:, -1].tolist() == [comm.rank_idx, 1 - comm.rank_idx]
                assert bool((layer.weight[1] == 1 - comm.rank_idx).all())
        assert direct_bytes == [4 << 16, 0]

    on_ranks(2, body)


def test_a_plan_takes_what_is_near_and_from_all_alike() -> None:
    present = Placement([[0, 1], [0, 2], [0, 1], [3, -1]], 4)
    wanted = Placement([[1, 0], [2, 3], [0, 1], [3, 0]], 4)
    plan = plan_replicas(present, wanted, num_local_ranks=2)
    found = [(m.expert_idx, m.src_rank, m.src_slot, m.dst_rank, m.dst_slot) for m in plan.moves]
    assert found == [
        (1, 0, 1, 0, 0),  # an exchange within a rank
        (0, 0, 0, 0, 1),
        (2, 1, 1, 1, 0),
        (3, 3, 0, 1, 1),
        (0, 2, 0, 3, 1),  # its node's
    ]
    assert [m.is_empty for m in plan.moves] == [False] * 4 + [True]
    hot = Placement([[0, 1], [0, 2], [-1, -1], [-1, -1], [-1, -1], [-1, -1]], 3)
    spread = Placement([[0, 1], [0, 2], *[[0, -1]] * 4], 3)
    sources = [move.src_rank for move in plan_replicas(hot, spread).moves]
    assert sources == [0, 1, 0, 1]
    # Rank 0 has sent expert 1, and still copies its own expert 0; copies of its own are not counted.
    one = Placement([[0, 1, -1, -1], [0, 2, -1, -1]], 3)
    other = Placement([[-1, 1, 0, -1], [0, 2, 1, -1]], 3)
    assert [move.src_rank for move in plan_replicas(one, other).moves] == [0, 0]
    one = Placement([[0, 1, -1], [0, 2, -1], [1, 2, -1]], 3)
    other = Placement([[-1, 1, 0], [0, 2, -1], [1, 2, 0]], 3)
    assert [move.src_rank for move in plan_replicas(one, other).moves] == [0, 0]
    with pytest.raises(ValueError, match="present has 2 slots on rank 0, wanted has 3"):
        plan_replicas(Placement([[0, 1]], 2), Placement([[0, 1, -1]], 2))
    with pytest.raises(ValueError, match="num_local_ranks must be >= 1, got 0"):
        plan_replicas(present, wanted, num_local_ranks=0)
    with pytest.raises(ValueError, match="present has 4 experts, wanted has 3"):
        plan_replicas(present, hot)
    assert owners_of(wanted).slots == ((1, 0), (2, 3), (-1, -1), (-1, -1))


def test_a_step_has_no_more_bytes_than_it_may() -> None:
    def body(comm: Communicator) -> int:
        copies = ReplicaCopies(comm)
        present = Placement([[0, 1, 2, 3], [4, 5, 6, 7]], 8)
        wanted = Placement([[4, 5, 6, 7], [0, 1, 2, 3]], 8)
        weights = [torch.randn(4, 8, 16), torch.randn(4, 3)]
        before = comm.heap_stats().live_bytes
        prefetch = copies.prefetch(plan_replicas(present, wanted), weights, step_bytes=128)
        assert prefetch.recv_bytes == 4 * (8 * 16 + 3) * 4
        assert prefetch.staging_bytes >= prefetch.recv_bytes
        moved = []
        while not prefetch.is_complete:
            stats = copies.engine.run(prefetch._steps[prefetch.num_steps_done])
            moved.append(stats.direct_bytes + stats.slot_bytes)
            prefetch.num_steps_done += 1
        assert max(moved) <= 128
        assert sum(moved) == prefetch.recv_bytes
        prefetch.commit()
        del prefetch
        assert comm.heap_stats().live_bytes - before < 4 << 20  # slots of copies, if any
        return len(moved)

    assert on_ranks(2, body) == [17, 17]


def test_layers_may_be_under_way_together_and_be_abandoned() -> None:
    present, wanted = Placement([[0, 1], [2, -1]], 3), Placement([[2, 1], [0, 1]], 3)

    def body(comm: Communicator) -> None:
        copies = ReplicaCopies(comm)
        plan, held = plan_replicas(present, wanted), present.slots[comm.rank_idx]
        layers = [filled(held, comm) for _ in range(3)]
        kept = [[tensor.clone() for tensor in layer] for layer in layers]
        moving = [copies.prefetch(plan, layer, step_bytes=200) for layer in layers]
        moving[2].step()
        moving[0].step()
        moving[1].step()
        moving[2].abandon()
        moving[2].abandon()
        with pytest.raises(ValueError, match=r"rank 0: step of a prefetch that was abandoned"):
            moving[2].step()
        with pytest.raises(ValueError, match=r"rank 1: commit after 1 of \d+ steps of a prefetch"):
            moving[1].commit()
        finish(moving[1])
        finish(moving[0])
        moving[0].commit()  # all again, as after a failure
        for layer in layers[:2]:
            check_filled(wanted.slots[comm.rank_idx], layer)
        check_filled(held, layers[2])
        for tensor, before, expert_idx in zip(layers[2][0], kept[2][0], held, strict=True):
            assert expert_idx < 0 or torch.equal(tensor, before)
        with pytest.raises(ValueError, match="abandon of a prefetch that was committed"):
            moving[0].abandon()

    on_ranks(2, body)


def test_weights_move_in_a_thread_beside_dispatches() -> None:
    present, wanted = Placement([[0, 1], [2, -1]], 3), Placement([[2, 1], [0, 1]], 3)
    config = EpConfig(num_experts=3, num_topk=2, hidden=64, placement=present)

    def body(comm: Communicator) -> None:
        copies, held = ReplicaCopies(comm), present.slots[comm.rank_idx]
        x, topk_idx = torch.ones(9, 64, dtype=torch.bfloat16), torch.tensor([[0, 2]] * 9)
        weights = filled(held, comm)
        errors: list[BaseException] = []

        def move() -> None:
            try:
                for _ in range(3):
                    finish(copies.prefetch(plan_replicas(present, wanted), weights, step_bytes=9))
                    check_filled(wanted.slots[comm.rank_idx], weights)
                    finish(copies.prefetch(plan_replicas(wanted, present), weights))
            except BaseException as error:  # noqa: BLE001 - raised by the rank's own thread
                errors.append(error)

        with EpBuffer(comm, config) as buffer:
            mover = threading.Thread(target=move)
            mover.start()
            for _ in range(100):
                result = buffer.dispatch(x, topk_idx)
                assert torch.equal(buffer.combine(result.x, result.handle), 2 * x)
            mover.join()
        if errors:
            raise errors[0]
        check_filled(held, weights)

    on_ranks(2, body)


def test_what_is_wrong_is_told_on_every_rank_before_anything_moves() -> None:
    present, wanted = Placement([[0, 1], [2, -1]], 3), Placement([[2, 1], [0, 1]], 3)

    def body(comm: Communicator) -> None:
        copies, is_odd = ReplicaCopies(comm), comm.rank_idx == 1

        def fails(
            match: str,
            weights: object,
            plan: ReplicaPlan | None = None,
            step_bytes: int | None = None,
            kind: type[Exception] = ValueError,
        ) -> None:
            with pytest.raises(kind, match=match):
                copies.prefetch(
                    plan or plan_replicas(present, wanted),
                    weights,  # type: ignore[arg-type]
                    step_bytes=step_bytes,
                )

        good, other = torch.zeros(2, 4), torch.zeros(2, 5)
        fails(
            r"a slot of weights\[1\] is torch.float32 \[4\] on rank 0 and torch.float32 \[5\] on rank 1",
            [torch.zeros(2, 4), other if is_odd else good],
        )
        fails(
            r"a slot of weights\[0\] is torch.float32 \[4\] on rank 0 and torch.float16 \[4\] on rank 1",
            [good.half() if is_odd else good],
        )
        fails(
            "number of weights is 2 on rank 0 and 1 on rank 1",
            [good] * (1 if is_odd else 2) if is_odd else [good, other],
        )
        fails(
            r"rank 1: weights\[0\] must have 2 slots, got 3 in a tensor of shape \(3, 4\)",
            [torch.zeros(3, 4) if is_odd else good],
        )
        fails(
            "rank 1: slots of weights share bytes",
            [torch.zeros(1, 4).expand(2, 4) if is_odd else good],
        )
        fails(
            r"rank 1: slots of weights share",
            [good, good.view(torch.int32) if is_odd else other.int()[:, :4]],
        )
        fails("rank 1: weights must be a list", None if is_odd else [good], kind=TypeError)
        fails(r"rank 1: weights\[0\] must be", [3] if is_odd else [good], kind=TypeError)
        fails(r"rank 0: step_bytes must be >= 1", [good], step_bytes=8 if is_odd else 0)
        fails("step_bytes is 9 on rank 0 and 8 on rank 1", [good], step_bytes=8 if is_odd else 9)
        mine = wanted if is_odd else Placement([[2, 0], [0, 1]], 3)
        fails(
            r"wanted slots of rank 0 is \[2, 0\] on rank 0 and \[2, 1\] on rank 1",
            [good],
            plan_replicas(present, mine),
        )
        fails(
            "must have slots of 2 ranks, got 1",
            [good],
            plan_replicas(Placement([[0, 1]], 2), Placement([[1, 0]], 2)),
        )
        with pytest.raises(TypeError, match=r"rank 1: .*unexpected keyword argument 'bytes'"):
            if is_odd:
                copies.prefetch(plan_replicas(present, wanted), [good], bytes=3)  # type: ignore[call-arg]
            else:
                copies.prefetch(plan_replicas(present, wanted), [good])
        with pytest.raises(ValueError, match="to must be one of"):
            copies.reduce_gradients(wanted, [good], to="some")  # type: ignore[arg-type]
        with pytest.raises(
            TypeError, match=r"rank 0: gradients\[0\] must be one of .*got torch.int32"
        ):
            copies.reduce_gradients(wanted, [good.int()])
        weights = filled(present.slots[comm.rank_idx], comm)
        prefetch = copies.prefetch(plan_replicas(present, wanted), weights, step_bytes=100)
        if is_odd:
            weights[0].untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=r"rank 1: .*storage"):
            while not prefetch.step():
                pass
            prefetch.commit()
        if not is_odd:
            check_filled(present.slots[0], weights)
        prefetch.abandon()
        weights = filled(present.slots[comm.rank_idx], comm)
        prefetch = copies.prefetch(plan_replicas(present, wanted), weights)
        assert prefetch.step()
        if is_odd:
            weights[0].untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=r"rank 1: a slot of weights .*storage"):
            prefetch.commit()
        if not is_odd:
            check_filled(present.slots[0], weights)
        weights = filled(present.slots[comm.rank_idx], comm)
        finish(copies.prefetch(plan_replicas(present, wanted), weights))
        check_filled(wanted.slots[comm.rank_idx], weights)

    on_ranks(2, body)


def test_a_heap_without_room_is_told_on_every_rank() -> None:
    def body(comm: Communicator) -> None:
        copies = ReplicaCopies(comm)
        plan = plan_replicas(Placement([[0], [1]], 2), Placement([[1], [0]], 2))
        weights = [torch.zeros(1, 64 << 20, dtype=torch.uint8)]
        with pytest.raises(CapacityError, match="rank 0: the heap of rank 0 cannot hold"):
            copies.prefetch(plan, weights)

    on_ranks(2, body, max_heap_bytes=32 << 20)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("to", ["all", "owner"])
def test_gradients_are_added_in_the_order_of_slots(num_ranks: int, to: str) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    rng = random.Random(num_ranks)
    placements = [random_pair(rng, num_ranks, 4)[0] for _ in range(6)]

    def gradients(held: tuple[int, ...], first_slot: int) -> list[torch.Tensor]:
        found = []
        for tensor_idx, dtype in enumerate(dtypes):
            of_dtype = torch.empty(len(held), 5, 3, dtype=dtype)
            for slot_idx in range(len(held)):
                generator = torch.Generator().manual_seed(10 * (first_slot + slot_idx) + tensor_idx)
                of_dtype[slot_idx] = torch.randn(5, 3, generator=generator) * 3
            of_dtype[:, 0, 0] = torch.nan if tensor_idx == 0 else torch.inf
            found.append(of_dtype)
        return found

    def body(comm: Communicator) -> None:
        copies = ReplicaCopies(comm)
        for place_idx, placement in enumerate(placements):
            every = gradients(placement.slot_expert, 0)
            first = sum(map(len, placement.slots[: comm.rank_idx]))
            held = placement.slots[comm.rank_idx]
            mine = gradients(held, first)
            step_bytes = (None, 1, 50)[place_idx % 3]
            copies.reduce_gradients(placement, mine, to=to, step_bytes=step_bytes)  # type: ignore[arg-type]
            for tensor_idx, of_dtype in enumerate(mine):
                for slot_idx, expert_idx in enumerate(held):
                    expected = every[tensor_idx][first + slot_idx]
                    slots = placement.slots_of_expert[expert_idx] if expert_idx >= 0 else ()
                    if slots and (to == "all" or first + slot_idx == slots[0]):
                        wide = torch.promote_types(of_dtype.dtype, torch.float32)
                        total = every[tensor_idx][slots[0]].to(wide)
                        for slot in slots[1:]:
                            total = total + every[tensor_idx][slot].to(wide)
                        expected = total.to(of_dtype.dtype)
                    assert torch.equal(of_dtype[slot_idx].view(-1)[1:], expected.view(-1)[1:])
                    assert not of_dtype[slot_idx, 0, 0].isfinite()

    on_ranks(num_ranks, body)


def test_gradients_that_arrive_take_no_more_memory_than_they_may() -> None:
    def body(comm: Communicator) -> int:
        copies, gradients = ReplicaCopies(comm), [torch.ones(1, 64, 256)]
        before = comm.heap_stats().live_bytes
        placement = Placement([[0]] * comm.num_ranks, 1)
        reduction = copies.prepare_reduction(placement, gradients, step_bytes=12 << 10)
        taken = comm.heap_stats().live_bytes - before
        reduction.run()
        assert bool((gradients[0] == comm.num_ranks).all())
        return taken

    assert on_ranks(4, body) == [12 << 10, 0, 0, 0]


def test_sums_have_the_same_bits_whoever_comes_first() -> None:
    placement = Placement([[0, 1], [0, 1], [1, 0], [0, -1]], 2)

    def body(comm: Communicator) -> set[bytes]:
        copies, rng = ReplicaCopies(comm), random.Random(comm.rank_idx)
        generator = torch.Generator().manual_seed(comm.rank_idx)
        given = torch.randn(2, 40, generator=generator)
        gradients = given.clone()
        reduction = copies.prepare_reduction(placement, [gradients], step_bytes=64)
        found = set()
        for _ in range(20):
            gradients.copy_(given)
            time.sleep(rng.random() / 100)
            reduction.run()
            found.add(gradients[: 1 if comm.rank_idx == 3 else 2].sort(0).values.numpy().tobytes())
        return found

    results = on_ranks(4, body)
    assert all(len(found) == 1 for found in results)
    assert results[0] == results[1] == results[2] != results[3]


def test_the_owners_steps_reach_the_replicas() -> None:
    """An optimizer that steps owners alone, and one that steps all slots, come to the same weights."""
    placement = Placement([[0, 1], [], [1, 0, 2]], 3)

    def body(comm: Communicator) -> None:
        copies, held = ReplicaCopies(comm), placement.slots[comm.rank_idx]
        ends = []
        for to in ("all", "owner"):
            weights = torch.tensor(held, dtype=torch.float32)[:, None].repeat(1, 4)
            gradients = torch.arange(len(held) * 4).view(-1, 4) + 0.5 + comm.rank_idx
            copies.reduce_gradients(placement, [gradients], to=to)  # type: ignore[arg-type]
            owners = owners_of(placement)
            for slot_idx, expert_idx in enumerate(held):
                if to == "all" or owners.slots[comm.rank_idx][slot_idx] == expert_idx:
                    weights[slot_idx] -= 0.5 * gradients[slot_idx]
            if to == "owner":
                prefetch = copies.prefetch(plan_replicas(owners, placement), [weights])
                assert prefetch.staging_bytes == 0
                finish(prefetch)
            ends.append(weights)
        assert torch.equal(*ends)

    on_ranks(3, body)
