"""Checkpoints that ranks hold in ways drawn at random, and the dense tensors that they are parts of."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import torch

from moe_comm.resharding.describe.checkpoint_views import CheckpointView
from moe_comm.resharding.describe.intervals import Interval, Intervals

Dims = tuple[Intervals, ...]

UNTOUCHED = -7


def intervals_of(parts: Sequence[tuple[int, int]]) -> Intervals:
    """Intervals of `(global_start, length)` parts in the order in which they lie."""
    lengths = [length for _, length in parts]
    starts = itertools.accumulate(lengths, initial=0)
    return tuple(
        Interval(start, local, length)
        for (start, length), local in zip(parts, starts, strict=False)
        if length
    )


def part_of(whole: torch.Tensor, shape: tuple[int, ...], dims: Dims) -> torch.Tensor:
    """Content of a view of `dims` of the whole tensor, seen as `shape`."""
    part = whole.reshape(shape)
    for dim, held in enumerate(dims):
        index = [i for start, _, length in held for i in range(start, start + length)]
        part = part.index_select(dim, torch.tensor(index, dtype=torch.int64))
    return part


class DrawnSide:
    """One side of a refit, on every rank.

    Args:
        rng: Random numbers that draw the layout.
        shapes: Shapes of the tensors of the checkpoint, by name.
        num_ranks: Ranks.
        dtype: Type of the elements that ranks hold.
        finer: Shapes to see the tensors as, by name; None for `shapes`.
        grains: Number of indices that a part is a multiple of, by name, for each dimension; None
            for 1.
    """

    def __init__(
        self,
        rng: random.Random,
        shapes: dict[str, tuple[int, ...]],
        num_ranks: int,
        dtype: torch.dtype,
        *,
        finer: dict[str, tuple[int, ...]] | None = None,
        grains: dict[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.storages: list[list[torch.Tensor]] = []
        self.views: list[list[CheckpointView]] = []
        seen_as = shapes if finer is None else finer
        parts: list[list[tuple[str, Dims]]] = [[] for _ in range(num_ranks)]
        for name, shape in seen_as.items():
            cut_dim, other = rng.randrange(len(shape)), rng.randrange(len(shape))
            grain = grains[name] if grains else (1,) * len(shape)
            blocks = _blocks(rng, shape[cut_dim], rng.randint(1, num_ranks), grain[cut_dim])
            order = rng.sample(range(num_ranks), num_ranks)
            for number, rank in enumerate(order):
                dims = [intervals_of([(0, size)]) for size in shape]
                dims[cut_dim] = blocks[number % len(blocks)]
                parts[rank].append((name, tuple(dims)))
                if rng.random() < 0.3:  # another place of the same
                    parts[rank].append((name, tuple(dims)))
                elif rng.random() < 0.3 and other != cut_dim:  # in two places
                    parts[rank].pop()
                    for some in _blocks(rng, shape[other], 2, grain[other]):
                        dims[other] = some
                        parts[rank].append((name, tuple(dims)))
        for mine in parts:
            rng.shuffle(mine)
            self.storages.append([])
            self.views.append([])
            by_size: dict[tuple[int, ...], list[tuple[str, Dims]]] = {}
            for name, dims in mine:
                by_size.setdefault(_sizes(dims), []).append((name, dims))
            for sizes, members in by_size.items():
                while members:
                    count = rng.randint(1, len(members))
                    together, members = members[:count], members[count:]
                    tensors = self._stack(rng, sizes, count, dtype)
                    for (name, dims), tensor in zip(together, tensors, strict=True):
                        self.views[-1].append(CheckpointView(name, seen_as[name], dims, tensor))

    def _stack(
        self, rng: random.Random, sizes: tuple[int, ...], count: int, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """Tensors of one shape in one storage: stacked, fused or interleaved, transposed, padded."""
        ndim = len(sizes) + 1
        order = rng.sample(range(ndim), ndim)
        full = (count, *sizes)
        laid = [full[dim] for dim in order]
        padding = [rng.choice((0, 0, 2)) for _ in laid]
        storage = torch.full(
            [size + pad for size, pad in zip(laid, padding, strict=True)], UNTOUCHED, dtype=dtype
        )
        self.storages[-1].append(storage)
        inner = storage
        for dim, (size, pad) in enumerate(zip(laid, padding, strict=True)):
            inner = inner.narrow(dim, rng.randint(0, pad), size)
        stacked = inner.permute([order.index(dim) for dim in range(ndim)])
        return list(stacked.unbind(0))

    def fill(self, rank: int, wholes: dict[str, torch.Tensor]) -> None:
        for view in self.views[rank]:
            view.tensor.copy_(part_of(wholes[view.name], view.shape, view.dims))

    def wrong(self, rank: int, wholes: dict[str, torch.Tensor]) -> list[str]:
        """Names of views that do not hold what they should, and storages written beside them."""
        bad = [
            view.name
            for view in self.views[rank]
            if not torch.equal(
                view.tensor,
                part_of(wholes[view.name], view.shape, view.dims).to(view.tensor.dtype),
            )
        ]
        kept = [view.tensor.clone() for view in self.views[rank]]
        for view in self.views[rank]:
            view.tensor.fill_(UNTOUCHED)
        for number, storage in enumerate(self.storages[rank]):
            if not bool((storage == UNTOUCHED).all()):
                bad.append(f"storage {number}")
        for view, values in zip(self.views[rank], kept, strict=True):
            view.tensor.copy_(values)
        return bad


def _sizes(dims: Dims) -> tuple[int, ...]:
    return tuple(sum(length for _, _, length in held) for held in dims)


def drawn_finer(
    rng: random.Random, shapes: dict[str, tuple[int, ...]]
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Finer shapes, and the grains of the shapes where these cut them."""
    finer: dict[str, tuple[int, ...]] = {}
    grains: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        factors = [rng.choice([f for f in (1, 2, 3) if size % f == 0]) for size in shape]
        pairs = zip(factors, shape, strict=True)
        finer[name] = tuple(n for f, size in pairs for n in ((f, size // f) if f > 1 else (size,)))
        pairs = zip(factors, shape, strict=True)
        grains[name] = tuple(size // f if f > 1 else 1 for f, size in pairs)
    return finer, grains


def _blocks(rng: random.Random, size: int, count: int, grain: int) -> list[Intervals]:
    """A dimension in at most `count` parts, of several intervals each."""
    places = range(grain, size, grain)
    cuts = sorted(rng.sample(places, min(len(places), rng.randint(0, 3))))
    pieces = [(start, stop - start) for start, stop in itertools.pairwise([0, *cuts, size])]
    rng.shuffle(pieces)
    count = min(count, len(pieces))
    return [intervals_of(pieces[i::count]) for i in range(count)]


def drawn_shapes(rng: random.Random) -> dict[str, tuple[int, ...]]:
    """A little of attention, experts and vectors, of which some have one shape."""
    hidden, inner = rng.choice((4, 6)), rng.choice((4, 6, 8))
    shapes: dict[str, tuple[int, ...]] = {"norm.weight": (hidden,), "bias": (1,)}
    for head in "qkv":
        shapes[f"{head}_proj.weight"] = (inner, hidden)
    for expert in range(rng.randint(1, 3)):
        for part in ("gate", "up", "down"):
            shapes[f"experts.{expert}.{part}"] = (
                (hidden, inner) if part == "down" else (inner, hidden)
            )
    return shapes


def drawn_wholes(
    shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, seed: int
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # Integers that every dtype of the tests holds.
    return {
        name: torch.randint(0, 127, shape, generator=generator).to(dtype)
        for name, shape in shapes.items()
    }
