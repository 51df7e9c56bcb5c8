"""Layouts of each rank's tensor in the whole one, from what ranks say about it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, cast

from moe_comm.resharding.describe import intervals
from moe_comm.resharding.describe.disagreement import Part, PlanError, describe_disagreement
from moe_comm.resharding.describe.intervals import Interval, Intervals
from moe_comm.resharding.describe.mesh_layouts import check_pending_sums, mesh_layout
from moe_comm.resharding.describe.metadata import MeshLayout, ParameterMetadata, ViewLayout
from moe_comm.resharding.describe.parallelism import OFFSET_HINT
from moe_comm.resharding.describe.tensor_layout import Holder, Layout, Shape, common_shape, refine


@dataclasses.dataclass(frozen=True)
class _Frame:
    """Part of a holder's metadata that decides its layout; equal for ranks that hold the same.

    Args:
        view: Shape of the tensor, before dimensions for experts are added.
        tp_views: Shapes like `view` of each member of the tensor parallel group.
        tp_idx: Place in that group.
        ep_views: The same of the expert parallel group.
        ep_idx: Place in that group.
        is_tp: Whether it is stated to be sharded over the tensor parallel group.
        partition_dim: Stated dimension.
        components: Stated sizes along that dimension, of each member of the tensor parallel group.
        expert_dim: Stated dimension of experts.
        is_expert: Whether it belongs to experts.
        is_fused: Whether it holds several experts.
        num_experts: Experts of the whole model.
    """

    view: Shape
    tp_views: tuple[Shape, ...]
    tp_idx: int
    ep_views: tuple[Shape, ...]
    ep_idx: int
    is_tp: bool
    partition_dim: int
    components: tuple[tuple[int, ...] | None, ...]
    expert_dim: int | None
    is_expert: bool
    is_fused: bool
    num_experts: int | None


class _Choice(NamedTuple):
    """Dimensions that metadata leaves open; `expert_dim` -1: a dimension of its own before all."""

    expert_dim: int | None
    tp_dim: int | None
    has_stated_tp_dim: bool


def _view(meta: ParameterMetadata) -> Shape:
    return meta.shape if meta.local_view is None else meta.local_view


def _place(name: str, rank: int, ranks: Sequence[int] | None, group: str) -> int:
    if not ranks:
        return 0
    if rank not in ranks:
        raise PlanError(
            f"{name}: rank {rank} is not in its own {group} parallel group {ranks}; {OFFSET_HINT}"
        )
    return ranks.index(rank)


def _stated_components(name: str, rank: int, meta: ParameterMetadata) -> tuple[int, ...] | None:
    """Sizes of the components along `partition_dim` on one rank; None for a single one."""
    if not meta.is_tp or len(meta.tensor_parallel_group_ranks or ()) < 2:
        return None
    view, dim = _view(meta), meta.partition_dim
    if not 0 <= dim < len(view):
        raise PlanError(f"{name}: rank {rank} states partition_dim {dim} for shape {view}")
    if meta.partition_sizes is not None:
        if sum(meta.partition_sizes) != view[dim]:
            raise PlanError(
                f"{name}: rank {rank} states partition_sizes {meta.partition_sizes}, but dimension "
                f"{dim} of shape {view} has size {view[dim]}"
            )
        return tuple(meta.partition_sizes)
    stride = meta.partition_stride
    if stride > 1:
        if view[dim] % stride:
            raise PlanError(
                f"{name}: rank {rank} states partition_stride {stride}, which does not divide "
                f"dimension {dim} of shape {view}"
            )
        return (view[dim] // stride,) * stride
    return None


def _frames(name: str, side: str, holders: Sequence[Holder]) -> list[_Frame | None]:
    """A frame per holder; None for DTensors and views, which say themselves where they lie."""
    by_rank = {holder.rank: holder.meta for holder in holders}
    frames: dict[_Frame, _Frame] = {}
    result: list[_Frame | None] = []
    for rank, meta in holders:
        if meta.mesh is not None or meta.view is not None:
            result.append(None)
            continue
        view = _view(meta)
        if intervals.num_elements(view) != intervals.num_elements(meta.shape):
            raise PlanError(
                f"{name}: rank {rank} holds shape {meta.shape}, which cannot be viewed as {view}"
            )
        # A member that nothing is known about is taken to hold as much as this rank.
        tp_ranks = meta.tensor_parallel_group_ranks
        tp_metas = [by_rank.get(member, meta) for member in tp_ranks or (rank,)]
        is_fused = meta.is_ep and meta.global_expert_index is None
        ep_ranks = meta.expert_parallel_group_ranks if is_fused else None
        tp_views = tuple(_view(member) for member in tp_metas)
        ep_views = tuple(_view(by_rank.get(member, meta)) for member in ep_ranks or (rank,))
        for member, other in zip(
            (*(tp_ranks or (rank,)), *(ep_ranks or (rank,))), (*tp_views, *ep_views), strict=True
        ):
            if len(other) != len(view):
                raise PlanError(
                    f"{name}: {side} rank {rank} holds shape {view}, rank {member} of the same "
                    f"group {other}"
                )
        frame = _Frame(
            view=view,
            tp_views=tp_views,
            tp_idx=_place(name, rank, tp_ranks, "tensor"),
            ep_views=ep_views,
            ep_idx=_place(name, rank, ep_ranks, "expert"),
            is_tp=meta.is_tp,
            partition_dim=meta.partition_dim,
            components=tuple(_stated_components(name, rank, member) for member in tp_metas),
            expert_dim=meta.expert_dim,
            is_expert=meta.is_ep or meta.global_expert_index is not None,
            is_fused=is_fused,
            num_experts=meta.num_experts,
        )
        result.append(frames.setdefault(frame, frame))
    return result


def _is_open(frame: _Frame) -> bool:
    """Return whether nobody says where the experts lie, although they are divided."""
    return frame.is_fused and frame.expert_dim is None and len(frame.ep_views) > 1


def _expert_choices(
    name: str, frames: Sequence[_Frame], meshes: Sequence[Layout]
) -> list[int | None]:
    """Dimensions along which experts may lie; [None] where none is needed."""
    needy = [frame for frame in frames if _is_open(frame)]
    if not needy:
        return [None]
    stated = {frame.expert_dim for frame in frames if frame.expert_dim is not None}
    if len(stated) == 1:
        return list(stated)
    if not meshes and len({len(frame.ep_views) for frame in frames}) == 1:
        return [-1]
    ndims = {len(frame.view) for frame in needy}
    if len(ndims) > 1:
        raise PlanError(
            f"{name}: shapes of fused experts differ in their dimensions "
            f"({sorted({frame.view for frame in needy})}), and expert_dim is not stated"
        )
    return [
        dim
        for dim in range(ndims.pop())
        if all(
            not frame.num_experts
            or sum(view[dim] for view in frame.ep_views) % frame.num_experts == 0
            for frame in needy
        )
    ]


def _attribute_layout(
    name: str, frame: _Frame, choice: _Choice, tp_dim: int | None, packed: Shape | None
) -> Layout | None:
    """The layout of a frame whose dimensions are chosen; None where the choice does not fit.

    One dimension cannot be sharded over two groups: nobody could say in which order.
    """
    expert_dim = frame.expert_dim
    if expert_dim is None and (_is_open(frame) or choice.expert_dim == -1):
        expert_dim = choice.expert_dim
    if len(frame.ep_views) < 2 and expert_dim != -1:
        expert_dim = None
    ndim = len(frame.view)
    if (tp_dim or 0) >= max(1, ndim) or (expert_dim or 0) >= max(1, ndim):
        return None
    if tp_dim is not None and tp_dim == expert_dim:
        return None
    dims: list[Intervals] = []
    global_shape: list[int] = []
    for dim, size in enumerate(frame.view):
        if dim == tp_dim:
            sizes, member_idx = _component_sizes(name, frame, dim, packed), frame.tp_idx
        elif dim == expert_dim:
            sizes, member_idx = [(view[dim],) for view in frame.ep_views], frame.ep_idx
        else:
            sizes, member_idx = [(size,)], 0
        dims.append(intervals.component_intervals(sizes, member_idx))
        global_shape.append(sum(itertools.chain.from_iterable(sizes)))
    view = frame.view
    if expert_dim == -1:
        view = (1, *view)
        dims.insert(0, (Interval(frame.ep_idx, 0, 1),))
        global_shape.insert(0, len(frame.ep_views))
    return Layout(view, tuple(global_shape), tuple(dims))


def _component_sizes(
    name: str, frame: _Frame, dim: int, packed: Shape | None
) -> list[tuple[int, ...]]:
    """Per member of the tensor parallel group, the sizes of its parts of packed components."""
    sizes = [view[dim] for view in frame.tp_views]
    if not frame.is_tp or dim != frame.partition_dim:
        return [(size,) for size in sizes]
    stated = [
        (size,) if parts is None else parts
        for size, parts in zip(sizes, frame.components, strict=True)
    ]
    num_members = len(sizes)
    if packed is not None and all(parts is None for parts in frame.components):
        # The other side says how components are packed, and this side does not contradict it.
        share = tuple(full // num_members for full in packed)
        if all(sum(share) == size for size in sizes) and sum(packed) == sum(sizes):
            return [share] * num_members
    if len({len(parts) for parts in stated}) > 1:
        raise PlanError(
            f"{name}: members of a tensor parallel group hold different numbers of components "
            f"along dimension {dim}: {stated}"
        )
    return stated


def _packed_sizes(holders: Iterable[Holder], frames: Iterable[_Frame | None]) -> Shape | None:
    """Full sizes of the components that some holder states by `partition_sizes`."""
    for (_, meta), frame in zip(holders, frames, strict=True):
        if frame is not None and meta.partition_sizes is not None and None not in frame.components:
            components = cast("tuple[tuple[int, ...], ...]", frame.components)
            return tuple(sum(sizes) for sizes in zip(*components, strict=False))
    return None


def _layouts_of_choice(
    name: str,
    frames: Sequence[_Frame],
    meshes: Sequence[Layout],
    choice: _Choice,
    packed: Shape | None,
) -> dict[_Frame, Layout] | None:
    """Every frame's layout under a choice; None where the choice does not fit."""
    layouts: dict[_Frame, Layout] = {}
    unmarked: list[_Frame] = []
    for frame in frames:
        is_divided = len(frame.tp_views) > 1
        tp_dim = frame.partition_dim if frame.is_tp and is_divided else None
        if tp_dim is not None and frame.is_expert and not choice.has_stated_tp_dim:
            tp_dim = choice.tp_dim
        layout = _attribute_layout(name, frame, choice, tp_dim, packed)
        if layout is None:
            return None
        layouts[frame] = layout
        if is_divided and not frame.is_tp:
            unmarked.append(frame)
    definite = [layout for frame, layout in layouts.items() if frame not in unmarked]
    known = {layout.global_shape for layout in (*definite, *meshes)}
    tp_dims = {frame.partition_dim for frame in frames if frame.is_tp}
    for frame in unmarked:
        dims = range(len(frame.view)) if meshes else sorted(tp_dims)
        found = _unmarked_layout(name, frame, choice, known, dims)
        layouts[frame] = layouts[frame] if found is None else found
    return layouts


