"""Types of the module for NVIDIA GPUs; see csrc/bindings/cuda."""

from typing import Any

import torch

from moe_comm import _host
from moe_comm.ep.backends.native_endpoint import NativeEndpoint, Settings

ARCHITECTURES: str
CUDA_VERSION: int

def driver_version() -> int: ...
def count_devices() -> tuple[int, str]: ...
def describe_device(device_idx: int) -> dict[str, Any]: ...
def can_reach(device_idx: int, peer_device_idx: int) -> bool: ...
def set_warning_interval(seconds: float) -> None: ...

class Heap:
    num_sms: int
    has_bulk_copies: bool
    sharing: str
    @staticmethod
    def create(
        group: _host.Group, device_idx: int, max_connections: int, limit_bytes: int, poison: bool
    ) -> Heap: ...
    def reserve(self, num_bytes: int) -> None: ...
    def empty(self, num_bytes: int) -> Any: ...
    def use_on(self, stream: int) -> None: ...
    def strided_copies(
        self,
        targets: list[torch.Tensor],
        sources: list[torch.Tensor],
        stream: int,
        num_sms: int = 0,
    ) -> None: ...
    def stats(self) -> dict[str, int]: ...

class Endpoint(NativeEndpoint):  # type: ignore[misc]  # whose methods it has
    @staticmethod
    def create(
        settings: Settings, heap: Heap, num_sms: int, num_threads: int, tokens_per_chunk: int
    ) -> Endpoint: ...
    def set_caller_stream(self, handle: int) -> None: ...
