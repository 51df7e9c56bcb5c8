"""Proof that a refit landed: checksums of every piece on both of its ends."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from moe_comm.errors import RefitError
from moe_comm.peers.agree import FirstError, agree
from moe_comm.peers.bootstrap import Bootstrap, bootstrap_for
from moe_comm.resharding.copy_services.batched_copy import PreparedCopies
from moe_comm.resharding.copy_services.changed_blocks import checksum
from moe_comm.resharding.describe.module_tensors import (
    RefitSide,
    get_refit_tensor_dict,
    local_tensor,
)
from moe_comm.resharding.formats.block_pieces import BlockPiece, Maxima, is_cut
from moe_comm.resharding.formats.number_formats import BlockFormat, is_mxfp8_tensor
from moe_comm.resharding.formats.scaled_buffers import ScaledBufferTransform
from moe_comm.resharding.formats.transforms import _ensure_sendable
from moe_comm.resharding.hold.piece_table import PieceTable, list_pieces
from moe_comm.resharding.move import stale
from moe_comm.resharding.move.scratch_pages import Staging, most_staged_bytes
from moe_comm.resharding.move.sources import Sources, piece_of, reduce_partial_sources
from moe_comm.resharding.plan.joined_pieces import MAX_DIMS
from moe_comm.resharding.plan.plan_check import num_elements_of
from moe_comm.resharding.plan.reshard_plan import ReshardPlan
from moe_comm.resharding.plan.transfer_op import TransferOp, unpack_task_id
from moe_comm.resharding.plan.transform_protocol import ReshardTransform, as_reshard_transform
from moe_comm.tensors.memory import check_memory

_MAX_LINES = 6


@dataclasses.dataclass(frozen=True)
class RefitProof:
    """Proof of `verify_refit`: what it has compared on this rank.

    Args:
        num_pieces: Pieces of this rank's target that are what their source makes of them.
        num_bytes: Bytes of them in the target's storage, scale factors among them.
        unproven: Parameters of this rank's target of which nobody can tell what they must hold: written
            by a transform that does not say it, or quantized by a class of another package.
    """

    num_pieces: int
    num_bytes: int
    unproven: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Piece:
    """One end of a piece. `checksums`, of its parts by name, is None where a comparison would mean nothing."""

    op: TransferOp
    num_bytes: int
    checksums: dict[str, int] | None


_Key = tuple[int, int, int]
"""(source rank, destination rank, task id)"""


@dataclasses.dataclass
class _End:
    """This rank's pieces on one of their two ends: rows of a table while none of them is looked at.

    Args:
        rank_idx: This rank.
        is_source: Whether this is where they are sent from.
        table: The pieces that `checksums` are of; None once they are among `others`.
        checksums: Checksums of the table.
        others: Pieces that are looked at each by itself.
    """

    rank_idx: int
    is_source: bool
    table: PieceTable | None = None
    checksums: npt.NDArray[np.uint64] = dataclasses.field(
        default_factory=lambda: np.empty(0, np.uint64)
    )
    others: dict[_Key, _Piece] = dataclasses.field(default_factory=dict)

    def key_of(self, op: TransferOp) -> _Key:
        ranks = self.rank_idx, op.peer_rank
        return (*(ranks if self.is_source else ranks[::-1]), _task_id(op))

    def pieces(self) -> dict[_Key, _Piece]:
        """All of them, each by itself, from now on."""
        if self.table is not None:
            values = self.checksums.tolist()
            for op, size, value in zip(self.table.ops, self.table.sizes, values, strict=True):
                self.others[self.key_of(op)] = _Piece(op, size, {"": value})
            self.table = None
        return self.others

    def rows(self, skipped: set[_Key]) -> Iterator[tuple[int, bytes]]:
        """For each peer, ids and checksums of the pieces with it, in ascending order of the ids."""
        if self.table is not None and not self.others and not skipped:
            yield from self.table.rows(self.checksums)
            return
        by_peer: dict[int, list[tuple[int, ...]]] = {}
        for key, piece in self.pieces().items():
            if key not in skipped:
                # The one of (source, destination) that is not this rank.
                peer = key[1 if self.is_source else 0]
                by_peer.setdefault(peer, []).append((key[2], *(piece.checksums or {}).values()))
        for peer, items in by_peer.items():
            flat = itertools.chain.from_iterable(sorted(items))
            yield peer, np.fromiter(flat, dtype=np.uint64).tobytes()

    def proof(self, skipped: set[_Key]) -> RefitProof:
        """Proof of all that was compared on this end, and found to be alike."""
        if self.table is not None and not self.others and not skipped:
            return RefitProof(len(self.table.ops), sum(self.table.sizes), ())
        pieces = self.pieces()
        proven = [piece for key, piece in pieces.items() if key not in skipped]
        names = (piece.op.param_name for key, piece in pieces.items() if key in skipped)
        num_bytes = sum(piece.num_bytes for piece in proven)
        return RefitProof(len(proven), num_bytes, tuple(dict.fromkeys(names)))


_Blocks = dict[int, tuple[BlockFormat, frozenset[int]]]
"""By destination rank, the format of its parameters in blocks, and the numbers of these."""

_BLOCK_PARTS = ("data", "scale factors")


def verify_refit(
    plan: ReshardPlan,
    src_module: RefitSide | None,
    dst_module: RefitSide | None,
    group: dist.ProcessGroup | Bootstrap | None = None,
    *,
    transform: ReshardTransform | None = None,
) -> RefitProof:
    """Compare every element of the targets with what its source makes of it, by checksum. Collective.

    Reads all weights once on either end; ranks exchange 16 bytes per pair, and checksums of the
    pairs that differ. Sources must not have changed since the refit. Where the refit changed the
    dtype, or quantized in blocks, sources do the same once more, and the target is read in its own
    layout: data and scale factors. Of blocks that pieces of several sources share, sources tell each
    other the largest absolute values.

    Args:
        plan: This rank's plan, which was executed.
        src_module: Sources; None on a rank that only received.
        dst_module: Destinations; None on a rank that only sent. Marked stale on every rank where a
            piece differs.
        group: The plan's group.
        transform: The one that was used; None for that of the plan.

    Returns:
        Proof with what was compared. Parameters of which nobody can tell what they must hold are listed.

    Raises:
        RefitError: A piece differs, or a target is marked stale; on every rank.
        ValueError: A rank lacks something that the plan moves; on every rank.
    """
    return prove_refit(plan, src_module, dst_module, bootstrap_for(group), transform)


def prove_refit(
    plan: ReshardPlan,
    src_module: RefitSide | None,
    dst_module: RefitSide | None,
    bootstrap: Bootstrap,
    transform: ReshardTransform | None,
    copies: Sequence[PreparedCopies] = (),
    hashed: Callable[[PieceTable], npt.NDArray[np.uint64] | None] | None = None,
    written: str = "",
) -> RefitProof:
    """`verify_refit` for a caller that has just run the plan.

    Args:
        plan: As there, like what is not named here.
        src_module: As there.
        dst_module: As there.
        bootstrap: The plan's ranks; its `num_threads`, where it has some, read this rank's weights.
        transform: As there.
        copies: Copies that ran. Sources that they have hashed are not read again where they still are.
        hashed: The checksums of a table of sources, where what ran has them.
        written: Text that says which sources something has written while it ran; "" for none.
    """
    chosen = plan.transform if transform is None else transform
    hooks = None if chosen is None else as_reshard_transform(chosen)
    num_threads: int = getattr(bootstrap, "num_threads", torch.get_num_threads())
    sent = _End(bootstrap.rank_idx, is_source=True)
    received = _End(bootstrap.rank_idx, is_source=False)
    reason = None if dst_module is None else stale.stale_reason(dst_module)

    @functools.cache
    def sources() -> Sources:
        return _sources_of(plan, src_module, hooks)

    with FirstError() as first, torch.no_grad():
        listed = list_pieces(plan, src_module, hooks, is_source=True)
        if listed.others or plan.reductions:
            sent.others = _source_pieces(listed.others, sources(), hooks, sent.key_of)
        sent.table = listed.table
        known = None if hashed is None else hashed(listed.table)
        sent.checksums = listed.table.sums.compute(copies, num_threads) if known is None else known
        listed = list_pieces(plan, dst_module, hooks, is_source=False)
        received.others = _destination_pieces(listed.others, dst_module, hooks, received.key_of)
        received.table = listed.table
        received.checksums = listed.table.sums.compute((), num_threads)
    gathered = agree(
        bootstrap.all_gather,
        first.take_line(),
        (
            reason,
            _unknown(sent.others),
            _unknown(received.others),
            _own_blocks(hooks, received.others),
            (written, sorted({op.peer_rank for op in plan.send_ops})) if written else None,
        ),
    )
    _raise_stale([its for its, *_ in gathered])
    _raise_written([its for *_, its in gathered], bootstrap.rank_idx, dst_module)
    blocks: _Blocks = {
        rank: (its[0], frozenset(its[1])) for rank, (*_, its, _) in enumerate(gathered) if its
    }
    if blocks:
        _expect_blocks(plan, sources(), hooks, blocks, bootstrap, sent.pieces())
    skipped = {key for _, _, keys, *_ in gathered for key in keys}
    skipped |= {key for _, keys, *_ in gathered for key in keys if _format_at(blocks, key) is None}
    odd_pairs = _mismatched_pairs(bootstrap, sent, received, skipped)
    if odd_pairs:
        with torch.no_grad():
            parts = _taken_apart(plan, odd_pairs, bootstrap.rank_idx)
            for end, apart in (
                (sent, _source_pieces(parts.send_ops, sources(), hooks, sent.key_of)),
                (
                    received,
                    _destination_pieces(parts.recv_ops, dst_module, hooks, received.key_of),
                ),
            ):
                pieces = end.pieces()
                for key in [key for key, piece in pieces.items() if piece.op.joined is not None]:
                    del pieces[key]
                pieces |= apart
        _raise_differences(
            bootstrap, odd_pairs, sent.pieces(), received.pieces(), skipped, dst_module
        )
    return received.proof(skipped)


def _unknown(ends: Mapping[_Key, _Piece]) -> list[_Key]:
    return [key for key, piece in ends.items() if piece.checksums is None]


def _parameter_of(key: _Key) -> int:
    """Number of the destination's parameter that a piece is of."""
    return unpack_task_id(key[2])[1]


