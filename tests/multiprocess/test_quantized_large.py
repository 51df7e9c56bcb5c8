"""Quantized rows of calls that outgrow the caches, which are stored another way than small ones."""

from __future__ import annotations

import pytest
import torch

from moe_comm import (
    Communicator,
    EpBuffer,
    Layout,
    Quantization,
    QuantizationFormat,
    ScaleFormat,
    quantize,
)
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.configs import ep_config

NUM_TOKENS = 700  # 80 MB of quantized rows over both ranks
HIDDEN = 7168
NUM_TOPK = 8
FORMATS = [
    (QuantizationFormat.FP8_BLOCK128, ScaleFormat.FLOAT32),
    (QuantizationFormat.FP8_BLOCK128, ScaleFormat.UE8M0),
    (QuantizationFormat.MXFP8, ScaleFormat.UE8M0),
]


def _inputs(rank_idx: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank_idx)
    x = torch.randn(NUM_TOKENS, HIDDEN, generator=generator).to(torch.bfloat16)
    scores = torch.rand(NUM_TOKENS, 16, generator=generator)
    # The weight says which row arrived: 1 + its place in the rows of all ranks.
    origin = 1.0 + rank_idx * NUM_TOKENS + torch.arange(NUM_TOKENS, dtype=torch.float32)
    return x, scores.topk(NUM_TOPK, dim=1).indices, origin[:, None].expand(-1, NUM_TOPK)


def _large(context: RankContext, num_threads: int) -> None:
    comm = Communicator(context.group, backend="host", num_threads=num_threads)
    config = ep_config(16, NUM_TOPK, HIDDEN, NUM_TOKENS)
    buffer = EpBuffer(comm, config)
    x, topk_idx, origin = _inputs(comm.rank_idx)
    everything = torch.cat([_inputs(rank_idx)[0] for rank_idx in range(comm.num_ranks)])
    for (format_, scale_format), is_column_major in (
        (FORMATS[0], False),
        *((recipe, True) for recipe in FORMATS),
    ):
        quantization = Quantization(
            format=format_, scale_format=scale_format, is_column_major=is_column_major
        )
        data, scales = quantize(everything, quantization)
        for layout in (Layout.EXPERT_MAJOR, Layout.RANK_MAJOR):
            result = buffer.dispatch(
                x,
                topk_idx,
                origin.contiguous(),
                layout=layout,
                expert_alignment=16,
                quantization=quantization,
            )
            assert result.x_sf is not None
            assert result.topk_weights is not None
            weights = result.topk_weights
            if layout is Layout.RANK_MAJOR:
                weights = weights.amax(dim=1)
            filled = weights > 0
            row = (weights[filled] - 1).long()
            assert torch.equal(
                result.x.view(torch.uint8)[filled], data.view(torch.uint8).index_select(0, row)
            )
            words = torch.uint8 if scales.dtype.itemsize == 1 else torch.int32
            assert torch.equal(
                result.x_sf.view(words)[filled], scales.contiguous().view(words)[row]
            )
            assert not result.x_sf.view(words)[~filled].any()
        del result
    comm.destroy()


@pytest.mark.full
@pytest.mark.parametrize("num_threads", [1, 2])
def test_rows_and_scale_factors_of_a_large_call(num_threads: int) -> None:
    run_ranks(_large, 2, num_threads)
