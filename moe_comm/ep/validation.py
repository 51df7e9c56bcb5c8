"""Checks of what one rank can see of its own input. Messages hold both values."""

from __future__ import annotations

import torch

from moe_comm.arguments import as_dense, check_resolved
from moe_comm.ep.call_options import DispatchOptions
from moe_comm.ep.config import Capacity, EpConfig, Layout
from moe_comm.ep.handles import DispatchHandle
from moe_comm.ep.limits import ROW_BYTES_MULTIPLE
from moe_comm.tensors.memory import check_memory
from moe_comm.tensors.memory_overlap import shares_bytes
from moe_comm.tensors.quantization import QUANTIZABLE_DTYPES, Quantization

SUMMABLE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_CPU = torch.device("cpu")


def check_apart(name: str, written: torch.Tensor, **read: torch.Tensor | None) -> None:
    """Check that `written`, called `name`, shares no bytes with the tensors in `read`, given by name."""
    for other, tensor in read.items():
        if tensor is not None and shares_bytes(written, tensor):
            raise ValueError(
                f"{name} and {other} share bytes: {name} is written while {other} is read; got "
                f"{name} {_place_of(written)} and {other} {_place_of(tensor)}"
            )


def check_devices(device: torch.device, **tensors: object) -> None:
    """Every tensor among `tensors`, by name, lives on `device`."""
    # A device makes the text of its type anew each time, and torch looks twice at what is no tensor.
    is_cpu = device == _CPU or device.type == "cpu"
    for name, tensor in tensors.items():
        if tensor is None or not isinstance(tensor, torch.Tensor):
            continue
        if not (tensor.is_cpu if is_cpu else tensor.device == device):
            raise ValueError(f"{name} must be on {device}, got {tensor.device}")


def check_row(name: str, hidden: int, dtype: torch.dtype) -> None:
    """Rows of `hidden` elements can be moved."""
    row_bytes = hidden * dtype.itemsize
    if hidden < 1 or row_bytes % ROW_BYTES_MULTIPLE:
        raise ValueError(
            f"{name}: a row must be a positive multiple of {ROW_BYTES_MULTIPLE} bytes, got {hidden} "
            f"elements of {dtype} = {row_bytes} bytes"
        )


