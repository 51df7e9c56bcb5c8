"""Windows that a buffer has for low-latency rows from its making on."""

from __future__ import annotations

import pytest
import torch

from moe_comm import (
    CapacityError,
    Communicator,
    EpBuffer,
    EpConfig,
    Layout,
    Quantization,
    QuantizationFormat,
    ScaleFormat,
)
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.configs import ep_config

NUM_RANKS = 2
NUM_TOKENS = 6
NUM_EXPERTS = 4
NUM_TOPK = 2
FP8 = QuantizationFormat.FP8_BLOCK128
FORMATS = (
    None,
    Quantization(format=FP8),
    Quantization(format=FP8, is_column_major=True),
    Quantization(format=FP8, scale_format=ScaleFormat.UE8M0, is_column_major=True),
    Quantization(format=QuantizationFormat.MXFP8),
    Quantization(format=QuantizationFormat.MXFP8, is_column_major=True),
)


def _config(hidden: int, dtype: torch.dtype, num_windows: int | None = None) -> EpConfig:
    return ep_config(
        NUM_EXPERTS, NUM_TOPK, hidden, NUM_TOKENS, dtype=dtype, num_low_latency_windows=num_windows
    )


def _num_allocations_of(
    context: RankContext, hidden: int, dtype: torch.dtype, num_windows: int | None
) -> list[int]:
    """Number of windows that the heap gave for a dispatch in each format."""
    communicator = Communicator(context.group, backend="simt")
    buffer = EpBuffer(communicator, _config(hidden, dtype, num_windows))
    generator = torch.Generator().manual_seed(context.rank_idx)
    x = torch.randn(NUM_TOKENS, hidden, generator=generator).to(dtype)
    topk_idx = torch.randint(NUM_EXPERTS, (NUM_TOKENS, NUM_TOPK), generator=generator)
    weights = torch.rand(NUM_TOKENS, NUM_TOPK, generator=generator)
    if dtype is torch.float64:
        weights = weights.double()
    numbers = []
    for quantization in FORMATS:
        if quantization is not None and dtype is torch.float64:
            continue
        before = communicator.heap_stats().num_allocations
        result = buffer.dispatch(
            x, topk_idx, weights, layout=Layout.LOW_LATENCY, quantization=quantization
        )
        assert int(result.num_tokens_per_expert.sum()) > 0
        numbers.append(communicator.heap_stats().num_allocations - before)
        del result
    communicator.destroy()
    return numbers


@pytest.mark.parametrize(
    ("hidden", "dtype"), [(40, torch.bfloat16), (4, torch.float32), (2, torch.float64)], ids=str
)
def test_every_format_fits_a_window_of_the_buffer(hidden: int, dtype: torch.dtype) -> None:
    for numbers in run_ranks(_num_allocations_of, NUM_RANKS, hidden, dtype, None, mode="threads"):
        assert numbers
        assert not any(numbers)


def test_a_buffer_without_windows_asks_the_heap() -> None:
    for numbers in run_ranks(_num_allocations_of, NUM_RANKS, 40, torch.bfloat16, 0, mode="threads"):
        assert numbers == [1] * len(FORMATS)


def _refused(context: RankContext) -> tuple[str, int, int]:
    config = _config(1 << 16, torch.bfloat16, 5)  # 3 MiB a window
    communicator = Communicator(
        context.group, backend="simt", max_heap_bytes=(4 << 20) << (3 * context.rank_idx)
    )
    with pytest.raises(CapacityError) as caught:
        EpBuffer(communicator, config)
    communicator.destroy()
    error = caught.value
    return str(error), error.needed_bytes, error.available_bytes


def test_windows_that_do_not_fit_are_refused_on_every_rank() -> None:
    said = run_ranks(_refused, NUM_RANKS, mode="threads")
    assert said[0] == said[1]
    text, needed_bytes, available_bytes = said[0]
    assert f"rank 0 needs {needed_bytes} bytes for 5 low-latency windows" in text
    assert f"{available_bytes} can be had" in text
    window_bytes = NUM_EXPERTS // NUM_RANKS * NUM_RANKS * NUM_TOKENS * 2 << 16
    assert 5 * window_bytes < needed_bytes < 6 * window_bytes
    assert available_bytes < 4 << 20


def test_how_many_windows_there_are() -> None:
    def number(num_max_tokens: int | None, num_windows: int | None, hidden: int | None = 16) -> int:
        return ep_config(
            4, 2, hidden, num_max_tokens, num_low_latency_windows=num_windows
        ).num_windows_to_reserve

    assert [number(tokens, None) for tokens in (None, 0, 1024, 1025)] == [0, 2, 2, 0]
    assert [number(4096, windows) for windows in (0, 1, 5)] == [0, 1, 5]
    with pytest.raises(ValueError, match="num_low_latency_windows must be >= 0, got -1"):
        number(128, -1)
    assert number(128, 0, None) == number(None, 0) == 0
    for num_max_tokens, hidden in ((None, 16), (128, None)):
        with pytest.raises(ValueError, match=f"got 3 with {num_max_tokens}, {hidden} and torch.bf"):
            number(num_max_tokens, 3, hidden)
