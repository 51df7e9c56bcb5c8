"""A whole tensor as `torch.distributed.checkpoint` asks for it: boxes of it that lie in a rank's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

_aten: Any = torch.ops.aten


class ChunkedTensor(torch.Tensor):
    """A tensor of which this rank holds some boxes, each a view of memory of its own.

    `save`, `async_save` and `load` of `torch.distributed.checkpoint` read and write these views where
    they are. Boxes of all ranks that hold one name are disjoint or equal; equal ones are replicas, of which
    one is written. Nothing is computed with it: operations but those of staging raise NotImplementedError.

    Args:
        shape: Shape of the whole tensor.
        dtype: Dtype of the part that this rank holds.
        offsets: Offset of each box in the whole tensor.
        shards: Tensor of each box, of its sizes and any strides.
        problem: Reason why this cannot be saved, raised when it is; None for none. Loading is not concerned.
    """

    _offsets: list[tuple[int, ...]]
    _shards: list[torch.Tensor]
    _problem: str | None

    @staticmethod
    def __new__(  # noqa: D102 - see the class
        cls: type[ChunkedTensor],
        shape: Sequence[int],
        dtype: torch.dtype,
        offsets: Sequence[tuple[int, ...]],
        shards: Sequence[torch.Tensor],
        problem: str | None = None,
    ) -> ChunkedTensor:
        device = shards[0].device if shards else torch.device("cpu")
        make: Any = torch.Tensor._make_wrapper_subclass
        tensor: ChunkedTensor = make(cls, tuple(shape), dtype=dtype, device=device)
        # Plain containers: staging copies them one by one.
        tensor._offsets = list(offsets)
        tensor._shards = list(shards)
        tensor._problem = problem
        return tensor

    @property
    def chunks(self) -> list[tuple[tuple[int, ...], torch.Tensor]]:
        """Begin of each box in the whole tensor, and its memory."""
        return list(zip(self._offsets, self._shards, strict=True))

    def __repr__(self) -> str:  # type: ignore[override]
        boxes = ", ".join(f"{start}+{tuple(shard.shape)}" for start, shard in self.chunks)
        return f"ChunkedTensor({tuple(self.shape)}, {self.dtype}, [{boxes}])"

    def _with(self, shards: Sequence[torch.Tensor]) -> ChunkedTensor:
        return ChunkedTensor(self.shape, self.dtype, self._offsets, shards, self._problem)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run what staging for `async_save` asks of tensors."""
        first = args[0]
        if func is _aten.detach.default:
            return first._with(first._shards)
        if func is _aten.new_empty.default:
            # The stager hands over the boxes that it has copied, as attributes.
            return ChunkedTensor(args[1], first.dtype, [], [])
        if func is _aten.zeros_like.default:
            return first._with([torch.zeros_like(shard, **kwargs or {}) for shard in first._shards])
        if func is _aten.copy_.default and isinstance(args[1], ChunkedTensor):
            # A stager makes a plain tensor of one without dimensions.
            into = first._shards if isinstance(first, ChunkedTensor) else [first]
            for target, source in zip(into, args[1]._shards, strict=False):
                target.copy_(source, *args[2:])
            return first
        raise NotImplementedError(
            f"{func}: a ChunkedTensor is only for torch.distributed.checkpoint; compute with the tensors of "
            "the model"
        )

    # Attributes that torch.distributed.checkpoint asks a tensor for.

    def __create_write_items__(self, fqn: str, obj: object) -> list[WriteItem]:
        """Return what this rank could write: replicas of a box are written by one of their ranks."""
        if self._problem is not None:
            raise ValueError(self._problem)
        unique = dict(reversed(self.chunks))
        return [
            WriteItem(
                index=MetadataIndex(fqn, start),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(start), shard.shape),
                    properties=TensorProperties.create_from_tensor(shard),
                    size=self.shape,
                ),
            )
            for start, shard in unique.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the boxes that are to be read, a box in two places twice."""
        return [
            ChunkStorageMetadata(torch.Size(start), shard.shape) for start, shard in self.chunks
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the memory of a box; the number in `index` tells places of one box apart."""
        hint = index.index
        begin = tuple(index.offset or ())
        if hint is not None and self._offsets[hint : hint + 1] == [begin]:
            return self._shards[hint]
        for start, shard in self.chunks:
            if begin == start:
                return shard
        raise ValueError(f"{index.fqn}: no box of this rank begins at {index.offset}")
