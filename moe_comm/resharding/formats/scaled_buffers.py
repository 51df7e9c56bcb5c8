"""Base of transforms of number formats: destinations in blocks, and pieces that cut a block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from moe_comm.resharding.formats.number_formats import (
    Block,
    BlockFormat,
    ScaledTensor,
    scale_shape,
    unswizzle_scales,
)
from moe_comm.resharding.plan.transfer_op import Slices, TransferOp
from moe_comm.resharding.plan.transform_protocol import ReshardTransform

Bounds = tuple[tuple[int, int], ...]
"""Begin and end of a slice in every dimension."""


def bounds_of(data_slice: tuple[Any, ...], shape: tuple[int, ...]) -> Bounds:
    """Begin and end of a slice in every dimension; negative and open ends are resolved."""
    if len(data_slice) > len(shape):
        raise ValueError(f"slice {data_slice} has more dimensions than shape {shape}")
    full = (*data_slice, *([slice(None)] * (len(shape) - len(data_slice))))
    found = []
    for part, size in zip(full, shape, strict=True):
        start, stop, step = (part, part + 1, 1) if isinstance(part, int) else part.indices(size)
        if step != 1:
            raise ValueError(f"slice {data_slice} of shape {shape} must have step 1, got {step}")
        found.append((start, max(start, stop)))
    return tuple(found)


def slices_of(bounds: Bounds) -> Slices:
    """The slices with these bounds."""
    return tuple(slice(start, stop) for start, stop in bounds)


def scale_bounds(bounds: Bounds, block: Block) -> Bounds:
    """Bounds of the scale factors of every block that a piece touches.

    Example:
        Columns 32 to 40 of an MXFP8 weight have the scale factor 1: `(.., (1, 2))`.
    """
    *leading, (top, bottom), (left, right) = bounds
    if top == bottom or left == right:
        return (*leading, (0, 0), (0, 0))
    rows = (top // block[0], -(-bottom // block[0]))
    columns = (left // block[1], -(-right // block[1]))
    return (*leading, rows, columns)


class Assembly:
    """A destination that is put together in bfloat16 until its blocks can be quantized.

    Args:
        shape: Shape of the destination.
        block: Rows and columns that share a scale factor.
        device: Device of the destination.
    """

    def __init__(self, shape: tuple[int, ...], block: Block, device: torch.device) -> None:
        self.block = block
        self.values = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        # Blocks of which a part arrived unquantized.
        self.is_assembled = torch.zeros(scale_shape(shape, block), dtype=torch.bool, device=device)
        self._arrived: set[Bounds] = set()
        self._num_arrived = 0

    def add(self, param_name: str, bounds: Bounds, values: torch.Tensor | None) -> bool:
        """Count a piece as arrived.

        Args:
            param_name: Name of the parameter, for error messages.
            bounds: Bounds of the piece in the destination.
            values: The piece, or None where it came quantized and is in place.

        Returns:
            Whether everything has arrived.

        Raises:
            AssertionError: More elements arrived than there are, or a piece came twice.
        """
        place = slices_of(bounds)
        target = self.values[place]
        num_elements = target.numel()
        if bounds in self._arrived or self._num_arrived + num_elements > self.values.numel():
            raise AssertionError(
                f"{param_name}: {self._num_arrived + num_elements} elements arrived of "
                f"{self.values.numel()}, the last ones at {place} (duplicate or missing slices?)"
            )
        self._arrived.add(bounds)
        self._num_arrived += num_elements
        if values is not None:
            # The piece may have been received right here.
            if (values.data_ptr(), values.stride()) != (target.data_ptr(), target.stride()):
                target.copy_(values.view(target.shape))
            self.is_assembled[slices_of(scale_bounds(bounds, self.block))] = True
        return self.is_complete

    @property
    def is_complete(self) -> bool:
        """Return whether every element has arrived."""
        return self._num_arrived == self.values.numel()

    @property
    def progress(self) -> str:
        """Elements that have arrived, of all."""
        return f"{self._num_arrived} of {self.values.numel()}"


class ScaledBufferTransform(ReshardTransform):
    """Base of the transforms below: buffers by name, and pieces that cut a block in two.

    A piece of whole blocks may travel quantized. Any other travels in bfloat16 and is assembled; when
    all of its parameter has arrived, the assembled blocks are quantized at once.

    Args:
        convertible_params: Names, in this rank's own module, of parameters to transform.
        persistent_buffers: Destinations by name; empty on a rank that only sends.
        buffer_key_prefix: Taken off the front of a parameter's name before it is looked up.
        block_format: Format of the destinations.
    """

    def __init__(
        self,
        convertible_params: set[str],
        persistent_buffers: Mapping[str, ScaledTensor],
        buffer_key_prefix: str,
        block_format: BlockFormat,
    ) -> None:
        self.convertible_params = convertible_params
        self.persistent_buffers = persistent_buffers
        self.buffer_key_prefix = buffer_key_prefix
        self.block_format = block_format
        self._block = block_format.block
        self._assemblies: dict[str, Assembly] = {}

    def should_transform(self, param_name: str) -> bool:
        """Return whether `param_name` is one of `convertible_params`."""
        return param_name in self.convertible_params

    def begin(self) -> None:
        """Forget what a refit that failed had assembled."""
        self._assemblies.clear()

    def finish(self) -> None:
        """Raise RuntimeError where a parameter has not arrived whole; it keeps its old value."""
        missing = [f"{key} ({each.progress})" for key, each in self._assemblies.items()]
        self._assemblies.clear()
        if missing:
            raise RuntimeError(f"elements of quantized parameters did not arrive: {missing[:8]}")

    def tensors_written(self) -> list[torch.Tensor]:
        """Data and scale factors of every buffer."""
        return [
            tensor
            for buffer in self.persistent_buffers.values()
            for tensor in (buffer.data, buffer.scale)
        ]

    def written_of(self, op: TransferOp) -> list[torch.Tensor] | None:
        """Data of a piece, and the scale factors of all blocks that it has a part of."""
        key, data, bounds = self._placed(op.param_name, op.my_slice, op.my_view)
        buffer = self.persistent_buffers[key]
        scale = buffer.scale
        if scale.dim() == 1:
            scale = unswizzle_scales(scale, *scale_shape(buffer.data.shape, self._block))
        scale = scale.view(scale_shape(data.shape, self._block))
        place = slices_of(scale_bounds(bounds, self._block))
        return [data[slices_of(bounds)], scale[place]]

    def _key(self, param_name: str) -> str:
        key = param_name.removeprefix(self.buffer_key_prefix)
        if key not in self.persistent_buffers:
            raise KeyError(
                f"{param_name} is to be quantized but there is no persistent buffer {key!r}; there "
                f"are {sorted(self.persistent_buffers)[:8]}"
            )
        return key

    def _placed(
        self, param_name: str, dst_slice: Slices, view: tuple[int, ...] | None
    ) -> tuple[str, torch.Tensor, Bounds]:
        """Key, data as the plan cuts it, and where in that a piece lies."""
        key = self._key(param_name)
        data = self.persistent_buffers[key].data
        viewed = data if view is None else data.view(view)
        if view is not None:
            self._require_blocks_in_view(param_name, tuple(data.shape), view)
        return key, viewed, bounds_of(dst_slice, tuple(viewed.shape))

    def _require_blocks_in_view(
        self, param_name: str, shape: tuple[int, ...], view: tuple[int, ...]
    ) -> None:
        """Blocks of the tensor are blocks of its view where rows are only grouped, not cut."""
        if view[-1:] != shape[-1:] or (view[-2:] != shape[-2:] and view[-2] % self._block[0]):
            raise ValueError(
                f"{param_name}: blocks of {self._block} of a tensor of shape {shape} are not blocks "
                f"of it as the plan cuts it, {view}"
            )

    def _is_whole_blocks(self, data_slice: tuple[Any, ...]) -> bool:
        """Return whether both ends can tell, from the destination's slice alone, that no block is cut."""
        rows, columns = data_slice[-2:] if len(data_slice) > 1 else (slice(None), data_slice[0])
        for part, size in ((rows, self._block[0]), (columns, self._block[1])):
            if size == 1:
                continue
            if isinstance(part, int) or part.start is None or part.stop is None:
                return False
            if part.start % size or part.stop % size:
                return False
        return True

    def _assembly(self, key: str, data: torch.Tensor) -> Assembly:
        if key not in self._assemblies:
            self._assemblies[key] = Assembly(tuple(data.shape), self._block, data.device)
        assembly = self._assemblies[key]
        if assembly.values.shape != data.shape:
            raise ValueError(
                f"{key}: one plan cuts it as {tuple(assembly.values.shape)} and as "
                f"{tuple(data.shape)}"
            )
        return assembly

    def _assembly_buffer(self, key: str, data: torch.Tensor, bounds: Bounds) -> torch.Tensor:
        """Return the buffer that receives a bfloat16 piece: its place if that is contiguous."""
        place = self._assembly(key, data).values[slices_of(bounds)]
        return place if place.is_contiguous() else torch.empty_like(place.contiguous())

    def _arrived(
        self,
        param_name: str,
        key: str,
        data: torch.Tensor,
        bounds: Bounds,
        values: torch.Tensor | None,
    ) -> None:
        """A piece is there; None where it came quantized."""
        assembly = self._assemblies.get(key) if values is None else self._assembly(key, data)
        if assembly is None:
            return
        try:
            is_complete = assembly.add(param_name, bounds, values)
        except AssertionError:
            del self._assemblies[key]
            raise
        if is_complete:
            del self._assemblies[key]
            self._store(key, assembly.values, assembly.is_assembled)

    def _store(self, key: str, values: torch.Tensor, chosen: torch.Tensor) -> None:
        """Quantize `values` and write the blocks where `chosen` is true."""
        raise NotImplementedError


def write_chosen(
    target: torch.Tensor, new: torch.Tensor, chosen: torch.Tensor, block: Block
) -> None:
    """Copy one-byte elements of the blocks where `chosen` is true."""
    rows, columns = new.shape[-2:]
    by_element = chosen.repeat_interleave(block[0], -2)[..., :rows, :]
    by_element = by_element.repeat_interleave(block[1], -1)[..., :columns]
    old = target.view(torch.uint8)
    old.copy_(torch.where(by_element, new.view(torch.uint8), old))
