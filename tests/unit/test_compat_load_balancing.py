"""`EPBuffer.lb_*` on ranks that are threads: mappings as callers of DeepEP V2.5 make them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_comm.compat import deep_ep
from moe_comm.compat.deep_ep import BufferAllocator, EPBuffer
from moe_comm.testing import RankContext, run_ranks

NUM_LOCAL = 3
STALE = 0xA5
MIB2 = deep_ep.get_num_allocation_alignment()
SIZES = (1 << 16, 96, 32)


def random_mapping(seed: int, num_ranks: int, num_slots: int) -> torch.Tensor:
    """Experts of other ranks, of which a rank may have two copies; some slots are empty."""
    generator = torch.Generator().manual_seed(seed)
    shape = num_ranks, num_slots
    others = (num_ranks - 1) * NUM_LOCAL
    mapping = torch.randint(others, shape, generator=generator, dtype=torch.int32)
    mapping += NUM_LOCAL * (mapping >= NUM_LOCAL * torch.arange(num_ranks)[:, None]).to(torch.int32)
    mapping[torch.rand(shape, generator=generator) < 0.25] = -1
    return mapping


def payload(expert_idx: int, tensor_idx: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * expert_idx + tensor_idx)
    return torch.randint(256, (SIZES[tensor_idx],), generator=generator, dtype=torch.uint8)


def check_prefetch(context: RankContext, num_slots: int) -> None:
    plan = BufferAllocator()
    redundant = [plan.allocate((num_slots, size), torch.uint8) for size in SIZES]
    buffer = EPBuffer(
        context.group, MIB2, lb_allocation_plan_or_num_bytes=plan, explicitly_destroy=True
    )
    assert buffer.num_lb_bytes == plan.num_bytes > 0
    storage = buffer.runtime.lb_storage
    assert redundant[0].data_ptr() == storage.data_ptr()
    local = [
        torch.stack([payload(context.rank_idx * NUM_LOCAL + i, t) for i in range(NUM_LOCAL)])
        for t in range(len(SIZES))
    ]
    for seed in range(4):
        mapping = random_mapping(seed, context.num_ranks, num_slots)
        for tensor in redundant:
            tensor.fill_(STALE)
        num_sent = (3, 1)[seed % 2]
        given: Any = redundant[:num_sent], local[:num_sent]
        if seed == 2:  # of other shapes and dtypes
            given = (
                [tensor.unflatten(1, (-1, 2, 8)) for tensor in redundant],
                [tensor.view(torch.float16).unflatten(1, (-1, 8)) for tensor in local],
            )
        if seed == 3:
            given = redundant[0], local[0]
        event = buffer.lb_prefetch_weights(*given, mapping, previous_event=buffer.capture())
        assert event.wait() is None
        for tensor_idx, tensor in enumerate(redundant):
            for slot_idx, expert_idx in enumerate(mapping[context.rank_idx].tolist()):
                if expert_idx < 0 or tensor_idx >= num_sent:
                    assert bool((tensor[slot_idx] == STALE).all())
                else:
                    assert torch.equal(tensor[slot_idx], payload(expert_idx, tensor_idx))
    buffer.destroy()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_experts_come_into_the_slots_of_the_mapping(num_ranks: int) -> None:
    run_ranks(check_prefetch, num_ranks, 5, mode="threads")


def check_sums(context: RankContext, hidden: int) -> None:
    num_slots = 4
    buffer = EPBuffer(context.group, MIB2)

    def gradients(rank_idx: int, num_rows: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * rank_idx + num_rows)
        return torch.randn(num_rows, hidden, generator=generator)

    for seed in range(3):
        mapping = random_mapping(seed, context.num_ranks, num_slots)
        redundant = gradients(context.rank_idx, num_slots)
        kept, local = redundant.clone(), gradients(context.rank_idx, NUM_LOCAL)
        expected = local.clone()
        for rank_idx, row in enumerate(mapping.tolist()):
            for slot_idx, expert_idx in enumerate(row):
                if expert_idx // NUM_LOCAL == context.rank_idx:
                    of_slot = gradients(rank_idx, num_slots)[slot_idx]
                    expected[expert_idx % NUM_LOCAL] += of_slot
        buffer.lb_reduce_grads(redundant, local, mapping).wait()
        assert torch.equal(local, expected)
        assert torch.equal(redundant, kept)


@pytest.mark.parametrize("hidden", [8, 4096])
def test_gradients_are_added_in_the_order_of_the_mapping(hidden: int) -> None:
    run_ranks(check_sums, 3, hidden, mode="threads")


def check_without_slots(context: RankContext) -> None:
    buffer = EPBuffer(context.group, MIB2)
    nothing = torch.empty(2, 0, dtype=torch.int32)
    local = torch.ones(NUM_LOCAL, 8)
    buffer.lb_prefetch_weights(torch.empty(0, 8), local, nothing)
    buffer.lb_reduce_grads(torch.empty(0, 8), local, nothing)
    assert bool((local == 1).all())


def test_a_mapping_may_be_empty() -> None:
    run_ranks(check_without_slots, 2, mode="threads")


def check_mistakes(context: RankContext) -> None:
    buffer = EPBuffer(context.group, MIB2)
    is_odd = context.rank_idx == 1
    good = torch.tensor([[3, -1], [0, 2]], dtype=torch.int32)
    redundant, local = torch.zeros(2, 8), torch.ones(NUM_LOCAL, 8)

    def changed(row: int, slot: int, expert_idx: int) -> torch.Tensor:
        mapping = good.clone()
        mapping[row, slot] = expert_idx
        return mapping

    wrong: list[tuple[str, dict[str, Any]]] = [
        (r"rank 1: redundancy_mapping\[1, 0\] must be an expert of another rank, got 4, which rank 1 owns",
         {"redundancy_mapping": changed(1, 0, 4)}),
        (r"rank 1: redundancy_mapping\[0, 1\] must be in \[-1, 6\), got 6",
         {"redundancy_mapping": changed(0, 1, 6)}),
        (r"redundancy_mapping\[0\] is \[3, -1\] on rank 0 and \[4, -1\] on rank 1",
         {"redundancy_mapping": changed(0, 0, 4)}),
        (r"rank 1: redundancy_mapping must be contiguous int32 of shape \(2, 2\), got torch.int64",
         {"redundancy_mapping": good.long()}),
        (r"rank 1: redundant_expert_.*must", {"redundant": redundant[:, :7]}),
        (r"rank 1: ", {"redundant": torch.zeros(2, 16)}),
        (r"rank 1: num_sms must be >= 0, got -1", {"num_sms": -1}),
    ]  # fmt: skip
    for text, change in wrong:
        given = {"redundant": redundant, "redundancy_mapping": good} | (change if is_odd else {})
        for call in (buffer.lb_prefetch_weights, buffer.lb_reduce_grads):
            with pytest.raises(ValueError, match=text):
                call(
                    given["redundant"], local, given["redundancy_mapping"], given.get("num_sms", 0)
                )
    with pytest.raises(ValueError, match=r"a multiple of 32 bytes an expert, got 28"):
        buffer.lb_prefetch_weights(torch.zeros(2, 7), torch.zeros(3, 7), good)
    with pytest.raises(ValueError, match=r"redundant_expert_weights must be as many as .* 1 and 2"):
        buffer.lb_prefetch_weights([redundant], [local, local], good)
    with pytest.raises(ValueError, match="redundant_expert_grads must be float32"):
        buffer.lb_reduce_grads(redundant.double(), local, good)
    with pytest.raises(TypeError, match=r"rank 1: .*unexpected keyword argument 'sms'"):
        buffer.lb_reduce_grads(redundant, local, good, **({"sms": 3} if is_odd else {}))  # type: ignore[arg-type]
    assert not redundant.any()
    buffer.lb_prefetch_weights(redundant, local, good).wait()
    assert redundant.any(1).tolist() == ([True, True] if is_odd else [True, False])


def test_a_mistake_of_one_rank_is_raised_on_all() -> None:
    run_ranks(check_mistakes, 2, mode="threads")
