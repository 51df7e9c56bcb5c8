"""NVSHMEM on this machine: the module that is linked with it, and its host library, found when used."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from types import ModuleType

from moe_comm import env
from moe_comm.peers import agree as agreement
from moe_comm.peers import node_layout
from moe_comm.peers.bootstrap import Bootstrap

NVSHMEM_MODULE = "moe_comm._nvshmem"
HOST_LIBRARY = "libnvshmem_host.so.3"
PACKAGE = "nvidia.nvshmem"


def load_nvshmem_module() -> ModuleType:
    """`moe_comm._nvshmem`.

    Raises:
        ImportError: It was not built.
    """
    return importlib.import_module(NVSHMEM_MODULE)


def find_host_library() -> Path:
    """NVSHMEM's host library: in `NVSHMEM_HOME` where that is set, else of the wheel.

    Raises:
        FileNotFoundError: It is not there; says where it was looked for.
    """
    home = env.nvshmem_home()
    if home is not None:
        path = Path(home) / "lib" / HOST_LIBRARY
        if not path.is_file():
            raise FileNotFoundError(f"NVSHMEM_HOME is {home}, and there is no {path}")
        return path
    try:
        spec = importlib.util.find_spec(PACKAGE)
    except ModuleNotFoundError:  # of the package around it
        spec = None
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    if not folders:
        raise FileNotFoundError(
            "NVSHMEM is not installed: pip install nvidia-nvshmem-cu13, or set NVSHMEM_HOME"
        )
    for folder in folders:
        path = Path(folder) / "lib" / HOST_LIBRARY
        if path.is_file():
            return path
    raise FileNotFoundError(f"the package {PACKAGE} in {folders[0]} has no lib/{HOST_LIBRARY}")


def unusable_reason() -> str | None:
    """Why this process cannot use NVSHMEM, or None. Loads the host library, initializes nothing."""
    try:
        native = load_nvshmem_module()
    except ImportError as error:
        return (
            f"{NVSHMEM_MODULE} cannot be imported ({error}): it is built where nvcc and NVSHMEM "
            "are found, see MOE_COMM_NVSHMEM in docs/environment.md"
        )
    try:
        native.load_host_library(str(find_host_library()))
    except (FileNotFoundError, RuntimeError) as error:
        return str(error)
    return None


def agree(bootstrap: Bootstrap) -> bytes:
    """The unique id by which ranks meet in NVSHMEM; b"" where they have met before. Collective.

    Raises:
        ValueError: A rank lacks what kernels were linked with, two are threads of one process, or
            some have met other ranks before; on every rank.
    """
    reason = unusable_reason()
    unique_id = b""
    is_initialized = False
    if reason is None:
        native = load_nvshmem_module()
        is_initialized = native.is_initialized()
        try:
            if bootstrap.rank_idx == 0 and not is_initialized:
                unique_id = native.make_unique_id()
        except RuntimeError as error:
            reason = str(error)
    process = (str(node_layout.own_machine()), os.getpid())
    said = agreement.agree(bootstrap.all_gather, reason, (process, is_initialized, unique_id))
    processes = [process for process, _, _ in said]
    for rank_idx, process in enumerate(processes):
        first = processes.index(process)
        if first != rank_idx:
            raise ValueError(
                f"ranks {first} and {rank_idx} are threads of one process, which NVSHMEM takes as "
                "one: across nodes ranks with GPUs are processes"
            )
    met = [rank_idx for rank_idx, (_, initialized, _) in enumerate(said) if initialized]
    if met and len(met) < len(said):
        raise ValueError(
            f"NVSHMEM is initialized once in a process: ranks {met} of {len(said)} have done so with "
            "others"
        )
    return bytes(said[0][2])
