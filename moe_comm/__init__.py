"""Expert-parallel communication for Mixture-of-Experts models.

Start with `Communicator`, `EpConfig` and `EpBuffer`; `dispatch` and `combine` are the differentiable
forms of the buffer's operations.
"""

from __future__ import annotations

from moe_comm import compat as compat
from moe_comm.ep.autograd import SAVED_OPERATORS, QuantizedRows, combine, dispatch
from moe_comm.ep.buffer import EpBuffer
from moe_comm.ep.buffer_manager import BufferManager
from moe_comm.ep.config import Capacity, EpConfig, Layout
from moe_comm.ep.gradient_sum import GradientSum
from moe_comm.ep.handles import (
    CombineResult,
    CommEvent,
    DispatchHandle,
    DispatchResult,
    WaitStatistics,
)
from moe_comm.errors import (
    CapacityError,
    CommunicationError,
    EvictedError,
    PeerFailedError,
    PeerTimeoutError,
    RefitError,
)
from moe_comm.peers.bootstrap import Bootstrap, RankThreads
from moe_comm.peers.communicator import Communicator, HeapStats, Recovery
from moe_comm.peers.elastic import Grown, Shrunk
from moe_comm.tensors.quantization import (
    FP8_BLOCK128,
    MXFP8,
    Quantization,
    QuantizationFormat,
    ScaleFormat,
)
from moe_comm.tensors.quantized import dequantize, quantize

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
    "GradientSum",
    "Grown",
    "HeapStats",
    "Layout",
    "PeerFailedError",
    "PeerTimeoutError",
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
    "quantize",
]
