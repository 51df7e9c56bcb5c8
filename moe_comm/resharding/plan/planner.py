"""Plans: which rank sends which piece of which parameter to whom.

All ranks gather what each holds, and each computes the pieces that it sends or receives. There is no
central planner, so both ends of a piece must compute the same.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from moe_comm.arguments import as_int
from moe_comm.peers.agree import FirstError, name_ranks
from moe_comm.peers.bootstrap import Bootstrap, bootstrap_for
from moe_comm.resharding.describe import intervals
from moe_comm.resharding.describe.checkpoint_views import CheckpointViews
from moe_comm.resharding.describe.conversions import cannot_reduce
from moe_comm.resharding.describe.disagreement import PlanError
from moe_comm.resharding.describe.intervals import Box, Piece
from moe_comm.resharding.describe.metadata import ParameterMetadata
from moe_comm.resharding.describe.metadata_extraction import (
    extract_module_metadata,
    resolved_ties,
)
from moe_comm.resharding.describe.module_tensors import (
    RefitSide,
    get_refit_tensor_dict,
    module_of,
    problem_with_places,
)
from moe_comm.resharding.describe.parallelism import OFFSET_HINT
from moe_comm.resharding.plan.assignment import Assignment
from moe_comm.resharding.plan.batches import batch_cuts, check_number, cut_into_batches
from moe_comm.resharding.plan.holders import (
    HoldersByName,
    holders_of_metadata,
    holders_of_ranks,
)
from moe_comm.resharding.plan.joined_pieces import Block, block_of, join_blocks, strides_in
from moe_comm.resharding.plan.name_matching import told_apart
from moe_comm.resharding.plan.plan_check import verify_plan
from moe_comm.resharding.plan.rank_metadata import (
    Own,
    RankMetadata,
    decode_rank_metadata,
    encode_rank_metadata,
    resolved_name,
)
from moe_comm.resharding.plan.reshard_plan import PartialReduction, ReshardPlan, TensorSpec
from moe_comm.resharding.plan.transfer_op import JoinedPieces, Slices, TransferOp, pack_task_id

_COMMUTING = {"sum", "avg"}
# Most problems that one error message lists.
_MAX_PROBLEMS = 8

# Destination parameters by rank and name, and source parameters by name, as in Megatron's planner.
DestinationRosters = dict[int, dict[str, ParameterMetadata]]
SourceRosters = dict[str, list[ParameterMetadata]]

Adjust = Callable[[list[ParameterMetadata]], list[ParameterMetadata]]


def _salt(name: str) -> int:
    """Offset of a parameter in the round-robin over its replicas; equal on all ranks."""
    return zlib.crc32(name.encode())


# Layers repeat: sharing equal objects makes plans of ten thousand pieces faster.
_spec = functools.lru_cache(maxsize=4096)(TensorSpec)


@functools.lru_cache(maxsize=4096)
def _slices(box: Box) -> Slices:
    return tuple(slice(start, stop) for start, stop in box)


def _wire_dtype(src: ParameterMetadata, dst_dtype: torch.dtype) -> torch.dtype:
    """The dtype of fewer bytes; the source's where they are equal."""
    return dst_dtype if dst_dtype.itemsize < src.dtype.itemsize else src.dtype


def _taken_dtype(assignment: Assignment, dst: ParameterMetadata) -> torch.dtype:
    """Dtype of a destination when pieces arrive: a buffer takes over that of its source."""
    if not dst.is_buffer:
        return dst.dtype
    return assignment.sources[0].meta.dtype


def _own_view(view: tuple[int, ...], meta: ParameterMetadata) -> tuple[int, ...] | None:
    return None if view == meta.shape else view


