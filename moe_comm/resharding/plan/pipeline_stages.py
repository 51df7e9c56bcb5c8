"""Names that several pipeline stages of a model use, each for a parameter of its own."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from moe_comm.resharding.describe.disagreement import PlanError
from moe_comm.resharding.describe.metadata import ParameterMetadata

EMBEDDINGS = ("embedding.word_embeddings.weight", "word_embeddings.weight")
"""Names of the embedding that an output layer, or another stage, may share its weight with."""

_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")


class Held(Protocol):
    """One side of what one rank holds."""

    @property
    def resolved_names(self) -> Sequence[str]:
        """Names in the whole model, as far as the rank knows them."""

    @property
    def kinds(self) -> Iterable[ParameterMetadata]:
        """Metadata of the kinds of parameters that it holds."""

    def kind_of(self, name: str) -> ParameterMetadata:
        """Metadata of one parameter's kind, by its name in the whole model."""


class _Member(NamedTuple):
    """A rank of a pipeline."""

    rank: int
    stage: int


class _Pipelines:
    """The pipelines of one side, and the names that their stages use for different parameters.

    Args:
        by_rank: Metadata of what each rank holds of the side.
    """

    def __init__(self, by_rank: Sequence[Held]) -> None:
        self._by_rank = by_rank
        self.stage_of: dict[int, int] = {}
        members: dict[tuple[int, ...], list[_Member]] = {}
        for rank, held in enumerate(by_rank):
            kind = next((kind for kind in held.kinds if kind.pipeline_stage is not None), None)
            if kind is not None and kind.pipeline_stage is not None:
                pipeline = tuple(kind.pipeline_parallel_group_ranks or ())
                members.setdefault(pipeline, []).append(_Member(rank, kind.pipeline_stage))
                self.stage_of[rank] = kind.pipeline_stage
        self.sizes = {len(pipeline) for pipeline in members}
        self.repeated: dict[str, tuple[_Member, _Member]] = {}
        for stages in members.values():
            self._find_repeated(stages)

    def _find_repeated(self, pipeline: Sequence[_Member]) -> None:
        seen: set[str] = set()
        repeated: set[str] = set()
        names_of = {member: set(self._by_rank[member.rank].resolved_names) for member in pipeline}
        for names in names_of.values():
            repeated |= seen & names
            seen |= names
        for name in repeated - self.repeated.keys():
            holders = [member for member in pipeline if name in names_of[member]]
            if not all(self._is_shared(name, member.rank) for member in holders):
                self.repeated[name] = (holders[0], holders[1])

    def _is_shared(self, name: str, rank: int) -> bool:
        return name.endswith(EMBEDDINGS) or self._by_rank[rank].kind_of(name).is_shared_by_stages

    def stages_of(self, families: Collection[str]) -> dict[str, set[int | None]]:
        """The stages that hold each name of some families; None stands for ranks of no stage."""
        stages: dict[str, set[int | None]] = {}
        for rank, held in enumerate(self._by_rank):
            stage = self.stage_of.get(rank)
            for name in held.resolved_names:
                if _family(name) in families:
                    stages.setdefault(name, set()).add(stage)
        return stages


def _family(name: str) -> str:
    """A name without its numbers: layers of one kind have the same."""
    return _NUMBER.sub("*", name)


def names_told_apart(
    sources: Sequence[Held], destinations: Sequence[Held]
) -> tuple[list[Mapping[str, str]], list[Mapping[str, str]]]:
    """Names in the whole model, where stages of a pipeline use one for different parameters.

    Stages that number their layers from 0 are matched by their own number, where both models have
    as many stages, each with the same layers.

    Args:
        sources: Metadata of what each rank holds of the source model.
        destinations: Metadata of what each rank holds of the destination model.

    Returns:
        New names of those that change, for the sources and the destinations of each rank.

    Raises:
        PlanError: Nothing says which parameter of the one model is which of the other; names two
            ranks.
    """
    sides = {"source": _Pipelines(sources), "destination": _Pipelines(destinations)}
    src, dst = sides.values()
    read = set().union(*(held.resolved_names for held in destinations)) if src.repeated else set()
    repeated = (src.repeated.keys() & read) | dst.repeated.keys()
    if repeated:
        families = {_family(name) for name in repeated}
        src_stages, dst_stages = src.stages_of(families), dst.stages_of(families)
        if src.sizes != dst.sizes or len(src.sizes) > 1 or src_stages != dst_stages:
            name = min(repeated)
            side = "source" if name in src.repeated else "destination"
            raise PlanError(_not_told_apart(name, side, sides[side], src_stages, dst_stages))
    return (
        [_renamed(held, rank, repeated, src) for rank, held in enumerate(sources)],
        [_renamed(held, rank, repeated, dst) for rank, held in enumerate(destinations)],
    )


def _renamed(held: Held, rank: int, repeated: set[str], side: _Pipelines) -> Mapping[str, str]:
    if not repeated:
        return {}
    stage = side.stage_of.get(rank)
    return {name: f"{name} of stage {stage}" for name in repeated & set(held.resolved_names)}


def _not_told_apart(
    name: str,
    side: str,
    pipelines: _Pipelines,
    src_stages: Mapping[str, set[int | None]],
    dst_stages: Mapping[str, set[int | None]],
) -> str:
    first, second = pipelines.repeated[name]
    odd = next(
        (
            each
            for each in (name, *sorted(src_stages.keys() | dst_stages.keys()))
            if src_stages.get(each) != dst_stages.get(each)
        ),
        name,
    )
    return (
        f"{name}: ranks {first.rank} and {second.rank} hold a {side} parameter of this name on "
        f"pipeline stages {first.stage} and {second.stage}, and nothing says which it is in the "
        "whole model. Give each numbered layer of both models a layer_number, counted from 1 over "
        "all stages. Without it stages are matched by their number, where both models have as many "
        f"stages with the same layers; {odd} is on {_stages_text(src_stages.get(odd))} of the source "
        f"and {_stages_text(dst_stages.get(odd))} of the destination. A parameter that is one and "
        "the same on these stages says so by its attribute shared_embedding = True"
    )


def _stages_text(stages: set[int | None] | None) -> str:
    if not stages:
        return "no stage"
    known = sorted(stage for stage in stages if stage is not None)
    return f"stages {known}" if known else "ranks without stages"
