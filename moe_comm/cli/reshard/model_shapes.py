"""Mixture-of-experts transformers described by sizes: their parameters under any parallel layout.

For plans that are made without a model, and for models whose every element is known in advance.
Names and attributes are those of Megatron's `GPTModel`.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator

import torch

from moe_comm.cli.reshard.described_tensors import (
    DescribedTensor,
    LatentAttention,
    MoEShape,
    TensorList,
    dtype_of,
    held_dims,
    stage_layers,
    stage_of,
)
from moe_comm.resharding.describe.metadata import ParameterMetadata
from moe_comm.resharding.describe.parallelism import Parallelism, ProcessGroups, group_ranks

__all__ = [
    "LatentAttention",
    "MoEShape",
    "ShapedModel",
    "TensorList",
    "build_module",
    "fill",
    "find_differences",
    "roster",
]

# Rows of a tensor are drawn from this many random numbers, each row from another place on.
_TABLE_SIZE = 1 << 20
_NUM_ELEMENTS_PER_BLOCK = 1 << 20


def roster(
    shape: MoEShape | TensorList,
    parallelism: Parallelism,
    rank: int,
    rank_offset: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> list[ParameterMetadata]:
    """Build one rank's metadata of its parameters and buffers, as it would tell others; no tensor is made.

    Args:
        shape: The model.
        parallelism: Layout of the model.
        rank: Rank in [0, parallelism.num_ranks).
        rank_offset: First rank of this model in the wider group.
        dtype: Type of parameters.

    Returns:
        Metadata equal to what is extracted from `build_module` of the same arguments.

    Raises:
        ValueError: `rank` is out of range, or the model cannot be cut like this.
    """
    shape.check(parallelism)
    groups = parallelism.groups(rank, rank_offset)
    tp, pp, ep = group_ranks(groups.tp), group_ranks(groups.pp), group_ranks(groups.ep)
    dp, expt_tp = group_ranks(groups.dp), group_ranks(groups.expt_tp)
    expt_dp = group_ranks(groups.expt_dp)
    return [
        ParameterMetadata(
            name=tensor.name,
            shape=tensor.shape,
            dtype=dtype_of(tensor, dtype),
            element_size=dtype_of(tensor, dtype).itemsize,
            is_tp=tensor.partition_dim >= 0,
            partition_dim=max(0, tensor.partition_dim),
            partition_stride=tensor.partition_stride,
            is_ep=tensor.is_expert,
            num_experts=shape.num_experts or None,
            owner_rank=rank + rank_offset,
            tensor_parallel_group_ranks=expt_tp if tensor.is_expert else tp,
            expert_parallel_group_ranks=ep if tensor.is_expert else None,
            data_parallel_group_ranks=expt_dp if tensor.is_expert else dp,
            pipeline_parallel_group_ranks=pp,
            resolved_name=tensor.resolved_name,
            global_expert_index=tensor.expert_idx,
            expert_dim=0 if tensor.is_fused else None,
            is_buffer=tensor.is_buffer,
            pipeline_stage=groups.pp.rank() if len(pp) > 1 else None,
        )
        for tensor in shape.tensors(parallelism, rank)
    ]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Part of a model's `config` that refit reads."""

    num_moe_experts: int | None


class ShapedModel(torch.nn.Module):
    """Parameters and buffers of one rank, without a forward; made by `build_module`.

    Args:
        shape: The model.
        parallelism: Layout of the model.
        rank: Rank in [0, parallelism.num_ranks).
        dtype: Type of parameters.
        rank_offset: First rank of this model in the wider group.
        device: "meta" makes no memory.
    """

    def __init__(
        self,
        shape: MoEShape | TensorList,
        parallelism: Parallelism,
        rank: int,
        *,
        dtype: torch.dtype,
        rank_offset: int = 0,
        device: str = "cpu",
    ) -> None:
        super().__init__()
        shape.check(parallelism)
        self.shape = shape
        self.parallelism = parallelism
        self.rank = rank
        self.pg_collection: ProcessGroups = parallelism.groups(rank, rank_offset)
        self.config = ModelConfig(shape.num_experts or None)
        for tensor in shape.tensors(parallelism, rank):
            *path, leaf = tensor.name.split(".")
            owner = _submodule(self, path)
            data = torch.empty(tensor.shape, dtype=dtype_of(tensor, dtype), device=device)
            if tensor.is_buffer:
                owner.register_buffer(leaf, data)
                continue
            parameter = torch.nn.Parameter(data, requires_grad=False)
            attributes = {
                "tensor_model_parallel": tensor.partition_dim >= 0,
                "partition_dim": max(0, tensor.partition_dim),
                "partition_stride": tensor.partition_stride,
                "allreduce": not tensor.is_expert,
            }
            if tensor.is_fused:
                attributes["expert_dim"] = 0
            for name, value in attributes.items():
                setattr(parameter, name, value)
            owner.register_parameter(leaf, parameter)
        if isinstance(shape, TensorList):
            return
        layers = stage_layers(shape.num_layers, parallelism.pp, stage_of(parallelism, rank))
        for local_idx, layer_idx in enumerate(layers):
            layer = self.get_submodule(f"decoder.layers.{local_idx}")
            layer.layer_number = layer_idx + 1  # type: ignore[assignment] # nn.Module takes any


