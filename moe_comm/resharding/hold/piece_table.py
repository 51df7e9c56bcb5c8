"""Pieces of a plan whose checksums are of a tensor's own bytes: listed once, read natively in each refit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from moe_comm.resharding.copy_services.changed_blocks import PieceChecksums
from moe_comm.resharding.describe.module_tensors import (
    RefitSide,
    local_tensor,
    module_of,
    module_state,
)
from moe_comm.resharding.formats.number_formats import is_mxfp8_tensor
from moe_comm.resharding.move.sources import piece_of
from moe_comm.resharding.move.weak_cache import WeakCache
from moe_comm.resharding.plan.joined_pieces import MAX_DIMS
from moe_comm.resharding.plan.reshard_plan import ReshardPlan
from moe_comm.resharding.plan.transfer_op import TransferOp
from moe_comm.resharding.plan.transform_protocol import ReshardTransform
from moe_comm.tensors.memory import check_memory


class PieceTable:
    """Pieces of one end that are views of tensors in CPU memory.

    Args:
        pieces: Transfers that have task ids, and the elements of each on this rank.
    """

    def __init__(self, pieces: Sequence[tuple[TransferOp, torch.Tensor]]) -> None:
        in_order = sorted(pieces, key=lambda piece: (piece[0].peer_rank, piece[0].task_id))
        self.pieces = in_order
        """By peer, then task id."""
        self.ops = [op for op, _ in in_order]
        self.sizes = [tensor.nbytes for _, tensor in in_order]
        """Size of each piece, in bytes."""
        items = [(op.task_id or 0, tensor, op.peer_rank) for op, tensor in in_order]
        self.sums = PieceChecksums(items)
        """Checksums of the pieces and of their blocks, in this order."""
        self._ids = np.array([task_id for task_id, _, _ in items], np.uint64)
        peers = np.array([peer_rank for _, _, peer_rank in items], np.int64)
        self._peers, self._first = np.unique(peers, return_index=True)

    def parts(self) -> Iterator[tuple[int, int, int]]:
        """For each peer, the positions of its first piece and of that behind its last."""
        cuts = [*self._first, len(self.pieces)]
        for peer, (first, end) in zip(self._peers, itertools.pairwise(cuts), strict=True):
            yield int(peer), int(first), int(end)

    def rows(self, checksums: npt.NDArray[np.uint64]) -> Iterator[tuple[int, bytes]]:
        """For each peer, task ids and checksums in turns, in ascending order of the ids."""
        rows = np.stack((self._ids, checksums), axis=1)
        for peer, first, end in self.parts():
            yield peer, rows[first:end].tobytes()


class ListedPieces(NamedTuple):
    """Pieces of one end of a plan.

    Args:
        table: Pieces whose checksums are of a tensor's own bytes.
        others: Transfers whose bytes have to be worked out for each refit, or cannot be.
    """

    table: PieceTable
    others: list[TransferOp]


_listed: WeakCache[tuple[int, ...], tuple[list[TransferOp], ListedPieces]] = WeakCache()
"""By the `id`s of plan and state: the transfers, and what they became."""


def list_pieces(
    plan: ReshardPlan,
    side: RefitSide | None,
    transform: ReshardTransform | None,
    *,
    is_source: bool,
) -> ListedPieces:
    """The pieces of one end, the same object while a side is what it was and nothing transforms it.

    Raises:
        ValueError: The elements of a tensor do not lie in its storage.
    """
    ops = plan.send_ops if is_source else plan.recv_ops
    state = module_state(side)
    key = (id(plan), id(state), is_source)
    known = None if transform is not None else _listed.get(key)
    if known is not None and known[0] is ops:
        return known[1]
    named = {} if side is None else state.tensors
    skipped = {reduction.param_name for reduction in plan.reductions} if is_source else set()
    pieces: list[tuple[TransferOp, torch.Tensor]] = []
    others: list[TransferOp] = []
    for op in ops:
        is_transformed = transform is not None and transform.should_transform(op.param_name)
        is_other = is_transformed or op.param_name in skipped
        piece = None if is_other else _own_bytes(op, named, is_source=is_source)
        if piece is None:
            others.append(op)
        else:
            pieces.append((op, piece))
    listed = ListedPieces(PieceTable(pieces), others)
    if transform is None and side is not None:
        _listed.put(key, (ops, listed), (plan, state, module_of(side)))
    return listed


def _own_bytes(
    op: TransferOp, named: Mapping[str, torch.Tensor], *, is_source: bool
) -> torch.Tensor | None:
    """The view whose bytes a piece is, or None where it is something else."""
    tensor = named.get(op.param_name)
    if tensor is None or op.task_id is None or is_mxfp8_tensor(tensor):
        return None
    local = local_tensor(tensor)
    if local.device.type != "cpu" or local.layout is not torch.strided:
        return None
    if is_source and not {op.wire_dtype, op.peer_dtype} <= {None, local.dtype}:
        return None
    check_memory(f"{op.param_name} of the {'source' if is_source else 'target'}", local)
    piece = piece_of(local, op)
    return piece if piece.dim() <= MAX_DIMS else None
