"""The whole tensors of which ranks hold parts, as all ranks together have described them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from moe_comm.checkpoints.boxes import HeldBox, boxes_of, cells_of, is_within
from moe_comm.peers.bootstrap import Bootstrap
from moe_comm.resharding.describe.disagreement import PlanError
from moe_comm.resharding.describe.intervals import Box
from moe_comm.resharding.describe.layouts import resolve_layouts
from moe_comm.resharding.describe.metadata import ParameterMetadata
from moe_comm.resharding.describe.module_tensors import (
    get_refit_tensor_dict,
    local_tensor,
    module_state,
)
from moe_comm.resharding.describe.tensor_layout import Holder, Layout, Shape
from moe_comm.resharding.hold.refit_models import Model, unwrap_models
from moe_comm.resharding.plan.holders import named_holders
from moe_comm.resharding.plan.joined_pieces import strides_in
from moe_comm.resharding.plan.name_matching import told_apart
from moe_comm.resharding.plan.planner import encoded_side
from moe_comm.resharding.plan.rank_metadata import (
    RankMetadata,
    decode_rank_metadata,
)
from moe_comm.tensors.memory import check_memory


class Cell(NamedTuple):
    """A box that ranks hold whole or not at all, and these ranks."""

    box: Box
    ranks: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class WholeTensor:
    """A tensor that ranks hold together.

    Args:
        shape: Shape of all of it.
        ranks: Rank of each holder, ascending; a rank that has several places comes several times.
        layouts: Layout of each holder; None for one that holds no element.
        boxes: Boxes of each holder; their strides are those of its memory only if it has stated them.
        dtypes: Dtype of each holder.
    """

    shape: Shape
    ranks: tuple[int, ...]
    layouts: tuple[Layout | None, ...]
    boxes: tuple[tuple[HeldBox, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    def cells(self, among: frozenset[int] | None = None) -> list[Cell]:
        """Return the cells of what some ranks hold.

        Args:
            among: These ranks; None for all.
        """
        held: dict[Box, dict[int, None]] = {}
        for rank, boxes in zip(self.ranks, self.boxes, strict=True):
            for each in boxes if among is None or rank in among else ():
                held.setdefault(each.box, {})[rank] = None
        cells = cells_of(self.shape, held)
        if len(cells) == len(held) and all(cell in held for cell in cells):
            return [Cell(box, tuple(ranks)) for box, ranks in held.items()]
        return [
            Cell(
                cell,
                tuple(
                    dict.fromkeys(
                        rank
                        for box, ranks in held.items()
                        if is_within(cell, box)
                        for rank in ranks
                    )
                ),
            )
            for cell in cells
        ]


class HeldTensor(NamedTuple):
    """A tensor that this rank holds.

    Args:
        name: Name in the whole model.
        tensor: Tensor in memory.
        whole: Whole tensor of which it is a part.
        boxes: Boxes of the whole tensor, in this one.
    """

    name: str
    tensor: torch.Tensor
    whole: WholeTensor
    boxes: tuple[HeldBox, ...]


class _OwnSide(NamedTuple):
    """Report of a rank for the others, and the tensors that this is about, in one order."""

    encoded: bytes
    tensors: list[torch.Tensor]


def describe_side(side: Model, group: dist.ProcessGroup | Bootstrap | None) -> _OwnSide:
    """Return what this rank holds. Local.

    Args:
        side: A module or `CheckpointViews`; None for nothing.
        group: The ranks.

    Raises:
        ValueError: It does not say which part of the whole model it is, or has no memory.
    """
    models = unwrap_models(side, None)
    module_state(models.source)  # has views described again where their owner has changed
    encoded = encoded_side(models.source, models.num_experts, group, "destination")
    if models.source is None:
        return _OwnSide(encoded, [])
    by_name = get_refit_tensor_dict(models.source)
    tensors = []
    for own in decode_rank_metadata(encoded).own():
        tensor = local_tensor(by_name[own.name])
        if tensor.numel():
            check_memory(own.name, tensor)
        tensors.append(tensor)
    return _OwnSide(encoded, tensors)


class Described:
    """Tensors of a model on all ranks.

    Args:
        encoded: Metadata of every rank as bytes, see `describe_side`.
        rank: This rank.
        tensors: Tensors of this rank, in its order.

    Raises:
        PlanError: Ranks contradict each other, or do not say which part of a tensor they hold; names it.
    """

    def __init__(self, encoded: Sequence[bytes], rank: int, tensors: list[torch.Tensor]) -> None:
        sides = [decode_rank_metadata(each) for each in encoded]
        self.by_rank: list[RankMetadata] = [
            side for side, _ in told_apart([(side, side) for side in sides])
        ]
        holders = named_holders(self.by_rank)
        wholes: dict[tuple[tuple[int, int], ...], WholeTensor] = {}
        self.own: list[HeldTensor] = []
        seen: dict[str, int] = {}
        for own, tensor in zip(self.by_rank[rank].own(), tensors, strict=True):
            name = own.resolved_name
            key = holders.keys[name]
            if key not in wholes:
                wholes[key] = _whole_tensor(name, holders.of(name))
            first = [number for number, _ in key].index(rank)
            nth = seen[name] = seen.get(name, -1) + 1
            whole = wholes[key]
            boxes = _own_boxes(name, tensor, own.kind, whole, first + nth)
            self.own.append(HeldTensor(name, tensor, whole, boxes))


def _whole_tensor(name: str, holders: Sequence[Holder]) -> WholeTensor:
    for rank, meta in holders:
        if meta.mesh is not None and any(each.kind == "partial" for each in meta.mesh.placements):
            raise PlanError(
                f"{name}: rank {rank} holds a DTensor with Partial placement, a pending sum; reduce it "
                "first"
            )
        is_fused = meta.is_ep and meta.global_expert_index is None and meta.expert_dim is None
        if is_fused and len(meta.expert_parallel_group_ranks or ()) > 1:
            raise PlanError(
                f"{name}: rank {rank} holds some of the experts in shape {meta.shape}, and nothing says "
                "along which dimension they lie; state expert_dim"
            )
    layouts, _ = resolve_layouts(name, holders, [])
    shapes = [meta.view.disk_shape for _, meta in holders if meta.view and meta.view.disk_shape]
    if not shapes:
        shapes = [layout.global_shape for layout in layouts if layout is not None]
        shapes += [meta.view.global_shape for _, meta in holders if meta.view is not None]
        shapes += [meta.mesh.global_shape for _, meta in holders if meta.mesh is not None]
    # Without elements, shapes are those that ranks hold.
    shape = min(shapes, key=len) if shapes else holders[0].meta.shape
    boxes = tuple(
        () if layout is None else tuple(boxes_of(layout, _stated_strides(meta, layout), shape))
        for (_, meta), layout in zip(holders, layouts, strict=True)
    )
    ranks = tuple(rank for rank, _ in holders)
    dtypes = tuple(meta.dtype for _, meta in holders)
    return WholeTensor(shape, ranks, tuple(layouts), boxes, dtypes)


def _stated_strides(meta: ParameterMetadata, layout: Layout) -> tuple[int, ...]:
    """Strides of a view; of a parameter, those of elements in a row."""
    if meta.view is not None:
        return strides_in(meta.shape, meta.view.strides, layout.view)
    return torch.empty(layout.view, device="meta").stride()


def _own_boxes(
    name: str, tensor: torch.Tensor, meta: ParameterMetadata, whole: WholeTensor, number: int
) -> tuple[HeldBox, ...]:
    layout = whole.layouts[number]
    if layout is None or meta.view is not None or tensor.is_contiguous():
        return whole.boxes[number]
    try:
        boxes = boxes_of(layout, tensor.view(layout.view).stride(), whole.shape)
    except RuntimeError:
        boxes = []
    if [each.box for each in boxes] != [each.box for each in whole.boxes[number]]:
        raise PlanError(
            f"{name}: a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} cannot be "
            f"viewed as {layout.view}"
        )
    return tuple(boxes)
