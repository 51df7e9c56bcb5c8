"""Transforms that quantize weights on their way, in place into the memory an engine captured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from moe_comm.resharding.formats.number_formats import (
    FP8_BLOCKS,
    MXFP8_BLOCK,
    Block,
    BlockFormat,
    MXFP8Backend,
    ScaledTensor,
    is_mxfp8_tensor,
    quantize_fp8_block,
    quantize_mxfp8,
    scale_shape,
    swizzle_scales,
    validate_fp8_block_tensor,
    validate_mxfp8_tensor,
)
from moe_comm.resharding.formats.scaled_buffers import (
    Assembly,
    ScaledBufferTransform,
    scale_bounds,
    slices_of,
    write_chosen,
)
from moe_comm.resharding.plan.transfer_op import Slices, TransferOp
from moe_comm.tensors.quantization import ScaleFormat


def _scale_slice_from_data_slice(
    data_slice: tuple[Any, ...], block_size: int = MXFP8_BLOCK[1]
) -> tuple[Any, ...]:
    """The scale factors of a slice of data, where `block_size` columns share one.

    Raises:
        AssertionError: The slice begins or ends inside a block.

    Example:
        `(slice(0, 4), slice(32, 96))` becomes `(slice(0, 4), slice(1, 3))`.
    """
    *leading, last = data_slice
    if isinstance(last, int):
        return (*leading, last // block_size)
    for bound in (last.start, last.stop):
        if bound is not None and bound % block_size:
            raise AssertionError(
                f"columns {last} must begin and end at a multiple of {block_size}, got {bound}"
            )
    start, stop = (None if b is None else b // block_size for b in (last.start, last.stop))
    return (*leading, slice(start, stop))


def _ensure_sendable(param: torch.Tensor) -> torch.Tensor:
    """A tensor of an ordinary dtype: quantized weights are dequantized, others lose their gradient."""
    if is_mxfp8_tensor(param):
        dequantized: torch.Tensor = param.dequantize()
        return dequantized
    return param.data


class MXFP8ReshardTransform(ScaledBufferTransform):
    """Writes weights as MXFP8 (e4m3, a UE8M0 scale byte per 32 columns), in place.

    Addresses of data and scales never change, so that captured CUDA graphs stay valid.

    Row-major scales: a piece that begins and ends at multiples of 32 columns is quantized and written
    by itself. One-dimensional, swizzled scales, and pieces that cut a block: the parameter is
    assembled in bfloat16 and quantized once it is complete.

    Args:
        convertible_params: Names, in this rank's own module, of parameters to transform.
        persistent_buffers: Destinations by name, see `MXFP8Tensor`; empty on a rank that only sends.
        buffer_key_prefix: Taken off the front of a parameter's name before it is looked up.
        convert_on_send: The sender quantizes, and data and scales travel: half the bytes. Both ends
            then need the transform; otherwise only the receiver does.
        backend: Backend whose kernels read the weights; None for that of the buffers.

    Raises:
        AssertionError: `convert_on_send` with neither a backend nor a buffer.
        ValueError, TypeError: A buffer is not an MXFP8 weight of `backend`.
    """

    def __init__(
        self,
        convertible_params: set[str],
        persistent_buffers: Mapping[str, ScaledTensor],
        buffer_key_prefix: str = "",
        convert_on_send: bool = False,
        backend: MXFP8Backend | None = None,
    ) -> None:
        super().__init__(
            convertible_params,
            persistent_buffers,
            buffer_key_prefix,
            BlockFormat(MXFP8_BLOCK, ScaleFormat.UE8M0.name),
        )
        if backend is None and persistent_buffers:
            backend = getattr(next(iter(persistent_buffers.values())), "backend", None)
        if convert_on_send and backend is None:
            raise AssertionError("a backend is required for sender-side conversion")
        self.convert_on_send = convert_on_send
        self.backend = backend
        for name, buffer in persistent_buffers.items():
            validate_mxfp8_tensor(
                buffer, expected_backend=backend, tensor_name=f"persistent buffer {name!r}"
            )

    @property
    def _pending_1d(self) -> dict[str, Assembly]:
        return self._assemblies

    def prepare_send(
        self, param_name: str, src_slice: Slices, src_param: torch.Tensor
    ) -> list[torch.Tensor]:
        """bfloat16 values; data and scales with `convert_on_send`."""
        return self._send(src_slice, src_param, None, is_quantized=self.convert_on_send)

    def prepare_send_of(self, op: TransferOp, src_param: torch.Tensor) -> list[torch.Tensor]:
        """Prepare a send like `prepare_send`; a piece that cuts a block of the destination stays bfloat16."""
        is_quantized = self.convert_on_send and self._is_whole_blocks(op.peer_slice)
        return self._send(op.my_slice, src_param, op.my_view, is_quantized=is_quantized)

    def prepare_recv(self, param_name: str, dst_slice: Slices) -> list[torch.Tensor]:
        """Memory for what `prepare_send` made.

        Raises:
            AssertionError: The slice cuts a block; only with row-major scales.
            NotImplementedError: `convert_on_send` with swizzled scales.
        """
        if self.persistent_buffers[self._key(param_name)].scale.dim() == 2:
            _scale_slice_from_data_slice(dst_slice)
        return self._receive(param_name, dst_slice, None, is_quantized=self.convert_on_send)

    def prepare_recv_of(self, op: TransferOp) -> list[torch.Tensor]:
        """Prepare a receive like `prepare_recv`, of any slice."""
        is_quantized = self.convert_on_send and self._is_whole_blocks(op.my_slice)
        return self._receive(op.param_name, op.my_slice, op.my_view, is_quantized=is_quantized)

    def finalize_recv(
        self, param_name: str, dst_slice: Slices, recv_buffers: list[torch.Tensor]
    ) -> None:
        """Write a piece, or add it to what is assembled.

        Raises:
            AssertionError: The slice cuts a block, with row-major scales; or a piece came twice.
        """
        if self.persistent_buffers[self._key(param_name)].scale.dim() == 2:
            _scale_slice_from_data_slice(dst_slice)
        self._finalize(param_name, dst_slice, None, recv_buffers)

    def finalize_recv_of(self, op: TransferOp, recv_buffers: list[torch.Tensor]) -> None:
        """Finalize a receive like `finalize_recv`, of any slice."""
        self._finalize(op.param_name, op.my_slice, op.my_view, recv_buffers)

    def _send(
        self,
        src_slice: Slices,
        src_param: torch.Tensor,
        view: tuple[int, ...] | None,
        *,
        is_quantized: bool,
    ) -> list[torch.Tensor]:
        sendable = _ensure_sendable(src_param)
        viewed = sendable if view is None else sendable.view(view)
        piece = viewed[src_slice].to(torch.bfloat16).contiguous()
        if not is_quantized:
            return [piece]
        data, scale = quantize_mxfp8(piece)
        return [data, scale.view(_scale_dtype(self.backend))]

    def _receive(
        self,
        param_name: str,
        dst_slice: Slices,
        view: tuple[int, ...] | None,
        *,
        is_quantized: bool,
    ) -> list[torch.Tensor]:
        key, data, bounds = self._placed(param_name, dst_slice, view)
        scale = self.persistent_buffers[key].scale
        if self.convert_on_send and scale.dim() == 1:
            raise NotImplementedError(
                f"{param_name}: convert_on_send with one-dimensional, swizzled scales is not "
                "supported; convert_on_send=False receives bfloat16 and quantizes it whole"
            )
        shape = tuple(stop - start for start, stop in bounds)
        if is_quantized:
            return [
                torch.empty(shape, dtype=data.dtype, device=data.device),
                torch.empty(scale_shape(shape, MXFP8_BLOCK), dtype=scale.dtype, device=data.device),
            ]
        if scale.dim() == 1 or not self._is_whole_blocks(slices_of(bounds)):
            return [self._assembly_buffer(key, data, bounds)]
        return [torch.empty(shape, dtype=torch.bfloat16, device=data.device)]

    @torch.no_grad()
    def _finalize(
        self,
        param_name: str,
        dst_slice: Slices,
        view: tuple[int, ...] | None,
        recv_buffers: list[torch.Tensor],
    ) -> None:
        key, data, bounds = self._placed(param_name, dst_slice, view)
        buffer = self.persistent_buffers[key]
        is_quantized = len(recv_buffers) == 2
        if not is_quantized and (
            buffer.scale.dim() == 1 or not self._is_whole_blocks(slices_of(bounds))
        ):
            self._arrived(param_name, key, data, bounds, recv_buffers[0])
            return
        new_data, new_scale = recv_buffers if is_quantized else quantize_mxfp8(recv_buffers[0])
        place = slices_of(bounds)
        data[place].copy_(new_data.view(data[place].shape))
        scale = buffer.scale if view is None else buffer.scale.view(*view[:-1], -1)
        scale_place = scale[slices_of(scale_bounds(bounds, self._block))].view(torch.uint8)
        scale_place.copy_(new_scale.view(torch.uint8).view(scale_place.shape))
        self._arrived(param_name, key, data, bounds, None)

    def _store(self, key: str, values: torch.Tensor, chosen: torch.Tensor) -> None:
        buffer = self.persistent_buffers[key]
        data, scale = quantize_mxfp8(values.view(buffer.data.shape))
        target = buffer.scale.view(torch.uint8)
        if target.dim() == 1:
            buffer.data.copy_(data)
            target.copy_(swizzle_scales(scale).view(torch.uint8))
            return
        chosen = chosen.view(target.shape)
        write_chosen(buffer.data, data, chosen, MXFP8_BLOCK)
        target.copy_(torch.where(chosen, scale.view(torch.uint8), target))


class FP8BlockReshardTransform(ScaledBufferTransform):
    """Writes weights as e4m3 with float32 scale factors per block, in place.

    Blocks are those of the destination's own tensor, as an engine that holds a shard has them. They
    are those of the whole weight where shards begin at multiples of the block.

    Both ends need the transform, with equal `block`, `scale_format` and `quantize_on_send`.

    Args:
        convertible_params: Names, in this rank's own module, of parameters to transform.
        persistent_buffers: Destinations by name, see `FP8BlockTensor`; empty on a rank that only
            sends. Any object with `data` and `scale` will do.
        buffer_key_prefix: Taken off the front of a parameter's name before it is looked up.
        block: (128, 128), or (1, 128).
        scale_format: FLOAT32, or FLOAT32_POWER_OF_2.
        quantize_on_send: Pieces of whole blocks travel quantized: about half the bytes.

    Raises:
        ValueError, TypeError: An argument is none of these, or a buffer does not fit.

    Example:
        from moe_comm.resharding.formats.number_formats import FP8BlockTensor

        # While both models hold ordinary weights: the plan knows shapes and how they are cut.
        prepare_swap_model_weights(trainer, engine, transform=None)
        weights = {name: FP8BlockTensor.from_bf16(engine.get_parameter(name)) for name in names}
        for name in names:
            delattr(engine.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
        transform = FP8BlockReshardTransform(names, weights)     # on ranks that only send: (names, {})
        swap_model_weights(trainer, engine, "symmetric", transform=transform)
    """

    def __init__(
        self,
        convertible_params: set[str],
        persistent_buffers: Mapping[str, ScaledTensor],
        buffer_key_prefix: str = "",
        *,
        block: Block = (128, 128),
        scale_format: ScaleFormat = ScaleFormat.FLOAT32,
        quantize_on_send: bool = True,
    ) -> None:
        if tuple(block) not in FP8_BLOCKS:
            raise ValueError(f"block must be one of {FP8_BLOCKS}, got {block}")
        if scale_format not in (ScaleFormat.FLOAT32, ScaleFormat.FLOAT32_POWER_OF_2):
            raise ValueError(
                f"scale_format must be FLOAT32 or FLOAT32_POWER_OF_2, got {scale_format!r}"
            )
        super().__init__(
            convertible_params,
            persistent_buffers,
            buffer_key_prefix,
            BlockFormat((block[0], block[1]), scale_format.name),
        )
        self.scale_format = scale_format
        self.quantize_on_send = quantize_on_send
        for name, buffer in persistent_buffers.items():
            validate_fp8_block_tensor(
                buffer, self._block, tensor_name=f"persistent buffer {name!r}"
            )

    @property
    def block(self) -> Block:
        """Rows and columns that share a scale factor."""
        return self._block

    def prepare_send(
        self, param_name: str, src_slice: Slices, src_param: torch.Tensor
    ) -> list[torch.Tensor]:
        """Prepare a send like `prepare_send_of`, of a piece that has the same bounds at both ends."""
        return self._send(src_slice, src_slice, src_param, None)

    def prepare_send_of(self, op: TransferOp, src_param: torch.Tensor) -> list[torch.Tensor]:
        """One tensor: scale factors and data as bytes, or bfloat16 values."""
        return self._send(op.my_slice, op.peer_slice, src_param, op.my_view)

    def prepare_recv(self, param_name: str, dst_slice: Slices) -> list[torch.Tensor]:
        """Memory for what the sender made."""
        return self._receive(param_name, dst_slice, None)

    def prepare_recv_of(self, op: TransferOp) -> list[torch.Tensor]:
        """Memory for what the sender made."""
        return self._receive(op.param_name, op.my_slice, op.my_view)

    def finalize_recv(
        self, param_name: str, dst_slice: Slices, recv_buffers: list[torch.Tensor]
    ) -> None:
        """Write a piece, or add it to what is assembled."""
        self._finalize(param_name, dst_slice, None, recv_buffers)

    def finalize_recv_of(self, op: TransferOp, recv_buffers: list[torch.Tensor]) -> None:
        """Write a piece, or add it to what is assembled."""
        self._finalize(op.param_name, op.my_slice, op.my_view, recv_buffers)

    def _is_sent_quantized(self, dst_slice: Slices) -> bool:
        return self.quantize_on_send and self._is_whole_blocks(dst_slice)

    def _send(
        self,
        src_slice: Slices,
        dst_slice: Slices,
        src_param: torch.Tensor,
        view: tuple[int, ...] | None,
    ) -> list[torch.Tensor]:
        sendable = _ensure_sendable(src_param)
        viewed = sendable if view is None else sendable.view(view)
        piece = viewed[src_slice].to(torch.bfloat16).contiguous()
        if not self._is_sent_quantized(dst_slice):
            return [piece]
        data, scale = quantize_fp8_block(piece, self._block, self.scale_format)
        # Scales first, so that they are aligned.
        return [torch.cat([each.reshape(-1).view(torch.uint8) for each in (scale, data)])]

    def _receive(
        self, param_name: str, dst_slice: Slices, view: tuple[int, ...] | None
    ) -> list[torch.Tensor]:
        key, data, bounds = self._placed(param_name, dst_slice, view)
        if not self._is_sent_quantized(dst_slice):
            return [self._assembly_buffer(key, data, bounds)]
        shape = tuple(stop - start for start, stop in bounds)
        num_bytes = 4 * torch.Size(scale_shape(shape, self._block)).numel()
        num_bytes += torch.Size(shape).numel()
        return [torch.empty(num_bytes, dtype=torch.uint8, device=data.device)]

    @torch.no_grad()
    def _finalize(
        self,
        param_name: str,
        dst_slice: Slices,
        view: tuple[int, ...] | None,
        recv_buffers: list[torch.Tensor],
    ) -> None:
        key, data, bounds = self._placed(param_name, dst_slice, view)
        (received,) = recv_buffers
        if not self._is_sent_quantized(dst_slice):
            self._arrived(param_name, key, data, bounds, received)
            return
        place = slices_of(bounds)
        num_data_bytes = data[place].numel()
        num_scale_bytes = received.numel() - num_data_bytes
        scale_bytes, data_bytes = received[:num_scale_bytes], received[num_scale_bytes:]
        data[place].copy_(data_bytes.view(data.dtype).view(data[place].shape))
        scale = self.persistent_buffers[key].scale
        if view is not None:
            scale = scale.view(scale_shape(view, self._block))
        scale_place = scale[slices_of(scale_bounds(bounds, self._block))]
        scale_place.copy_(scale_bytes.view(torch.float32).view(scale_place.shape))
        self._arrived(param_name, key, data, bounds, None)

    def _store(self, key: str, values: torch.Tensor, chosen: torch.Tensor) -> None:
        buffer = self.persistent_buffers[key]
        shape = buffer.data.shape
        data, scale = quantize_fp8_block(values.view(shape), self._block, self.scale_format)
        chosen = chosen.view(buffer.scale.shape)
        write_chosen(buffer.data, data, chosen, self._block)
        buffer.scale.copy_(torch.where(chosen, scale, buffer.scale))


def _scale_dtype(backend: MXFP8Backend | None) -> torch.dtype:
    return torch.uint8 if backend == "flashinfer" else torch.float8_e8m0fnu
