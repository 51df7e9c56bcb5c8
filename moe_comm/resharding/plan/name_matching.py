"""Which source a destination parameter is read from, by their names, and what it means where there is none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from moe_comm.resharding.describe.disagreement import PlanError
from moe_comm.resharding.plan.pipeline_stages import EMBEDDINGS, names_told_apart
from moe_comm.resharding.plan.rank_metadata import ByRank, RankMetadata

__all__ = [
    "matched_names",
    "missing_source",
    "source_name_of",
    "told_apart",
    "unmatched_names",
]

_OUTPUT = "output_layer.weight"
# A parametrization's name of what it computes from.
_PARAMETRIZED = re.compile(r"(?<![^.])parametrizations[.]([^.]+)[.]original[0-9]*$")
# Other names of weights that many models tie to their embedding.
_OUTPUT_LIKE = re.compile(r"(^|[._])(output|output_layer|head)[.]weight$")


def source_name_of(dst_name: str, source_names: Mapping[str, Any] | set[str]) -> str | None:
    """The source parameter that a destination parameter is read from; None where there is none.

    A model whose output layer shares the weight of its embedding has no output layer of its own.
    """
    if dst_name in source_names:
        return dst_name
    if dst_name.endswith(_OUTPUT):
        prefix = dst_name.removesuffix(_OUTPUT)
        for name in (*(prefix + name for name in EMBEDDINGS), *EMBEDDINGS):
            if name in source_names:
                return name
    return None


def missing_source(dst_name: str, rank: int, all_sources: set[str]) -> PlanError:
    """Return the error of a destination parameter that no source has, with the likely reason."""
    text = f"Destination parameter '{dst_name}' on rank {rank} not found in source model."
    computed = _PARAMETRIZED.sub(r"\1", dst_name)
    original = min(
        (name for name in all_sources if _PARAMETRIZED.sub(r"\1", name) == computed), default=None
    )
    if original is not None:
        text += (
            f" The source has '{original}': one side computes the weight by a parametrization that "
            "the other does not have. Register it on both, or refit between copies without it: "
            "torch.nn.utils.parametrize.remove_parametrizations(module, "
            f"'{computed.rpartition('.')[2]}')."
        )
    if _OUTPUT_LIKE.search(dst_name):
        text += (
            f" Where the source ties it to its embedding: only a parameter named {_OUTPUT} is read "
            f"from there, and only from {' or '.join(EMBEDDINGS)}."
        )
    return PlanError(text)


def _check_ties(by_rank: ByRank, all_sources: set[str]) -> None:
    """Return whether what is one tensor in a destination is one in the source, too.

    Raises:
        PlanError: It is read from several tensors, whose values may differ.
    """
    for rank, (_, destination) in enumerate(by_rank):
        for names in destination.ties:
            read = {
                source
                for name in names
                if (source := source_name_of(name, all_sources)) is not None
            }
            held = {
                number: read.intersection(source.resolved_names)
                for number, (source, _) in enumerate(by_rank)
            }
            apart = [
                number
                for number, some in held.items()
                if len(some) > 1 and not any(some <= set(tie) for tie in by_rank[number][0].ties)
            ]
            # An output layer repeats its embedding on another pipeline stage.
            if not apart and (read in held.values() or len(set(map(_embedding_of, read))) < 2):
                continue
            holders = {name: number for number in held for name in held[number]}
            holders.update(dict.fromkeys(held[apart[0]], apart[0]) if apart else {})
            places = " and ".join(f"{name} on rank {holders[name]}" for name in sorted(holders))
            raise PlanError(
                f"{' and '.join(names)} are one tensor on destination rank {rank}, but apart in the "
                f"source: {places}. Give each name a tensor of its own in the destination, or tie "
                "them in the source"
            )


def _embedding_of(name: str) -> str:
    """The embedding that an output layer may repeat; other names themselves."""
    return EMBEDDINGS[-1] if name.endswith((_OUTPUT, *EMBEDDINGS)) else name


def _repeated_embeddings(
    extra: set[str],
    all_destinations: set[str],
    by_rank: ByRank,
) -> set[str]:
    """Source output layers that hold their embedding's weight again, on another pipeline stage.

    A rank that holds an embedding and an output layer has two weights.
    """
    repeated = set()
    for name in extra:
        embedding = source_name_of(name, all_destinations)
        if embedding is not None and not any(
            {name, embedding} <= set(source.resolved_names) for source, _ in by_rank
        ):
            repeated.add(name)
    return repeated


def _all_names(by_rank: ByRank) -> tuple[set[str], set[str]]:
    """Names of sources and of destinations."""
    return (
        {name for source, _ in by_rank for name in source.resolved_names},
        {name for _, destination in by_rank for name in destination.resolved_names},
    )


def _extra_sources(
    by_rank: ByRank, all_sources: set[str], all_destinations: set[str], tied: Mapping[str, str]
) -> set[str]:
    """Source parameters that no destination takes.

    Args:
        by_rank: `(source, destination)` of each rank.
        all_sources: Names of all ranks.
        all_destinations: Names of all ranks.
        tied: Source names by those of destinations that are called otherwise.
    """
    extra = all_sources - all_destinations - set(tied.values())
    extra -= _repeated_embeddings(extra, all_destinations, by_rank)
    taken = all_sources - extra
    return extra - {
        name
        for source, _ in by_rank
        for tie in source.ties
        if not taken.isdisjoint(tie)
        for name in tie
    }


def unmatched_names(by_rank: ByRank) -> tuple[list[str], list[str]]:
    """Destination parameters that no source has, and source parameters that no destination takes.

    Args:
        by_rank: `(source, destination)` of each rank, told apart.
    """
    all_sources, all_destinations = _all_names(by_rank)
    read = {name: source_name_of(name, all_sources) for name in all_destinations - all_sources}
    tied = {name: source for name, source in read.items() if source is not None}
    extra = _extra_sources(by_rank, all_sources, all_destinations, tied)
    return sorted(read.keys() - tied.keys()), sorted(extra)


def told_apart(
    by_rank: ByRank,
) -> list[tuple[RankMetadata, RankMetadata]]:
    """Rename what ranks hold so that each name stands for one parameter of the whole model.

    Args:
        by_rank: `(source, destination)` of each rank.

    Raises:
        PlanError: Stages of a pipeline use a name for different parameters, and nothing says which.
    """
    names = names_told_apart([source for source, _ in by_rank], [dst for _, dst in by_rank])
    return [
        (source.renamed(src_names), destination.renamed(dst_names))
        for (source, destination), src_names, dst_names in zip(by_rank, *names, strict=True)
    ]


def matched_names(by_rank: ByRank, *, strict: bool = False) -> tuple[set[str], dict[str, str]]:
    """Match the names of destinations with those of sources.

    Args:
        by_rank: `(source, destination)` of each rank, told apart.
        strict: Refuse source parameters that no destination has.

    Returns:
        Names of all destinations, and source names by those of destinations that are called otherwise.

    Raises:
        PlanError: As of `holders_of_ranks`.
    """
    all_sources, all_destinations = _all_names(by_rank)
    tied: dict[str, str] = {}
    for dst_name in sorted(all_destinations - all_sources):
        src_name = source_name_of(dst_name, all_sources)
        if src_name is None:
            holder = next(
                number for number, (_, dst) in enumerate(by_rank) if dst_name in dst.resolved_names
            )
            raise missing_source(dst_name, holder, all_sources)
        tied[dst_name] = src_name
    _check_ties(by_rank, all_sources)
    extra = _extra_sources(by_rank, all_sources, all_destinations, tied) if strict else set()
    if extra:
        name = min(extra)
        holder = next(
            number for number, (src, _) in enumerate(by_rank) if name in src.resolved_names
        )
        num_others = len(extra) - 1
        more = "" if not num_others else f", nor have {num_others} others"
        if num_others == 1:
            more = f", nor has '{max(extra)}'"
        raise PlanError(
            f"source parameter '{name}' on rank {holder} has no destination{more}; strict=False takes the others"
        )
    return all_destinations, tied
