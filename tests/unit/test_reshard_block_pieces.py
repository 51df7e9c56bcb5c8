"""Pieces of weights in blocks: what each source expects of its piece is what quantizing the whole gives."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from moe_comm.resharding.formats.block_pieces import BlockPiece, is_cut
from moe_comm.resharding.formats.number_formats import BlockFormat, scale_shape
from moe_comm.resharding.formats.scaled_buffers import scale_bounds, slices_of
from tests.helpers.weights import same_bits

FORMATS = [
    BlockFormat((128, 128), "FLOAT32"),
    BlockFormat((128, 128), "FLOAT32_POWER_OF_2"),
    BlockFormat((1, 128), "FLOAT32"),
    BlockFormat((1, 32), "UE8M0"),
]


def cut(rng: random.Random, size: int, num_parts: int) -> list[tuple[int, int]]:
    inner = sorted(rng.sample(range(1, size), num_parts - 1))
    return list(itertools.pairwise([0, *inner, size]))


@pytest.mark.parametrize("special", [None, float("nan"), float("inf"), 0.0])
@pytest.mark.parametrize("block_format", FORMATS, ids=str)
@pytest.mark.parametrize("shape", [(300, 416), (2, 200, 160), (40, 32)])
def test_pieces_add_up_to_the_whole(
    shape: tuple[int, ...], block_format: BlockFormat, special: float | None
) -> None:
    rng = random.Random(str((shape, block_format, special)))
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    weight = torch.randn(shape, generator=generator).mul(3).exp().bfloat16()
    if special is not None:
        weight[..., 7, 9] = special
        weight[..., 16:20, :] = 0.0
    data, scale = block_format.quantize(weight)
    assert scale.shape == scale_shape(shape, block_format.block)
    *leading, rows, columns = shape
    grid = [cut(rng, size, 1 + (size > 1)) for size in leading]
    grid += [cut(rng, rows, 4), cut(rng, columns, 3)]
    pieces = {
        bounds: BlockPiece(weight[slices_of(bounds)].contiguous(), bounds, block_format.block)
        for bounds in itertools.product(*grid)
    }
    maxima = [
        piece.maxima() for bounds, piece in pieces.items() if is_cut(bounds, block_format.block)
    ]
    assert maxima
    for bounds, piece in pieces.items():
        expected = piece.expected(block_format, maxima)
        assert same_bits(expected[0].contiguous(), data[slices_of(bounds)].contiguous())
        place = slices_of(scale_bounds(bounds, block_format.block))
        assert same_bits(expected[1], scale[place].contiguous())


def test_a_piece_alone_does_not_know_the_scale_factor() -> None:
    weight = torch.ones(128, 128).bfloat16()
    weight[100] = 4.0
    bounds = ((0, 90), (0, 128))
    piece = BlockPiece(weight[:90], bounds, (128, 128))
    rest = BlockPiece(weight[90:], ((90, 128), (0, 128)), (128, 128))
    alone = piece.expected(FORMATS[0], [piece.maxima()])
    together = piece.expected(FORMATS[0], [piece.maxima(), rest.maxima()])
    assert alone[1].item() == pytest.approx(1 / 448)
    assert together[1].item() == pytest.approx(4 / 448)
    assert not same_bits(alone[0].contiguous(), together[0].contiguous())
