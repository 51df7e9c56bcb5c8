"""Shared bytes of tensors, against sets of addresses."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_comm.tensors.memory_overlap import (
    first_overlap,
    has_element_twice,
    is_same_place,
    shares_bytes,
)

MEMORY = torch.zeros(4096, dtype=torch.uint8)
DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any dtype, offset and strides within one storage; sizes may be 0, strides may be 0."""
    dtype = draw(st.sampled_from(DTYPES))
    num_dims = draw(st.integers(0, 3))
    shape = draw(st.tuples(*[st.integers(0, 4)] * num_dims))
    strides = draw(st.tuples(*[st.integers(0, 9)] * num_dims))
    offset = draw(st.integers(0, 40))
    return torch.as_strided(MEMORY.view(dtype), shape, strides, offset)


def addresses(tensor: torch.Tensor) -> list[int]:
    """Address of every byte of every element."""
    offsets = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = offsets[..., None] + stride * torch.arange(size)
    starts = tensor.data_ptr() + offsets.flatten() * tensor.element_size()
    return (starts[:, None] + torch.arange(tensor.element_size())).flatten().tolist()


@settings(max_examples=400)
@given(one=tensors(), other=tensors())
def test_two_tensors(one: torch.Tensor, other: torch.Tensor) -> None:
    want = not set(addresses(one)).isdisjoint(addresses(other))
    assert shares_bytes(one, other) is want
    assert shares_bytes(other, one) is want
    mine = addresses(one)
    assert has_element_twice(one) is (len(set(mine)) < len(mine))


@settings(max_examples=200)
@given(written=st.lists(tensors(), max_size=4), read=st.lists(tensors(), max_size=4))
def test_many_tensors(written: list[torch.Tensor], read: list[torch.Tensor]) -> None:
    sets = [set(addresses(tensor)) for tensor in written]
    of_read = [set(addresses(tensor)) for tensor in read]
    bad = {
        (i, j, False)
        for i in range(len(sets))
        for j in range(len(sets))
        if i != j and sets[i] & sets[j]
    }
    bad |= {
        (i, j, True) for i in range(len(sets)) for j in range(len(of_read)) if sets[i] & of_read[j]
    }
    found = first_overlap(written, read)
    assert (found is None) == (not bad)
    assert found is None or tuple(found) in bad
    # Pairs that the caller allows are passed over, and the next one is found.
    allowed = first_overlap(
        written, read, lambda one, other: is_same_place(written[one], read[other])
    )
    bad -= {
        (i, j, True)
        for i in range(len(sets))
        for j in range(len(read))
        if is_same_place(written[i], read[j])
    }
    assert (allowed is None) == (not bad)
    assert allowed is None or tuple(allowed) in bad


def test_columns_of_shards_interleave() -> None:
    whole = torch.zeros(64, 96, dtype=torch.bfloat16)
    left, right = whole[:, :48], whole[:, 48:]
    assert not shares_bytes(left, right)
    assert shares_bytes(left, whole[:, 47:])
    assert shares_bytes(right, whole[3])
    assert not shares_bytes(left, whole[3, 48:])
    assert first_overlap([left, right]) is None
    assert first_overlap([left], [right, whole]) == (0, 1, True)


def test_memory_that_is_nowhere() -> None:
    nowhere = torch.zeros(4, device="meta")
    assert not shares_bytes(nowhere, nowhere)
    assert not shares_bytes(torch.zeros(0), torch.zeros(0))
    assert first_overlap([nowhere, nowhere], [nowhere]) is None
