"""A model of vLLM on CPUs as the target of a refit: staging in load layout, and whole versions.

Once loaded, linears of vLLM's CPU build live in oneDNN and its expert weights are packed: no tensor is
left that a refit could write. Weights go to staging tensors in the layout that the loader fills, and
from there through vLLM's own processing, as they did when the model was loaded.

vLLM is imported where it is used, and its functions are looked up by name, as 0.32 has them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from moe_comm.resharding.describe.checkpoint_views import CheckpointView
from moe_comm.resharding.describe.expert_maps import ExpertMaps
from moe_comm.resharding.describe.intervals import Intervals
from moe_comm.resharding.describe.loader_views import TensorSpec, loader_views
from moe_comm.resharding.move import stale
from moe_comm.tensors.memory import storage_id

__all__ = ["VllmCpuModel"]

_LOADER = "vllm.model_executor.model_loader"
# Attributes that a quantization method sets up when it processes a layer first, and packs only then.
_FIRST_TIME = ("moe_kernel", "moe_quant_config")


def _of_vllm(module: str, name: str) -> Any:
    """Return a name of vLLM, or say which one this release lacks."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(f"this release of vLLM has no {module}.{name}") from error


@dataclasses.dataclass(frozen=True)
class _Staged:
    """A parameter or buffer in load layout: what a fresh one is made of."""

    name: str
    module: torch.nn.Module
    container: str
    attribute: str
    like: torch.Tensor
    storage: torch.Tensor

    def tensor(self) -> torch.Tensor:
        """Make one over the staging storage, with the loader's attributes."""
        made = self.storage.detach()
        made.__class__ = self.like.__class__
        made.__dict__ = dict(self.like.__dict__)
        restored: torch.Tensor = _of_vllm(f"{_LOADER}.reload.sanitize", "restore_layer_refs")(
            made, self.module
        )
        return restored


class _Arrival(torch.nn.Module):
    """Module that refits mark in place of the engine: stale after a failure, and when one has come whole."""

    def __init__(self) -> None:
        super().__init__()
        self.has_come = False

    def refresh_cache(self) -> None:
        """Called by a refit that has written everything."""
        self.has_come = True


