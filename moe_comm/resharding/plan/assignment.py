"""Assignment of the pieces of one parameter to senders and receivers."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from moe_comm.resharding.describe import intervals
from moe_comm.resharding.describe.conversions import cannot_become
from moe_comm.resharding.describe.disagreement import PlanError
from moe_comm.resharding.describe.intervals import Box, Intervals, Piece, Run
from moe_comm.resharding.describe.layouts import resolve_layouts
from moe_comm.resharding.describe.metadata import ParameterMetadata
from moe_comm.resharding.describe.tensor_layout import Holder, Layout


class PieceOfLayout(NamedTuple):
    """A piece, and which of the source layouts it is of."""

    layout_idx: int
    piece: Piece


class _Class(NamedTuple):
    """Destination ranks that need the same pieces, in ascending order."""

    layout: Layout
    pieces: list[PieceOfLayout]
    ranks: list[int]


class _Readers(NamedTuple):
    """Pieces of one source layout that a class of destinations needs.

    Args:
        pieces: Pieces with their numbers in the class.
        waiting: Ranks of the class that do not hold the source layout themselves.
    """

    of: _Class
    pieces: list[tuple[int, PieceOfLayout]]
    waiting: list[int]


class Assignment:
    """Every piece of one parameter, or of parameters that the same ranks hold alike.

    Source ranks with equal layouts are replicas. A destination copies from itself what it holds;
    the other destinations of the same pieces take their turns over the replicas. All ranks find
    the same, each looking at the pieces that it takes part in.

    Args:
        name: Name in the whole model, for messages.
        sources: Ranks to read from, in ascending order. One that has several views of a parameter
            comes several times.
        destinations: Ranks to be written, each once, in ascending order.
        strict: Whether all members of a destination's groups must hold the parameter, with one dtype.
        max_bytes: Most bytes of a piece, which is cut where it has more; None for any number. Pieces that a
            transform makes or writes stay whole.

    Attributes:
        sources: Sources as given; pieces name a source by its position here.
        destinations: Destinations by rank.
        layouts: The different ones of sources.

    Raises:
        PlanError: Statements of ranks are not enough, or contradict each other; nobody holds some elements;
            or a source's dtype cannot become a destination's.
    """

    def __init__(
        self,
        name: str,
        sources: Sequence[Holder],
        destinations: Sequence[Holder],
        *,
        strict: bool = False,
        max_bytes: int | None = None,
    ) -> None:
        _check_dtypes(name, sources, destinations)
        if strict:
            _check_groups(name, destinations)
        src_layouts, dst_layouts = resolve_layouts(name, sources, destinations)
        self._name = name
        self.sources = list(sources)
        self.destinations = dict(destinations)
        metas = [holder.meta for holder in (*sources, *destinations)]
        self._max_elements: int | None = None
        if max_bytes is not None and metas and not any(meta.is_transformed for meta in metas):
            self._max_elements = max(1, max_bytes // max(meta.element_size for meta in metas))
        self._absent_source = next(_absent_members(sources), None)
        self._held: dict[int, dict[int, int]] = {}
        """By rank, the position among the sources of each layout that it holds."""
        self.layouts: list[Layout] = []
        self._replicas: list[list[int]] = []
        known: dict[Layout, int] = {}
        for position, (holder, layout) in enumerate(zip(sources, src_layouts, strict=True)):
            if layout is None:
                continue
            if layout not in known:
                known[layout] = len(self.layouts)
                self.layouts.append(layout)
                self._replicas.append([])
            held = self._held.setdefault(holder.rank, {})
            if known[layout] not in held:
                held[known[layout]] = position
                self._replicas[known[layout]].append(holder.rank)
        self._runs: dict[tuple[Intervals, Intervals], tuple[Run, ...]] = {}
        self._class_of: dict[int, int] = {}
        self._classes: list[_Class] = []
        self._classify(destinations, dst_layouts)
        self._readers = self._list_readers()
        self._runs.clear()

    def _classify(self, destinations: Sequence[Holder], layouts: Sequence[Layout | None]) -> None:
        by_layout: dict[Layout, list[int]] = {}
        for holder, layout in zip(destinations, layouts, strict=True):
            if layout is not None:
                by_layout.setdefault(layout, []).append(holder.rank)
        for layout, ranks in by_layout.items():
            pieces = self._intersections(layout)
            defect = intervals.find_defect(layout.view, [item.piece.dst_box for item in pieces])
            if defect is None:
                self._add_class(layout, pieces, ranks)
                continue
            # Source layouts overlap, or do not cover: what a rank holds itself comes first.
            by_local: dict[tuple[int, ...], list[int]] = {}
            for rank in ranks:
                by_local.setdefault(tuple(self._held.get(rank, ())), []).append(rank)
            for local, some_ranks in by_local.items():
                parts = _disjoint(pieces, local, intervals.num_elements(layout.view))
                defect = intervals.find_defect(layout.view, [item.piece.dst_box for item in parts])
                if defect is not None:
                    raise PlanError(self._hole_message(layout, defect.box, some_ranks[0]))
                self._add_class(layout, parts, some_ranks)

    def _add_class(self, layout: Layout, pieces: list[PieceOfLayout], ranks: list[int]) -> None:
        pieces.sort(key=lambda item: item.piece.dst_box)
        if self._max_elements is not None:
            pieces = [
                PieceOfLayout(item.layout_idx, part)
                for item in pieces
                for part in intervals.cut_piece(item.piece, self._max_elements)
            ]
        self._class_of.update(dict.fromkeys(ranks, len(self._classes)))
        self._classes.append(_Class(layout, pieces, ranks))

    def _intersections(self, destination: Layout) -> list[PieceOfLayout]:
        """Return the pieces of a destination that each source layout has."""
        pieces: list[PieceOfLayout] = []
        for layout_idx, source in enumerate(self.layouts):
            runs_by_dim: list[tuple[Run, ...]] = []
            for src, dst in zip(source.dims, destination.dims, strict=True):
                if (src, dst) not in self._runs:
                    self._runs[src, dst] = intervals.intersect(src, dst)
                runs_by_dim.append(self._runs[src, dst])
                if not runs_by_dim[-1]:
                    break
            else:
                for runs in itertools.product(*runs_by_dim):
                    src_box = tuple((run.src_start, run.src_start + run.length) for run in runs)
                    dst_box = tuple((run.dst_start, run.dst_start + run.length) for run in runs)
                    pieces.append(PieceOfLayout(layout_idx, Piece(src_box, dst_box)))
        return pieces

    def _list_readers(self) -> list[dict[int, _Readers]]:
        """Per source layout, by number of the class, who reads it."""
        readers: list[dict[int, _Readers]] = [{} for _ in self.layouts]
        for class_idx, some_class in enumerate(self._classes):
            numbered: dict[int, list[tuple[int, PieceOfLayout]]] = {}
            for number, item in enumerate(some_class.pieces):
                numbered.setdefault(item.layout_idx, []).append((number, item))
            for layout_idx, pieces in numbered.items():
                waiting = [
                    rank for rank in some_class.ranks if layout_idx not in self._held.get(rank, ())
                ]
                readers[layout_idx][class_idx] = _Readers(some_class, pieces, waiting)
        return readers

    def _hole_message(self, layout: Layout, box: Box, rank: int) -> str:
        region = []
        for (start, stop), held in zip(box, layout.dims, strict=True):
            first = intervals.take(held, start, stop)[0]
            region.append([first.global_start, first.global_start + first.length])
        text = (
            f"{self._name}: no source rank holds elements {region} of the whole tensor of shape "
            f"{layout.global_shape}, which rank {rank} needs"
        )
        if self._absent_source is not None:
            text += f"; {self._absent_source.describe()}"
        return text

    def destination_view(self, dst_rank: int) -> tuple[int, ...] | None:
        """Shape that a destination's tensor is viewed as; None for one that holds no element."""
        class_idx = self._class_of.get(dst_rank)
        return None if class_idx is None else self._classes[class_idx].layout.view

    def pieces_to(self, dst_rank: int, salt: int) -> Iterator[tuple[int, PieceOfLayout]]:
        """The position of the source of each piece that a destination needs, by destination offset.

        Args:
            dst_rank: Rank of the destination.
            salt: Number that shifts whose turn it is; equal on all ranks.
        """
        class_idx = self._class_of.get(dst_rank)
        if class_idx is None:
            return
        servers = dict(self._held.get(dst_rank, {}))
        for item in self._classes[class_idx].pieces:
            layout_idx = item.layout_idx
            if layout_idx not in servers:
                waiting = self._readers[layout_idx][class_idx].waiting
                turn = bisect.bisect_left(waiting, dst_rank) + salt
                replicas = self._replicas[layout_idx]
                servers[layout_idx] = self._held[replicas[turn % len(replicas)]][layout_idx]
            yield servers[layout_idx], item

    def pieces_from(
        self, src_rank: int, salt: int
    ) -> Iterator[tuple[int, int, tuple[int, ...], int, PieceOfLayout]]:
        """Yield the pieces that a source rank sends.

        Yields:
            `(position of the source, destination rank, its view, piece number, piece)`.

        Args:
            src_rank: Rank of the source.
            salt: As in `pieces_to`.
        """
        for layout_idx, position in self._held.get(src_rank, {}).items():
            replicas = self._replicas[layout_idx]
            first = (bisect.bisect_left(replicas, src_rank) - salt) % len(replicas)
            for class_idx, readers in self._readers[layout_idx].items():
                served = readers.waiting[first :: len(replicas)]
                if self._class_of.get(src_rank) == class_idx:
                    served.append(src_rank)
                for dst_rank in served:
                    for number, item in readers.pieces:
                        yield position, dst_rank, readers.of.layout.view, number, item


