"""The names of `moe_comm` and where they are; `moe_comm` loads this when one of them is first used.

All at once, so that whoever holds a buffer has the operators registered before a compiler looks at them.
"""

from __future__ import annotations

from moe_comm.ep.autograd import SAVED_OPERATORS as SAVED_OPERATORS
from moe_comm.ep.autograd import QuantizedRows as QuantizedRows
from moe_comm.ep.autograd import combine as combine
from moe_comm.ep.autograd import dispatch as dispatch
from moe_comm.ep.buffer import EpBuffer as EpBuffer
from moe_comm.ep.buffer_manager import BufferManager as BufferManager
from moe_comm.ep.config import Capacity as Capacity
from moe_comm.ep.config import EpConfig as EpConfig
from moe_comm.ep.config import Layout as Layout
from moe_comm.ep.expert_tables import ExpertTables as ExpertTables
from moe_comm.ep.gradient_sum import GradientSum as GradientSum
from moe_comm.ep.handles import CombineResult as CombineResult
from moe_comm.ep.handles import CommEvent as CommEvent
from moe_comm.ep.handles import DispatchHandle as DispatchHandle
from moe_comm.ep.handles import DispatchResult as DispatchResult
from moe_comm.ep.handles import WaitStatistics as WaitStatistics
from moe_comm.ep.placement import Placement as Placement
from moe_comm.ep.planner import plan_placement as plan_placement
from moe_comm.errors import CapacityError as CapacityError
from moe_comm.errors import CommunicationError as CommunicationError
from moe_comm.errors import EvictedError as EvictedError
from moe_comm.errors import PeerFailedError as PeerFailedError
from moe_comm.errors import PeerTimeoutError as PeerTimeoutError
from moe_comm.errors import RefitError as RefitError
from moe_comm.peers.bootstrap import Bootstrap as Bootstrap
from moe_comm.peers.bootstrap import RankThreads as RankThreads
from moe_comm.peers.communicator import Communicator as Communicator
from moe_comm.peers.communicator import HeapStats as HeapStats
from moe_comm.peers.communicator import Recovery as Recovery
from moe_comm.peers.elastic import Grown as Grown
from moe_comm.peers.elastic import Shrunk as Shrunk
from moe_comm.tensors.quantization import FP8_BLOCK128 as FP8_BLOCK128
from moe_comm.tensors.quantization import MXFP8 as MXFP8
from moe_comm.tensors.quantization import Quantization as Quantization
from moe_comm.tensors.quantization import QuantizationFormat as QuantizationFormat
from moe_comm.tensors.quantization import ScaleFormat as ScaleFormat
from moe_comm.tensors.quantized import dequantize as dequantize
from moe_comm.tensors.quantized import quantize as quantize
