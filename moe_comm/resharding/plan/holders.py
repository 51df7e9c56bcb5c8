"""Holders of each parameter of both sides, as far as a rank takes part in moving it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from moe_comm.resharding.describe.disagreement import PlanError
from moe_comm.resharding.describe.metadata import ParameterMetadata
from moe_comm.resharding.describe.tensor_layout import Holder
from moe_comm.resharding.plan.assignment import Assignment
from moe_comm.resharding.plan.name_matching import matched_names
from moe_comm.resharding.plan.rank_metadata import ByRank, RankMetadata, kind_key
from moe_comm.resharding.plan.tied_weights import source_name_of
from moe_comm.resharding.plan.unmatched_names import missing_source


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
        strict: Whether all members of a destination's groups must hold the parameter, with one dtype.
        max_bytes: Most bytes of a piece, see `Assignment`.
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
        key = kind_key(meta)
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
            PlanError: Statements of ranks about the parameter are not enough or contradict each other, or a
                source's dtype cannot become a destination's.
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


def holders_of_ranks(
    by_rank: ByRank,
    rank: int,
    *,
    strict: bool = False,
    max_bytes: int | None = None,
) -> HoldersByName:
    """Read what ranks hold, as far as a rank takes part.

    Args:
        by_rank: `(source, destination)` of each rank.
        rank: The rank that plans.
        strict: Whether to refuse source parameters that no destination has, and destinations that not all
            members of their groups have, or have with different dtypes.
        max_bytes: Most bytes of a piece, see `Assignment`.

    Raises:
        PlanError: Some destination parameter has no source, or one destination tensor is read from
            several; on every rank alike. With `strict`, also a source without a destination.
    """
    holders = HoldersByName(len(by_rank), strict=strict, max_bytes=max_bytes)
    all_destinations, tied = matched_names(by_rank, strict=strict)
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
        keys: Keys by name, `(rank, number of the kind)` of each holder, ranks ascending; a rank that has
            several places comes several times.
        kinds: Kinds by number.
    """

    keys: dict[str, tuple[tuple[int, int], ...]]
    kinds: list[ParameterMetadata]

    def of(self, name: str) -> list[Holder]:
        """Return the holders of a parameter."""
        return [Holder(rank, self.kinds[kind]) for rank, kind in self.keys[name]]


def named_holders(by_rank: Sequence[RankMetadata]) -> NamedHolders:
    """Read what all ranks hold of one side, by resolved names.

    Args:
        by_rank: Metadata of what each rank holds.
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
                raise missing_source(dst_name, dst_rank, all_sources)
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
