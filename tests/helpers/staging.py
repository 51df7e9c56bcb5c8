"""Copies between host and GPU, and memory of torch's, that wait for no kernel of another stream.

Ranks that are threads on one GPU wait for each other's kernels. A copy of pageable memory and an allocation may
wait for all kernels of the device, and so for ever (docs/gpu.md).
"""

from __future__ import annotations

import threading

import torch

from tests.helpers import guarded_device

NUM_BYTES = 8 << 20
SMALL_BYTES = 1 << 20  # what torch takes from segments of small tensors at most
NUM_SMALL = 32
LARGE_BYTES = 64 << 20


def warm_up_allocator(device: torch.device) -> None:
    """Let torch hold memory for the current stream: it asks the driver for more only where that is not enough."""
    sizes = [*[SMALL_BYTES] * NUM_SMALL, LARGE_BYTES]
    del [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes][:]


class Staging:
    """Page-locked memory through which tensors cross, a part at a time, in the order of the current stream.

    Made before kernels run: page-locking may wait for them, too.

    Args:
        device: Device of the tensors on the other side; memory is page-locked for a GPU alone.
        num_bytes: Bytes of a part, a multiple of 16.
    """

    def __init__(self, device: torch.device, num_bytes: int = NUM_BYTES) -> None:
        self._device = device
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._lock = threading.Lock()

    def put(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Copy a tensor of the host to one on the device; returns `target`."""
        if source.stride() != target.stride():
            same = torch.empty_strided(target.shape, target.stride(), dtype=source.dtype)
            source = same.copy_(source)
        there, here = _bytes_of(target), _bytes_of(source)
        with self._lock:
            for begin in range(0, len(here), len(self._memory)):
                end = min(len(here), begin + len(self._memory))
                part = self._memory[: end - begin]
                part.copy_(here[begin:end])
                there[begin:end].copy_(part, non_blocking=True)
                self._settle()
        return target

    def fetch(self, source: torch.Tensor) -> torch.Tensor:
        """A copy on the host of a tensor of the device, of the same strides."""
        target = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype)
        here, there = _bytes_of(target), _bytes_of(source)
        with self._lock:
            for begin in range(0, len(here), len(self._memory)):
                end = min(len(here), begin + len(self._memory))
                part = self._memory[: end - begin]
                part.copy_(there[begin:end], non_blocking=True)
                self._settle()
                here[begin:end].copy_(part)
        return target

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        elif self._device.type == guarded_device.DEVICE:
            guarded_device.synchronize()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """`[num_bytes]` uint8 that begins with the first element and ends with the last, gaps included."""
    if tensor.numel() == 0:
        return torch.empty(0, dtype=torch.uint8)
    span = 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.detach().as_strided((span,), (1,)).view(torch.uint8)
