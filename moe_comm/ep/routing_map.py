"""Routing maps and dense probabilities, as routers give them, and the top-k form that travels.

Of plain CPU tensors that nobody differentiates or watches, each form is made of the other in one native
call: as operators of torch that takes several times as long as a small exchange.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np
import torch

from moe_comm.arguments import as_dense
from moe_comm.ep.backends.native_dtypes import DLPACK_TYPES
from moe_comm.ep.config import EpConfig
from moe_comm.tensors.torch_hooks import needs_dispatcher


def topk_of_routing_map(
    routing_map: torch.Tensor, probs: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The experts of every token as a list, and their probabilities. Local.

    Args:
        routing_map: bool `[num_tokens, num_experts]`, contiguous: whether a token goes to an expert.
        probs: `[num_tokens, num_experts]`, or None; differentiable. Read where the map is true.

    Returns:
        int64 `[num_tokens, num_topk]`, expert ids ascending, -1 at the end, with num_topk the most
        experts of a token of this rank, at least 1; and their probs, 0 at a -1, or None.

    Raises:
        ValueError: The map has not two dimensions or is not contiguous, or probs have another shape.
        TypeError: The map is not bool.

    Example:
        `[[False, True, True], [True, False, False]]` gives `[[1, 2], [0, -1]]`.
    """
    if routing_map.dtype is not torch.bool:
        raise TypeError(f"routing_map must be torch.bool, got {routing_map.dtype}")
    if routing_map.dim() != 2 or not routing_map.is_contiguous():
        raise ValueError(
            "routing_map must be contiguous and have 2 dimensions, got shape "
            f"{tuple(routing_map.shape)} with strides {routing_map.stride()}"
        )
    if probs is not None and probs.shape != routing_map.shape:
        raise ValueError(
            f"probs must have the shape of routing_map {tuple(routing_map.shape)}, got "
            f"{tuple(probs.shape)}"
        )
    if _is_plain(routing_map, probs) and (native := _native()) is not None:
        if probs is None:
            return native.topk_of_routing_map(routing_map, None, 0)[0], None
        probs = probs.contiguous()
        listed: tuple[torch.Tensor, torch.Tensor] = native.topk_of_routing_map(
            routing_map, probs, DLPACK_TYPES[probs.dtype]
        )
        return listed
    num_tokens, num_experts = routing_map.shape
    places = _true_places(routing_map)
    # A bool is a byte that is 0 or 1.
    num_choices = routing_map.view(torch.uint8).sum(1, dtype=torch.int64)
    num_topk = max(1, int(num_choices.max())) if routing_map.numel() else 1
    tokens = torch.arange(num_tokens, device=routing_map.device)
    if places.numel() == num_tokens * num_topk:  # every token has as many
        topk_idx = places.view(num_tokens, num_topk) - (tokens * num_experts)[:, None]
    else:
        first = num_choices.cumsum(0) - num_choices
        token_of_choice = torch.repeat_interleave(tokens, num_choices)
        position = torch.arange(places.numel(), device=places.device) - first[token_of_choice]
        topk_idx = places.new_full((num_tokens, num_topk), -1)
        topk_idx[token_of_choice, position] = places - token_of_choice * num_experts
    if probs is None:
        return topk_idx, None
    if num_tokens == 0:
        # Still of probs: its gradient exists on a rank without tokens too, as reductions expect.
        return topk_idx, probs[:, : topk_idx.shape[1]]
    is_choice = topk_idx >= 0
    weights = probs.gather(1, topk_idx.clamp_min(0))
    if places.numel() != topk_idx.numel():
        weights = weights.masked_fill(~is_choice, 0)
    return topk_idx, weights


