"""Rules for the replica of an expert that takes a row: the definition that every backend is held to.

A rule turns the logical experts that all ranks chose into slots. From there on a dispatch is that of
`moe_comm.ep.spec` with slots for experts. Like that module, it shares nothing with a backend.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from moe_comm.ep.placement import Placement, ReplicaRule

_HASH_FACTOR = 2654435769
"""2**32 over the golden ratio, as vLLM has it."""


def choose_slots(
    topk_idx: Sequence[torch.Tensor],
    placement: Placement,
    rule: ReplicaRule,
    num_local_ranks: int,
    masked_ranks: frozenset[int] = frozenset(),
) -> list[torch.Tensor]:
    """The choices of every rank as slots of all ranks.

    "given": ids are slots already. "hash": token t of a rank goes to replica
    `(t * 2654435769 mod 2**32) mod count` of an expert with `count` slots, in ascending order. "nearest":
    to the slot on the own rank, or else to one of those on the own node, or else to one of all: of n such
    slots the rank's number modulo n says which. "balanced": see `balance` and `share`; of a rank's rows for
    an expert, in order of (token, k), the first go to the lowest slot, the next to the next.

    Args:
        topk_idx: Choices of every rank, int64 `[T, K]`, logical experts; -1 is no choice.
        placement: Placement of the experts.
        rule: Rule of the replicas.
        num_local_ranks: Ranks of a node, consecutive ones.
        masked_ranks: Ranks whose rows and slots count for nothing. Only "balanced" looks at them.
    """
    if rule == "given":
        return list(topk_idx)
    choices: list[list[list[int]]] = [of_rank.tolist() for of_rank in topk_idx]
    if rule != "balanced":
        return [
            torch.tensor(
                [
                    [-1 if expert < 0 else _fixed(placement, rule, num_local_ranks, rank, token, expert)
                     for expert in experts]
                    for token, experts in enumerate(tokens)
                ],
                dtype=torch.int64,
            ).view(topk_idx[rank].shape)
            for rank, tokens in enumerate(choices)
        ]  # fmt: skip
    counts = [[0] * placement.num_experts for _ in choices]
    for row, tokens in zip(counts, choices, strict=True):
        for expert in itertools.chain(*tokens):
            if expert >= 0:
                row[expert] += 1
    shares = share(counts, placement, num_local_ranks, masked_ranks)
    slots = []
    for rank_idx, tokens in enumerate(choices):
        left = shares[rank_idx]
        found = [-1] * topk_idx[rank_idx].numel()
        for place, expert in enumerate(itertools.chain(*tokens)):
            if expert >= 0:
                slot = next(slot for slot in placement.slots_of_expert[expert] if left[slot] > 0)
                left[slot] -= 1
                found[place] = slot
        slots.append(torch.tensor(found, dtype=torch.int64).view(topk_idx[rank_idx].shape))
    return slots


def _fixed(
    placement: Placement,
    rule: str,
    num_local_ranks: int,
    rank_idx: int,
    token_idx: int,
    expert: int,
) -> int:
    """The slot of a choice under a rule that no count decides."""
    slots = placement.slots_of_expert[expert]
    if rule == "hash":
        return slots[(token_idx * _HASH_FACTOR & 0xFFFFFFFF) % len(slots)]
    owners = placement.slot_rank
    own = [slot for slot in slots if owners[slot] == rank_idx]
    node = rank_idx // num_local_ranks
    near = [slot for slot in slots if owners[slot] // num_local_ranks == node]
    nearest = own or near or slots
    return nearest[rank_idx % len(nearest)]


def balance(
    counts: Sequence[Sequence[int]],
    placement: Placement,
    num_local_ranks: int,
    masked_ranks: frozenset[int] = frozenset(),
) -> list[int]:
    """Rows of every slot under "balanced": no rank has more than the placement makes necessary.

    Every row begins at a slot on its own rank, or else at the lowest on its own node, or else at the
    lowest of all. A limit begins at the mean of ranks, rounded up. Ranks in ascending order, each until
    it has no more rows than the limit, hand rows on: a search by breadth goes from the rank to those that
    have a slot of an expert with rows on a rank that was found, slots of that rank ascending, then slots
    of the expert. To each rank below the limit that is found go along that way as many rows as the first
    has too many, as the last has room for and as each slot on the way has. The search goes on as long as
    the first has too many and all these slots have rows left; else another begins. Where a search finds no
    further rank, none of those that it found can give rows to others, and the limit becomes their mean,
    rounded up: so it is never more than has to be.

    Args:
        counts: `[R][E]`: rows of every rank for every expert.
        placement: Placement of the experts.
        num_local_ranks: Ranks of a node, consecutive ones.
        masked_ranks: Neither their rows nor their slots count.
    """
    owners = placement.slot_rank
    rows = [0] * placement.num_slots
    usable = [
        [slot for slot in slots if owners[slot] not in masked_ranks]
        for slots in placement.slots_of_expert
    ]
    for rank_idx, row in enumerate(counts):
        if rank_idx in masked_ranks:
            continue
        node = rank_idx // num_local_ranks
        for expert, count in enumerate(row):
            found = usable[expert]
            near = [slot for slot in found if owners[slot] // num_local_ranks == node]
            own = [slot for slot in near if owners[slot] == rank_idx]
            if found:
                rows[(own or near or found)[0]] += count
    loads = [0] * placement.num_ranks
    for slot, count in enumerate(rows):
        loads[owners[slot]] += count
    limit = -(-sum(loads) // max(1, placement.num_ranks - len(masked_ranks)))
    for first in range(placement.num_ranks):
        while loads[first] > limit:
            found = _hand_on(first, limit, rows, loads, placement, usable)
            if found:
                limit = -(-sum(loads[rank_idx] for rank_idx in found) // len(found))
    return rows


def _hand_on(
    first: int,
    limit: int,
    rows: list[int],
    loads: list[int],
    placement: Placement,
    usable: Sequence[Sequence[int]],
) -> list[int]:
    """One search of `balance`, which moves `rows` and `loads`.

    Returns:
        The ranks that it found, or none if it ended before it had found all.
    """
    owners, experts = placement.slot_rank, placement.slot_expert
    ways: dict[int, list[tuple[int, int]]] = {first: []}  # pairs of slots that rows go from and to
    found = [first]
    for rank_idx in found:
        for source in range(placement.num_slots):
            if owners[source] != rank_idx or experts[source] < 0:
                continue
            for target in usable[experts[source]]:
                end = owners[target]
                if rows[source] == 0 or end in ways:
                    continue
                way = ways[end] = [*ways[rank_idx], (source, target)]
                found.append(end)
                if loads[end] >= limit:
                    continue
                sources = [pair[0] for pair in way]
                amount = min(
                    loads[first] - limit, limit - loads[end], *(rows[slot] for slot in sources)
                )
                for giver, taker in way:
                    rows[giver] -= amount
                    rows[taker] += amount
                loads[first] -= amount
                loads[end] += amount
                if loads[first] <= limit or not all(rows[slot] for slot in sources):
                    return []
    return found


def share(
    counts: Sequence[Sequence[int]],
    placement: Placement,
    num_local_ranks: int,
    masked_ranks: frozenset[int] = frozenset(),
) -> list[list[int]]:
    """Rows of every rank for every slot, `[R][slots]`, under "balanced".

    What `balance` gives a slot comes first from its own rank, then from ranks of its node, then from all,
    in order of (source rank, slot). Rows that go nowhere, as a mask says, count at an expert's lowest slot.

    Args:
        counts: As in `balance`.
        placement: As in `balance`.
        num_local_ranks: As in `balance`.
        masked_ranks: As in `balance`.
    """
    owners, num_ranks = placement.slot_rank, placement.num_ranks
    left = balance(counts, placement, num_local_ranks, masked_ranks)
    shares = [[0] * placement.num_slots for _ in counts]
    for expert, slots in enumerate(placement.slots_of_expert):
        rows = [row[expert] for row in counts]
        for distance in (1, num_local_ranks, num_ranks):
            for rank_idx, slot in itertools.product(range(num_ranks), slots):
                is_near = rank_idx // distance == owners[slot] // distance
                if is_near and rank_idx not in masked_ranks:
                    amount = min(rows[rank_idx], left[slot])
                    shares[rank_idx][slot] += amount
                    rows[rank_idx] -= amount
                    left[slot] -= amount
        for rank_idx, count in enumerate(rows):
            shares[rank_idx][slots[0]] += count
    return shares
