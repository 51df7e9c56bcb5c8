"""Packing, sending and unpacking, overlapped over iterations."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from typing import Any

import torch

from moe_comm.peers.agree import mismatched_transfers
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
    ScheduledBatch,
    SendRequest,
)

__all__ = ["PipelineExecutor"]


class PipelineExecutor:
    """Runs the schedule of one PE over slots. Iteration i uses slot i modulo 2 of both ends.

    Args:
        kernel_launcher: Packs and unpacks.
        buffer_manager: Has the slots, and moves them between PEs.
        my_pe: This PE.
    """

    def __init__(
        self,
        kernel_launcher: KernelLauncher,
        buffer_manager: DoubleBufferManager,
        my_pe: int,
    ) -> None:
        self.kernel_launcher = kernel_launcher
        self.buffer_manager = buffer_manager
        self.my_pe = my_pe
        self.pack_stream: Any = None
        self.unpack_stream: Any = None
        self.send_stream: Any = None
        self.copy_stream: Any = None
        self.torch_pack_stream_wrapper: Any = None
        self.torch_unpack_stream_wrapper: Any = None
        self.torch_send_stream_wrapper: Any = None
        self.torch_copy_stream_wrapper: Any = None
        self.pack_events: Sequence[Any] = ()
        self.unpack_events: Sequence[Any] = ()
        self.barrier_events: Sequence[Any] = ()

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
                on. Without one for sending, the host waits for packing before it sends.

        Raises:
            TypeError: A stream is missing, given twice, or unknown.
        """
        if len(args) > 4 or (wrappers and len(args) == 4):
            raise TypeError(
                f"set_streams() takes 7 or 8 streams, got {4 + len(args) + len(wrappers)}"
            )
        # With three streams by position and none by name, there is none for sending.
        roles = ("pack", "unpack", "send", "copy")
        order = ("pack", "unpack", "copy") if len(args) == 3 and not wrappers else roles
        given = [
            *((f"torch_{role}_stream", stream) for role, stream in zip(order, args, strict=False)),
            *((name.removesuffix("_wrapper"), stream) for name, stream in wrappers.items()),
        ]
        named = dict(given)
        known = {f"torch_{role}_stream" for role in roles}
        if len(named) < len(given):
            raise TypeError(
                f"set_streams() got a stream twice: {sorted(name for name, _ in given)}"
            )
        if unknown := named.keys() - known:
            raise TypeError(f"set_streams() got unknown streams: {sorted(unknown)}")
        if missing := known - {"torch_send_stream"} - named.keys():
            raise TypeError(f"set_streams() is missing streams: {sorted(missing)}")
        self.pack_stream = pack_stream
        self.unpack_stream = unpack_stream
        self.send_stream = send_stream
        self.copy_stream = copy_stream
        self.torch_pack_stream_wrapper = named["torch_pack_stream"]
        self.torch_unpack_stream_wrapper = named["torch_unpack_stream"]
        self.torch_send_stream_wrapper = named.get("torch_send_stream")
        self.torch_copy_stream_wrapper = named["torch_copy_stream"]

    def set_events(
        self,
        pack_events: Sequence[Any],
        unpack_events: Sequence[Any],
        barrier_events: Sequence[Any] = (),
    ) -> None:
        """Set the events, two of each.

        Args:
            pack_events: Recorded when a slot is packed.
            unpack_events: Recorded when a slot is unpacked.
            barrier_events: Recorded when a batch has arrived; without them nothing but the host
                orders unpacking after it.

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
            iter_schedules: What this PE does in each iteration.
            num_iterations: Of the schedule, equal on all PEs.

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
                    self._wait_for_producer(self.torch_pack_stream_wrapper)
                    self._wait_for_producer(self.torch_unpack_stream_wrapper)
                    self._pack(schedules, 0)
                self._pack(schedules, i + 1)
                self._unpack(schedules, i - 1)
                self._await_packed(i, schedule["send"])
            except BaseException as error:
                self.buffer_manager.give_up(f"{type(error).__name__}: {error}")
                raise
            self.buffer_manager.exchange(i, schedule["send"], schedule["recv"])
            self._note_arrival(i, schedule["recv"])
        self._unpack(schedules, len(schedules) - 1)
        self._release_producer()

    def _pack(self, schedules: Sequence[IterationSchedule], iteration: int) -> None:
        batch = schedules[iteration]["send"] if iteration < len(schedules) else None
        if batch is not None:
            self._launch_pack(iteration, batch)

    def _unpack(self, schedules: Sequence[IterationSchedule], iteration: int) -> None:
        batch = schedules[iteration]["recv"] if iteration >= 0 else None
        if batch is not None:
            self._launch_unpack(iteration, batch)
            if batch.gpu_plan is not None:
                # A peer may write the slot from the next exchange on.
                self.unpack_events[iteration % NUM_SLOTS].synchronize()

    def _await_packed(self, iteration: int, batch: ScheduledBatch | None) -> None:
        if batch is not None and batch.gpu_plan is not None:
            event = self.pack_events[iteration % NUM_SLOTS]
            if self.torch_send_stream_wrapper is not None:
                self.torch_send_stream_wrapper.wait_event(event)
            event.synchronize()

    def _note_arrival(self, iteration: int, batch: ScheduledBatch | None) -> None:
        """Let unpacking wait for the send stream, where there is one."""
        if batch is not None and self.barrier_events and self.torch_send_stream_wrapper is not None:
            event = self.barrier_events[iteration % NUM_SLOTS]
            event.record(stream=self.torch_send_stream_wrapper)
            self.torch_unpack_stream_wrapper.wait_event(event)

    def _launch_pack(self, iteration: int, batch: ScheduledBatch) -> None:
        """Start to pack `batch` into the send slot of `iteration`."""
        if batch.gpu_plan is not None:
            self.kernel_launcher.launch_pack(
                batch.gpu_plan,
                self.pack_stream,
                self.torch_pack_stream_wrapper,
                self.pack_events[iteration % NUM_SLOTS],
            )

    def _launch_unpack(self, iteration: int, batch: ScheduledBatch) -> None:
        """Start to unpack `batch` from the receive slot of `iteration`."""
        if batch.gpu_plan is not None:
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
        if not receives:
            return
        copy_stream = self.torch_copy_stream_wrapper
        self._wait_for_producer(copy_stream)
        is_cuda = isinstance(copy_stream, torch.cuda.Stream)
        with torch.cuda.stream(copy_stream) if is_cuda else contextlib.nullcontext():
            for task_id, receive in receives.items():
                send = sends[task_id]
                target = bytes_at(receive.dest_tensor, receive.dest_pos, receive.size)
                target.copy_(bytes_at(send.src_tensor, send.src_pos, send.size))
        copy_stream.synchronize()
        PELogger.debug("%d tasks copied within PE %d", len(receives), self.my_pe)

    def _current_stream(self) -> Any:
        """Return the stream that the caller's work on its tensors is in; None on the CPU."""
        wrapper = self.torch_pack_stream_wrapper
        if isinstance(wrapper, torch.cuda.Stream):
            return torch.cuda.current_stream(wrapper.device)
        return None

    def _wait_for_producer(self, stream: Any) -> None:
        """Let work of `stream` wait for what made, or still reads, the caller's tensors."""
        producer = self._current_stream()
        if producer is not None:
            stream.wait_stream(producer)

    def _release_producer(self) -> None:
        """Let the caller's later work see what was unpacked, and not overwrite what is packed."""
        producer = self._current_stream()
        if producer is not None:
            producer.wait_stream(self.torch_pack_stream_wrapper)
            producer.wait_stream(self.torch_unpack_stream_wrapper)
