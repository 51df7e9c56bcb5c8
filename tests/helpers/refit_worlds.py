"""Programs of two worlds, each a process of its own, for the tests of `RefitWorld`."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from moe_comm.errors import CommunicationError
from moe_comm.resharding import RefitWorld
from moe_comm.resharding.describe.parallelism import Parallelism
from tests.helpers.failing_ranks import LONG_S, PROGRAM_S
from tests.helpers.sharded_nets import SHAPES, ShardedNet

_context = multiprocessing.get_context("forkserver")
LIMIT_S = 100.0
STALL_S = 3.0


class Target:
    """An engine's two sets of weights, of which one is served; `dies` and `fails` name a method."""

    def __init__(self, net: ShardedNet, dies: str = "", fails: str = "") -> None:
        self.net, self.dies, self.fails = net, dies, fails
        self.kept: dict[str, Any] = {}

    def _step(self, name: str) -> None:
        if self.dies == name:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fails == name:
            self.fails = ""
            raise ArithmeticError(f"{name} fails")

    def begin(self, version: Any) -> None:
        self._step("begin")
        self.kept = {name: tensor.clone() for name, tensor in self.net.state_dict().items()}

    def commit(self, version: Any) -> None:
        self._step("commit")

    def abort(self) -> None:
        self.net.load_state_dict(self.kept)


def make_net(role: str, rank: int, size: int, wide_rows: int = 0) -> ShardedNet:
    """Trainers cut by tensor parallelism, engines that hold everything, or are cut among themselves.

    With wide rows, one tensor is of these, each a page.
    """
    shapes = SHAPES | {"wide": ((wide_rows, 2048), 0)} if wide_rows else SHAPES
    text = f"tp{size}" if size > 1 else "single"
    return ShardedNet(Parallelism.parse(text, size), rank, shapes).fill(
        0 if role == "trainer" else 50
    )


def kill_as_blocks_arrive(service: Any, pid: int) -> None:
    """Kill a process when some of what this one receives next is there, and the rest may be on its way."""
    submit, run = service.submit_recv, service.run
    coming: list[torch.Tensor] = []
    has_ended = threading.Event()

    def submit_zeros(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        coming.append(tensor.zero_())
        submit(tensor, *args, **kwargs)

    def kill() -> None:
        while not any(tensor.any() for tensor in coming) and not has_ended.is_set():
            pass
        os.kill(pid, signal.SIGKILL)

    def run_beside() -> None:
        assert coming, "nothing is to arrive here"
        killer = threading.Thread(target=kill)
        killer.start()
        try:
            run()
        finally:  # nobody ends the refit while this one is here
            has_ended.set()
            killer.join()
            service.submit_recv, service.run = submit, run

    service.submit_recv, service.run = submit_zeros, run_beside


def run(said: dict[str, Any]) -> Any:
    """One process: joins, refits to each of `versions`, and says how each went."""
    info, role, rank = said["info"], said["role"], said["rank"]
    if said.get("store"):
        size = info["num_trainers"] if role == "trainer" else info["num_engines"]
        store = dist.FileStore(f"{said['store']}_{role}", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        world = RefitWorld.join(
            info,
            role,
            rank,
            timeout_s=said.get("timeout_s", LIMIT_S),
            arrival_timeout_s=said.get("arrival_timeout_s", LONG_S),
            stall_timeout_s=STALL_S,
        )
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return [type(error).__name__, str(error)]
    shares_memory = said.get("shares_memory", False)
    wide_rows = said.get("wide_rows", 64 if shares_memory else 0)
    net = make_net(role, rank, info[f"num_{role}s"], wide_rows)
    hook = Target(net, said.get("dies", ""), said.get("fails", ""))
    has_hook = role == "engine" and not said.get("in_place")
    model = [net] if said.get("in_list") else net
    world.prepare(
        model,
        hook if has_hook else None,
        verify="checksum",
        shares_memory=shares_memory and role == "engine",
        deltas=said.get("deltas"),
    )
    found: list[Any] = []
    rejoins = said.get("rejoins", 0)
    versions = list(said["versions"])
    while versions:
        version = versions[0]
        if role == "trainer":
            net.fill(version)
        if said.get("dies_at") == version:
            os.kill(os.getpid(), signal.SIGKILL)
        if role == "engine" and said.get("stops_at") == version:
            os.kill(os.getpid(), signal.SIGSTOP)
        if said.get("kills_at") == version:
            del said["kills_at"]
            kill_as_blocks_arrive(world.service, said.get("victim", os.getpid()))
        try:
            got = world.refit(
                version if role == "trainer" else None,
                allow_older=said.get("allow_older", False) and role == "trainer",
            )
            found.append([got, net.wrong(got), list(world.versions().values())])
            if said.get("deltas"):
                whole = world.last_delta.whole
                found[-1].append(sorted({dst for _, dst in whole}))
                if said.get("says_why"):
                    found[-1].append(sorted(set(whole.values())))
            versions.pop(0)
            if shares_memory and role == "engine":
                assert world._shared.num_bytes == net.get_parameter("wide").nbytes
        except CommunicationError as error:
            wrong = [] if role == "trainer" else net.wrong(said.get("holds", 50))
            found.append([type(error).__name__, str(error), wrong])
            if not rejoins:
                break
            rejoins -= 1
            world.rejoin(LIMIT_S)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            wrong = [] if role == "trainer" else net.wrong(said.get("holds", 50))
            found.append([type(error).__name__, str(error), wrong, list(world.versions().values())])
            versions.pop(0)
    if world.stale_engines():
        found.append(world.stale_engines())
    world.close()
    return found


def threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """Results of ranks that are threads, in order; what a rank raises is raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        outcomes = [pool.submit(call) for call in calls]
        return [outcome.result(PROGRAM_S) for outcome in outcomes]


class Program:
    """A process that does it: forked from a server that has imported torch and nothing of a world.

    Args:
        said: Arguments of `run`.
    """

    def __init__(self, **said: Any) -> None:
        self._theirs, ours = _context.Pipe(duplex=False)
        self._process = _context.Process(target=_tell, args=(ours, said), daemon=True)
        self._process.start()
        self.pid = self._process.pid
        ours.close()

    def outcome(self) -> Any:
        """Return what it says; None where it was killed."""
        if not self._theirs.poll(PROGRAM_S):
            raise TimeoutError(f"{self._process} says nothing")
        try:
            said = self._theirs.recv()
        except EOFError:
            said = None
        return said

    def end(self) -> None:
        """Leave nothing of it."""
        self._process.kill()
        self._process.join()


def _tell(pipe: Any, said: dict[str, Any]) -> None:
    pipe.send(run(said))
