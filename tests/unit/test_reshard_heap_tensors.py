"""Tensors in the symmetric heap: what they are, who sees them, when they go back."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import moe_comm

DTYPES = [torch.bfloat16, torch.float64, torch.bool, torch.float8_e4m3fn, torch.complex64]


def on_ranks(num_ranks: int, body: Callable[[moe_comm.Communicator], Any], **options: Any) -> list:
    """Results of `body` on each rank, ranks being threads."""
    ranks = moe_comm.RankThreads(num_ranks)

    def be_rank(rank_idx: int) -> Any:
        with moe_comm.Communicator(ranks[rank_idx], **{"backend": "host", **options}) as comm:
            result = body(comm)
            comm.bootstrap.all_gather(None)
            return result

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(be_rank, range(num_ranks)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4), (1,)], ids=str)
def test_a_tensor_lies_in_the_heap(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def body(comm: moe_comm.Communicator) -> None:
        tensor = comm.empty(*shape, dtype=dtype)
        assert (tensor.shape, tensor.dtype) == (shape, dtype)
        assert tensor.data_ptr() % 64 == 0
        num_bytes = tensor.numel() * dtype.itemsize
        assert (comm.require_native().find(tensor.data_ptr(), num_bytes) is None) == (
            num_bytes == 0
        )

    on_ranks(1, body)


def test_memory_goes_back_with_the_last_tensor() -> None:
    def body(comm: moe_comm.Communicator) -> None:
        before = comm.heap_stats().live_bytes
        row = comm.empty(4, 4096, dtype=torch.uint8)[1]
        gc.collect()
        assert comm.heap_stats().live_bytes == before + 4 * 4096
        del row
        gc.collect()
        assert comm.heap_stats().live_bytes == before

    on_ranks(1, body)


def test_bad_sizes_and_backends() -> None:
    def body(comm: moe_comm.Communicator) -> None:
        with pytest.raises(ValueError, match=r"sizes must be >= 0, got \(2, -1\)"):
            comm.empty(2, -1, dtype=torch.int8)
        with pytest.raises(moe_comm.CapacityError):
            comm.empty(2 << 20, dtype=torch.int8)

    def no_heap(comm: moe_comm.Communicator) -> None:
        with pytest.raises(ValueError, match="collective backend has no heap"):
            comm.empty(2, dtype=torch.int8)

    on_ranks(1, body, max_heap_bytes=1 << 20)
    on_ranks(1, no_heap, backend="collective")
