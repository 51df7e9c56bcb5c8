"""Pythons of their own for tests, without each paying for the import of torch.

The first one starts a server that imports torch and nothing else, and forks for every program. The
program runs at the top level of the server's main module: an exception or `sys.exit` ends Python in
good order, with all that it runs at its end. `multiprocessing` ends its children without that.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

_MAX_MESSAGE_BYTES = 100_000


class FreshPython:
    """A program that runs in a process of its own, with the face of `subprocess.Popen`.

    Args:
        command: Arguments that would follow `python`: "-c" and code, "-m" and a module, or a file;
            then those of the program.
        cwd: Folder that it runs in; None for this process's.
        merges_errors: Whether standard error comes with standard output.
    """

    def __init__(self, *command: str, cwd: Path | None = None, merges_errors: bool = False) -> None:
        job = {"command": command, "cwd": str(cwd or Path.cwd()), "environment": _environment()}
        message = json.dumps(job).encode()
        assert len(message) <= _MAX_MESSAGE_BYTES, len(message)
        self._state, theirs = socket.socketpair()
        self._outputs: list[IO[str]] = []
        write_fds = []
        for _ in range(1 if merges_errors else 2):
            read_fd, write_fd = os.pipe()
            self._outputs.append(os.fdopen(read_fd))
            write_fds.append(write_fd)
        socket.send_fds(_server(), [message], [theirs.fileno(), write_fds[0], write_fds[-1]])
        theirs.close()
        for write_fd in write_fds:
            os.close(write_fd)
        self._states = self._state.makefile("r")
        self.pid = int(self._states.readline())
        self.returncode: int | None = None

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Standard output and standard error; `returncode` is known afterwards.

        Raises:
            subprocess.TimeoutExpired: It had not ended in `timeout` seconds, and was killed.
        """
        texts = [""] * len(self._outputs)

        def read(idx: int) -> None:
            with self._outputs[idx] as output:
                texts[idx] = output.read()

        readers = [threading.Thread(target=read, args=(idx,)) for idx in range(len(texts))]
        for reader in readers:
            reader.start()
        self._state.settimeout(timeout)
        try:
            self.returncode = int(self._states.readline())
        except TimeoutError:
            os.kill(self.pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout) from None
        finally:
            for reader in readers:
                reader.join()
            self._states.close()
            self._state.close()
        return texts[0], texts[-1] if len(texts) > 1 else ""


def run_python(
    *command: str, cwd: Path | None = None, timeout: float = 200.0
) -> subprocess.CompletedProcess[str]:
    """Result of `subprocess.run([sys.executable, *command], capture_output=True, text=True)`."""
    program = FreshPython(*command, cwd=cwd)
    stdout, stderr = program.communicate(timeout)
    assert program.returncode is not None
    return subprocess.CompletedProcess(command, program.returncode, stdout, stderr)


def _environment() -> dict[str, str]:
    return dict(os.environ)  # noqa: TID251


@functools.cache
def _server() -> socket.socket:
    """Socket to the server of this process, which ends with it."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        subprocess.Popen(
            [sys.executable, "-c", _SERVER, str(theirs.fileno()), str(_MAX_MESSAGE_BYTES)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={name: value for name, value in _environment().items() if name != "PYTHONPATH"},
            cwd="/",
            pass_fds=[theirs.fileno()],
        )
    return mine


# A keeper between the server and every program waits for it: the server goes on.
_SERVER = """
import json, os, runpy, signal, socket, sys
import torch

def next_program(control, max_message_bytes):
    while True:
        message, fds, _, _ = socket.recv_fds(control, max_message_bytes, 3)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            break
        for fd in fds:
            os.close(fd)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    control.close()
    state, *outputs = fds
    pid = os.fork()
    if pid != 0:
        for fd in outputs:
            os.close(fd)
        os.write(state, f"{pid}\\n".encode())
        status = os.waitpid(pid, 0)[1]
        os.write(state, f"{os.waitstatus_to_exitcode(status)}\\n".encode())
        os._exit(0)
    os.close(state)
    for fd, standard in zip(outputs, (1, 2)):
        os.dup2(fd, standard)
        os.close(fd)
    job = json.loads(message)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["environment"])
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return job["command"], list(filter(None, added))

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
command, added = next_program(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
# Does what Python itself does with its command line.
if command[0] == "-c":
    sys.argv[:] = ["-c", *command[2:]]
    sys.path[:1] = ["", *added]
    program = compile(command[1], "<string>", "exec")
    # In the main module itself, whose variables live until Python ends.
    for name in [name for name in globals() if not name.startswith("__") and name != "program"]:
        del globals()[name]
    exec(program)
elif command[0] == "-m":
    sys.argv[:] = ["-m", *command[2:]]
    sys.path[:1] = [os.getcwd(), *added]
    runpy._run_module_as_main(command[1])
else:
    sys.argv[:] = command
    sys.path[:1] = [os.path.dirname(os.path.abspath(command[0])), *added]
    runpy.run_path(command[0], run_name="__main__")
"""
