"""Plans in parts, so that what is staged of each stays below a number of bytes."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Sequence

from moe_comm.resharding.describe import intervals
from moe_comm.resharding.describe.disagreement import PlanError
from moe_comm.resharding.plan.plan_check import num_elements_of
from moe_comm.resharding.plan.rank_metadata import RankMetadata
from moe_comm.resharding.plan.reshard_plan import ReshardPlan
from moe_comm.resharding.plan.transfer_op import TransferOp

# Quantized weights are assembled in bfloat16, whatever travels.
_ASSEMBLED_BYTES = 2
MAX_BATCHES = 1 << 14


def check_number(destinations: Sequence[RankMetadata], limit: int) -> int:
    """Bytes of a batch, whose number is then bounded on every rank. For all ranks to find alike.

    A batch is an agreement of all ranks, whatever it moves: of single elements, a refit would take as many
    milliseconds as it has elements.

    Args:
        destinations: Metadata of what each rank writes.
        limit: `execution_batch_bytes`, the smallest of all ranks.

    Raises:
        PlanError: Some rank would receive too many; the message has the least limit for these models.
    """
    # A rank receives one such share, and sends one to each rank at most.
    num_shares = len(destinations) + 1
    share = max(1, limit // num_shares)
    num_bytes = num_batches = rank = 0
    for each, metadata in enumerate(destinations):
        sizes = [
            (intervals.num_elements(kind.shape), max(_ASSEMBLED_BYTES, kind.element_size))
            for _, kind in metadata.named_kinds()
            if not kind.is_transformed
        ]
        count = math.ceil(sum(elements * size / max(share, size) for elements, size in sizes))
        if count > num_batches:
            rank, num_batches = each, count
        num_bytes = max(num_bytes, sum(elements * size for elements, size in sizes))
    if num_batches > MAX_BATCHES:
        least = -(-num_bytes // MAX_BATCHES) * num_shares
        raise PlanError(
            f"execution_batch_bytes={limit} makes at least {num_batches} batches of what rank {rank} receives, "
            f"of which there may be {MAX_BATCHES}: these models need execution_batch_bytes >= {least}"
        )
    return share


def batch_cuts(plan: ReshardPlan, max_bytes: int) -> list[int]:
    """Task ids at which this rank's receives begin a new batch, ascending.

    A parameter whose pieces fit into one batch is received in one: what is assembled of it is then
    written in that batch.

    Args:
        plan: This rank's.
        max_bytes: Most bytes of a batch; one that a single piece exceeds has no other.
    """
    cuts: list[int] = []
    filled = 0
    for _, group in itertools.groupby(plan.recv_ops, key=lambda op: op.param_name):
        costs = [(op.task_id or 0, _cost(op)) for op in group]
        total = sum(cost for _, cost in costs)
        if filled and filled + total > max_bytes:
            cuts.append(costs[0][0])
            filled = 0
        for task_id, cost in costs:
            if filled and filled + cost > max_bytes:
                cuts.append(task_id)
                filled = 0
            filled += cost
    return cuts


def _cost(op: TransferOp) -> int:
    """Bytes that either end may stage of a piece."""
    dtypes = (dtype for dtype in (op.wire_dtype, op.my_dtype) if dtype is not None)
    item_bytes = next((dtype.itemsize for dtype in dtypes), 0)
    return num_elements_of(op) * max(_ASSEMBLED_BYTES, item_bytes)


def cut_into_batches(plan: ReshardPlan, cuts: Sequence[Sequence[int]]) -> list[ReshardPlan]:
    """The batches of a plan, given where the receives of every rank begin new ones."""
    num_batches = 1 + max(map(len, cuts))
    sends: list[list[TransferOp]] = [[] for _ in range(num_batches)]
    recvs: list[list[TransferOp]] = [[] for _ in range(num_batches)]
    for op in plan.send_ops:
        sends[bisect.bisect_right(cuts[op.peer_rank], op.task_id or 0)].append(op)
    for op in plan.recv_ops:
        recvs[bisect.bisect_right(cuts[plan.rank], op.task_id or 0)].append(op)
    return [
        dataclasses.replace(plan, send_ops=sent, recv_ops=received, reductions=[], batches=[])
        for sent, received in zip(sends, recvs, strict=True)
    ]
