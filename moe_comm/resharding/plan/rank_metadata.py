"""Metadata of every rank about its parameters, small on the wire and quick to read.

A rank has thousands of parameters but few kinds of them: layers repeat. So each kind is stated
once and, per parameter, its name and the number of its kind.
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from moe_comm.peers.plain_data import decode_plain, encode_plain
from moe_comm.resharding.describe.checkpoint_views import unique_names
from moe_comm.resharding.describe.disagreement import PlanError
from moe_comm.resharding.describe.metadata import ParameterMetadata
from moe_comm.resharding.describe.tensor_layout import Holder
from moe_comm.resharding.plan.assignment import Assignment
from moe_comm.resharding.plan.pipeline_stages import EMBEDDINGS, names_told_apart

__all__ = [
    "Destination",
    "HoldersByName",
    "NamedHolders",
    "Own",
    "RankMetadata",
    "Source",
    "decode_rank_metadata",
    "encode_rank_metadata",
    "holders_of_metadata",
    "holders_of_ranks",
    "named_holders",
    "source_name_of",
    "told_apart",
    "unmatched_names",
]

# Fields of each parameter's own; the others make up its kind.
_OWN_FIELDS = ("name", "resolved_name", "global_expert_index", "owner_rank", "place")
_KIND_FIELDS = tuple(
    field.name for field in dataclasses.fields(ParameterMetadata) if field.name not in _OWN_FIELDS
)
# Separates names, which are Python identifiers joined by dots.
_SEPARATOR = "\n"
_OUTPUT = "output_layer.weight"
# A parametrization's name of what it computes from.
_PARAMETRIZED = re.compile(r"(?<![^.])parametrizations[.]([^.]+)[.]original[0-9]*$")
# Other names of weights that many models tie to their embedding.
_OUTPUT_LIKE = re.compile(r"(^|[._])(output|output_layer|head)[.]weight$")


def resolved_name(meta: ParameterMetadata) -> str:
    """Name in the whole model."""
    return meta.name if meta.resolved_name is None else meta.resolved_name


def _kind_key(meta: ParameterMetadata) -> tuple[Any, ...]:
    """Return the fields that two parameters of one kind have in common; hashable."""
    fields = (getattr(meta, field) for field in _KIND_FIELDS)
    values = tuple(tuple(value) if isinstance(value, list) else value for value in fields)
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
        kind_idx: Of each parameter.
        resolved_names: Of each parameter, in the whole model. Those of views may repeat.
        own: Compressed: the names in the rank's module, owners, and indices of experts.
        ties: Names in the whole model of each tensor that has several.
        places: Of each view, see `ParameterMetadata`; empty where the parameters are no views.
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


_ByRank = Sequence[tuple[RankMetadata, RankMetadata]]


def _unpacked(blob: bytes) -> Any:
    return decode_plain(zlib.decompress(blob), "the metadata of a rank")


def _joined_names(names: Iterable[str]) -> str:
    some = list(names)
    wrong = next((name for name in some if not name or _SEPARATOR in name), None)
    if wrong is not None:
        raise PlanError(f"{wrong!r} is no name of a parameter: it must be one line, and not empty")
    return _SEPARATOR.join(some)


def _split(names: str) -> list[str]:
    return names.split(_SEPARATOR) if names else []


def encode_rank_metadata(
    metas: Sequence[ParameterMetadata], ties: Sequence[tuple[str, ...]] = ()
) -> bytes:
    """One side of what a rank holds, as bytes.

    Args:
        metas: Of each parameter.
        ties: Names in the whole model of each tensor that has several.
    """
    number_of: dict[tuple[Any, ...], int] = {}
    kinds: list[tuple[Any, ...]] = []
    kind_idx = array("I")
    for meta in metas:
        key = _kind_key(meta)
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


class Source(NamedTuple):
    """A rank to read from with its kind of parameter, and where a view of it lies in storage."""

    holding: tuple[int, int]
    place: tuple[int, int] | None = None


class Destination(NamedTuple):
    """A rank to be written with its kind of parameter, the parameter's number there, and a view's place."""

    holding: tuple[int, int]
    parameter_idx: int
    place: tuple[int, int] | None = None


class HoldersByName:
    """Holders of each parameter that a rank takes part in moving.

    Args:
        num_ranks: Ranks of the group.
        strict: All members of a destination's groups must hold the parameter, with one dtype.
        max_bytes: Of a piece, see `Assignment`.
    """

    def __init__(
        self, num_ranks: int, *, strict: bool = False, max_bytes: int | None = None
    ) -> None:
        self.num_ranks = num_ranks
        self.max_bytes = max_bytes
        self._strict = strict
        self.kinds: list[ParameterMetadata] = []
        self._kind_of: dict[tuple[Any, ...], int] = {}
        # By rank; views of one rank in its own order.
        self.sources: dict[str, list[Source]] = {}
        self.destinations: dict[str, list[Destination]] = {}
        self.source_names: dict[str, str] = {}
        self._readers: dict[str, list[str]] = {}
        self._assignments: dict[tuple[Any, ...], Assignment] = {}

    def kind(self, meta: ParameterMetadata) -> int:
        """Number of a parameter's kind, over all ranks."""
        key = _kind_key(meta)
        found = self._kind_of.get(key)
        if found is None:
            found = self._kind_of[key] = len(self.kinds)
            self.kinds.append(meta)
        return found

    def link(self, dst_name: str, src_name: str) -> None:
        """State which source parameter a destination parameter is read from."""
        if dst_name not in self.source_names:
            self.source_names[dst_name] = src_name
            self._readers.setdefault(src_name, []).append(dst_name)

    def readers(self, src_name: str) -> list[str]:
        """Destination parameters that are read from a source parameter."""
        return self._readers.get(src_name, [])

    def sources_of(self, dst_name: str) -> list[Source]:
        """Return the sources that a destination parameter is read from, as those of its assignment."""
        return self.sources[self.source_names[dst_name]]

    def assignment(self, dst_name: str) -> Assignment:
        """Return the assignment of the pieces of a destination parameter to senders and receivers.

        Raises:
            PlanError: What ranks say of the parameter is not enough or contradicts itself, or a source's
                dtype cannot become a destination's.
        """
        sources = self.sources_of(dst_name)
        destinations = self.destinations[dst_name]
        key = (
            tuple([source.holding for source in sources]),
            tuple([destination.holding for destination in destinations]),
        )
        if key not in self._assignments:
            self._assignments[key] = Assignment(
                dst_name,
                self._holders(sources),
                self._holders(destinations),
                strict=self._strict,
                max_bytes=self.max_bytes,
            )
        return self._assignments[key]

    def _holders(self, side: Iterable[Source | Destination]) -> list[Holder]:
        return [Holder(rank, self.kinds[kind]) for (rank, kind), *_ in side]


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


