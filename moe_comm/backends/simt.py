"""GPU kernels without a GPU: the CUDA backend's own kernels on an emulator of fibers.

For tests: every thread of a kernel is a fiber, so an operation takes milliseconds where the host
backend takes microseconds. Ranks are processes or threads over the shared-memory heap, as with the
host backend; ranks of other nodes are reached by an emulated network card.
"""

from __future__ import annotations

from moe_comm import _simt
from moe_comm.backends.native import NativeBackend, Settings

__all__ = ["SimtBackend"]

# Enough blocks, warps and chunks to differ from one of each; more only make fibers take turns.
NUM_SMS = 2
NUM_THREADS = 64
TOKENS_PER_CHUNK = 16


class SimtBackend(NativeBackend):
    """Operations by emulated kernels; see `Backend`."""

    name = "simt"
    has_node_reduction = True

    def _create_endpoint(self, settings: Settings) -> _simt.Endpoint:
        return _simt.Endpoint.create(settings, NUM_SMS, NUM_THREADS, TOKENS_PER_CHUNK)
