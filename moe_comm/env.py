"""Every environment variable the package reads, in one place.

Features are arguments; these exist for debugging and for the build. `docs/environment.md` holds
the table that a test compares with this file.
"""

from __future__ import annotations

import os
import re

__all__ = [
    "columns",
    "compat_names",
    "cuda_max_connections",
    "cuda_mps_pipe_directory",
    "force_isa",
    "launched_ranks",
    "launcher_world_size",
    "master_address",
    "mpi_job",
    "nvshmem_home",
    "poison_windows",
    "sglang_num_max_dispatch_tokens_per_rank",
    "sglang_plugins",
    "socket_interface",
    "trace_path",
    "vllm_is_asked",
]


def _is_on(value: str) -> bool:
    return value not in ("", "0")


def _names(value: str) -> tuple[str, ...]:
    """Return the names between commas."""
    return tuple(name.strip() for name in value.split(",") if name.strip())


def poison_windows() -> bool:
    """`MOE_COMM_POISON=1`: fill every window with 0xFF when it is handed out, so unwritten rows show."""
    return _is_on(os.environ.get("MOE_COMM_POISON", "0"))


def trace_path() -> str | None:
    """`MOE_COMM_TRACE=PATH`: record phases of every operation and write `PATH.rank<N>.json` at exit."""
    return os.environ.get("MOE_COMM_TRACE") or None


def force_isa() -> str | None:
    """`MOE_COMM_ISA=portable|avx2|avx512`: use this instruction set instead of the best one."""
    return os.environ.get("MOE_COMM_ISA") or None


def compat_names() -> tuple[str, ...]:
    """`MOE_COMM_COMPAT=deep_ep`: names for `compat.install_from_environment`, with commas."""
    return _names(os.environ.get("MOE_COMM_COMPAT", ""))


def vllm_is_asked() -> bool:
    """`MOE_COMM_VLLM=1`: vLLM on CPUs brings tokens to experts of other ranks by this package."""
    return _is_on(os.environ.get("MOE_COMM_VLLM", "0"))


def columns() -> int | None:
    """`COLUMNS`, which terminals and callers set: characters on a line of what is printed."""
    value = os.environ.get("COLUMNS", "")
    return int(value) if value.isdigit() and int(value) > 0 else None


def cuda_max_connections() -> int:
    """`CUDA_DEVICE_MAX_CONNECTIONS`, which CUDA reads: streams of a device that run side by side, 8."""
    return int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8") or "8")


def cuda_mps_pipe_directory() -> str:
    """`CUDA_MPS_PIPE_DIRECTORY`, which CUDA reads: where the MPS daemon listens."""
    return os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"


def launcher_world_size() -> int:
    """`WORLD_SIZE` as torchrun sets it, 1 when absent; guards against a forgotten process group."""
    return int(os.environ.get("WORLD_SIZE", "1") or "1")


def launched_ranks() -> list[tuple[int, int, int]]:
    """Return the ranks that launchers tell this process: (rank, ranks, ranks on its node), one a launcher.

    torchrun, Open MPI, MPICH and Intel MPI, Slurm; -1 for what is missing or no number.
    """
    told = [
        (os.environ.get("RANK"), str(launcher_world_size()), os.environ.get("LOCAL_WORLD_SIZE")),
        (
            os.environ.get("OMPI_COMM_WORLD_RANK"),
            os.environ.get("OMPI_COMM_WORLD_SIZE"),
            os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE"),
        ),
        (
            os.environ.get("PMI_RANK"),
            os.environ.get("PMI_SIZE"),
            os.environ.get("MPI_LOCALNRANKS"),
        ),
        (
            os.environ.get("SLURM_PROCID"),
            os.environ.get("SLURM_STEP_NUM_TASKS"),
            # "4(x2)": four on each of two nodes; "4(x2),3" is uneven and counts as nothing.
            re.sub(r"\(x\d+\)$", "", os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")),
        ),
    ]
    return [
        tuple(int(value) if value and value.isdigit() else -1 for value in values)  # type: ignore[misc]
        for values in told
    ]


def socket_interface() -> str | None:
    """`MOE_COMM_SOCKET_IFNAME`, else `GLOO_SOCKET_IFNAME`: the interface of sockets between nodes."""
    own = os.environ.get("MOE_COMM_SOCKET_IFNAME")
    return own or os.environ.get("GLOO_SOCKET_IFNAME") or None


def master_address() -> str | None:
    """`MASTER_ADDR` as launchers set it: sockets use the interface that leads there."""
    return os.environ.get("MASTER_ADDR") or None


def mpi_job() -> str:
    """`PMIX_NAMESPACE`: which job of an MPI launcher this process belongs to; "" where it is not set."""
    return os.environ.get("PMIX_NAMESPACE", "")


def sglang_num_max_dispatch_tokens_per_rank() -> int:
    """`SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK`, which SGLang reads: of a low-latency batch, 128."""
    return int(os.environ.get("SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", "128") or "128")


def sglang_plugins() -> tuple[str, ...]:
    """`SGLANG_PLUGINS`, which SGLang reads: names of the plugins to run, all of them when empty."""
    return _names(os.environ.get("SGLANG_PLUGINS", ""))


def nvshmem_home() -> str | None:
    """`NVSHMEM_HOME`: where NVSHMEM lies, in place of the wheel's."""
    return os.environ.get("NVSHMEM_HOME") or None