def check_rows(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor], quantization: Quantization | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows and their scale factors as given, or None where rows are not quantized yet."""
    if not isinstance(x, tuple):
        is_tensor = isinstance(x, torch.Tensor)
        if quantization is not None and is_tensor and x.dtype not in QUANTIZABLE_DTYPES:
            names = ", ".join(str(dtype) for dtype in QUANTIZABLE_DTYPES)
            raise TypeError(f"rows that are to be quantized must be {names}, got {x.dtype}")
        return x, None
    if len(x) != 2:
        raise ValueError(f"quantized rows are a pair (data, sf), got {len(x)} values")
    data, scales = x
    _check_tensor("data", data, 2)
    _check_tensor("sf", scales, 2, is_strided=True)
    if data.dtype.itemsize != 1:
        raise TypeError(f"data of quantized rows must be of a one-byte dtype, got {data.dtype}")
    if scales.shape[0] != data.shape[0] or scales.shape[1] < 1:
        raise ValueError(
            f"sf must have shape ({data.shape[0]}, num_scales >= 1), got {tuple(scales.shape)}"
        )
    if scales.dtype.itemsize > 8:
        raise TypeError(f"sf must have elements of at most 8 bytes, got {scales.dtype}")
    if quantization is not None:
        channels = data.shape[1] * 8 // quantization.format.element_bits
        num_scales = quantization.num_scales(channels)
        if scales.shape[1] != num_scales:
            raise ValueError(
                f"{quantization} has {num_scales} scale factors for {channels} channels, sf has "
                f"shape {tuple(scales.shape)}"
            )
        if scales.dtype.itemsize != quantization.sf_dtype.itemsize:
            raise TypeError(
                f"{quantization} has scale factors of {quantization.sf_dtype}, got {scales.dtype}"
            )
    return data, scales


def check_dispatch(
    config: EpConfig,
    x: torch.Tensor,
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    options: DispatchOptions,
    *,
    is_quantized: bool,
) -> None:
    """Input of a dispatch that exchanges counts; `is_quantized`: x is the data of a pair."""
    layout, expert_alignment = options.layout, options.expert_alignment
    if topk_idx is None:
        raise ValueError("topk_idx is None, which needs a handle")
    _check_tensor("x", x, 2)
    _check_tensor("topk_idx", topk_idx, 2)
    if not is_quantized and config.dtype is not None and x.dtype is not config.dtype:
        raise TypeError(f"x must have the configured dtype {config.dtype}, got {x.dtype}")
    _check_real("x", x)
    if topk_idx.dtype is not torch.int64:
        raise TypeError(f"topk_idx must be torch.int64, got {topk_idx.dtype}")
    num_tokens, hidden = x.shape
    if config.hidden is not None and hidden != config.hidden:
        raise ValueError(f"x must have the configured hidden {config.hidden}, got {hidden}")
    if not is_quantized and (config.hidden is None or config.dtype is None):
        check_row("x", hidden, x.dtype)
    if hidden < 1:
        raise ValueError(f"x must have at least one column, got shape {tuple(x.shape)}")
    most_tokens = config.num_max_tokens_per_rank
    if most_tokens is not None and num_tokens > most_tokens:
        raise ValueError(
            f"x has {num_tokens} tokens, more than the configured num_max_tokens_per_rank = "
            f"{most_tokens}"
        )
    num_topk = topk_idx.shape[1] if config.num_topk is None else config.num_topk
    if topk_idx.shape != (num_tokens, num_topk):
        raise ValueError(
            f"topk_idx must have shape ({num_tokens}, {num_topk}), got {tuple(topk_idx.shape)}"
        )
    if num_topk < 1:
        raise ValueError(f"topk_idx must have at least one column, got {tuple(topk_idx.shape)}")
    _check_weights(topk_weights, num_tokens, num_topk, x.dtype)
    if layout is Layout.LOW_LATENCY:
        if most_tokens is None:
            raise ValueError(
                "Layout.LOW_LATENCY needs a configured num_max_tokens_per_rank, got None"
            )
        if expert_alignment != 1:
            raise ValueError(
                f"Layout.LOW_LATENCY has experts at fixed places, expert_alignment must be 1, got "
                f"{expert_alignment}"
            )
    check_capacity(options.capacity, layout, expert_alignment)


def check_capacity(capacity: Capacity | None, layout: Layout, expert_alignment: int) -> None:
    """Limits that go with a layout and an alignment."""
    if capacity is None:
        return
    if layout is Layout.LOW_LATENCY:
        raise ValueError("Layout.LOW_LATENCY has a shape of its own, capacity must be None")
    if layout is Layout.RANK_MAJOR and (
        capacity.on_overflow == "drop" or capacity.num_rows_per_expert is not None
    ):
        raise ValueError(
            f'Layout.RANK_MAJOR takes a capacity of rows with "grow" or "raise", got {capacity}'
        )
    if layout is Layout.EXPERT_MAJOR and (capacity.num_rows or 0) % expert_alignment:
        raise ValueError(
            f"num_rows of a capacity must be a multiple of expert_alignment = {expert_alignment}, "
            f"got {capacity.num_rows}"
        )


def _check_real(name: str, rows: torch.Tensor) -> None:
    """Gradients are sums of real numbers."""
    if rows.is_complex() and rows.requires_grad:
        raise TypeError(
            f"{name} must be real where it requires a gradient, got {rows.dtype}: give "
            f"torch.view_as_real({name}).flatten(1)"
        )


def check_cached_dispatch(
    handle: DispatchHandle,
    x: torch.Tensor,
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    options: DispatchOptions,
    *,
    is_quantized: bool,
) -> None:
    """Input of a dispatch to the places of `handle`; `is_quantized`: rows travel as bytes."""
    layout, expert_alignment = options.layout, options.expert_alignment
    if topk_idx is not None:
        raise ValueError("topk_idx must be None with a handle, which already holds the choices")
    if layout is not Layout.EXPERT_MAJOR and layout != handle.layout:
        raise ValueError(f"layout is {layout!r}, the handle's is {handle.layout!r}")
    if expert_alignment not in (1, handle.expert_alignment):
        raise ValueError(
            f"expert_alignment is {expert_alignment}, the handle's is {handle.expert_alignment}"
        )
    if options.capacity is not None:
        raise ValueError(f"the capacity of the handle holds, got {options.capacity}")
    _check_tensor("x", x, 2)
    _check_real("x", x)
    num_tokens, hidden = x.shape
    if num_tokens != handle.num_tokens:
        raise ValueError(
            f"x has {num_tokens} tokens, the handle's dispatch had {handle.num_tokens}"
        )
    if not is_quantized:
        check_row("x", hidden, x.dtype)
    elif hidden < 1:
        raise ValueError(f"x must have at least one column, got shape {tuple(x.shape)}")
    _check_weights(topk_weights, num_tokens, handle.num_topk, x.dtype)


def check_handle(handle: object, buffer_id: int, generation: int) -> None:
    """A handle of a buffer, in the generation that the buffer is at."""
    if not isinstance(handle, DispatchHandle):
        raise TypeError(f"handle must be a DispatchHandle, got {type(handle).__name__}")
    if handle.buffer_id != buffer_id:
        raise ValueError(f"handle belongs to buffer {handle.buffer_id}, this is buffer {buffer_id}")
    if handle.generation != generation:
        raise ValueError(
            f"handle is of generation {handle.generation} of this buffer, which is at {generation}"
        )


def check_combine(
    handle: DispatchHandle,
    expert_out: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    row_weights: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    """Input of a combine."""
    rows_dtype = torch.float64
    if expert_out is not None:
        _check_tensor("expert_out", expert_out, 2)
        rows_dtype = expert_out.dtype
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
        if handle.layout is Layout.RANK_MAJOR:
            raise ValueError(
                f"topk_weights are not applied by combine for {handle.layout!r}: apply them to the "
                f"rows before combine"
            )
        _check_weights(topk_weights, handle.num_tokens, handle.num_topk, rows_dtype)
    if row_weights is not None:
        by_choice = handle.layout is Layout.RANK_MAJOR
        _check_tensor("row_weights", row_weights, 2 if by_choice else 1)
        expected = (handle.num_recv_tokens, *((handle.num_recv_topk,) if by_choice else ()))
        if row_weights.shape != expected:
            raise ValueError(
                f"row_weights must have shape {expected}, got {tuple(row_weights.shape)}"
            )
        _check_weight_dtype("row_weights", row_weights, rows_dtype)
    if out is not None:
        # Peers read the rows, too, for as long as this rank writes its sums.
        check_apart(
            "out", out, expert_out=expert_out, topk_weights=topk_weights, row_weights=row_weights
        )


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
    check_apart("gradient", gradient, expert_out=expert_out, weights=weights)


def _check_tensor(
    name: str, tensor: torch.Tensor, num_dims: int, *, is_strided: bool = False
) -> None:
    as_dense(name, tensor)
    if type(tensor) is not torch.Tensor and hasattr(tensor, "__tensor_flatten__"):
        raise TypeError(
            f"{name} must be a tensor with memory of its own, got {type(tensor).__name__}"
        )
    if tensor.dim() != num_dims:
        raise ValueError(f"{name} must have {num_dims} dimensions, got shape {tuple(tensor.shape)}")
    if not is_strided and not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous, got shape {tuple(tensor.shape)} with strides {tensor.stride()}"
        )
    check_resolved(name, tensor)
    check_memory(name, tensor)


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


def _place_of(tensor: torch.Tensor) -> str:
    return f"of shape {tuple(tensor.shape)} at 0x{tensor.data_ptr():x}"
