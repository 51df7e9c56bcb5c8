"""The memory that `Buffer.get_local_buffer_tensor` shows; no rows pass through it."""

from __future__ import annotations

import torch


class LocalMemory:
    """So many bytes, which exist from the first look on.

    Args:
        num_bytes: Any number.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._bytes: torch.Tensor | None = None

    def view(
        self, dtype: torch.dtype, size: torch.Size | tuple[int, ...] | None, offset: int
    ) -> torch.Tensor:
        """Elements from `offset` on, in a shape or all of them in one dimension.

        Raises:
            ValueError: The view does not fit.
        """
        if self._bytes is None:
            self._bytes = torch.zeros(self._num_bytes, dtype=torch.uint8)
        whole = self._num_bytes // dtype.itemsize
        elements = self._bytes[: whole * dtype.itemsize].view(dtype)
        num_wanted = whole - offset if size is None else torch.Size(size).numel()
        if num_wanted < 0 or offset + num_wanted > whole:
            raise ValueError(
                f"{num_wanted} elements from {offset} on do not fit into {whole} of {dtype}"
            )
        view = elements[offset : offset + num_wanted]
        return view if size is None else view.view(size)
