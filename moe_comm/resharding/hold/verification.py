"""Proof that a refit landed: checksums of every piece on both of its ends."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from moe_comm.errors import RefitError
from moe_comm.peers.agree import FirstError, agree
from moe_comm.peers.bootstrap import Bootstrap, bootstrap_for
from moe_comm.resharding.copy_services.batched_copy import checksum
from moe_comm.resharding.describe.module_tensors import (
    RefitSide,
    get_refit_tensor_dict,
    local_tensor,
)
from moe_comm.resharding.formats.number_formats import is_mxfp8_tensor
from moe_comm.resharding.move import stale
from moe_comm.resharding.move.sources import Sources, piece_of, reduce_partial_sources
from moe_comm.resharding.plan.joined_pieces import MAX_DIMS
from moe_comm.resharding.plan.reshard_plan import ReshardPlan
from moe_comm.resharding.plan.transfer_op import TransferOp, unpack_task_id
from moe_comm.resharding.plan.transform_protocol import ReshardTransform, as_reshard_transform
from moe_comm.tensors.memory import check_memory

__all__ = ["RefitProof", "verify_refit"]

_MAX_LINES = 6


@dataclasses.dataclass(frozen=True)
class RefitProof:
    """What `verify_refit` has compared on this rank.

    Args:
        num_pieces: Pieces of this rank's target that equal their source.
        num_bytes: Bytes of them.
        unproven: Parameters of this rank's target that were written by a transform or quantized, and
            so hold other bytes than their source.
    """

    num_pieces: int
    num_bytes: int
    unproven: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Piece:
    """One end of a piece. `checksum` is None where a comparison would mean nothing."""

    op: TransferOp
    num_bytes: int
    checksum: int | None


_Key = tuple[int, int, int]
"""(source rank, destination rank, task id)"""


def verify_refit(
    plan: ReshardPlan,
    src_module: RefitSide | None,
    dst_module: RefitSide | None,
    group: dist.ProcessGroup | Bootstrap | None = None,
    *,
    transform: ReshardTransform | None = None,
) -> RefitProof:
    """Compare every element of the targets with its source, by checksum. Collective over the group.

    Reads all weights once on either end; ranks exchange 16 bytes per pair, and checksums of the
    pairs that differ. Sources must not have changed since the refit. Where the refit changed the
    dtype, the source is converted in the same way first.

    Args:
        plan: This rank's plan, which was executed.
        src_module: Sources; None on a rank that only received.
        dst_module: Destinations; None on a rank that only sent. Marked stale on every rank where a
            piece differs.
        group: The plan's group.
        transform: The one that was used; None for that of the plan.

    Returns:
        What was compared. Parameters of a transform and MXFP8 ones cannot be, and are listed.

    Raises:
        RefitError: A piece differs, or a target is marked stale; on every rank.
        ValueError: A rank lacks something that the plan moves; on every rank.
    """
    bootstrap = bootstrap_for(group)
    chosen = plan.transform if transform is None else transform
    hooks = None if chosen is None else as_reshard_transform(chosen)
    sent: dict[_Key, _Piece] = {}
    received: dict[_Key, _Piece] = {}
    reason = None if dst_module is None else stale.stale_reason(dst_module)
    with FirstError() as first, torch.no_grad():
        sent = _source_pieces(plan, src_module, hooks, bootstrap.rank_idx)
        received = _destination_pieces(plan, dst_module, hooks, bootstrap.rank_idx)
    unproven = [
        key for ends in (sent, received) for key, piece in ends.items() if piece.checksum is None
    ]
    gathered = agree(bootstrap.all_gather, first.take_line(), (reason, unproven))
    _raise_stale([its for its, _ in gathered])
    skipped = {key for _, keys in gathered for key in keys}
    odd_pairs = _odd_pairs(bootstrap, sent, received, skipped)
    if odd_pairs:
        with torch.no_grad():
            parts = _taken_apart(plan, odd_pairs, bootstrap.rank_idx)
            for ends, apart in (
                (sent, _source_pieces(parts, src_module, hooks, bootstrap.rank_idx)),
                (received, _destination_pieces(parts, dst_module, hooks, bootstrap.rank_idx)),
            ):
                for key in [key for key, piece in ends.items() if piece.op.joined is not None]:
                    del ends[key]
                ends |= apart
        _raise_differences(bootstrap, odd_pairs, sent, received, skipped, dst_module)
    proven = [piece for key, piece in received.items() if key not in skipped]
    names = (piece.op.param_name for key, piece in received.items() if key in skipped)
    return RefitProof(
        len(proven), sum(piece.num_bytes for piece in proven), tuple(dict.fromkeys(names))
    )


def _taken_apart(plan: ReshardPlan, pairs: list[tuple[int, int]], rank_idx: int) -> ReshardPlan:
    """The pieces between some ranks that were joined, each by itself."""
    sends = (op for op in plan.send_ops if (rank_idx, op.peer_rank) in pairs)
    recvs = (op for op in plan.recv_ops if (op.peer_rank, rank_idx) in pairs)
    return ReshardPlan(
        [piece for op in sends if op.joined is not None for piece in op.pieces],
        [piece for op in recvs if op.joined is not None for piece in op.pieces],
    )


def _task_id(op: TransferOp) -> int:
    if op.task_id is None:
        raise ValueError(f"{op.param_name}: a piece without a task id cannot be compared")
    return op.task_id


def _source_pieces(
    plan: ReshardPlan,
    module: RefitSide | None,
    hooks: ReshardTransform | None,
    rank_idx: int,
) -> dict[_Key, _Piece]:
    """What the destinations should hold of this rank's sources."""

    def is_transformed(name: str) -> bool:
        return hooks is not None and hooks.should_transform(name)

    tensors = {} if module is None else get_refit_tensor_dict(module)
    missing = [op.param_name for op in plan.send_ops if op.param_name not in tensors]
    problem = f"the plan sends {missing[0]}, which this rank does not have" if missing else None
    sources = Sources(plan, tensors, reduce_partial_sources(plan, tensors, problem), is_transformed)
    pieces = {}
    for op in plan.send_ops:
        key = (rank_idx, op.peer_rank, _task_id(op))
        if is_transformed(op.param_name):
            pieces[key] = _Piece(op, 0, None)
            continue
        source = sources.get(op.param_name)
        check_memory(f"{op.param_name} of the source", source)
        piece = piece_of(source, op)
        for dtype in (op.wire_dtype, op.peer_dtype):
            piece = piece if dtype is None else piece.to(dtype)
        pieces[key] = _proven_by_checksum(op, piece)
    return pieces


