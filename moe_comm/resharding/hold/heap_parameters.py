"""Models whose weights lie in the symmetric heap, where a refit writes them in place."""

from __future__ import annotations

import dataclasses

import torch
from torch.distributed.tensor import DTensor

from moe_comm.peers.communicator import Communicator
from moe_comm.resharding.describe.module_tensors import named_refit_tensors
from moe_comm.tensors.memory import num_spanned, problem_with_memory

__all__ = ["place_in_heap"]

# Tensors keep their place within a line, so that none becomes less aligned than it was.
_LINE_BYTES = 64


@dataclasses.dataclass
class _Span:
    """Memory that some tensors share. Bounds are addresses, the start is that of a line."""

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

    Args:
        module: Its parameters are plain CPU tensors, or DTensors over such.
        communicator: Whose heap; its backend must be "host".

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
    return num_bytes


def _spans(module: torch.nn.Module) -> list[_Span]:
    """The memory of a module's tensors; what overlaps is one span."""
    found = []
    for name, tensor in named_refit_tensors(module):
        plain = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        problem = _problem_with(plain)
        if problem is not None:
            raise ValueError(f"{name} cannot be moved into the heap: {problem}")
        if plain.numel() > 0:
            start = plain.data_ptr()
            found.append(
                _Span(start // _LINE_BYTES * _LINE_BYTES, start + _extent_bytes(plain), [plain])
            )
    spans: list[_Span] = []
    for span in sorted(found, key=lambda span: span.tensors[0].data_ptr()):
        if spans and span.tensors[0].data_ptr() < spans[-1].stop:
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
    if tensor.is_inference():
        return "it was made in inference mode, which forbids to change where it lies"
    problem = problem_with_memory(tensor)
    return None if problem is None else f"it {problem}"


def _extent_bytes(tensor: torch.Tensor) -> int:
    """From the first to the last byte, whatever lies between."""
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
