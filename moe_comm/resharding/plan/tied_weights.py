"""Weights that a model has under several names: where they are read, and whether both sides agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_comm.resharding.describe.disagreement import PlanError
from moe_comm.resharding.plan.pipeline_stages import EMBEDDINGS
from moe_comm.resharding.plan.rank_metadata import ByRank

OUTPUT_LAYER = "output_layer.weight"


def source_name_of(dst_name: str, source_names: Mapping[str, Any] | set[str]) -> str | None:
    """The source parameter that a destination parameter is read from; None where there is none.

    A model whose output layer shares the weight of its embedding has no output layer of its own.
    """
    if dst_name in source_names:
        return dst_name
    if dst_name.endswith(OUTPUT_LAYER):
        prefix = dst_name.removesuffix(OUTPUT_LAYER)
        for name in (*(prefix + name for name in EMBEDDINGS), *EMBEDDINGS):
            if name in source_names:
                return name
    return None


def check_ties(by_rank: ByRank, all_sources: set[str]) -> None:
    """Check that what is one tensor in a destination is one in the source, too.

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
    return EMBEDDINGS[-1] if name.endswith((OUTPUT_LAYER, *EMBEDDINGS)) else name


def repeated_embeddings(
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
