"""Findings about this machine: what it has for the package, found by trying."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import mmap
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from moe_comm._version import __version__
from moe_comm.cli.bench.environment import (
    cpu_model,
    instruction_set,
    last_level_cache_bytes,
    transparent_huge_pages,
)
from moe_comm.cli.bench.memory import parse_smaps
from moe_comm.cli.bench.peers.mpi_launcher import MpiNotFoundError, find_mpi
from moe_comm.cli.doctor_gpu import examine_gpus, examine_internode
from moe_comm.cli.finding import Finding

__all__ = ["Finding", "collapse_huge_pages", "examine", "self_test"]

HUGE_PAGE_BYTES = 2 << 20
MADV_COLLAPSE = 25
SELF_TEST_TIMEOUT_S = 30.0


def examine() -> list[Finding]:
    """Look at everything; the last finding is a dispatch and combine on the default backend."""
    return [
        Finding.here("moe_comm", __version__, is_required=True),
        _python(),
        Finding.here("torch", torch.__version__, is_required=True),
        _native_module(),
        _processor(),
        _memory(),
        _dev_shm(),
        _memfd(),
        _huge_pages(),
        _pidfd(),
        _mpi(),
        _module("matplotlib", "plots of the benchmark: pip install matplotlib"),
        _module("triton", "tensor work on a GPU with the collective backend: pip install triton"),
        _module("megatron.core", "a client: pip install megatron-core", "megatron-core"),
        _module("torchtitan", "a client: pip install torchtitan"),
        _module("transformers", "a client: pip install transformers accelerate"),
        _module("deep_ep", 'GPU kernels for backend="deep_ep": see its own installation guide'),
        *examine_gpus(),
        *examine_internode(),
        _default_backend(),
    ]


def _python() -> Finding:
    return Finding(
        name="python",
        is_present=sys.version_info >= (3, 10),
        detail=sys.version.split()[0],
        remedy="needs Python 3.10 or later",
        is_required=True,
    )


def _native_module() -> Finding:
    isa = instruction_set()
    if isa is not None:
        return Finding.here("native module", f"uses {isa}", is_required=True)
    return Finding.missing(
        "native module",
        "moe_comm._host cannot be imported",
        "install the wheel, or pip install . with a C++20 compiler",
        is_required=True,
    )


def _processor() -> Finding:
    cores = len(os.sched_getaffinity(0))
    cache_mib = last_level_cache_bytes() / (1 << 20)
    detail = f"{cpu_model()}, {cores} cores for this process, last-level cache {cache_mib:.0f} MiB"
    return Finding.here("processor", detail)


def _memory() -> Finding:
    num_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    detail = f"{num_bytes / 1e9:.1f} GB"
    try:
        text = limit.read_text(encoding="ascii").strip()
    except OSError:
        text = "max"
    if text != "max":
        detail += f", limited to {int(text) / 1e9:.1f} GB by the control group"
    return Finding.here("memory", detail)


def _dev_shm() -> Finding:
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError:
        return Finding.here("/dev/shm", "absent; not used")
    return Finding.here("/dev/shm", f"{size / 1e6:.0f} MB; not used")


def _memfd() -> Finding:
    try:
        os.close(os.memfd_create("moe-comm-doctor", os.MFD_ALLOW_SEALING))
    except (AttributeError, OSError) as error:
        return Finding.missing(
            "memfd",
            str(error),
            "the host backend keeps its windows in memfd segments: needs Linux 3.17 or later",
            is_required=True,
        )
    return Finding.here("memfd", "sealed segments work", is_required=True)


def _huge_pages() -> Finding:
    settings = transparent_huge_pages()
    described = f"enabled={settings['enabled']}, shmem_enabled={settings['shmem_enabled']}"
    num_bytes = collapse_huge_pages()
    if num_bytes > 0:
        detail = f"MADV_COLLAPSE gives shared memory 2 MiB pages ({described})"
        return Finding.here("huge pages", detail)
    return Finding.missing(
        "huge pages",
        f"MADV_COLLAPSE gives shared memory none ({described})",
        "Linux 6.1 or later and memory that is not fragmented: up to a tenth faster; everything works without",
    )


def collapse_huge_pages() -> int:
    """Bytes of a small shared segment that the kernel puts into 2 MiB pages when asked.

    Counted in smaps: the call can succeed and do nothing.
    """
    try:
        fd = os.memfd_create("moe-comm-doctor")
    except (AttributeError, OSError):
        return 0
    try:
        os.ftruncate(fd, 2 * HUGE_PAGE_BYTES)
        inode = os.fstat(fd).st_ino
        with mmap.mmap(fd, 2 * HUGE_PAGE_BYTES) as memory:
            for offset in range(0, len(memory), mmap.PAGESIZE):
                memory[offset] = 1
            word = ctypes.c_char.from_buffer(memory)
            start = -ctypes.addressof(word) % HUGE_PAGE_BYTES
            del word
            try:
                memory.madvise(MADV_COLLAPSE, start, HUGE_PAGE_BYTES)
            except (OSError, ValueError):
                return 0
            smaps = Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace")
            return parse_smaps(smaps, inode=inode).huge_page_bytes
    finally:
        os.close(fd)


def _pidfd() -> Finding:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        return Finding.missing(
            "pidfd",
            str(error),
            "deaths are seen through sockets instead; pidfd needs Linux 5.3 or later",
        )
    namespace = os.readlink("/proc/self/ns/pid")
    detail = f"deaths are seen through it by ranks of the same process namespace ({namespace})"
    return Finding.here("pidfd", detail)


def _mpi() -> Finding:
    try:
        mpi = find_mpi()
    except MpiNotFoundError as missing:
        return Finding.missing(
            "MPI",
            "not complete",
            f'rail="mpi" between nodes and a peer of the benchmark; {missing}',
        )
    detail = f"{mpi.version} ({mpi.path}), mpi4py {importlib.metadata.version('mpi4py')}"
    return Finding.here("MPI", detail)


def _module(name: str, remedy: str, distribution: str | None = None) -> Finding:
    """Return whether a module could be imported; it is not, some take seconds."""
    try:
        is_present = importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # no parent package, or a module put in place by hand
        is_present = name in sys.modules
    shown = distribution or name
    if not is_present:
        return Finding.missing(shown, "not installed", remedy)
    try:
        detail = importlib.metadata.version(shown)
    except importlib.metadata.PackageNotFoundError:
        detail = "importable, version unknown"
    return Finding.here(shown, detail)


def _default_backend() -> Finding:
    problem = _with_time_limit(self_test, SELF_TEST_TIMEOUT_S)
    if problem is None:
        detail = "host: two ranks dispatched and combined, and compared every row"
        return Finding.here("default backend", detail, is_required=True)
    return Finding.missing("default backend", problem, "see the findings above", is_required=True)


def self_test() -> str | None:
    """Dispatch and combine between two ranks that are threads of this process.

    Returns:
        None, or what went wrong.
    """
    from moe_comm.cli.bench.case import BenchCase, make_topk_idx, make_x
    from moe_comm.cli.bench.oracle import check_combine, check_dispatch, run_experts
    from moe_comm.ep.buffer import EpBuffer
    from moe_comm.peers.bootstrap import RankThreads
    from moe_comm.peers.communicator import Communicator

    case = BenchCase(num_ranks=2, num_tokens=16, hidden=256, num_topk=2, num_experts=4)
    ranks = RankThreads(case.num_ranks)
    problems: list[str] = []

    def serve(rank_idx: int) -> None:
        try:
            with (
                Communicator(
                    ranks[rank_idx], backend="host", arrival_timeout_s=10.0
                ) as communicator,
                EpBuffer(communicator, case.config) as buffer,
            ):
                result = buffer.dispatch(make_x(case, rank_idx), make_topk_idx(case, rank_idx))
                expert_out = buffer.empty_expert_output(result.handle)
                run_experts(case, rank_idx, result.x, expert_out)
                sums = buffer.combine(expert_out, result.handle)
                checks = (
                    check_dispatch(case, rank_idx, result.x),
                    check_combine(case, rank_idx, sums),
                )
                problems.extend(problem for problem in checks if problem is not None)
        except Exception as error:  # noqa: BLE001  whatever it is, it is the finding
            problems.append(f"rank {rank_idx}: {type(error).__name__}: {error}")

    threads = [
        threading.Thread(target=serve, args=(i,), daemon=True) for i in range(case.num_ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return "; ".join(problems) if problems else None


def _with_time_limit(test: Callable[[], str | None], timeout_s: float) -> str | None:
    outcome: list[str | None] = [f"did not end within {timeout_s} s"]

    def run() -> None:
        try:
            outcome[0] = test()
        except Exception as error:  # noqa: BLE001  whatever it is, it is the finding
            outcome[0] = f"{type(error).__name__}: {error}"

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return outcome[0]
