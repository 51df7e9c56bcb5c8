"""The two models of a refit: out of their wrappers, with the dtypes and formats that they ask for."""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import torch
import torch.distributed as dist

from moe_comm.peers.bootstrap import Bootstrap, bootstrap_for
from moe_comm.resharding.describe.metadata import ParameterMetadata
from moe_comm.resharding.describe.metadata_extraction import (
    WRAPPER_PARTS,
    _build_layer_module_prefix_map,
    _resolve_global_layer_number_in_name,
)
from moe_comm.resharding.describe.module_tensors import (
    RefitSide,
    TensorSide,
    get_refit_tensor_dict,
    invalidate_refit_tensor_cache,
    local_tensor,
    modules_with,
    named_persistent_buffers,
)
from moe_comm.resharding.formats.mxfp8_weights import mxfp8_transform_for, needs_mxfp8_conversion
from moe_comm.resharding.plan.reshard_plan import ReshardPlan
from moe_comm.resharding.plan.transform_protocol import ReshardTransform

Model: TypeAlias = "RefitSide | list[torch.nn.Module] | tuple[torch.nn.Module, ...] | None"


def _unwrapped(model: Model, side: str) -> tuple[RefitSide | None, RefitSide | None]:
    """The model that was given, and the one inside wrappers such as DDP that do nothing but wrap.

    Views are taken as they are.
    """
    if isinstance(model, list | tuple):
        if len(model) != 1:
            raise ValueError(f"the {side} must be one model or views, got a list of {len(model)}")
        model = model[0]
    if model is None or isinstance(model, TensorSide):
        return model, model
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"the {side} model must be a torch.nn.Module or CheckpointViews, got "
            f"{type(model).__name__}"
        )
    if _holds_flat_shards(model):
        raise RuntimeError(
            f"the {side} model is sharded by FullyShardedDataParallel, whose flat shards do not say "
            "which elements they hold. Refit within `with FullyShardedDataParallel."
            "summon_full_params(model):`, where each of n ranks holds the whole model "
            "(pg_collection = Parallelism(n).groups(rank) on the module inside), or shard with "
            "fully_shard, whose parameters are DTensors"
        )
    core = model
    while (inner := _inside(core)) is not None:
        if getattr(core, "pg_collection", None) and not getattr(inner, "pg_collection", None):
            break
        core = inner
    if getattr(core, "pg_collection", None) is None:
        tensors = get_refit_tensor_dict(core)
        if tensors and not any(hasattr(tensor, "device_mesh") for tensor in tensors.values()):
            published = hasattr(core, "save_pretrained")
            views = "give transformers_views(model) in its place. Or: " if published else ""
            raise RuntimeError(
                f"{side} model: {views}{next(iter(tensors))} is a plain tensor, no DTensor, and nothing "
                "says how it is divided over ranks. Where each of n ranks holds the whole model (one "
                "rank, data parallel replicas, DistributedDataParallel), write model.pg_collection = "
                "Parallelism(n).groups(rank), on the module inside its wrappers; other layouts state "
                f"tp, pp and ep there. ({side.capitalize()} model missing pg_collection required for "
                "reshard)"
            )
    return model, core


def _inside(wrapper: torch.nn.Module) -> torch.nn.Module | None:
    """The module in a wrapper that holds nothing else; an `AveragedModel` counts its averages."""
    if len(wrapper._modules) != 1 or wrapper._parameters:
        return None
    (name,) = wrapper._modules
    if name not in ("module", *WRAPPER_PARTS):
        return None
    if wrapper._buffers and not isinstance(wrapper, torch.optim.swa_utils.AveragedModel):
        return None
    return wrapper._modules[name]


def _holds_flat_shards(model: torch.nn.Module) -> bool:
    """Return whether `FullyShardedDataParallel` has replaced parameters by a part of them all in one row."""
    return any(
        "_fsdp_wrapped_module" in module._modules
        and (handle := getattr(module, "_handle", None)) is not None
        and handle.is_sharded(handle.flat_param)
        for module in modules_with(model, "_handle", look_again=False)
    )


def _num_experts_of(model: RefitSide | None) -> int | None:
    found = getattr(getattr(model, "config", None), "num_moe_experts", None)
    return None if found is None else int(found)


@dataclasses.dataclass(frozen=True)
class Models:
    """Both ends as this rank has them."""

    source: RefitSide | None
    target: RefitSide | None
    num_experts: int | None


