"""Units that move: a chunk is one cell of a tensor, a bucket several chunks with one way to go."""

from __future__ import annotations

import logging
import math
import operator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from moe_comm.resharding.copy_services.process_group import reduce_in_place
from moe_comm.resharding.ir.transfer import Transferable, TransferType
from moe_comm.tensors.memory import bytes_of, check_memory

logger = logging.getLogger("moe_comm.resharding.ir")

ENTRY_ALIGNMENT = 16
"""Bytes; entries of a bucket begin at multiples, so that any dtype can be viewed there."""


def choose_transfer_dtype(source_dtype: torch.dtype, target_dtype: torch.dtype) -> torch.dtype:
    """Choose the dtype that travels: that of the smaller elements, the source's where they are equal."""
    if target_dtype.itemsize < source_dtype.itemsize:
        return target_dtype
    return source_dtype


@dataclass(slots=True, kw_only=True)
class Chunk(Transferable):
    """One cell of one tensor, as one of its ranks sees it.

    Lifecycle: `prepare`, `work = execute()`, `finalize`. In a bucket, the bucket does that.

    Args:
        chunk_shape: Shape of the cell.
        tensor: This rank's part of the source (where it sends) or of the target (where it receives
            or copies to itself).
        slice_tuples: The cell in `tensor`.
        transfer_dtype: Dtype that travels; None for the dtype of `tensor`.
        src_idx: The cell's number, per dimension, among those of the source rank.
        dst_idx: The same of the target rank; where this rank receives or copies to itself.
        src_slice_tuples: The cell in `source_tensor`; SELF_COPY only.
        source_partial_groups: Reductions that turn a `Partial` source into its value, in order.
        source_tensor: Tensor that SELF_COPY reads; None for `tensor`.
        local_tensor: A reduced cell that is sent is also written here: to this rank's part of the
            target. None where this rank is no target of it.
        local_slice_tuples: The cell in `local_tensor`.
        no_coalesce: Whether it goes in a bucket of its own, on both ends: see `chunk_to_bucket_ops`.
    """

    chunk_shape: tuple[int, ...]
    tensor: torch.Tensor | None = None
    slice_tuples: tuple[slice, ...] = ()
    transfer_dtype: torch.dtype | None = None
    src_idx: tuple[int, ...]
    dst_idx: tuple[int, ...] | None = None
    src_slice_tuples: tuple[slice, ...] | None = None
    source_partial_groups: list[tuple[dist.ProcessGroup, str]] | None = None
    source_tensor: torch.Tensor | None = None
    local_tensor: torch.Tensor | None = None
    local_slice_tuples: tuple[slice, ...] = ()
    no_coalesce: bool = False

    def __post_init__(self) -> None:
        if self.transfer_dtype is None and self.tensor is not None:
            self.transfer_dtype = self.tensor.dtype

    def __repr__(self) -> str:
        return (
            f"Chunk({self.transfer_type.name}, src={self.src_rank}, dsts={self.dst_ranks}, "
            f"cell={self.src_idx}, shape={self.chunk_shape}, dtype={self.transfer_dtype})"
        )

    @property
    def nbytes(self) -> int:
        """Number of bytes that travel."""
        return math.prod(self.chunk_shape) * self.wire_dtype.itemsize

    @property
    def wire_dtype(self) -> torch.dtype:
        """`transfer_dtype`, which a chunk without a tensor need not have."""
        if self.transfer_dtype is None:
            raise ValueError(f"{self!r} has neither a tensor nor a transfer_dtype")
        return self.transfer_dtype

    @property
    def bucket_key(self) -> tuple[object, ...]:
        """Chunks of equal keys may share a bucket: (src_rank, dst_ranks, partial_sig, cell_key).

        `cell_key` tells apart chunks that only reduce. They all have `dst_ranks == ()`; in one
        bucket, cells would be reduced in another order than on the ranks that ship them to
        different places.
        """
        partial_sig: tuple[tuple[int, str], ...] = ()
        cell_key: tuple[int, ...] = ()
        if self.source_partial_groups:
            partial_sig = tuple((id(group), op) for group, op in self.source_partial_groups)
            if not self.dst_ranks:
                cell_key = self.src_idx
        return (self.src_rank, self.dst_ranks, partial_sig, cell_key)

    def prepare(self, contiguous: bool = True) -> None:
        """Make `buffer`: what is sent, copied or received into.

        On a source, in this order: slice, reduce over `source_partial_groups` in the tensor's own
        dtype, cast to `transfer_dtype`. Reducing the cast values would round every summand.
        Collective among the ranks of `source_partial_groups`.

        Args:
            contiguous: Whether `buffer` must be contiguous; it always is where it was reduced.

        Raises:
            PeerFailedError, PeerTimeoutError: A reduction failed.
            ValueError: There is no tensor, it has lost its memory, or the cell has another shape than
                `chunk_shape`.
        """
        if self.is_source:
            self.buffer = self._read_cell(contiguous)
        else:
            self.buffer = self._landing_place()

    def finalize(self) -> None:
        """Wait for the transfer; where this rank is the target, write the cell; drop `buffer`.

        Raises:
            PeerFailedError, PeerTimeoutError: The transfer failed.
            RuntimeError: There is nothing to write: `prepare` was not called.
        """
        self.wait()
        if not self.is_source or self.transfer_type is TransferType.SELF_COPY:
            if self.buffer is None:
                raise RuntimeError(f"{self!r} was finalized before it was prepared")
            _write(self._cell(self.tensor, self.slice_tuples), self.buffer)
        self.buffer = None

    def check_memory(self) -> None:
        """Raise ValueError where a tensor of this rank has lost its memory."""
        for tensor in (self.tensor, self.source_tensor, self.local_tensor):
            if tensor is not None:
                check_memory(f"a tensor of {self!r}", tensor)

    def _read_cell(self, contiguous: bool) -> torch.Tensor:
        if self.transfer_type is TransferType.SELF_COPY:
            tensor = self.tensor if self.source_tensor is None else self.source_tensor
            slices = self.src_slice_tuples or ()
        else:
            tensor, slices = self.tensor, self.slice_tuples
        buffer = source = self._cell(tensor, slices)
        if contiguous:
            buffer = buffer.contiguous()
        if self.source_partial_groups:
            # The reduction is in place. The storage tells whether it would write the source: the
            # data pointer of a view at an offset differs from its tensor's.
            if buffer.untyped_storage().data_ptr() == source.untyped_storage().data_ptr():
                buffer = buffer.clone(memory_format=torch.contiguous_format)
            with self.naming("reduce"):
                for group, op in self.source_partial_groups:
                    reduce_in_place(buffer, op, group)
        if self.transfer_type is TransferType.SHADOW:
            return buffer
        # Copies within a rank are rounded too: replicas of one target are equal.
        buffer = buffer.to(self.wire_dtype)
        if self.local_tensor is not None:
            _write(self._cell(self.local_tensor, self.local_slice_tuples), buffer)
        return buffer

    def _landing_place(self) -> torch.Tensor:
        """The cell itself where bytes can arrive in it."""
        cell = self._cell(self.tensor, self.slice_tuples)
        if cell.dtype == self.wire_dtype and cell.is_contiguous():
            return cell
        return torch.empty(self.chunk_shape, dtype=self.wire_dtype, device=cell.device)

    def _cell(self, tensor: torch.Tensor | None, slices: tuple[slice, ...]) -> torch.Tensor:
        if tensor is None:
            raise ValueError(f"{self!r} has no tensor")
        check_memory(f"a tensor of {self!r}", tensor)
        cell = tensor.detach()[slices]
        if tuple(cell.shape) != tuple(self.chunk_shape):
            raise ValueError(
                f"the cell of {self!r} must have shape {self.chunk_shape}, got {tuple(cell.shape)}"
            )
        return cell


