"""Placement of logical experts, replicas included, in the slots of the ranks."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Literal, get_args

import torch

from moe_comm.arguments import as_int, shown

ReplicaRule = Literal["balanced", "nearest", "hash", "given"]
REPLICA_RULES: tuple[ReplicaRule, ...] = get_args(ReplicaRule)
"""Rules that say which replica of an expert takes a row; see `moe_comm.ep.replica_spec`."""

EMPTY_SLOT = -1
"""Stands for the expert of a slot that has none."""


def first_missing(held: Iterable[int], num_experts: int) -> int | None:
    """Return the lowest expert that is none of those held, or None: takes no memory for others than these."""
    found = {*held}
    return next((expert_idx for expert_idx in range(num_experts) if expert_idx not in found), None)


@dataclasses.dataclass(frozen=True)
class Placement:
    """Logical experts in the slots of every rank; several slots of one expert are replicas of it.

    A slot has a local number on its rank, in the order of its list, and a number among the slots of all
    ranks, rank by rank: the physical id of SGLang and vLLM.

    Args:
        slots: The logical expert in every slot of every rank, -1 for an empty slot. Any number of slots
            a rank, none included.
        num_experts: Logical experts. Each has at least one slot, and at most one on a rank.

    Raises:
        ValueError: A slot holds no id in [-1, num_experts), two slots of a rank hold the same expert, or
            an expert has no slot; the message names rank, slot and expert.
        TypeError: `slots` is not made of sequences of ints.

    Example:
        `Placement([[0, 1], [2, 0]], 3)`: slots 0 of rank 0 and 1 of rank 1 (3 of all) hold expert 0.
    """

    slots: tuple[tuple[int, ...], ...]
    num_experts: int

    def __init__(self, slots: Sequence[Sequence[int]], num_experts: int) -> None:
        num_experts = as_int("num_experts", num_experts, 1)
        for rank_idx, of_rank in enumerate(slots):
            if not isinstance(of_rank, Iterable):
                raise TypeError(f"slots[{rank_idx}] must be a list, got {shown(of_rank)}")
        held = tuple(
            tuple(as_int(f"slots[{rank_idx}][{slot_idx}]", expert_idx) for slot_idx, expert_idx in
                  enumerate(of_rank))
            for rank_idx, of_rank in enumerate(slots)
        )  # fmt: skip
        object.__setattr__(self, "slots", held)
        object.__setattr__(self, "num_experts", num_experts)
        if not held:
            raise ValueError("slots must hold a list for every rank, got none")
        for rank_idx, of_rank in enumerate(held):
            found: dict[int, int] = {}
            for slot_idx, expert_idx in enumerate(of_rank):
                if not EMPTY_SLOT <= expert_idx < num_experts:
                    raise ValueError(
                        f"slot {slot_idx} of rank {rank_idx} holds expert {expert_idx}, which is not "
                        f"in [-1, {num_experts})"
                    )
                if expert_idx in found:
                    raise ValueError(
                        f"slots {found[expert_idx]} and {slot_idx} of rank {rank_idx} both hold "
                        f"expert {expert_idx}"
                    )
                if expert_idx != EMPTY_SLOT:
                    found[expert_idx] = slot_idx
        missing = first_missing(itertools.chain(*held), num_experts)
        if missing is not None:
            raise ValueError(f"expert {missing} of {num_experts} lies in no slot of any rank")

    @classmethod
    def of_table(
        cls,
        physical_to_logical: torch.Tensor | Sequence[int],
        num_ranks: int,
        num_experts: int | None = None,
    ) -> Placement:
        """The placement that a table of physical experts describes, as SGLang and vLLM keep one a layer.

        Of several slots of one expert on a rank, which vLLM's policy makes, the first counts: the others
        are empty here, as they would take nothing off it.

        Args:
            physical_to_logical: Integers `[P]`: the logical expert of every physical one, -1 for an
                empty slot. P is a multiple of `num_ranks`; rank r has the r-th part.
            num_ranks: Ranks, >= 1.
            num_experts: Logical experts; None for one more than the largest id in the table.

        Raises:
            ValueError: P is not a multiple of `num_ranks`, or as `Placement` does.
            TypeError: The table does not hold integers.
        """
        table = torch.as_tensor(physical_to_logical, device="cpu")
        num_ranks = as_int("num_ranks", num_ranks, 1)
        if table.is_complex() or table.is_floating_point() or table.dtype == torch.bool:
            raise TypeError(f"physical_to_logical must hold integers, got {table.dtype}")
        if table.dim() != 1 or table.numel() == 0 or table.numel() % num_ranks:
            raise ValueError(
                "physical_to_logical must have the shape of one layer, a multiple of "
                f"num_ranks={num_ranks}, got {tuple(table.shape)}"
            )
        if num_experts is None:
            num_experts = max(int(table.max()) + 1, 1)
        slots = table.view(num_ranks, -1).tolist()
        for of_rank in slots:
            for slot_idx, expert_idx in enumerate(of_rank):
                if expert_idx in of_rank[:slot_idx]:
                    of_rank[slot_idx] = EMPTY_SLOT
        return cls(slots, num_experts)

    @classmethod
    def in_blocks(cls, num_experts: int, num_ranks: int, num_spare_slots: int = 0) -> Placement:
        """Every expert once, rank r having the r-th of equal parts, and empty slots behind them.

        Args:
            num_experts: Logical experts, a multiple of `num_ranks`.
            num_ranks: Ranks, >= 1.
            num_spare_slots: Empty slots of every rank, >= 0, into which replicas may come.

        Raises:
            ValueError: A number breaks a rule above.
            TypeError: One is no int.
        """
        num_ranks = as_int("num_ranks", num_ranks, 1)
        num_experts = as_int("num_experts", num_experts, 1)
        spare = [EMPTY_SLOT] * as_int("num_spare_slots", num_spare_slots, 0)
        if num_experts % num_ranks:
            raise ValueError(
                f"num_experts must be a multiple of num_ranks={num_ranks}, got {num_experts}"
            )
        size = num_experts // num_ranks
        return cls(
            [[*range(r * size, (r + 1) * size), *spare] for r in range(num_ranks)], num_experts
        )

    def first_slots(self, num_slots: int) -> Placement:
        """The placement with all slots empty but the first `num_slots` of every rank.

        Raises:
            ValueError: These do not hold every expert once.
        """
        held = [
            [*of_rank[:num_slots], *[EMPTY_SLOT] * (len(of_rank) - num_slots)]
            for of_rank in self.slots
        ]
        counts = collections.Counter(itertools.chain(*held))
        for expert_idx in range(self.num_experts):
            if counts[expert_idx] != 1:
                raise ValueError(
                    f"the first {num_slots} slots of all ranks must hold every expert once: expert "
                    f"{expert_idx} lies in {counts[expert_idx]} of them, of {self.slots}"
                )
        return Placement.of_valid(held, self.num_experts)

    def without_replicas(self, num_owners: int, ranks: Collection[int]) -> Placement:
        """The placement with those replicas empty that lie on some ranks, or whose owners do.

        Args:
            num_owners: The first slots of every rank, which hold every expert once: its owner.
            ranks: These.
        """
        owned = {expert for rank_idx in ranks for expert in self.slots[rank_idx][:num_owners]}
        held = [
            [
                EMPTY_SLOT
                if slot_idx >= num_owners and (rank_idx in ranks or expert in owned)
                else expert
                for slot_idx, expert in enumerate(of_rank)
            ]
            for rank_idx, of_rank in enumerate(self.slots)
        ]
        return Placement.of_valid(held, self.num_experts)

    @classmethod
    def of_valid(cls, slots: Sequence[Sequence[int]], num_experts: int) -> Placement:
        """The same as `Placement(slots, num_experts)` of slots that are known to be right."""
        placement = object.__new__(cls)
        object.__setattr__(placement, "slots", tuple(map(tuple, slots)))
        object.__setattr__(placement, "num_experts", num_experts)
        return placement

    @property
    def num_ranks(self) -> int:
        """Ranks that have a list of slots."""
        return len(self.slots)

    @functools.cached_property
    def num_slots(self) -> int:
        """Slots of all ranks, empty ones included."""
        return sum(map(len, self.slots))

    @property
    def has_replicas(self) -> bool:
        """Return whether any expert lies in more than one slot."""
        return any(len(of_expert) > 1 for of_expert in self.slots_of_expert)

    @functools.cached_property
    def slot_rank(self) -> tuple[int, ...]:
        """The rank of every slot."""
        return tuple(rank_idx for rank_idx, of_rank in enumerate(self.slots) for _ in of_rank)

    @functools.cached_property
    def slot_expert(self) -> tuple[int, ...]:
        """The logical expert of every slot, -1 for an empty one: a table of physical experts."""
        return tuple(itertools.chain(*self.slots))

    @functools.cached_property
    def slots_of_expert(self) -> tuple[tuple[int, ...], ...]:
        """The slots of every logical expert, ascending, so that their ranks ascend, too."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot_idx, expert_idx in enumerate(self.slot_expert):
            if expert_idx != EMPTY_SLOT:
                found[expert_idx].append(slot_idx)
        return tuple(map(tuple, found))