class _RankPlanner:
    """Works out one rank's plan.

    Args:
        holders: Holders of what this rank takes part in moving.
        rank: This rank.
    """

    def __init__(self, holders: HoldersByName, rank: int) -> None:
        self.holders = holders
        self.rank = rank
        self.plan = ReshardPlan([], [], buffer_dtypes={}, num_ranks=holders.num_ranks, rank=rank)
        # By id(op), for pieces between views: the block in both storages, and this rank's view.
        self._blocks: dict[int, tuple[Block, tuple[int, tuple[int, ...]]]] = {}
        self._shapes: dict[tuple[Any, ...], tuple[int, int, Any]] = {}

    def add_destination(self, parameter_idx: int, name: str, own: Own) -> None:
        """Plan what is received of one of this rank's parameters.

        Args:
            parameter_idx: Position among those of this rank.
            name: Name in the whole model; for one of several views of a tensor, the view's own name.
            own: The parameter.
        """
        meta = own.kind
        assignment = self.holders.assignment(name)
        dtype = _taken_dtype(assignment, meta)
        if meta.is_buffer:
            assert self.plan.buffer_dtypes is not None
            self.plan.buffer_dtypes[own.name] = dtype
        self.plan.destinations[own.name] = _spec(meta.shape, dtype)
        view = assignment.destination_view(self.rank)
        if view is None:
            return
        my_view = _own_view(view, meta)
        salt = _salt(name)
        sources = self.holders.sources_of(name)
        for number, (position, item) in enumerate(assignment.pieces_to(self.rank, salt)):
            src_rank, src = assignment.sources[position]
            src_view = assignment.layouts[item.layout_idx].view
            op = TransferOp(
                param_name=own.name,
                peer_rank=src_rank,
                is_send=False,
                my_slice=_slices(item.piece.dst_box),
                peer_slice=_slices(item.piece.src_box),
                task_id=pack_task_id(self.rank, parameter_idx, number),
                my_view=my_view,
                peer_view=_own_view(src_view, src),
                my_dtype=dtype,
                peer_dtype=src.dtype,
                wire_dtype=_wire_dtype(src, dtype),
            )
            self.plan.recv_ops.append(op)
            dst = assignment.destinations[self.rank]
            places = sources[position].place, own.place
            self._note_block(op, item.piece, (src, dst), (src_view, view), places)

    def add_source(self, name: str, owns: Sequence[Own]) -> None:
        """Plan what is sent of one of this rank's parameters.

        Args:
            name: Name in the whole model.
            owns: The parameter; one for each view that this rank has of it.
        """
        readers = self.holders.readers(name)
        if not readers:
            return
        for own in owns:
            if reductions := _reductions(own, self.rank):
                self.plan.reductions += reductions
                self.plan.sources[own.name] = _spec(own.kind.shape, own.kind.dtype)
        for dst_name in readers:
            self._add_sends(dst_name, owns)

    def _add_sends(self, dst_name: str, owns: Sequence[Own]) -> None:
        assignment = self.holders.assignment(dst_name)
        destinations = {each.holding[0]: each for each in self.holders.destinations[dst_name]}
        sends = assignment.pieces_from(self.rank, _salt(dst_name))
        first = bisect.bisect_left(assignment.sources, self.rank, key=lambda source: source.rank)
        for position, dst_rank, dst_view, number, item in sends:
            own, piece = owns[position - first], item.piece
            meta = own.kind
            view = assignment.layouts[item.layout_idx].view
            dst = assignment.destinations[dst_rank]
            dtype = _taken_dtype(assignment, dst)
            if own.name not in self.plan.sources:
                self.plan.sources[own.name] = _spec(meta.shape, meta.dtype)
            destination = destinations[dst_rank]
            op = TransferOp(
                param_name=own.name,
                peer_rank=dst_rank,
                is_send=True,
                my_slice=_slices(piece.src_box),
                peer_slice=_slices(piece.dst_box),
                task_id=pack_task_id(dst_rank, destination.parameter_idx, number),
                my_view=_own_view(view, meta),
                peer_view=_own_view(dst_view, dst),
                my_dtype=meta.dtype,
                peer_dtype=dtype,
                wire_dtype=_wire_dtype(meta, dtype),
            )
            self.plan.send_ops.append(op)
            src = assignment.sources[position].meta
            places = own.place, destination.place
            self._note_block(op, piece, (src, dst), (view, dst_view), places)

    def _note_block(
        self,
        op: TransferOp,
        piece: Piece,
        kinds: tuple[ParameterMetadata, ParameterMetadata],
        views: tuple[tuple[int, ...], tuple[int, ...]],
        places: tuple[tuple[int, int] | None, tuple[int, int] | None],
    ) -> None:
        """Record where a piece lies in the storages of both ends, if both are known.

        Args:
            op: The piece.
            piece: The same, as boxes.
            kinds: Metadata of the source and the destination.
            views: Shapes that their tensors are viewed as.
            places: Places of both.
        """
        (src, dst), (src_place, dst_place) = kinds, places
        if src.view is None or dst.view is None or src_place is None or dst_place is None:
            return
        if src.is_transformed or dst.is_transformed:
            return
        # Computed once for equal pieces of repeated layers.
        shape = id(src), id(dst), piece, views
        if shape not in self._shapes:
            self._shapes[shape] = block_of(
                piece,
                strides_in(src.shape, src.view.strides, views[0]),
                strides_in(dst.shape, dst.view.strides, views[1]),
            )
        src_start, dst_start, dims = self._shapes[shape]
        (src_storage, src_offset), (dst_storage, dst_offset) = src_place, dst_place
        key = src_storage, dst_storage, src.dtype, dst.dtype
        num_elements = intervals.num_elements(dim[0] for dim in dims)
        num_bytes = num_elements * min(src.element_size, dst.element_size)
        block = Block(key, src_offset + src_start, dst_offset + dst_start, dims, num_bytes)
        mine = (src_offset, src.view.strides) if op.is_send else (dst_offset, dst.view.strides)
        self._blocks[id(op)] = block, mine

    def finish(self) -> ReshardPlan:
        """Return the plan in task id order, with pieces joined that form one strided pattern."""
        self.plan.send_ops = self._joined(self.plan.send_ops)
        self.plan.recv_ops = self._joined(self.plan.recv_ops)
        self.plan.reductions.sort(key=lambda reduction: reduction.param_name)
        return self.plan

    def _joined(self, ops: list[TransferOp]) -> list[TransferOp]:
        ops.sort(key=_task_id)
        by_peer: dict[int, list[TransferOp]] = {}
        result: list[TransferOp] = []
        for op in ops:
            some = by_peer.setdefault(op.peer_rank, []) if id(op) in self._blocks else result
            some.append(op)
        for some in by_peer.values():
            blocks = (self._blocks[id(op)][0] for op in some)
            for block, members in join_blocks(blocks, self.holders.max_bytes):
                first = some[members[0]]
                if len(members) > 1:
                    mine = 1 if first.is_send else 2
                    pieces = JoinedPieces(
                        ops=tuple(some[member] for member in members),
                        offset=block.src_start if first.is_send else block.dst_start,
                        sizes=tuple(dim[0] for dim in block.dims),
                        strides=tuple(dim[mine] for dim in block.dims),
                        views=tuple(self._blocks[id(some[member])][1] for member in members),
                    )
                    first = dataclasses.replace(first, joined=pieces)
                result.append(first)
        result.sort(key=_task_id)
        return result


