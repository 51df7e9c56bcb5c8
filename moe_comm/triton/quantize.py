"""Quantize and dequantize rows by blocks."""

from __future__ import annotations

import torch
import triton

from moe_comm.tensors.quantization import (
    QUANTIZABLE_DTYPES,
    Quantization,
    ScaleFormat,
    refusal,
    scale_column_stride,
)
from moe_comm.triton.checks import (
    check_dtype,
    check_no_gradient,
    check_tensor,
    int_view,
    on_device,
    rows_view,
)
from moe_comm.triton.quantize_kernels import dequantize_kernel, quantize_kernel

_ELEMENTS_PER_PROGRAM = 1024


def quantize(x: torch.Tensor, quantization: Quantization) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows as a dispatch with `quantization` does, bit for bit.

    Args:
        x: `[num_rows, hidden]`, bfloat16, float16 or float32, contiguous; any hidden.
        quantization: Format, scale factors and their order.

    Returns:
        data, float8_e4m3fn `[num_rows, hidden]`, and scale factors `[num_rows, num_scales]` as
        `Quantization` says; what fills up a stride of column-major ones is zero.

    Raises:
        ValueError: x is not two-dimensional or not contiguous, or the kernel cannot make such rows.
        TypeError: A dtype or type is wrong.
    """
    _check_quantization("the Triton kernel", quantization)
    check_no_gradient(x=x)
    check_tensor("x", x, 2)
    check_dtype("x", x, *QUANTIZABLE_DTYPES)
    num_rows, hidden = x.shape
    data = torch.empty(num_rows, hidden, dtype=torch.float8_e4m3fn, device=x.device)
    sf = _empty_scales(num_rows, quantization.num_scales(hidden), quantization, x.device)
    if data.numel() == 0:
        return data, sf
    is_ue8m0 = quantization.scale_format is ScaleFormat.UE8M0
    num_stored_blocks = sf.shape[1] * _pack(quantization)
    num_blocks_per_program = _num_blocks_per_program(quantization)
    assert quantization.scale_format is not None  # the constructor fills it in
    row_stride, column_stride = (
        stride * (sf.element_size() if is_ue8m0 else 1) for stride in sf.stride()
    )
    with on_device(x):
        quantize_kernel[(num_rows, triton.cdiv(num_stored_blocks, num_blocks_per_program))](
            rows_view(x),
            int_view(data),
            _bytes_from(sf) if is_ue8m0 else int_view(sf),
            hidden,
            num_stored_blocks,
            row_stride,
            column_stride,
            block=quantization.format.block,
            pack=_pack(quantization),
            num_blocks_per_program=num_blocks_per_program,
            scale_form=int(quantization.scale_format),
            least_amax=quantization.format.least_amax,
            is_bfloat16=x.dtype == torch.bfloat16,
            enable_fp_fusion=False,
        )
    return data, sf


def dequantize(
    data: torch.Tensor,
    sf: torch.Tensor,
    quantization: Quantization,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """`data * scale`, one float32 product of every element, rounded to `dtype`.

    Args:
        data: float8_e4m3fn `[num_rows, hidden]`, contiguous.
        sf: Scale factors `[num_rows, num_scales]`, any strides.
        quantization: Format and scale factors; the order of `sf` follows from its strides.
        dtype: bfloat16, float16 or float32.

    Returns:
        `[num_rows, hidden]` of `dtype`; NaN wherever a block held a NaN or an infinity.

    Raises:
        ValueError: Shapes do not fit; both are named. Or the kernel cannot read such rows.
        TypeError: A dtype or type is wrong.
    """
    _check_quantization("the Triton kernel", quantization)
    check_tensor("data", data, 2)
    check_dtype("data", data, quantization.data_dtype)
    check_dtype("sf", sf, quantization.sf_dtype)
    if dtype not in QUANTIZABLE_DTYPES:
        names = ", ".join(str(each) for each in QUANTIZABLE_DTYPES)
        raise TypeError(f"dtype must be one of {names}, got {dtype}")
    num_rows, hidden = data.shape
    shape = (num_rows, quantization.num_scales(hidden))
    if sf.shape != shape or sf.device != data.device:
        raise ValueError(
            f"sf must have shape {shape} on {data.device}, got {tuple(sf.shape)} on {sf.device}"
        )
    out = torch.empty(num_rows, hidden, dtype=dtype, device=data.device)
    if out.numel() == 0:
        return out
    num_blocks_per_program = _num_blocks_per_program(quantization)
    num_groups = triton.cdiv(quantization.num_blocks(hidden), num_blocks_per_program)
    with on_device(data):
        dequantize_kernel[(num_rows, num_groups)](
            int_view(data),
            sf.view(torch.uint8) if sf.dtype is torch.float8_e8m0fnu else sf.detach(),
            int_view(out),
            hidden,
            *sf.stride(),
            block=quantization.format.block,
            pack=_pack(quantization),
            num_blocks_per_program=num_blocks_per_program,
            is_ue8m0=quantization.scale_format is ScaleFormat.UE8M0,
            itemsize=dtype.itemsize,
            is_bfloat16=dtype == torch.bfloat16,
            enable_fp_fusion=False,
        )
    return out


def _pack(quantization: Quantization) -> int:
    return 4 if quantization.is_packed else 1


def _num_blocks_per_program(quantization: Quantization) -> int:
    return _ELEMENTS_PER_PROGRAM // quantization.format.block


def _empty_scales(
    num_rows: int, num_scales: int, quantization: Quantization, device: torch.device
) -> torch.Tensor:
    dtype = quantization.sf_dtype
    if not quantization.is_column_major:
        return torch.empty(num_rows, num_scales, dtype=dtype, device=device)
    stride = scale_column_stride(num_rows, dtype.itemsize)
    return torch.zeros(num_scales, stride, dtype=dtype, device=device)[:, :num_rows].T


def _bytes_from(sf: torch.Tensor) -> torch.Tensor:
    """All memory of scale factors, whose strides a view as bytes would refuse."""
    return sf.as_strided((sf.untyped_storage().nbytes() // sf.element_size(),), (1,)).view(
        torch.uint8
    )


def _check_quantization(who: str, quantization: object) -> None:
    if not isinstance(quantization, Quantization):
        raise TypeError(f"quantization must be a Quantization, got {quantization!r}")
    block = quantization.format.block
    # A program takes whole blocks, of sizes that Triton has.
    if not quantization.is_e4m3 or block & (block - 1) or block > _ELEMENTS_PER_PROGRAM:
        raise ValueError(refusal(who, quantization))
