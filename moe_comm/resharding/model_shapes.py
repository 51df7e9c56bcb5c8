"""Mixture-of-experts transformers described by sizes: their parameters under any parallel layout.

For plans that are made without a model, and for models whose every element is known in advance.
Names and attributes are those of Megatron's `GPTModel`.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import torch

from moe_comm.resharding.metadata import ParameterMetadata
from moe_comm.resharding.parallelism import Parallelism, ProcessGroups, group_ranks

__all__ = [
    "LatentAttention",
    "MoEShape",
    "ShapedModel",
    "build_module",
    "fill",
    "find_differences",
    "roster",
]

# Rows of a tensor are drawn from this many random numbers, each row from another place on.
_TABLE_SIZE = 1 << 20
_NUM_ELEMENTS_PER_BLOCK = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Sizes of attention with compressed queries, keys and values.

    Args:
        query_rank: Width that queries are compressed to.
        key_value_rank: Width that keys and values are compressed to.
        head_dim: Elements of a head without position.
        rope_dim: Elements of a head that carry the position.
        value_dim: Elements of a head's value.
    """

    query_rank: int
    key_value_rank: int
    head_dim: int
    rope_dim: int
    value_dim: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEShape:
    """Sizes of a decoder-only transformer with experts.

    Args:
        num_layers: Layers.
        hidden: Width of the residual stream.
        num_heads: Query heads.
        num_query_groups: Key and value heads, packed with their queries into one tensor.
        head_dim: Elements of a head; 0 for `hidden / num_heads`.
        num_experts: Routed experts of a layer; 0 for a dense model.
        expert_ffn: Inner width of an expert; every expert is gated.
        ffn: Inner width of a dense layer.
        num_dense_layers: Layers from the first on that are dense.
        shared_expert_ffn: Inner width of the expert that every token passes; 0 for none.
        vocab: Rows of the embedding.
        has_qk_norm: Queries and keys are normalised per head.
        has_expert_bias: Routers keep a float32 bias per expert, a persistent buffer.
        has_tied_embeddings: The output layer is the embedding.
        has_fused_experts: Weights of a rank's experts lie in one tensor, `[experts, ...]`.
        latent_attention: Instead of grouped queries.

    Raises:
        ValueError: A size is out of range, or sizes contradict each other.
    """

    num_layers: int
    hidden: int
    num_heads: int
    num_query_groups: int
    head_dim: int = 0
    num_experts: int
    expert_ffn: int
    ffn: int = 0
    num_dense_layers: int = 0
    shared_expert_ffn: int = 0
    vocab: int
    has_qk_norm: bool = False
    has_expert_bias: bool = True
    has_tied_embeddings: bool = False
    has_fused_experts: bool = False
    latent_attention: LatentAttention | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden", "num_heads", "num_query_groups", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("head_dim", "num_experts", "ffn", "shared_expert_ffn"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        if not self.head_dim and self.hidden % self.num_heads:
            raise ValueError(
                f"hidden must be a multiple of num_heads where head_dim is not given, got "
                f"{self.hidden} and {self.num_heads}"
            )
        if self.num_heads % self.num_query_groups:
            raise ValueError(
                f"num_heads must be a multiple of num_query_groups, got {self.num_heads} and "
                f"{self.num_query_groups}"
            )
        if not 0 <= self.num_dense_layers <= self.num_layers:
            raise ValueError(
                f"num_dense_layers must be in [0, {self.num_layers}], got {self.num_dense_layers}"
            )
        if self.has_dense_layers and self.ffn < 1:
            raise ValueError(f"ffn of dense layers must be >= 1, got {self.ffn}")
        if self.num_experts and self.expert_ffn < 1:
            raise ValueError(f"expert_ffn must be >= 1, got {self.expert_ffn}")

    @property
    def has_dense_layers(self) -> bool:
        """Whether some layer has no experts."""
        return self.num_dense_layers > 0 or self.num_experts == 0

    @property
    def attention_head_dim(self) -> int:
        """Elements of a head."""
        return self.head_dim or self.hidden // self.num_heads

    def num_bytes(self, dtype: torch.dtype = torch.bfloat16) -> int:
        """Bytes of one whole model."""
        single = Parallelism(1)
        return sum(
            _num_elements(tensor.shape) * _dtype_of(tensor, dtype).itemsize
            for tensor in _tensors(self, single, 0)
        )

    def check(self, parallelism: Parallelism) -> None:
        """Whether the model can be cut like this.

        Raises:
            ValueError: A size is no multiple of what it is divided by.
        """
        sizes = [("num_heads", self.num_heads, "tp", parallelism.tp)]
        sizes += [("vocab", self.vocab, "tp", parallelism.tp)]
        if self.latent_attention is None:
            sizes.append(("num_query_groups", self.num_query_groups, "tp", parallelism.tp))
        if self.has_dense_layers:
            sizes.append(("ffn", self.ffn, "tp", parallelism.tp))
        if self.num_experts:
            sizes.append(("num_experts", self.num_experts, "ep", parallelism.ep))
            sizes.append(("expert_ffn", self.expert_ffn, "expert_tp", parallelism.etp))
            sizes.append(("shared_expert_ffn", self.shared_expert_ffn, "tp", parallelism.tp))
        elif parallelism.ep > 1:
            raise ValueError(f"a model without experts has no ep, got ep = {parallelism.ep}")
        for name, size, group, group_size in sizes:
            if size % group_size:
                raise ValueError(
                    f"{name} must be a multiple of {group}, got {size} and {group_size}"
                )
        if self.num_layers < parallelism.pp:
            raise ValueError(
                f"num_layers must be >= pp, got {self.num_layers} and {parallelism.pp}"
            )


