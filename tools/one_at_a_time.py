"""Run a command once nobody else runs one under the same lock file: what `make` sets `.venv` up with.

Python's own lock, as a short PATH has no flock. It is held by the command and all that it starts, and goes
with the last of them, however they end.
"""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path


def main(lock: str, command: list[str]) -> None:
    """Become `command` as the holder of `lock`.

    Args:
        lock: Path of a file, which is made where it is not there.
        command: Program and arguments.
    """
    Path(lock).parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"waiting for another make in this checkout, which holds {lock}", flush=True)
        fcntl.flock(fd, fcntl.LOCK_EX)
    os.set_inheritable(fd, True)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
