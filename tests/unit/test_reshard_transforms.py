from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import moe_comm
from moe_comm.quantization import FP8_BLOCK128, MXFP8, ScaleFormat
from moe_comm.resharding.number_formats import (
    Block,
    FP8BlockTensor,
    MXFP8Tensor,
    dequantize_fp8_block,
    dequantize_mxfp8,
    is_mxfp8_tensor,
    quantize_fp8_block,
    quantize_mxfp8,
    scale_shape,
    swizzle_scales,
    unswizzle_scales,
    validate_fp8_block_tensor,
    validate_mxfp8_tensor,
)
from moe_comm.resharding.plan import TransferOp
from moe_comm.resharding.transforms import (
    FP8BlockReshardTransform,
    MXFP8ReshardTransform,
    ReshardTransform,
    _ensure_sendable,
    _scale_slice_from_data_slice,
    as_reshard_transform,
)

NAME = "decoder.weight"
KEY = "weight"
SQUARE: Block = (128, 128)
ROWS: Block = (1, 128)


def weight(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Values over many magnitudes, so that blocks have different scales."""
    magnitude = torch.randint(-6, 6, (*shape[:-1], 1)).float()
    return (torch.randn(shape) * torch.exp2(magnitude)).to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    )


# ---------------------------------------------------------------------------------------------
# Number formats.


def test_fp8_block_against_plain_arithmetic() -> None:
    x = weight(200, 300)
    data, scale = quantize_fp8_block(x)
    assert scale.shape == (2, 3)
    assert data.shape == x.shape
    for row, column in itertools.product(range(2), range(3)):
        place = (slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
        block = x[place].float()
        amax = block.abs().max().clamp(min=1e-4)
        assert scale[row, column] == amax / torch.tensor(448.0)
        want = (block * (torch.tensor(448.0) / amax)).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert same_bits(data[place], want)
        got = dequantize_fp8_block(data, scale)[place]
        assert same_bits(got, (want.float() * scale[row, column]).bfloat16())


@pytest.mark.parametrize("scale_format", [ScaleFormat.FLOAT32, ScaleFormat.FLOAT32_POWER_OF_2])
def test_fp8_rows_are_those_of_a_quantised_dispatch(scale_format: ScaleFormat) -> None:
    x = weight(3, 40, 320)
    quantization = dataclasses.replace(FP8_BLOCK128, scale_format=scale_format)
    data, scale = quantize_fp8_block(x, ROWS, scale_format)
    want_data, want_scale = moe_comm.quantize(x.view(120, 320), quantization)
    assert same_bits(data.view(120, 320), want_data)
    assert same_bits(scale.view(120, 3), want_scale)


def test_fp8_block_of_one_row_of_blocks_is_its_rows_maximum() -> None:
    """Square blocks and rows agree where every row has the same maximum."""
    x = torch.randint(-7, 8, (128, 256)).bfloat16()
    x[:, ::128] = 448.0
    square, rows = quantize_fp8_block(x, SQUARE), quantize_fp8_block(x, ROWS)
    assert same_bits(square[0], rows[0])
    assert same_bits(square[1].expand(128, 2), rows[1])


def test_a_block_with_a_nan_is_nan_and_no_other() -> None:
    x = weight(256, 256)
    x[3, 130] = float("nan")
    x[200, 5] = float("inf")
    data, scale = quantize_fp8_block(x)
    is_nan = dequantize_fp8_block(data, scale).isnan()
    assert is_nan[:128, 128:].all()
    assert is_nan[128:, :128].all()
    assert not is_nan[:128, :128].any()
    assert not is_nan[128:, 128:].any()
    assert scale.isnan().tolist() == [[False, True], [True, False]]


def test_powers_of_two() -> None:
    data, scale = quantize_fp8_block(weight(130, 128), SQUARE, ScaleFormat.FLOAT32_POWER_OF_2)
    mantissa, _ = torch.frexp(scale)
    assert (mantissa == 0.5).all()
    assert data.shape == (130, 128)


@pytest.mark.parametrize("shape", [(0, 128), (128, 0), (2, 0, 128), (1, 1), (3, 130, 257)])
@pytest.mark.parametrize("block", [SQUARE, ROWS])
def test_shapes_at_the_edge(shape: tuple[int, ...], block: Block) -> None:
    x = weight(*shape)
    data, scale = quantize_fp8_block(x, block)
    assert tuple(scale.shape) == scale_shape(shape, block)
    assert data.shape == x.shape
    if x.numel():
        error = (dequantize_fp8_block(data, scale, block, torch.float32) - x.float()).abs()
        assert (error <= x.float().abs().max() / 16).all()


def test_mxfp8_is_that_of_a_quantised_dispatch() -> None:
    x = weight(4, 8, 96)
    data, scale = quantize_mxfp8(x)
    want_data, want_scale = moe_comm.quantize(x.view(32, 96), MXFP8)
    assert same_bits(data.view(32, 96), want_data)
    assert same_bits(scale.view(32, 3), want_scale)
    want = moe_comm.dequantize(want_data, want_scale, MXFP8).view(4, 8, 96)
    assert same_bits(dequantize_mxfp8(data, scale), want)


def test_weights_are_quantised_from_bfloat16() -> None:
    x = weight(64, 64, dtype=torch.float32)
    assert same_bits(quantize_mxfp8(x)[0], quantize_mxfp8(x.bfloat16())[0])
    assert same_bits(quantize_fp8_block(x)[1], quantize_fp8_block(x.bfloat16())[1])
    with pytest.raises(TypeError, match="int32"):
        quantize_mxfp8(torch.zeros(2, 32, dtype=torch.int32))


@pytest.mark.parametrize("shape", [(128, 4), (1, 1), (33, 8), (300, 9), (129, 5)])
def test_swizzled_scales_byte_by_byte(shape: tuple[int, int]) -> None:
    rows, columns = shape
    scale = torch.randint(1, 256, shape, dtype=torch.uint8)
    swizzled = swizzle_scales(scale)
    tiles_per_row = -(-columns // 4)
    assert swizzled.numel() == -(-rows // 128) * tiles_per_row * 512
    used = set()
    for row, column in itertools.product(range(rows), range(columns)):
        tile = row // 128 * tiles_per_row + column // 4
        offset = 512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + column % 4
        assert swizzled[offset] == scale[row, column]
        used.add(offset)
    padding = [i for i in range(swizzled.numel()) if i not in used]
    assert not swizzled[padding].any()
    assert same_bits(unswizzle_scales(swizzled, rows, columns), scale)


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
@pytest.mark.parametrize("is_swizzled", [False, True])
def test_an_mxfp8_tensor(backend: Any, is_swizzled: bool) -> None:
    x = weight(70, 160)
    tensor = MXFP8Tensor.from_bf16(x, backend=backend, is_swizzled=is_swizzled)
    validate_mxfp8_tensor(tensor, expected_backend=backend)
    assert tensor.scale.dtype == (torch.uint8 if backend == "flashinfer" else torch.float8_e8m0fnu)
    assert tensor.size() == (70, 160)
    assert tensor.size(1) == 160
    assert tensor.scale_2d().shape == ((128, 8) if is_swizzled else (70, 5))
    assert same_bits(tensor.dequantize(), dequantize_mxfp8(*quantize_mxfp8(x)))
    assert is_mxfp8_tensor(tensor)
    assert not is_mxfp8_tensor(x)
    assert same_bits(_ensure_sendable(tensor), tensor.dequantize())  # type: ignore[arg-type]


def test_what_is_no_mxfp8_tensor() -> None:
    x = weight(64, 64)
    good = MXFP8Tensor.from_bf16(x, is_swizzled=False)
    bad: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "backend is 'triton'; expected 'flashinfer'", {}),
        (ValueError, "got 'cutlass'", {"backend": "cutlass"}),
        (TypeError, "data must be torch.float8_e4m3fn, got torch.bfloat16", {"data": x}),
        (TypeError, "got torch.float32", {"scale": good.scale.float()}),
        (ValueError, r"needs scale \(64, 2\), or swizzled \(512,\), got \(64, 1\)", {}),
        (ValueError, r"got shape \(64, 33\)", {"data": good.data[:, :33]}),
    ]
    bad[4][2]["scale"] = good.scale[:, :1]
    for error, text, changes in bad:
        expected = "flashinfer" if not changes else None
        with pytest.raises(error, match=text):
            validate_mxfp8_tensor(
                dataclasses.replace(good, **changes), expected_backend=expected, tensor_name="w"
            )
    for call, text in (
        (lambda: MXFP8Tensor.from_bf16(x, group_size=16), "group_size=16"),
        (lambda: MXFP8Tensor.from_bf16(x, backend="cutlass"), "cutlass"),  # type: ignore[arg-type]
        (lambda: MXFP8Tensor.from_bf16(x[:, :33]), r"\(64, 33\)"),
    ):
        with pytest.raises(ValueError, match=text):
            call()


def test_what_is_no_fp8_block_tensor() -> None:
    good = FP8BlockTensor.from_bf16(weight(200, 130))
    validate_fp8_block_tensor(good, SQUARE)
    for error, text, changes, block in (
        (ValueError, r"expected \(1, 128\)", {}, ROWS),
        (TypeError, "torch.uint8", {"data": good.data.view(torch.uint8)}, SQUARE),
        (TypeError, "torch.bfloat16", {"scale": good.scale.bfloat16()}, SQUARE),
        (ValueError, r"\(2, 1\)", {"scale": good.scale[:, :1]}, SQUARE),
    ):
        with pytest.raises(error, match=text):
            validate_fp8_block_tensor(dataclasses.replace(good, **changes), block)
    with pytest.raises(ValueError, match=r"got \(64, 64\)"):
        quantize_fp8_block(weight(2, 2), (64, 64))
    with pytest.raises(ValueError, match="UE8M0"):
        quantize_fp8_block(weight(2, 2), SQUARE, ScaleFormat.UE8M0)
    with pytest.raises(ValueError, match=r"\(5,\)"):
        scale_shape((5,), SQUARE)


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
    """Where two cells overlap, in the coordinates of each."""
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
    """What went over the wire, and what arrived by destination cell."""

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


@pytest.mark.parametrize("dst_cuts", ALIGNED)
@pytest.mark.parametrize("src_cuts", LAYOUTS)
@pytest.mark.parametrize("quantize_on_send", [False, True])
@pytest.mark.parametrize("block", [SQUARE, ROWS])
def test_fp8_through_any_layouts_is_the_whole_quantised_at_once(
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
    """Shards that begin inside a block of the whole weight are quantised in blocks of their own."""
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


@pytest.mark.parametrize("src_cuts", LAYOUTS)
@pytest.mark.parametrize("dst_cuts", ["whole", "rows", "odd-rows", "columns"])
@pytest.mark.parametrize(
    ("is_swizzled", "convert_on_send"), [(False, False), (False, True), (True, False)]
)
def test_mxfp8_through_any_layouts_is_the_whole_quantised_at_once(
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
    """A piece that is whole blocks at the destination travels quantised from any place."""
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


def test_swizzled_scales_take_no_quantised_pieces() -> None:
    transform, _ = mxfp8_transform(is_swizzled=True, convert_on_send=True)
    with pytest.raises(NotImplementedError, match="convert_on_send"):
        transform.prepare_recv(NAME, FULL)


def test_quantised_by_the_sender() -> None:
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
        del param_name
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
