"""Groups of the ranks of a model: tensor, pipeline, expert and data parallel."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist

if TYPE_CHECKING:
    from typing_extensions import Self

OFFSET_HINT = (
    "the groups of a model whose ranks do not begin at 0 need Parallelism.groups(rank - first, "
    "rank_offset=first), or src_rank_offset or dst_rank_offset of the refit, not both"
)
"""For messages about ranks that are not those of a model's groups."""


class RanksOfGroup(Protocol):
    """Interface of a group that planning needs: `RankGroup`, or a `torch.distributed` process group."""

    def size(self) -> int:
        """Ranks of the group."""

    def rank(self) -> int:
        """This rank's place in the group."""


@dataclasses.dataclass(frozen=True)
class RankGroup:
    """The ranks of a group, where planning needs no process group behind them.

    Args:
        ranks: Members, in group order, numbered in the group that plans are made over.
        member: The rank whose view this is.
    """

    ranks: tuple[int, ...]
    member: int

    def size(self) -> int:
        """Ranks of the group."""
        return len(self.ranks)

    def rank(self) -> int:
        """This rank's place in the group."""
        return self.ranks.index(self.member)


def group_ranks(group: RanksOfGroup) -> list[int]:
    """Members of a group, in group order: global ranks of a process group, `ranks` of a `RankGroup`."""
    if isinstance(group, RankGroup):
        return list(group.ranks)
    return list(dist.get_process_group_ranks(group))  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class ProcessGroups:
    """Groups that a module carries as `pg_collection`; Megatron's collection has the same attributes.

    Args:
        tp: Tensor parallel group of everything but experts.
        pp: Pipeline group.
        ep: Expert parallel group.
        dp: Ranks that hold the same of everything but experts.
        expt_tp: Tensor parallel group of experts.
        expt_dp: Ranks that hold the same experts.
    """

    tp: RanksOfGroup
    pp: RanksOfGroup
    ep: RanksOfGroup
    dp: RanksOfGroup
    expt_tp: RanksOfGroup
    expt_dp: RanksOfGroup


@dataclasses.dataclass(frozen=True)
class Parallelism:
    """Sizes of the parallel groups of a model over `num_ranks` ranks.

    Ranks are numbered as Megatron numbers them: tensor parallel fastest, then data (experts: expert
    parallel, then data), pipeline slowest.

    A rank's place in its group is the part that it holds.

    Args:
        num_ranks: Ranks that hold the model; what the sizes leave over is data parallel.
        tp: Tensor parallel size.
        pp: Pipeline stages.
        ep: Expert parallel size.
        expert_tp: Tensor parallel size of experts; None for `tp`.

    Raises:
        ValueError: The sizes do not divide `num_ranks`.

    Example:
        `Parallelism.parse("tp2.pp2.ep2.etp1", 8)` has these groups. Rank 3 holds the second half of what `tp`
        shares and, of four experts, the last two of its layers. Without `etp1`, experts are cut as `tp` cuts::

            rank | tp   | dp   | expt_tp | ep   | expt_dp | pp
            0    | 0, 1 | 0, 2 | 0       | 0, 1 | 0, 2    | 0, 4
            1    | 0, 1 | 1, 3 | 1       | 0, 1 | 1, 3    | 1, 5
            2    | 2, 3 | 0, 2 | 2       | 2, 3 | 0, 2    | 2, 6
            3    | 2, 3 | 1, 3 | 3       | 2, 3 | 1, 3    | 3, 7
            4    | 4, 5 | 4, 6 | 4       | 4, 5 | 4, 6    | 0, 4
            5    | 4, 5 | 5, 7 | 5       | 4, 5 | 5, 7    | 1, 5
            6    | 6, 7 | 4, 6 | 6       | 6, 7 | 4, 6    | 2, 6
            7    | 6, 7 | 5, 7 | 7       | 6, 7 | 5, 7    | 3, 7
    """

    num_ranks: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    expert_tp: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_ranks", "tp", "pp", "ep", "etp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.num_ranks % (self.tp * self.pp):
            raise ValueError(
                f"tp x pp = {self.tp} x {self.pp} does not divide {self.num_ranks} ranks"
            )
        if self.num_ranks % (self.ep * self.etp * self.pp):
            raise ValueError(
                f"ep x expert_tp x pp = {self.ep} x {self.etp} x {self.pp} does not divide "
                f"{self.num_ranks} ranks"
            )

    @classmethod
    def parse(cls, text: str, num_ranks: int) -> Self:
        """Read sizes such as "tp2.ep2", "ep4", "tp4.pp2.ep8.etp1" or "single" (all sizes 1).

        Raises:
            ValueError: A part is none of tp, pp, ep, etp with a number, or comes twice; or the
                sizes do not divide `num_ranks`.
        """
        sizes: dict[str, int] = {}
        for part in [] if text == "single" else text.lower().split("."):
            match = re.fullmatch(r"(tp|pp|ep|etp)([0-9]+)", part)
            if match is None:
                raise ValueError(
                    f"a layout is made of tpN, ppN, epN and etpN joined by dots, got {text!r}"
                )
            if match[1] in sizes:
                raise ValueError(f"{match[1]} comes twice in layout {text!r}")
            sizes[match[1]] = int(match[2])
        return cls(num_ranks, **{"expert_tp" if n == "etp" else n: s for n, s in sizes.items()})

    @property
    def etp(self) -> int:
        """Tensor parallel size of experts."""
        return self.tp if self.expert_tp is None else self.expert_tp

    def groups(self, rank: int, rank_offset: int = 0) -> ProcessGroups:
        """The groups of one rank.

        Args:
            rank: Rank in [0, num_ranks).
            rank_offset: Number that is added to every rank: where this model's ranks begin in the wider
                group.

        Raises:
            ValueError: `rank` is not in range.
        """
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank must be in [0, {self.num_ranks}), got {rank}; {OFFSET_HINT}")
        per_stage = self.num_ranks // self.pp
        stage, local = divmod(rank, per_stage)

        def group(step: int, count: int, first: int) -> RankGroup:
            ranks = tuple(rank_offset + first + step * i for i in range(count))
            return RankGroup(ranks, rank_offset + rank)

        def inside(sizes: Sequence[int], dim: int) -> RankGroup:
            """The group along one dimension of a stage; dimension 0 is the fastest."""
            step = 1
            for size in sizes[:dim]:
                step *= size
            index = local // step % sizes[dim]
            return group(step, sizes[dim], stage * per_stage + local - index * step)

        dense = (self.tp, per_stage // self.tp)
        experts = (self.etp, self.ep, per_stage // (self.etp * self.ep))
        return ProcessGroups(
            tp=inside(dense, 0),
            dp=inside(dense, 1),
            expt_tp=inside(experts, 0),
            ep=inside(experts, 1),
            expt_dp=inside(experts, 2),
            pp=group(per_stage, self.pp, local),
        )

    def __str__(self) -> str:
        parts = [f"tp{self.tp}"] if self.tp > 1 else []
        parts += [f"pp{self.pp}"] if self.pp > 1 else []
        parts += [f"ep{self.ep}"] if self.ep > 1 else []
        parts += [f"etp{self.expert_tp}"] if self.expert_tp is not None else []
        return ".".join(parts) or "single"
