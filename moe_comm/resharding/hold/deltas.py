"""Refits that move only what changed: blocks whose checksums are others than when they were last sent."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from moe_comm.peers.agree import FirstError, agree
from moe_comm.peers.bootstrap import Bootstrap
from moe_comm.peers.plain_data import travels
from moe_comm.resharding.copy_services.base import CopyService
from moe_comm.resharding.copy_services.changed_blocks import BLOCK_BYTES
from moe_comm.resharding.describe.module_tensors import ModuleState, RefitSide
from moe_comm.resharding.hold.block_masks import BlockMasks, Changed
from moe_comm.resharding.hold.piece_table import ListedPieces, PieceTable, list_pieces
from moe_comm.resharding.hold.refit_group import RefitRanks
from moe_comm.resharding.move import stale
from moe_comm.resharding.move.execution import States, exchange, execute, write_beside
from moe_comm.resharding.plan.reshard_plan import ReshardPlan
from moe_comm.resharding.plan.transfer_op import TransferOp, pack_task_id
from moe_comm.resharding.plan.transform_protocol import ReshardTransform, as_reshard_transform

__all__ = ["Changed", "Delta", "DeltaReport", "Deltas"]

# A pair of which more bytes and a larger part have changed gets the whole, straight into its place and
# without memory beside it.
_MOST_CHANGED = 0.25
_MOST_BYTES = 16 << 20
_LINE_BYTES = 64
# Bytes of messages that are kept between refits.
_KEPT_BYTES = 64 << 20

_Pair = tuple[int, int]
"""(source rank, destination rank)"""
_Key = tuple[int, int, int | None]
"""(source rank, destination rank, task id)"""
_Flags: TypeAlias = "npt.NDArray[np.bool_]"
_Sums: TypeAlias = "npt.NDArray[np.uint64]"


@dataclasses.dataclass(frozen=True)
class DeltaReport:
    """Numbers of one refit with deltas, over all ranks and equal on each but where it says otherwise.

    Args:
        total_bytes: Bytes of all pieces that can travel in blocks.
        sent_bytes: Bytes of these that travelled: changed blocks, and all of the pairs in `whole`.
        num_blocks: Blocks of 64 KiB or less that `total_bytes` has.
        num_changed: Blocks of these that changed since they were sent, as far as both ends knew.
        whole: Reason why a pair (source rank, destination rank) got everything.
        undivided: Names, on this rank, of what travels whole in every refit: what changes its dtype, what a
            transform makes, pending sums, and what lies outside CPU memory.
    """

    total_bytes: int
    sent_bytes: int
    num_blocks: int
    num_changed: int
    whole: dict[_Pair, str]
    undivided: tuple[str, ...]

    def __add__(self, other: DeltaReport) -> DeltaReport:
        """Numbers of two passes of one refit, to targets of two pools."""
        return DeltaReport(
            self.total_bytes + other.total_bytes,
            self.sent_bytes + other.sent_bytes,
            self.num_blocks + other.num_blocks,
            self.num_changed + other.num_changed,
            self.whole | other.whole,
            tuple(dict.fromkeys(self.undivided + other.undivided)),
        )


@travels
class _Offer(NamedTuple):
    """Report of a source about its pieces for one destination."""

    signature: int
    token: int  # of the refit that brought what is compared with; 0 for none
    digest: int  # of what it brought
    num_bytes: int
    num_blocks: int
    num_changed: int
    changed_bytes: int


@travels
class _Holding(NamedTuple):
    """State of a destination's part from one source."""

    signature: int
    token: int
    digest: int  # of what is there now; 0 where nobody looked


class _Sent(NamedTuple):
    """Checksums that a source keeps of its pieces for one destination."""

    signature: int
    token: int
    sums: _Sums


class _Part(NamedTuple):
    """Pieces of one end with one peer: adjacent in its table, in ascending order of task ids on both ends."""

    pieces: slice
    blocks: slice
    signature: int
    num_bytes: int


