"""Models whose weights lie in the symmetric heap, where a refit writes them in place."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor

from moe_comm.arguments import shown
from moe_comm.peers.communicator import Communicator
from moe_comm.resharding.describe.module_tensors import (
    RefitSide,
    TensorSide,
    fsdp_modules,
    get_refit_tensor_dict,
    local_tensor,
    named_refit_tensors,
)
from moe_comm.tensors.memory import num_spanned, problem_with_memory

# Tensors keep their place within a line, so that none becomes less aligned than it was.
_LINE_BYTES = 64


@dataclasses.dataclass
class _Span:
    """Memory that some tensors share. Bounds are addresses.

    The start lies as far behind that of a line as the first tensor behind a multiple of its element's size.
    """

    start: int
    stop: int
    tensors: list[torch.Tensor]
    heap_offset: int = 0

    @property
    def num_bytes(self) -> int:
        return -(-(self.stop - self.start) // _LINE_BYTES) * _LINE_BYTES


def place_in_heap(module: torch.nn.Module, communicator: Communicator) -> int:
    """Move parameters and persistent buffers into this rank's symmetric heap. Local.

    A refit through the `symmetric` transport then writes them in place. The parameters and buffers
    stay the same objects with the same values, strides and gradients; tensors that share memory with
    each other go on doing so. Tensors outside the module that share it do not: move a model before
    an optimizer or a wrapper has made flat views of its parameters. What lies in the heap already
    stays where it is. The memory goes back to the heap when the last of the tensors that were moved
    together is gone.

    Modules of `fully_shard` may be moved at any time. A part of theirs that is smaller than the first, which
    they pad, ends outside the heap again.

    Args:
        module: Its parameters are plain CPU tensors, or DTensors over such.
        communicator: Communicator whose heap is used; its backend must be "host".

    Returns:
        Bytes taken from the heap.

    Raises:
        ValueError: A tensor cannot be moved, or there is no heap. Nothing was moved.
        CapacityError: The heap cannot hold all of them. Nothing was moved.
    """
    native = communicator.require_native()
    spans = [
        span for span in _spans(module) if native.find(span.start, span.stop - span.start) is None
    ]
    num_bytes = 0
    for span in spans:
        span.heap_offset = num_bytes
        num_bytes += span.num_bytes
    if not spans:
        return 0
    heap_memory = communicator.empty(num_bytes, dtype=torch.uint8)
    for span in spans:
        _move(span, heap_memory)
    if any(True for _ in fsdp_modules(module)):
        # FSDP gathers from flat views of the parts, which it makes anew after a load, here of nothing.
        module.load_state_dict({}, strict=False)
    return num_bytes


def _spans(module: torch.nn.Module) -> list[_Span]:
    """The memory of a module's tensors; what overlaps is one span."""
    found = []
    for name, tensor in named_refit_tensors(module):
        plain = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        problem = _problem_with(plain)
        if problem is None and plain.is_inference():
            problem = "it was made in inference mode, which forbids to change where it lies"
        if problem is not None:
            raise ValueError(f"{name} cannot be moved into the heap: {problem}")
        if plain.numel() > 0:
            address = plain.data_ptr()
            # Files of safetensors may begin a tensor at any byte, and it is read where it lies there: torch
            # 2.13's `consolidate_safetensors_files` writes such.
            odd = address % plain.element_size()
            start = (address - odd) // _LINE_BYTES * _LINE_BYTES + odd
            found.append(_Span(start, address + _extent_bytes(plain), [plain]))
    spans: list[_Span] = []
    for span in sorted(found, key=lambda span: span.tensors[0].data_ptr()):
        (plain,) = span.tensors
        if spans and plain.data_ptr() < spans[-1].stop:
            if (plain.data_ptr() - spans[-1].start) % plain.element_size():
                first = spans[-1].tensors[0]
                raise ValueError(
                    f"{first.dtype} at 0x{first.data_ptr():x} and {plain.dtype} at 0x{plain.data_ptr():x} cannot be "
                    "moved into the heap: they overlap, and no shift brings both to multiples of their sizes"
                )
            spans[-1].stop = max(spans[-1].stop, span.stop)
            spans[-1].tensors += span.tensors
        else:
            spans.append(span)
    return spans


def _problem_with(tensor: torch.Tensor) -> str | None:
    if tensor.device.type != "cpu":
        return f"it lies on {tensor.device}, the heap holds CPU tensors"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return f"its layout is {'quantized' if tensor.is_quantized else tensor.layout}"
    if hasattr(tensor, "__tensor_flatten__"):
        return f"a {type(tensor).__name__} is made of other tensors"
    problem = problem_with_memory(tensor)
    return None if problem is None else f"it {problem}"