def _task_id(op: TransferOp) -> int:
    return -1 if op.task_id is None else op.task_id


def _reductions(own: Own, rank: int) -> list[PartialReduction]:
    """Return the reductions over mesh dimensions that must be run before a rank's source is read."""
    meta = own.kind
    if meta.mesh is None:
        return []
    dims: dict[str, list[int]] = {}
    for dim, placement in enumerate(meta.mesh.placements):
        if placement.kind == "partial":
            dims.setdefault(placement.op, []).append(dim)
    for op in dims:
        reason = cannot_reduce(op, meta.dtype)
        if reason:
            raise PlanError(f"{own.resolved_name}: rank {rank}: {reason}")
    if len(dims) > 1 and not dims.keys() <= _COMMUTING:
        raise PlanError(
            f"{own.resolved_name}: pending reductions {sorted(dims)} of one DTensor give another "
            "result in another order"
        )
    return [PartialReduction(own.name, tuple(some), op) for op, some in sorted(dims.items())]


def _plan_rank(
    holders: HoldersByName,
    rank: int,
    sources: Iterable[Own],
    destinations: Iterable[tuple[str, Own]],
) -> ReshardPlan:
    """One rank's plan, given its own parameters in the order in which all ranks number it.

    Args:
        holders: Holders of what this rank takes part in moving.
        rank: This rank.
        sources: Parameters that it reads from.
        destinations: Parameters that it writes, by names that tell views of one tensor apart.
    """
    planner = _RankPlanner(holders, rank)
    for parameter_idx, (name, own) in enumerate(destinations):
        planner.add_destination(parameter_idx, name, own)
    by_name: dict[str, list[Own]] = {}
    for own in sources:
        by_name.setdefault(own.resolved_name, []).append(own)
    for name, owns in by_name.items():
        planner.add_source(name, owns)
    return planner.finish()


