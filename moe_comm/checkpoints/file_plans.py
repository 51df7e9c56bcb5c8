"""Plans between ranks and files: the files are one more rank, which holds every tensor whole."""

from __future__ import annotations

import contextlib
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from moe_comm.checkpoints.scaled_weights import lacks_scales
from moe_comm.resharding.describe import intervals
from moe_comm.resharding.describe.conversions import NUMBERS, cannot_become
from moe_comm.resharding.describe.disagreement import PlanError
from moe_comm.resharding.describe.intervals import Box
from moe_comm.resharding.describe.layouts import resolve_layouts
from moe_comm.resharding.describe.metadata import ParameterMetadata, ViewLayout
from moe_comm.resharding.describe.tensor_layout import Holder
from moe_comm.resharding.plan.holders import named_holders
from moe_comm.resharding.plan.planner import build_plan_from_rank_metadata
from moe_comm.resharding.plan.rank_metadata import (
    RankMetadata,
    decode_rank_metadata,
    encode_rank_metadata,
)
from moe_comm.resharding.plan.reshard_plan import ReshardPlan, TensorSpec
from moe_comm.resharding.plan.tied_weights import source_name_of
from moe_comm.resharding.plan.transfer_op import TransferOp, unpack_task_id

_NOTHING = decode_rank_metadata(encode_rank_metadata([]))


class FilePart(NamedTuple):
    """A box of a tensor in the files, which a rank writes or reads.

    Args:
        tensor: Name in the files.
        shape: Shape that the tensor is viewed as.
        box: Box of that view.
        dtype: Dtype in the files.
        op: The other end, on the rank.
    """

    tensor: str
    shape: tuple[int, ...]
    box: Box
    dtype: torch.dtype
    op: TransferOp


def whole_tensors(by_rank: Sequence[RankMetadata]) -> dict[str, TensorSpec]:
    """Return shape and dtype of every tensor that ranks hold parts of, by name.

    Memory that has several names on every rank that has it comes under the first.

    Args:
        by_rank: Metadata of each rank's tensors.

    Raises:
        PlanError: Ranks contradict each other, or what they say is not enough; names the tensor.
    """
    holders = named_holders(by_rank)
    named_first: set[str] = set()
    for side in by_rank:
        named_first.update(set(side.resolved_names).difference(*(tie[1:] for tie in side.ties)))
    # Layers repeat: tensors that the same ranks hold alike are worked out once.
    known: dict[tuple[tuple[int, int], ...], TensorSpec] = {}
    wholes = {}
    for name, key in holders.keys.items():
        if name not in named_first:
            continue
        if key not in known:
            known[key] = _spec_of(name, holders.of(name))
        wholes[name] = known[key]
    return wholes


def _spec_of(name: str, holders: Sequence[Holder]) -> TensorSpec:
    first_rank, first = holders[0]
    for rank, meta in holders:
        if meta.dtype != first.dtype:
            raise PlanError(
                f"{name}: rank {first_rank} holds {first.dtype}, rank {rank} {meta.dtype}"
            )
    layouts, _ = resolve_layouts(name, holders, [])
    for meta in (holder.meta for holder in holders):
        if meta.view is not None:
            return TensorSpec(meta.view.whole_shape, first.dtype)
        if meta.mesh is not None:
            return TensorSpec(meta.mesh.global_shape, first.dtype)
    layout = next((layout for layout in layouts if layout is not None), None)
    if layout is None:
        return TensorSpec(first.shape, first.dtype)
    if first.local_view is None and len(layout.global_shape) != len(first.shape):
        raise PlanError(
            f"{name}: nothing says along which dimension of {first.shape} experts lie; state "
            "expert_dim (and local_view)"
        )
    return TensorSpec(layout.global_shape, first.dtype)


def _files_side(tensors: Mapping[str, TensorSpec], rank: int) -> RankMetadata:
    """Content of the files, as a rank would say it."""
    kinds: dict[TensorSpec, int] = {}
    kind_idx = array("I", [kinds.setdefault(spec, len(kinds)) for spec in tensors.values()])
    metas = [
        ParameterMetadata(
            name="",
            shape=spec.shape,
            dtype=spec.dtype,
            element_size=spec.dtype.itemsize,
            owner_rank=rank,
            view=ViewLayout(
                spec.shape,
                tuple(map(intervals.whole, spec.shape)),
                torch.empty(spec.shape, device="meta").stride(),
                spec.shape,
            ),
        )
        for spec in kinds
    ]
    return RankMetadata(metas, kind_idx, list(tensors), b"")


@contextlib.contextmanager
def _naming_files(rank: int) -> Iterator[None]:
    """Around a plan: what it says of the rank that the files are is said of the checkpoint."""
    try:
        yield
    except PlanError as error:
        text = re.sub(rf"\b((source|target) )?rank {rank}\b", "the checkpoint", str(error))
        raise PlanError(text) from error


