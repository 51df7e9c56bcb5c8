"""The header of a result: without it two numbers cannot be compared."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from moe_comm._version import __version__


def collect_environment() -> dict[str, Any]:
    """Collect everything that the numbers of this run depend on, apart from the case."""
    return {
        "version": __version__,
        "commit": _commit(),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "last_level_cache_bytes": last_level_cache_bytes(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "isa": instruction_set(),
        "transparent_huge_pages": transparent_huge_pages(),
        "load_average": os.getloadavg()[0],
    }


def cpu_model() -> str:
    """Name, family and model of the processor: one name covers several generations."""
    fields: dict[str, str] = {}
    try:
        for line in (
            Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
        ):
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    except OSError:
        return platform.processor() or "unknown"
    name = fields.get("model name") or platform.machine()
    if "cpu family" in fields:
        name += f" (family {fields['cpu family']} model {fields.get('model', '?')})"
    return name


def last_level_cache_bytes() -> int:
    """Size of the largest cache of the first core, 0 if unknown."""
    sizes = [0]
    for size_file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = size_file.read_text(encoding="ascii").strip()
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KMG")) * unit)
    return max(sizes)


def instruction_set() -> str | None:
    """Return the instruction set that the native module would use here, None without one."""
    try:
        from moe_comm import _host
    except ImportError:
        return None
    return str(_host.kernels.best_instruction_set())


def transparent_huge_pages() -> dict[str, str]:
    """The kernel's settings for anonymous and for shared memory."""
    settings = {}
    for name in ("enabled", "shmem_enabled"):
        path = Path("/sys/kernel/mm/transparent_hugepage") / name
        try:
            chosen = path.read_text(encoding="ascii")
        except OSError:
            settings[name] = "absent"
            continue
        settings[name] = chosen[chosen.find("[") + 1 : chosen.find("]")]
    return settings


def _commit() -> str | None:
    """Commit of the checkout this package lies in, None for an installed one."""
    folder = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
            timeout=10.0,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
