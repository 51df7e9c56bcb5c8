"""Tells whether plans are sound before they run, and what they move."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import torch

from moe_comm.resharding.describe import intervals
from moe_comm.resharding.describe.disagreement import PlanError
from moe_comm.resharding.describe.intervals import Box
from moe_comm.resharding.plan.reshard_plan import ReshardPlan, TensorSpec
from moe_comm.resharding.plan.transfer_op import Slices, TransferOp, unpack_task_id

# Rows of a printed table before the rest is summed up.
_MAX_PRINTED_OPS = 64


def _box(param_name: str, slices: Slices, view: Sequence[int]) -> Box:
    """The elements that slices name, within the bounds of `view`."""
    if len(slices) != len(view):
        raise PlanError(
            f"{param_name}: {len(slices)} slices for a tensor of shape {tuple(view)}: {slices}"
        )
    box = []
    for dim, (part, size) in enumerate(zip(slices, view, strict=True)):
        start = 0 if part.start is None else part.start
        stop = size if part.stop is None else part.stop
        if not 0 <= start <= stop <= size or part.step not in (None, 1):
            raise PlanError(
                f"{param_name}: {_text(part)} of dimension {dim} is not within shape {tuple(view)}"
            )
        box.append((start, stop))
    return tuple(box)


def _text(part: slice) -> str:
    step = "" if part.step is None else f":{part.step}"
    return f"[{part.start}:{part.stop}{step}]"


def _box_shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _by_task(ops: Sequence[TransferOp]) -> list[TransferOp]:
    """Each piece by itself, in the order of task ids where pieces were joined."""
    if all(op.joined is None for op in ops):
        return list(ops)
    return sorted((piece for op in ops for piece in op.pieces), key=lambda op: op.task_id or 0)


def _check_joined(ops: Sequence[TransferOp]) -> None:
    """Return whether a pattern has as many elements as the pieces in it."""
    for op in ops:
        if op.joined is None:
            continue
        num_elements = sum(
            intervals.num_elements(_extent(part) or 0 for part in piece.my_slice)
            for piece in op.pieces
        )
        if num_elements != intervals.num_elements(op.joined.sizes):
            raise PlanError(
                f"{op.param_name}: {len(op.pieces)} pieces of {num_elements} elements move as one "
                f"tensor of shape {op.joined.sizes}"
            )


def _checked_box(op: TransferOp, spec: TensorSpec, what: str) -> Box:
    """The elements of this rank's tensor that an op names."""
    view = spec.shape if op.my_view is None else op.my_view
    if intervals.num_elements(view) != intervals.num_elements(spec.shape):
        raise PlanError(
            f"{op.param_name}: {what} of shape {spec.shape} cannot be viewed as {op.my_view}"
        )
    box = _box(op.param_name, op.my_slice, view)
    if op.my_dtype is not None and op.my_dtype != spec.dtype:
        raise PlanError(
            f"{op.param_name}: a piece is planned as {op.my_dtype}, but the {what} is {spec.dtype}"
        )
    peer_shape = tuple(_extent(part) for part in op.peer_slice)
    if None not in peer_shape and peer_shape != _box_shape(box):
        raise PlanError(
            f"{op.param_name}: this rank's piece has shape {_box_shape(box)}, that of rank "
            f"{op.peer_rank} {peer_shape}"
        )
    return box


def _extent(part: slice) -> int | None:
    if part.stop is None:
        return None
    return int(part.stop) - int(part.start or 0)


def _check_ops(plan: ReshardPlan, ops: Sequence[TransferOp], is_send: bool) -> None:
    last = -1
    for op in ops:
        name = op.param_name
        if op.is_send != is_send:
            raise PlanError(f"{name}: a {'receive' if is_send else 'send'} is among the others")
        if op.task_id is None:
            raise PlanError(f"{name}: a piece has no task id")
        if op.task_id <= last:
            raise PlanError(f"{name}: task id {op.task_id} does not come after {last}")
        last = op.task_id
        if not 0 <= op.peer_rank < plan.num_ranks:
            raise PlanError(
                f"{name}: rank {op.peer_rank} is not in a group of {plan.num_ranks} ranks"
            )
        if None in (op.my_dtype, op.peer_dtype, op.wire_dtype):
            raise PlanError(f"{name}: task id {op.task_id} does not state its dtypes")
        dst_rank = op.peer_rank if is_send else plan.rank
        if unpack_task_id(op.task_id)[0] != dst_rank:
            raise PlanError(
                f"{name}: task id {op.task_id} is of destination rank "
                f"{unpack_task_id(op.task_id)[0]}, but the piece goes to rank {dst_rank}"
            )