def _extent_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the first to the last element, gaps included."""
    return num_spanned(tensor) * tensor.element_size()


def _bytes_of(storage: torch.UntypedStorage, offset: int, num_bytes: int) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage, offset, (num_bytes,), (1,))


def _move(span: _Span, heap_memory: torch.Tensor) -> None:
    target = heap_memory.untyped_storage()
    first = int(heap_memory.storage_offset()) + span.heap_offset
    copied = set()
    for tensor in span.tensors:
        offset = first + tensor.data_ptr() - span.start
        num_bytes = _extent_bytes(tensor)
        if (offset, num_bytes) not in copied:
            copied.add((offset, num_bytes))
            source = _bytes_of(
                tensor.untyped_storage(),
                int(tensor.storage_offset()) * tensor.element_size(),
                num_bytes,
            )
            _bytes_of(target, offset, num_bytes).copy_(source)
        moved = torch.empty(0, dtype=tensor.dtype).set_(
            target, offset // tensor.element_size(), tensor.shape, tensor.stride()
        )
        tensor.data = moved


class SharedWeights:
    """Storages of ordinary memory that peers write in place, until this is closed.

    Made by `share_in_place`. Keeps the storages. When it is gone, or its `with` block left, the memory is
    private again, at the same addresses with the same contents.

    Attributes:
        num_bytes: Bytes of the storages that are shared.
    """

    def __init__(self, pages: Iterable[_Pages], storages: list[_Storage]) -> None:
        self.num_bytes = sum(storage.num_bytes for storage in storages)
        self._shared = list(zip(pages, storages, strict=True))
        # The system takes the memory of a process that ends.
        weakref.finalize(self, _unshare, self._shared).atexit = False

    def close(self) -> None:
        """Make the memory private again. Local, idempotent; nothing may write to it meanwhile.

        Raises:
            ValueError: A refit is writing to it.
            CapacityError: The machine has no memory for it.
        """
        _unshare(self._shared)

    def __enter__(self) -> SharedWeights:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _Pages(Protocol):
    """Pages of the heap in the place of a storage's own."""

    def unshare(self) -> None: ...

    def abandon(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class _Storage:
    """A storage, and where it lay when it was shared."""

    storage: torch.UntypedStorage
    address: int
    num_bytes: int
    name: str

    @property
    def is_in_place(self) -> bool:
        return self.storage.data_ptr() == self.address and self.storage.nbytes() >= self.num_bytes


def _unshare(shared: list[tuple[_Pages, _Storage]]) -> None:
    while shared:
        pages, storage = shared[-1]
        if storage.is_in_place:
            pages.unshare()
        else:
            pages.abandon()
        shared.pop()


def share_in_place(side: RefitSide, communicator: Communicator) -> SharedWeights:
    """Have peers write a refit's ordinary memory as they write the heap, at the addresses where it is. Local.

    The whole pages of every storage become pages of this rank's symmetric heap; the few bytes before and
    behind them are copied after each refit. Tensors, views of them outside `side` and raw addresses go on
    being good. The next refit through the `symmetric` transport writes them in place. A storage smaller
    than a page, or in the heap already, stays what it is.

    Forked children do not have the memory, as they have none of the heap: start workers by "spawn". Nothing
    else may write to these storages while this call or a refit runs, and they must not be resized before
    they are private again.

    Args:
        side: A module or `CheckpointViews`; its tensors are plain CPU tensors, or DTensors over such.
        communicator: Communicator of the refit's copy service, whose heap is used; its backend must be
            "host".

    Returns:
        Object that keeps the memory shared.

    Raises:
        TypeError: `side` is neither.
        ValueError: A tensor cannot be shared: its memory is a file's, pinned, or shared already, or it
            is no plain CPU tensor. Nothing was shared.
        CapacityError: The heap cannot hold all of them. Nothing was shared.
    """
    native = communicator.require_native()
    if not isinstance(side, (torch.nn.Module, TensorSide)):
        raise TypeError(f"side must be a torch.nn.Module or CheckpointViews, got {shown(side)}")
    found: dict[int, _Storage] = {}
    for name, tensor in get_refit_tensor_dict(side).items():
        plain = local_tensor(tensor)
        problem = _problem_with(plain)
        if problem is None and plain.is_pinned():
            problem = "its memory is pinned for a device, which would go on using the old pages"
        if problem is not None:
            raise ValueError(f"{name} cannot be shared: {problem}")
        storage = plain.untyped_storage()
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        # NumPy arrays over the same memory may be of different sizes.
        if address in found and found[address].num_bytes >= num_bytes:
            continue
        if native.has_pages(address, num_bytes) and native.find(address, num_bytes) is None:
            found[address] = _Storage(storage, address, num_bytes, name)
    storages = [found[address] for address in sorted(found)]
    for lower, upper in itertools.pairwise(storages):
        if lower.address + lower.num_bytes > upper.address:
            raise ValueError(
                f"{lower.name} and {upper.name} cannot be shared: their storages, of {lower.num_bytes} "
                f"and {upper.num_bytes} bytes, lie in each other"
            )
    pages = native.share([(storage.address, storage.num_bytes) for storage in storages])
    return SharedWeights(pages, storages)
