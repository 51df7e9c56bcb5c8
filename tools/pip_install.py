"""Runs `pip install` and says every few seconds how far it is.

make calls it with the Python of the environment that is to be filled, before anything is installed
there: it needs nothing but the standard library.

    python tools/pip_install.py [arguments of pip install]

pip itself shows progress on a terminal only, and one package after the other; make shows this
beside the lines of a compiler, and into files. Everything that pip says is shown where it fails.
"""

from __future__ import annotations

import queue
import re
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

SILENCE_S = 4.0
DOWNLOAD = re.compile(r"\s*Downloading \S*?([\w.]+-[\w.+]+)-\S*\.whl \((\d[^)]*)\)")
INSTALL = re.compile(r"\s*Installing collected packages: (.*)")


def lines_or_silence(stream: IO[str], silence_s: float) -> Iterator[str | None]:
    """The lines of `stream` as they come, and None whenever none came for `silence_s` seconds."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=silence_s)
        except queue.Empty:
            yield None
            continue
        if line is None:
            return
        yield line


class Progress:
    """Turns what pip says into short lines.

    Args:
        site: Folder that packages are installed into.
        say: Shows a line.
    """

    def __init__(self, site: Path, say: Callable[[str], None]) -> None:
        self._site = site
        self._say = say
        self._start = time.monotonic()
        self._doing = "looking for packages"
        self._num_packages = 0
        self._known: set[str] = set()

    def take_line(self, line: str | None) -> None:
        """Takes a line of pip; None where it has been silent for a while."""
        if line is None:
            self._say(f"{self._doing}{self._counted()}, {self.seconds:.0f} s")
        elif match := DOWNLOAD.match(line):
            self._doing = f"downloading {match[1]} ({match[2]})"
            if not match[2].endswith(("bytes", " kB")):
                self._say(self._doing)
        elif match := INSTALL.match(line):
            self._num_packages = len(match[1].split(","))
            self._known = self._installed()
            self._doing = f"installing {self._num_packages} packages"
            self._say(f"installing {match[1].strip()}")

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._start

    def _installed(self) -> set[str]:
        # pip writes this file once a package is complete.
        return {path.parent.name for path in self._site.glob("*.dist-info/INSTALLER")}

    def _counted(self) -> str:
        if not self._num_packages:
            return ""
        return f", {len(self._installed() - self._known)} done"


def main(arguments: list[str], silence_s: float = SILENCE_S) -> int:
    """Run pip; its exit status."""
    start = ("-m", "pip", "install", "--no-input", "--disable-pip-version-check")
    command = [sys.executable, *start, "--progress-bar", "off", *arguments]

    # On a terminal the line of a compiler may be there already, and is written again.
    start_of_line, end_of_line = ("\r", "\x1b[K\n") if sys.stdout.isatty() else ("", "\n")

    def say(text: str) -> None:
        print(f"{start_of_line}pip: {text}", end=end_of_line, flush=True)

    site = Path(sysconfig.get_paths()["purelib"])
    if "--target" in arguments:
        site = Path(arguments[arguments.index("--target") + 1])
    elif "--prefix" in arguments:
        base = arguments[arguments.index("--prefix") + 1]
        site = Path(sysconfig.get_path("purelib", vars={"base": base}))
    progress = Progress(site, say)
    said = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as pip:
        assert pip.stdout is not None
        for line in lines_or_silence(pip.stdout, silence_s):
            if line is not None:
                said.append(line)
            progress.take_line(line)
    if pip.returncode:
        sys.stderr.writelines(said)
        print(f"exit status {pip.returncode} of: {' '.join(command)}", file=sys.stderr)
    else:
        say(f"done in {progress.seconds:.0f} s")
    return pip.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