def _unmarked_layout(
    name: str, frame: _Frame, choice: _Choice, known: set[Shape], tp_dims: Iterable[int]
) -> Layout | None:
    """The layout of a tensor that does not say whether the tensor parallel ranks share it.

    Some modules shard without saying so: the sizes of the other side tell, where that side says
    that it is sharded.
    """
    fitting: list[Layout] = []
    for tp_dim in (None, *tp_dims):
        if tp_dim is not None and tp_dim == frame.expert_dim:
            continue
        layout = _attribute_layout(name, frame, choice, tp_dim, None)
        if layout is not None and layout.global_shape in known:
            if tp_dim is None:
                return layout
            fitting.append(layout)
    return fitting[0] if len(fitting) == 1 else None


# ------------------------------------------------------------------------------------------------
# One shape for all.


def _stated_layout(name: str, holder: Holder) -> Layout | None:
    """The layout of a holder that needs no other rank to know it."""
    _, meta = holder
    if meta.view is not None:
        dims = tuple(tuple(Interval(*part) for part in held) for held in meta.view.dims)
        return Layout(meta.shape, meta.view.global_shape, dims)
    return None if meta.mesh is None else mesh_layout(name, holder, meta.mesh)


def resolve_layouts(
    name: str, sources: Sequence[Holder], destinations: Sequence[Holder]
) -> tuple[list[Layout | None], list[Layout | None]]:
    """Resolve the layouts of the tensors of one parameter, all with the same global shape.

    Args:
        name: Name in the whole model, for messages.
        sources: Ranks to read from, each once.
        destinations: Ranks to be written, each once.

    Returns:
        Layouts of sources and of destinations, in their order; None for a rank that holds no element.

    Raises:
        PlanError: Statements of ranks are not enough, or contradict each other.
    """
    for holder in destinations:
        mesh = holder.meta.mesh
        if mesh is not None and any(placement.kind == "partial" for placement in mesh.placements):
            raise PlanError(
                f"{name}: rank {holder.rank} would receive a DTensor with Partial placement; only "
                "sources may be pending sums"
            )
    check_pending_sums(name, sources)
    holders = [*sources, *destinations]
    # The groups of a side are those of its own model, so members are looked up on that side.
    frames = [*_frames(name, "source", sources), *_frames(name, "target", destinations)]
    stated_layouts = [_stated_layout(name, holder) for holder in holders]
    distinct_frames = list(dict.fromkeys(frame for frame in frames if frame is not None))
    distinct_meshes = [layout for layout in stated_layouts if layout is not None]
    chosen = _choose(name, holders, frames, distinct_frames, distinct_meshes, len(sources))
    layouts = [
        layout if frame is None else chosen[frame]
        for frame, layout in zip(frames, stated_layouts, strict=True)
    ]
    if any(holder.meta.view is not None and holder.meta.view.disk_shape for holder in holders):
        _check_disk_shapes(name, holders, layouts, len(sources))
    held_shapes = {layout.global_shape for layout in layouts if layout is not None}
    if not held_shapes:
        return [None] * len(sources), [None] * len(destinations)
    shape = common_shape(held_shapes)
    assert shape is not None
    cache: dict[Layout, Layout] = {}
    result: list[Layout | None] = []
    for holder, layout in zip(holders, layouts, strict=True):
        if layout is None or intervals.num_elements(layout.view) == 0:
            result.append(None)
            continue
        if layout not in cache:
            refined = refine(layout, shape)
            if refined is None:
                raise PlanError(
                    f"{name}: rank {holder.rank} holds {layout.view} of {layout.global_shape}, cut "
                    f"where it is no view of the other side's {shape}"
                )
            cache[layout] = refined
        result.append(cache[layout])
    return result[: len(sources)], result[len(sources) :]