def _destination_pieces(
    plan: ReshardPlan,
    module: RefitSide | None,
    hooks: ReshardTransform | None,
    rank_idx: int,
) -> dict[_Key, _Piece]:
    """What this rank's destinations hold."""
    tensors = {} if module is None else get_refit_tensor_dict(module)
    pieces = {}
    for op in plan.recv_ops:
        tensor = tensors.get(op.param_name)
        is_unproven = hooks is not None and hooks.should_transform(op.param_name)
        if tensor is None and not is_unproven:
            raise ValueError(f"the plan receives {op.param_name}, which this rank does not have")
        is_unproven = is_unproven or is_mxfp8_tensor(tensor)
        key = (op.peer_rank, rank_idx, _task_id(op))
        if tensor is None or is_unproven:
            pieces[key] = _Piece(op, 0, None)
        else:
            target = local_tensor(tensor)
            check_memory(f"{op.param_name} of the target", target)
            pieces[key] = _proven_by_checksum(op, piece_of(target, op))
    return pieces


def _proven_by_checksum(op: TransferOp, piece: torch.Tensor) -> _Piece:
    in_memory = piece.cpu() if piece.dim() <= MAX_DIMS else piece.cpu().contiguous()
    return _Piece(op, piece.numel() * piece.element_size(), checksum(in_memory))


