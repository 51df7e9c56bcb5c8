"""Metadata of what one rank holds of a model, read from modules, parameters and their attributes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from moe_comm.peers.bootstrap import Bootstrap
from moe_comm.resharding.describe.mesh_layouts import ranks_of_mesh, read_mesh
from moe_comm.resharding.describe.metadata import ParameterMetadata
from moe_comm.resharding.describe.module_tensors import (
    local_tensor,
    named_refit_tensors,
)
from moe_comm.resharding.describe.parallelism import OFFSET_HINT, RankGroup, group_ranks
from moe_comm.resharding.describe.tied_names import tied_names

WRAPPER_PARTS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts of names under which `torch.compile`, `FullyShardedDataParallel` and checkpoint wrappers hold
what they wrap."""

_EXPERT_PARAM = re.compile(r"(weight|bias)(\d+)")


def _detect_expert_index_from_param_name(param_name: str) -> int | None:
    """Number of the expert in a name such as `mlp.experts.linear_fc1.weight3`; None for others."""
    for part in param_name.split("."):
        match = _EXPERT_PARAM.fullmatch(part)
        if match is not None:
            return int(match[2])
    return None


def _sequential_expert(parts: list[str]) -> int | None:
    """Return the index of the part of a name that is the number of an expert that is a module of its own."""
    for i, part in enumerate(parts[:-1]):
        if part == "local_experts" and parts[i + 1].isdigit():
            return i + 1
    return None


def assign_ep_resolved_name_inplace(
    meta: ParameterMetadata, *, base_name: str | None = None
) -> None:
    """Set `resolved_name` and `global_expert_index` of a parameter that may belong to one expert.

    Ranks number their experts from 0; the resolved name has the number in the whole model. A tensor
    of several experts keeps its name and has no index.

    Args:
        meta: Changed.
        base_name: The name so far; None for `meta.name`.

    Raises:
        ValueError: The experts do not divide by the ranks that share them, or nobody said how many
            there are.
    """
    base = meta.name if base_name is None else base_name
    meta.resolved_name = base
    meta.global_expert_index = None
    if not meta.is_ep or meta.expert_dim is not None:
        return
    parts = base.split(".")
    local_idx = _detect_expert_index_from_param_name(base)
    sequential = _sequential_expert(parts) if local_idx is None else None
    if sequential is not None:
        local_idx = int(parts[sequential])
    if local_idx is None:
        return
    ep_ranks = meta.expert_parallel_group_ranks
    if not ep_ranks or meta.num_experts is None or meta.num_experts % len(ep_ranks):
        raise ValueError(
            f"{meta.name} belongs to one of num_experts experts shared by the ranks of its expert "
            f"parallel group, which must divide them; got {meta.num_experts} and {ep_ranks}"
        )
    num_local_experts = meta.num_experts // len(ep_ranks)
    expert_idx = _get_rank_in_group(meta.owner_rank, ep_ranks) * num_local_experts + local_idx
    meta.global_expert_index = expert_idx
    if sequential is not None:
        parts[sequential] = str(expert_idx)
    else:
        parts = [_EXPERT_PARAM.sub(rf"\g<1>{expert_idx}", part) for part in parts]
    meta.resolved_name = ".".join(parts)


def assign_resolved_name_inplace(
    meta: ParameterMetadata,
    *,
    layer_module_prefix_map: Mapping[str, str] | None = None,
    base_name: str | None = None,
) -> None:
    """Set `resolved_name`: global layer numbers first, then global expert numbers.

    Parts that wrappers of torch add to a name, those of `WRAPPER_PARTS`, are left out.

    Args:
        meta: Changed.
        layer_module_prefix_map: Paths of layers here, and with the numbers of the whole model.
        base_name: The name so far; None for `meta.name`.
    """
    name = meta.name if base_name is None else base_name
    name = _resolve_global_layer_number_in_name(name, layer_module_prefix_map or {})
    assign_ep_resolved_name_inplace(meta, base_name=name)