def _check_disk_shapes(
    name: str, holders: Sequence[Holder], layouts: Sequence[Layout | None], num_sources: int
) -> None:
    """Refuse tensors of a checkpoint that have as many elements, but other dimensions, than others.

    Finer views of both may be views of each other.
    """
    parts = []
    for number, ((rank, meta), layout) in enumerate(zip(holders, layouts, strict=True)):
        disk_shape = None if meta.view is None else meta.view.disk_shape
        if layout is not None:
            side = "source" if number < num_sources else "target"
            parts.append(Part(side, rank, meta, disk_shape or layout.global_shape))
    shapes = dict.fromkeys(part.whole for part in parts)
    if any(common_shape(pair) is None for pair in itertools.combinations(shapes, 2)):
        raise PlanError(
            describe_disagreement(
                name, parts, lambda one, other: common_shape([one, other]) is not None
            )
        )


def _choose(
    name: str,
    holders: Sequence[Holder],
    frames: Sequence[_Frame | None],
    distinct_frames: Sequence[_Frame],
    meshes: Sequence[Layout],
    num_sources: int,
) -> Mapping[_Frame, Layout]:
    """Layouts under the only choice of open dimensions for which all global shapes agree."""
    packed = _packed_sizes(holders, frames)
    expert_dims = _expert_choices(name, distinct_frames, meshes)
    choices = [_Choice(dim, None, True) for dim in expert_dims]
    # Expert modules do not always state the dimension that they shard: dimension 0 is only its
    # default. Where sizes contradict what is stated, they may leave one possibility.
    ndim = max((len(frame.view) for frame in distinct_frames), default=0)
    others = [_Choice(dim, tp_dim, False) for dim in expert_dims for tp_dim in (*range(ndim), None)]
    stated: dict[_Frame, Layout] | None = None
    for candidates in (choices, others):
        agreed: list[dict[_Frame, Layout]] = []
        for choice in candidates:
            layouts = _layouts_of_choice(name, distinct_frames, meshes, choice, packed)
            if layouts is None:
                continue
            if choice.has_stated_tp_dim and len(expert_dims) == 1:
                stated = layouts
            shapes = [layout.global_shape for layout in (*layouts.values(), *meshes)]
            if not shapes or common_shape(shapes) is not None:
                agreed.append(layouts)
        if len(agreed) > 1 and not _are_equivalent(distinct_frames, meshes, expert_dims):
            raise PlanError(
                f"{name}: shapes {sorted({holder.meta.shape for holder in holders})} do not tell "
                f"which dimension is sharded over which ranks; state expert_dim (and local_view)"
            )
        if agreed:
            return agreed[0]
        if not any(frame.is_expert and frame.is_tp for frame in distinct_frames):
            break
    raise PlanError(_disagreement(name, holders, frames, stated, num_sources))