def verify_plan(plan: ReshardPlan) -> None:
    """Check one rank's plan by itself: every destination element is written exactly once.

    Also that pieces are within bounds, have equal shapes on both ends, state their dtypes, go to
    ranks of the group and come in task id order.

    Args:
        plan: Plan with `sources`, `destinations`, `num_ranks` and `rank` filled in.

    Raises:
        PlanError: The plan is not sound; names the parameter and the elements.
    """
    if not 0 <= plan.rank < plan.num_ranks:
        raise PlanError(
            f"the plan does not say whose it is: rank {plan.rank} of {plan.num_ranks} ranks"
        )
    sends, recvs = _by_task(plan.send_ops), _by_task(plan.recv_ops)
    _check_ops(plan, sends, True)
    _check_ops(plan, recvs, False)
    _check_joined((*plan.send_ops, *plan.recv_ops))
    for op in sends:
        if op.param_name not in plan.sources:
            raise PlanError(f"{op.param_name}: is sent, but is none of the plan's sources")
        _checked_box(op, plan.sources[op.param_name], "source")
    received: dict[str, list[TransferOp]] = defaultdict(list)
    for op in recvs:
        if op.param_name not in plan.destinations:
            raise PlanError(f"{op.param_name}: is received, but is none of the plan's destinations")
        received[op.param_name].append(op)
    # Layers repeat: equal pieces of equal tensors are checked once.
    sound: set[tuple[tuple[int, ...], tuple[Box, ...]]] = set()
    for name, spec in plan.destinations.items():
        ops = received[name]
        boxes = tuple(_checked_box(op, spec, "destination") for op in ops)
        views = {spec.shape if op.my_view is None else op.my_view for op in ops} or {spec.shape}
        if len(views) > 1:
            raise PlanError(f"{name}: pieces are of different views {sorted(views)} of one tensor")
        view = views.pop()
        if (view, boxes) in sound:
            continue
        defect = intervals.find_defect(view, boxes)
        if defect is not None:
            times = "never" if defect.kind == "hole" else "more than once"
            region = [list(bounds) for bounds in defect.box]
            raise PlanError(f"{name}: elements {region} of shape {view} are written {times}")
        sound.add((view, boxes))


def verify_plans(plans: Mapping[int, ReshardPlan]) -> None:
    """Check the plans of all ranks: each by itself, and the two ends of every piece.

    Args:
        plans: Plans by rank, of every rank of the group.

    Raises:
        PlanError: A plan is not sound, or two ranks' plans disagree; names the parameter.
    """
    for rank, plan in plans.items():
        if plan.rank != rank or plan.num_ranks != len(plans):
            raise PlanError(
                f"the plan of rank {rank} of {len(plans)} says that it is of rank {plan.rank} of "
                f"{plan.num_ranks}"
            )
        verify_plan(plan)
    _compare_joined(plans)
    recvs = {
        (rank, op.task_id): op for rank, plan in plans.items() for op in _by_task(plan.recv_ops)
    }
    for rank, plan in plans.items():
        for send in _by_task(plan.send_ops):
            recv = recvs.pop((send.peer_rank, send.task_id), None)
            where = f"{send.param_name}: task id {send.task_id}, rank {rank} to {send.peer_rank}"
            if recv is None:
                raise PlanError(f"{where}: is sent, but not received")
            for what, sent, expected in (
                ("source rank", rank, recv.peer_rank),
                ("source elements", send.my_slice, recv.peer_slice),
                ("destination elements", send.peer_slice, recv.my_slice),
                ("source view", send.my_view, recv.peer_view),
                ("destination view", send.peer_view, recv.my_view),
                ("source dtype", send.my_dtype, recv.peer_dtype),
                ("destination dtype", send.peer_dtype, recv.my_dtype),
                ("wire dtype", send.wire_dtype, recv.wire_dtype),
            ):
                if sent != expected:
                    raise PlanError(
                        f"{where}: the sender states {what} {sent}, the receiver {expected}"
                    )
    for (rank, task_id), op in recvs.items():
        raise PlanError(
            f"{op.param_name}: task id {task_id}, rank {op.peer_rank} to {rank}: is received, but "
            "not sent"
        )