# ------------------------------------------------------------------------------------------------
# From gathered metadata.


def index_metadata_rosters(
    gathered_pairs: Sequence[tuple[Sequence[ParameterMetadata], Sequence[ParameterMetadata]]],
) -> tuple[DestinationRosters, SourceRosters]:
    """Index the metadata of all ranks by rank and name.

    Args:
        gathered_pairs: `(source, destination)` metadata of each rank, in rank order.

    Returns:
        Destination parameters by rank and resolved name, source parameters by resolved name.

    Raises:
        PlanError: A rank has two parameters of one name on one side, or pipeline stages use one name for
            different parameters that cannot be told apart.
    """
    dst_by_rank: DestinationRosters = {}
    src_by_name: SourceRosters = {}
    for rank, (sources, destinations) in enumerate(gathered_pairs):
        _check_names(rank, sources, "source")
        _check_names(rank, destinations, "destination")
    held = [
        tuple(decode_rank_metadata(encode_rank_metadata(metas)) for metas in pair)
        for pair in gathered_pairs
    ]
    for rank, sides in enumerate(told_apart([(src, dst) for src, dst in held])):
        sources, destinations = (side.metadata() for side in sides)
        dst_by_rank[rank] = {resolved_name(meta): meta for meta in destinations}
        for meta in sources:
            src_by_name.setdefault(resolved_name(meta), []).append(meta)
    return dst_by_rank, src_by_name


def build_plan_from_rosters(
    dst_param_metadata_by_rank: DestinationRosters,
    src_param_metadata: SourceRosters,
    my_global_rank: int,
) -> ReshardPlan:
    """One rank's plan, from the metadata of all. No communication.

    Args:
        dst_param_metadata_by_rank: Destination parameters by rank and resolved name.
        src_param_metadata: Source parameters by resolved name.
        my_global_rank: The rank in the group that the plan is for.

    Returns:
        Plan whose `num_ranks` is the highest rank that is named plus one.

    Raises:
        PlanError: No plan can be made; names the parameter.
    """
    holders = holders_of_metadata(dst_param_metadata_by_rank, src_param_metadata, my_global_rank)
    holders.num_ranks = max(holders.num_ranks, my_global_rank + 1)
    sources = [
        Own(meta.name, resolved_name(meta), meta, meta.place)
        for metas in src_param_metadata.values()
        for meta in metas
        if meta.owner_rank == my_global_rank
    ]
    destinations = [
        (name, Own(meta.name, name, meta, meta.place))
        for name, meta in dst_param_metadata_by_rank.get(my_global_rank, {}).items()
    ]
    return _plan_rank(holders, my_global_rank, sources, destinations)


def _iter_global_transfer_ops(
    dst_param_metadata_by_rank: DestinationRosters, src_param_metadata: SourceRosters
) -> Iterator[tuple[int, int, int, Slices, Slices, ParameterMetadata, ParameterMetadata]]:
    """Every piece of all ranks, in task id order.

    Yields:
        `(task id, destination rank, source rank, source elements, destination elements, source
        metadata, destination metadata)`.
    """
    holders = holders_of_metadata(dst_param_metadata_by_rank, src_param_metadata)
    for dst_rank in sorted(dst_param_metadata_by_rank):
        for idx, (name, dst) in enumerate(dst_param_metadata_by_rank[dst_rank].items()):
            sources = {
                meta.owner_rank: meta for meta in src_param_metadata[holders.source_names[name]]
            }
            assignment = holders.assignment(name)
            pieces = assignment.pieces_to(dst_rank, _salt(name))
            for number, (position, (_, piece)) in enumerate(pieces):
                src_rank = assignment.sources[position].rank
                task_id = pack_task_id(dst_rank, idx, number)
                boxes = _slices(piece.src_box), _slices(piece.dst_box)
                yield task_id, dst_rank, src_rank, *boxes, sources[src_rank], dst


