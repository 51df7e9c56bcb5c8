"""FP8 weights of a checkpoint and their scale factors, as the values that both stand for."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from moe_comm.resharding.describe.conversions import is_scaled
from moe_comm.resharding.describe.disagreement import PlanError
from moe_comm.resharding.describe.intervals import Box
from moe_comm.resharding.formats.number_formats import FP8_BLOCKS, MXFP8_BLOCK, scale_shape
from moe_comm.resharding.plan.reshard_plan import TensorSpec

SCALE_SUFFIX = "_scale_inv"
"""End of the name of a weight's scale factors, by which its values are multiplied."""

_BYTES = (torch.uint8, torch.float8_e8m0fnu)


def scale_names(tensors: Mapping[str, TensorSpec]) -> dict[str, str]:
    """Return the names of scale factors by those of their FP8 weights.

    Args:
        tensors: Tensors of a checkpoint, by name.
    """
    return {
        name: name + SCALE_SUFFIX
        for name, spec in tensors.items()
        if spec.dtype == torch.float8_e4m3fn and name + SCALE_SUFFIX in tensors
    }


def lacks_scales(name: str, dtype: torch.dtype) -> str:
    """Return why a tensor of a checkpoint without known scale factors becomes no numbers; "" where it needs none.

    Args:
        name: Name of the tensor.
        dtype: Dtype in the files.
    """
    if not is_scaled(dtype):
        return ""
    return (
        f"to become numbers, it must be {torch.float8_e4m3fn} with its scale factors under the name "
        f"{name}{SCALE_SUFFIX}"
    )


class BlockScales:
    """Scale factors of one weight, for any box of it.

    Args:
        name: Name of the weight, for messages.
        shape: Shape of the weight, `[..., M, K]`.
        scale: Factors of the weight, a row of blocks after the other: float32, or the exponent bytes of
            powers of two (uint8, float8_e8m0fnu).

    Raises:
        PlanError: The factors are of no known blocks.
    """

    def __init__(self, name: str, shape: tuple[int, ...], scale: torch.Tensor) -> None:
        self._shape = shape
        self._block = block_of(name, shape, tuple(scale.shape), scale.dtype)
        is_bytes = scale.dtype in _BYTES
        self._scale = scale.view(torch.float8_e8m0fnu).float() if is_bytes else scale

    def at(self, view: tuple[int, ...], box: Box) -> torch.Tensor:
        """Return the factor of every element of a box, float32 of its sizes.

        Args:
            view: Shape that the weight is viewed as: its own shape, or one that cuts its dimensions more
                finely.
            box: Box of the view.
        """
        num_dims = len(view)
        indices = []
        dim = 0
        for size, block in zip(
            self._shape, (*[1] * (len(self._shape) - 2), *self._block), strict=True
        ):
            index = torch.zeros([1] * num_dims, dtype=torch.int64)
            inner = size
            # Dimensions of 1 may be left out of the view.
            while inner > 1:
                inner //= view[dim]
                place = [1] * num_dims
                place[dim] = -1
                index = index + inner * torch.arange(*box[dim]).view(place)
                dim += 1
            indices.append(index // block)
        sizes = [stop - start for start, stop in box]
        return self._scale[tuple(indices)].expand(sizes)


def block_of(
    name: str, shape: tuple[int, ...], scale: tuple[int, ...], dtype: torch.dtype
) -> tuple[int, int]:
    """Return the rows and columns that share a scale factor.

    Raises:
        PlanError: Shapes and dtype are of no known blocks; names the weight.
    """
    # transformers 5.24 writes bytes of blocks of any size: FineGrainedFP8Config(scale_fmt="ue8m0").
    blocks = (MXFP8_BLOCK, *FP8_BLOCKS) if dtype in _BYTES else FP8_BLOCKS
    found = [block for block in blocks if len(shape) >= 2 and scale_shape(shape, block) == scale]
    if not found or not (dtype in _BYTES or dtype == torch.float32) or math.prod(scale) == 0:
        expected = {block: scale_shape(shape, block) for block in blocks} if len(shape) > 1 else {}
        raise PlanError(
            f"{name}: FP8 of shape {shape} needs scale factors of float32, uint8 or float8_e8m0fnu, by "
            f"blocks {expected}; got {dtype} of shape {scale}"
        )
    return found[0]