def plan_save(
    by_rank: Sequence[RankMetadata], rank: int, wholes: Mapping[str, TensorSpec]
) -> ReshardPlan:
    """Plan which parts of the tensors a rank writes: its sends, to a rank behind the last.

    Args:
        by_rank: Metadata of each rank's tensors.
        rank: Rank that writes.
        wholes: The tensors.

    Raises:
        PlanError: Some elements are held by no rank, or ranks contradict each other; names the tensor.
    """
    num_ranks = len(by_rank)
    sides = [(side, _NOTHING) for side in by_rank]
    with _naming_files(num_ranks):
        return build_plan_from_rank_metadata(
            [*sides, (_NOTHING, _files_side(wholes, num_ranks))], rank
        )


def names_on_disk(
    by_rank: Sequence[RankMetadata], names: Mapping[str, object]
) -> list[RankMetadata]:
    """Give tensors that ranks hold under several names the one that a checkpoint has.

    Args:
        by_rank: Metadata of each rank's tensors.
        names: Names in the checkpoint.

    Raises:
        PlanError: The checkpoint lacks a tensor, by all of its names; names it and the rank.
    """
    found = []
    for rank, side in enumerate(by_rank):
        renamed: dict[str, str] = {}
        for name in side.resolved_names:
            if name in names or source_name_of(name, names) is not None:
                continue
            tied = next((tie for tie in side.ties if name in tie), ())
            other = next((each for each in tied if each in names), None)
            if other is None:
                raise PlanError(f"{name} is not in the checkpoint, rank {rank} needs it")
            renamed[name] = other
        found.append(side.renamed(renamed))
    return found


def check_becomes(side: RankMetadata, tensors: Mapping[str, tuple[TensorSpec, str]]) -> None:
    """Check that values of a checkpoint become those of a rank's tensors.

    Args:
        side: Metadata of the rank's tensors, by names of the checkpoint.
        tensors: Tensors of the checkpoint by name, each with the file that has it.

    Raises:
        PlanError: One does not; names the tensor, the file and both dtypes.
    """
    for name, kind in side.named_kinds():
        stored, file = tensors[source_name_of(name, tensors) or name]
        reason = cannot_become(stored.dtype, kind.dtype, takes_over=kind.is_buffer)
        if reason and kind.dtype in NUMBERS:
            reason = lacks_scales(name, stored.dtype) or reason
        if reason:
            raise PlanError(
                f"{file}: {name}: expected {kind.dtype} or what becomes it, got {stored.dtype}: {reason}"
            )


def plan_load(
    by_rank: Sequence[RankMetadata],
    rank: int,
    tensors: Mapping[str, TensorSpec],
    *,
    strict: bool,
) -> ReshardPlan:
    """Plan which parts of the tensors a rank reads: its receives, from a rank behind the last.

    Args:
        by_rank: Metadata of each rank's tensors, by names of the checkpoint.
        rank: Rank that reads.
        tensors: Tensors of the checkpoint, by name.
        strict: A tensor that no rank takes is an error.

    Raises:
        PlanError: A tensor has another shape, or is missing; names it.
    """
    num_ranks = len(by_rank)
    sides = [(_NOTHING, side) for side in by_rank]
    with _naming_files(num_ranks):
        return build_plan_from_rank_metadata(
            [*sides, (_files_side(tensors, num_ranks), _NOTHING)], rank, strict=strict
        )


def _part(name: str, spec: TensorSpec, op: TransferOp) -> FilePart:
    box = tuple((part.start, part.stop) for part in op.peer_slice)
    return FilePart(name, op.peer_view or spec.shape, box, spec.dtype, op)


def written_parts(plan: ReshardPlan, wholes: Mapping[str, TensorSpec]) -> list[FilePart]:
    """Return what a rank writes by a plan of `plan_save`."""
    names = list(wholes)
    parts = []
    for op in plan.send_ops:
        assert op.task_id is not None
        name = names[unpack_task_id(op.task_id)[1]]
        parts.append(_part(name, wholes[name], op))
    return parts


def read_parts(
    plan: ReshardPlan, side: RankMetadata, tensors: Mapping[str, TensorSpec]
) -> list[FilePart]:
    """Return what a rank reads by a plan of `plan_load`.

    Args:
        plan: The plan.
        side: Metadata of the rank's tensors, by names of the checkpoint.
        tensors: Tensors of the checkpoint, by name.
    """
    names = {own.name: source_name_of(own.resolved_name, tensors) for own in side.own()}
    parts = []
    for op in plan.recv_ops:
        name = names[op.param_name]
        assert name is not None
        parts.append(_part(name, tensors[name], op))
    return parts
