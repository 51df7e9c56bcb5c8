"""A model of transformers as its checkpoint on disk: names, and views of what a rank holds."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from moe_comm.resharding.describe import intervals
from moe_comm.resharding.describe.checkpoint_views import CheckpointView, CheckpointViews
from moe_comm.resharding.describe.converted_views import converted_views
from moe_comm.resharding.describe.disagreement import PlanError
from moe_comm.resharding.describe.module_tensors import named_refit_tensors
from moe_comm.resharding.describe.tied_names import memory_of
from moe_comm.tensors.memory import storage_id

__all__ = ["disk_tensors", "empty_model", "transformers_views"]

_CONVERSIONS = "transformers.core_model_loading"
_NOT_PLAIN = {"hf_quantizer": "is quantized", "_hf_peft_config_loaded": "has adapters"}


def transformers_views(model: torch.nn.Module) -> CheckpointViews:
    """Return what this rank holds of a model of transformers, by the names that `save_pretrained` writes.

    The model's own conversion says what they are: it runs once over where elements are, and reads no
    weight. Not collective.

    Args:
        model: A `PreTrainedModel` under any of its parallel plans (expert and tensor parallel, FSDP2, or
            none), on any device; on "meta" to see what it would hold. Not quantized, without adapters.

    Returns:
        A side of a refit, source or target: views of the storages of the model's parameters and persistent
        buffers. A tensor that is tied to another comes under the name of the other alone, as on disk.

    Raises:
        ImportError: There is no transformers, or one that does not publish its conversions.
        PlanError: A tensor of the checkpoint is computed from the model's; one is tied by the model's own
            words and is another in memory; the model is quantized, or has adapters.
    """
    return CheckpointViews(functools.partial(_describe, model), model)


def empty_model(
    auto_class: Any,
    config: Any,
    dtype: torch.dtype | str | None,
    distributed_config: Any = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> Any:
    """Return a model of transformers without values, cut as `from_pretrained` cuts it. Collective with a plan.

    Args:
        auto_class: `AutoModelForCausalLM` or another class that has `from_config`, or a `PreTrainedModel`.
        config: Configuration of the model, which keeps it.
        dtype: Dtype of the weights, except those that the model keeps in float32; None for the
            configuration's.
        distributed_config: Configuration of transformers, with the sizes of the parallel plan; None for the
            whole model.
        device: Device of its tensors, "meta" too; None for that of the parallel plan, or "cpu" without one.
        options: Options of the class, such as `attn_implementation`.

    Raises:
        Exception: As transformers does where the plan does not fit the model or the ranks.
    """
    if dtype is not None:
        options["dtype"] = dtype
    make = getattr(auto_class, "from_config", None) or auto_class._from_config
    # Tensors are tied when they are where they stay: plans do not find one of two names.
    untied = importlib.import_module("transformers.initialization").no_tie_weights()
    with torch.device("meta"), untied:
        model = make(config, **options)
    kept = model._get_dtype_plan(model.dtype)
    if kept:
        named = importlib.import_module(_CONVERSIONS).build_glob_alternation(list(kept))[0]
        for name, tensor in named_refit_tensors(model):
            if named.search(name):
                tensor.data = tensor.data.float()
    kind = type(model)
    plan, _, mesh = kind.prepare_distribute_model(distributed_config)
    model = kind.maybe_distribute_model(model, plan, mesh)
    mesh = getattr(model, "_device_mesh", None)
    model.to_empty(device=device or ("cpu" if mesh is None else mesh.device_type))
    model.tie_weights(recompute_mapping=False)
    return model


def disk_tensors(
    model: torch.nn.Module, named: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors by their names on disk, out of a stream of full ones by the model's own names.

    One that is part of another is yielded as a view of it, where the shape on disk is one; one that is put
    together is yielded when its last part has come.

    Args:
        model: A `PreTrainedModel`, as for `transformers_views`.
        named: Names and full tensors of its parameters and buffers, each once; those that do not come stay as
            they are and are left out.

    Raises:
        ValueError: A tensor that the model has not, or of another shape; one that is put together lacks
            parts at the end.
    """
    saved = _saved_tensors(model)
    whole = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in saved.items()
    }
    known = model.state_dict().keys()
    owners = {storage_id(tensor): name for name, tensor in whole.items()}
    views: dict[str, list[CheckpointView]] = {}
    for view in converted_views(whole, functools.partial(_conversion(model), model)):
        views.setdefault(owners[storage_id(view.tensor)], []).append(view)
    unfinished: dict[str, tuple[torch.Tensor, int]] = {}
    for name, tensor in named:
        if name not in whole:
            if name in known:
                continue  # tied, or not saved
            raise ValueError(f"{name}: {type(model).__name__} has no such tensor")
        if tensor.shape != whole[name].shape:
            raise ValueError(
                f"{name}: expected the full tensor of shape {tuple(whole[name].shape)}, got "
                f"{tuple(tensor.shape)}"
            )
        elements = tensor.detach().contiguous()
        for view in views.pop(name, ()):
            place = view.tensor
            part = elements.as_strided(
                place.shape, place.stride(), elements.storage_offset() + place.storage_offset()
            )
            size = intervals.num_elements(view.shape)
            if part.numel() == size:
                yield view.name, part.reshape(view.whole_shape)
                continue
            if view.name not in unfinished:
                shape = view.whole_shape
                unfinished[view.name] = (tensor.new_empty(shape), size)
            target, missing = unfinished.pop(view.name)
            held = [torch.cat([torch.arange(at, at + n) for at, _, n in dim]) for dim in view.dims]
            target.view(view.shape)[torch.meshgrid(*held, indexing="ij")] = part
            if missing == part.numel():
                yield view.name, target
            else:
                unfinished[view.name] = (target, missing - part.numel())
    for name, (target, missing) in unfinished.items():
        raise ValueError(f"{name}: {missing} of {target.numel()} elements have not come")


def _describe(model: torch.nn.Module) -> list[CheckpointView]:
    return converted_views(_saved_tensors(model), functools.partial(_conversion(model), model))


def _conversion(model: torch.nn.Module) -> Any:
    """Return what turns a model's tensors into those on disk."""
    for attribute, what in _NOT_PLAIN.items():
        if getattr(model, attribute, None):
            raise PlanError(
                f"{type(model).__name__} {what} ({attribute}): only the tensors of a plain model are found "
                "again in its checkpoint"
            )
    # Transformers is not needed for other models.
    loading = importlib.import_module(_CONVERSIONS)
    revert = getattr(loading, "revert_weight_conversion", None)
    if revert is None:
        raise ImportError(
            f"{_CONVERSIONS} has no revert_weight_conversion, by which names on disk are found: it "
            "needs transformers 5.23 or later"
        )
    return revert


def _saved_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that are saved, by the model's own names: without those that are tied to others."""
    tensors: dict[str, Any] = model.state_dict()
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        tensors.pop(name, None)
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    named = dict(model.named_parameters(remove_duplicate=False))
    for name, source in tied.items():
        if name not in tensors or source not in tensors:
            continue
        pair = [named.get(each, tensors[each]) for each in (name, source)]
        if len(set(map(memory_of, pair))) > 1:
            raise PlanError(
                f"{name}: is tied to {source} by the model's own words, but does not share its memory: a "
                "refit of one would leave the other as it was. Call model.tie_weights()"
            )
        del tensors[name]
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise PlanError(
                f"{name}: the model's state has a {type(tensor).__name__}, not a tensor"
            )
    return tensors
