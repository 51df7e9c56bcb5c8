"""Copies between tensors and slots."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from moe_comm.resharding.nvshmem_copy_service.nvshmem_types import CopyPlan

__all__ = ["KernelLauncher"]


class KernelLauncher:
    """Packs tensors into slots and unpacks them. On the CPU a launch copies at once.

    Args:
        device: "cpu"; this build has no kernels for "cuda".
    """

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)
        self.is_loaded = False
        self.pack_stream: Any = None
        self.unpack_stream: Any = None

    def load_kernels(self) -> None:
        """Make ready to launch. Local.

        Raises:
            RuntimeError: There are no kernels for the device.
        """
        if self.device.type != "cpu":
            raise RuntimeError(
                "this build of moe_comm has no CUDA kernels for slots: it moves CPU tensors, got "
                f"device {self.device}"
            )
        self.is_loaded = True

    def set_streams(self, pack_stream: Any, unpack_stream: Any) -> None:
        """Name the streams that launches go to."""
        self.pack_stream = pack_stream
        self.unpack_stream = unpack_stream

    def launch_pack(
        self,
        gpu_plan: CopyPlan | None,
        pack_stream: Any,
        torch_pack_stream_wrapper: Any,
        pack_event: Any,
    ) -> None:
        """Copy from tensors into a slot, then record `pack_event`. Nothing for an empty plan."""
        self._launch(gpu_plan, torch_pack_stream_wrapper, pack_event)

    def launch_unpack(
        self,
        gpu_plan: CopyPlan | None,
        unpack_stream: Any,
        torch_unpack_stream_wrapper: Any,
        unpack_event: Any,
    ) -> None:
        """Copy from a slot into tensors, then record `unpack_event`. Nothing for an empty plan."""
        self._launch(gpu_plan, torch_unpack_stream_wrapper, unpack_event)

    def _launch(self, gpu_plan: CopyPlan | None, wrapper: Any, event: Any) -> None:
        if gpu_plan is None or gpu_plan[3] == 0:
            return
        if not self.is_loaded:
            raise RuntimeError("the kernels are not loaded; call load_kernels() first")
        *vectors, num_chunks = gpu_plan
        src, dst, sizes = (vector[:num_chunks].tolist() for vector in vectors)
        for chunk, size in enumerate(sizes):
            if size < 0:
                raise ValueError(f"chunk {chunk} has {size} bytes")
        for to, origin, size in zip(dst, src, sizes, strict=True):
            ctypes.memmove(to, origin, size)
        event.record(stream=wrapper)
