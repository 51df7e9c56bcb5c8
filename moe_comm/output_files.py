"""Files that a long run will write: whether they can be, looked at before it."""

from __future__ import annotations

import os
from pathlib import Path


def check_output(option: str, path: Path | None) -> None:
    """Return whether a file can be written, before the work whose result it is to hold.

    Args:
        option: Option that named the file, for messages, such as `"--json"`.
        path: Path of the file; None where none was asked for.

    Raises:
        ValueError: It is a folder, its folder is missing, or permission is denied.
    """
    if path is None:
        return
    folder = path.parent
    if path.is_dir():
        raise ValueError(f"{option} must name a file, {path} is a folder")
    if not folder.is_dir():
        raise ValueError(f"{option}: {path} cannot be written, there is no folder {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"{option}: {path} cannot be written, permission is denied")
