"""Batched copies between tensors of a device, run by the emulator's kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from moe_comm import _simt

DTYPES = [
    torch.uint8,
    torch.bfloat16,
    torch.float32,
    torch.int64,
    torch.complex128,
    torch.float8_e4m3fn,
]

# (name, shape, what turns a contiguous tensor of a larger shape into a view of that shape)
Case = tuple[str, tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]
SHAPES: list[Case] = [
    ("rows of a slice", (7, 300), lambda t: t[:, 3:303]),
    ("columns", (300, 7), lambda t: t.t()),
    ("permuted", (5, 11, 6, 4), lambda t: t.permute(3, 1, 0, 2)),
    ("every other", (9, 33), lambda t: t[::2, ::3]),
    ("long rows", (3, 5000), lambda t: t[1:4, 40:5040]),
    ("a scalar", (), lambda t: t[3]),
    ("nothing", (4, 0), lambda t: t[:4, :0]),
]
BASES = [(7, 310), (7, 300), (6, 11, 4, 5), (17, 99), (5, 5100), (9,), (6, 8)]


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bytes at all."""
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).view(shape)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_batch_of_views(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    sources = [view(numbers(base, dtype)) for base, (_, _, view) in zip(BASES, SHAPES, strict=True)]
    # Targets are dense, then views with holes of memory that must stay as it is.
    dense = [torch.empty(source.shape, dtype=dtype) for source in sources]
    bases = [numbers(base, dtype) for base in BASES]
    before = [base.clone() for base in bases]
    views = [view(base) for base, (_, _, view) in zip(bases, SHAPES, strict=True)]
    _simt.strided_copies(dense + views, sources + sources)
    for (name, shape, view), source, copy, base, was in zip(
        SHAPES, sources, dense, bases, before, strict=True
    ):
        assert source.shape == shape, name
        assert torch.equal(bytes_of(copy), bytes_of(source)), name
        view(was).copy_(source)
        assert torch.equal(bytes_of(base), bytes_of(was)), name


def test_shapes_may_differ_on_both_sides() -> None:
    source = numbers((6, 40, 10), torch.int16)[:, ::2]
    target = torch.zeros(1200, dtype=torch.int16)
    _simt.strided_copies([target], [source])
    assert torch.equal(target, source.reshape(-1))


def test_a_source_may_repeat_its_elements() -> None:
    source = numbers((1, 50), torch.float64).expand(9, 50)
    target = torch.zeros(9, 50, dtype=torch.float64)
    _simt.strided_copies([target], [source], num_sms=1)
    assert torch.equal(bytes_of(target), bytes_of(source))


def test_many_copies_and_none() -> None:
    _simt.strided_copies([], [])
    sources = [numbers((size,), torch.uint8) for size in range(200)]
    targets = [torch.zeros(size, dtype=torch.uint8) for size in range(200)]
    _simt.strided_copies(targets, sources)
    assert all(torch.equal(*pair) for pair in zip(targets, sources, strict=True))


def test_bad_batches_are_refused_with_both_values() -> None:
    a = torch.zeros(4, 3)
    with pytest.raises(ValueError, match="got 1 and 2"):
        _simt.strided_copies([a], [a, a])
    with pytest.raises(ValueError, match=r"from torch.float32 .*\[4, 3\].* to torch.int32"):
        _simt.strided_copies([a.int()], [a])
    with pytest.raises(ValueError, match=r"copy 1 goes from .*\[4, 3\].* to .*\[5, 3\]"):
        _simt.strided_copies([a.clone(), torch.zeros(5, 3)], [a, a])
    with pytest.raises(ValueError, match=r"strides \(0, 1\), whose elements overlap"):
        _simt.strided_copies([torch.zeros(1, 3).expand(4, 3)], [a])
