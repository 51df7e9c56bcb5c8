"""Rank processes that do one step at a time, as a test tells them.

The steps are functions of this file (a worker finds them by name) and get the rank's own state.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import types
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from moe_comm import _host
from tests import _host_testing
from tests.helpers.failing_ranks import has_stopped, wait_for

MIB = 1 << 20
WAIT_S = 30.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "moe_comm.ep.backends.reference"])


def serve(connection: Connection) -> None:
    """A worker's main loop: run steps until the other end closes."""
    state = types.SimpleNamespace(windows=[], connection_fd=connection.fileno())
    while True:
        try:
            step, args = connection.recv()
        except EOFError:
            return
        try:
            outcome = (step(state, *args), None)
        except Exception as error:  # noqa: BLE001 - raised again by the test
            outcome = (None, error)
        connection.send(outcome)


class RankProcess:
    """A worker and the test's end of its connection."""

    def __init__(self) -> None:
        self.connection, theirs = _context.Pipe()
        self.process = _context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def start(self, step: Callable[..., Any], *args: Any) -> None:
        self.connection.send((step, args))

    def finish(self, timeout_s: float = 2 * WAIT_S) -> Any:
        assert self.connection.poll(timeout_s), f"the step of process {self.pid} did not end"
        result, error = self.connection.recv()
        if error is not None:
            raise error
        return result

    def call(self, step: Callable[..., Any], *args: Any) -> Any:
        self.start(step, *args)
        return self.finish()

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        wait_for(lambda: has_stopped(self.pid))

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self.connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)
        self.process.join(WAIT_S)
        self.process.kill()


@contextlib.contextmanager
def rank_processes(num_ranks: int, **options: int | bool) -> Iterator[list[RankProcess]]:
    """Processes with a connected mesh and a heap each."""
    workers = [RankProcess() for _ in range(num_ranks)]
    try:
        addresses = [worker.call(open_mesh) for worker in workers]
        for rank_idx, worker in enumerate(workers):
            worker.start(connect, rank_idx, addresses, options)
        for worker in workers:
            worker.finish()
        yield workers
    finally:
        for worker in workers:
            worker.close()


# ------------------------------------------------------------------------------------ steps


def open_mesh(state: Any) -> bytes:
    state.mesh = _host.PeerMesh.create()
    return state.mesh.address()


def connect(state: Any, rank_idx: int, addresses: list[bytes], options: dict[str, Any]) -> None:
    state.mesh.connect(rank_idx, addresses, WAIT_S)
    state.waiter = _host_testing.ChangeWaiter(state.mesh)
    state.heap = _host.ShmHeap.create(state.mesh, **options)


def post(state: Any, rank_idx: int, channel: int, payload: bytes, num_messages: int = 1) -> None:
    for number in range(num_messages):
        state.mesh.post(rank_idx, channel, number, payload)


def take(state: Any, rank_idx: int, channel: int, num_messages: int = 1) -> list[bytes]:
    """Messages 0, 1, ... of a channel, waiting for each."""
    taken: list[bytes] = []
    while len(taken) < num_messages:
        seen = state.waiter.num_changes
        payload = state.mesh.take(rank_idx, channel, len(taken))
        if payload is not None:
            taken.append(payload)
        elif not state.waiter.wait_beyond(seen, WAIT_S):
            raise TimeoutError(f"{len(taken)} of {num_messages} messages arrived in {WAIT_S} s")
    return taken


def hear_from_service_thread(state: Any) -> None:
    """Return once the service thread has run."""
    seen = state.waiter.num_changes
    state.mesh.post(state.mesh.rank_idx, 0, 0, b"")
    if not state.waiter.wait_beyond(seen, WAIT_S):
        raise TimeoutError(f"the service thread called no listener in {WAIT_S} s")


