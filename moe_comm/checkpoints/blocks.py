"""Blocks of 64 KiB of what ranks write, and their checksums: which of them differ from those of a version before.

The elements of a part are counted row by row. A part that lies in one run of its tensor is counted from the
tensor's first element, so that its blocks are those of the tensor whoever writes them; any other part, such as a
column shard, from its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from moe_comm.checkpoints.rectangles import as_integers
from moe_comm.resharding.copy_services.changed_blocks import BLOCK_BYTES, PieceChecksums
from moe_comm.resharding.describe.intervals import Box
from moe_comm.tensors.memory import bytes_of

__all__ = [
    "BLOCK_BYTES",
    "CHECKSUM",
    "Elements",
    "KnownSums",
    "Run",
    "Segment",
    "block_sums",
    "boxes_of_run",
    "cut_run",
    "elements_of",
    "num_neighbors",
    "place_of",
    "segment_of",
]

CHECKSUM = "moe_comm-64"
"""Name of the checksums in files; those of another name are not compared."""

# The checksum of a block depends on which one of its group it is: native code is called for groups.
_GROUP_BLOCKS = 256

Run: TypeAlias = tuple[int, int]
"""First element and the one behind the last."""


class Elements(NamedTuple):
    """Elements of a segment, from wherever they are.

    Args:
        fetch: Callable that returns those from one up to another as bytes in CPU memory.
        is_copied: Whether memory is made for that.
    """

    fetch: Callable[[int, int], torch.Tensor]
    is_copied: bool = True


class Segment(NamedTuple):
    """Elements of a tensor in the order in which blocks count them.

    Args:
        tensor: Name.
        view: Shape that the tensor is viewed as; () if elements are those of the whole tensor.
        box: Box of that view, whose elements are counted; () if the view is.
        start: First element.
        stop: End of the elements, behind the last.
        itemsize: Bytes of an element.
    """

    tensor: str
    view: tuple[int, ...]
    box: Box
    start: int
    stop: int
    itemsize: int

    @property
    def key(self) -> tuple[tuple[int, ...], Box]:
        """Equal where elements of a tensor have the same numbers."""
        return self.view, self.box

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the box."""
        return tuple(stop - start for start, stop in self.box)

    @property
    def per_block(self) -> int:
        """Elements of a block."""
        return BLOCK_BYTES // self.itemsize

    @property
    def first_block(self) -> int:
        """Number of the block that has the first element."""
        return self.start // self.per_block

    @property
    def num_blocks(self) -> int:
        """Blocks that have elements of the segment."""
        return -(-self.stop // self.per_block) - self.first_block

    def runs_where(self, mask: torch.Tensor) -> list[Run]:
        """Return the elements of some blocks, joined where they are neighbors.

        Args:
            mask: Mask of the blocks, bool `[num_blocks]`.
        """
        # All or none of them, as in most of many thousands of tensors.
        if not mask.any():
            return []
        if mask.all():
            return [(self.start, self.stop)]
        edge = torch.zeros(1, dtype=torch.int8)
        steps = torch.diff(torch.cat([edge, mask.to(torch.int8), edge]))
        starts, stops = (
            (torch.nonzero(steps == step).view(-1) + self.first_block) * self.per_block
            for step in (1, -1)
        )
        pairs = starts.clamp(min=self.start).tolist(), stops.clamp(max=self.stop).tolist()
        return list(zip(*pairs, strict=True))


def segment_of(tensor: str, view: tuple[int, ...], box: Box, itemsize: int) -> Segment | None:
    """Return the segment of a box of a tensor; None where that has no elements."""
    num_elements = math.prod(stop - start for start, stop in box)
    if not num_elements:
        return None
    if num_neighbors(view, box) == num_elements:
        start = place_of(view, box, 0)
        return Segment(tensor, (), (), start, start + num_elements, itemsize)
    return Segment(tensor, view, box, 0, num_elements, itemsize)


def num_neighbors(view: tuple[int, ...], box: Box) -> int:
    """Return how many elements of a box at a time are neighbors in the whole view."""
    count, is_whole = 1, True
    for size, (start, stop) in zip(reversed(view), reversed(box), strict=True):
        if not is_whole and stop - start > 1:
            break
        count *= stop - start
        is_whole = is_whole and stop - start == size
    return count


def place_of(view: tuple[int, ...], box: Box, element: int) -> int:
    """Return the number in the whole view of an element of a box."""
    place, stride = 0, 1
    for size, (start, stop) in zip(reversed(view), reversed(box), strict=True):
        element, index = divmod(element, stop - start)
        place += (start + index) * stride
        stride *= size
    return place


def boxes_of_run(sizes: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that consecutive elements of an array are, in order: fewer than two per dimension.

    Args:
        sizes: Sizes of the array.
        start: First element.
        stop: End, behind the last element.
    """
    if start >= stop:
        return
    if not sizes:
        yield ()
        return
    rest = sizes[1:]
    inner = math.prod(rest)
    (first, head), (last, tail) = divmod(start, inner), divmod(stop, inner)
    if first == last:
        for box in boxes_of_run(rest, head, tail):
            yield ((first, first + 1), *box)
        return
    if head:
        for box in boxes_of_run(rest, head, inner):
            yield ((first, first + 1), *box)
        first += 1
    if first < last:
        yield ((first, last), *((0, size) for size in rest))
    for box in boxes_of_run(rest, 0, tail):
        yield ((last, last + 1), *box)


def elements_of(segment: Segment, piece: torch.Tensor) -> Elements:
    """Return what gives bytes of a segment out of a tensor.

    Args:
        segment: Segment whose elements the tensor holds.
        piece: Tensor of any strides, on any device.
    """
    plain = as_integers(piece.detach().resolve_conj().resolve_neg())
    flat = plain.view(-1) if plain.is_contiguous() else None

    def fetch(start: int, stop: int) -> torch.Tensor:
        start, stop = start - segment.start, stop - segment.start
        if flat is not None:
            return bytes_of(flat[start:stop].cpu())
        parts = [
            plain[tuple(slice(*bounds) for bounds in box)].reshape(-1)
            for box in boxes_of_run(plain.shape, start, stop)
        ]
        return bytes_of(torch.cat(parts).cpu())

    return Elements(fetch, is_copied=flat is None or plain.device.type != "cpu")


def cut_run(segment: Segment, start: int, stop: int) -> Iterator[Run]:
    """Cut elements of a segment at every 256 blocks, 16 MiB, counted as the segment's elements are."""
    step = _GROUP_BLOCKS * segment.per_block
    for first in range(start // step * step, stop, step):
        yield max(start, first), min(stop, first + step)


def block_sums(segment: Segment, elements: Elements, run: Run | None = None) -> torch.Tensor:
    """Return the checksum of every block of a segment, int64 `[num_blocks]`.

    Args:
        segment: The segment.
        elements: Elements of the segment.
        run: Range of the elements to take alone, as if the segment began with them; None for all.
    """
    start, stop = run or (segment.start, segment.stop)
    chunks = cut_run(segment, start, stop) if elements.is_copied else ((start, stop),)
    return torch.cat([_sums_of(segment, elements.fetch(*each), *each) for each in chunks])


def _sums_of(segment: Segment, data: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    # Blocks of a group are counted from its beginning, or from that of the elements.
    sizes = [(last - first) * segment.itemsize for first, last in cut_run(segment, start, stop)]
    head = (-start % segment.per_block) * segment.itemsize
    if 0 < head < sizes[0]:
        sizes[:1] = [head, sizes[0] - head]
    pieces = [(number, group, 0) for number, group in enumerate(torch.split(data, sizes))]
    found: Any = PieceChecksums(pieces).compute_blocks(torch.get_num_threads())
    return torch.from_numpy(found.view("int64"))


class KnownSums:
    """Checksums of the blocks of a version.

    Args:
        sums: Segments, and int64 `[num_blocks]` of each.
    """

    def __init__(self, sums: Sequence[tuple[Segment, torch.Tensor]]) -> None:
        self._by_tensor: dict[str, list[tuple[Segment, torch.Tensor]]] = {}
        for segment, values in sums:
            self._by_tensor.setdefault(segment.tensor, []).append((segment, values))

    def at(self, wanted: Segment) -> tuple[torch.Tensor, torch.Tensor]:
        """Return checksums of a segment's blocks, and which of these are known.

        Blocks have none whose group begins elsewhere there, or which end elsewhere.

        Returns:
            int64 and bool, `[num_blocks]`.
        """
        known = self._by_tensor.get(wanted.tensor, ())
        if (
            same := next((values for segment, values in known if segment == wanted), None)
        ) is not None:
            return same.clone(), torch.ones(len(same), dtype=torch.bool)
        per_block, first = wanted.per_block, wanted.first_block
        last = first + wanted.num_blocks
        sums = torch.zeros(wanted.num_blocks, dtype=torch.int64)
        is_known = torch.zeros(wanted.num_blocks, dtype=torch.bool)
        for segment, values in known:
            its_first = segment.first_block
            low, high = max(first, its_first), min(last, its_first + segment.num_blocks)
            if segment.key != wanted.key or segment.itemsize != wanted.itemsize or low >= high:
                continue
            blocks = torch.arange(low, high)
            is_same = _begins(wanted, blocks) == _begins(segment, blocks)
            stops = (blocks + 1) * per_block
            is_same &= stops.clamp(max=wanted.stop) == stops.clamp(max=segment.stop)
            places = torch.arange(low - first, high - first)[is_same]
            sums[places] = values[low - its_first : high - its_first][is_same]
            is_known[places] = True
        return sums, is_known


def _begins(segment: Segment, blocks: torch.Tensor) -> torch.Tensor:
    """Return the elements from which blocks of a segment are counted in their checksums."""
    per_block = segment.per_block
    groups = blocks // _GROUP_BLOCKS * (_GROUP_BLOCKS * per_block)
    begins = groups.clamp(min=segment.start)
    # The first block of a segment is alone where it is not whole.
    is_after = (begins % per_block != 0) & (blocks * per_block > begins)
    return torch.where(is_after, -(-begins // per_block) * per_block, begins)
