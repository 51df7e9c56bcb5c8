"""Kernels on NVIDIA GPUs of several nodes: within a node as `cuda`, between nodes by NVSHMEM's puts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_comm.ep.backends.cuda import CudaBackend

if TYPE_CHECKING:
    from moe_comm import _cuda


class NvshmemBackend(CudaBackend):
    """Operations by kernels, in the order of the caller's current stream; see `Backend`."""

    name = "nvshmem"

    def _endpoint_class(self) -> type[_cuda.Endpoint]:
        from moe_comm import _nvshmem

        return _nvshmem.Endpoint