def list_choices(
    config: EpConfig, x: object, routing_map: object, probs: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a map as the list that a dispatch sends, and its probs in a dtype that travels.

    Args:
        config: Configuration of the buffer. If it has a number of choices, the list has as many
            columns.
        x: Rows of the dispatch.
        routing_map: bool `[num_tokens, num_experts]`, any strides.
        probs: As `routing_map`, any floating dtype, or None: float64 travels as such where x is float64,
            every other dtype as float32.

    Raises:
        ValueError: Shapes do not fit, or a token has more experts than choices.
        TypeError: A dtype is wrong, or something is no dense tensor.
    """
    x = as_dense("x", x)
    expected = (x.shape[0] if x.dim() else 0, config.num_ids)
    routing_map = as_dense("routing_map", routing_map)
    if routing_map.shape != expected:
        raise ValueError(
            f"routing_map must have shape (num_tokens, num_experts) = {expected}, got "
            f"{tuple(routing_map.shape)}"
        )
    if probs is not None:
        dtype = as_dense("probs", probs).dtype
        if not dtype.is_floating_point:
            raise TypeError(f"probs must be floating-point, got {dtype}")
        probs = probs.detach()
        if dtype is not torch.float32 and not (dtype is x.dtype is torch.float64):
            probs = probs.float()
    topk_idx, weights = topk_of_routing_map(routing_map.contiguous(), probs)
    num_unused = 0 if config.num_topk is None else config.num_topk - topk_idx.shape[1]
    if num_unused < 0:
        raise ValueError(
            f"routing_map has a token of {topk_idx.shape[1]} experts, more than the configured "
            f"num_topk = {config.num_topk}"
        )
    if num_unused > 0:
        topk_idx = torch.nn.functional.pad(topk_idx, (0, num_unused), value=-1)
        weights = None if weights is None else torch.nn.functional.pad(weights, (0, num_unused))
    return topk_idx, weights


def routing_map_of_topk(
    topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The inverse of `topk_of_routing_map`, for any order of ids. Local.

    Args:
        topk_idx: int64 `[num_tokens, num_topk]`, ids of a token distinct; -1 marks an unused choice.
        topk_weights: `[num_tokens, num_topk]`, or None.
        num_experts: Columns of the result.

    Returns:
        bool `[num_tokens, num_experts]` and the weights in that shape, 0 elsewhere, or None.
    """
    if _is_plain(topk_idx) and (native := _native()) is not None:
        flags = native.dense_of_topk(None, topk_idx.contiguous(), num_experts, _BYTE)
        routing_map = flags.view(torch.bool)
    else:
        is_choice = torch.ones_like(topk_idx, dtype=torch.bool)
        routing_map = dense_of_topk(is_choice, topk_idx, num_experts)
    if topk_weights is None:
        return routing_map, None
    return routing_map, dense_of_topk(topk_weights, topk_idx, num_experts)


def dense_of_topk(values: torch.Tensor, topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Put the values of choices into the columns of their experts. Local.

    Args:
        values: `[num_tokens, num_topk]`; what stands at a -1 is ignored.
        topk_idx: int64 `[num_tokens, num_topk]`, ids of a token distinct.
        num_experts: Columns of the result.

    Returns:
        `[num_tokens, num_experts]`, dtype of values, 0 where nothing was put.
    """
    if _is_plain(topk_idx, values) and (native := _native()) is not None:
        type_number = DLPACK_TYPES[values.dtype]
        values = values.contiguous()
        dense: torch.Tensor = native.dense_of_topk(
            values, topk_idx.contiguous(), num_experts, type_number
        )
        return dense
    num_tokens = topk_idx.shape[0]
    is_unused = topk_idx < 0
    if not bool(is_unused.any()):
        return values.new_zeros((num_tokens, num_experts)).scatter_(1, topk_idx, values)
    # Unused choices go to a column of their own, which is cut off: cheaper than leaving them out.
    dense = values.new_zeros((num_tokens, num_experts + 1))
    dense.scatter_(1, topk_idx.masked_fill(is_unused, num_experts), values)
    return dense[:, :num_experts].contiguous()


_BYTE = DLPACK_TYPES[torch.uint8]


def _is_plain(ids: torch.Tensor, values: torch.Tensor | None = None) -> bool:
    """Return whether a native call may take the place of operators that nobody looks at."""
    if torch.compiler.is_compiling() or not ids.is_cpu or needs_dispatcher(ids, values):
        return False
    return values is None or (
        values.is_cpu
        and not (values.requires_grad and torch.is_grad_enabled())
        and not values.is_neg()
        and values.dtype in DLPACK_TYPES
    )


@functools.cache
def _native() -> Any:
    """The native module, or None where it was not built."""
    try:
        return importlib.import_module("moe_comm._host")
    except ImportError:
        return None


def _true_places(routing_map: torch.Tensor) -> torch.Tensor:
    """int64 flat indices of the true elements, ascending."""
    if routing_map.is_cpu:
        # Five times as fast as torch.nonzero, which counts first.
        return torch.from_numpy(np.flatnonzero(routing_map.numpy()))
    return routing_map.flatten().nonzero().flatten()
