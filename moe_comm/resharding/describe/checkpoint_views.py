"""Tensors of a checkpoint by its own names, as views of the storage in which a rank holds them."""

from __future__ import annotations

import dataclasses

import torch

from moe_comm.resharding.describe import intervals
from moe_comm.resharding.describe.intervals import Intervals

__all__ = ["CheckpointView"]


@dataclasses.dataclass(frozen=True)
class CheckpointView:
    """Elements of one tensor of a checkpoint, where a rank holds them.

    A model keeps a checkpoint's tensors fused, stacked, transposed or cut; a view undoes that by its
    offset and strides alone. A rank may have several views of one name.

    Args:
        name: Of the tensor in the checkpoint.
        shape: Of the whole tensor, as the checkpoint has it or cut into finer dimensions.
        dims: Per dimension of `shape`, the indices that `tensor` holds.
        tensor: View of the rank's storage, with any strides; dimension `i` has as many indices as
            `dims[i]`.

    Raises:
        ValueError: `dims` do not fit `shape` or `tensor`.
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[Intervals, ...]
    tensor: torch.Tensor

    def __post_init__(self) -> None:
        lengths = tuple(intervals.total_length(held) for held in self.dims)
        if len(self.dims) != len(self.shape) or lengths != tuple(self.tensor.shape):
            raise ValueError(
                f"{self.name}: intervals of {lengths} indices of a tensor of shape {self.shape} "
                f"cannot be a view of shape {tuple(self.tensor.shape)}"
            )
        for dim, (held, size) in enumerate(zip(self.dims, self.shape, strict=True)):
            for start, _, length in held:
                if start < 0 or start + length > size:
                    raise ValueError(
                        f"{self.name}: indices [{start}, {start + length}) of dimension {dim} are "
                        f"not in a tensor of shape {self.shape}"
                    )
