from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moe_comm.resharding.formats.number_formats import (
    Block,
    FP8BlockTensor,
    MXFP8Tensor,
    quantize_fp8_block,
    quantize_mxfp8,
    swizzle_scales,
)
from moe_comm.resharding.formats.transforms import (
    FP8BlockReshardTransform,
    MXFP8ReshardTransform,
    _scale_slice_from_data_slice,
)
from moe_comm.resharding.plan.transfer_op import TransferOp
from moe_comm.resharding.plan.transform_protocol import ReshardTransform, as_reshard_transform
from moe_comm.tensors.quantization import ScaleFormat
from tests.helpers.weights import same_bits, weight

NAME = "decoder.weight"
KEY = "weight"
SQUARE: Block = (128, 128)
ROWS: Block = (1, 128)


# ---------------------------------------------------------------------------------------------
# Transforms. A layout is where a weight is cut, by dimension; every cell is a rank's own tensor.

Cuts = tuple[tuple[int, ...], ...]


def cells(shape: tuple[int, ...], cuts: Cuts) -> Iterator[tuple[slice, ...]]:
    for pairs in itertools.product(
        *(itertools.pairwise((0, *at, size)) for at, size in zip(cuts, shape, strict=True))
    ):
        yield tuple(slice(*pair) for pair in pairs)


