"""Source that a destination parameter is read from, by their names."""

from __future__ import annotations

from moe_comm.resharding.plan.pipeline_stages import names_told_apart
from moe_comm.resharding.plan.rank_metadata import ByRank, RankMetadata
from moe_comm.resharding.plan.tied_weights import check_ties, source_name_of
from moe_comm.resharding.plan.unmatched_names import (
    all_names,
    extra_sources,
    missing_destination,
    missing_source,
)


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
        strict: Whether to refuse source parameters that no destination has.

    Returns:
        Names of all destinations, and source names by those of destinations that are called otherwise.

    Raises:
        PlanError: As of `holders_of_ranks`.
    """
    all_sources, all_destinations = all_names(by_rank)
    tied: dict[str, str] = {}
    for dst_name in sorted(all_destinations - all_sources):
        src_name = source_name_of(dst_name, all_sources)
        if src_name is None:
            holder = next(
                number for number, (_, dst) in enumerate(by_rank) if dst_name in dst.resolved_names
            )
            raise missing_source(dst_name, holder, all_sources)
        tied[dst_name] = src_name
    check_ties(by_rank, all_sources)
    extra = extra_sources(by_rank, all_sources, all_destinations, tied) if strict else set()
    if extra:
        raise missing_destination(extra, by_rank)
    return all_destinations, tied