def wait_gone(state: Any, rank_idx: int) -> tuple[str, float]:
    """State of a peer, and at which monotonic time it was known."""
    deadline = time.monotonic() + WAIT_S
    while True:
        seen = state.waiter.num_changes
        peer_state = state.mesh.state(rank_idx)
        if peer_state != _host_testing.PeerState.ALIVE:
            return peer_state.name, time.monotonic()
        if not state.waiter.wait_beyond(seen, deadline - time.monotonic()):
            raise TimeoutError(f"rank {rank_idx} is still {peer_state.name} after {WAIT_S} s")


def peer_state(state: Any, rank_idx: int) -> str:
    return state.mesh.state(rank_idx).name


def allocate(state: Any, num_bytes: int, fill: bytes = b"") -> tuple[int, int, int]:
    window = state.heap.allocate(num_bytes)
    if fill:
        memoryview(window)[:] = fill * num_bytes
    state.windows.append(window)
    return window.offer


def drop_windows(state: Any) -> None:
    state.windows.clear()


def write_peer(
    state: Any, rank_idx: int, offer: tuple[int, int, int], at: int, data: bytes
) -> None:
    _resolve(state, rank_idx, offer)[at : at + len(data)] = data


def read_peer(state: Any, rank_idx: int, offer: tuple[int, int, int], at: int, count: int) -> bytes:
    return bytes(_resolve(state, rank_idx, offer)[at : at + count])


def read_own(state: Any, window_idx: int, at: int, count: int) -> bytes:
    return bytes(memoryview(state.windows[window_idx])[at : at + count])


def _resolve(state: Any, rank_idx: int, offer: tuple[int, int, int]) -> memoryview:
    while True:
        seen = state.waiter.num_changes
        view = state.heap.resolve(rank_idx, offer)
        if view is not None:
            return view
        if not state.waiter.wait_beyond(seen, WAIT_S):
            raise TimeoutError(f"segment {offer[0]} of rank {rank_idx} was not announced")


def trim(state: Any) -> int:
    return state.heap.trim()


def churn(state: Any, num_rounds: int) -> None:
    """Allocate and free windows of changing sizes."""
    for number in range(num_rounds):
        window = state.heap.allocate(1 + number * 7919 % 1_000_000)
        memoryview(window)[0] = 1


def stats(state: Any, verify_huge_pages: bool = False) -> dict[str, int]:
    found = state.heap.stats(verify_huge_pages)
    names = [name for name in dir(found) if not name.startswith("_")]
    return {name: getattr(found, name) for name in names}


def wait_for_huge_mapping(state: Any, num_bytes: int) -> int:
    """Bytes of shared memory that this process maps by 2 MiB pages, once they are num_bytes."""
    deadline = time.monotonic() + WAIT_S
    while True:
        found = 0
        for mapping in Path("/proc/self/smaps").read_text().split("memfd:moe_comm")[1:]:
            found += int(mapping.split("ShmemPmdMapped:")[1].split()[0]) * 1024
        if found >= num_bytes or time.monotonic() > deadline:
            return found
        time.sleep(0.01)


def wait_for_peer_segments(state: Any, num_bytes: int) -> None:
    """Memory that peers have grown by is mapped by a thread that hears of it, in its own time."""
    deadline = time.monotonic() + WAIT_S
    while (mapped := state.heap.stats(False).peer_segment_bytes) != num_bytes:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{mapped} bytes of peers are mapped, not {num_bytes}")
        time.sleep(0.001)


def leave(state: Any) -> float:
    state.mesh.leave()
    return time.monotonic()


def destroy(state: Any) -> None:
    state.mesh.leave()
    del state.waiter, state.heap, state.mesh
    state.windows.clear()


def wait_for_no_thread(state: Any) -> None:
    """The system may list a thread for a moment after it was joined."""
    deadline = time.monotonic() + WAIT_S
    while _num_service_threads() > 0:
        if time.monotonic() > deadline:
            raise TimeoutError(f"a service thread is still there after {WAIT_S} s")
        time.sleep(0.001)