def _get_rank_in_group(global_rank: int, group_ranks: list[int]) -> int:
    """Place of a rank among the members of a group.

    Raises:
        ValueError: It is not a member.
    """
    if global_rank not in group_ranks:
        raise ValueError(
            f"Rank {global_rank} not found in process group {group_ranks}; {OFFSET_HINT}"
        )
    return group_ranks.index(global_rank)


def _build_layer_module_prefix_map(module: torch.nn.Module) -> dict[str, str]:
    """Paths of layers in this rank's module, and the same with the numbers of the whole model.

    A layer is a module whose path ends in a number and that has an integer `layer_number`, counted
    from 1.

    Example:
        `{"decoder.layers.0": "decoder.layers.16"}` where that layer's `layer_number` is 17.
    """
    prefixes = {}
    for path, layer in module.named_modules():
        parent, _, last = path.rpartition(".")
        number = getattr(layer, "layer_number", None)
        if isinstance(number, int) and last.isdigit():
            prefixes[path] = f"{parent}.{number - 1}" if parent else str(number - 1)
    return prefixes


def _resolve_global_layer_number_in_name(
    name: str, layer_module_prefix_map: Mapping[str, str]
) -> str:
    """`name` with the longest path that the map knows replaced, and without wrappers of torch."""
    prefix = name
    while prefix and prefix not in layer_module_prefix_map:
        prefix = prefix.rpartition(".")[0]
    resolved = layer_module_prefix_map.get(prefix, prefix) + name[len(prefix) :]
    return ".".join(part for part in resolved.split(".") if part not in WRAPPER_PARTS)


class _PlanRanks:
    """Ranks of a model as ranks of the group that plans are made over.

    Equal lists are the same object, so that gathered metadata holds each once when it is pickled.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | Bootstrap | None,
        rank_offset: int,
        known: dict[Any, Any] | None,
    ) -> None:
        self.rank_offset = rank_offset
        self._known: dict[Any, Any] = {} if known is None else known
        self._places: dict[int, int] | None = None
        if rank_offset == 0 and group is not None and isinstance(group, dist.ProcessGroup):
            if ("group", id(group)) not in self._known:
                self._known["group", id(group)] = _places_in(group)
            self._places = self._known["group", id(group)]

    def of(self, group: Any) -> list[int] | None:
        """Members of a group of the model; None where it has no such group."""
        if group is None:
            return None
        ranks = group_ranks(group)
        # A `RankGroup` is numbered in the plan's group already.
        return self._once(ranks if isinstance(group, RankGroup) else self._translated(ranks))

    def of_mesh(self, mesh_ranks: Sequence[int]) -> tuple[int, ...]:
        """The ranks of a device mesh."""
        ranks = tuple(rank + self.rank_offset for rank in self._translated(mesh_ranks))
        return cast("tuple[int, ...]", self._known.setdefault(("mesh", ranks), ranks))

    def of_world(self) -> list[int] | None:
        """Every rank of the model, where it does not say more."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        return self._once(list(range(dist.get_world_size())))

    def _translated(self, ranks: Sequence[int]) -> Sequence[int]:
        if self._places is None:
            return ranks
        outside = [rank for rank in ranks if rank not in self._places]
        if outside:
            raise ValueError(
                f"the model lies on ranks {list(ranks)}, of which {outside} are not in the group that the "
                f"plan is made over: {sorted(self._places)}"
            )
        return [self._places[rank] for rank in ranks]

    def _once(self, ranks: Sequence[int]) -> list[int]:
        key = tuple(rank + self.rank_offset for rank in ranks)
        return cast("list[int]", self._known.setdefault(key, list(key)))


def _places_in(group: dist.ProcessGroup) -> dict[int, int] | None:
    """Place in `group` of every global rank; None where they are the same or not known."""
    try:
        ranks = dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        # A group that joins independently started worlds: nobody's global ranks are its ranks, and
        # the offsets that the caller gave say where each model begins.
        return None
    if ranks == list(range(len(ranks))) and len(ranks) == dist.get_world_size():
        return None
    return {rank: place for place, rank in enumerate(ranks)}


