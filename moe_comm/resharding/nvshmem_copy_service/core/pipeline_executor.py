"""Packing, sending and unpacking, over iterations."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from moe_comm.peers.agree import mismatched_transfers
from moe_comm.resharding.nvshmem_copy_service.core.gpu_resource_manager import STREAM_NAMES
from moe_comm.resharding.nvshmem_copy_service.core.kernel_launcher import KernelLauncher
from moe_comm.resharding.nvshmem_copy_service.logger import PELogger
from moe_comm.resharding.nvshmem_copy_service.memory.double_buffer_manager import (
    NUM_SLOTS,
    DoubleBufferManager,
)
from moe_comm.resharding.nvshmem_copy_service.memory.tensor_pointer_utils import bytes_at
from moe_comm.resharding.nvshmem_copy_service.nvshmem_types import (
    IterationSchedule,
    ReceiveRequest,
    SendRequest,
)

__all__ = ["PipelineExecutor"]


class PipelineExecutor:
    """Runs the schedule of one PE over slots. Iteration i uses slot i modulo 2 of both ends.

    On the CPU a launch has ended when it returns, so that streams and events order nothing.

    Args:
        kernel_launcher: Launcher that packs and unpacks.
        buffer_manager: Manager that has the slots, and moves them between PEs.
        my_pe: This PE.
    """

    pack_stream: Any = None
    unpack_stream: Any = None
    send_stream: Any = None
    copy_stream: Any = None
    torch_pack_stream_wrapper: Any = None
    torch_unpack_stream_wrapper: Any = None
    torch_send_stream_wrapper: Any = None
    torch_copy_stream_wrapper: Any = None
    pack_events: Sequence[Any] = ()
    unpack_events: Sequence[Any] = ()
    barrier_events: Sequence[Any] = ()

    def __init__(
        self, kernel_launcher: KernelLauncher, buffer_manager: DoubleBufferManager, my_pe: int
    ) -> None:
        self.kernel_launcher = kernel_launcher
        self.buffer_manager = buffer_manager
        self.my_pe = my_pe

    def set_streams(
        self,
        pack_stream: Any,
        unpack_stream: Any,
        send_stream: Any,
        copy_stream: Any,
        *args: Any,
        **wrappers: Any,
    ) -> None:
        """Set the streams to run on.

        Args:
            pack_stream: Packing.
            unpack_stream: Unpacking.
            send_stream: Sending.
            copy_stream: Copies within this PE.
            *args: What torch takes for them: pack, unpack, copy (3), or pack, unpack, send, copy (4).
            **wrappers: The same by name: `torch_pack_stream` or `torch_pack_stream_wrapper`, and so
                on; the one for sending may be left out.

        Raises:
            TypeError: A stream is missing, given twice, or unknown.
        """
        if len(args) > 4 or (wrappers and len(args) == 4):
            raise TypeError(
                f"set_streams() takes 7 or 8 streams, got {4 + len(args) + len(wrappers)}"
            )
        # With three streams by position and none by name, there is none for sending.
        order = ("pack", "unpack", "copy") if len(args) == 3 and not wrappers else STREAM_NAMES
        given = [
            *((f"torch_{role}_stream", stream) for role, stream in zip(order, args, strict=False)),
            *((name.removesuffix("_wrapper"), stream) for name, stream in wrappers.items()),
        ]
        named = dict(given)
        known = {f"torch_{role}_stream" for role in STREAM_NAMES}
        if len(named) < len(given):
            raise TypeError(
                f"set_streams() got a stream twice: {sorted(name for name, _ in given)}"
            )
        if unknown := named.keys() - known:
            raise TypeError(f"set_streams() got unknown streams: {sorted(unknown)}")
        if missing := known - {"torch_send_stream"} - named.keys():
            raise TypeError(f"set_streams() is missing streams: {sorted(missing)}")
        streams = (pack_stream, unpack_stream, send_stream, copy_stream)
        for role, stream in zip(STREAM_NAMES, streams, strict=True):
            setattr(self, f"{role}_stream", stream)
            setattr(self, f"torch_{role}_stream_wrapper", named.get(f"torch_{role}_stream"))

    def set_events(
        self,
        pack_events: Sequence[Any],
        unpack_events: Sequence[Any],
        barrier_events: Sequence[Any] = (),
    ) -> None:
        """Set the events, two of each.

        Args:
            pack_events: Events that are recorded when a slot is packed.
            unpack_events: Events that are recorded when a slot is unpacked.
            barrier_events: Events that are only kept: a batch has arrived when `DoubleBufferManager.exchange`
                returns.

        Raises:
            ValueError: There are fewer than two of a kind.
        """
        for name, events in (
            ("pack_events", pack_events),
            ("unpack_events", unpack_events),
            ("barrier_events", barrier_events),
        ):
            if len(events) < NUM_SLOTS and (events or name != "barrier_events"):
                raise ValueError(f"{name} must have at least {NUM_SLOTS}, got {len(events)}")
        self.pack_events = pack_events
        self.unpack_events = unpack_events
        self.barrier_events = barrier_events

    def execute_pipeline(
        self, iter_schedules: Sequence[IterationSchedule], num_iterations: int
    ) -> None:
        """Run the first `num_iterations` iterations. Collective, with as many on every PE.

        In iteration i: pack i + 1, unpack i - 1, send i; `DoubleBufferManager.exchange` ends it.

        Args:
            iter_schedules: Batches that this PE sends and receives in each iteration.
            num_iterations: Iterations to run, equal on all PEs.

        Raises:
            RuntimeError: Streams or events are missing.
            ValueError: Two PEs have other batches, or a PE gave up; on every PE.
            PeerFailedError: A PE died or left.
            PeerTimeoutError: A PE does not get on.
        """
        if self.torch_pack_stream_wrapper is None or not self.pack_events:
            raise RuntimeError("set_streams() and set_events() must be called first")
        schedules = iter_schedules[:num_iterations]
        for i, schedule in enumerate(schedules):
            try:
                if i == 0:
                    self._pack(schedules, 0)
                self._pack(schedules, i + 1)
                self._unpack(schedules, i - 1)
            except BaseException as error:
                self.buffer_manager.give_up(f"{type(error).__name__}: {error}")
                raise
            self.buffer_manager.exchange(i, schedule["send"], schedule["recv"])
        self._unpack(schedules, len(schedules) - 1)

    def _pack(self, schedules: Sequence[IterationSchedule], iteration: int) -> None:
        batch = schedules[iteration]["send"] if iteration < len(schedules) else None
        if batch is not None and batch.gpu_plan is not None:
            self.kernel_launcher.launch_pack(
                batch.gpu_plan,
                self.pack_stream,
                self.torch_pack_stream_wrapper,
                self.pack_events[iteration % NUM_SLOTS],
            )

    def _unpack(self, schedules: Sequence[IterationSchedule], iteration: int) -> None:
        batch = schedules[iteration]["recv"] if iteration >= 0 else None
        if batch is not None and batch.gpu_plan is not None:
            self.kernel_launcher.launch_unpack(
                batch.gpu_plan,
                self.unpack_stream,
                self.torch_unpack_stream_wrapper,
                self.unpack_events[iteration % NUM_SLOTS],
            )

    def process_self_moves(
        self, send_requests: Sequence[SendRequest], receive_requests: Sequence[ReceiveRequest]
    ) -> None:
        """Copy what this PE sends to itself. Other requests are left alone.

        Raises:
            ValueError: A task has no partner, or another size there; nothing was copied.
        """
        sends = {r.task_id: r for r in send_requests if r.dest_pe == self.my_pe}
        receives = {r.task_id: r for r in receive_requests if r.src_pe == self.my_pe}
        unlike = mismatched_transfers(sends, receives, operator.attrgetter("size"))
        if odd := sorted(task_id for task_id, *ends in unlike if None in ends):
            raise ValueError(
                f"PE {self.my_pe} sends itself {len(sends)} tasks and receives {len(receives)} from "
                f"itself; without a partner: {odd[:8]}"
            )
        for task_id, *_ in unlike:
            raise ValueError(
                f"task {task_id}: PE {self.my_pe} sends itself {sends[task_id].size} bytes and "
                f"receives {receives[task_id].size}"
            )
        for task_id, receive in receives.items():
            send = sends[task_id]
            target = bytes_at(receive.dest_tensor, receive.dest_pos, receive.size)
            target.copy_(bytes_at(send.src_tensor, send.src_pos, send.size))
        PELogger.debug("%d tasks copied within PE %d", len(receives), self.my_pe)