def _raise_stale(gathered: list[str | None]) -> None:
    reasons = {i: reason for i, reason in enumerate(gathered) if reason is not None}
    if reasons:
        raise RefitError(
            "; ".join(f"the target on rank {i} is stale: {why}" for i, why in reasons.items()),
            ranks=tuple(reasons),
        )


def _odd_pairs(
    bootstrap: Bootstrap,
    sent: Mapping[_Key, _Piece],
    received: Mapping[_Key, _Piece],
    skipped: set[_Key],
) -> list[tuple[int, int]]:
    """(source, destination) of the pairs whose checksums are not all the same on both ends."""
    row = np.zeros((2, bootstrap.num_ranks), dtype=np.uint64)
    for side, ends in enumerate((sent, received)):
        by_peer: dict[int, list[tuple[int, int]]] = {}
        for key, piece in ends.items():
            if key not in skipped:
                # Of (source, destination), the one that is not this rank.
                by_peer.setdefault(key[1 - side], []).append((key[2], piece.checksum or 0))
        for peer, items in by_peer.items():
            data = np.array(sorted(items), dtype=np.uint64).tobytes()
            row[side, peer] = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
    rows = [np.frombuffer(item, np.uint64) for item in bootstrap.all_gather(row.tobytes())]
    gathered = np.stack(rows).reshape(-1, *row.shape)
    return [(int(i), int(j)) for i, j in np.argwhere(gathered[:, 0] != gathered[:, 1].T)]


def _raise_differences(
    bootstrap: Bootstrap,
    odd_pairs: list[tuple[int, int]],
    sent: Mapping[_Key, _Piece],
    received: Mapping[_Key, _Piece],
    skipped: set[_Key],
    dst_module: RefitSide | None,
) -> NoReturn:
    pairs = set(odd_pairs)
    mine = [
        {
            key: (piece.op.param_name, _text_of(piece.op), piece.checksum)
            for key, piece in ends.items()
            if key[:2] in pairs and key not in skipped
        }
        for ends in (sent, received)
    ]
    all_sent: dict[_Key, Any] = {}
    all_received: dict[_Key, Any] = {}
    for their_sent, their_received in bootstrap.all_gather(mine):
        all_sent |= their_sent
        all_received |= their_received
    lines: dict[_Key, str] = {}
    for key in sorted(all_sent.keys() | all_received.keys()):
        line = _difference(key, all_sent.get(key), all_received.get(key))
        if line is not None:
            lines[key] = line
    ranks = sorted({dst_rank for _, dst_rank, _ in lines})
    mine_differ = [
        line for (_, dst_rank, _), line in lines.items() if dst_rank == bootstrap.rank_idx
    ]
    if mine_differ and dst_module is not None:
        stale.mark_stale(dst_module, f"verification failed: {mine_differ[0]}")
    shown = list(lines.values())[:_MAX_LINES]
    more = f"; and {len(lines) - len(shown)} more" if len(lines) > len(shown) else ""
    raise RefitError("; ".join(shown) + more, ranks=ranks)


def _text_of(op: TransferOp) -> str:
    slices = ", ".join(f"{part.start}:{part.stop}" for part in op.my_slice)
    return f"piece {unpack_task_id(_task_id(op))[2]} [{slices}]"


def _difference(key: _Key, sent: Any, received: Any) -> str | None:
    """What is wrong with one piece, or None."""
    src_rank, dst_rank, task_id = key
    if received is None:
        return (
            f"rank {src_rank} sends {sent[0]}, {sent[1]}, to rank {dst_rank}, whose plan does not "
            f"receive task {task_id}"
        )
    name, piece, found = received
    where = f"rank {dst_rank}: {name}, {piece}, from rank {src_rank}"
    if sent is None:
        return f"{where}: that rank's plan does not send task {task_id}"
    if sent[2] == found:
        return None
    return f"{where} ({sent[0]}): the source has checksum {sent[2]:016x}, the target {found:016x}"