def unwrap_models(src_model: Model, target_model: Model) -> Models:
    """The modules to read and write, out of lists and wrappers.

    Raises:
        TypeError: A model is no module.
        ValueError: It is a list of several.
        RuntimeError: It has no `pg_collection` and no DTensor, or holds flat shards of
            `FullyShardedDataParallel`.
    """
    outer_source, source = _unwrapped(src_model, "source")
    outer_target, target = _unwrapped(target_model, "target")
    found = [
        num
        for model in (outer_source, source, outer_target, target)
        if (num := _num_experts_of(model)) is not None
    ]
    return Models(source, target, found[0] if found else None)


def config_of(model: Model) -> object | None:
    """`config` of a model, or of the one in a list."""
    if isinstance(model, list | tuple):
        model = model[0]
    return getattr(model, "config", None)


def _needs_mxfp8_conversion(model: Model) -> bool:
    """Return whether the config of a target asks for MXFP8 inference."""
    return needs_mxfp8_conversion(config_of(model))


def _setup_mxfp8_transform_on_plan(plan: ReshardPlan, target_model: Model) -> None:
    """Convert a target that asks for it, and give the plan the transform; once."""
    if plan.transform is not None or not _needs_mxfp8_conversion(target_model):
        return
    _, core = _unwrapped(target_model, "target")
    assert isinstance(core, torch.nn.Module)
    plan.transform = mxfp8_transform_for(core, config_of(target_model))


def _harmonize_buffer_dtypes(
    plan: ReshardPlan,
    src_core: RefitSide | None,
    tgt_core: RefitSide | None,
    group: dist.ProcessGroup | Bootstrap | None = None,
) -> None:
    """Give persistent buffers of the target the dtypes of the source's.

    Collective where the plan does not know them: a plan that was not made by
    `build_local_reshard_plan`. Buffers are known by their names in the whole model.
    """
    if plan.buffer_dtypes is None:
        mine: dict[str, torch.dtype] = {}
        if isinstance(src_core, torch.nn.Module):
            mine = _buffer_dtypes_by_resolved_name(src_core)
        dtypes: dict[str, torch.dtype] = {}
        for each in bootstrap_for(group).all_gather(mine):
            for name, dtype in each.items():
                dtypes.setdefault(name, dtype)
        plan.buffer_dtypes = {}
        if isinstance(tgt_core, torch.nn.Module):
            layers = _build_layer_module_prefix_map(tgt_core)
            for name, _, _, _ in named_persistent_buffers(tgt_core):
                resolved = _resolve_global_layer_number_in_name(name, layers)
                if resolved in dtypes:
                    plan.buffer_dtypes[name] = dtypes[resolved]
    # Views have no buffers: whatever they write keeps its dtype.
    if not isinstance(tgt_core, torch.nn.Module) or not plan.buffer_dtypes:
        return
    # A buffer that modules share stays one.
    converted: dict[tuple[int, torch.dtype], torch.Tensor] = {}
    for name, owner, buffer_name, buffer in list(named_persistent_buffers(tgt_core)):
        dtype = plan.buffer_dtypes.get(name)
        if dtype is not None and buffer.dtype != dtype:
            key = id(buffer), dtype
            if key not in converted:
                converted[key] = buffer.to(dtype)
            owner._buffers[buffer_name] = converted[key]
    if converted:
        invalidate_refit_tensor_cache(tgt_core)


def _buffer_dtypes_by_resolved_name(core: torch.nn.Module) -> dict[str, torch.dtype]:
    layers = _build_layer_module_prefix_map(core)
    return {
        _resolve_global_layer_number_in_name(name, layers): buffer.dtype
        for name, _, _, buffer in named_persistent_buffers(core)
    }


def planned_destinations(
    target: RefitSide | None,
    metas: list[ParameterMetadata],
    known: dict[str, ParameterMetadata],
    transform: ReshardTransform | None,
) -> list[ParameterMetadata]:
    """Return the metadata to plan a target by: its tensors, but as it was where a transform converted it."""
    if target is None or transform is None:
        return metas
    written = {tensor.data_ptr() for tensor in transform.tensors_written() if tensor.numel()}
    tensors = get_refit_tensor_dict(target)
    chosen = []
    for meta in metas:
        is_transformed = transform.should_transform(meta.name)
        if not is_transformed and local_tensor(tensors[meta.name]).data_ptr() in written:
            continue
        chosen.append(known.get(meta.name, meta) if is_transformed else meta)
    names = {meta.name for meta in chosen}
    chosen += [
        meta
        for name, meta in known.items()
        if name not in names and transform.should_transform(name)
    ]
    return chosen
