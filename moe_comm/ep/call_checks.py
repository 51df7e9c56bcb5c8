"""Checks of a whole call of one buffer: at a glance where that suffices, else rule by rule."""

from __future__ import annotations

from typing import cast

import torch

from moe_comm.ep import validation
from moe_comm.ep.config import Capacity, EpConfig, Layout
from moe_comm.ep.handles import DispatchHandle
from moe_comm.ep.quantization import Quantization

__all__ = ["CallChecks", "is_plain_combine", "is_plain_dispatch"]

_INT64 = torch.int64
_FLOAT32 = torch.float32


class CallChecks:
    """What the arguments of a buffer's operations must keep.

    Args:
        config: Of the buffer.
        device: Where its rows live.
    """

    def __init__(self, config: EpConfig, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._is_on_cpu = device.type == "cpu"

    def check_dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        layout: Layout,
        expert_alignment: int,
        quantization: Quantization | None,
        capacity: Capacity | None,
        handle: DispatchHandle | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows and scale factors of a dispatch whose arguments keep the rules.

        Raises:
            ValueError: An argument breaks a rule of `EpBuffer.dispatch`.
            TypeError: A dtype or type is wrong.
        """
        if (
            self._is_on_cpu
            and handle is None
            and quantization is None
            and capacity is None
            and is_plain_dispatch(self._config, x, topk_idx, topk_weights, layout, expert_alignment)
        ):
            return cast("torch.Tensor", x), None
        rows, scales = validation.check_rows(x, quantization)
        validation.check_devices(
            self._device, x=rows, sf=scales, topk_idx=topk_idx, topk_weights=topk_weights
        )
        if handle is None:
            validation.check_dispatch(
                self._config,
                rows,
                topk_idx,
                topk_weights,
                layout,
                expert_alignment,
                is_quantized=scales is not None,
            )
            validation.check_capacity(capacity, layout, expert_alignment)
        else:
            validation.check_cached_dispatch(
                handle,
                rows,
                topk_idx,
                topk_weights,
                layout,
                expert_alignment,
                capacity,
                is_quantized=scales is not None or quantization is not None,
            )
        return rows, scales

    def check_combine(
        self,
        handle: DispatchHandle,
        expert_out: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        row_weights: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> None:
        """Arguments of a combine.

        Raises:
            ValueError: An argument breaks a rule of `EpBuffer.combine`.
            TypeError: A dtype or type is wrong.
        """
        if (
            self._is_on_cpu
            and row_weights is None
            and out is None
            and is_plain_combine(handle, expert_out, topk_weights, self._config)
        ):
            return
        validation.check_devices(
            self._device,
            expert_out=expert_out,
            topk_weights=topk_weights,
            row_weights=row_weights,
            out=out,
        )
        validation.check_combine(handle, expert_out, topk_weights, row_weights, out)

    def check_weighted_gradient(
        self, gradient: torch.Tensor, expert_out: torch.Tensor, weights: torch.Tensor
    ) -> None:
        """Arguments of the local backward of weights applied in combine.

        Raises:
            ValueError: Shapes do not fit each other.
            TypeError: A dtype or type is wrong.
        """
        validation.check_devices(
            self._device, gradient=gradient, expert_out=expert_out, weights=weights
        )
        validation.check_weighted_gradient(gradient, expert_out, weights)


def is_plain_dispatch(
    config: EpConfig,
    x: object,
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    layout: Layout,
    expert_alignment: int,
) -> bool:
    """Whether a dispatch of CPU rows, without a pair, is seen at a glance to pass every check.

    A decode step takes longer to check one by one than its rows take to travel. False says nothing:
    the checks decide, and word what is wrong.
    """
    if type(x) is not torch.Tensor or type(topk_idx) is not torch.Tensor:
        return False
    choices = topk_idx.shape
    num_tokens, num_topk = choices if len(choices) == 2 else (-1, -1)
    most_tokens = config.num_max_tokens_per_rank
    if (
        x.dtype is not config.dtype
        or topk_idx.dtype is not _INT64
        or x.shape != (num_tokens, config.hidden)
        or num_topk != config.num_topk
        or not (x.is_cpu and topk_idx.is_cpu and x.is_contiguous() and topk_idx.is_contiguous())
        or x.is_neg()
        or type(layout) is not Layout
        or (layout is Layout.LOW_LATENCY if most_tokens is None else num_tokens > most_tokens)
        or type(expert_alignment) is not int
        or expert_alignment != 1
    ):
        return False
    return topk_weights is None or _is_plain_weights(topk_weights, choices)


def is_plain_combine(
    handle: DispatchHandle,
    expert_out: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    config: EpConfig,
) -> bool:
    """Whether a combine of CPU rows of the configuration is seen at a glance to pass every check.

    Without `row_weights` and `out`. False says nothing, as in `is_plain_dispatch`.
    """
    if (
        type(expert_out) is not torch.Tensor
        or expert_out.dtype is not config.dtype
        or expert_out.dtype not in validation.SUMMABLE
        or expert_out.shape != (handle.num_recv_tokens, config.hidden)
        or not (expert_out.is_cpu and expert_out.is_contiguous())
        or expert_out.is_neg()
    ):
        return False
    return topk_weights is None or (
        handle.layout is not Layout.RANK_MAJOR
        and _is_plain_weights(topk_weights, (handle.num_tokens, handle.num_topk))
    )


def _is_plain_weights(weights: object, shape: tuple[int, ...]) -> bool:
    return (
        type(weights) is torch.Tensor
        and weights.dtype is _FLOAT32
        and weights.shape == shape
        and weights.is_cpu
        and weights.is_contiguous()
    )
