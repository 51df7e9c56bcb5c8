"""Pieces of many tensors that lie in one pattern at both ends: few copies instead of thousands.

Both ends find the same, from what they know of each other's storage.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from moe_comm.resharding.describe.intervals import Piece

MAX_DIMS = 8
"""Dimensions of what services copy with strides."""

Dims = tuple[tuple[int, int, int], ...]
"""(size, source stride, destination stride) per dimension, in elements, outermost first."""


class Block(NamedTuple):
    """A piece, as elements of a storage of each end.

    Args:
        key: Key of the storages and the dtypes: only blocks of equal keys become one.
        src_start: First element in the source's storage.
        dst_start: The same of the destination.
        dims: Dimensions without sizes of 1, and without two where one will do.
        num_bytes: Bytes that travel.
    """

    key: Hashable
    src_start: int
    dst_start: int
    dims: Dims
    num_bytes: int


class Joined(NamedTuple):
    """A block, and the positions of the blocks that it has become of, in the order they lie in it."""

    block: Block
    members: list[int]


def strides_in(
    shape: Sequence[int], strides: Sequence[int], view: Sequence[int]
) -> tuple[int, ...]:
    """Strides of a strided tensor viewed as a shape that cuts its dimensions more finely."""
    if tuple(shape) == tuple(view):
        return tuple(strides)
    result: list[int] = []
    finer = list(view)
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        inner = 1
        while inner < size:
            result.append(stride * inner)
            inner *= finer.pop()
        # Sizes of 1 are anywhere, and their strides mean nothing.
        while finer and finer[-1] == 1:
            result.append(stride)
            finer.pop()
    result += [0] * len(finer)
    return tuple(reversed(result))


def block_of(
    piece: Piece, src_strides: Sequence[int], dst_strides: Sequence[int]
) -> tuple[int, int, Dims]:
    """Return the offsets at which a piece begins in a tensor of each end, and its dimensions."""
    src_box, dst_box = piece
    src_start = sum(start * stride for (start, _), stride in zip(src_box, src_strides, strict=True))
    dst_start = sum(start * stride for (start, _), stride in zip(dst_box, dst_strides, strict=True))
    sizes = (stop - start for start, stop in src_box)
    return src_start, dst_start, _fewest(zip(sizes, src_strides, dst_strides, strict=True))


def _fewest(dims: Iterable[tuple[int, int, int]]) -> Dims:
    """The same elements in the same order, in as few dimensions as both ends allow."""
    fewest: list[tuple[int, int, int]] = []
    for size, src, dst in dims:
        if size == 1:
            continue
        if fewest:
            outer, outer_src, outer_dst = fewest[-1]
            if outer_src == src * size and outer_dst == dst * size:
                fewest[-1] = outer * size, src, dst
                continue
        fewest.append((size, src, dst))
    return tuple(fewest)


def join_blocks(blocks: Iterable[Block], max_bytes: int | None = None) -> list[Joined]:
    """Blocks of equal dimensions, at equal distances at both ends, as one with a dimension more.

    Then what has become of them in the same way: rows of gate and up, then experts, then layers.

    Args:
        blocks: Blocks between two ranks, in an order that both know.
        max_bytes: Most bytes of what they become; None for any number.
    """
    joined = [Joined(block, [position]) for position, block in enumerate(blocks)]
    while True:
        groups: dict[Hashable, list[Joined]] = {}
        for each in joined:
            groups.setdefault((each.block.key, each.block.dims), []).append(each)
        fewer = [run for group in groups.values() for run in _runs(group, max_bytes)]
        if len(fewer) == len(joined):
            return joined
        joined = fewer


def _are_written_once(dims: Dims) -> bool:
    """Return whether strides of the destination alone say so, as what copies it asks of them.

    Columns at 2, 240, 242 and 480 of rows that lie 4 apart are apart, too, but that is seen of each column alone.
    """
    span = 1
    for stride, size in sorted((dst, size) for size, _, dst in dims):
        if stride < span:
            return False
        span += (size - 1) * stride
    return True


def _runs(group: list[Joined], max_bytes: int | None) -> list[Joined]:
    num_bytes = group[0].block.num_bytes
    most = len(group) if max_bytes is None else max_bytes // max(1, num_bytes)
    if min(len(group), most) < 2 or len(group[0].block.dims) >= MAX_DIMS:
        return group
    group.sort(key=lambda each: each.block[1:3][::-1])
    runs: list[Joined] = []
    first = 0
    while first < len(group):
        key, src_start, dst_start, dims, _ = group[first].block
        stop = first + 1
        if stop < len(group):
            _, src_next, dst_next, *_ = group[stop].block
            steps = src_next - src_start, dst_next - dst_start
            # A stride is never negative.
            while steps[0] >= 0 and stop < min(len(group), first + most):
                _, src_next, dst_next, *_ = group[stop].block
                count = stop - first
                if (src_next, dst_next) != (
                    src_start + count * steps[0],
                    dst_start + count * steps[1],
                ):
                    break
                stop += 1
        members = group[first:stop]
        whole = _fewest(((len(members), *steps), *dims)) if len(members) > 1 else dims
        if len(members) > 1 and _are_written_once(whole):
            order = [position for each in members for position in each.members]
            runs.append(
                Joined(Block(key, src_start, dst_start, whole, num_bytes * len(members)), order)
            )
        else:
            runs += members
        first = stop
    return runs