def _write(cell: torch.Tensor, buffer: torch.Tensor) -> None:
    if cell.data_ptr() != buffer.data_ptr() or cell.dtype != buffer.dtype:
        cell.copy_(buffer, non_blocking=cell.device == buffer.device)


@dataclass(slots=True, kw_only=True)
class BucketEntry:
    """The place of a chunk in a bucket.

    Args:
        offset: Offset in bytes; a multiple of `ENTRY_ALIGNMENT`.
        nbytes: Bytes of the chunk that travel.
        chunk: The chunk.
    """

    offset: int
    nbytes: int
    chunk: Chunk


@dataclass(slots=True, kw_only=True)
class Bucket(Transferable):
    """Chunks that travel together, as bytes.

    Lifecycle: `prepare`, `launch` until it is True, `is_complete` until it is True, `finalize`.

    Args:
        total_bytes: Bytes of `buffer`.
        key: `bucket_key` of its chunks.
        entries: Chunks in the same order, at the same offsets, on all ranks that take part.
        device: Device of the chunks; None for that of the first.
        buffer_ready_event: Event behind the copies into `buffer` on a GPU.
    """

    total_bytes: int
    key: tuple[object, ...]
    entries: list[BucketEntry]
    device: torch.device | None = None
    buffer_ready_event: torch.cuda.Event | None = None

    def __repr__(self) -> str:
        side = "source" if self.is_source else "target"
        return (
            f"Bucket({self.transfer_type.name}, {side}, src={self.src_rank}, "
            f"dsts={self.dst_ranks}, chunks={len(self.entries)}, bytes={self.total_bytes})"
        )

    def describe(self) -> str:
        """Describe the sender, the data and the receivers, in a few words."""
        transfer = super(Bucket, self).describe()
        return f"{transfer} (a bucket of {len(self.entries)} chunks, {self.total_bytes} bytes)"

    def prepare(self) -> None:
        """Make the buffer that is sent or received into; reduces what is `Partial`.

        A single chunk travels from, or arrives in, its own memory where it can.

        Raises:
            PeerFailedError, PeerTimeoutError: A reduction failed.
        """
        if self.transfer_type in (TransferType.SELF_COPY, TransferType.SHADOW):
            for chunk in map(operator.attrgetter("chunk"), self.entries):
                chunk.prepare(contiguous=False)
                if self.transfer_type is TransferType.SHADOW:
                    chunk.buffer = None
            return
        if len(self.entries) == 1:
            chunk = self.entries[0].chunk
            chunk.prepare()
            assert chunk.buffer is not None
            buffer = bytes_of(chunk.buffer)
        else:
            buffer = self._assemble()
        if self.is_source and buffer.device.type == "cuda":
            self.buffer_ready_event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.buffer_ready_event.record(torch.cuda.current_stream(buffer.device))
        self.buffer = buffer

    def launch(self) -> bool:
        """Start the transfer.

        Returns:
            False where the buffer is not ready yet: call again.

        Raises:
            PeerFailedError, PeerTimeoutError: It could not be started.
        """
        if self.buffer_ready_event is not None:
            if not self.buffer_ready_event.query():  # type: ignore[no-untyped-call]
                return False
            self.buffer_ready_event = None
        self.work = self.execute()
        return True

    def is_complete(self) -> bool:
        """Return whether the transfer has ended. On a CPU, where transfers cannot be asked, waits for it.

        Raises:
            PeerFailedError, PeerTimeoutError: It failed.
        """
        if self.work is None:
            return True
        if self.buffer is None or self.buffer.device.type == "cpu":
            self.wait()
            return True
        return self.work.is_completed()

    def finalize(self) -> None:
        """Wait for the transfer; on a target, write the chunks; drop the buffer.

        Raises:
            PeerFailedError, PeerTimeoutError: The transfer failed; nothing more is written.
        """
        self.wait()
        for entry in self.entries:
            entry.chunk.finalize()
        self.buffer = None

    def _assemble(self) -> torch.Tensor:
        first = self.entries[0].chunk.tensor
        device = self.device if self.device is not None or first is None else first.device
        buffer = torch.empty(self.total_bytes, dtype=torch.uint8, device=device)
        for entry in self.entries:
            chunk = entry.chunk
            place = buffer.narrow(0, entry.offset, entry.nbytes)
            typed = place.view(chunk.wire_dtype).view(chunk.chunk_shape)
            if self.is_source:
                chunk.prepare(contiguous=False)
                assert chunk.buffer is not None
                typed.copy_(chunk.buffer, non_blocking=True)
                chunk.buffer = None
            else:
                chunk.buffer = typed
        return buffer
