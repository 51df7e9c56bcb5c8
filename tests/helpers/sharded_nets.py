"""Small modules cut over tensor parallel ranks, whose every element is known."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch

from moe_comm.resharding.describe.parallelism import Parallelism

Shapes = Mapping[str, tuple[tuple[int, ...], int | None]]
"""Whole shape, and the dimension that is cut, by name; None for a replicated parameter."""

SHAPES: Shapes = {
    "embedding": ((24, 8), 0),
    "up": ((16, 8), 0),
    "down": ((8, 16), 1),
    "norm": ((8,), None),
    "scale": ((), None),
}


class ShardedNet(torch.nn.Module):
    """One rank's part.

    Args:
        parallelism: Parallelism of the model.
        rank: Rank among the model's ranks.
        shapes: Shapes of the parameters.
        dtype: Type of the parameters.
        rank_offset: First rank of the model in the group of the refit.
        buffers: Persistent buffers, replicated: shape and dtype by name.
    """

    def __init__(
        self,
        parallelism: Parallelism,
        rank: int,
        shapes: Shapes = SHAPES,
        *,
        dtype: torch.dtype = torch.bfloat16,
        rank_offset: int = 0,
        buffers: Mapping[str, tuple[tuple[int, ...], torch.dtype]] | None = None,
    ) -> None:
        super().__init__()
        self.pg_collection = parallelism.groups(rank, rank_offset)
        self.shapes = dict(shapes)
        self.tp_rank, self.tp_size = rank % parallelism.tp, parallelism.tp
        for name, (shape, dim) in shapes.items():
            local = list(shape)
            if dim is not None:
                local[dim] //= self.tp_size
            param = torch.nn.Parameter(torch.full(local, -1.0, dtype=dtype))
            if dim is not None:
                param.tensor_model_parallel = True
                param.partition_dim = dim
            self.register_parameter(name, param)
        for name, (shape, buffer_dtype) in (buffers or {}).items():
            self.register_buffer(name, torch.full(shape, -1.0, dtype=buffer_dtype))

    def expected(self, name: str, seed: int) -> torch.Tensor:
        """This rank's part of a parameter or buffer, in bfloat16's precision."""
        if name not in self.shapes:
            return whole(name, tuple(self.get_buffer(name).shape), seed)
        shape, dim = self.shapes[name]
        full = whole(name, shape, seed)
        return full if dim is None else full.chunk(self.tp_size, dim)[self.tp_rank]

    @torch.no_grad()
    def fill(self, seed: int) -> ShardedNet:
        """Give every element the value of its place in the whole model."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(self.expected(name, seed))
        return self

    def wrong(self, seed: int) -> list[str]:
        """Names of tensors that do not hold what `fill` gives them."""
        return [
            name
            for name, tensor in self.state_dict().items()
            if not torch.equal(tensor.float(), self.expected(name, seed).to(tensor.dtype).float())
        ]


def whole(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """The same for every layout; exact in bfloat16."""
    generator = torch.Generator().manual_seed(seed * 7919 + zlib.crc32(name.encode()) % 1000003)
    return torch.randn(shape, generator=generator).bfloat16().float()