class VllmCpuModel:
    """A vLLM model on CPUs whose weights are exchanged, a whole version at a time.

    `accept` says what comes, and gives the places where it goes; a refit writes there, or `load`;
    `commit` hands the version over. Nothing is served of a version before `commit` has returned, and
    the one before it is served after any failure.

    Beside the model there is a second one in load layout, for as long as this object lives, and for the
    length of `commit` a third, packed: the version that is served until then.

    Args:
        model: Loaded by vLLM, in this process; not quantized, without adapters and without an expert
            load balancer.
        vllm_config: vLLM's configuration of the engine.

    Attributes:
        refit_module: Module that hears of refits into `CheckpointViews(engine.views, engine)`.

    Raises:
        ImportError: This release of vLLM lacks a function that this class calls.
        NotImplementedError: The engine is none of the kind above; the message says why.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any) -> None:
        self._model = model
        self._config = vllm_config
        _refuse_other_engines(model, vllm_config)
        self._process = _of_vllm(f"{_LOADER}.utils", "process_weights_after_loading")
        self._set_config = _of_vllm("vllm.config", "set_current_vllm_config")
        self._staged = _stage(model)
        self._expert_maps = ExpertMaps(model)
        self._checkpoint: dict[str, TensorSpec] = {}
        self._views: dict[str, list[CheckpointView]] = {}
        self._missing: set[str] = set()
        # Buffers have other values than a checkpoint's, where it has none for them.
        self._filled: set[int] = set()
        self._version: str | None = None
        self.refit_module = _Arrival()

    @property
    def version(self) -> str | None:
        """The version that is served; None for what vLLM loaded itself."""
        return self._version

    @property
    def views(self) -> tuple[CheckpointView, ...]:
        """Places of the tensors that are accepted, in staging storage that stays where it is."""
        return tuple(view for views in self._views.values() for view in views)

    def accept(self, checkpoint: Mapping[str, TensorSpec | torch.Tensor]) -> None:
        """Begin a version: hold what will come against vLLM's loader, and expect all of it.

        The loader is asked once, and again when names, shapes or dtypes change. Nothing that is served
        is written.

        Args:
            checkpoint: Tensors by their names on disk, without values or with.

        Raises:
            NotImplementedError: The loader does arithmetic on a tensor.
            ValueError: A tensor is missing, has a wrong name or a wrong shape, or experts of the model
                lie elsewhere than when this object was made.
        """
        self._refuse_moved_experts()
        specs = {name: TensorSpec.of(each) for name, each in checkpoint.items()}
        if list(specs.items()) != list(self._checkpoint.items()):
            found = self._record(specs)
            views: dict[str, list[CheckpointView]] = {}
            for view in found:
                views.setdefault(view.name, []).append(view)
            self._views, self._checkpoint = views, specs
        self._missing = set(self._views)
        self.refit_module.has_come = False

    def load(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write whole tensors of the checkpoint into staging.

        Args:
            named: Names and tensors, of the shapes that were accepted; each name once in a version.

        Raises:
            ValueError: A name or shape is not what was accepted, or the name comes twice.
        """
        for name, tensor in named:
            spec = self._checkpoint.get(name)
            if spec is None:
                raise ValueError(f"{name}: not among the {len(self._checkpoint)} accepted tensors")
            if (found := TensorSpec.of(tensor)) != spec:
                raise ValueError(f"{name}: {found} came, {spec} was accepted")
            if name in self._views:
                if name not in self._missing:
                    raise ValueError(f"{name}: comes a second time in one version")
                for view in self._views[name]:
                    _fill(view, tensor)
                self._missing.discard(name)

    def moved(self) -> None:
        """Say that a refit has written all of `views`: one of `CheckpointViews(engine.views, engine)`.

        Raises:
            ValueError: The last one failed and may have written a part, none has come since `accept`
                and the last `commit`, or experts of the model have moved.
        """
        self._refuse_moved_experts()
        reason = stale.stale_reason(self.refit_module)
        if reason is not None:
            raise ValueError(f"the views are not whole: {reason}")
        if not self.refit_module.has_come:
            raise ValueError(
                f"no refit has written the {len(self._views)} tensors of the views since they were "
                f"accepted or served last (version {self._version}); its target must be "
                "CheckpointViews(engine.views, engine)"
            )
        self._missing.clear()

    def commit(self, version: str) -> None:
        """Hand a whole version to vLLM, which serves it from here on.

        Call it between two steps of the engine, on every rank.

        Args:
            version: Name of the version, which `version` gives back.

        Raises:
            ValueError: Tensors of the version have not come, or experts of the model have moved; or what
                vLLM's processing raises. The version before is served then.
        """
        self._refuse_moved_experts()
        if not self._checkpoint:
            raise ValueError(f"version {version}: nothing was accepted")
        if self._missing:
            name = min(self._missing)
            raise ValueError(
                f"{name}: has not come, nor {len(self._missing) - 1} more of {len(self._views)} tensors "
                f"of version {version}"
            )
        with self._in_staging(self._filled) as before:
            first_time = _forget_first_time(self._model)
            try:
                self._process(self._model, self._config.model_config, torch.device("cpu"))
            finally:
                for owner, values in first_time:
                    vars(owner).update(values)
            before.exchange({storage_id(each.storage) for each in self._staged})
        # The next version comes whole, too.
        self._missing = set(self._views)
        self.refit_module.has_come = False
        self._version = version

    def _refuse_moved_experts(self) -> None:
        """Raise ValueError where staging and views are of other experts than the model's now."""
        if (moved := self._expert_maps.moved()) is not None:
            raise ValueError(
                f"{moved.path}: its expert map was {moved.then} when VllmCpuModel was made, and is "
                f"{moved.now}; make another VllmCpuModel, and refits into its views"
            )

    def _record(self, specs: Mapping[str, TensorSpec]) -> tuple[CheckpointView, ...]:
        load_weights: Callable[..., object] = self._model.load_weights  # type: ignore[assignment]
        num_ranks = self._config.parallel_config.world_size_across_dp
        staged = {storage_id(each.storage) for each in self._staged}
        with self._in_staging(staged) as before:
            buffers = [
                (name, each)
                for name, each in self._model.named_buffers()
                if storage_id(each) in staged
            ]
            found = loader_views(
                load_weights,
                specs,
                self._model.named_parameters(),
                optional=buffers,
                other_ranks=num_ranks > 1,
            )
            before.bring_back()
        for tensor, constant in found.padding:
            tensor.fill_(constant)
        self._filled = {storage_id(view.tensor) for view in found.views}
        return found.views

    @contextlib.contextmanager
    def _in_staging(self, filled: set[int]) -> Iterator[_Before]:
        """Put staging in the place of what is served; back after a failure.

        Parameters that vLLM's processing makes of others are gone meanwhile: it would write in those
        that are served.

        Args:
            filled: Storages of buffers that are exchanged; parameters all are.
        """
        before = _Before(self._model)
        try:
            with torch.no_grad(), self._set_config(self._config):
                made: dict[int, torch.Tensor] = {}
                for module in self._model.modules():
                    parameters = vars(module)["_parameters"]
                    for name in [n for n, each in parameters.items() if each is not None]:
                        del parameters[name]
                for each in self._staged:
                    place = storage_id(each.storage)
                    if each.container == "_parameters" or place in filled:
                        tensor = made.setdefault(place, each.tensor())
                        vars(each.module)[each.container][each.attribute] = tensor
                yield before
        except BaseException:
            before.bring_back()
            raise


