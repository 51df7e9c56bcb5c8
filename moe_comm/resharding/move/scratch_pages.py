"""Memory in which pieces wait or are converted, used again and again."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

_LINE_BYTES = 64


def most_staged_bytes(num_elements: int) -> int:
    """Return a bound of what two tensors of so many elements, of 8 bytes at most, take of a `Staging`."""
    return 2 * (8 * num_elements + _LINE_BYTES)


class Staging:
    """Pages that a refit takes once, for what each of its batches holds beside both models.

    Allocated one by one, aligned tensors of some MiB that come and go leave the heap of the C library several
    times as large as what was ever in use at once (seen with glibc 2.36).

    Args:
        num_bytes: Most in use at once, as an upper bound: pages that are never used take no memory. What is
            more, and what lies on a device, torch allocates.
    """

    def __init__(self, num_bytes: int = 0) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._num_used = 0
        if num_bytes:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
            self._memory = torch.frombuffer(mmap.mmap(-1, num_bytes, flags), dtype=torch.uint8)

    def clear(self) -> None:
        """Take back all that was given out: nobody uses it any more."""
        self._num_used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Give a contiguous tensor, which is not initialized, until `clear`."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        start = self._num_used
        if device.type != "cpu" or not 0 < num_bytes <= len(self._memory) - start:
            return torch.empty(shape, dtype=dtype, device=device)
        self._num_used = -(-(start + num_bytes) // _LINE_BYTES) * _LINE_BYTES
        return self._memory[start : start + num_bytes].view(dtype).view(shape)

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Give the elements as another dtype; the tensor itself where it has it."""
        return tensor if tensor.dtype == dtype else self._copy(tensor, dtype)

    def contiguous(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give the elements in order; the tensor itself where they are."""
        return tensor if tensor.is_contiguous() else self._copy(tensor, tensor.dtype)

    def _copy(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.empty(tensor.shape, dtype, tensor.device).copy_(tensor)
