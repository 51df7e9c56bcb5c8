"""Differentiable, compilable dispatch and combine.

`SAVED_OPERATORS` is the list for `torch.utils.checkpoint.create_selective_checkpoint_contexts` that
keeps communication out of recomputation.
"""

from __future__ import annotations

from moe_comm.autograd.functional import (
    DifferentiableDispatchResult,
    TensorHandle,
    combine,
    dispatch,
)
from moe_comm.autograd.operators import SAVED_OPERATORS
from moe_comm.autograd.quantized_rows import QuantizedRows

__all__ = [
    "SAVED_OPERATORS",
    "DifferentiableDispatchResult",
    "QuantizedRows",
    "TensorHandle",
    "combine",
    "dispatch",
]
