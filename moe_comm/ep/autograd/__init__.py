"""Differentiable, compilable dispatch and combine.

`functional` is what users call. Where somebody looks at operators (compilers, modes, profilers) it calls
those of `operators`, whose shapes `fakes` knows, else the buffer itself; both get their gradients in
`formulas`, by what ranks said of them (`gradient_agreement`). Knows `EpBuffer`, and nothing of backends but their
plans.

`SAVED_OPERATORS` is the list for `torch.utils.checkpoint.create_selective_checkpoint_contexts` that
keeps communication out of recomputation.
"""

from __future__ import annotations

from typing import NoReturn

from moe_comm.ep.autograd.functional import combine, dispatch
from moe_comm.ep.autograd.operators import SAVED_OPERATORS
from moe_comm.ep.autograd.quantized_rows import QuantizedRows

__all__ = ["SAVED_OPERATORS", "QuantizedRows", "combine", "dispatch"]

_GONE = {
    "DifferentiableDispatchResult": "moe_comm.DispatchResult",
    "TensorHandle": "moe_comm.DispatchHandle",
}


def __getattr__(name: str) -> NoReturn:
    """Says what to write for a name that is no more."""
    instead = f", which is {_GONE[name]} now" if name in _GONE else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{instead}")
