"""Tensors that the ranks of a described model hold: names, shapes and shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch

from moe_comm.resharding.describe import intervals
from moe_comm.resharding.describe.intervals import Interval, Intervals
from moe_comm.resharding.describe.parallelism import Parallelism


class DescribedTensor(NamedTuple):
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
        has_qk_norm: Queries and keys are normalized per head.
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
        """Return whether some layer has no experts."""
        return self.num_dense_layers > 0 or self.num_experts == 0

    @property
    def attention_head_dim(self) -> int:
        """Elements of a head."""
        return self.head_dim or self.hidden // self.num_heads

    def num_bytes(self, dtype: torch.dtype = torch.bfloat16) -> int:
        """Bytes of one whole model."""
        single = Parallelism(1)
        return sum(
            _num_elements(tensor.shape) * dtype_of(tensor, dtype).itemsize
            for tensor in self.tensors(single, 0)
        )

    def check(self, parallelism: Parallelism) -> None:
        """Return whether the model can be cut like this.

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

    def tensors(self, parallelism: Parallelism, rank: int) -> Iterator[DescribedTensor]:
        """Yield the tensors of a rank, in the order of its modules; buffers last, as refit lists them."""
        stage = stage_of(parallelism, rank)
        vocab = (self.vocab // parallelism.tp, self.hidden)
        layers = stage_layers(self.num_layers, parallelism.pp, stage)
        if stage == 0:
            name = "embedding.word_embeddings.weight"
            yield DescribedTensor(name, name, vocab, 0)
        for local_idx, layer_idx in enumerate(layers):
            prefixes = f"decoder.layers.{local_idx}.", f"decoder.layers.{layer_idx}."
            yield from _layer_tensors(self, parallelism, rank, layer_idx, prefixes)
        if stage == parallelism.pp - 1:
            name = "decoder.final_layernorm.weight"
            yield DescribedTensor(name, name, (self.hidden,))
            if not self.has_tied_embeddings or parallelism.pp > 1:
                yield DescribedTensor("output_layer.weight", "output_layer.weight", vocab, 0)
        for local_idx, layer_idx in enumerate(layers):
            if self.has_expert_bias and _has_experts(self, layer_idx):
                name = "mlp.router.expert_bias"
                yield DescribedTensor(
                    f"decoder.layers.{local_idx}.{name}",
                    f"decoder.layers.{layer_idx}.{name}",
                    (self.num_experts,),
                    is_buffer=True,
                )


def _num_elements(shape: tuple[int, ...]) -> int:
    num_elements = 1
    for size in shape:
        num_elements *= size
    return num_elements


def dtype_of(tensor: DescribedTensor, dtype: torch.dtype) -> torch.dtype:
    """Dtype of a tensor of a model whose parameters are of `dtype`."""
    return torch.float32 if tensor.is_buffer else dtype


def stage_layers(num_layers: int, num_stages: int, stage: int) -> range:
    """Layers of a pipeline stage; earlier stages take one more where they do not divide evenly."""
    few, more = divmod(num_layers, num_stages)
    first = stage * few + min(stage, more)
    return range(first, first + few + (stage < more))


def stage_of(parallelism: Parallelism, rank: int) -> int:
    """Pipeline stage of a rank."""
    return rank // (parallelism.num_ranks // parallelism.pp)


def _has_experts(shape: MoEShape, layer_idx: int) -> bool:
    return shape.num_experts > 0 and layer_idx >= shape.num_dense_layers


def _layer_tensors(
    shape: MoEShape,
    parallelism: Parallelism,
    rank: int,
    layer_idx: int,
    prefixes: tuple[str, str],
) -> Iterator[DescribedTensor]:
    def tensor(name: str, size: tuple[int, ...], dim: int = -1, stride: int = 1) -> DescribedTensor:
        return DescribedTensor(prefixes[0] + name, prefixes[1] + name, size, dim, stride)

    def gated(name: str, ffn: int) -> Iterator[DescribedTensor]:
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
    first_expert = ep_idx(parallelism, rank) * num_local
    for name, size, dim, stride in (
        ("mlp.experts.linear_fc1.weight", (2 * inner, hidden), 0, 2),
        ("mlp.experts.linear_fc2.weight", (hidden, inner), 1, 1),
    ):
        local_name, resolved_name = prefixes[0] + name, prefixes[1] + name
        if shape.has_fused_experts:
            fused_size = (num_local, *size)
            yield DescribedTensor(
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
            yield DescribedTensor(
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
    # A group's queries, key and value are neighbors, so ranks hold whole groups.
    qkv_rows = (heads + 2 * (shape.num_query_groups // tp)) * head_dim
    sizes: list[tuple[str, tuple[int, ...], int]] = [
        ("linear_proj", (hidden, heads * head_dim), 1),
        ("linear_qkv", (qkv_rows, hidden), 0),
    ]
    if shape.has_qk_norm:
        sizes += [("q_layernorm", (head_dim,), -1), ("k_layernorm", (head_dim,), -1)]
    return sizes


def held_dims(
    tensor: DescribedTensor, parallelism: Parallelism, rank: int
) -> tuple[tuple[int, ...], tuple[Intervals, ...]]:
    """Shape of the whole tensor, and per dimension the indices that a rank holds."""
    sizes = list(tensor.shape)
    dims: list[Intervals] = [intervals.whole(size) for size in sizes]
    dim = tensor.partition_dim
    if dim >= 0:
        tp_size = parallelism.etp if tensor.is_expert else parallelism.tp
        length = sizes[dim] // tensor.partition_stride
        dims[dim] = tuple(
            Interval((part * tp_size + rank % tp_size) * length, part * length, length)
            for part in range(tensor.partition_stride)
        )
        sizes[dim] *= tp_size
    if tensor.is_fused:
        dims[0] = (Interval(ep_idx(parallelism, rank) * sizes[0], 0, sizes[0]),)
        sizes[0] *= parallelism.ep
    return tuple(sizes), tuple(dims)


def ep_idx(parallelism: Parallelism, rank: int) -> int:
    """Place of a rank in its expert parallel group."""
    # Stages are multiples of etp x ep ranks, so that the stage does not matter.
    return rank // parallelism.etp % parallelism.ep


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorList:
    """Equal tensors without a model around them, divided among ranks as experts are.

    Args:
        num_tensors: Number of tensors of all ranks.
        size: Elements of each tensor.

    Raises:
        ValueError: A number is not positive.
    """

    num_tensors: int
    size: int

    def __post_init__(self) -> None:
        for name in ("num_tensors", "size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")

    @property
    def num_experts(self) -> int:
        """Each tensor is an expert."""
        return self.num_tensors

    def num_bytes(self, dtype: torch.dtype = torch.bfloat16) -> int:
        """Bytes of all tensors."""
        return self.num_tensors * self.size * dtype.itemsize

    def check(self, parallelism: Parallelism) -> None:
        """Return whether the tensors can be divided like this.

        Raises:
            ValueError: They do not divide by ep, or something else is divided.
        """
        if self.num_tensors % parallelism.ep:
            raise ValueError(
                f"num_tensors must be a multiple of ep, got {self.num_tensors} and {parallelism.ep}"
            )
        if parallelism.etp * parallelism.pp > 1:
            raise ValueError(f"a list of tensors is divided by ep alone, got {parallelism}")

    def tensors(self, parallelism: Parallelism, rank: int) -> Iterator[DescribedTensor]:
        """Yield the tensors of a rank."""
        num_local = self.num_tensors // parallelism.ep
        first = ep_idx(parallelism, rank) * num_local
        for local_idx in range(num_local):
            yield DescribedTensor(
                f"experts.weight{local_idx}",
                f"experts.weight{first + local_idx}",
                (self.size,),
                is_expert=True,
                expert_idx=first + local_idx,
            )
