"""`BufferAllocator`: tensors that are planned before the storage is there in which they lie."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from moe_comm.compat.deep_ep.utils.math import align
from moe_comm.peers.communicator import Communicator


def get_num_allocation_alignment() -> int:
    """Bytes of which the places of planned tensors and the sizes of storages are multiples."""
    return 2 << 20


def get_num_rdma_alignment() -> int:
    """Bytes of which the places of tensors of a session are multiples."""
    return 64


def get_num_tma_alignment() -> int:
    """Bytes of which DeepEP's kernels want addresses and sizes to be multiples; nothing here does."""
    return 32


class BufferAllocator:
    """A plan of tensors in one storage, for the buffer that is made with it.

    All ranks plan the same tensors in the same order.

    Attributes:
        alignment: Every tensor begins at a multiple of so many bytes, and their end is one.
        num_bytes: Bytes of the storage.
        materialized: Whether the storage is there.
    """

    def __init__(self) -> None:
        self.alignment = get_num_allocation_alignment()
        self.num_bytes = 0
        self.materialized = False
        self._planned: list[tuple[torch.Tensor, int]] = []

    def allocate(self, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor on the device "meta" that becomes one of the storage in `materialize`.

        Raises:
            ValueError: The storage is there already.
        """
        self._check_open()
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self._planned.append((tensor, self.num_bytes))
        self.num_bytes = align(self.num_bytes + tensor.nbytes, self.alignment)
        return tensor

    def check(self) -> str:
        """Return the plan as text, for peers, who are to plan the same.

        Raises:
            ValueError: It cannot be made: the storage is there already, nothing is planned, or a tensor has
                a weak reference, of which torch would not tell what it is now.
        """
        self._check_open()
        if not self.num_bytes:
            raise ValueError("a BufferAllocator must plan tensors with elements, got 0 bytes")
        for place, (tensor, _) in enumerate(self._planned):
            if weakref.getweakrefcount(tensor):
                raise ValueError(
                    f"tensor {place} of a BufferAllocator must have no weak references, got "
                    f"{weakref.getweakrefcount(tensor)}"
                )
        return str([(tuple(tensor.shape), str(tensor.dtype)) for tensor, _ in self._planned])

    def materialize(self, storage: torch.Tensor) -> None:
        """Let every planned tensor be a view of `storage`: the same objects, once.

        Args:
            storage: uint8 `[num_bytes]`, contiguous.

        Raises:
            ValueError: See `check`; or the storage is another one.
        """
        self.check()
        shape = (self.num_bytes,)
        if storage.dtype is not torch.uint8 or storage.shape != shape or storage.stride() != (1,):
            raise ValueError(
                f"storage must be torch.uint8 of shape {shape}, contiguous; got {storage.dtype} of shape "
                f"{tuple(storage.shape)}, strides {storage.stride()}"
            )
        for tensor, begin in self._planned:
            part = storage[begin : begin + tensor.nbytes]
            view = part.view(tensor.dtype).view(tensor.shape)
            torch.utils.swap_tensors(tensor, view)  # type: ignore[no-untyped-call]
        self.materialized = True

    def _check_open(self) -> None:
        if self.materialized:
            raise ValueError(
                f"a BufferAllocator belongs to one buffer: this one's {len(self._planned)} tensors have "
                "their storage already"
            )


def storage_of(communicator: Communicator, num_bytes: int) -> torch.Tensor:
    """uint8 `[num_bytes]`, in the heap where there is one on the device: peers read and write it in place."""
    with torch.inference_mode(mode=False):
        if communicator.native is None or communicator.is_staged:
            return torch.empty(num_bytes, dtype=torch.uint8, device=communicator.device)
        return communicator.empty(num_bytes, dtype=torch.uint8)
