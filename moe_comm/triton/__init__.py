"""Local tensor work in Triton, with no peer in it: permute, unpermute, quantize, dequantize.

For GPU users of the collective backend. Every result has the bits of `moe_comm.tensors.arithmetic`
and `moe_comm.tensors.quantized`. Works on CUDA tensors, and on CPU tensors in Triton's interpreter
(`TRITON_INTERPRET=1` before Triton is imported). Nothing here is differentiable: inputs that require
a gradient are refused; `moe_comm.dispatch` and `moe_comm.combine` are the differentiable calls.
"""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("triton") is None:
    raise ImportError("moe_comm.triton needs Triton, which is not installed: pip install triton")

from moe_comm.triton.order import ExpertOrder, order_by_expert
from moe_comm.triton.quantize import dequantize, quantize
from moe_comm.triton.rows import gather_rows, permute, unpermute

__all__ = [
    "ExpertOrder",
    "dequantize",
    "gather_rows",
    "order_by_expert",
    "permute",
    "quantize",
    "unpermute",
]