def _check_dtypes(name: str, sources: Sequence[Holder], destinations: Sequence[Holder]) -> None:
    """Values arrive as what they are, with the dtype of the destination."""
    if not sources:
        return
    taken = sources[0].meta
    for src in _kinds_of_values(sources):
        for dst in _kinds_of_values(destinations):
            if src.meta.is_transformed or dst.meta.is_transformed:
                continue
            takes_over = dst.meta.is_buffer
            reason = cannot_become(src.meta.dtype, dst.meta.dtype, takes_over=takes_over)
            if reason:
                raise PlanError(
                    f"{name}: rank {src.rank} holds {src.meta.dtype}, which does not become the "
                    f"{dst.meta.dtype} of rank {dst.rank}: {reason}"
                )
            # All of a buffer takes over one dtype.
            reason = cannot_become(src.meta.dtype, taken.dtype) if takes_over else ""
            if reason:
                raise PlanError(
                    f"{name}: source rank {src.rank} holds {src.meta.dtype}, which does not become "
                    f"the {taken.dtype} of source rank {sources[0].rank}: {reason}"
                )


def _kinds_of_values(holders: Sequence[Holder]) -> Iterable[Holder]:
    """The first holder of each kind that `_check_dtypes` tells apart."""
    return {
        (meta.dtype, meta.is_buffer, meta.is_transformed): Holder(rank, meta)
        for rank, meta in reversed(holders)
    }.values()


