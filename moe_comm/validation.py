"""Checks of what one rank can see of its own input. Messages hold both values."""

from __future__ import annotations

from typing import Literal

import torch

from moe_comm.config import ROW_BYTES_MULTIPLE, EpConfig, Layout
from moe_comm.handles import DispatchHandle

__all__ = [
    "check_cached_dispatch",
    "check_combine",
    "check_copy_out",
    "check_dispatch",
    "check_row",
    "check_weighted_gradient",
]

SUMMABLE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_copy_out(copy_out: bool | Literal["auto"]) -> bool | None:
    """True or False as given, None for "auto"."""
    if copy_out == "auto":
        return None
    if copy_out is True or copy_out is False:
        return copy_out
    raise ValueError(f'copy_out must be True, False or "auto", got {copy_out!r}')


def check_row(name: str, hidden: int, dtype: torch.dtype) -> None:
    """Rows of `hidden` elements can be moved."""
    row_bytes = hidden * dtype.itemsize
    if hidden < 1 or row_bytes % ROW_BYTES_MULTIPLE:
        raise ValueError(
            f"{name}: a row must be a positive multiple of {ROW_BYTES_MULTIPLE} bytes, got {hidden} "
            f"elements of {dtype} = {row_bytes} bytes"
        )


def check_dispatch(
    config: EpConfig,
    x: torch.Tensor,
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    layout: Layout,
    expert_alignment: int,
) -> None:
    """Input of a dispatch that exchanges counts."""
    if topk_idx is None:
        raise ValueError("topk_idx is None, which needs a handle")
    _check_tensor("x", x, 2)
    _check_tensor("topk_idx", topk_idx, 2)
    if x.dtype is not config.dtype:
        raise TypeError(f"x must have the configured dtype {config.dtype}, got {x.dtype}")
    if topk_idx.dtype is not torch.int64:
        raise TypeError(f"topk_idx must be torch.int64, got {topk_idx.dtype}")
    num_tokens, hidden = x.shape
    if hidden != config.hidden:
        raise ValueError(f"x must have the configured hidden {config.hidden}, got {hidden}")
    if num_tokens > config.num_max_tokens_per_rank:
        raise ValueError(
            f"x has {num_tokens} tokens, more than the configured num_max_tokens_per_rank = "
            f"{config.num_max_tokens_per_rank}"
        )
    if topk_idx.shape != (num_tokens, config.num_topk):
        raise ValueError(
            f"topk_idx must have shape ({num_tokens}, {config.num_topk}), got {tuple(topk_idx.shape)}"
        )
    _check_weights(topk_weights, num_tokens, config.num_topk, x.dtype)
    if layout is not Layout.EXPERT_MAJOR and layout is not Layout.RANK_MAJOR:
        raise TypeError(f"layout must be a Layout, got {layout!r}")
    _check_alignment(expert_alignment)


def check_cached_dispatch(
    handle: DispatchHandle,
    x: torch.Tensor,
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    layout: Layout,
    expert_alignment: int,
) -> None:
    """Input of a dispatch to the places of `handle`."""
    if topk_idx is not None:
        raise ValueError("topk_idx must be None with a handle, which already holds the choices")
    if layout is not Layout.EXPERT_MAJOR and layout != handle.layout:
        raise ValueError(f"layout is {layout!r}, the handle's is {handle.layout!r}")
    if expert_alignment not in (1, handle.expert_alignment):
        raise ValueError(
            f"expert_alignment is {expert_alignment}, the handle's is {handle.expert_alignment}"
        )
    _check_tensor("x", x, 2)
    num_tokens, hidden = x.shape
    if num_tokens != handle.num_tokens:
        raise ValueError(
            f"x has {num_tokens} tokens, the handle's dispatch had {handle.num_tokens}"
        )
    check_row("x", hidden, x.dtype)
    _check_weights(topk_weights, num_tokens, handle.num_topk, x.dtype)