@dataclasses.dataclass(frozen=True)
class _Hints:
    """Facts about a parameter that only the module that owns it knows."""

    expert_dim: int | None = None
    local_view: tuple[int, ...] | None = None
    partition_dim: int | None = None
    is_replicated: bool = False


def _grouped_expert_hints(module: torch.nn.Module) -> dict[str, _Hints]:
    """Parameters of Megatron's `GroupedMLP`: 2-D, but read as one matrix per expert."""
    weights = [module._parameters.get(name) for name in ("weight1", "weight2")]
    num_experts = getattr(module, "num_local_experts", None)
    if "weight0" in module._parameters or not isinstance(num_experts, int) or num_experts < 1:
        return {}
    hints = {}
    for name, weight, hidden_dim in zip(("weight1", "weight2"), weights, (0, 1), strict=True):
        if weight is None or weight.dim() != 2:
            return {}
        hidden = weight.shape[hidden_dim]
        ffn = weight.shape[1 - hidden_dim] // num_experts
        view = (num_experts, hidden, ffn) if hidden_dim == 0 else (num_experts, ffn, hidden)
        if num_experts * hidden * ffn != weight.numel():
            return {}
        hints[name] = _Hints(expert_dim=0, local_view=view, partition_dim=2 - hidden_dim)
    return hints


def _module_hints(module: torch.nn.Module) -> dict[str, _Hints]:
    """Hints for every parameter, by full name, that needs one."""
    hints: dict[str, _Hints] = {}
    for path, owner in module.named_modules():
        if not owner._parameters:
            continue
        own = _grouped_expert_hints(owner)
        for name in owner._parameters:
            # The bias of a layer whose weight is cut along its input is added once, after the sum.
            weight = owner._parameters.get(name.replace("bias", "weight", 1))
            if name.startswith("bias") and getattr(weight, "partition_dim", 0) == 1:
                own[name] = _Hints(is_replicated=True)
        hints.update({f"{path}.{name}" if path else name: hint for name, hint in own.items()})
    return hints


def extract_module_metadata(
    module: torch.nn.Module,
    owner_rank: int,
    *,
    num_experts: int | None = None,
    rank_offset: int = 0,
    group: dist.ProcessGroup | Bootstrap | None = None,
    rank_list_cache: dict[Any, Any] | None = None,
) -> list[ParameterMetadata]:
    """Return metadata of what one rank holds of a model: every parameter and persistent buffer.

    Local. `module.pg_collection` is needed unless a parameter or buffer is a DTensor: then the
    others are taken as replicated, every rank that holds one holds the whole.

    Args:
        module: This rank's part.
        owner_rank: This rank in the plan's group.
        num_experts: Experts of the whole model.
        rank_offset: Added to the ranks of the module's groups and meshes.
        group: The plan's group; with `rank_offset` 0, members of the module's process groups and
            meshes are translated from global ranks to its ranks.
        rank_list_cache: Cache that makes equal lists of several calls one object.

    Raises:
        ValueError: The module has no `pg_collection` and needs one; a rank is not in `group`; a
            DTensor has a placement that cannot be moved; or a plain tensor beside DTensors says that
            it is divided, but nothing says over which ranks.
    """
    layers = _build_layer_module_prefix_map(module)
    hints = _module_hints(module)
    known: dict[Any, Any] = {} if rank_list_cache is None else rank_list_cache
    groups = getattr(module, "pg_collection", None)
    tensors = list(named_refit_tensors(module))
    is_beside_dtensors = any(isinstance(tensor, DTensor) for _, tensor in tensors)
    return [
        _extract(
            tensor,
            name,
            owner_rank,
            groups,
            num_experts,
            layers,
            _PlanRanks(group, rank_offset, known),
            hints.get(name, _Hints()),
            is_beside_dtensors=is_beside_dtensors,
        )
        for name, tensor in tensors
    ]


