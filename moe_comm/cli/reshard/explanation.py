"""Text and JSON of `moe-comm reshard explain`."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.text import Text

from moe_comm.cli.reshard.model_sides import ModelSide, RankPart
from moe_comm.cli.reshard.report import pairs_table, size_text
from moe_comm.cli.reshard.traffic import Traffic
from moe_comm.resharding.describe.tensor_layout import Shape, common_shape

_NUM_LISTED = 8
_NUM_PAIRS = 32


@dataclasses.dataclass
class TensorKind:
    """Tensors of a checkpoint whose names differ in numbers alone.

    Args:
        name: Name with "*" for numbers.
        shape: Shape of a whole tensor, or of a rank's part if a side does not say it.
        names: Names of all of them.
        places: Ranks of the source and of the destination, by what a rank's own model calls the
            place.
    """

    name: str
    shape: Shape
    names: set[str] = dataclasses.field(default_factory=set)
    places: tuple[dict[str, set[int]], dict[str, set[int]]] = dataclasses.field(
        default_factory=lambda: ({}, {})
    )

    def to_dict(self) -> dict[str, Any]:
        """Return the kind as JSON writes it."""
        sides = zip(("source", "destination"), self.places, strict=True)
        return {
            "name": self.name,
            "shape": list(self.shape),
            "num_tensors": len(self.names),
            **{
                side: [{"name": name, "ranks": sorted(ranks)} for name, ranks in some.items()]
                for side, some in sides
            },
        }


def _pattern(name: str) -> str:
    return re.sub(r"(?<![^.])[0-9]+(?![^.])", "*", name)


def kinds_of(
    sources: Sequence[RankPart], destinations: Sequence[RankPart], destination_offset: int
) -> list[TensorKind]:
    """Return the kinds of tensors on both sides with their places, in the order in which ranks name them."""
    shapes: dict[str, Shape] = {}
    held: list[
        tuple[str, int, int, str]
    ] = []  # name, side, rank, and what the rank calls the place
    for side, parts in enumerate((sources, destinations)):
        for rank, (metadata, own_names) in enumerate(parts, side * destination_offset):
            for name, meta in metadata.named_kinds():
                if meta.view is not None:
                    shapes[name] = meta.view.whole_shape
                shapes.setdefault(name, meta.shape)
                held.append((name, side, rank, _pattern(own_names.get(name, "views"))))
    kinds: dict[tuple[str, Shape], TensorKind] = {}
    for name, side, rank, place in held:
        key = _pattern(name), shapes[name]
        kind = kinds.setdefault(key, TensorKind(*key))
        kind.names.add(name)
        kind.places[side].setdefault(place, set()).add(rank)
    return list(kinds.values())


def differing_shapes(
    sources: Sequence[RankPart], destinations: Sequence[RankPart]
) -> dict[str, tuple[Shape, Shape]]:
    """Tensors whose shape on disk is not that of the other side, by name: both."""
    shapes: tuple[dict[str, Shape], dict[str, Shape]] = ({}, {})
    for found, parts in zip(shapes, (sources, destinations), strict=True):
        for metadata, _ in parts:
            for name, meta in metadata.named_kinds():
                if meta.view is not None:
                    found.setdefault(name, meta.view.whole_shape)
    pairs = {
        name: (shape, shapes[1][name]) for name, shape in shapes[0].items() if name in shapes[1]
    }
    return {name: pair for name, pair in pairs.items() if common_shape(pair) is None}


def _ranges(ranks: Iterable[int]) -> str:
    """Text of ranks, such as "rank 3" and "ranks 0-3, 6"."""
    some = sorted(ranks)
    runs = [
        [rank for _, rank in group]
        for _, group in itertools.groupby(enumerate(some), key=lambda pair: pair[1] - pair[0])
    ]
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(some) > 1 else ''} {', '.join(texts)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """Tensors that would move between two models, and tensors that would not.

    Args:
        source: Source as the command line names it.
        destination: Destination as the command line names it.
        is_disjoint: Whether the destination has ranks of its own.
        kinds: Kinds of tensors, and where they lie.
        missing: Names that no source has.
        extra: Names that no destination takes.
        differing: Shapes of both sides for tensors that are no views of each other.
        traffic: Traffic of all destination ranks; None if there is no plan.
        are_pairs_verified: Whether both ends of every piece were compared.
    """

    source: ModelSide
    destination: ModelSide
    is_disjoint: bool
    kinds: Sequence[TensorKind]
    missing: Sequence[str]
    extra: Sequence[str]
    differing: Mapping[str, tuple[Shape, Shape]]
    traffic: Traffic | None
    are_pairs_verified: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as JSON writes it."""
        traffic = self.traffic
        return {
            **{
                name: {"model": side.text, "layout": side.layout, "ranks": side.num_ranks}
                for name, side in (("source", self.source), ("destination", self.destination))
            },
            "disjoint": self.is_disjoint,
            "tensors": [kind.to_dict() for kind in self.kinds],
            "missing": list(self.missing),
            "extra": list(self.extra),
            "differing": [
                {"name": name, "source_shape": list(src), "destination_shape": list(dst)}
                for name, (src, dst) in self.differing.items()
            ],
            "total_bytes": None if traffic is None else traffic.total_bytes,
            "local_bytes": None if traffic is None else traffic.local_bytes,
            "num_pieces": None if traffic is None else sum(traffic.pieces_per_rank.values()),
            "bytes_per_pair": None
            if traffic is None
            else [
                {"source": src, "destination": dst, "bytes": num_bytes}
                for (src, dst), num_bytes in sorted(traffic.bytes_per_pair.items())
            ],
            "are_pairs_verified": self.are_pairs_verified,
        }

    def render(self) -> Group:
        """Both sides, what lies where, what is missing or extra, and bytes."""
        parts: list[Any] = [Text(line) for line in self._lines()]
        traffic = self.traffic
        if traffic is not None:
            num_pieces = sum(traffic.pieces_per_rank.values())
            parts += [
                Text(
                    f"\n{size_text(traffic.total_bytes)} in {num_pieces:,} pieces, of it "
                    f"{size_text(traffic.local_bytes)} within a rank"
                ),
                pairs_table(traffic, _NUM_PAIRS),
            ]
            verified = "every destination element is written exactly once"
            if self.are_pairs_verified:
                verified += ", both ends of every piece agree"
            parts.append(Text(f"verified: {verified}"))
        return Group(*parts)

    def _lines(self) -> Iterator[str]:
        first_rank = 0
        for what, side in (("from", self.source), ("to", self.destination)):
            layout = f", {side.layout}" if side.layout else ""
            ranks = _ranges(range(first_rank, first_rank + side.num_ranks))
            yield f"{what:4} {side.text}{layout}, {ranks}"
            first_rank = side.num_ranks if self.is_disjoint else 0
        for kind in self.kinds:
            if not all(kind.places) or not self.differing.keys().isdisjoint(kind.names):
                continue
            number = f", {len(kind.names):,} tensors" if len(kind.names) > 1 else ""
            yield f"\n{kind.name} {kind.shape}{number}"
            for what, places in zip(("from", "to"), kind.places, strict=True):
                yield from (f"  {what:4} {at}, {_ranges(ranks)}" for at, ranks in places.items())
        shapes = {name: kind.shape for kind in self.kinds for name in kind.names}
        for what, why, names in (
            ("missing", "no source has it", {name: shapes[name] for name in self.missing}),
            ("extra", "no destination takes it", {name: shapes[name] for name in self.extra}),
            ("differs", "shapes of source and destination", self.differing),
        ):
            yield from _listed(what, why, names)


def _listed(what: str, why: str, names: Mapping[str, tuple[Any, ...]]) -> Iterator[str]:
    """Lines of names with their shapes, of those that differ in numbers alone one."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_pattern(name), []).append(name)
    for number, (pattern, some) in enumerate(groups.items()):
        lead = "\n" if not number else ""
        if number == _NUM_LISTED:
            yield f"{what}: {len(groups) - number} more kinds of names"
            break
        more = f", and {len(some) - 1:,} more like {pattern}" if len(some) > 1 else ""
        yield f"{lead}{what}: {some[0]} {names[some[0]]}: {why}{more}"
