"""Blocks that masks want, against masks spread over every byte."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from moe_comm.resharding.copy_services.changed_blocks import BLOCK_BYTES, mark_ranges
from moe_comm.resharding.hold.block_masks import BlockMasks
from moe_comm.resharding.hold.piece_table import PieceTable
from moe_comm.resharding.move.sources import piece_of
from moe_comm.resharding.plan.transfer_op import JoinedPieces, TransferOp

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.complex128]


def op_of(name: str, shape: tuple[int, ...], rng: random.Random, peer: int) -> TransferOp:
    """Return a transfer of drawn rows, columns and steps, of a view that may cut the first dimension."""
    view = None
    if shape[0] % 2 == 0 and rng.random() < 0.5:
        view = (2, shape[0] // 2, *shape[1:])
    cuts = []
    for size in view or shape:
        first = rng.randrange(size) if rng.random() < 0.5 else 0
        cuts.append(slice(first, rng.randint(first + 1, size), rng.choice((1, 1, 1, 2))))
    return TransferOp(name, peer, True, tuple(cuts), (), task_id=peer, my_view=view)


def blocks_of(mask: torch.Tensor, tensor: torch.Tensor, op: TransferOp) -> np.ndarray:
    """Return which blocks of a piece have a byte of an element in the mask."""
    spread = mask.expand(tensor.shape).clone()
    flags = piece_of(spread, op).reshape(-1).repeat_interleave(tensor.element_size()).numpy()
    at = np.arange(0, len(flags), BLOCK_BYTES)
    return np.logical_or.reduceat(flags, at)


@pytest.mark.parametrize("seed", range(40))
def test_blocks_that_masks_want(seed: int) -> None:
    rng, torch_rng = random.Random(seed), torch.Generator().manual_seed(seed)
    tensors = {}
    for number in range(4):
        shape = tuple(rng.choice((1, 3, 30, 64, 129)) for _ in range(rng.randint(1, 4)))
        tensors[f"w{number}"] = torch.empty(shape, dtype=rng.choice(DTYPES))
    ops = [op_of(f"w{idx % 4}", tuple(tensors[f"w{idx % 4}"].shape), rng, idx) for idx in range(12)]
    table = PieceTable([(op, piece_of(tensors[op.param_name], op)) for op in ops])
    ends = np.cumsum([-(-size // BLOCK_BYTES) for size in table.sizes])
    masks = BlockMasks(table, ends)
    for _ in range(3):
        changed = {}
        for name, tensor in tensors.items():
            cut = [1 if rng.random() < 0.4 else size for size in tensor.shape]
            drawn = torch.rand(cut[rng.randrange(2) :], generator=torch_rng)
            changed[name] = drawn < rng.choice((0.0, 1e-4, 0.02))
        wanted = masks.wanted(tensors, changed)
        for first, end, (op, _) in zip([0, *ends], ends, table.pieces, strict=False):
            mask, tensor = changed[op.param_name], tensors[op.param_name]
            exact = blocks_of(mask, tensor, op)
            assert not (exact & ~wanted[first:end]).any(), "a changed block is not read"
            if mask.shape == tensor.shape and piece_of(mask, op).is_contiguous():
                np.testing.assert_array_equal(wanted[first:end], exact)
            if not mask.any():
                assert not wanted[first:end].any()


def test_blocks_of_joined_pieces_are_of_any_of_them() -> None:
    storage = torch.empty(4 * BLOCK_BYTES, dtype=torch.uint8)
    tensors = {"a": storage[: 2 * BLOCK_BYTES], "b": storage[2 * BLOCK_BYTES :]}
    every = (slice(0, 2 * BLOCK_BYTES),)
    parts = tuple(TransferOp(name, 0, True, every, every, task_id=1) for name in tensors)
    sizes = (4 * BLOCK_BYTES,)
    joined = JoinedPieces(parts, 0, sizes, (1,), ((0, (1,)), (2 * BLOCK_BYTES, (1,))))
    op = TransferOp("a", 0, True, every, every, task_id=1, joined=joined)
    masks = BlockMasks(PieceTable([(op, storage)]), np.array([4]))
    mask = torch.zeros(2 * BLOCK_BYTES, dtype=torch.bool)
    assert masks.wanted(tensors, {"b": mask}).tolist() == [False] * 4
    mask[-1] = True
    assert masks.wanted(tensors, {"b": mask}).tolist() == [True] * 4
    assert masks.wanted(tensors, {}).tolist() == [False] * 4


def test_ranges_beyond_what_is_there() -> None:
    flags, marked = np.zeros(8, np.bool_), np.zeros(2, np.bool_)
    for row, text in (((0, 3, 0, 1), "blocks 0 to 3 of 2"), ((0, 1, 0, 9), "flags 0 to 9 of 8")):
        with pytest.raises(ValueError, match=text):
            mark_ranges([(flags, np.array([row]))], marked)