def _own_blocks(
    hooks: ReshardTransform | None, received: Mapping[_Key, _Piece]
) -> tuple[BlockFormat, list[int]] | None:
    """Return the format of the blocks that this rank receives into, and the numbers of their parameters."""
    if not isinstance(hooks, ScaledBufferTransform):
        return None
    numbers = {
        _parameter_of(key)
        for key, piece in received.items()
        if hooks.should_transform(piece.op.param_name) and piece.checksums is not None
    }
    return (hooks.block_format, sorted(numbers)) if numbers else None


def _format_at(blocks: _Blocks, key: _Key) -> BlockFormat | None:
    """The format of the blocks that a piece is written into; None for none."""
    block_format, numbers = blocks.get(key[1], (None, frozenset()))
    return block_format if _parameter_of(key) in numbers else None


def _expect_blocks(
    plan: ReshardPlan,
    sources: Sources,
    hooks: ReshardTransform | None,
    blocks: _Blocks,
    bootstrap: Bootstrap,
    sent: dict[_Key, _Piece],
) -> None:
    """Work out what the destinations in blocks must hold of this rank's sources. Collective.

    Args:
        plan: This rank's.
        sources: Sources of this rank.
        hooks: This rank's transform.
        blocks: Blocks of all ranks.
        bootstrap: The ranks.
        sent: Pieces, to which those that are worked out are added.
    """
    ops = {}
    for op in plan.send_ops:
        key = (bootstrap.rank_idx, op.peer_rank, _task_id(op))
        if (block_format := _format_at(blocks, key)) is not None:
            bounds = tuple((part.start, part.stop) for part in op.peer_slice)
            ops[key] = op, bounds, block_format
    maxima: list[tuple[int, int, Maxima]] = []
    # Twice, as not all pieces need fit into memory at once in bfloat16.
    with FirstError() as first, torch.no_grad():
        for key, (op, bounds, block_format) in ops.items():
            if is_cut(bounds, block_format.block):
                values = _unquantized(op, sources, hooks)
                its = BlockPiece(values, bounds, block_format.block).maxima()
                maxima.append((op.peer_rank, _parameter_of(key), its))
    gathered = agree(bootstrap.all_gather, first.take_line(), maxima)
    of_parameter: dict[tuple[int, int], list[Maxima]] = {}
    for rank, number, its in itertools.chain.from_iterable(gathered):
        of_parameter.setdefault((rank, number), []).append(its)
    with FirstError() as first, torch.no_grad():
        for key, (op, bounds, block_format) in ops.items():
            piece = BlockPiece(_unquantized(op, sources, hooks), bounds, block_format.block)
            others = of_parameter.get((op.peer_rank, _parameter_of(key)), [])
            expected = piece.expected(block_format, others)
            sent[key] = _proven_by_checksum(op, dict(zip(_BLOCK_PARTS, expected, strict=True)))
    agree(bootstrap.all_gather, first.take_line())


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