# ------------------------------------------------------------------------------------------------
# From modules.


def _check_names(rank: int, metas: Sequence[ParameterMetadata], side: str) -> None:
    seen: dict[str, str] = {}
    for meta in metas:
        name = resolved_name(meta)
        if name in seen:
            raise PlanError(
                f"rank {rank} has two {side} parameters of the name {name}: {seen[name]} and "
                f"{meta.name}"
            )
        seen[name] = meta.name


def _check_ranks(metas: Sequence[ParameterMetadata], num_ranks: int) -> None:
    """Raise PlanError for a group or mesh that is not within the group of the plan."""
    checked: set[tuple[int, ...]] = set()
    for meta in metas:
        for what, ranks in (
            ("tensor parallel group", meta.tensor_parallel_group_ranks),
            ("expert parallel group", meta.expert_parallel_group_ranks),
            ("data parallel group", meta.data_parallel_group_ranks),
            ("device mesh", None if meta.mesh is None else meta.mesh.mesh_ranks),
        ):
            if ranks is None or tuple(ranks) in checked:
                continue
            outside = [rank for rank in ranks if not 0 <= rank < num_ranks]
            if outside or len(set(ranks)) < len(ranks):
                text = (
                    f"{meta.name}: {what} {list(ranks)} must be different ranks of a group of "
                    f"{num_ranks}"
                )
                if outside:
                    text += f"; {outside[0]} is not in [0, {num_ranks}): {OFFSET_HINT}"
                raise PlanError(text)
            checked.add(tuple(ranks))


def build_plan_from_rank_metadata(
    by_rank: Sequence[tuple[RankMetadata, RankMetadata]],
    rank: int,
    *,
    strict: bool = False,
    verify: bool = True,
    max_bytes: int | None = None,
) -> ReshardPlan:
    """One rank's plan, from what all ranks hold. No communication.

    Args:
        by_rank: `(source, destination)` of each rank, see `rank_metadata.decode_rank_metadata`.
        rank: The rank that the plan is for.
        strict: Whether to refuse a parameter that a member of its destination's groups lacks or has with
            another dtype, and source parameters without a destination.
        verify: Whether to check it by `plan_check.verify_plan`.
        max_bytes: Most bytes of a piece, equal on all ranks; None for no limit.

    Raises:
        PlanError: No plan can be made; names the parameter.
    """
    by_rank = told_apart(by_rank)
    holders = holders_of_ranks(by_rank, rank, strict=strict, max_bytes=max_bytes)
    source, destination = by_rank[rank]
    destinations = zip(destination.keys, destination.own(), strict=True)
    plan = _plan_rank(holders, rank, source.own(), destinations)
    if verify:
        verify_plan(plan)
    return plan


def encoded_side(
    module: RefitSide | None,
    num_experts: int | None,
    group: dist.ProcessGroup | Bootstrap | None,
    side: str,
    *,
    rank_offset: int = 0,
    adjust: Adjust | None = None,
    is_transformed: Callable[[str], bool] | None = None,
) -> bytes:
    """Encode what this rank holds of one side. Local; raises if that is invalid by itself."""
    if module is None:
        return encode_rank_metadata([])
    bootstrap = bootstrap_for(group)
    rank = bootstrap.rank_idx
    is_written = side == "destination"
    if isinstance(module, CheckpointViews):
        metas = module.metadata(rank, is_written=is_written)
    else:
        metas = extract_module_metadata(
            module_of(module), rank, num_experts=num_experts, rank_offset=rank_offset, group=group
        )
    if adjust is not None:
        metas = adjust(metas)
    for meta in metas:
        meta.is_transformed = is_transformed is not None and is_transformed(meta.name)
    if is_written:
        tensors = get_refit_tensor_dict(module)
        named = {meta.name: tensors[meta.name] for meta in metas if meta.name in tensors}
        if (problem := problem_with_places(named)) is not None:
            raise PlanError(problem)
    if isinstance(module, CheckpointViews):
        return encode_rank_metadata(metas, module.ties())
    _check_names(rank, metas, side)
    _check_ranks(metas, bootstrap.num_ranks)
    return encode_rank_metadata(metas, resolved_ties(module_of(module), metas))


