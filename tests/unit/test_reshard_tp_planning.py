"""The functions that plan one tensor parallel parameter by itself, against tensors cut by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_comm.resharding import planner
from moe_comm.resharding.describe.metadata import ParameterMetadata, ShardingDescriptor

LENGTH = 2 * 3 * 4 * 5


def meta(shape: tuple[int, ...], ranks: list[int] | None, **fields: Any) -> ParameterMetadata:
    return ParameterMetadata(
        name="w",
        shape=shape,
        dtype=torch.float32,
        element_size=4,
        tensor_parallel_group_ranks=ranks,
        **fields,
    )


def shards(whole: torch.Tensor, num_ranks: int, stride: int) -> list[torch.Tensor]:
    """Segment `i + k * num_ranks` of columns is rank i's."""
    segments = whole.chunk(num_ranks * stride, 1)
    return [torch.cat(segments[rank::num_ranks], 1) for rank in range(num_ranks)]


def received(
    sources: dict[int, torch.Tensor], shape: tuple[int, ...], ops: list[Any]
) -> torch.Tensor:
    result = torch.full(shape, -1)
    starts = []
    for src_rank, src_slice, dst_slice in ops:
        assert bool((result[dst_slice] == -1).all())
        result[dst_slice] = sources[src_rank][src_slice]
        starts.append(dst_slice[1].start)
    assert starts == sorted(starts)
    return result


sizes = st.sampled_from([1, 2, 3, 4])
strides = st.sampled_from([1, 2, 5])


@given(sizes, sizes, strides, strides)
def test_strided_shards(num_src: int, num_dst: int, src_stride: int, dst_stride: int) -> None:
    # The side of one rank holds everything in order, whatever its stride.
    whole = torch.arange(3 * LENGTH).reshape(3, LENGTH)
    src_ranks, dst_ranks = list(range(num_src)), list(range(num_src, num_src + num_dst))
    sources, destinations = shards(whole, num_src, src_stride), shards(whole, num_dst, dst_stride)
    src = meta(
        (3, LENGTH // num_src), src_ranks, is_tp=True, partition_dim=1, partition_stride=src_stride
    )
    dst = meta(
        (3, LENGTH // num_dst), dst_ranks, is_tp=True, partition_dim=1, partition_stride=dst_stride
    )
    for place, rank in enumerate(dst_ranks):
        descriptors = planner._build_descriptors_for_param(src, dst)
        ops = planner._plan_tp("w", src, dst, descriptors, rank)
        found = received(dict(enumerate(sources)), dst.shape, ops)
        assert torch.equal(found, destinations[place])
        if src_stride == dst_stride == 1:
            # One piece per source rank that holds any of it.
            assert len({op[0] for op in ops}) == len(ops)


@given(sizes, sizes, st.sampled_from(["both", "source", "destination"]))
def test_packed_components(num_src: int, num_dst: int, stated: str) -> None:
    whole = torch.arange(3 * 2 * LENGTH).reshape(3, 2 * LENGTH)
    lengths = [LENGTH // 2, LENGTH, LENGTH // 2]
    components = whole.split(lengths, 1)

    def packed(num_ranks: int) -> list[torch.Tensor]:
        return [
            torch.cat([part.chunk(num_ranks, 1)[rank] for part in components], 1)
            for rank in range(num_ranks)
        ]

    src = meta((3, 2 * LENGTH // num_src), list(range(num_src)), is_tp=True, partition_dim=1)
    dst = meta((3, 2 * LENGTH // num_dst), list(range(num_dst)), is_tp=True, partition_dim=1)
    if stated != "destination":
        src.partition_sizes = [length // num_src for length in lengths]
    if stated != "source":
        dst.partition_sizes = [length // num_dst for length in lengths]
    descriptors = planner._build_descriptors_for_param(src, dst)
    for rank in range(num_dst):
        ops = planner._plan_tp("w", src, dst, descriptors, rank)
        found = received(dict(enumerate(packed(num_src))), dst.shape, ops)
        assert torch.equal(found, packed(num_dst)[rank])


def test_who_receives_nothing() -> None:
    src, dst = meta((4,), [0, 1], is_tp=True), meta((8,), [2])
    descriptors = planner._build_descriptors_for_param(src, dst)
    assert planner._plan_tp("w", src, dst, [], 2) == []
    assert planner._plan_tp("w", src, dst, descriptors, 0) == []
    assert len(planner._plan_tp("w", src, dst, descriptors, 2)) == 2
    assert planner._build_descriptors_for_param(meta((4,), None, is_tp=True), dst) == []
    assert planner._build_descriptors_for_param(meta((8,), [0]), dst) == []


def test_replicas() -> None:
    everything = (slice(None), slice(None))
    src = meta((2, 3), [0], owner_rank=1, data_parallel_group_ranks=[0, 1])
    same = meta((2, 3), [0], owner_rank=0, data_parallel_group_ranks=[0, 1])
    other = meta((2, 3), [2], owner_rank=2, data_parallel_group_ranks=[2, 3])
    plan = planner._finalize_dp_transfers
    assert plan("w", src, same, 0) == [(0, everything, everything)]
    assert plan("w", src, other, 3) == [(1, everything, everything)]
    assert plan("w", src, other, 0) == []


def descriptor(dim: int = 0, name: str = "tp") -> ShardingDescriptor:
    return ShardingDescriptor(name, dim, 1, 1, [0, 1], [0])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: planner._build_descriptors_for_param(
                meta((4,), [0, 1], is_tp=True), meta((9,), [0])
            ),
            RuntimeError,
            "Cannot build TP descriptor for w: along dimension 0, 2 source ranks hold 4 .* 1 .* 9",
        ),
        (
            lambda: planner._plan_tp("w", meta((4,), [0, 1]), meta((9,), [0]), [descriptor()], 0),
            RuntimeError,
            "w: size mismatch on TP dim0: 2 source ranks hold 4 each, 1 destination ranks 9 each",
        ),
        (
            lambda: planner._plan_tp(
                "w",
                meta((4,), [0, 1], partition_sizes=[3, 1]),
                meta((8,), [0], partition_sizes=[6, 1]),
                [descriptor()],
                0,
            ),
            RuntimeError,
            "w: block 1 size mismatch: 2 source ranks hold 1 each, 1 destination ranks 1 each",
        ),
        (
            lambda: planner._plan_tp(
                "w",
                meta((4,), [0, 1], partition_sizes=[4]),
                meta((8,), [0], partition_sizes=[6, 2]),
                [descriptor()],
                0,
            ),
            RuntimeError,
            r"w: size mismatch .* components \[4\] and \[6, 2\]",
        ),
        (
            lambda: planner._plan_tp(
                "w", meta((4,), [0, 1]), meta((8,), [0]), [descriptor()] * 2, 0
            ),
            NotImplementedError,
            r"w: _plan_tp takes one 'tp' descriptor, got \['tp', 'tp'\]",
        ),
        (
            lambda: planner._plan_tp(
                "w", meta((3,), [0]), meta((3,), [0]), [descriptor(name="ep")], 0
            ),
            NotImplementedError,
            r"got \['ep'\]",
        ),
        (
            lambda: planner._plan_tp(
                "w",
                meta((3,), [0, 1], is_tp=True),
                meta((6,), [0]),
                [ShardingDescriptor("tp", 0, 2, 1, [0, 1], [0])],
                0,
            ),
            RuntimeError,
            "w: TP dim0 of length 6 does not divide into 2 x 2 and 1 x 1 segments",
        ),
    ],
)
def test_what_is_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
