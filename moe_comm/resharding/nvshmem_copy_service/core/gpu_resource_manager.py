"""A PE's number, communicator, streams and events."""

from __future__ import annotations

import torch
import torch.distributed as dist

from moe_comm.peers.bootstrap import Bootstrap
from moe_comm.peers.communicator import Communicator

__all__ = ["GPUResourceManager", "HostEvent", "HostStream"]

STREAM_NAMES = ("pack", "unpack", "send", "copy")


class HostEvent:
    """A point in a `HostStream`; work before it is done by the time `record` is called."""

    def __init__(self) -> None:
        self.is_recorded = False
        """Whether `record` was called."""

    def record(self, stream: HostStream | None = None) -> None:
        """Mark now."""
        self.is_recorded = True

    def query(self) -> bool:
        """Return True, as for a CUDA event that was never recorded."""
        return True

    def synchronize(self) -> None:
        """Wait for nothing."""


class HostStream:
    """Stream of a device that has none: calls have done their work when they return.

    Has the methods of a `torch.cuda.Stream` and of a cuda-core stream that the pipeline calls.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def wait_event(self, event: HostEvent) -> None:
        """Wait for nothing."""

    def wait_stream(self, stream: HostStream) -> None:
        """Wait for nothing."""

    def synchronize(self) -> None:
        """Wait for nothing."""

    def sync(self) -> None:
        """Wait for nothing, by cuda-core's name."""

    def __repr__(self) -> str:
        return f"HostStream({self.name!r})"


class GPUResourceManager:
    """Connects the PEs and holds what the pipeline runs on.

    On the CPU, streams and events are `HostStream` and `HostEvent`.

    Args:
        device: "cpu"; others are refused by `init`.
        communicator: Communicator that PEs talk over; None to make one of the group given to `init`.
    """

    def __init__(
        self, device: str | torch.device = "cpu", communicator: Communicator | None = None
    ) -> None:
        self.device = torch.device(device)
        self.my_pe = -1
        self.n_pes = -1
        self.initialized = False
        self.communicator: Communicator | None = None
        self._given_communicator = communicator
        self._set_streams({})

    def init(self, group: dist.ProcessGroup | Bootstrap | None = None) -> None:
        """Connect. Collective over the group; does nothing when connected.

        Args:
            group: Ranks in it are the PEs; None for the default group, or where a communicator was
                given.

        Raises:
            RuntimeError: The device is not "cpu".
            ValueError: The communicator has no heap, or both it and a group are given.
        """
        if self.initialized:
            return
        if group is not None and self._given_communicator is not None:
            raise ValueError(
                "a communicator was given, so group must be None, got "
                f"{group} and {self._given_communicator}"
            )
        if self.device.type != "cpu":
            raise RuntimeError(
                f"device must be cpu, got {self.device}: the nvshmem copy service moves CPU tensors"
            )
        self.communicator = self._given_communicator or Communicator(group)
        self.communicator.require_native()
        self.my_pe = self.communicator.rank_idx
        self.n_pes = self.communicator.num_ranks
        self._set_streams({name: HostStream(name) for name in STREAM_NAMES})
        self.initialized = True

    def _set_streams(self, streams: dict[str, HostStream]) -> None:
        self._streams = streams
        self.pack_stream = self.torch_pack_stream_wrapper = streams.get("pack")
        self.unpack_stream = self.torch_unpack_stream_wrapper = streams.get("unpack")
        self.send_stream = self.torch_send_stream_wrapper = streams.get("send")
        self.copy_stream = self.torch_copy_stream_wrapper = streams.get("copy")

    def get_stream(self, name: str) -> HostStream | None:
        """Return stream "pack", "unpack", "send" or "copy"; None for another name or before `init`."""
        return self._streams.get(name)

    def get_torch_stream(self, name: str) -> HostStream | None:
        """Return what torch takes for that stream: on the CPU the same object."""
        return self.get_stream(name)

    def create_events(
        self, num_events: int = 2
    ) -> tuple[list[HostEvent], list[HostEvent], list[HostEvent]]:
        """Make events for packing, unpacking and arrival, `num_events` of each."""
        pack, unpack, arrival = ([HostEvent() for _ in range(num_events)] for _ in range(3))
        return pack, unpack, arrival

    def finalize(self) -> None:
        """Leave; a communicator that was given stays. Idempotent."""
        if self.communicator is not None and self._given_communicator is None:
            self.communicator.destroy()
        self.communicator = None
        self.initialized = False
        self.my_pe = -1
        self.n_pes = -1
        self._set_streams({})
