"""Programs that tests run, and copies of the checkout that one may build in and break."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def captured(command: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
    """Result of a command, output and all; `options` of `subprocess.run`, whose `check` is False."""
    return subprocess.run(command, capture_output=True, text=True, **{"check": False, **options})


def run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Standard output of a command that must succeed."""
    done = captured(command, cwd=cwd, env=env)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def copy_source_tree(tree: Path) -> None:
    """Copies what git tracks to `tree`, so that a build there needs no file that is not committed."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    for name in run("git", "ls-files", "--cached", cwd=ROOT).splitlines():
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