def _are_equivalent(
    frames: Sequence[_Frame], meshes: Sequence[Layout], expert_dims: Sequence[int | None]
) -> bool:
    """Return whether it does not matter along which dimension tensor parallel ranks share a tensor.

    Where groups of one size share it on both sides, each member takes what its like holds.
    """
    sizes = {len(frame.tp_views) for frame in frames}
    return not meshes and len(expert_dims) == 1 and len(sizes) == 1


def _disagreement(
    name: str,
    holders: Sequence[Holder],
    frames: Sequence[_Frame | None],
    layouts: Mapping[_Frame, Layout] | None,
    num_sources: int,
) -> str:
    """Names two ranks whose shapes contradict each other."""
    if layouts is None:
        for holder, frame in zip(holders, frames, strict=True):
            is_divided = frame is not None and len(frame.tp_views) > 1 and len(frame.ep_views) > 1
            if is_divided and frame is not None and frame.partition_dim == frame.expert_dim:
                return (
                    f"{name}: dimension {frame.expert_dim} of shape {frame.view} on rank "
                    f"{holder.rank} is sharded over both tensor and expert parallel ranks; a "
                    "local_view must give experts a dimension of their own"
                )
        shapes = sorted({holder.meta.shape for holder in holders})
        return f"{name}: shapes {shapes} fit no way in which experts could lie in them"
    parts = [
        Part(
            "source" if number < num_sources else "target",
            holder.rank,
            holder.meta,
            cast("MeshLayout | ViewLayout", holder.meta.mesh or holder.meta.view).global_shape
            if frame is None
            else layouts[frame].global_shape,
        )
        for number, (holder, frame) in enumerate(zip(holders, frames, strict=True))
    ]
    return describe_disagreement(
        name, parts, lambda one, other: common_shape([one, other]) is not None
    )
