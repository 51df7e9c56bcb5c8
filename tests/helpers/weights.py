"""Weights to quantize, and how they are compared."""

from __future__ import annotations

import torch


def weight(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Values over many magnitudes, so that blocks have different scales."""
    magnitude = torch.randint(-6, 6, (*shape[:-1], 1)).float()
    return (torch.randn(shape) * torch.exp2(magnitude)).to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    )
