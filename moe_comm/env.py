"""Every environment variable the package reads, in one place.

Features are arguments; these exist for debugging and for the build. `docs/environment.md` holds
the table that a test compares with this file.
"""

from __future__ import annotations

import os

__all__ = [
    "compat_names",
    "cuda_max_connections",
    "cuda_mps_pipe_directory",
    "force_isa",
    "launcher_world_size",
    "nvshmem_allow_unsupported_version",
    "nvshmem_max_ctas",
    "poison_windows",
    "trace_path",
]


def poison_windows() -> bool:
    """`MOE_COMM_POISON=1`: fill every window with 0xFF when it is handed out, so unwritten rows show."""
    return os.environ.get("MOE_COMM_POISON", "0") not in ("", "0")


def trace_path() -> str | None:
    """`MOE_COMM_TRACE=PATH`: record phases of every operation and write `PATH.rank<N>.json` at exit."""
    return os.environ.get("MOE_COMM_TRACE") or None


def force_isa() -> str | None:
    """`MOE_COMM_ISA=portable|avx2|avx512`: use this instruction set instead of the best one."""
    return os.environ.get("MOE_COMM_ISA") or None


def compat_names() -> tuple[str, ...]:
    """`MOE_COMM_COMPAT=deep_ep`: `compat.install` this name (or several, with commas) at import."""
    value = os.environ.get("MOE_COMM_COMPAT", "")
    return tuple(name.strip() for name in value.split(",") if name.strip())


def cuda_max_connections() -> int:
    """`CUDA_DEVICE_MAX_CONNECTIONS`, which CUDA reads: streams of a device that run side by side, 8."""
    return int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8") or "8")


def cuda_mps_pipe_directory() -> str:
    """`CUDA_MPS_PIPE_DIRECTORY`, which CUDA reads: where the MPS daemon listens."""
    return os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"


def launcher_world_size() -> int:
    """`WORLD_SIZE` as torchrun sets it, 1 when absent; guards against a forgotten process group."""
    return int(os.environ.get("WORLD_SIZE", "1") or "1")


def nvshmem_max_ctas() -> str | None:
    """`NVSHMEM_MAX_CTAS`, which NVSHMEM reads; checked before it is initialised."""
    return os.environ.get("NVSHMEM_MAX_CTAS")


def nvshmem_allow_unsupported_version() -> bool:
    """`MEGATRON_NVSHMEM_ALLOW_UNSUPPORTED_VERSION=1`: take an NVSHMEM older than is known to work."""
    return os.environ.get("MEGATRON_NVSHMEM_ALLOW_UNSUPPORTED_VERSION", "0") == "1"