class _Tensor(NamedTuple):
    """One parameter or buffer of one rank. `partition_dim` is -1 where nothing is sharded."""

    name: str
    resolved_name: str
    shape: tuple[int, ...]
    partition_dim: int = -1
    partition_stride: int = 1
    is_expert: bool = False
    expert_idx: int | None = None
    is_fused: bool = False
    is_buffer: bool = False


def _num_elements(shape: tuple[int, ...]) -> int:
    num_elements = 1
    for size in shape:
        num_elements *= size
    return num_elements


def _dtype_of(tensor: _Tensor, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if tensor.is_buffer else dtype


def stage_layers(num_layers: int, num_stages: int, stage: int) -> range:
    """Layers of a pipeline stage; earlier stages take one more where they do not divide evenly."""
    few, more = divmod(num_layers, num_stages)
    first = stage * few + min(stage, more)
    return range(first, first + few + (stage < more))


def _stage_of(parallelism: Parallelism, rank: int) -> int:
    return rank // (parallelism.num_ranks // parallelism.pp)


def _tensors(shape: MoEShape, parallelism: Parallelism, rank: int) -> Iterator[_Tensor]:
    """What a rank holds, in the order of its modules; buffers last, as refit lists them."""
    stage = _stage_of(parallelism, rank)
    vocab = (shape.vocab // parallelism.tp, shape.hidden)
    layers = stage_layers(shape.num_layers, parallelism.pp, stage)
    if stage == 0:
        name = "embedding.word_embeddings.weight"
        yield _Tensor(name, name, vocab, 0)
    for local_idx, layer_idx in enumerate(layers):
        prefixes = f"decoder.layers.{local_idx}.", f"decoder.layers.{layer_idx}."
        yield from _layer_tensors(shape, parallelism, rank, layer_idx, prefixes)
    if stage == parallelism.pp - 1:
        name = "decoder.final_layernorm.weight"
        yield _Tensor(name, name, (shape.hidden,))
        if not shape.has_tied_embeddings or parallelism.pp > 1:
            yield _Tensor("output_layer.weight", "output_layer.weight", vocab, 0)
    for local_idx, layer_idx in enumerate(layers):
        if shape.has_expert_bias and _has_experts(shape, layer_idx):
            name = "mlp.router.expert_bias"
            yield _Tensor(
                f"decoder.layers.{local_idx}.{name}",
                f"decoder.layers.{layer_idx}.{name}",
                (shape.num_experts,),
                is_buffer=True,
            )


def _has_experts(shape: MoEShape, layer_idx: int) -> bool:
    return shape.num_experts > 0 and layer_idx >= shape.num_dense_layers


def _layer_tensors(
    shape: MoEShape,
    parallelism: Parallelism,
    rank: int,
    layer_idx: int,
    prefixes: tuple[str, str],
) -> Iterator[_Tensor]:
    def tensor(name: str, size: tuple[int, ...], dim: int = -1, stride: int = 1) -> _Tensor:
        return _Tensor(prefixes[0] + name, prefixes[1] + name, size, dim, stride)

    def gated(name: str, ffn: int) -> Iterator[_Tensor]:
        """Gate and projection lie one after the other on every rank: two segments."""
        inner = ffn // parallelism.tp
        yield tensor(f"{name}.linear_fc1.weight", (2 * inner, shape.hidden), 0, 2)
        yield tensor(f"{name}.linear_fc2.weight", (shape.hidden, inner), 1)

    hidden, tp = shape.hidden, parallelism.tp
    yield tensor("input_layernorm.weight", (hidden,))
    for name, size, dim in _attention_sizes(shape, tp):
        yield tensor(f"self_attention.{name}.weight", size, dim)
    yield tensor("pre_mlp_layernorm.weight", (hidden,))
    if not _has_experts(shape, layer_idx):
        yield from gated("mlp", shape.ffn)
        return
    yield tensor("mlp.router.weight", (shape.num_experts, hidden))
    if shape.shared_expert_ffn:
        yield from gated("mlp.shared_experts", shape.shared_expert_ffn)
    inner = shape.expert_ffn // parallelism.etp
    num_local = shape.num_experts // parallelism.ep
    first_expert = _ep_idx(parallelism, rank) * num_local
    for name, size, dim, stride in (
        ("mlp.experts.linear_fc1.weight", (2 * inner, hidden), 0, 2),
        ("mlp.experts.linear_fc2.weight", (hidden, inner), 1, 1),
    ):
        local_name, resolved_name = prefixes[0] + name, prefixes[1] + name
        if shape.has_fused_experts:
            fused_size = (num_local, *size)
            yield _Tensor(
                local_name,
                resolved_name,
                fused_size,
                dim + 1,
                stride,
                is_expert=True,
                is_fused=True,
            )
            continue
        for local_expert in range(num_local):
            expert_idx = first_expert + local_expert
            yield _Tensor(
                f"{local_name}{local_expert}",
                f"{resolved_name}{expert_idx}",
                size,
                dim,
                stride,
                is_expert=True,
                expert_idx=expert_idx,
            )


def _attention_sizes(shape: MoEShape, tp: int) -> list[tuple[str, tuple[int, ...], int]]:
    """Name, local size and sharded dimension (-1: none) of the weights of attention."""
    hidden, heads = shape.hidden, shape.num_heads // tp
    latent = shape.latent_attention
    if latent is not None:
        query_dim, value_dim = latent.head_dim + latent.rope_dim, latent.head_dim + latent.value_dim
        return [
            ("linear_proj", (hidden, heads * latent.value_dim), 1),
            ("linear_q_down_proj", (latent.query_rank, hidden), -1),
            ("q_layernorm", (latent.query_rank,), -1),
            ("linear_q_up_proj", (heads * query_dim, latent.query_rank), 0),
            ("linear_kv_down_proj", (latent.key_value_rank + latent.rope_dim, hidden), -1),
            ("kv_layernorm", (latent.key_value_rank,), -1),
            ("linear_kv_up_proj", (heads * value_dim, latent.key_value_rank), 0),
        ]
    head_dim = shape.attention_head_dim
    # A group's queries, key and value are neighbours, so ranks hold whole groups.
    qkv_rows = (heads + 2 * (shape.num_query_groups // tp)) * head_dim
    sizes: list[tuple[str, tuple[int, ...], int]] = [
        ("linear_proj", (hidden, heads * head_dim), 1),
        ("linear_qkv", (qkv_rows, hidden), 0),
    ]
    if shape.has_qk_norm:
        sizes += [("q_layernorm", (head_dim,), -1), ("k_layernorm", (head_dim,), -1)]
    return sizes


def _ep_idx(parallelism: Parallelism, rank: int) -> int:
    # Stages are multiples of etp x ep ranks, so that the stage does not matter.
    return rank // parallelism.etp % parallelism.ep


def roster(
    shape: MoEShape,
    parallelism: Parallelism,
    rank: int,
    rank_offset: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> list[ParameterMetadata]:
    """What one rank would tell the others about its parameters and buffers; no tensor is made.

    Args:
        shape: The model.
        parallelism: Its layout.
        rank: In [0, parallelism.num_ranks).
        rank_offset: Where this model's ranks begin in the wider group.
        dtype: Of parameters.

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
            dtype=_dtype_of(tensor, dtype),
            element_size=_dtype_of(tensor, dtype).itemsize,
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
        )
        for tensor in _tensors(shape, parallelism, rank)
    ]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """What refit reads of a model's `config`."""

    num_moe_experts: int | None


class ShapedModel(torch.nn.Module):
    """Parameters and buffers of one rank, without a forward; made by `build_module`.

    Args:
        shape: The model.
        parallelism: Its layout.
        rank: In [0, parallelism.num_ranks).
        dtype: Of parameters.
        rank_offset: Where this model's ranks begin in the wider group.
        device: "meta" makes no memory.
    """

    def __init__(
        self,
        shape: MoEShape,
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
        for tensor in _tensors(shape, parallelism, rank):
            *path, leaf = tensor.name.split(".")
            owner = _submodule(self, path)
            data = torch.empty(tensor.shape, dtype=_dtype_of(tensor, dtype), device=device)
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
        layers = stage_layers(shape.num_layers, parallelism.pp, _stage_of(parallelism, rank))
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
    shape: MoEShape,
    parallelism: Parallelism,
    rank: int,
    *,
    dtype: torch.dtype,
    rank_offset: int = 0,
    device: str = "cpu",
) -> ShapedModel:
    """One rank's parameters, uninitialised, with the attributes that resharding reads.

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
    """What is not bit for bit as `fill` makes it: one line per parameter, with the first element."""
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
    for tensor in _tensors(module.shape, module.parallelism, module.rank):
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
    module: ShapedModel, tensor: _Tensor, name_hash: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where in the table each row begins, and the column numbers, both of the whole model."""
    parallelism = module.parallelism
    tp_size = parallelism.etp if tensor.is_expert else parallelism.tp
    indices = [torch.arange(size) for size in tensor.shape]
    sizes = list(tensor.shape)
    dim = tensor.partition_dim
    if dim >= 0:
        segment = sizes[dim] // tensor.partition_stride
        number = indices[dim] // segment * tp_size + module.rank % tp_size
        indices[dim] = number * segment + indices[dim] % segment
        sizes[dim] *= tp_size
    if tensor.is_fused:
        indices[0] += _ep_idx(parallelism, module.rank) * sizes[0]
        sizes[0] *= parallelism.ep
    row = torch.zeros(1, dtype=torch.int64)
    for index, size in zip(indices[:-1], sizes[:-1], strict=True):
        row = (row[:, None] * size + index[None, :]).view(-1)
    # The finaliser of splitmix64: neighbouring rows begin far apart.
    mixed = row * -0x61C8864680B583EB + name_hash
    mixed = (mixed ^ (mixed >> 30 & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ (mixed >> 27 & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return mixed >> 31 & (_TABLE_SIZE - 1), indices[-1]