def footprint(state: Any) -> dict[str, int]:
    """Resources of the system that this process holds, apart from memory that Python manages."""
    maps = Path("/proc/self/maps").read_text()
    return {
        "num_fds": len(os.listdir("/proc/self/fd")),
        "num_threads": _num_service_threads(),
        "num_mappings": maps.count("memfd:moe_comm"),
        "shared_bytes": int(Path("/proc/self/statm").read_text().split()[2]) * 4096,
    }


def _num_service_threads() -> int:
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            names.append((task / "comm").read_text().strip())
    return names.count("moe-mesh")


def fork_and_wait_for_end(state: Any) -> tuple[int, int]:
    """Fork a child that sleeps; returns its pid and how many sockets it still has of the mesh."""
    reader, writer = os.pipe()
    before = _sockets()
    pid = os.fork()
    if pid == 0:
        os.write(writer, b"%d" % len(before & _sockets()))
        while True:
            signal.pause()
    shared = int(os.read(reader, 20))
    os.close(reader)
    os.close(writer)
    return pid, shared


def _sockets() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{fd}")
            if link.startswith("socket:"):
                found.add(link)
    return found


def leak_sockets_to_a_child(state: Any) -> int:
    """Fork a child that keeps copies of every socket, as a library unknown to this one could."""
    copies = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                copies.append(os.dup(int(fd)))
    pid = os.fork()
    if pid == 0:
        while True:
            signal.pause()
    for copy in copies:
        os.close(copy)
    return pid


def close_sockets_behind_the_library(state: Any) -> None:
    """End the sockets without a goodbye while this process lives on."""
    own_pipe = state.connection_fd
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if fd != own_pipe and os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                os.close(fd)


def _raised_by(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - reported to the parent
        return f"{type(error).__name__}: {error}"
    return "nothing"


def use_in_child(state: Any) -> dict[str, str]:
    """Outcome of every method in a forked child: the name of what it raises, or "nothing"."""
    window = state.heap.allocate(1000)
    calls: dict[str, Callable[[], Any]] = {
        "mesh.address": lambda: state.mesh.address(),
        "mesh.connect": lambda: state.mesh.connect(0, [b""], 1.0),
        "mesh.state": lambda: state.mesh.state(0),
        "mesh.post": lambda: state.mesh.post(0, 0, 0, b""),
        "mesh.take": lambda: state.mesh.take(0, 0, 0),
        "heap.allocate": lambda: state.heap.allocate(10),
        "heap.allocate_free": lambda: state.heap.allocate_free(10),
        "heap.reserve": lambda: state.heap.reserve(10),
        "heap.trim": lambda: state.heap.trim(),
        "heap.stats": lambda: state.heap.stats(),
        "heap.resolve": lambda: state.heap.resolve(0, (0, 0, 10)),
        "heap.find": lambda: state.heap.find(0, 10),
        "heap.available_bytes": lambda: state.heap.available_bytes(),
        "heap.end_quarantine": lambda: state.heap.end_quarantine(),
        "window.shrink": lambda: window.shrink(10),
        "window.quarantine": lambda: window.quarantine(),
        "mesh.leave": lambda: state.mesh.leave(),
    }
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        lines = [f"{name}={_raised_by(call)}" for name, call in calls.items()]
        lines.append(f"mappings={footprint(state)['num_mappings']}")
        # Dropping everything must neither hang nor unmap what the child has mapped there since.
        calls.clear()
        del window
        destroy(state)
        fresh = types.SimpleNamespace(windows=[])
        address = open_mesh(fresh)
        connect(fresh, 0, [address], {})
        fresh.heap.allocate(100)
        lines.append("fresh=works")
        os.write(writer, "\n".join(lines).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    results = dict(line.split("=", 1) for line in text.splitlines())
    results["exit"] = str(os.waitstatus_to_exitcode(status))
    return results