class _End:
    """Pieces of one end that travel in blocks."""

    def __init__(self, table: PieceTable) -> None:
        self.table = table
        sizes = np.array(table.sizes, np.int64)
        self.ends = np.cumsum(-(-sizes // BLOCK_BYTES))
        """Number of blocks up to each piece, and with it."""
        num_blocks = int(self.ends[-1]) if len(sizes) else 0
        self.masks = BlockMasks(table, self.ends)
        self.block_bytes = np.full(num_blocks, BLOCK_BYTES, np.int64)
        has_bytes = sizes > 0
        self.block_bytes[self.ends[has_bytes] - 1] = (sizes[has_bytes] - 1) % BLOCK_BYTES + 1
        self.parts: dict[int, _Part] = {}
        ids = np.array([op.task_id or 0 for op in table.ops], np.int64)
        for peer, first, end in table.parts():
            first_block = int(self.ends[first - 1]) if first else 0
            rows = np.stack((ids[first:end], sizes[first:end]))
            self.parts[peer] = _Part(
                slice(first, end),
                slice(first_block, int(self.ends[end - 1])),
                _digest(rows),
                int(sizes[first:end].sum()),
            )


@dataclasses.dataclass
class _Listing:
    """Pieces of both ends, as long as a plan and what it moves between stay what they are."""

    key: tuple[Any, ...]
    listed: tuple[ListedPieces, ListedPieces]
    excluded: frozenset[_Key] | None = None
    """Transfers that do not travel in blocks on one of their ends; None until ranks have said it."""
    source: _End = dataclasses.field(default_factory=lambda: _End(PieceTable([])))
    target: _End = dataclasses.field(default_factory=lambda: _End(PieceTable([])))
    undivided: tuple[str, ...] = ()
    parts: dict[frozenset[_Pair], ReshardPlan] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Delta:
    """One refit of `Deltas`: the plan and what it is between, as `execute` takes them.

    Args:
        plan: This rank's.
        modules: Source and target.
        states: States of these.
        service: The transport.
        group: The plan's group.
        ranks: The same, to speak to each other.
        transform: Transform of the parameters that it names; None for none.
        token: Number of this refit; equal on all ranks, and no other's.
        is_checked: Whether targets are read before, and held against what was sent.
        most_bytes: Most bytes that wait beside the target on one rank; None for no limit.
        changed: As of `Refit.run`.
    """

    plan: ReshardPlan
    modules: tuple[RefitSide | None, RefitSide | None]
    states: States
    service: CopyService
    group: dist.ProcessGroup | Bootstrap | None
    ranks: RefitRanks
    transform: ReshardTransform | None
    token: int
    is_checked: bool
    most_bytes: int | None
    changed: Changed | None

    @property
    def num_threads(self) -> int:
        """Threads that read and write this rank's weights."""
        return self.ranks.num_threads


class Deltas:
    """State that this rank keeps between refits to move only what changed: checksums, and none of the weights.

    Every refit has a token. A source keeps, for every destination, the token of the refit that brought
    what it has sent, and the checksums of its blocks; a destination the token, for every source. Where both
    have the same one, blocks that have other checksums now travel; else everything does.
    """

    def __init__(self) -> None:
        self._sent: dict[int, _Sent] = {}
        self._held: dict[int, tuple[int, int]] = {}
        """By source: signature and token."""
        self._target: tuple[Any, ...] = ()
        """The target as the last refit left it, see `_look_of`."""
        self._listing: _Listing | None = None
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._sums: _Sums = np.empty(0, np.uint64)
        """Checksums of this rank's blocks as the last `run` sent them."""
        self._has_read_all = False
        self._changed: _Flags = np.empty(0, np.bool_)

    def run(self, delta: Delta) -> DeltaReport:
        """Move what changed. Collective; `commit` has it remembered where all of it succeeded."""
        ranks = delta.ranks
        others: list[_Key] = []
        mine: Any = None
        with FirstError() as first, torch.no_grad():
            others = self._list(delta)
            mine = self._look(delta)
        told = agree(ranks.all_gather, first.take(), (others, mine))
        excluded = frozenset[_Key]().union(*(theirs for theirs, _ in told))
        if any(its is None or its[0] != _digest_of(excluded) for _, its in told):
            with FirstError() as first, torch.no_grad():
                self._settle(delta, excluded)
                mine = self._look(delta)
            told = agree(ranks.all_gather, first.take(), (others, mine))
        listing = self._listing
        assert listing is not None
        looks = [its[1:] for _, its in told]
        report = _report(looks, delta, listing)
        self._move(delta, listing, looks, report)
        return report

    def checksums(self, table: PieceTable) -> _Sums | None:
        """Checksums of the pieces of a table of sources that the last `run` has read; None where it has not."""
        listing = self._listing
        if listing is None or listing.source.table is not table or not self._has_read_all:
            return None
        return table.sums.of_blocks(self._sums)

    def commit(self, delta: Delta) -> None:
        """Remember what the last `run` brought. Local."""
        listing = self._listing
        assert listing is not None
        self._sent = {
            peer: _Sent(part.signature, delta.token, self._sums[part.blocks])
            for peer, part in listing.source.parts.items()
        }
        self._held = {
            peer: (part.signature, delta.token) for peer, part in listing.target.parts.items()
        }
        self._target = _look_of(delta)

    def _list(self, delta: Delta) -> list[_Key]:
        """List the pieces of this rank. Returns what does not travel in blocks."""
        plan, rank_idx = delta.plan, delta.ranks.rank_idx
        key = (plan.send_ops, plan.recv_ops, *delta.states, delta.transform)
        listing = self._listing
        if listing is None or not all(map(operator.is_, listing.key, key)):
            hooks = None if delta.transform is None else as_reshard_transform(delta.transform)
            source, target = (
                list_pieces(plan, module, hooks, is_source=is_source)
                for module, is_source in zip(delta.modules, (True, False), strict=True)
            )
            listing = self._listing = _Listing(key, (source, target))
        return [_key_of(op, rank_idx) for listed in listing.listed for op in listed.others]

    def _look(self, delta: Delta) -> Any:
        """Report of this rank about its pieces; None while it does not know which travel in blocks."""
        listing = self._listing
        if listing is None or listing.excluded is None:
            return None
        self._changed = self._compare(delta, listing)
        offers = self._offers(listing, self._changed)
        return _digest_of(listing.excluded), offers, *self._holdings(delta, listing)

    def _settle(self, delta: Delta, excluded: frozenset[_Key]) -> None:
        """Leave out what does not travel in blocks on the other end."""
        listing, rank_idx = self._listing, delta.ranks.rank_idx
        assert listing is not None
        if listing.excluded != excluded:
            listing.source, listing.target = (
                _End(_without(listed.table, excluded, rank_idx)) for listed in listing.listed
            )
            listing.excluded = excluded
            ops = delta.plan.send_ops + delta.plan.recv_ops if excluded else []
            names = (
                piece.param_name
                for op in ops
                if _key_of(op, rank_idx) in excluded
                for piece in op.pieces
            )
            listing.undivided = tuple(dict.fromkeys(names))
            listing.parts.clear()

    def _compare(self, delta: Delta, listing: _Listing) -> _Flags:
        """Hash the blocks of this rank's sources, and return which have changed."""
        source = listing.source
        num_blocks = len(source.block_bytes)
        kept = np.zeros(num_blocks, np.uint64)
        changed = np.ones(num_blocks, np.bool_)
        wanted = None
        if delta.changed is not None:
            wanted = source.masks.wanted(delta.states[0].tensors, delta.changed)
        for peer, part in source.parts.items():
            sent = self._sent.get(peer)
            if sent is not None and sent.signature == part.signature:
                kept[part.blocks] = sent.sums
                changed[part.blocks] = False
            elif wanted is not None:
                wanted[part.blocks] = True
        sums = source.table.sums.compute_blocks(delta.num_threads, sums=kept.copy(), wanted=wanted)
        self._sums, self._has_read_all = sums, wanted is None
        changed |= sums != kept
        return changed

    def _offers(self, listing: _Listing, changed: _Flags) -> dict[int, _Offer]:
        offers = {}
        for peer, part in listing.source.parts.items():
            sent = self._sent.get(peer)
            if sent is not None and sent.signature != part.signature:
                sent = None
            its = changed[part.blocks]
            offers[peer] = _Offer(
                part.signature,
                0 if sent is None else sent.token,
                0 if sent is None else _digest(sent.sums),
                part.num_bytes,
                len(its),
                int(its.sum()),
                int(listing.source.block_bytes[part.blocks][its].sum()),
            )
        return offers

    def _holdings(self, delta: Delta, listing: _Listing) -> tuple[dict[int, _Holding], str]:
        """Parts that this rank's target holds by now, and why there are none."""
        target = listing.target
        if not self._held:
            return {}, "it holds nothing of an earlier refit"
        lost = _difference(self._target, _look_of(delta))
        if lost:
            return {}, lost
        sums = None
        if delta.is_checked:
            sums = target.table.sums.compute_blocks(delta.num_threads)
        held = {}
        for peer, part in target.parts.items():
            signature, token = self._held.get(peer, (0, 0))
            if signature == part.signature:
                held[peer] = _Holding(
                    signature, token, 0 if sums is None else _digest(sums[part.blocks])
                )
        return held, ""

    def _move(self, delta: Delta, listing: _Listing, told: list[Any], report: DeltaReport) -> None:
        changed = self._changed
        rank_idx, source, target = delta.ranks.rank_idx, listing.source, listing.target
        messages = {
            (src, dst): offer
            for src, (offers, *_) in enumerate(told)
            for dst, offer in offers.items()
            if offer.num_changed and (src, dst) not in report.whole
        }
        received: dict[int, torch.Tensor] = {}

        def submit() -> None:
            memory = self._memory_of(messages, rank_idx)
            for src, dst in messages:
                task_id = pack_task_id(dst, 0, 0)
                if src == rank_idx:
                    part = source.parts[dst]
                    message = memory()
                    _pack(message, source, part, changed[part.blocks], delta.num_threads)
                    delta.service.submit_send(message, dst, task_id=task_id)
                if dst == rank_idx:
                    received[src] = memory()
                    delta.service.submit_recv(received[src], src, task_id=task_id)

        if messages:
            exchange(delta.service, delta.group, submit)
        # From here on the target is written.
        self._held = {}
        excluded = listing.excluded or frozenset()
        if excluded or report.whole:
            part_plan = self._part_plan(delta.plan, listing, report.whole.keys(), told, rank_idx)
            asked = part_plan, delta.modules, delta.states, delta.service, delta.group
            execute(*asked, delta.transform, strict=True)

        def write() -> None:
            for src, message in received.items():
                _unpack(message, target, target.parts[src], delta.num_threads)
            if received:
                target.table.sums.count_writes()

        if delta.plan.recv_ops:
            write_beside(delta.modules[1], write, has_written=bool(received))

    def _memory_of(
        self, messages: Mapping[_Pair, _Offer], rank_idx: int
    ) -> Callable[[], torch.Tensor]:
        """Gives the memory of each message that this rank sends or receives, in their order."""
        offers = [offer for pair, offer in messages.items() for end in pair if end == rank_idx]
        sizes = [_header_bytes(its.num_blocks) + its.changed_bytes for its in offers]
        starts = list(itertools.accumulate((_in_lines(size) for size in sizes), initial=0))
        scratch, self._scratch = self._scratch, torch.empty(0, dtype=torch.uint8)
        if scratch.numel() < starts[-1]:
            scratch = torch.empty(starts[-1], dtype=torch.uint8)
        if scratch.numel() <= _KEPT_BYTES:
            self._scratch = scratch  # else every refit would fault its pages in
        parts = (
            scratch[start : start + size] for start, size in zip(starts[:-1], sizes, strict=True)
        )
        return lambda: next(parts)

    def _part_plan(
        self,
        plan: ReshardPlan,
        listing: _Listing,
        whole: Collection[_Pair],
        told: list[Any],
        rank_idx: int,
    ) -> ReshardPlan:
        """The transfers of a plan that do not travel in blocks this time."""
        pairs = {(src, dst) for src, (offers, *_) in enumerate(told) for dst in offers}
        if pairs == set(whole):
            return plan
        key = frozenset(whole)
        if key not in listing.parts:
            excluded = listing.excluded or frozenset()

            def chosen(ops: list[TransferOp]) -> list[TransferOp]:
                keys = [_key_of(op, rank_idx) for op in ops]
                return [
                    op
                    for op, its in zip(ops, keys, strict=True)
                    if its in excluded or its[:2] in key
                ]

            def part_of(plan: ReshardPlan) -> ReshardPlan:
                return dataclasses.replace(
                    plan,
                    send_ops=chosen(plan.send_ops),
                    recv_ops=chosen(plan.recv_ops),
                    batches=list(map(part_of, plan.batches)),
                )

            # A need of some rank that passes need not be kept for the next time; a lasting one is.
            listing.parts = {its: kept for its, kept in listing.parts.items() if not its}
            listing.parts[key] = part_of(plan)
        return listing.parts[key]


def _report(told: list[Any], delta: Delta, listing: _Listing) -> DeltaReport:
    """Decision that every rank makes of what all have told."""
    most_bytes = None if delta.most_bytes is None else delta.most_bytes // (2 * len(told))
    whole = {}
    total_bytes = sent_bytes = num_blocks = num_changed = 0
    for src, (offers, *_) in enumerate(told):
        for dst, offer in offers.items():
            _, holdings, lost = told[dst]
            why = _why_whole(offer, holdings.get(src), lost, delta.is_checked, most_bytes)
            if why:
                whole[src, dst] = why
            total_bytes += offer.num_bytes
            sent_bytes += offer.num_bytes if why else offer.changed_bytes
            num_blocks += offer.num_blocks
            num_changed += offer.num_changed
    return DeltaReport(total_bytes, sent_bytes, num_blocks, num_changed, whole, listing.undivided)


def _why_whole(
    offer: _Offer, holding: _Holding | None, lost: str, is_checked: bool, most_bytes: int | None
) -> str:
    """Why a pair gets everything; "" where changed blocks will do."""
    if lost:
        return lost
    if holding is None:
        return "it holds nothing of this source"
    if offer.token == 0:
        return "the source has not sent it anything yet"
    if offer.signature != holding.signature:
        return "the pieces were cut otherwise"
    if offer.token != holding.token:
        return "it has missed a refit, or the source has"
    if is_checked and offer.digest != holding.digest:
        return "it does not hold what was sent to it"
    if offer.changed_bytes > max(_MOST_BYTES, _MOST_CHANGED * offer.num_bytes):
        return f"{offer.changed_bytes} of {offer.num_bytes} bytes changed"
    if most_bytes is not None and offer.changed_bytes > most_bytes:
        return (
            f"{offer.changed_bytes} bytes changed, of which {most_bytes} may wait beside the target"
        )
    return ""


def _key_of(op: TransferOp, rank_idx: int) -> _Key:
    pair = (rank_idx, op.peer_rank) if op.is_send else (op.peer_rank, rank_idx)
    return (*pair, op.task_id)


def _without(table: PieceTable, excluded: frozenset[_Key], rank_idx: int) -> PieceTable:
    """The pieces that are not excluded; the same table where all of them are there."""
    kept = [piece for piece in table.pieces if _key_of(piece[0], rank_idx) not in excluded]
    return table if len(kept) == len(table.pieces) else PieceTable(kept)


def _digest(values: npt.NDArray[Any]) -> int:
    return int.from_bytes(hashlib.blake2b(values.tobytes(), digest_size=8).digest(), "little")


def _look_of(delta: Delta) -> tuple[Any, ...]:
    """Sign that something else than a refit has written a target, where anything tells."""
    target = delta.modules[1]
    if target is None:
        return ()
    state: ModuleState = delta.states[1]
    return state, stale.num_writes(target), stale.counted_by_torch(target, state)


def _difference(before: tuple[Any, ...], now: tuple[Any, ...]) -> str:
    if len(before) != len(now):
        return "its target is another"
    if not now:
        return ""
    if before[0] is not now[0]:
        return "its tensors are others, or lie elsewhere, than after the last refit"
    return "" if before == now else "something else has written its target since"


def _digest_of(excluded: frozenset[_Key]) -> int:
    text = repr(sorted(excluded, key=repr)) if excluded else ""
    return _digest(np.frombuffer(text.encode(), np.uint8))


def _header_bytes(num_blocks: int) -> int:
    """Bytes of a message: a bit for every block, in whole lines."""
    return _in_lines(-(-num_blocks // 8))


def _in_lines(num_bytes: int) -> int:
    return -(-num_bytes // _LINE_BYTES) * _LINE_BYTES


def _pack(message: torch.Tensor, end: _End, part: _Part, flags: _Flags, num_threads: int) -> None:
    bits = np.packbits(flags)
    array = message.numpy()
    array[: len(bits)] = bits  # and whatever up to the end of the line
    body = array[_header_bytes(len(flags)) :]
    end.table.sums.move_blocks(part.pieces, flags, body, num_threads, is_packing=True)


def _unpack(message: torch.Tensor, end: _End, part: _Part, num_threads: int) -> None:
    num_blocks = part.blocks.stop - part.blocks.start
    array = message.numpy()
    flags = np.unpackbits(array, count=num_blocks).astype(np.bool_)
    body = array[_header_bytes(num_blocks) :]
    end.table.sums.move_blocks(part.pieces, flags, body, num_threads, is_packing=False)