def build_local_reshard_plan(
    src_module: RefitSide | None,
    dst_module: RefitSide | None,
    num_experts: int | None = None,
    group: dist.ProcessGroup | Bootstrap | None = None,
    src_rank_offset: int = 0,
    dst_rank_offset: int = 0,
    *,
    strict: bool = False,
    verify: bool = True,
    adjust_destination: Adjust | None = None,
    is_transformed: Callable[[str], bool] | None = None,
    execution_batch_bytes: int | None = None,
) -> ReshardPlan:
    """This rank's plan.

    Collective over `group`. Ranks gather what each holds, plan by themselves, and tell each other
    whether they could: all have a plan, or all raise.

    Args:
        src_module: Part of the source model that this rank holds, a module or `CheckpointViews`; None for
            nothing.
        dst_module: Part of the destination model that this rank holds, likewise.
        num_experts: Experts of the whole model.
        group: Ranks that take part; None for the default group. Ranks of the plan are its ranks.
        src_rank_offset: Added to the ranks of the source module's groups.
        dst_rank_offset: Added to the ranks of the destination module's groups.
        strict: Whether to refuse source parameters that no destination has, and destination parameters that a
            member of their group lacks or has with another dtype; one rank that does is enough.
        verify: Whether to check each rank's plan by `plan_check.verify_plan`.
        adjust_destination: Callable that gets what the destination module holds and returns what is to be
            planned, where a transform writes parameters that the module does not list.
        is_transformed: Whether a transform produces or consumes the data of a parameter of this rank's
            modules: then its dtypes need not be convertible. None: no parameter is transformed.
        execution_batch_bytes: Most bytes that a rank stages at once beside both models, see
            `swap_model_weights`. The smallest of all ranks holds.

    Raises:
        PlanError: No sound plan can be made, on every rank; the message says on which rank what is wrong.
    """
    bootstrap = bootstrap_for(group)
    rank = bootstrap.rank_idx
    encoded: tuple[bytes, bytes] | None = None
    problem = FirstError()
    with problem:
        if execution_batch_bytes is not None:
            as_int("execution_batch_bytes", execution_batch_bytes, 1)
        encoded = (
            encoded_side(
                src_module,
                num_experts,
                group,
                "source",
                rank_offset=src_rank_offset,
                is_transformed=is_transformed,
            ),
            encoded_side(
                dst_module,
                num_experts,
                group,
                "destination",
                rank_offset=dst_rank_offset,
                adjust=adjust_destination,
                is_transformed=is_transformed,
            ),
        )
    gathered = bootstrap.all_gather((encoded, _text(problem.error), execution_batch_bytes))
    _raise_problems([text for _, text, _ in gathered], problem)
    limits = [limit for _, _, limit in gathered if limit is not None]
    share: int | None = None
    plan: ReshardPlan | None = None
    cuts: list[int] = []
    with problem:
        by_rank = [
            (decode_rank_metadata(src), decode_rank_metadata(dst)) for (src, dst), *_ in gathered
        ]
        share = check_number([dst for _, dst in by_rank], min(limits)) if limits else None
        plan = build_plan_from_rank_metadata(
            by_rank, rank, strict=strict, verify=verify, max_bytes=share
        )
        cuts = [] if share is None else batch_cuts(plan, share)
    told = bootstrap.all_gather((_text(problem.error), cuts))
    _raise_problems([text for text, _ in told], problem)
    assert plan is not None
    if share is not None:
        plan.batches = cut_into_batches(plan, [cuts for _, cuts in told])
    return plan


def _text(problem: Exception | None) -> str | None:
    if problem is None:
        return None
    is_named = isinstance(problem, (ValueError, RuntimeError))
    return str(problem) if is_named else f"{type(problem).__name__}: {problem}"


def _raise_problems(texts: Sequence[str | None], own: FirstError) -> None:
    """Raise the same error on every rank where any rank has one."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text is not None:
            ranks_of.setdefault(text, []).append(rank)
    if ranks_of:
        lines = [f"{text} (seen by {name_ranks(ranks)})" for text, ranks in ranks_of.items()]
        raise PlanError("\n".join(lines[:_MAX_PROBLEMS])) from own.take()