def _compare_joined(plans: Mapping[int, ReshardPlan]) -> None:
    """Return whether both ends have joined the same pieces, in the same order."""
    sent, received = (
        {
            (dst_rank, op.task_id): [piece.task_id for piece in op.pieces]
            for rank, plan in plans.items()
            for op in (plan.send_ops if is_send else plan.recv_ops)
            for dst_rank in ((op.peer_rank if is_send else rank),)
        }
        for is_send in (True, False)
    )
    for (rank, task_id), pieces in sent.items():
        others = received.get((rank, task_id), pieces)
        if pieces != others:
            raise PlanError(
                f"task id {task_id} to rank {rank}: the sender joins pieces {pieces[:4]}, the "
                f"receiver {others[:4]}"
            )


def num_elements_of(op: TransferOp) -> int:
    """Elements that a transfer moves.

    Raises:
        PlanError: Neither end states its bounds.
    """
    if op.joined is not None:
        return intervals.num_elements(op.joined.sizes)
    extents = []
    for mine, peers in zip(op.my_slice, op.peer_slice, strict=True):
        extent = _extent(mine)
        extent = _extent(peers) if extent is None else extent
        if extent is None:
            raise PlanError(f"{op.param_name}: task id {op.task_id} does not state its bounds")
        extents.append(extent)
    return intervals.num_elements(extents)


def _num_bytes(op: TransferOp) -> int:
    dtype = op.wire_dtype or op.my_dtype
    if dtype is None:
        raise PlanError(f"{op.param_name}: task id {op.task_id} does not state its dtypes")
    return num_elements_of(op) * dtype.itemsize


def bytes_per_pair(plan: ReshardPlan) -> dict[tuple[int, int], int]:
    """Bytes that travel, by (source rank, destination rank), of the pairs this rank is in.

    A rank's copies to itself are counted once, under (rank, rank).
    """
    pairs: Counter[tuple[int, int]] = Counter()
    for op in plan.send_ops:
        pairs[plan.rank, op.peer_rank] += _num_bytes(op)
    for op in plan.recv_ops:
        if op.peer_rank != plan.rank:
            pairs[op.peer_rank, plan.rank] += _num_bytes(op)
    return dict(sorted(pairs.items()))


def _dtype_text(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def format_plan(plan: ReshardPlan, max_ops: int = _MAX_PRINTED_OPS) -> str:
    """A plan as text: bytes per pair, then its pieces.

    Args:
        plan: Plan with `rank` filled in.
        max_ops: Pieces to list; the rest is counted.

    Example:
        Rank 2 of 3 receives an `[8, 3]` tensor from two halves. `as (4, 6, 5)` behind a piece: its elements
        count in the tensor viewed as that shape::

            rank 2 of 3: 0 sends, 2 receives, 48 bytes
                  0 -> 2                   24 bytes
                  1 -> 2                   24 bytes
              w[0:4],[0:3] <- rank 0 [0:4],[0:3] bfloat16 task 8796093022208
              w[4:8],[0:3] <- rank 1 [0:4],[0:3] bfloat16 task 8796093022209
    """
    pairs = bytes_per_pair(plan)
    lines = [
        f"rank {plan.rank} of {plan.num_ranks}: {len(plan.send_ops)} sends, "
        f"{len(plan.recv_ops)} receives, {sum(pairs.values())} bytes"
    ]
    lines += [
        f"  {src:>5} -> {dst:<5} {num_bytes:>16} bytes" for (src, dst), num_bytes in pairs.items()
    ]
    ops = [*plan.send_ops, *plan.recv_ops]
    for op in ops[:max_ops]:
        arrow = "->" if op.is_send else "<-"
        mine, peers = (",".join(map(_text, side)) for side in (op.my_slice, op.peer_slice))
        view = "" if op.my_view is None else f" as {op.my_view}"
        others = "" if op.joined is None else f" and {len(op.pieces) - 1} others in a pattern"
        lines.append(
            f"  {op.param_name}{mine}{view} {arrow} rank {op.peer_rank} {peers} "
            f"{_dtype_text(op.wire_dtype)} task {op.task_id}{others}"
        )
    if len(ops) > max_ops:
        lines.append(f"  and {len(ops) - max_ops} more pieces")
    lines += [
        f"  {reduction.param_name}: {reduction.op} over mesh dimensions {reduction.mesh_dims} first"
        for reduction in plan.reductions
    ]
    return "\n".join(lines)
