"""Types of the module for GPUs of several nodes; see csrc/bindings/nvshmem. The rest is as in `_cuda`."""

from typing import Any

from moe_comm import _cuda, _host

ARCHITECTURES: str
CUDA_VERSION: int
NVSHMEM_VERSION: str

def driver_version() -> int: ...
def count_devices() -> tuple[int, str]: ...
def describe_device(device_idx: int) -> dict[str, Any]: ...
def can_reach(device_idx: int, peer_device_idx: int) -> bool: ...
def set_warning_interval(seconds: float) -> None: ...
def load_host_library(path: str) -> str: ...
def is_initialized() -> bool: ...
def make_unique_id() -> bytes: ...

Endpoint = _cuda.Endpoint

class InternodeHeap(_cuda.Heap):
    gpu_sharing: str
    @staticmethod
    def create(  # type: ignore[override]
        group: _host.Group,
        device_idx: int,
        max_connections: int,
        limit_bytes: int,
        poison: bool,
        unique_id: bytes,
    ) -> InternodeHeap: ...
