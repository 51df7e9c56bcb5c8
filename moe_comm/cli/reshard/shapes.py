"""Models as the command line describes them."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from moe_comm.cli.reshard.model_shapes import MoEShape, TensorList
from moe_comm.cli.reshard.published_shapes import PUBLISHED_SHAPES

ModelName = Literal["mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3", "kimi-k2"]
"""Names of `PUBLISHED_SHAPES` on the command line."""


def shape_from_options(model: ModelName, **sizes: int | bool | None) -> MoEShape:
    """A published model with some sizes replaced.

    Args:
        model: Sizes to start from.
        sizes: Fields of `MoEShape`; None for the model's own.

    Raises:
        ValueError: The sizes contradict each other.
    """
    given: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
    return dataclasses.replace(PUBLISHED_SHAPES[model], **given)


def describe(shape: MoEShape | TensorList) -> str:
    """Sizes in a few words."""
    if isinstance(shape, TensorList):
        return f"{shape.num_tensors} tensors of {shape.size} elements"
    return (
        f"{shape.num_layers} layers, hidden {shape.hidden}, {shape.num_experts} experts of "
        f"{shape.expert_ffn}"
    )