def pieces(
    src: tuple[slice, ...], dst: tuple[slice, ...]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Overlap of two cells, in the coordinates of each."""
    both = [(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(src, dst, strict=True)]
    if any(start >= stop for start, stop in both):
        return None
    return tuple(
        tuple(
            slice(lo - own.start, hi - own.start) for (lo, hi), own in zip(both, cell, strict=True)
        )
        for cell in (src, dst)
    )  # type: ignore[return-value]


@dataclasses.dataclass
class Moved:
    """Tensors that went over the wire, and what arrived by destination cell."""

    buffers: list[tuple[tuple[slice, ...], Any]]
    num_bytes: int
    transforms: list[ReshardTransform]


def move(
    x: torch.Tensor,
    src_cuts: Cuts,
    dst_cuts: Cuts,
    make_buffer: Callable[[tuple[int, ...]], Any],
    make_transform: Callable[[dict[str, Any]], ReshardTransform],
    num_refits: int = 1,
    view: Callable[[tuple[int, ...]], tuple[int, ...]] | None = None,
) -> Moved:
    """Send every piece from every source cell to every destination cell, as an executor does."""
    moved = Moved([], 0, [])
    sender = make_transform({})
    for dst in cells(tuple(x.shape), dst_cuts):
        shape = tuple(part.stop - part.start for part in dst)
        buffer = make_buffer(shape if view is None else view(shape))
        receiver = make_transform({KEY: buffer})
        addresses = buffer.data.data_ptr(), buffer.scale.data_ptr()
        for _ in range(num_refits):
            receiver.begin()
            arriving = []
            for src in cells(tuple(x.shape), src_cuts):
                if (both := pieces(src, dst)) is None:
                    continue
                view_of = shape if view is not None else None
                send = TransferOp(NAME, 0, True, both[0], both[1], 0)
                recv = TransferOp(NAME, 0, False, both[1], both[0], 0, my_view=view_of)
                sent = sender.prepare_send_of(send, torch.nn.Parameter(x[src].clone()))
                received = receiver.prepare_recv_of(recv)
                assert len(sent) == len(received)
                for a, b in zip(sent, received, strict=True):
                    assert (a.shape, a.dtype) == (b.shape, b.dtype)
                    assert a.is_contiguous()
                    assert b.is_contiguous()
                    moved.num_bytes += a.numel() * a.element_size()
                arriving.append((recv, sent, received))
            for _, sent, received in arriving:
                for a, b in zip(sent, received, strict=True):
                    b.view(torch.uint8).copy_(a.view(torch.uint8))
            for recv, _, received in arriving:
                receiver.finalize_recv_of(recv, received)
            receiver.finish()
        assert addresses == (buffer.data.data_ptr(), buffer.scale.data_ptr())
        moved.buffers.append((dst, buffer))
        moved.transforms.append(receiver)
    return moved


def scale_cell(cell: tuple[slice, ...], block: Block) -> tuple[slice, ...]:
    *leading, rows, columns = cell
    return (
        *leading,
        slice(rows.start // block[0], -(-rows.stop // block[0])),
        slice(columns.start // block[1], -(-columns.stop // block[1])),
    )


LAYOUTS: dict[str, Cuts] = {
    "whole": ((), ()),
    "rows": ((128, 256), ()),
    "columns": ((), (128, 384)),
    "both": ((256,), (256,)),
    "odd-rows": ((100, 300), ()),
    "odd-columns": ((), (33, 300)),
    "odd-both": ((1, 129, 131), (255,)),
    "mixed": ((128, 200), (128,)),
}
ALIGNED = ["whole", "rows", "columns", "both"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dst_cuts", ALIGNED)
@pytest.mark.parametrize("src_cuts", LAYOUTS)
@pytest.mark.parametrize("quantize_on_send", [False, True])
@pytest.mark.parametrize("block", [SQUARE, ROWS])
def test_fp8_through_any_layouts_is_the_whole_quantized_at_once(
    src_cuts: str, dst_cuts: str, quantize_on_send: bool, block: Block
) -> None:
    x = weight(384, 512)
    want_data, want_scale = quantize_fp8_block(x, block)
    moved = move(
        x,
        LAYOUTS[src_cuts],
        LAYOUTS[dst_cuts],
        lambda shape: FP8BlockTensor.empty(shape, block),
        lambda buffers: FP8BlockReshardTransform(
            {NAME}, buffers, "decoder.", block=block, quantize_on_send=quantize_on_send
        ),
    )
    for cell, buffer in moved.buffers:
        assert same_bits(buffer.data, want_data[cell])
        assert same_bits(buffer.scale, want_scale[scale_cell(cell, block)])
    if src_cuts in ALIGNED and quantize_on_send:
        assert moved.num_bytes == want_data.numel() + 4 * want_scale.numel()
    if not quantize_on_send:
        assert moved.num_bytes == 2 * x.numel()


def test_fp8_blocks_are_those_of_the_destination() -> None:
    """Shards that begin inside a block of the whole weight are quantized in blocks of their own."""
    x = weight(300, 200)
    for cell, buffer in move(
        x,
        ((), (50,)),
        ((100, 170), ()),
        FP8BlockTensor.empty,
        lambda buffers: FP8BlockReshardTransform({NAME}, buffers, "decoder."),
    ).buffers:
        data, scale = quantize_fp8_block(x[cell])
        assert same_bits(buffer.data, data)
        assert same_bits(buffer.scale, scale)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("src_cuts", LAYOUTS)
@pytest.mark.parametrize("dst_cuts", ["whole", "rows", "odd-rows", "columns"])
@pytest.mark.parametrize(
    ("is_swizzled", "convert_on_send"), [(False, False), (False, True), (True, False)]
)
def test_mxfp8_through_any_layouts_is_the_whole_quantized_at_once(
    src_cuts: str, dst_cuts: str, is_swizzled: bool, convert_on_send: bool
) -> None:
    x = weight(384, 512)
    moved = move(
        x,
        LAYOUTS[src_cuts],
        LAYOUTS[dst_cuts],
        lambda shape: MXFP8Tensor.from_bf16(torch.zeros(shape), is_swizzled=is_swizzled),
        lambda buffers: MXFP8ReshardTransform(
            {NAME}, buffers, "decoder.", convert_on_send=convert_on_send, backend="triton"
        ),
        num_refits=2,
    )
    want_data, want_scale = quantize_mxfp8(x)
    for cell, buffer in moved.buffers:
        scale = want_scale[cell[0], cell[1].start // 32 : cell[1].stop // 32]
        assert same_bits(buffer.data, want_data[cell])
        assert same_bits(buffer.scale, swizzle_scales(scale) if is_swizzled else scale)
    if convert_on_send and src_cuts in ALIGNED:
        assert moved.num_bytes == 2 * (want_data.numel() + want_scale.numel())


@pytest.mark.parametrize(
    ("shape", "fits"), [((4, 128, 256), True), ((2, 256, 256), True), ((8, 64, 256), False)]
)
def test_fused_experts_are_cut_as_the_plan_views_them(shape: tuple[int, ...], fits: bool) -> None:
    """The buffer has two dimensions; the plan cuts it by expert."""
    x = weight(*shape)

    def run() -> Moved:
        return move(
            x,
            ((), (100,), (128,)),
            ((2,) if shape[0] > 2 else (1,), (), ()),
            FP8BlockTensor.empty,
            lambda buffers: FP8BlockReshardTransform({NAME}, buffers, "decoder."),
            view=lambda cell: (cell[0] * cell[1], cell[2]),
        )

    if not fits:
        with pytest.raises(ValueError, match=r"are not blocks of it as the plan cuts it, \(2, 64"):
            run()
        return
    data, scale = quantize_fp8_block(x)
    for cell, buffer in run().buffers:
        assert same_bits(buffer.data.view(-1, *shape[1:]), data[cell])
        assert same_bits(buffer.scale.view(-1, *scale.shape[1:]), scale[cell[0]])


def test_mxfp8_experts_are_cut_as_the_plan_views_them() -> None:
    x = weight(4, 8, 96)
    data, scale = quantize_mxfp8(x)
    for is_swizzled, on_send in ((False, False), (False, True), (True, False)):
        for cell, buffer in move(
            x,
            ((1,), (5,), (64,)),
            ((2,), (), ()),
            lambda shape, s=is_swizzled: MXFP8Tensor.from_bf16(torch.zeros(shape), is_swizzled=s),
            lambda buffers, on_send=on_send: MXFP8ReshardTransform(
                {NAME}, buffers, "decoder.", convert_on_send=on_send, backend="triton"
            ),
            view=lambda cell: (cell[0] * cell[1], cell[2]),
        ).buffers:
            want = scale[cell].reshape(-1, 3)
            assert same_bits(buffer.data, data[cell].reshape(-1, 96))
            assert same_bits(buffer.scale, swizzle_scales(want) if is_swizzled else want)


def test_both_ends_decide_alike_whatever_the_source_is_cut() -> None:
    """A piece that is whole blocks at the destination travels quantized from any place."""
    transform = FP8BlockReshardTransform(
        {NAME}, {KEY: FP8BlockTensor.empty((256, 256))}, "decoder."
    )
    inside = (slice(128, 256), slice(0, 128))
    (sent,) = transform.prepare_send_of(
        TransferOp(NAME, 0, True, (slice(5, 133), slice(7, 135)), inside, 0), weight(300, 300)
    )
    (received,) = transform.prepare_recv_of(TransferOp(NAME, 0, False, inside, inside, 0))
    assert sent.shape == received.shape == (128 * 128 + 4,)


def mxfp8_transform(is_swizzled: bool, **options: Any) -> tuple[MXFP8ReshardTransform, MXFP8Tensor]:
    buffer = MXFP8Tensor.from_bf16(torch.zeros(64, 128), is_swizzled=is_swizzled)
    return MXFP8ReshardTransform({NAME}, {KEY: buffer}, "decoder.", **options), buffer


FULL = (slice(None), slice(None))


def test_a_slice_at_a_time() -> None:
    """Callers that know nothing of plans: prepare, receive and write one piece after the other."""
    x = weight(64, 128)
    for is_swizzled in (False, True):
        transform, buffer = mxfp8_transform(is_swizzled)
        for first in range(0, 64, 16):
            place = (slice(first, first + 16), slice(None))
            (sent,) = transform.prepare_send(NAME, place, torch.nn.Parameter(x))
            (received,) = transform.prepare_recv(NAME, place)
            received.copy_(sent)
            transform.finalize_recv(NAME, place, [received])
            assert (KEY in transform._pending_1d) == (is_swizzled and first < 48)
        want = MXFP8Tensor.from_bf16(x, is_swizzled=is_swizzled)
        assert same_bits(buffer.data, want.data)
        assert same_bits(buffer.scale, want.scale)


def test_received_without_being_prepared() -> None:
    x = weight(64, 128)
    transform, buffer = mxfp8_transform(is_swizzled=True)
    transform.finalize_recv(NAME, (slice(0, 40), slice(None)), [x[:40]])
    transform.finalize_recv(NAME, (slice(40, 64), slice(None)), [x[40:]])
    assert same_bits(buffer.scale, MXFP8Tensor.from_bf16(x).scale)


@pytest.mark.parametrize("second", [(slice(0, 32), slice(None)), (slice(31, 64), slice(None))])
def test_a_piece_that_comes_twice(second: tuple[slice, ...]) -> None:
    transform, buffer = mxfp8_transform(is_swizzled=True)
    before = buffer.data.clone()
    x = weight(64, 128)
    transform.finalize_recv(NAME, (slice(0, 32), slice(None)), [x[:32]])
    with pytest.raises(AssertionError, match="duplicate or missing"):
        transform.finalize_recv(NAME, second, [x[second]])
    assert transform._pending_1d == {}
    assert same_bits(buffer.data, before)


def test_a_failed_refit_leaves_nothing_behind() -> None:
    x, other = weight(64, 128), weight(64, 128)
    transform, buffer = mxfp8_transform(is_swizzled=True)
    transform.begin()
    transform.finalize_recv(NAME, (slice(0, 32), slice(None)), [other[:32]])
    transform.begin()
    for place in ((slice(32, 64), slice(None)), (slice(0, 32), slice(None))):
        transform.finalize_recv(NAME, place, [x[place]])
    transform.finish()
    assert same_bits(buffer.data, quantize_mxfp8(x)[0])


def test_a_piece_that_does_not_arrive() -> None:
    transform, _ = mxfp8_transform(is_swizzled=True)
    transform.begin()
    transform.finalize_recv(NAME, (slice(0, 63), slice(None)), [weight(63, 128)])
    with pytest.raises(RuntimeError, match=r"weight \(8064 of 8192\)"):
        transform.finish()
    transform.finish()


def test_row_major_scales_take_only_whole_blocks_by_slice() -> None:
    transform, _ = mxfp8_transform(is_swizzled=False)
    cut = (slice(0, 64), slice(0, 16))
    with pytest.raises(AssertionError, match="multiple of 32, got 16"):
        transform.prepare_recv(NAME, cut)
    with pytest.raises(AssertionError, match="multiple of 32, got 16"):
        transform.finalize_recv(NAME, cut, [weight(64, 16)])


def test_swizzled_scales_take_no_quantized_pieces() -> None:
    transform, _ = mxfp8_transform(is_swizzled=True, convert_on_send=True)
    with pytest.raises(NotImplementedError, match="convert_on_send"):
        transform.prepare_recv(NAME, FULL)


def test_quantized_by_the_sender() -> None:
    transform = MXFP8ReshardTransform({NAME}, {}, convert_on_send=True, backend="triton")
    x = weight(64, 128)
    data, scale = transform.prepare_send(NAME, FULL, torch.nn.Parameter(x))
    want_data, want_scale = quantize_mxfp8(x)
    assert same_bits(data, want_data)
    assert same_bits(scale, want_scale)
    with pytest.raises(AssertionError, match="backend is required for sender-side conversion"):
        MXFP8ReshardTransform({NAME}, {}, convert_on_send=True)


def test_buffers_of_two_backends_are_refused() -> None:
    buffers = {
        "first": MXFP8Tensor.from_bf16(torch.zeros(64, 128), backend="triton"),
        "second": MXFP8Tensor.from_bf16(torch.zeros(64, 128), backend="flashinfer"),
    }
    with pytest.raises(ValueError, match="backend is 'flashinfer'; expected 'triton'"):
        MXFP8ReshardTransform({"first", "second"}, buffers)


def test_scale_slices() -> None:
    assert _scale_slice_from_data_slice((slice(0, 4), slice(32, 96))) == (slice(0, 4), slice(1, 3))
    assert _scale_slice_from_data_slice((slice(None), slice(None))) == (
        slice(None),
        slice(None, None),
    )
    assert _scale_slice_from_data_slice((3, 65)) == (3, 2)
    assert _scale_slice_from_data_slice((slice(0, 128),), block_size=128) == (slice(0, 1),)
    for cut in (slice(1, 32), slice(0, 33)):
        with pytest.raises(AssertionError, match="multiple of 32"):
            _scale_slice_from_data_slice((slice(None), cut))


def test_what_no_fp8_transform_takes() -> None:
    good = FP8BlockTensor.empty((128, 128))
    for error, text, call in (
        (
            ValueError,
            r"got \(64, 64\)",
            lambda: FP8BlockReshardTransform(set(), {}, block=(64, 64)),
        ),
        (
            ValueError,
            "UE8M0",
            lambda: FP8BlockReshardTransform(set(), {}, scale_format=ScaleFormat.UE8M0),
        ),
        (
            ValueError,
            "persistent buffer 'w'",
            lambda: FP8BlockReshardTransform(set(), {"w": good}, block=ROWS),
        ),
        (
            KeyError,
            "no persistent buffer 'v'",
            lambda: FP8BlockReshardTransform({"v"}, {"w": good}).prepare_recv("v", FULL),
        ),
    ):
        with pytest.raises(error, match=text):
            call()


class _Foreign:
    def should_transform(self, param_name: str) -> bool:
        return param_name == NAME

    def prepare_send(self, param_name: str, src_slice: Any, src_param: torch.Tensor) -> Any:
        return (src_param[src_slice],)

    def prepare_recv(self, param_name: str, dst_slice: Any) -> Any:
        return (param_name, dst_slice)

    def finalize_recv(self, param_name: str, dst_slice: Any, recv_buffers: Any) -> None:
        self.got = (param_name, dst_slice, recv_buffers)


def test_a_transform_of_another_package_is_called_by_its_own_methods() -> None:
    foreign = _Foreign()
    transform = as_reshard_transform(foreign)
    assert as_reshard_transform(transform) is transform
    assert transform.should_transform(NAME)
    assert not transform.should_transform("other")
    place = (slice(0, 1),)
    op = TransferOp(NAME, 0, True, place, place, 0)
    assert transform.prepare_send_of(op, torch.arange(3))[0].tolist() == [0]
    assert transform.prepare_recv_of(op) == [NAME, place]
    transform.finalize_recv_of(op, [])
    assert foreign.got == (NAME, place, [])
    transform.begin()
    transform.finish()
    with pytest.raises(NotImplementedError, match="cuts it as"):
        transform.prepare_recv_of(dataclasses.replace(op, my_view=(3, 1)))
    with pytest.raises(TypeError, match="should_transform"):
        as_reshard_transform(object())


def test_the_base_transform_transforms_nothing() -> None:
    base = ReshardTransform()
    assert not base.should_transform(NAME)
    for call in (
        lambda: base.prepare_send(NAME, FULL, torch.zeros(1)),
        lambda: base.prepare_recv(NAME, FULL),
        lambda: base.finalize_recv(NAME, FULL, []),
    ):
        with pytest.raises(NotImplementedError, match=NAME):
            call()
