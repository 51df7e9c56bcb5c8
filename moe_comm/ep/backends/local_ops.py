"""Work on rows of one rank, where they are: plain torch on the CPU, Triton on CUDA where it is installed.

Both give the same bits; Triton reads and writes every row once, plain torch once per step.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import types

import torch

from moe_comm.tensors import arithmetic, quantized
from moe_comm.tensors.quantization import Quantization


def has_triton(device: torch.device) -> bool:
    """Return whether rows on `device` are worked on by Triton."""
    return device.type == "cuda" and _is_triton_installed()


def gather_rows(rows: torch.Tensor, row_idx: torch.Tensor, out: torch.Tensor) -> None:
    """`out[i] = rows[row_idx[i]]`, also from one device to another."""
    row_idx = row_idx.to(rows.device)
    if rows.device != out.device:
        out.copy_(rows.index_select(0, row_idx))
    elif has_triton(rows.device):
        _triton().gather_rows(rows, row_idx, out=out)
    else:
        torch.index_select(rows, 0, row_idx, out=out)


def place_rows(rows: torch.Tensor, row_idx: torch.Tensor, out: torch.Tensor) -> None:
    """`out[i] = rows[row_idx[i]]`, zeros where the index is -1; all on one device."""
    if has_triton(rows.device):
        _triton().gather_rows(rows, row_idx, out=out)
    elif rows.shape[0] == 0:
        out.zero_()
    else:
        torch.index_select(rows, 0, row_idx.clamp(min=0), out=out)
        out[row_idx < 0] = 0


def sum_rows(
    rows: torch.Tensor,
    positions: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add rows like `arithmetic.sum_rows`; `positions` may be on any device."""
    positions = positions.to(rows.device)
    if not has_triton(rows.device):
        return arithmetic.sum_rows(rows, positions, weights, out=out)
    sums: torch.Tensor = _triton().unpermute(rows, positions.contiguous(), weights, out=out)
    return sums


def quantize_rows(x: torch.Tensor, quantization: Quantization) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows like `quantized.quantize_rows`: scale factors row-major, whatever `quantization` says."""
    if not has_triton(x.device):
        return quantized.quantize_rows(x, quantization)
    row_major = dataclasses.replace(quantization, is_column_major=False)
    data, sf = _triton().quantize(x.detach(), row_major)
    return data, sf


@functools.cache
def _is_triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _triton() -> types.ModuleType:
    # Imported on first use: it takes a while, and only GPU users need it.
    return importlib.import_module("moe_comm.triton")
