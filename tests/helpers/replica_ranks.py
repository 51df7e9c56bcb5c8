"""One rank of dispatches and combines with replicas, held to the definition and to a buffer without."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence

import pytest
import torch

import moe_comm
from moe_comm import Capacity, Communicator, EpBuffer, EpConfig, Layout, Quantization
from moe_comm.ep.placement import Placement, ReplicaRule
from moe_comm.ep.replica_spec import balance, choose_slots
from moe_comm.ep.spec import Dispatch, Received
from moe_comm.testing.case_data import as_sent
from moe_comm.testing.cases import seeded

NUM_EXPERTS, NUM_TOPK, HIDDEN, NUM_MAX_TOKENS = 6, 3, 32, 24


def random_placement(seed: int, num_ranks: int) -> Placement:
    """Every expert somewhere, two of them on all ranks, one slot empty."""
    rng = random.Random(seed)
    slots: list[list[int]] = [[0, 3] for _ in range(num_ranks)]
    for expert in (1, 2, 4, 5):
        for rank_idx in rng.sample(range(num_ranks), rng.randint(1, min(2, num_ranks))):
            slots[rank_idx].append(expert)
    for of_rank in slots:
        rng.shuffle(of_rank)
    slots[-1].append(-1)
    return Placement(slots, NUM_EXPERTS)


def rows_by_rank(
    placement: Placement,
    counts: Sequence[Sequence[int]],
    num_local_ranks: int = 1,
    masked: frozenset[int] = frozenset(),
) -> list[int]:
    """Rows of every rank under "balanced"; `counts` as in `balance`, of the first ranks."""
    rows = balance(counts, placement, num_local_ranks, masked)
    loads = [0] * placement.num_ranks
    for rank_idx, count in zip(placement.slot_rank, rows, strict=True):
        loads[rank_idx] += count
    return loads


def least_largest_load(totals: list[int], placement: Placement, allowed: list[int]) -> int:
    """The least of the largest loads: by Hall's theorem, the most of what a set of ranks must take."""
    owners = placement.slot_rank
    most = 0
    for size in range(1, len(allowed) + 1):
        for some in itertools.combinations(allowed, size):
            bound = 0
            for total, slots in zip(totals, placement.slots_of_expert, strict=True):
                ranks = {owners[slot] for slot in slots} & {*allowed}
                if ranks and ranks <= {*some}:
                    bound += total
            most = max(most, -(-bound // size))
    return most


def inputs(seed: int, num_ranks: int) -> tuple[list[torch.Tensor], ...]:
    """Rows, choices and weights of every rank: skewed, of unequal numbers of tokens."""
    generator = seeded("replicas", seed)
    x, topk_idx, weights = [], [], []
    for rank_idx in range(num_ranks):
        num_tokens = (NUM_MAX_TOKENS, 5, 0, 17)[(rank_idx + seed) % 4]
        scores = torch.rand(num_tokens, NUM_EXPERTS, generator=generator)
        scores = scores ** torch.tensor([0.1, 1, 2, 0.2, 4, 8])
        chosen = scores.topk(NUM_TOPK, dim=1).indices
        chosen[torch.rand(chosen.shape, generator=generator) < 0.1] = -1
        x.append(torch.randn(num_tokens, HIDDEN, generator=generator).to(torch.bfloat16))
        topk_idx.append(chosen)
        weights.append(torch.rand(chosen.shape, generator=generator))
    return x, topk_idx, weights


def config_of(
    placement: Placement | None, rule: ReplicaRule = "balanced", **fields: bool
) -> EpConfig:
    """Configuration of a buffer with this placement, or of one without."""
    of_placement = {} if placement is None else {"placement": placement, "replica_rule": rule}
    return EpConfig(
        num_experts=NUM_EXPERTS,
        num_topk=NUM_TOPK,
        hidden=HIDDEN,
        num_max_tokens_per_rank=NUM_MAX_TOKENS,
        **of_placement,
        **fields,
    )  # type: ignore[arg-type]


def definition(
    placement: Placement,
    rule: ReplicaRule,
    topk_idx: list[torch.Tensor],
    num_local_ranks: int,
    layout: Layout,
    *,
    expert_alignment: int = 1,
    capacity: Capacity | None = None,
    masked: tuple[int, ...] = (),
) -> Dispatch:
    """A dispatch of logical experts, or of slots where the rule is "given"."""
    num_ranks, masked_ranks = placement.num_ranks, frozenset(masked)
    return Dispatch(
        topk_idx=choose_slots(topk_idx, placement, rule, num_local_ranks, masked_ranks),
        expert_rank=placement.slot_rank,
        layout=layout,
        expert_alignment=expert_alignment,
        num_places_per_expert=NUM_MAX_TOKENS * num_ranks if layout is Layout.LOW_LATENCY else 0,
        capacities=[capacity] * num_ranks if capacity else (),
        masked_ranks=masked_ranks,
    )


def check_received(result: moe_comm.DispatchResult, expected: Received) -> None:
    """Every tensor of a dispatch is what the definition says, to the bit."""
    rows = slice(None) if expected.is_defined is None else expected.is_defined
    assert torch.equal(result.x[rows].view(torch.uint8), expected.x[rows].view(torch.uint8))
    assert result.num_tokens_per_expert.tolist() == expected.num_tokens_per_expert.tolist()
    assert result.num_dropped_per_expert.tolist() == expected.num_dropped_per_expert.tolist()
    assert result.expert_offsets.tolist() == expected.expert_offsets.tolist()
    if expected.topk_weights is not None:
        assert torch.equal(result.topk_weights[rows], expected.topk_weights[rows])
    if expected.topk_idx is not None:
        assert torch.equal(result.topk_idx, expected.topk_idx)


def check_dispatch(
    comm: Communicator,
    rule: ReplicaRule,
    layout: Layout,
    seed: int,
    *,
    quantization: Quantization | None = None,
    capacity: Capacity | None = None,
    masked: tuple[int, ...] = (),
    expert_alignment: int = 1,
) -> None:
    """Uncached, cached, and combined, against the definition."""
    placement = random_placement(seed, comm.num_ranks)
    x, topk_idx, weights = inputs(seed, comm.num_ranks)
    if rule == "given":
        topk_idx = choose_slots(topk_idx, placement, "hash", 1)
    spec = definition(
        *(placement, rule, topk_idx, comm.num_local_ranks, layout),
        expert_alignment=expert_alignment,
        capacity=capacity,
        masked=masked,
    )
    sent, factors = as_sent(x, None, quantization)
    rank_idx = comm.rank_idx
    with EpBuffer(comm, config_of(placement, rule)) as buffer:
        assert buffer.num_local_experts == len(placement.slots[rank_idx])
        buffer.mask_ranks(masked)
        result = buffer.dispatch(
            *(x[rank_idx], topk_idx[rank_idx], weights[rank_idx]),
            layout=layout,
            quantization=quantization,
            capacity=capacity,
            expert_alignment=expert_alignment,
        )
        check_received(result, spec.received(rank_idx, sent, weights, x_sf=factors))
        again = buffer.dispatch(x[rank_idx].neg(), None, handle=result.handle)
        check_received(again, spec.again.received(rank_idx, [rows.neg() for rows in x]))
        received = [
            spec.again.received(peer, [rows.neg() for rows in x], weights)
            for peer in range(comm.num_ranks)
        ]
        back = buffer.combine(again.x.clone(), result.handle, row_weights=result.topk_weights)
        sums = spec.sums(rank_idx, [of_rank.x for of_rank in received])
        assert torch.equal(back.x.view(torch.uint8), sums.view(torch.uint8))
        row_weights = [of_rank.topk_weights for of_rank in received]
        assert torch.equal(back.topk_weights, spec.pulled(rank_idx, row_weights))


def _through_experts(
    buffer: EpBuffer, x: torch.Tensor, topk_idx: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """A layer whose experts multiply rows by a number of their own."""
    result = moe_comm.dispatch(x, topk_idx, buffer=buffer)
    placement = buffer.config.placement
    if placement is None:
        experts = (buffer.expert_rank == buffer.communicator.rank_idx).nonzero().flatten()
    else:
        experts = torch.tensor(placement.slots[buffer.communicator.rank_idx])
    sizes = result.expert_offsets.diff().to(torch.int64)
    factors = (1.0 + 0.37 * experts).repeat_interleave(sizes)[:, None]
    out = (result.x.float() * factors).to(x.dtype)
    return moe_comm.combine(out, result.handle, buffer=buffer, topk_weights=weights)


def sums_and_gradients(comm: Communicator, config: EpConfig, seed: int) -> list[torch.Tensor]:
    """Output of a layer, and the gradients of its rows and weights."""
    x, topk_idx, weights = (tensors[comm.rank_idx] for tensors in inputs(seed, comm.num_ranks))
    x.requires_grad_()
    weights.requires_grad_()
    with EpBuffer(comm, config) as buffer:
        out = _through_experts(buffer, x, topk_idx, weights)
        out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype))
    assert x.grad is not None
    assert weights.grad is not None
    return [out.detach(), x.grad, weights.grad]


def check_same_bits(comm: Communicator, rule: ReplicaRule, seed: int) -> None:
    """A layer gives the same with replicas as without, and so do its gradients."""
    placement = random_placement(seed, comm.num_ranks)
    found = sums_and_gradients(comm, config_of(placement, rule), seed)
    for one, other in zip(found, sums_and_gradients(comm, config_of(None), seed), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def check_dense_by_rank(comm: Communicator, seed: int) -> int:
    """Rows by rank, their weights and both gradients, against a layer that moves nothing; in float64.

    Returns:
        Choices that this rank's experts computed.
    """
    placement = random_placement(seed, comm.num_ranks)
    x, topk_idx, weights = (tensors[comm.rank_idx] for tensors in inputs(seed, comm.num_ranks))
    leaves = [x.double().requires_grad_(), weights.double().requires_grad_()]
    factors = 1.0 + 0.37 * torch.arange(NUM_EXPERTS, dtype=torch.float64)
    chosen_factors = factors[topk_idx.clamp(min=0)] * (topk_idx >= 0)
    expected = leaves[0] * (leaves[1] * chosen_factors).sum(1, keepdim=True)
    gradient = torch.linspace(-1, 1, x.numel(), dtype=torch.float64).view(x.shape)
    gradients = torch.autograd.grad(expected, leaves, gradient)
    config = dataclasses.replace(config_of(placement), dtype=torch.float64)
    with EpBuffer(comm, config) as buffer:
        result = moe_comm.dispatch(
            leaves[0], topk_idx, leaves[1], buffer=buffer, layout=Layout.RANK_MAJOR
        )
        experts = torch.tensor(placement.slots[comm.rank_idx])[result.topk_idx.clamp(min=0)]
        applied = result.topk_weights * factors[experts] * (result.topk_idx >= 0)
        out = result.x * applied.sum(1, keepdim=True)
        found = moe_comm.combine(out, result.handle, buffer=buffer)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        for one, other in zip(torch.autograd.grad(found, leaves, gradient), gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        return int(result.num_tokens_per_expert.sum())


def check_reduced(comm: Communicator, seed: int, reduction: str) -> None:
    """Rows that are added on their node, or on their rank, before they cross, against the definition."""
    placement = random_placement(seed, comm.num_ranks)
    x, topk_idx, _ = inputs(seed, comm.num_ranks)
    spec = definition(placement, "balanced", topk_idx, comm.num_local_ranks, Layout.EXPERT_MAJOR)
    rows = [spec.received(rank_idx, x).x for rank_idx in range(comm.num_ranks)]
    expected = spec.sums(
        comm.rank_idx,
        rows,
        num_local_ranks=comm.num_local_ranks,
        rank_reduction=reduction == "rank_reduction",
    )
    with EpBuffer(comm, config_of(placement, **{reduction: True})) as buffer:
        result = buffer.dispatch(x[comm.rank_idx], topk_idx[comm.rank_idx])
        found = buffer.combine(result.x.clone(), result.handle)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def chosen(topk_idx: list[torch.Tensor]) -> list[int]:
    """Choices of every expert by all ranks."""
    ids = torch.cat([each.flatten() for each in topk_idx])
    return torch.bincount(ids[ids >= 0], minlength=NUM_EXPERTS).tolist()


def as_passed(
    topk_idx: list[torch.Tensor], placement: Placement | None, rule: ReplicaRule | None
) -> list[torch.Tensor]:
    """Choices as callers pass them."""
    if rule != "given":
        return topk_idx
    assert placement is not None
    return choose_slots(topk_idx, placement, "hash", 1)


def check_loads(comm: Communicator, rule: ReplicaRule | None) -> None:
    """Every uncached dispatch counts once, in every layout; nothing else does."""
    placement = None if rule is None else random_placement(3, comm.num_ranks)
    config = config_of(None) if placement is None else config_of(placement, rule or "hash")
    expected = torch.zeros(NUM_EXPERTS, dtype=torch.int64)
    with EpBuffer(comm, config) as buffer:
        x, topk_idx, weights = inputs(1, comm.num_ranks)
        buffer.dispatch(x[comm.rank_idx], as_passed(topk_idx, placement, rule)[comm.rank_idx])
        buffer.count_loads()
        for seed, layout in enumerate(Layout):
            x, topk_idx, weights = (each for each in inputs(seed, comm.num_ranks))
            mine = as_passed(topk_idx, placement, rule)[comm.rank_idx]
            result = buffer.dispatch(
                x[comm.rank_idx],
                mine,
                weights[comm.rank_idx],
                layout=layout,
                async_op=seed == 1,
            )
            expected += torch.tensor(chosen(topk_idx))
            if seed == 1:
                # Counted without its caller waiting for it.
                assert buffer.expert_loads().tolist() == expected.tolist()
                result.event.wait()
            buffer.combine(torch.zeros_like(result.x), result.handle)
            buffer.dispatch(x[comm.rank_idx], None, handle=result.handle)
            found = buffer.expert_loads(reset=seed == 1)
            assert found.dtype == torch.int64
            assert found.tolist() == expected.tolist()
            if seed == 1:
                expected.zero_()
        buffer.count_loads(False)
        with pytest.raises(ValueError, match=r"call count_loads\(\) before"):
            buffer.expert_loads()
