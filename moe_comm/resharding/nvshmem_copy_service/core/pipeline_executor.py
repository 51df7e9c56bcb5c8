"""Packing, sending and unpacking, overlapped over iterations."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from moe_comm.peers.agree import unlike_ends
from moe_comm.resharding.nvshmem_copy_service.core.kernel_launcher import KernelLauncher
from moe_comm.resharding.nvshmem_copy_service.logger import PELogger
from moe_comm.resharding.nvshmem_copy_service.memory.double_buffer_manager import (
    DoubleBufferManager,
)
from moe_comm.resharding.nvshmem_copy_service.memory.slot_signals import NUM_SLOTS
from moe_comm.resharding.nvshmem_copy_service.memory.tensor_pointer_utils import (
    TensorPointerExtractor,
)
from moe_comm.resharding.nvshmem_copy_service.nvshmem_types import (
    IterationSchedule,
    ReceiveRequest,
    ScheduledBatch,
    SendRequest,
)

__all__ = ["PipelineExecutor"]


class PipelineExecutor:
    """Runs the schedule of one PE.

    No barrier: a PE waits for the PE whose batch it unpacks, and for the PE whose slot it fills,
    and for no other. Iteration i fills slot i modulo 2 of the receiver, which lets its next sender
    have it when it has unpacked.

    Args:
        kernel_launcher: Packs and unpacks.
        buffer_manager: The slots and their signals.
        my_pe: This PE.
        producer_stream: The stream that the caller's work on its tensors is in; None for torch's
            current stream of the device, nothing on the CPU.
    """

    def __init__(
        self,
        kernel_launcher: KernelLauncher,
        buffer_manager: DoubleBufferManager,
        my_pe: int,
        *,
        producer_stream: Callable[[], Any] | None = None,
    ) -> None:
        self.kernel_launcher = kernel_launcher
        self.buffer_manager = buffer_manager
        self.my_pe = my_pe
        self._producer_stream = producer_stream
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
        named = {name.removesuffix("_wrapper"): stream for name, stream in wrappers.items()}
        if len(named) < len(wrappers):
            raise TypeError(f"set_streams() got a stream twice: {sorted(wrappers)}")
        # With three streams by position and none by name, there is none for sending.
        is_short = len(args) == 3 and not named
        order = ("pack", "unpack", "copy") if is_short else ("pack", "unpack", "send", "copy")
        torch_streams = {
            f"torch_{role}_stream": stream for role, stream in zip(order, args, strict=False)
        }
        if doubled := named.keys() & torch_streams.keys():
            raise TypeError(f"set_streams() got a stream twice: {sorted(doubled)}")
        torch_streams |= named
        roles = {f"torch_{role}_stream" for role in ("pack", "unpack", "send", "copy")}
        if unknown := torch_streams.keys() - roles:
            raise TypeError(f"set_streams() got unknown streams: {sorted(unknown)}")
        if missing := roles - {"torch_send_stream"} - torch_streams.keys():
            raise TypeError(f"set_streams() is missing streams: {sorted(missing)}")
        self.pack_stream = pack_stream
        self.unpack_stream = unpack_stream
        self.send_stream = send_stream
        self.copy_stream = copy_stream
        self.torch_pack_stream_wrapper = torch_streams["torch_pack_stream"]
        self.torch_unpack_stream_wrapper = torch_streams["torch_unpack_stream"]
        self.torch_send_stream_wrapper = torch_streams.get("torch_send_stream")
        self.torch_copy_stream_wrapper = torch_streams["torch_copy_stream"]

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
        """Run the first `num_iterations` iterations. Called by every PE with as many.

        In iteration i: pack i + 1, unpack i - 1, send i. Returns when this PE has received
        everything and given away everything, whatever other PEs still do.

        Args:
            iter_schedules: What this PE does in each iteration.
            num_iterations: Of the schedule, equal on all PEs.

        Raises:
            RuntimeError: Streams or events are missing.
            PeerFailedError: A PE died, left or gave up; the communicator is aborted.
            PeerTimeoutError: A PE does not get on; the communicator is aborted.
        """
        if self.torch_pack_stream_wrapper is None or not self.pack_events:
            raise RuntimeError("set_streams() and set_events() must be called first")
        schedules = iter_schedules[:num_iterations]
        try:
            self._run(schedules, self.buffer_manager.signals.take_epochs(num_iterations))
        except BaseException as error:
            self.buffer_manager.give_up(f"{type(error).__name__}: {error}")
            raise

    def _run(self, schedules: Sequence[IterationSchedule], first_epoch: int) -> None:
        self._wait_for_producer(self.torch_pack_stream_wrapper)
        self._wait_for_producer(self.torch_unpack_stream_wrapper)
        num_iterations = len(schedules)
        for slot_idx in range(NUM_SLOTS):
            self._offer_slot(schedules, slot_idx, first_epoch)
        self._pack(schedules, 0)
        for i in range(num_iterations + 1):
            self._pack(schedules, i + 1)
            if i > 0 and (received := schedules[i - 1]["recv"]) is not None:
                self._receive(i - 1, received, first_epoch + i - 1)
                # The next sender may fill the slot.
                self._offer_slot(schedules, i - 1 + NUM_SLOTS, first_epoch)
            if i < num_iterations and (sent := schedules[i]["send"]) is not None:
                self._send(i, sent, first_epoch + i)
        self._let_producer_go_on()

    def _pack(self, schedules: Sequence[IterationSchedule], iteration: int) -> None:
        batch = schedules[iteration]["send"] if iteration < len(schedules) else None
        if batch is not None:
            self._launch_pack(iteration, batch)

    def _offer_slot(
        self, schedules: Sequence[IterationSchedule], begin: int, first_epoch: int
    ) -> None:
        """Tell the sender of the first batch from iteration `begin` on, every second one, to go ahead."""
        for iteration in range(begin, len(schedules), NUM_SLOTS):
            batch = schedules[iteration]["recv"]
            if batch is not None:
                self.buffer_manager.signals.post_ready(
                    batch.src_pe, iteration % NUM_SLOTS, first_epoch + iteration
                )
                return

    def _send(self, iteration: int, batch: ScheduledBatch, epoch: int) -> None:
        slot_idx = iteration % NUM_SLOTS
        if batch.gpu_plan is not None:
            if self.torch_send_stream_wrapper is not None:
                self.torch_send_stream_wrapper.wait_event(self.pack_events[slot_idx])
            else:
                self.pack_events[slot_idx].synchronize()
        signals = self.buffer_manager.signals
        signals.await_ready(batch.dest_pe, slot_idx, epoch)
        self.buffer_manager.put(iteration, batch.dest_pe, batch.total_size)
        signals.post_arrived(batch.dest_pe, slot_idx, epoch)
        PELogger.trace(
            "iteration %d: %d bytes to PE %d", iteration, batch.total_size, batch.dest_pe
        )

    def _receive(self, iteration: int, batch: ScheduledBatch, epoch: int) -> None:
        slot_idx = iteration % NUM_SLOTS
        self.buffer_manager.signals.await_arrived(batch.src_pe, slot_idx, epoch)
        if self.barrier_events and self.torch_send_stream_wrapper is not None:
            self.barrier_events[slot_idx].record(stream=self.torch_send_stream_wrapper)
            self.torch_unpack_stream_wrapper.wait_event(self.barrier_events[slot_idx])
        self._launch_unpack(iteration, batch)
        if batch.gpu_plan is not None:
            self.unpack_events[slot_idx].synchronize()
        PELogger.trace(
            "iteration %d: %d bytes from PE %d", iteration, batch.total_size, batch.src_pe
        )

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
        unlike = unlike_ends(sends, receives, operator.attrgetter("size"))
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
        self._wait_for_producer(self.torch_copy_stream_wrapper)
        pointer = TensorPointerExtractor.get_pointer
        src, dst, sizes = [], [], []
        for task_id, receive in receives.items():
            send = sends[task_id]
            src.append(pointer(send.src_tensor) + send.src_pos)
            dst.append(pointer(receive.dest_tensor) + receive.dest_pos)
            sizes.append(receive.size)
        vectors = [torch.tensor(values, dtype=torch.int64) for values in (src, dst, sizes)]
        self.kernel_launcher.copy(
            (vectors[0], vectors[1], vectors[2], len(sizes)), is_streaming=True
        )
        self.torch_copy_stream_wrapper.synchronize()
        PELogger.debug("%d tasks copied within PE %d", len(sizes), self.my_pe)

    def _current_stream(self) -> Any:
        if self._producer_stream is not None:
            return self._producer_stream()
        wrapper = self.torch_pack_stream_wrapper
        if isinstance(wrapper, torch.cuda.Stream):
            return torch.cuda.current_stream(wrapper.device)
        return None

    def _wait_for_producer(self, stream: Any) -> None:
        """Let work of `stream` wait for what made, or still reads, the caller's tensors."""
        producer = self._current_stream()
        if producer is not None:
            stream.wait_stream(producer)

    def _let_producer_go_on(self) -> None:
        """Let the caller's later work see what was unpacked, and not overwrite what is packed."""
        producer = self._current_stream()
        if producer is not None:
            producer.wait_stream(self.torch_pack_stream_wrapper)
            producer.wait_stream(self.torch_unpack_stream_wrapper)