def _missing(dst_name: str, rank: int, all_sources: set[str]) -> PlanError:
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


def _check_ties(by_rank: _ByRank, all_sources: set[str]) -> None:
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
    by_rank: _ByRank,
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


def _all_names(by_rank: _ByRank) -> tuple[set[str], set[str]]:
    """Names of sources and of destinations."""
    return (
        {name for source, _ in by_rank for name in source.resolved_names},
        {name for _, destination in by_rank for name in destination.resolved_names},
    )


def _extra_sources(
    by_rank: _ByRank, all_sources: set[str], all_destinations: set[str], tied: Mapping[str, str]
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


def unmatched_names(by_rank: _ByRank) -> tuple[list[str], list[str]]:
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
    by_rank: _ByRank,
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


def holders_of_ranks(
    by_rank: _ByRank,
    rank: int,
    *,
    strict: bool = False,
    max_bytes: int | None = None,
) -> HoldersByName:
    """Read what ranks hold, as far as a rank takes part.

    Args:
        by_rank: `(source, destination)` of each rank.
        rank: The rank that plans.
        strict: Refuse source parameters that no destination has, and destinations that not all
            members of their groups have, or have with different dtypes.
        max_bytes: Of a piece, see `Assignment`.

    Raises:
        PlanError: Some destination parameter has no source, or one destination tensor is read from
            several; on every rank alike. With `strict`, also a source without a destination.
    """
    holders = HoldersByName(len(by_rank), strict=strict, max_bytes=max_bytes)
    all_sources, all_destinations = _all_names(by_rank)
    tied: dict[str, str] = {}
    for dst_name in sorted(all_destinations - all_sources):
        src_name = source_name_of(dst_name, all_sources)
        if src_name is None:
            holder = next(
                number for number, (_, dst) in enumerate(by_rank) if dst_name in dst.resolved_names
            )
            raise _missing(dst_name, holder, all_sources)
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
        raise PlanError(f"source parameter '{name}' on rank {holder} has no destination{more}")
    mine = set(by_rank[rank][0].resolved_names) & all_destinations
    mine.update(name for name, source in tied.items() if source in by_rank[rank][0].resolved_names)
    mine.update(by_rank[rank][1].resolved_names)
    read = {tied.get(name, name) for name in mine}
    holders.sources = {name: [] for name in read}
    for number, (source, destination) in enumerate(by_rank):
        kinds = [(number, holders.kind(kind)) for kind in source.kinds]
        for name, kind, place in zip(
            source.resolved_names, source.kind_idx, source.places, strict=True
        ):
            if name in read:
                holders.sources[name].append(Source(kinds[kind], place))
        kinds = [(number, holders.kind(kind)) for kind in destination.kinds]
        keyed = zip(
            destination.keys,
            destination.resolved_names,
            destination.kind_idx,
            destination.places,
            strict=True,
        )
        for idx, (key, name, kind, place) in enumerate(keyed):
            if name in mine:
                holders.link(key, tied.get(name, name))
                holders.destinations.setdefault(key, []).append(
                    Destination(kinds[kind], idx, place)
                )
    return holders


class NamedHolders(NamedTuple):
    """Holders of every parameter of one side, with equal ones told by equal keys.

    Args:
        keys: By name, `(rank, number of the kind)` of each holder, ranks ascending; a rank that has several
            places comes several times.
        kinds: By number.
    """

    keys: dict[str, tuple[tuple[int, int], ...]]
    kinds: list[ParameterMetadata]

    def of(self, name: str) -> list[Holder]:
        """Return the holders of a parameter."""
        return [Holder(rank, self.kinds[kind]) for rank, kind in self.keys[name]]


def named_holders(by_rank: Sequence[RankMetadata]) -> NamedHolders:
    """Read what all ranks hold of one side, by resolved names.

    Args:
        by_rank: What each rank holds.
    """
    kinds = HoldersByName(len(by_rank))
    held: dict[str, list[tuple[int, int]]] = {}
    for rank, side in enumerate(by_rank):
        numbers = [kinds.kind(kind) for kind in side.kinds]
        for name, kind_idx in zip(side.resolved_names, side.kind_idx, strict=True):
            held.setdefault(name, []).append((rank, numbers[kind_idx]))
    return NamedHolders({name: tuple(keys) for name, keys in held.items()}, kinds.kinds)


def holders_of_metadata(
    dst_by_rank: Mapping[int, Mapping[str, ParameterMetadata]],
    src_by_name: Mapping[str, Sequence[ParameterMetadata]],
    rank: int | None = None,
) -> HoldersByName:
    """The same of metadata that is not encoded.

    Args:
        dst_by_rank: Destination parameters by rank and name.
        src_by_name: Source parameters by name.
        rank: The rank that plans; None to read everything.

    Raises:
        PlanError: Some destination parameter has no source, or a rank holds a source twice.
    """
    all_sources = {name for name, metas in src_by_name.items() if metas}
    ranks = {*dst_by_rank, *(meta.owner_rank for name in all_sources for meta in src_by_name[name])}
    holders = HoldersByName(1 + max(ranks, default=-1))
    own: set[str] | None = None
    if rank is not None:
        own = set(dst_by_rank.get(rank, ()))
        own.update(
            name
            for name in all_sources
            if any(meta.owner_rank == rank for meta in src_by_name[name])
        )
    for dst_rank in sorted(dst_by_rank):
        for idx, (dst_name, meta) in enumerate(dst_by_rank[dst_rank].items()):
            src_name = source_name_of(dst_name, all_sources)
            if src_name is None:
                raise _missing(dst_name, dst_rank, all_sources)
            if own is not None and dst_name not in own and src_name not in own:
                continue
            holders.link(dst_name, src_name)
            destinations = holders.destinations.setdefault(dst_name, [])
            destinations.append(Destination((dst_rank, holders.kind(meta)), idx))
    for src_name in set(holders.source_names.values()):
        metas = sorted(src_by_name[src_name], key=lambda meta: meta.owner_rank)
        holders.sources[src_name] = [
            Source((meta.owner_rank, holders.kind(meta)), meta.place) for meta in metas
        ]
        owners = [meta.owner_rank for meta in metas]
        twice = [owner for owner in set(owners) if owners.count(owner) > 1]
        if twice:
            raise PlanError(f"{src_name}: rank {twice[0]} holds two sources of this name")
    return holders
