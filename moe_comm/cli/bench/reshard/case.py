"""Case of a reshard: a model or a list of tensors, between two layouts, and the memory that it lands in."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, get_args

import torch

from moe_comm.cli.bench.options import RankOptions
from moe_comm.cli.reshard.model_shapes import MoEShape
from moe_comm.cli.reshard.world import PlanningCase

MEMORIES = ("heap", "shared", "outside")
TransportName = Literal["symmetric", "gloo", "nvshmem"]
TRANSPORTS = get_args(TransportName)
FULL_TENSORS = "full-tensors"
CHECKSUM = "checksum"
DELTA = "delta"
DELTA_MASK = "delta-mask"
RESHARD_PEERS = ("gloo", FULL_TENSORS, CHECKSUM, DELTA, DELTA_MASK)

NUM_LAYERS = 4
NUM_EXPERTS = 16
SMALLEST_EXPERT_FFN = 64
EXPERT_FFN_STEP = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReshardOptions(RankOptions):
    """Options of a measurement.

    Peers are the same plan over another transport; whole tensors by name over Gloo, each from a rank that
    holds it to every rank that does; the same refit, verified by checksums; and deltas where 1 % of the blocks
    changed, found by checksums or told by a mask.
    """

    known_peers = RESHARD_PEERS


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReshardCase:
    """One configuration; every process holds an equal copy.

    Args:
        layouts: Model, source and destination.
        memory: One of `MEMORIES`: destinations lie in the symmetric heap, or where torch puts them, with
            their pages shared or not.
        transport: One of `TRANSPORTS`, which is measured.
        is_stacked: Destinations hold a layer's experts in one tensor, as engines do, and describe
            them by views.
        seed: Seed of the weights.
    """

    layouts: PlanningCase
    memory: str = "heap"
    transport: str = "symmetric"
    is_stacked: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, allowed in (("memory", MEMORIES), ("transport", TRANSPORTS)):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}"
                )

    @property
    def num_ranks(self) -> int:
        """Number of processes."""
        return self.layouts.num_ranks

    def num_elements(self) -> int:
        """Elements written, over all destination ranks."""
        return sum(
            math.prod(meta.shape)
            for _, destination in self.layouts.gathered()
            for meta in destination
        )

    def num_bytes(self) -> int:
        """Bytes read and written: every destination element once on each side, in the sides' dtypes.

        Persistent buffers, a few float32 numbers, are counted like parameters.
        """
        sizes = (self.layouts.source_dtype.itemsize, self.layouts.destination_dtype.itemsize)
        return self.num_elements() * sum(sizes)

    def to_dict(self) -> dict[str, Any]:
        """Return the case as JSON writes it."""
        layouts = self.layouts
        return {
            "transport": self.transport,
            "destination": self.memory,
            "stacked_experts": self.is_stacked,
            "ranks": self.num_ranks,
            "from": str(layouts.source),
            "to": str(layouts.destination),
            "source_ranks": layouts.source.num_ranks,
            "destination_ranks": layouts.destination.num_ranks,
            "disjoint": layouts.is_disjoint,
            "dtype": dtype_name(layouts.source_dtype),
            "destination_dtype": dtype_name(layouts.destination_dtype),
            "shape": dataclasses.asdict(layouts.shape),
            "model_bytes": layouts.shape.num_bytes(layouts.source_dtype),
            "seed": self.seed,
        }


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, without `torch.`."""
    return str(dtype).removeprefix("torch.")


def shape_of_bytes(num_bytes: int, dtype: torch.dtype, num_experts: int = NUM_EXPERTS) -> MoEShape:
    """Return a model of 4 layers with so many experts and about so many bytes, never more.

    Raises:
        ValueError: No such model is that small.
    """
    for hidden in (2048, 1024, 512, 256, 128):

        def make(expert_ffn: int, hidden: int = hidden) -> MoEShape:
            return MoEShape(
                num_layers=NUM_LAYERS,
                hidden=hidden,
                num_heads=16,
                num_query_groups=8,
                num_experts=num_experts,
                expert_ffn=expert_ffn,
                vocab=4 * hidden,
            )

        smallest = make(SMALLEST_EXPERT_FFN).num_bytes(dtype)
        if smallest > num_bytes:
            continue
        step_bytes = make(SMALLEST_EXPERT_FFN + EXPERT_FFN_STEP).num_bytes(dtype) - smallest
        num_steps = (num_bytes - smallest) // step_bytes
        return make(SMALLEST_EXPERT_FFN + EXPERT_FFN_STEP * num_steps)
    raise ValueError(f"a model of these kinds has at least {smallest} bytes, got {num_bytes}")
