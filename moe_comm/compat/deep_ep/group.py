"""Base of all buffers of this module: the `EpBuffer`s of a group, on the device of the first tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from moe_comm.arguments import shown
from moe_comm.compat.deep_ep import streams
from moe_comm.compat.deep_ep.streams import CommStream, running, tensors_in
from moe_comm.ep.buffer import EpBuffer
from moe_comm.ep.group_buffers import GroupBuffers, group_buffers
from moe_comm.peers import missed_calls
from moe_comm.peers.bootstrap import Bootstrap

P = ParamSpec("P")
ResultT = TypeVar("ResultT")


class GroupOwner:
    """The `EpBuffer`s of one group, by number of experts. Collective where one is made.

    They are on the device that the first collective call with tensors works on, on which all ranks agree.

    Args:
        group: Process group, bootstrap, or None for the default process group.
    """

    def __init__(self, group: dist.ProcessGroup | Bootstrap | None) -> None:
        self._shared: GroupBuffers | None = group_buffers(group)
        communicator = self._shared.communicator
        self.rank_idx = communicator.rank_idx
        self.num_ranks = communicator.num_ranks
        self._is_on_device = False
        self._comm_streams: dict[torch.device, CommStream] = {}
        self._buffers: dict[tuple[str, tuple[int, int | None]], EpBuffer] = {}
        self._latest: dict[str, EpBuffer] = {}
        # Copies of redundant experts, of the buffer that has this.
        self.lb_storage: torch.Tensor | None = None
        self.num_experts: int | None = None  # of the next normal call, where the object knows it
        self._shared.is_adopted = True

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Ranks between machines and within one: all are on one."""
        return 1, self.num_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Ranks of scale-out and of scale-up."""
        return 1, self.num_ranks

    def device_of(self, given: tuple[Any, ...]) -> torch.device:
        """Return the device that a call works on: that of the first call, taken from its first tensor."""
        if self._is_on_device:
            return self.shared().device
        first = next(tensors_in(given), None)
        # Tensors on neither are refused as those that are not on the CPU, on every rank.
        if first is not None and first.device.type == streams.GPU:
            return first.device
        return torch.device("cpu")

    def settle(self, device: torch.device, check: Callable[[], str]) -> GroupBuffers:
        """Work on a device from now on. Collective; see `GroupBuffers.for_device`."""
        self._shared = self.shared().for_device(device, check)
        self._is_on_device = True
        return self._shared

    def comm_stream(self, device: torch.device) -> CommStream:
        """The stream of calls on a GPU, made on first use."""
        if device not in self._comm_streams:
            self._comm_streams[device] = CommStream(device)
        return self._comm_streams[device]

    def use_on(self, stream: torch.cuda.Stream) -> None:
        """Say that `stream` reads results, which may lie in windows."""
        if self._is_on_device:
            self.shared().communicator.use_on(stream)

    def current_comm_stream(self) -> torch.cuda.Stream | torch.cpu.Stream:
        """Return the stream that `get_comm_stream` of DeepEP gives; the stream of the CPU orders nothing."""
        device = self.shared().device
        if device.type == "cpu":
            return torch.cpu.current_stream()
        return self.comm_stream(device).stream

    def buffer_for(self, num_experts: int | None, problem: str = "") -> EpBuffer:
        """The buffer for so many experts; the latest where this rank does not know how many.

        Args:
            num_experts: Experts over all ranks, or None.
            problem: Reason why this rank does not know.

        Raises:
            ValueError: It is the first call and some rank does not know, on every rank.
        """
        return self._find("normal", None if num_experts is None else (num_experts, None), problem)

    def any_buffer(self) -> EpBuffer:
        """The latest buffer of normal calls, equal on all ranks, or one with an expert on every rank."""
        return self._latest.get("normal") or self.buffer_for(self.num_ranks)

    def low_latency_buffer_for(self, shape: tuple[int, int] | None, problem: str = "") -> EpBuffer:
        """Return a buffer like `buffer_for`, for low-latency calls: this module masks ranks on these buffers.

        Args:
            shape: Experts over all ranks and most tokens of a rank, or None.
            problem: Reason why this rank does not know.
        """
        return self._find("low latency", shape, problem)

    def _find(self, mode: str, shape: tuple[int, int | None] | None, problem: str) -> EpBuffer:
        shared = self.shared()
        if shape is None and mode in self._latest:
            return self._latest[mode]
        buffer = None if shape is None else self._buffers.get((mode, shape))
        if buffer is None:
            device = running().device

            def check() -> str:
                if problem:
                    raise ValueError(problem)
                return f"a {mode} buffer on {device.type}"

            # A buffer is made by all ranks together, so those that cannot must say so first.
            if self._is_on_device:
                shared.check_together(check)
            else:
                shared = self.settle(device, check)
            assert shape is not None
            num_experts, num_max_tokens = shape
            buffer = shared.get(
                num_experts,
                num_max_tokens_per_rank=num_max_tokens,
                key=None if mode == "normal" else "deep_ep",
            )
            self._buffers[mode, shape] = buffer
        self._latest[mode] = buffer
        return buffer

    def reject(self, operation: str, mode: str, error: Exception) -> None:
        """Raise `error` on every rank in place of the next call, whose arguments cannot be bound.

        Args:
            operation: "dispatch" or "combine": what peers call.
            mode: "normal" or "low latency".
            error: Error that Python raised.
        """
        buffer = self._latest.get(mode)
        if self.num_experts is not None and mode == "normal":
            buffer = self._buffers.get((mode, (self.num_experts, None)))
        if buffer is None:
            # Peers are about to make it.
            self.shared().reject(error)
        buffer.reject(operation, error)

    def shared(self) -> GroupBuffers:
        """Return the buffers that this group shares.

        Raises:
            ValueError: The buffer has been destroyed.
        """
        if self._shared is None:
            raise ValueError("this buffer has been destroyed")
        return self._shared

    def release(self) -> None:
        """Let go of the group; other users of it keep it alive."""
        self._shared = None
        self.lb_storage = None
        self._buffers = {}
        self._latest = {}


class MpiRanks:
    """The ranks of an mpi4py communicator, as a `Bootstrap`."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.rank_idx = int(comm.Get_rank())
        self.num_ranks = int(comm.Get_size())

    def all_gather(self, item: Any) -> list[Any]:
        """Every rank's `item`, in rank order. Collective."""
        return list(self._comm.allgather(item))