def _unquantized(op: TransferOp, sources: Sources, hooks: ReshardTransform | None) -> torch.Tensor:
    """A piece as the destination quantizes it: bfloat16."""
    if _is_transformed(hooks, op.param_name):
        piece = piece_of(_ensure_sendable(sources.given(op.param_name)), op)
    else:
        piece = piece_of(sources.get(op.param_name), op)
        piece = piece if op.wire_dtype is None else piece.to(op.wire_dtype)
    check_memory(f"{op.param_name} of the source", piece)
    return piece.to(torch.bfloat16).contiguous()


def _is_transformed(hooks: ReshardTransform | None, name: str) -> bool:
    return hooks is not None and hooks.should_transform(name)


def _sources_of(
    plan: ReshardPlan, module: RefitSide | None, hooks: ReshardTransform | None
) -> Sources:
    """This rank's sources. Collective where they are pending sums."""
    tensors = {} if module is None else get_refit_tensor_dict(module)
    missing = [op.param_name for op in plan.send_ops if op.param_name not in tensors]
    problem = f"the plan sends {missing[0]}, which this rank does not have" if missing else None
    reduced = reduce_partial_sources(plan, tensors, problem)
    return Sources(plan, tensors, reduced, functools.partial(_is_transformed, hooks))


def _source_pieces(
    ops: Iterable[TransferOp],
    sources: Sources,
    hooks: ReshardTransform | None,
    key_of: Callable[[TransferOp], _Key],
) -> dict[_Key, _Piece]:
    """Return the pieces that destinations should hold of this rank's sources, but for those in blocks."""
    pieces = {}
    ops = list(ops)
    staging = Staging(most_staged_bytes(max(map(num_elements_of, ops))) if ops else 0)
    for op in ops:
        staging.clear()
        key = key_of(op)
        if _is_transformed(hooks, op.param_name):
            assert hooks is not None
            expected = hooks.expected_of(op, sources.given(op.param_name))
            pieces[key] = _proven_by_checksum(op, _numbered(expected))
            continue
        source = sources.get(op.param_name)
        check_memory(f"{op.param_name} of the source", source)
        piece = piece_of(source, op)
        for dtype in (op.wire_dtype, op.peer_dtype):
            piece = piece if dtype is None else staging.cast(piece, dtype)
        pieces[key] = _proven_by_checksum(op, {"": piece})
    return pieces


