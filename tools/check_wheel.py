"""Installs a wheel into clean environments, each with another torch, and tries it there.

`make check-wheel` runs it on what `make wheel` has built. An environment holds the wheel and what it
asks for, and nothing else; the oldest torch that the package supports and the newest that the package
index has for this Python come from wherever pip is told to look. The CUDA builds of torch
take 7 GB while they are tried.

    python tools/check_wheel.py dist/moe_comm-*.whl [--torch VERSION ...]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "check-wheel"
NEWEST = "newest"


def oldest_torch() -> str:
    """The lowest version that the package's own metadata allows."""
    for line in importlib.metadata.requires("moe-comm") or []:
        requirement = Requirement(line)
        if requirement.name == "torch" and requirement.marker is None:
            return next(each.version for each in requirement.specifier if each.operator == ">=")
    raise SystemExit("moe-comm does not say which torch is the oldest that it supports")


def environment() -> dict[str, str]:
    """This process's variables, without any that could bring another package in."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_CONSTRAINT")
    return {name: value for name, value in os.environ.items() if name not in hidden}


def run(command: Sequence[str | Path], folder: Path) -> None:
    """Run a command in `folder` that must succeed.

    Raises:
        SystemExit: It does not.
    """
    words = [str(word) for word in command]
    returncode = subprocess.run(words, cwd=folder, env=environment(), check=False).returncode
    if returncode:
        raise SystemExit(f"exit status {returncode} of: {' '.join(words)}")


def try_wheel(wheel: Path, version: str) -> None:
    """Install `wheel` beside torch `version` alone, import all of it and run two ranks.

    Raises:
        SystemExit: A part of it does not work.
    """
    start = time.monotonic()
    folder = WORK / version
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print(f"check-wheel: {wheel.name} beside torch {version}", flush=True)
    try:
        run([sys.executable, "-m", "venv", "env"], folder)
        python = folder / "env" / "bin" / "python"
        torch = "torch" if version == NEWEST else f"torch=={version}"
        install = [python, ROOT / "tools" / "pip_install.py", "--no-compile", "--no-cache-dir"]
        run([*install, wheel, torch], folder)
        # A copy: the checkout, whose package must not be found, is where the script lies.
        shutil.copy2(ROOT / "tools" / "exercise.py", folder)
        run([python, folder / "exercise.py"], folder)
    finally:
        shutil.rmtree(folder)
    print(f"check-wheel: torch {version}: {time.monotonic() - start:.0f} s", flush=True)


def main() -> int:
    """0 where the wheel works beside every torch."""
    parser = argparse.ArgumentParser(description="Try a wheel in clean environments.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torch", nargs="+", default=[oldest_torch(), NEWEST])
    arguments = parser.parse_args()
    wheel = arguments.wheel.resolve()
    if "manylinux" not in wheel.name:
        raise SystemExit(f"a manylinux tag was expected, got {wheel.name}")
    for version in arguments.torch:
        try_wheel(wheel, version)
    return 0


if __name__ == "__main__":
    sys.exit(main())