class _Before:
    """Tensors that the modules of a model held before, so that a failure leaves nothing behind.

    Tensors that are served keep their identity, which compiled code may hold: a new version is put
    behind them by `Tensor.data`.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = [
            (
                module,
                dict(vars(module)),
                {name: vars(module)[name].copy() for name in _CONTAINERS},
            )
            for module in model.modules()
        ]
        self._data: list[tuple[torch.Tensor, torch.Tensor]] = []

    def bring_back(self) -> None:
        """Make every module hold what it held, with the memory of then."""
        for served, data in reversed(self._data):
            served.data = data
        for module, attributes, containers in self._modules:
            vars(module).clear()
            vars(module).update(attributes)
            for name, contents in containers.items():
                container = vars(module)[name]
                container.clear()
                container.update(contents)

    def exchange(self, staging: set[int]) -> None:
        """Put the memory of new tensors behind those that were there before them.

        Args:
            staging: Storages that may not be served, because the next version is written there.
        """
        exchanged: set[int] = set()
        for module, attributes, containers in self._modules:
            held: tuple[tuple[Mapping[str, Any], dict[str, Any]], ...] = (
                (attributes, vars(module)),
                (containers["_parameters"], vars(module)["_parameters"]),
                (containers["_buffers"], vars(module)["_buffers"]),
            )
            for old, new in held:
                for name, tensor in list(new.items()):
                    if not isinstance(tensor, torch.Tensor):
                        continue
                    served = old.get(name)
                    data = tensor.data.clone() if storage_id(tensor) in staging else tensor.data
                    if not isinstance(served, torch.Tensor):
                        tensor.data = data
                        continue
                    if served is not tensor and id(served) not in exchanged:
                        exchanged.add(id(served))
                        self._data.append((served, served.data))
                        served.data = data
                    new[name] = served
            # Made of others, and not anew.
            for name, parameter in containers["_parameters"].items():
                module._parameters.setdefault(name, parameter)


_CONTAINERS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def _fill(view: CheckpointView, tensor: torch.Tensor) -> None:
    """Copy what a view holds out of the whole tensor."""
    part = tensor.detach().reshape(view.shape)
    for dim, held in enumerate(view.dims):
        part = _narrow(part, dim, held)
    view.tensor.copy_(part)


def _narrow(part: torch.Tensor, dim: int, held: Intervals) -> torch.Tensor:
    (start, _, length), *rest = held
    assert not rest, "a recorded copy is one interval of each dimension"
    return part.narrow(dim, start, length)


def _stage(model: torch.nn.Module) -> list[_Staged]:
    """Make staging for parameters, as vLLM has them before it loads, and for buffers of a checkpoint.

    Tied parameters share it.
    """
    info_of = _of_vllm(f"{_LOADER}.reload.layerwise", "get_layerwise_info")
    built_late: set[str] = _of_vllm(f"{_LOADER}.reload.meta", "SKIP_TENSORS")
    staged: list[_Staged] = []
    tied: dict[int, torch.Tensor] = {}
    for path, module in model.named_modules():
        before_loading, _ = info_of(module).restore_metadata
        late = {
            name: parameter
            for name, parameter in module._parameters.items()
            if parameter is not None and name in built_late and name not in before_loading
        }
        for attribute, like in {**before_loading, **late}.items():
            served = module._parameters.get(attribute)
            storage = tied.get(id(served)) if served is not None else None
            if storage is None:
                storage = torch.zeros_like(like, device="cpu", requires_grad=False).as_subclass(
                    torch.Tensor
                )
                if served is not None:
                    tied[id(served)] = storage
            name = f"{path}.{attribute}"
            staged.append(_Staged(name, module, "_parameters", attribute, like, storage))
        for attribute, buffer in module._buffers.items():
            if buffer is not None and attribute not in module._non_persistent_buffers_set:
                name = f"{path}.{attribute}"
                storage = buffer.detach().clone()
                staged.append(_Staged(name, module, "_buffers", attribute, buffer, storage))
    return staged


def _forget_first_time(model: torch.nn.Module) -> list[tuple[object, dict[str, Any]]]:
    """Let quantization methods process as if for the first time; return what they had set up."""
    forgotten: list[tuple[object, dict[str, Any]]] = []
    for module in model.modules():
        vars(module).pop("_already_called_process_weights_after_loading", None)
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            forgotten.append((method, {name: vars(method)[name] for name in _FIRST_TIME}))
            vars(method)["moe_kernel"] = None
    return forgotten


def _refuse_other_engines(model: torch.nn.Module, vllm_config: Any) -> None:
    """Raise NotImplementedError where the loader is no map of the model, or staging is no remedy."""
    platform = _of_vllm("vllm.platforms", "current_platform")
    if not platform.is_cpu():
        raise NotImplementedError(
            f"staging in load layout is for vLLM's CPU platform, this is {type(platform).__name__}"
        )
    if vllm_config.quant_config is not None:
        raise NotImplementedError(
            f"the model is quantized ({vllm_config.model_config.quantization}); a refit writes weights "
            "that are not"
        )
    if vllm_config.lora_config is not None:
        raise NotImplementedError(
            "the model has adapters (LoRA); a refit writes the weights of a base"
        )
    if vllm_config.parallel_config.enable_eplb:
        name = next(
            (path for path, each in model.named_modules() if hasattr(each, "expert_map_manager")),
            "",
        )
        raise NotImplementedError(
            f"{name}: an expert load balancer moves its experts (enable_eplb), and vLLM's loader keeps the "
            "map of the first placement"
        )
