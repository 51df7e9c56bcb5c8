"""Expert-parallel communication for Mixture-of-Experts models.

Start with `Communicator`, `EpConfig` and `EpBuffer`; `dispatch` and `combine` are the differentiable
forms of the buffer's operations. `import moe_comm` loads little; the first name that is used loads what
all of them need.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from moe_comm import compat as compat
from moe_comm._version import __version__ as __version__

if TYPE_CHECKING:
    from moe_comm.names import *

__all__ = [
    "FP8_BLOCK128",
    "MXFP8",
    "SAVED_OPERATORS",
    "Bootstrap",
    "BufferManager",
    "Capacity",
    "CapacityError",
    "CombineResult",
    "CommEvent",
    "CommunicationError",
    "Communicator",
    "DispatchHandle",
    "DispatchResult",
    "EpBuffer",
    "EpConfig",
    "EvictedError",
    "ExpertTables",
    "GradientSum",
    "Grown",
    "HeapStats",
    "Layout",
    "PeerFailedError",
    "PeerTimeoutError",
    "Placement",
    "Quantization",
    "QuantizationFormat",
    "QuantizedRows",
    "RankThreads",
    "Recovery",
    "RefitError",
    "ScaleFormat",
    "Shrunk",
    "WaitStatistics",
    "combine",
    "dequantize",
    "dispatch",
    "plan_placement",
    "quantize",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Return a public name, with which all of them are loaded, or a module of the package."""
        if name in __all__:
            names = importlib.import_module("moe_comm.names")
            # An object that a caller has put in the place of a name stays.
            globals().update({each: getattr(names, each) for each in {*__all__} - {*globals()}})
            return globals()[name]
        missing = f"module {__name__!r} has no attribute {name!r}"
        if name.startswith("_") or not name.isidentifier():
            raise AttributeError(missing)
        try:
            return importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
            raise AttributeError(missing) from None

    def __dir__() -> list[str]:
        """List public names, loaded or not, and what a module has."""
        return sorted({*globals(), *__all__})
