"""Full tensors by name from one process to others, in buckets, as whole versions."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from moe_comm.arguments import shown
from moe_comm.resharding.describe import intervals
from moe_comm.tensors.memory import as_resolved, check_memory

__all__ = ["OutgoingTensors", "StreamError", "TensorStream"]

_ALIGNMENT = 16  # bytes, of a tensor in a bucket


class StreamError(RuntimeError):
    """A stream of tensors did not arrive whole; the message names the tensor or the rank."""


class TensorStream:
    """One end of a stream of named tensors over a process group, whose rank `root` sends.

    Both ends are used as often as the weights have changed: `send` on one rank, `receive` on the others.
    Each wait is bounded by the group's timeout.

    Args:
        group: A process group, or a backend of one such as `ProcessGroupGloo`.
        bucket_bytes: Bytes of memory for what travels at a time, on every rank; a larger tensor travels in
            parts. Equal on every rank or larger on those that receive.
        root: The rank that sends.
        device: Device of the buckets, one that the group's backend can send from.

    Raises:
        TypeError, ValueError: There is no group, or a bucket holds nothing.

    Attributes:
        version: Version that came with the last stream that arrived whole; None before.
        bucket_bytes: Bytes of a bucket as given, in whole pieces of 16.
    """

    def __init__(
        self,
        group: Any,
        bucket_bytes: int = 256 << 20,
        *,
        root: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        if bucket_bytes < _ALIGNMENT:
            raise ValueError(f"bucket_bytes must be >= {_ALIGNMENT}, got {bucket_bytes}")
        if not callable(getattr(group, "broadcast", None)):
            raise TypeError(
                f"group must be a process group or a backend of one, got {shown(group)}"
            )
        self.version: str | None = None
        self._group, self._root, self._device = group, root, torch.device(device)
        self.bucket_bytes = bucket_bytes // _ALIGNMENT * _ALIGNMENT
        self._bucket = torch.empty(0, dtype=torch.uint8, device=self._device)

    def send(self, named: Iterable[tuple[str, torch.Tensor]], version: str | None = None) -> int:
        """Send tensors, each of them once, and return their number of bytes.

        Raises:
            StreamError: A rank did not take all of them, or is gone.
            ValueError: A name comes twice, or a tensor has no memory of its own (sparse, a DTensor, on meta).
            TypeError: A name is no str.
            Exception: Error that `named` raises; those that receive are told.
        """
        outgoing = self.begin(version)
        try:
            for name, tensor in named:
                outgoing.add(name, tensor)
        except StreamError:
            raise
        except BaseException as error:
            outgoing.fail(error)
            raise
        return outgoing.end()

    def begin(self, version: str | None = None) -> OutgoingTensors:
        """Begin to send, for a caller that gets tensors one after the other; receivers wait for its end."""
        return OutgoingTensors(self, version)

    def receive(
        self, version: str | None = None
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield name and tensor; one is what it is until the next is asked for.

        Stopping before the end fails the stream on every rank, once all of it has been sent.

        Args:
            version: Version that the sender must have, if it states one; None for any.

        Raises:
            StreamError: The sender has another version, before anything is yielded; its tensors ended with
                an error or do not fit together; or another rank did not take all of them.
        """
        state = _Receiver()
        is_taken = False
        try:
            for header, bucket in self._buckets(state):
                if other := state.other_version(version):
                    raise StreamError(other)
                yield from state.take(header, bucket)
            is_taken = True
        finally:
            if not is_taken and not state.is_broken:
                for _ in self._buckets(state):
                    pass
                state.is_broken = True
                self._agree(state.error or "stopped")
        if state.error:
            self._agree("")
            raise StreamError(
                f"the sender stopped after {state.num_whole} tensors, the last {state.last}: {state.error}"
            )
        wrong = state.what_is_missing() or state.other_version(version)
        failed = self._agree(wrong)
        if wrong:
            raise StreamError(wrong)
        if failed:
            raise StreamError(f"ranks {failed} did not take all of {state.num_whole} tensors")
        self.version = state.version

    def _reserve(self, num_bytes: int) -> torch.Tensor:
        if self._bucket.numel() < num_bytes:
            self._bucket = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._bucket

    def _buckets(self, state: _Receiver) -> Iterator[tuple[list[list[Any]], torch.Tensor]]:
        """Headers and buckets, up to the end or the sender's error."""
        while not state.is_ended:
            said = self._broadcast_json(None, f"what comes after {state.last}", state)
            if "parts" in said:
                bucket = self._reserve(said["bytes"])[: said["bytes"]]
                if said["bytes"]:
                    self._broadcast(bucket, said["parts"][-1][0], state)
                state.version = said["version"]
                yield said["parts"], bucket
            else:
                state.is_ended = True
                state.error = said.get("error", "")
                state.num_sent = said.get("end", 0)
                state.version = said.get("version")

    def _broadcast_json(self, said: Any, what: str, state: _Receiver | None = None) -> Any:
        text = json.dumps(said).encode()
        length = torch.tensor([len(text)], device=self._device)
        self._broadcast(length, what, state)
        row = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._device)
        if state is not None:
            row = torch.empty(int(length.item()), dtype=torch.uint8, device=self._device)
        self._broadcast(row, what, state)
        return json.loads(bytes(row.tolist())) if state is not None else said

    def _broadcast(self, tensor: torch.Tensor, what: str, state: _Receiver | None = None) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = self._root
        try:
            self._group.broadcast([tensor], options).wait()
        except RuntimeError as error:
            if state is not None:
                state.is_broken = True
            raise StreamError(
                f"rank {self._group.rank()}: waiting for the others at {what}: {error}"
            ) from error

    def _agree(self, wrong: str) -> list[int]:
        """Return the ranks that did not take all."""
        marks = torch.zeros(self._group.size(), dtype=torch.int64, device=self._device)
        marks[self._group.rank()] = bool(wrong)
        try:
            self._group.allreduce([marks], dist.AllreduceOptions()).wait()
        except RuntimeError as error:
            raise StreamError(
                f"rank {self._group.rank()}: waiting for the others at the end: {error}"
            ) from error
        return [rank for rank, mark in enumerate(marks.tolist()) if mark]


