"""Layout of a rank's tensor in the whole one, and the same under a finer view."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import NamedTuple

from moe_comm.resharding.describe import intervals
from moe_comm.resharding.describe.intervals import Interval, Intervals
from moe_comm.resharding.describe.metadata import ParameterMetadata

Shape = tuple[int, ...]


class Holder(NamedTuple):
    """A rank and what it says about a parameter that it holds."""

    rank: int
    meta: ParameterMetadata


@dataclasses.dataclass(frozen=True)
class Layout:
    """Layout of one rank's tensor in the whole one: the product, over dimensions, of intervals.

    Args:
        view: Shape that the rank's tensor is viewed as.
        global_shape: Shape of the whole tensor, with as many dimensions.
        dims: Intervals that the rank holds, per dimension.
    """

    view: Shape
    global_shape: Shape
    dims: tuple[Intervals, ...]


def _prefix_products(shape: Shape) -> set[int]:
    return {1, *itertools.accumulate(shape, lambda a, b: a * b)}


def common_shape(shapes: Iterable[Shape]) -> Shape | None:
    """The finest of shapes that are views of each other, without sizes of 1; None where none is."""
    distinct = set(shapes)
    if len(distinct) == 1:
        return distinct.pop()
    cuts = [_prefix_products(shape) for shape in distinct]
    finest = max(cuts, key=len)
    is_view = len({max(products) for products in cuts}) == 1 and 0 not in finest
    if not is_view or not all(products <= finest for products in cuts):
        return None
    return tuple(after // before for before, after in itertools.pairwise(sorted(finest)))


def split(held: Intervals, factors: Shape) -> list[tuple[int, Intervals]] | None:
    """One dimension as several: per factor, the local size and what is held; None if uneven."""
    if len(factors) == 1:
        return [(intervals.total_length(held), held)]
    inner = intervals.num_elements(factors[1:])
    if all(start % inner == 0 and length % inner == 0 for start, _, length in held):
        outer = tuple(Interval(*(number // inner for number in part)) for part in held)
        rest = [(size, intervals.whole(size)) for size in factors[1:]]
        return [(intervals.total_length(outer), outer), *rest]
    if len(held) == 1:
        start, _, length = held[0]
        if start // inner == (start + length - 1) // inner:
            rest_held = split((Interval(start % inner, 0, length),), factors[1:])
            if rest_held is not None:
                return [(1, (Interval(start // inner, 0, 1),)), *rest_held]
    return None


def refine(layout: Layout, shape: Shape) -> Layout | None:
    """The same layout with the whole tensor viewed as `shape`, which cuts it more finely."""
    if layout.global_shape == shape:
        return layout
    remaining = list(shape)
    view: list[int] = []
    dims: list[Intervals] = []
    for size, held in zip(layout.global_shape, layout.dims, strict=True):
        factors: list[int] = []
        while intervals.num_elements(factors) < size:
            factors.append(remaining.pop(0))
        if not factors:
            continue
        held_of_factors = split(held, tuple(factors))
        if held_of_factors is None:
            return None
        for local_size, part in held_of_factors:
            view.append(local_size)
            dims.append(part)
    return Layout(tuple(view), shape, tuple(dims))
