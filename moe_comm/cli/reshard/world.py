"""Two layouts of a described model, and the plans between them, without a tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from moe_comm.cli.reshard.model_shapes import MoEShape, TensorList, roster
from moe_comm.resharding.describe.metadata import ParameterMetadata
from moe_comm.resharding.describe.parallelism import Parallelism
from moe_comm.resharding.plan.planner import build_plan_from_rank_metadata
from moe_comm.resharding.plan.rank_metadata import (
    RankMetadata,
    decode_rank_metadata,
    encode_rank_metadata,
)
from moe_comm.resharding.plan.reshard_plan import ReshardPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanningCase:
    """A model and where its weights are to go.

    Args:
        shape: The model, or a list of tensors.
        source: Layout of the ranks 0, 1, ... that hold it.
        destination: Layout of the ranks that take it.
        is_disjoint: Whether the destination's ranks come after the source's; else they begin at 0
            too.
        source_dtype: Type of the source's parameters.
        destination_dtype: Type of the destination's parameters.
    """

    shape: MoEShape | TensorList
    source: Parallelism
    destination: Parallelism
    is_disjoint: bool = False
    source_dtype: torch.dtype = torch.bfloat16
    destination_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        self.shape.check(self.source)
        self.shape.check(self.destination)

    @property
    def destination_offset(self) -> int:
        """The first rank of the destination."""
        return self.source.num_ranks if self.is_disjoint else 0

    @property
    def num_ranks(self) -> int:
        """Ranks of the group that plans are made over."""
        return max(self.source.num_ranks, self.destination_offset + self.destination.num_ranks)

    @property
    def destination_ranks(self) -> range:
        """The ranks that receive."""
        return range(self.destination_offset, self.destination_offset + self.destination.num_ranks)

    def gathered(self) -> Iterator[tuple[list[ParameterMetadata], list[ParameterMetadata]]]:
        """Yield every rank's metadata of its part of the source and of the destination, in rank order."""
        for rank in range(self.num_ranks):
            source: list[ParameterMetadata] = []
            destination: list[ParameterMetadata] = []
            if rank < self.source.num_ranks:
                source = roster(self.shape, self.source, rank, dtype=self.source_dtype)
            if rank in self.destination_ranks:
                destination = roster(
                    self.shape,
                    self.destination,
                    rank - self.destination_offset,
                    self.destination_offset,
                    self.destination_dtype,
                )
            yield source, destination


class Planner:
    """Plans of any rank, from what all ranks have told each other.

    Args:
        by_rank: `(source, destination)` of each rank.
        strict: Whether plans are strict, as in `build_plan_from_rank_metadata`.
    """

    def __init__(
        self, by_rank: Sequence[tuple[RankMetadata, RankMetadata]], *, strict: bool = False
    ) -> None:
        self.num_ranks = len(by_rank)
        self._by_rank = by_rank
        self._strict = strict

    @classmethod
    def of_case(cls, case: PlanningCase) -> Planner:
        """Gather the metadata of a described model once."""
        # Encoded, as ranks send them to each other: a whole world of metadata objects would take gigabytes.
        return cls(
            [
                (
                    decode_rank_metadata(encode_rank_metadata(source)),
                    decode_rank_metadata(encode_rank_metadata(destination)),
                )
                for source, destination in case.gathered()
            ]
        )

    def plan(self, rank: int) -> ReshardPlan:
        """The plan of one rank, verified by itself.

        Raises:
            ValueError: The rank is not in the group, or the layouts do not fit each other.
        """
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank must be in [0, {self.num_ranks}), got {rank}")
        return build_plan_from_rank_metadata(self._by_rank, rank, strict=self._strict)