class OutgoingTensors:
    """A stream under way, at the rank that sends: `add` each tensor once, then `end`, or `fail`.

    Args:
        stream: Stream that the tensors travel over.
        version: Version that travels with them; None for none.
    """

    def __init__(self, stream: TensorStream, version: str | None) -> None:
        self._stream, self._version = stream, version
        self._sizes: dict[str, int] = {}
        self._header: list[list[Any]] = []
        self._used = 0
        self._limit = stream.bucket_bytes
        self._bucket = stream._reserve(self._limit)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Send a tensor, which may change again when this has returned.

        Raises:
            StreamError: A rank is gone.
            TypeError, ValueError: As `TensorStream.send`; nothing of the tensor is sent.
        """
        if not isinstance(name, str):
            raise TypeError(f"a name of a tensor must be a str, got {shown(name)}")
        if name in self._sizes:
            raise ValueError(f"{name} comes twice in one stream of tensors")
        check_memory(name, tensor)
        self._sizes[name] = size = tensor.numel() * tensor.element_size()
        about = [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for start, part in self._parts(tensor.detach(), size):
            num_bytes = part.numel() * part.element_size()
            if self._used + num_bytes > self._limit:
                self._send_bucket()
            place = self._bucket[self._used : self._used + num_bytes]
            place.view(part.dtype).view(part.shape).copy_(part)
            self._header.append([*about, start, self._used, num_bytes])
            self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT

    def end(self) -> int:
        """Send the rest, and return the number of bytes of all tensors.

        Raises:
            StreamError: A rank did not take all of them, or is gone.
        """
        self._send_bucket()
        self._stream._broadcast_json({"end": len(self._sizes), "version": self._version}, "the end")
        failed = self._stream._agree("")
        if failed:
            raise StreamError(
                f"ranks {failed} did not take all of {len(self._sizes)} tensors: see their errors"
            )
        self._stream.version = self._version
        return sum(self._sizes.values())

    def fail(self, error: BaseException) -> None:
        """End with an error, which those that receive raise.

        Raises:
            StreamError: A rank is gone.
        """
        said = {"error": f"{type(error).__name__}: {error}"}
        self._stream._broadcast_json(said, "telling of an error")
        self._stream._agree("")

    def _parts(self, tensor: torch.Tensor, size: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Parts and the bytes at which they begin: one, of a tensor that fits."""
        if size <= self._limit:
            yield 0, tensor
            return
        flat = as_resolved(tensor).view(-1).view(torch.uint8)
        for start in range(0, size, self._limit):
            yield start, flat[start : start + self._limit]

    def _send_bucket(self) -> None:
        header, used = self._header, self._used
        self._header, self._used = [], 0
        if header:
            name = header[-1][0]
            said = {"parts": header, "bytes": used, "version": self._version}
            self._stream._broadcast_json(said, name)
            if used:
                self._stream._broadcast(self._bucket[:used], name)


class _Receiver:
    """Progress of a stream at one that receives."""

    def __init__(self) -> None:
        self.is_ended = self.is_broken = False
        self.error = ""
        self.version: str | None = None
        self.num_whole = self.num_sent = 0
        self.last = "its begin"
        self._rest: tuple[str, torch.Tensor, int] | None = None

    def take(
        self, header: list[list[Any]], bucket: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that are whole with this bucket."""
        for name, kind, shape, start, at, num_bytes in header:
            dtype = getattr(torch, kind)
            size = int(dtype.itemsize) * intervals.num_elements(shape)
            part = bucket[at : at + num_bytes]
            self.last = name
            if num_bytes == size:
                self.num_whole += 1
                yield name, part.view(dtype).view(shape)
                continue
            if start == 0:
                self._rest = name, torch.empty(size, dtype=torch.uint8, device=bucket.device), 0
            whose, whole, come = self._rest or ("nothing", part, -1)
            if whose != name or come != start:
                raise StreamError(f"{name}: byte {start} comes after byte {come} of {whose}")
            whole[start : start + num_bytes] = part
            self._rest = name, whole, come + num_bytes
            if come + num_bytes == size:
                self._rest = None
                self.num_whole += 1
                yield name, whole.view(dtype).view(shape)

    def other_version(self, version: str | None) -> str:
        """Return which version came, if another one was expected; empty where not."""
        if None in (version, self.version) or version == self.version:
            return ""
        return f"expected version {version}, got {self.version}"

    def what_is_missing(self) -> str:
        """Return what is wrong at the end; empty where nothing is."""
        if self._rest is not None:
            return f"{self._rest[0]}: only {self._rest[2]} of {self._rest[1].numel()} bytes came"
        if self.num_whole != self.num_sent:
            return f"{self.num_whole} tensors came, {self.num_sent} were sent"
        return ""
