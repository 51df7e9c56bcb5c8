"""Parameters that one side alone has: which they are, and what it means.

A destination without a source is an error, always. A source without a destination is one where the
planner is strict.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from moe_comm.resharding.describe.disagreement import PlanError
from moe_comm.resharding.plan.pipeline_stages import EMBEDDINGS
from moe_comm.resharding.plan.rank_metadata import ByRank
from moe_comm.resharding.plan.tied_weights import (
    OUTPUT_LAYER,
    repeated_embeddings,
    source_name_of,
)

# A parametrization's name of what it computes from.
_PARAMETRIZED = re.compile(r"(?<![^.])parametrizations[.]([^.]+)[.]original[0-9]*$")
# Other names of weights that many models tie to their embedding.
_OUTPUT_LIKE = re.compile(r"(^|[._])(output|output_layer|head)[.]weight$")


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
    stem = dst_name.partition("experts.")[0] + "experts."
    parts = (name for name in all_sources if re.match(re.escape(stem) + "[^0-9]", name))
    stacked = min(parts, default=None) if dst_name[len(stem) :][:1].isdigit() else None
    if stacked is not None:
        text += (
            f" The source has '{stacked}', all experts in one: a model of transformers goes by its "
            "names on disk as transformers_views(model)."
        )
    if _OUTPUT_LIKE.search(dst_name):
        text += (
            f" Where the source ties it to its embedding: only a parameter named {OUTPUT_LAYER} is read "
            f"from there, and only from {' or '.join(EMBEDDINGS)}; untie it there, or tie both sides."
        )
    return PlanError(text)


def missing_destination(extra: set[str], by_rank: ByRank) -> PlanError:
    """Return the error of source parameters that no destination takes."""
    name = min(extra)
    holder = next(number for number, (src, _) in enumerate(by_rank) if name in src.resolved_names)
    num_others = len(extra) - 1
    more = "" if not num_others else f", nor have {num_others} others"
    if num_others == 1:
        more = f", nor has '{max(extra)}'"
    return PlanError(
        f"source parameter '{name}' on rank {holder} has no destination{more}; strict=False takes the others"
    )


def all_names(by_rank: ByRank) -> tuple[set[str], set[str]]:
    """Names of sources and of destinations."""
    return (
        {name for source, _ in by_rank for name in source.resolved_names},
        {name for _, destination in by_rank for name in destination.resolved_names},
    )


def extra_sources(
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
    extra -= repeated_embeddings(extra, all_destinations, by_rank)
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
    all_sources, all_destinations = all_names(by_rank)
    read = {name: source_name_of(name, all_sources) for name in all_destinations - all_sources}
    tied = {name: source for name, source in read.items() if source is not None}
    extra = extra_sources(by_rank, all_sources, all_destinations, tied)
    return sorted(read.keys() - tied.keys()), sorted(extra)