def resolved_ties(
    module: torch.nn.Module, metas: Sequence[ParameterMetadata]
) -> list[tuple[str, ...]]:
    """Names in the whole model of the tensors of a module that have several, see `tied_names`.

    Args:
        module: This rank's part.
        metas: Metadata that was extracted of it.
    """
    layers = _build_layer_module_prefix_map(module)
    by_name = {meta.name: meta for meta in metas}
    ties = []
    for names in tied_names(module):
        meta = next((by_name[name] for name in names if name in by_name), None)
        if meta is None:
            continue
        resolved = []
        for name in names:
            alias = by_name.get(name)
            if alias is None:
                alias = dataclasses.replace(meta, name=name)
                assign_resolved_name_inplace(alias, layer_module_prefix_map=layers)
            resolved.append(alias.resolved_name or name)
        ties.append(tuple(resolved))
    return ties


def extract_param_metadata(
    param: torch.Tensor,
    param_name: str,
    owner_rank: int,
    pg_collection: Any,
    num_experts: int | None = None,
    layer_module_prefix_map: Mapping[str, str] | None = None,
    rank_offset: int = 0,
    _rank_list_cache: dict[Any, Any] | None = None,
    *,
    group: dist.ProcessGroup | Bootstrap | None = None,
) -> ParameterMetadata:
    """Return metadata of what one rank holds of one parameter or persistent buffer. Local.

    Reads the attributes `tensor_model_parallel`, `partition_dim`, `partition_stride`,
    `partition_sizes`, `allreduce` (False: belongs to experts), `expert_dim`, `expert_view` and
    `shared_embedding` (True: pipeline stages that hold it hold the same) of the parameter; of a
    DTensor its mesh and placements.

    Args:
        param: The tensor.
        param_name: Name in the rank's module.
        owner_rank: This rank in the plan's group.
        pg_collection: The model's groups, as attributes `tp`, `pp`, `ep`, `dp`, `expt_tp`,
            `expt_dp`, each None or absent where there is none; None for a DTensor.
        num_experts: Experts of the whole model.
        layer_module_prefix_map: Paths of layers here, and with the numbers of the whole model.
        rank_offset: Added to the ranks of groups and meshes.
        _rank_list_cache: Cache that makes equal lists of several calls one object.
        group: The plan's group; with `rank_offset` 0, global ranks are translated to its ranks.

    Raises:
        ValueError: As `extract_module_metadata`.
    """
    return _extract(
        param,
        param_name,
        owner_rank,
        pg_collection,
        num_experts,
        layer_module_prefix_map,
        _PlanRanks(group, rank_offset, _rank_list_cache),
        _Hints(),
    )


def _extract(
    param: torch.Tensor,
    name: str,
    owner_rank: int,
    pg_collection: Any,
    num_experts: int | None,
    layer_module_prefix_map: Mapping[str, str] | None,
    ranks: _PlanRanks,
    hints: _Hints,
    *,
    is_beside_dtensors: bool = False,
) -> ParameterMetadata:
    local = local_tensor(param)
    meta = ParameterMetadata(
        name=name,
        shape=tuple(local.shape),
        dtype=local.dtype,
        element_size=local.element_size(),
        num_experts=num_experts,
        owner_rank=owner_rank,
        is_buffer=not isinstance(param, torch.nn.Parameter),
    )
    _read_stage(meta, param, pg_collection, ranks)
    if isinstance(param, DTensor):
        _, mesh_ranks = ranks_of_mesh(param.device_mesh)
        meta.mesh = read_mesh(param, name, ranks.of_mesh(mesh_ranks))
    elif pg_collection is None and not is_beside_dtensors:
        raise ValueError(
            f"Module must have pg_collection: {name} is no DTensor, and nothing else says which "
            "ranks hold it"
        )
    elif pg_collection is None:
        # Wrappers that shard parameters leave buffers, and parameters that they ignore, whole.
        _read_attributes(meta, param, _Hints())
        if meta.is_tp or meta.is_ep:
            attribute = "tensor_model_parallel=True" if meta.is_tp else "allreduce=False"
            raise ValueError(
                f"Module must have pg_collection: {name} states {attribute}, and nothing says over "
                "which ranks it is divided"
            )
    else:
        _read_attributes(meta, param, hints)
        _read_groups(meta, pg_collection, ranks, hints)
    assign_resolved_name_inplace(meta, layer_module_prefix_map=layer_module_prefix_map)
    return meta


