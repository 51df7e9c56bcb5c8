"""Ranks whose descriptions contradict each other: the error, and what it says."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from moe_comm.resharding.describe.metadata import ParameterMetadata

Shape = tuple[int, ...]


class PlanError(ValueError, RuntimeError):
    """A plan cannot be made, or is not sound; the message names the parameter.

    Also a `RuntimeError`, which callers of Megatron's planner expect.
    """


class Part(NamedTuple):
    """Part of a parameter that one rank holds, and what follows from it.

    Args:
        side: "source" or "target".
        rank: Rank that holds it.
        meta: Metadata that the rank states.
        whole: Shape of the whole tensor, as this rank and the members of its groups have it.
    """

    side: str
    rank: int
    meta: ParameterMetadata
    whole: Shape


def describe_disagreement(
    name: str, parts: Sequence[Part], agree: Callable[[Shape, Shape], bool]
) -> str:
    """Names the rank that most others contradict, and one of these.

    Args:
        name: Name of the parameter.
        parts: Parts of all ranks and both sides; some two of them contradict each other.
        agree: Whether two shapes of a whole tensor are views of each other.
    """
    counts: dict[Shape, int] = {}
    for part in parts:
        counts[part.whole] = counts.get(part.whole, 0) + 1
    support = {
        whole: sum(count for other, count in counts.items() if agree(whole, other))
        for whole in counts
    }
    accepted = max(counts, key=lambda whole: support[whole])
    if support[accepted] == len(parts):
        # Views of one shape need not be views of each other.
        one, other = next(
            pair
            for pair in itertools.combinations(parts, 2)
            if not agree(pair[0].whole, pair[1].whole)
        )
    else:
        other = next(part for part in parts if not agree(part.whole, accepted))
        others = [part for part in parts if agree(part.whole, accepted)]
        one = next((part for part in others if part.side == other.side), others[0])
    # The source first, where one is of each side.
    first, second = (other, one) if one.side == "target" != other.side else (one, other)
    return f"{name}: shapes do not add up: {_describe(first, parts)}; {_describe(second, parts)}"


def _describe(part: Part, parts: Sequence[Part]) -> str:
    text = f"{part.side} rank {part.rank} holds {part.meta.shape} ({_layout_of(part.meta)})"
    text += f" of {part.whole}"
    if part.meta.mesh is not None or part.meta.view is not None:
        return text
    shapes = {each.rank: each.meta.shape for each in parts if each.side == part.side}
    members = part.meta.tensor_parallel_group_ranks or []
    unlike = [
        f"rank {member} {shapes[member]}"
        for member in members
        if shapes.get(member, part.meta.shape) != part.meta.shape
    ]
    if part.meta.is_tp and unlike:
        text += f", of its tensor parallel group {', '.join(unlike)}"
    return text


def _layout_of(meta: ParameterMetadata) -> str:
    if meta.mesh is not None:
        return f"a DTensor over mesh {meta.mesh.mesh_shape}"
    if meta.view is not None:
        return "a view"
    parts = []
    num_tp_ranks = len(meta.tensor_parallel_group_ranks or ())
    if meta.is_tp and num_tp_ranks > 1:
        parts.append(f"sharded {num_tp_ranks} ways along dimension {meta.partition_dim}")
    if meta.is_ep and meta.global_expert_index is None:
        parts.append(f"experts over {len(meta.expert_parallel_group_ranks or ())} ranks")
    return ", ".join(parts) or "not sharded"
