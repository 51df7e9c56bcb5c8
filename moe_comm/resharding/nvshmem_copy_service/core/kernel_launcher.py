"""Executes the copies of a plan."""

from __future__ import annotations

from typing import Any

import torch

from moe_comm.peers.communicator import Communicator
from moe_comm.resharding.nvshmem_copy_service.nvshmem_types import CopyPlan

__all__ = ["KernelLauncher"]


class KernelLauncher:
    """Packs tensors into slots and unpacks them.

    On the CPU a launch copies at once in native code, without the interpreter lock: into slots
    through the caches, because the slot is read next; out of them past the caches.

    Args:
        communicator: Whose native code copies; needed on the CPU.
        device: "cpu"; this build has no kernels for "cuda".
    """

    def __init__(
        self, communicator: Communicator | None = None, device: str | torch.device = "cpu"
    ) -> None:
        self.communicator = communicator
        self.device = torch.device(device)
        self.is_loaded = False
        self.pack_stream: Any = None
        self.unpack_stream: Any = None

    def load_kernels(self) -> None:
        """Make ready to launch. Local.

        Raises:
            RuntimeError: There are no kernels for the device, or no communicator.
            ValueError: The communicator has no native code.
        """
        if self.device.type != "cpu":
            raise RuntimeError(
                "this build of moe_comm has no CUDA kernels: it moves CPU tensors, got device "
                f"{self.device}"
            )
        if self.communicator is None:
            raise RuntimeError("KernelLauncher needs a communicator to copy on the CPU")
        self.communicator.require_native()
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
        self._launch(gpu_plan, torch_pack_stream_wrapper, pack_event, is_streaming=False)

    def launch_unpack(
        self,
        gpu_plan: CopyPlan | None,
        unpack_stream: Any,
        torch_unpack_stream_wrapper: Any,
        unpack_event: Any,
    ) -> None:
        """Copy from a slot into tensors, then record `unpack_event`. Nothing for an empty plan."""
        self._launch(gpu_plan, torch_unpack_stream_wrapper, unpack_event, is_streaming=True)

    def copy(self, plan: CopyPlan, *, is_streaming: bool) -> None:
        """Copy every chunk of `plan`; sources and destinations do not overlap.

        Raises:
            RuntimeError: The kernels are not loaded.
        """
        if not self.is_loaded or self.communicator is None:
            raise RuntimeError("the kernels are not loaded; call load_kernels() first")
        src, dst, sizes, num_chunks = plan
        self.communicator.require_native().copy_chunks(
            src[:num_chunks], dst[:num_chunks], sizes[:num_chunks], is_streaming=is_streaming
        )

    def _launch(
        self, gpu_plan: CopyPlan | None, wrapper: Any, event: Any, *, is_streaming: bool
    ) -> None:
        if gpu_plan is None or gpu_plan[3] == 0:
            return
        self.copy(gpu_plan, is_streaming=is_streaming)
        event.record(stream=wrapper)