def check_combine(
    handle: DispatchHandle,
    expert_out: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    row_weights: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    """Input of a combine."""
    rows_dtype = torch.float64 if expert_out is None else expert_out.dtype
    if expert_out is not None:
        _check_tensor("expert_out", expert_out, 2)
        num_rows, hidden = expert_out.shape
        if expert_out.dtype not in SUMMABLE:
            names = ", ".join(str(dtype) for dtype in SUMMABLE)
            raise TypeError(f"expert_out must be one of {names}, got {expert_out.dtype}")
        if num_rows != handle.num_recv_tokens:
            raise ValueError(
                f"expert_out has {num_rows} rows, the handle's dispatch brought {handle.num_recv_tokens}"
            )
        check_row("expert_out", hidden, expert_out.dtype)
        if out is not None:
            _check_tensor("out", out, 2)
            if out.dtype is not expert_out.dtype:
                raise TypeError(f"out must have dtype {expert_out.dtype}, got {out.dtype}")
            if out.shape != (handle.num_tokens, hidden):
                raise ValueError(
                    f"out must have shape ({handle.num_tokens}, {hidden}), got {tuple(out.shape)}"
                )
    elif row_weights is None:
        raise ValueError("combine needs expert_out, row_weights or both; got None and None")
    elif topk_weights is not None or out is not None:
        raise ValueError("topk_weights and out need expert_out, got None")
    if topk_weights is not None:
        if handle.layout is not Layout.EXPERT_MAJOR:
            raise ValueError(
                f"topk_weights are applied by combine for Layout.EXPERT_MAJOR only, the handle is "
                f"{handle.layout!r}: apply them to the rows before combine"
            )
        _check_weights(topk_weights, handle.num_tokens, handle.num_topk, rows_dtype)
    if row_weights is not None:
        by_choice = handle.layout is Layout.RANK_MAJOR
        _check_tensor("row_weights", row_weights, 2 if by_choice else 1)
        expected = (handle.num_recv_tokens, *((handle.num_topk,) if by_choice else ()))
        if row_weights.shape != expected:
            raise ValueError(
                f"row_weights must have shape {expected}, got {tuple(row_weights.shape)}"
            )
        _check_weight_dtype("row_weights", row_weights, rows_dtype)


def check_weighted_gradient(
    gradient: torch.Tensor, expert_out: torch.Tensor, weights: torch.Tensor
) -> None:
    """Input of the local backward of weights applied in combine."""
    _check_tensor("gradient", gradient, 2)
    _check_tensor("expert_out", expert_out, 2)
    _check_tensor("weights", weights, 1)
    if gradient.dtype not in SUMMABLE or expert_out.dtype is not gradient.dtype:
        raise TypeError(
            f"gradient and expert_out must have one summable dtype, got {gradient.dtype} and "
            f"{expert_out.dtype}"
        )
    if gradient.shape != expert_out.shape or weights.shape != gradient.shape[:1]:
        raise ValueError(
            f"gradient {tuple(gradient.shape)}, expert_out {tuple(expert_out.shape)} and weights "
            f"{tuple(weights.shape)} do not fit"
        )
    _check_weight_dtype("weights", weights, gradient.dtype)


def _check_tensor(name: str, tensor: torch.Tensor, num_dims: int) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dim() != num_dims:
        raise ValueError(f"{name} must have {num_dims} dimensions, got shape {tuple(tensor.shape)}")
    if not tensor.is_cpu:
        raise ValueError(f"{name} must be on cpu, got {tensor.device}")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous, got shape {tuple(tensor.shape)} with strides {tensor.stride()}"
        )


def _check_weights(
    weights: torch.Tensor | None, num_tokens: int, num_topk: int, rows_dtype: torch.dtype
) -> None:
    if weights is None:
        return
    _check_tensor("topk_weights", weights, 2)
    if weights.shape != (num_tokens, num_topk):
        raise ValueError(
            f"topk_weights must have shape ({num_tokens}, {num_topk}), got {tuple(weights.shape)}"
        )
    _check_weight_dtype("topk_weights", weights, rows_dtype)


def _check_weight_dtype(name: str, weights: torch.Tensor, rows_dtype: torch.dtype) -> None:
    if weights.dtype is torch.float32:
        return
    if weights.dtype is torch.float64 and rows_dtype is torch.float64:
        return
    raise TypeError(
        f"{name} must be torch.float32 (or torch.float64 with float64 rows), got {weights.dtype}"
    )


def _check_alignment(expert_alignment: int) -> None:
    if isinstance(expert_alignment, bool) or not isinstance(expert_alignment, int):
        raise TypeError(f"expert_alignment must be an int, got {expert_alignment!r}")
    if not 1 <= expert_alignment < 2**31:
        raise ValueError(f"expert_alignment must be in [1, 2**31), got {expert_alignment}")