class _Absent(NamedTuple):
    """A member of a group that does not hold what the others hold."""

    group: str
    ranks: Sequence[int]
    rank: int
    holder: int

    def describe(self) -> str:
        return (
            f"rank {self.rank} of the {self.group} {list(self.ranks)} does not hold it, rank "
            f"{self.holder} does"
        )


def _groups_of(
    holders: Sequence[Holder], *, with_replicas: bool = False
) -> Iterator[tuple[str, Sequence[int], int]]:
    """The different groups that ranks share a parameter over, each with one of its holders.

    Args:
        holders: Holders of the parameter.
        with_replicas: Whether to find the groups of ranks that hold the same, too.
    """
    seen: set[tuple[int, ...]] = set()
    last: ParameterMetadata | None = None
    for rank, meta in holders:
        if meta is last:
            continue
        last = meta
        is_fused = meta.is_ep and meta.global_expert_index is None
        for group, ranks in (
            ("tensor parallel group", meta.tensor_parallel_group_ranks),
            ("expert parallel group", meta.expert_parallel_group_ranks if is_fused else None),
            ("data parallel group", meta.data_parallel_group_ranks if with_replicas else None),
            ("device mesh", None if meta.mesh is None else meta.mesh.mesh_ranks),
        ):
            if ranks is not None and len(ranks) > 1 and tuple(ranks) not in seen:
                seen.add(tuple(ranks))
                yield group, ranks, rank


def _absent_members(holders: Sequence[Holder]) -> Iterator[_Absent]:
    present = {holder.rank for holder in holders}
    for group, ranks, holder in _groups_of(holders):
        for rank in ranks:
            if rank not in present:
                yield _Absent(group, ranks, rank, holder)


def _check_groups(name: str, destinations: Sequence[Holder]) -> None:
    """Ranks that share a parameter all hold it, with one dtype, as replicas have one."""
    absent = next(_absent_members(destinations), None)
    if absent is not None:
        raise PlanError(
            f"{name}: {absent.describe()}; strict=False takes a target that is not whole"
        )
    by_rank = dict(destinations)
    for group, ranks, holder in _groups_of(destinations, with_replicas=True):
        expected = by_rank[holder]
        for rank in ranks:
            meta = by_rank.get(rank, expected)
            # A buffer takes over the dtype of its source.
            if meta.dtype != expected.dtype and not meta.is_buffer:
                raise PlanError(
                    f"{name}: target rank {holder} holds {expected.dtype}, rank {rank} of the same "
                    f"{group} {list(ranks)} holds {meta.dtype}"
                )


def _disjoint(
    pieces: Sequence[PieceOfLayout], local: Sequence[int], num_elements: int
) -> list[PieceOfLayout]:
    """Pieces that name no destination element twice; those of layouts `local` come first.

    Args:
        pieces: Pieces, which may overlap.
        local: Numbers of layouts.
        num_elements: Elements of the destination: nothing is looked for when all are named.
    """
    kept: list[Box] = []
    by_layout: dict[int, list[Piece]] = {}
    for layout_idx, piece in sorted(pieces, key=lambda item: item.layout_idx not in local):
        if not num_elements:
            break
        rest = [piece.dst_box]
        for box in kept:
            rest = [part for some in rest for part in intervals.subtract(some, box)]
        kept += rest
        num_elements -= sum(
            intervals.num_elements(stop - start for start, stop in box) for box in rest
        )
        for dst_box in rest:
            offsets = [
                src - dst for (src, _), (dst, _) in zip(piece.src_box, piece.dst_box, strict=True)
            ]
            src_box = tuple(
                (start + offset, stop + offset)
                for (start, stop), offset in zip(dst_box, offsets, strict=True)
            )
            by_layout.setdefault(layout_idx, []).append(Piece(src_box, dst_box))
    return [
        PieceOfLayout(layout_idx, piece)
        for layout_idx, some in by_layout.items()
        for piece in intervals.join_pieces(some)
    ]