def _destination_pieces(
    ops: Iterable[TransferOp],
    module: RefitSide | None,
    hooks: ReshardTransform | None,
    key_of: Callable[[TransferOp], _Key],
) -> dict[_Key, _Piece]:
    """Return the pieces that this rank's destinations hold."""
    tensors = {} if module is None else get_refit_tensor_dict(module)
    pieces = {}
    for op in ops:
        key = key_of(op)
        if _is_transformed(hooks, op.param_name):
            assert hooks is not None
            written = hooks.written_of(op)
            is_in_blocks = isinstance(hooks, ScaledBufferTransform) and written is not None
            parts = (
                dict(zip(_BLOCK_PARTS, written or (), strict=True))
                if is_in_blocks
                else _numbered(written)
            )
            pieces[key] = _proven_by_checksum(op, parts)
            continue
        tensor = tensors.get(op.param_name)
        if tensor is None:
            raise ValueError(f"the plan receives {op.param_name}, which this rank does not have")
        if is_mxfp8_tensor(tensor):
            pieces[key] = _Piece(op, 0, None)
            continue
        target = local_tensor(tensor)
        check_memory(f"{op.param_name} of the target", target)
        pieces[key] = _proven_by_checksum(op, {"": piece_of(target, op)})
    return pieces


def _numbered(tensors: Sequence[torch.Tensor] | None) -> dict[str, torch.Tensor] | None:
    """Name tensors by their numbers, for messages."""
    if tensors is None:
        return None
    return {f"tensor {number}": tensor for number, tensor in enumerate(tensors)}


