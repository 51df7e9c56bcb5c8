"""Findings of `moe-comm doctor` about GPUs."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from moe_comm import env
from moe_comm.cli.finding import Finding
from moe_comm.peers.cuda_devices import CUDA_MODULE, WITHOUT_P2P, load_cuda_module
from moe_comm.peers.nvshmem import NVSHMEM_MODULE, find_host_library, load_nvshmem_module


def examine_gpus() -> list[Finding]:
    """The module for GPUs, the driver, every device and MPS."""
    try:
        native = load_cuda_module()
    except ImportError as error:
        return [
            Finding.missing(
                "CUDA module",
                f"{CUDA_MODULE} cannot be imported ({error})",
                'backend="cuda" needs it: build with nvcc 12.8 or later in PATH '
                "(MOE_COMM_CUDA=on says why it fails)",
            )
        ]
    version = _version_text(native.CUDA_VERSION)
    module = Finding.here(
        "CUDA module", f"kernels for {native.ARCHITECTURES}, CUDA runtime {version} inside"
    )
    count, reason = native.count_devices()
    driver = _driver(native, count, reason)
    if count == 0:
        return [module, driver]
    devices = [_device(native, idx, count) for idx in range(count)]
    return [module, driver, *devices, _mps()]


def examine_internode() -> list[Finding]:
    """The module for GPUs of several nodes, and NVSHMEM's host library. Initializes nothing."""
    try:
        native = load_nvshmem_module()
    except ImportError as error:
        return [
            Finding.missing(
                "NVSHMEM module",
                f"{NVSHMEM_MODULE} cannot be imported ({error})",
                'backend="nvshmem" needs it: build with nvcc in PATH and pip install '
                "nvidia-nvshmem-cu13 (MOE_COMM_NVSHMEM=on says why it fails)",
            )
        ]
    module = Finding.here(
        "NVSHMEM module",
        f"kernels for {native.ARCHITECTURES}, linked with NVSHMEM {native.NVSHMEM_VERSION}",
    )
    try:
        path = find_host_library()
        version = native.load_host_library(str(path))
    except (FileNotFoundError, RuntimeError) as error:
        library = Finding.missing(
            "NVSHMEM library",
            str(error),
            f'backend="nvshmem" needs the host library of NVSHMEM {native.NVSHMEM_VERSION}: '
            "pip install nvidia-nvshmem-cu13 of that version, or set NVSHMEM_HOME",
        )
    else:
        library = Finding.here("NVSHMEM library", f"version {version} at {path}")
    return [module, library]


def _version_text(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _driver(native: ModuleType, count: int, reason: str) -> Finding:
    version = native.driver_version()
    if count == 0:
        return Finding.missing(
            "CUDA driver",
            reason,
            f'backend="cuda" needs a GPU and a driver for CUDA '
            f"{native.CUDA_VERSION // 1000}.0 or later",
        )
    detail = f"for CUDA {_version_text(version)}, shows {count} device{'s' * (count != 1)}"
    return Finding.here("CUDA driver", detail)


def _device(native: ModuleType, device_idx: int, count: int) -> Finding:
    found: dict[str, Any] = native.describe_device(device_idx)
    major, minor = found["compute_capability"]
    peers = [
        str(idx) for idx in range(count) if idx != device_idx and native.can_reach(device_idx, idx)
    ]
    reached = "no other device" + (f" by P2P: {WITHOUT_P2P}" if count > 1 else "")
    if peers:
        reached = "cuda:" + ", cuda:".join(peers)
    code = _code_for(native.ARCHITECTURES, major, minor)
    detail = (
        f"{found['name']} at {found['pci_bus']}, compute capability {major}.{minor}, "
        f"{found['num_sms']} SMs, {found['memory_bytes'] / 1e9:.0f} GB; "
        f"reaches {reached}"
    )
    if code == "PTX":
        detail += (
            f"; the driver compiles the kernels where its cache has none, as the first communicator is "
            f"made: some 15 s of a core in every process, nothing if built with "
            f"MOE_COMM_CUDA_ARCHS={major}{minor}"
        )
    return Finding(
        name=f"cuda:{device_idx}",
        is_present=code is not None,
        detail=detail,
        remedy=f"kernels were compiled for {native.ARCHITECTURES}: build with "
        f"MOE_COMM_CUDA_ARCHS={major}{minor}",
    )


def _code_for(architectures: str, major: int, minor: int) -> Literal["machine code", "PTX"] | None:
    """Return what a device runs of code for "80, 90a, 100"; its driver compiles PTX. None: nothing.

    Args:
        architectures: As CMake names them, with commas or spaces between. A number alone is machine code with
            PTX, of which `-real` keeps the former and `-virtual` the latter: machine code runs on devices
            of the same major number, PTX on all later ones. `a` at the end is for one compute capability
            only, `f` for those of its family. Any other word counts as machine code that runs.
        major: Major number of the device's compute capability.
        minor: Minor number of the same.
    """
    capability = 10 * major + minor
    found: Literal["PTX"] | None = None
    for architecture in re.split(r"[\s,;]+", architectures.strip()):
        parts = re.fullmatch(r"(\d+)([af]?)(-real|-virtual)?", architecture)
        if parts is None:
            return "machine code"
        number = int(parts[1])
        is_of_family = number // 10 == major and number <= capability
        if number == capability if parts[2] == "a" else is_of_family and parts[3] != "-virtual":
            return "machine code"
        if not parts[2] and parts[3] != "-real" and number <= capability:
            found = "PTX"
    return found


def _mps() -> Finding:
    control = Path(env.cuda_mps_pipe_directory()) / "control"
    if control.exists():
        return Finding.here(
            "MPS", f"a daemon listens in {control.parent}: processes share a GPU side by side"
        )
    return Finding.missing(
        "MPS",
        f"no daemon in {control.parent}",
        "ranks on one GPU as processes take turns; nvidia-cuda-mps-control -d lets them run "
        "side by side",
    )
