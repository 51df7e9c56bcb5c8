"""Probe whether torch describes tensors in C, as calls that are let through at a glance need it."""

from __future__ import annotations

import pytest
import torch

HAS_DESCRIBED_TENSORS = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
needs_described_tensors = pytest.mark.skipif(
    not HAS_DESCRIBED_TENSORS, reason="this torch describes no tensors in C"
)