def _proven_by_checksum(op: TransferOp, parts: Mapping[str, torch.Tensor] | None) -> _Piece:
    """One end of a piece, of what it is made of; None where nobody can tell."""
    if parts is None:
        return _Piece(op, 0, None)
    checksums = {}
    for name, part in parts.items():
        in_memory = part.cpu() if part.dim() <= MAX_DIMS else part.cpu().contiguous()
        checksums[name] = checksum(in_memory)
    num_bytes = sum(part.numel() * part.element_size() for part in parts.values())
    return _Piece(op, num_bytes, checksums)


def _raise_stale(gathered: list[str | None]) -> None:
    reasons = {i: reason for i, reason in enumerate(gathered) if reason is not None}
    if reasons:
        raise RefitError(
            "; ".join(f"the target on rank {i} is stale: {why}" for i, why in reasons.items()),
            ranks=tuple(reasons),
        )


def _raise_written(
    gathered: list[tuple[str, list[int]] | None], rank_idx: int, dst_module: RefitSide | None
) -> None:
    """Raise what source ranks say of writes, with the ranks that got some of what was written."""
    told = [(rank, *its) for rank, its in enumerate(gathered) if its is not None]
    if not told:
        return
    text = "; ".join(f"rank {rank}: {what}" for rank, what, _ in told)
    ranks = sorted({rank for *_, readers in told for rank in readers})
    if rank_idx in ranks and dst_module is not None:
        stale.mark_stale(dst_module, f"verification failed: {text}")
    raise RefitError(text, ranks=ranks)


def _mismatched_pairs(
    bootstrap: Bootstrap, sent: _End, received: _End, skipped: set[_Key]
) -> list[tuple[int, int]]:
    """(source, destination) of the pairs whose checksums are not all the same on both ends."""
    row = np.zeros((2, bootstrap.num_ranks), dtype=np.uint64)
    for side, end in enumerate((sent, received)):
        for peer, data in end.rows(skipped):
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
            key: (piece.op.param_name, _text_of(piece.op), piece.checksums)
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
    """Return the problem of one piece, or None."""
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
    for part in dict.fromkeys((*sent[2], *found)):
        here, there = (_hexadecimal(checksums.get(part)) for checksums in (sent[2], found))
        if here != there:
            what = f"{part}: " if part else ""
            return f"{where} ({sent[0]}): {what}the source has checksum {here}, the target {there}"
    return None


def _hexadecimal(number: int | None) -> str:
    return "none" if number is None else f"{number:016x}"