def refuse_not_offered(buffer: EpBuffer, operation: str, **values: Any) -> None:
    """Refuse what newer releases of DeepEP ask for and this package lacks. Collective where it refuses.

    Args:
        buffer: Buffer that all ranks are about to use.
        operation: "dispatch" or "combine": what they call.
        values: Values by name; None and False ask for nothing.

    Raises:
        NotImplementedError: Some value of this rank asks for something; with its name. Peers that do not
            ask get a ValueError with it.
    """
    asked = [f"{name}={shown(value)}" for name, value in values.items() if not _is_off(value)]
    if not asked:
        return
    try:
        buffer.reject(operation, ValueError(f"{', '.join(asked)}: this package does not offer it"))
    except ValueError as error:
        raise NotImplementedError(str(error)) from None


def _is_off(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not value)


def rejects_unbound_of(
    operation: str, mode: str = "normal"
) -> Callable[[Callable[P, ResultT]], Callable[P, ResultT]]:
    """A decorator for methods of classes with a `GroupOwner`: see `rejects_unbound`.

    Args:
        operation: "dispatch" or "combine".
        mode: As in `GroupOwner.reject`.
    """

    def tell(error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            owner: GroupOwner = args[0]._owner
            buffers = [getattr(each, "buffer", None) for each in (*args[1:], *kwargs.values())]
        except Exception:  # noqa: BLE001 - of an object that is not what it should be
            missed_calls.keep(operation, error)
            return
        # A handle says where peers are; else they are taken to be where the next call goes.
        buffer = next((each for each in buffers if isinstance(each, EpBuffer)), None)
        if buffer is None:
            owner.reject(operation, mode, error)
        else:
            buffer.reject(operation, error)

    return missed_calls.tells_peers(tell)