def _read_attributes(meta: ParameterMetadata, param: torch.Tensor, hints: _Hints) -> None:
    meta.is_tp = bool(getattr(param, "tensor_model_parallel", False))
    meta.partition_dim = int(getattr(param, "partition_dim", 0))
    meta.partition_stride = int(getattr(param, "partition_stride", 1))
    sizes = getattr(param, "partition_sizes", None)
    meta.partition_sizes = None if sizes is None else [int(size) for size in sizes]
    meta.is_ep = not getattr(param, "allreduce", True)
    expert_dim = getattr(param, "expert_dim", None)
    view = getattr(param, "expert_view", None)
    if expert_dim is not None:
        meta.expert_dim = int(expert_dim)
        meta.local_view = None if view is None else tuple(int(size) for size in view)
    elif hints.expert_dim is not None:
        meta.expert_dim, meta.local_view = hints.expert_dim, hints.local_view
        meta.partition_dim = (
            meta.partition_dim if hints.partition_dim is None else hints.partition_dim
        )
    viewed = meta.shape if meta.local_view is None else meta.local_view
    if meta.local_view is not None and torch.Size(viewed).numel() != torch.Size(meta.shape).numel():
        raise ValueError(
            f"expert_view of {meta.name} must have as many elements as its shape, got "
            f"{meta.local_view} and {meta.shape}"
        )
    if meta.expert_dim is not None and not 0 <= meta.expert_dim < len(viewed):
        raise ValueError(
            f"expert_dim of {meta.name} must be a dimension of {viewed}, got {meta.expert_dim}"
        )


def _read_groups(
    meta: ParameterMetadata, pg_collection: Any, ranks: _PlanRanks, hints: _Hints
) -> None:
    def members(name: str) -> list[int] | None:
        return ranks.of(getattr(pg_collection, name, None))

    is_one_expert = meta.num_experts is not None and (
        _detect_expert_index_from_param_name(meta.name) is not None
        or _sequential_expert(meta.name.split(".")) is not None
    )
    is_expert = meta.is_ep or is_one_expert or meta.expert_dim is not None
    if meta.is_ep:
        meta.expert_parallel_group_ranks = members("ep")
        if meta.expert_parallel_group_ranks is None:
            raise ValueError(
                f"{meta.name} belongs to experts (its attribute allreduce is False), but "
                "pg_collection has no group ep"
            )
    if is_expert:
        expert_tp = members("expt_tp")
        meta.tensor_parallel_group_ranks = members("tp") if expert_tp is None else expert_tp
        # Grouped linear layers that communicate by themselves do not say that they are sharded.
        if (
            (meta.is_ep or is_one_expert)
            and len(meta.tensor_parallel_group_ranks or ()) > 1
            and meta.partition_dim >= 0
        ):
            meta.is_tp = not hints.is_replicated
        expert_dp = members("expt_dp")
        meta.data_parallel_group_ranks = members("dp") if expert_dp is None else expert_dp
    else:
        # Also for a replicated parameter: the other side may be sharded.
        meta.tensor_parallel_group_ranks = members("tp")
        meta.data_parallel_group_ranks = members("dp")


def _read_stage(
    meta: ParameterMetadata, param: torch.Tensor, pg_collection: Any, ranks: _PlanRanks
) -> None:
    if pg_collection is None:
        return
    stages = ranks.of(getattr(pg_collection, "pp", None))
    meta.pipeline_parallel_group_ranks = ranks.of_world() if stages is None else stages
    if stages is not None and len(stages) > 1:
        meta.pipeline_stage = _get_rank_in_group(meta.owner_rank, stages)
    meta.is_shared_by_stages = bool(getattr(param, "shared_embedding", False))
