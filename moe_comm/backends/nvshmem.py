"""Kernels on NVIDIA GPUs of several nodes: within a node as `cuda`, between nodes by NVSHMEM's puts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_comm.backends.cuda import NUM_THREADS, TOKENS_PER_CHUNK, CudaBackend
from moe_comm.backends.native import Settings

if TYPE_CHECKING:
    from moe_comm import _cuda

__all__ = ["NvshmemBackend"]


class NvshmemBackend(CudaBackend):
    """Operations by kernels, in the order of the caller's current stream; see `Backend`."""

    name = "nvshmem"

    def _make_endpoint(
        self, settings: Settings, agreed: list[tuple[str, str]], num_sms: int
    ) -> _cuda.Endpoint:
        from moe_comm import _nvshmem

        return _nvshmem.Endpoint.create(
            settings.group,
            self._gpu.heap,
            settings.num_experts,
            settings.num_max_tokens,
            settings.expert_rank,
            settings.depth,
            settings.node_reduction,
            agreed,
            num_sms,
            NUM_THREADS,
            TOKENS_PER_CHUNK,
            settings.num_max_topk,
            settings.max_row_bytes,
        )