def _submodule(module: torch.nn.Module, path: list[str]) -> torch.nn.Module:
    for name in path:
        if name not in module._modules:
            module.add_module(name, torch.nn.Module())
        module = module.get_submodule(name)
    return module


def build_module(
    shape: MoEShape | TensorList,
    parallelism: Parallelism,
    rank: int,
    *,
    dtype: torch.dtype,
    rank_offset: int = 0,
    device: str = "cpu",
) -> ShapedModel:
    """One rank's parameters, uninitialized, with the attributes that resharding reads.

    Raises:
        ValueError: `rank` is out of range, or the model cannot be cut like this.
    """
    return ShapedModel(
        shape, parallelism, rank, dtype=dtype, rank_offset=rank_offset, device=device
    )


def fill(module: ShapedModel, seed: int) -> None:
    """Give every element the value that its place in the whole model has, under any layout."""
    for _, data, rows, values in _blocks(module, seed):
        data[rows] = values


def find_differences(module: ShapedModel, seed: int) -> list[str]:
    """Find the tensors that differ in a bit from `fill`: one line per parameter, with the first element."""
    differences: dict[str, str] = {}
    for name, data, rows, values in _blocks(module, seed):
        found = data[rows]
        if name in differences or torch.equal(_bits(found), _bits(values)):
            continue
        row, column = (_bits(found) != _bits(values)).nonzero()[0].tolist()
        differences[name] = (
            f"{name}: expected {values[row, column].item()} in row {rows.start + row}, column "
            f"{column}, got {found[row, column].item()}"
        )
    return list(differences.values())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    by_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(by_size[tensor.element_size()])


def _blocks(
    module: ShapedModel, seed: int
) -> Iterator[tuple[str, torch.Tensor, slice, torch.Tensor]]:
    """Name, `[rows, columns]` view, rows of it, and what belongs there; block by block."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(_TABLE_SIZE, generator=generator) * 0.02
    tables: dict[torch.dtype, torch.Tensor] = {}
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    for tensor in module.shape.tensors(module.parallelism, module.rank):
        data = tensors[tensor.name].detach()
        if data.numel() == 0:
            continue
        values = tables.setdefault(data.dtype, table.to(data.dtype))
        digest = hashlib.blake2b(f"{seed}/{tensor.resolved_name}".encode(), digest_size=7).digest()
        starts, columns = _places(module, tensor, int.from_bytes(digest, "little"))
        flat = data.reshape(-1, columns.numel())
        assert flat.data_ptr() == data.data_ptr()
        num_rows = max(1, _NUM_ELEMENTS_PER_BLOCK // columns.numel())
        for first in range(0, flat.shape[0], num_rows):
            rows = slice(first, min(first + num_rows, flat.shape[0]))
            places = (starts[rows, None] + columns[None, :]) & (_TABLE_SIZE - 1)
            yield tensor.name, flat, rows, values[places]


def _places(
    module: ShapedModel, tensor: DescribedTensor, name_hash: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the position of each row in the table, and the column numbers, both of the whole model."""
    sizes, dims = held_dims(tensor, module.parallelism, module.rank)
    indices = [
        torch.cat([torch.arange(start, start + length) for start, _, length in held])
        for held in dims
    ]
    row = torch.zeros(1, dtype=torch.int64)
    for index, size in zip(indices[:-1], sizes[:-1], strict=True):
        row = (row[:, None] * size + index[None, :]).view(-1)
    # The finaliser of splitmix64: neighboring rows begin far apart.
    mixed = row * -0x61C8864680B583EB + name_hash
    mixed = (mixed ^ (mixed >> 30 & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ (mixed >> 27 & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return mixed >> 31 & (_TABLE_SIZE - 1), indices[-1]
