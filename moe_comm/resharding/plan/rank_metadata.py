"""Metadata of every rank about its parameters, small on the wire and quick to read.

A rank has thousands of parameters but few kinds of them: layers repeat. So each kind is stated
once and, per parameter, its name and the number of its kind.
"""

from __future__ import annotations

import dataclasses
import operator
import re
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from moe_comm.peers.plain_data import decode_plain, encode_plain
from moe_comm.resharding.describe.checkpoint_views import unique_names
from moe_comm.resharding.describe.disagreement import PlanError
from moe_comm.resharding.describe.metadata import ParameterMetadata

# Fields of each parameter's own; the others make up its kind.
_OWN_FIELDS = ("name", "resolved_name", "global_expert_index", "owner_rank", "place")
_KIND_FIELDS = tuple(
    field.name for field in dataclasses.fields(ParameterMetadata) if field.name not in _OWN_FIELDS
)
_kind_fields_of = operator.attrgetter(*_KIND_FIELDS)
# Separates names, which are Python identifiers joined by dots.
_SEPARATOR = "\n"
# Lone surrogates are no text that could be written or told.
_IN_NO_NAME = re.compile("[\n\ud800-\udfff]")


def resolved_name(meta: ParameterMetadata) -> str:
    """Name in the whole model."""
    return meta.name if meta.resolved_name is None else meta.resolved_name


def kind_key(meta: ParameterMetadata) -> tuple[Any, ...]:
    """Return the fields that two parameters of one kind have in common; hashable."""
    values: tuple[Any, ...] = _kind_fields_of(meta)
    if list in map(type, values):
        values = tuple(tuple(value) if isinstance(value, list) else value for value in values)
    return (*values, meta.global_expert_index is None)


class Own(NamedTuple):
    """A parameter of the rank that plans: name in its module and in the whole model, kind, and place."""

    name: str
    resolved_name: str
    kind: ParameterMetadata
    place: tuple[int, int] | None


class RankMetadata:
    """One side, source or destination, of what one rank holds.

    Args:
        kinds: Metadata without names; `global_expert_index` is 0 where each parameter has its own.
        kind_idx: Number of each parameter's kind.
        resolved_names: Name of each parameter in the whole model. Those of views may repeat.
        own: Names in the rank's module, owners, and indices of experts, compressed.
        ties: Names in the whole model of each tensor that has several.
        places: Place of each view, see `ParameterMetadata`; empty where the parameters are not views.
    """

    def __init__(
        self,
        kinds: list[ParameterMetadata],
        kind_idx: Sequence[int],
        resolved_names: list[str],
        own: bytes,
        ties: Sequence[tuple[str, ...]] = (),
        places: Sequence[tuple[int, int] | None] = (),
    ) -> None:
        self.kinds = kinds
        self.kind_idx = kind_idx
        self.resolved_names = resolved_names
        self._own = own
        self.ties = ties
        self.places: Sequence[tuple[int, int] | None] = places or [None] * len(kind_idx)
        self.keys = unique_names(resolved_names) if any(self.places) else resolved_names
        """Names of the parameters, each of which no other one of this rank has."""

    def __len__(self) -> int:
        return len(self.kind_idx)

    def kind_of(self, name: str) -> ParameterMetadata:
        """The kind of one parameter, by its name in the whole model."""
        return self.kinds[self.kind_idx[self.resolved_names.index(name)]]

    def named_kinds(self) -> Iterator[tuple[str, ParameterMetadata]]:
        """Name in the whole model and kind of every parameter, in the rank's order."""
        kinds = map(self.kinds.__getitem__, self.kind_idx)
        return zip(self.resolved_names, kinds, strict=True)

    def renamed(self, names: Mapping[str, str]) -> RankMetadata:
        """The same with other names in the whole model."""
        if not names:
            return self
        resolved = [names.get(name, name) for name in self.resolved_names]
        ties = [tuple(names.get(name, name) for name in tie) for tie in self.ties]
        return RankMetadata(self.kinds, self.kind_idx, resolved, self._own, ties, self.places)

    def own(self) -> Iterator[Own]:
        """This rank's parameters, for the rank itself."""
        names = _split(_unpacked(self._own)[0])
        kinds = map(self.kinds.__getitem__, self.kind_idx)
        return map(Own, names, self.resolved_names, kinds, self.places)

    def metadata(self) -> list[ParameterMetadata]:
        """Every parameter's metadata, as it was encoded."""
        names, has_resolved, owners, experts = _unpacked(self._own)
        return [
            dataclasses.replace(
                self.kinds[kind],
                name=name,
                resolved_name=resolved if is_resolved or resolved != name else None,
                owner_rank=owner,
                global_expert_index=None if expert < 0 else expert,
                place=place,
            )
            for kind, name, resolved, is_resolved, owner, expert, place in zip(
                self.kind_idx,
                _split(names),
                self.resolved_names,
                has_resolved,
                owners,
                experts,
                self.places,
                strict=True,
            )
        ]


ByRank = Sequence[tuple[RankMetadata, RankMetadata]]
"""Source and destination of each rank."""


def _unpacked(blob: bytes) -> Any:
    return decode_plain(zlib.decompress(blob), "the metadata of a rank")


def _joined_names(names: Iterable[str]) -> str:
    some = list(names)
    wrong = next((name for name in some if not name or _IN_NO_NAME.search(name)), None)
    if wrong is not None:
        raise PlanError(
            f"{wrong!r} is no name of a parameter: it must be one line of Unicode text without lone "
            "surrogates, and not empty"
        )
    return _SEPARATOR.join(some)


def _split(names: str) -> list[str]:
    return names.split(_SEPARATOR) if names else []


def encode_rank_metadata(
    metas: Sequence[ParameterMetadata], ties: Sequence[tuple[str, ...]] = ()
) -> bytes:
    """One side of what a rank holds, as bytes.

    Args:
        metas: Metadata of each parameter.
        ties: Names in the whole model of each tensor that has several.
    """
    number_of: dict[tuple[Any, ...], int] = {}
    kinds: list[tuple[Any, ...]] = []
    kind_idx = array("I")
    for meta in metas:
        key = kind_key(meta)
        if key not in number_of:
            number_of[key] = len(kinds)
            kinds.append((*(getattr(meta, field) for field in _KIND_FIELDS), key[-1]))
        kind_idx.append(number_of[key])
    own = (
        _joined_names(meta.name for meta in metas),
        [meta.resolved_name is not None for meta in metas],
        [meta.owner_rank for meta in metas],
        [-1 if (x := meta.global_expert_index) is None else x for meta in metas],
    )
    places = array("q", [number for meta in metas for number in meta.place or ()]).tobytes()
    names = _joined_names(map(resolved_name, metas))
    public = (kinds, kind_idx.tobytes(), names, list(ties), places)
    return encode_plain([zlib.compress(encode_plain(part), 1) for part in (public, own)])


def decode_rank_metadata(data: bytes) -> RankMetadata:
    """Decode the bytes of `encode_rank_metadata`."""
    public, own = decode_plain(data, "the metadata of a rank")
    rows, kind_idx, names, ties, flat = _unpacked(public)
    numbers = iter(array("q", flat))
    places = list(zip(numbers, numbers, strict=True))
    kinds = []
    for *values, is_no_expert in rows:
        fields = dict(zip(_KIND_FIELDS, values, strict=True))
        kinds.append(
            ParameterMetadata(name="", global_expert_index=None if is_no_expert else 0, **fields)
        )
    return RankMetadata(kinds, array("I", kind_idx), _split(names), own, ties, places)
