"""Moves of experts between slots that lead from one placement to another."""

from __future__ import annotations

import dataclasses

from moe_comm.arguments import as_int, check_kind
from moe_comm.ep.placement import EMPTY_SLOT, Placement


@dataclasses.dataclass(frozen=True)
class ReplicaMove:
    """One slot that gets another expert.

    Args:
        expert_idx: Logical expert that comes.
        src_rank: Rank that has it in the present placement.
        src_slot: Local slot there.
        dst_rank: Rank that gets it; may be `src_rank`.
        dst_slot: Local slot there.
        is_empty: Whether that slot is empty in the present placement.
    """

    expert_idx: int
    src_rank: int
    src_slot: int
    dst_rank: int
    dst_slot: int
    is_empty: bool


@dataclasses.dataclass(frozen=True)
class ReplicaPlan:
    """All moves between two placements, in the order of their destinations.

    Args:
        present: Placement before the moves.
        wanted: Placement after the moves.
        moves: A move for every slot whose expert changes; slots that become empty have none.
    """

    present: Placement
    wanted: Placement
    moves: tuple[ReplicaMove, ...]


def plan_replicas(
    present: Placement, wanted: Placement, num_local_ranks: int | None = None
) -> ReplicaPlan:
    """Say what has to be copied so that `wanted` holds where `present` does. Local, alike on all ranks.

    An expert comes from its own rank if that has it, else from its node, else from any rank that does:
    from the one that sends least by then, of equals the lowest.

    Args:
        present: The placement now.
        wanted: Placement of the same experts, ranks and slots a rank that is to hold.
        num_local_ranks: Consecutive ranks that are a node; None for one node.

    Raises:
        ValueError: The placements differ in experts, ranks or slots of a rank; both are named.
        TypeError: One is no `Placement`.
    """
    check_kind("present", present, Placement)
    check_kind("wanted", wanted, Placement)
    for name, now, then in (
        ("experts", present.num_experts, wanted.num_experts),
        ("ranks", present.num_ranks, wanted.num_ranks),
        *(
            (f"slots on rank {rank_idx}", len(held), len(wanted.slots[rank_idx]))
            for rank_idx, held in enumerate(present.slots[: wanted.num_ranks])
        ),
    ):
        if now != then:
            raise ValueError(
                f"placements must be alike: present has {now} {name}, wanted has {then}"
            )
    node_ranks = present.num_ranks if num_local_ranks is None else num_local_ranks
    node_ranks = as_int("num_local_ranks", node_ranks, 1)
    holders = _holders(present)
    pending = [
        (rank_idx, slot_idx, expert_idx)
        for rank_idx, held in enumerate(wanted.slots)
        for slot_idx, expert_idx in enumerate(held)
        if expert_idx not in (EMPTY_SLOT, present.slots[rank_idx][slot_idx])
    ]
    num_sent = [0] * present.num_ranks
    moves = []
    # Experts that few ranks have leave least choice, and choose first.
    for rank_idx, slot_idx, expert_idx in sorted(
        pending, key=lambda move: (len(holders[move[2]]), move)
    ):
        node_idx = rank_idx // node_ranks
        src_rank = min(
            holders[expert_idx],
            key=lambda src: (src != rank_idx, src // node_ranks != node_idx, num_sent[src], src),
        )
        num_sent[src_rank] += src_rank != rank_idx
        is_empty = present.slots[rank_idx][slot_idx] == EMPTY_SLOT
        src_slot = holders[expert_idx][src_rank]
        moves.append(ReplicaMove(expert_idx, src_rank, src_slot, rank_idx, slot_idx, is_empty))
    moves.sort(key=lambda move: (move.dst_rank, move.dst_slot))
    return ReplicaPlan(present, wanted, tuple(moves))


def owners_of(placement: Placement) -> Placement:
    """The placement with no more than the owner of every expert: its lowest slot; the others are empty.

    `plan_replicas(owners_of(placement), placement)` copies all replicas from their owners.
    """
    check_kind("placement", placement, Placement)
    owners = {of_expert[0] for of_expert in placement.slots_of_expert}
    slots, first = [], 0
    for held in placement.slots:
        slots.append(
            [
                expert_idx if first + slot_idx in owners else EMPTY_SLOT
                for slot_idx, expert_idx in enumerate(held)
            ]
        )
        first += len(held)
    return Placement.of_valid(slots, placement.num_experts)


def replicated(placement: Placement) -> list[list[tuple[int, int]]]:
    """Rank and local slot of the owner and the replicas of every expert that has some."""
    places = [
        (rank_idx, slot_idx)
        for rank_idx, held in enumerate(placement.slots)
        for slot_idx in range(len(held))
    ]
    return [
        [places[slot] for slot in of_expert]
        for of_expert in placement.slots_of_expert
        if len(of_expert) > 1
    ]


def _holders(placement: Placement) -> list[dict[int, int]]:
    """Return for every expert the ranks that have it, and its local slot there."""
    found: list[dict[int, int]] = [{} for _ in range(placement.num_experts)]
    for rank_idx, held in enumerate(placement.slots):
        for slot_idx, expert_idx in enumerate(held):
            if expert_idx != EMPTY_SLOT:
                found[expert_idx][rank_idx] = slot_idx
    return found
