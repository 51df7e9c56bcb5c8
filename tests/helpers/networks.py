"""Separate hosts on one machine: network namespaces joined by a switch whose links can be spoilt.

A namespace lives as long as the process that holds it, and that one ends with the process that made
it: nothing is left behind, however a test ends. Mounts and process ids stay shared.
"""

from __future__ import annotations

import abc
import fcntl
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
WAIT_S = 60.0


class MissingPartError(RuntimeError):
    """This machine cannot do that; says why."""


def call(*command: str) -> str:
    """Raises `MissingPartError` with what the command said where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().replace("\n", "; ")
        raise MissingPartError(f"`{' '.join(command)}`: {said}")
    return done.stdout


class Namespace:
    """A network namespace; ends with `close` or with this process."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            # cat ends when this process does, because its input ends.
            ["unshare", "--net", "sh", "-c", "echo ready && exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stderr is not None
        if self._holder.stdout.readline() != "ready\n":
            self._holder.wait(WAIT_S)
            raise MissingPartError(f"unshare --net: {self._holder.stderr.read().strip()}")
        self.call("ip", "link", "set", "lo", "up")

    @property
    def pid(self) -> str:
        return str(self._holder.pid)

    @property
    def prefix(self) -> list[str]:
        """Put before a command, it runs in the namespace."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net"]

    def call(self, *command: str) -> str:
        return call(*self.prefix, *command)

    def close(self) -> None:
        if self._holder.poll() is None:
            self._holder.communicate("", timeout=WAIT_S)


class Network(abc.ABC):
    """Hosts 10.77.0.1, 10.77.0.2 ... on one switch; interface eth0 in each.

    Raises:
        MissingPartError: The machine lacks a part.
    """

    def __init__(self, num_hosts: int) -> None:
        if os.geteuid() != 0:
            raise MissingPartError("network namespaces need root")
        for tool in ("unshare", "nsenter", "ip"):
            if shutil.which(tool) is None:
                raise MissingPartError(f"there is no {tool}")
        self.hosts: list[Namespace] = []
        try:
            for _ in range(num_hosts):
                self.hosts.append(Namespace())
            self._join()
            for idx, host in enumerate(self.hosts):
                host.call("ip", "address", "add", f"{self.address(idx)}/24", "dev", "eth0")
                host.call("ip", "link", "set", "eth0", "up")
        except BaseException:
            self.close()
            raise

    def address(self, host_idx: int) -> str:
        return f"10.77.0.{host_idx + 1}"

    @abc.abstractmethod
    def _join(self) -> None:
        """Give every host its eth0."""

    @abc.abstractmethod
    def spoil(self, *, delay_ms: float, jitter_ms: float, loss_percent: float) -> None:
        """Every frame from now on is late, unevenly so, or lost.

        Raises:
            MissingPartError: The machine lacks a part.
        """

    @abc.abstractmethod
    def drop_all(self, host_idx: int) -> None:
        """Have the switch drop what that host sends or is sent from now on; nobody is told."""

    def unplug(self, host_idx: int) -> None:
        """Take the host's own link down: its kernel knows, the others' do not."""
        self.hosts[host_idx].call("ip", "link", "set", "eth0", "down")

    def popen(
        self, host_idx: int, command: Sequence[str], env: dict[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        variables = [f"{name}={value}" for name, value in env.items()]
        with log.open("wb") as file:
            return subprocess.Popen(
                [*self.hosts[host_idx].prefix, "env", *variables, *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )

    def close(self) -> None:
        """Idempotent."""
        for host in self.hosts:
            host.close()


class BridgeNetwork(Network):
    """The kernel's own: pairs of veth on a bridge in a namespace of its own; `tc netem` spoils them."""

    def _join(self) -> None:
        self._switch = Namespace()
        switch = self._switch
        switch.call("ip", "link", "add", "name", "bridge0", "type", "bridge")
        switch.call("ip", "link", "set", "bridge0", "up")
        for idx, host in enumerate(self.hosts):
            port = f"port{idx}"
            veth = ["ip", "link", "add", "name", port, "type", "veth", "peer", "name", "eth0"]
            switch.call(*veth, "netns", host.pid)
            switch.call("ip", "link", "set", port, "master", "bridge0")
            switch.call("ip", "link", "set", port, "up")

    def spoil(self, *, delay_ms: float, jitter_ms: float, loss_percent: float) -> None:
        for idx in range(len(self.hosts)):
            discipline = f"tc qdisc replace dev port{idx} root netem limit 100000"
            quality = f"delay {delay_ms}ms {jitter_ms}ms loss {loss_percent}%"
            self._switch.call(*discipline.split(), *quality.split())

    def drop_all(self, host_idx: int) -> None:
        # Both ends stay up; what arrives at a port of no bridge goes nowhere.
        self._switch.call("ip", "link", "set", f"port{host_idx}", "nomaster")

    def close(self) -> None:
        super().close()
        if hasattr(self, "_switch"):
            self._switch.close()


class RelayNetwork(Network):
    """A switch made of TAP devices and a process that relays frames, where there is no `tc netem`."""

    def _join(self) -> None:
        taps = []
        try:
            for idx, host in enumerate(self.hosts):
                name = f"moe{os.getpid() % 100_000_000}t{idx}"
                taps.append(self._make_tap(name))
                call("ip", "link", "set", name, "netns", host.pid)
                host.call("ip", "link", "set", name, "name", "eth0")
            self._relay = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("frame_relay.py")), *map(str, taps)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=taps,
                text=True,
            )
        finally:
            for tap in taps:
                os.close(tap)

    def _make_tap(self, name: str) -> int:
        try:
            tap = os.open("/dev/net/tun", os.O_RDWR)
        except OSError as error:
            raise MissingPartError(f"TAP devices: {error}") from error
        try:
            fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
        except OSError as error:
            os.close(tap)
            raise MissingPartError(f"TAP devices: {error}") from error
        return tap

    def _tell(self, **settings: Any) -> None:
        self._relay.stdin.write(json.dumps(settings) + "\n")
        self._relay.stdin.flush()
        assert self._relay.stdout.readline() == "done\n"

    def spoil(self, *, delay_ms: float, jitter_ms: float, loss_percent: float) -> None:
        self._tell(delay_ms=delay_ms, jitter_ms=jitter_ms, loss_percent=loss_percent)

    def drop_all(self, host_idx: int) -> None:
        self._tell(dropped_host=host_idx)

    def close(self) -> None:
        super().close()
        if hasattr(self, "_relay") and self._relay.poll() is None:
            self._relay.communicate("", timeout=WAIT_S)
