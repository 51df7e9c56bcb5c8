"""`fp8_dispatch=True`, forward and backward, where Megatron asserts it off."""

from __future__ import annotations

import pytest
import torch

from moe_comm import FP8_BLOCK128, Communicator, fused_a2a
from moe_comm.ep.autograd.quantized_rows import QuantizedRows
from moe_comm.ep.group_buffers import group_buffers
from moe_comm.tensors import quantized
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.routed import expected_rows, make_batches

NUM_EXPERTS, HIDDEN = 4, 160  # a block of 128 and one of 32


pytestmark = pytest.mark.usefixtures("forget_groups")


def fp8_layer(context: RankContext, backend: str) -> None:
    shared = group_buffers(Communicator(context.group, backend=backend))
    experts = range(2 * context.rank_idx, 2 * context.rank_idx + 2)
    fused_a2a.init_hybrid_ep_buffer(context.group, HIDDEN, 16, 2, 24, 24, True)
    batches = make_batches([6, 9], NUM_EXPERTS, 2, hidden=HIDDEN)
    for batch in batches:
        # 7 / 448 is a power of two and integers up to 7 are e4m3: nothing is rounded.
        batch.x.clamp_(-7, 7)
        batch.x[:, [0, 128]] = 7
    mine = batches[context.rank_idx]
    x, probs = mine.x.clone().requires_grad_(), mine.probs.clone().requires_grad_()
    hidden, row_probs, scales, _, handle = fused_a2a.hybrid_ep_dispatch(
        x, mine.routing_map, probs, context.group, 2, pad_multiple=16
    )
    assert isinstance(hidden, QuantizedRows)
    assert hidden.dtype is torch.bfloat16
    assert scales is not None
    assert hidden.sf is scales
    rows = expected_rows(batches, experts, 16)
    for place, row in enumerate(rows):
        sent = torch.zeros(1, HIDDEN, dtype=torch.bfloat16)
        if row is not None:
            sent = batches[row[0]].x[row[1]][None]
            data, sf = quantized.quantize(sent, FP8_BLOCK128)
            assert torch.equal(hidden.data_fp8[place].view(torch.uint8), data[0].view(torch.uint8))
            assert torch.equal(scales[place], sf[0])
        assert torch.equal(hidden.dequantize()[place : place + 1].float(), sent.float())
    # A gradient of 1e-3 arrives as 1e-3: it is not quantized.
    y = fused_a2a.hybrid_ep_combine(hidden.dequantize() * row_probs[:, None].bfloat16(), handle)
    y.backward(torch.full_like(y, 1e-3))
    expected = (
        mine.probs.sum(1, keepdim=True) * torch.tensor(1e-3, dtype=torch.bfloat16)
    ).bfloat16()
    assert torch.allclose(x.grad.float(), expected.float().expand_as(x), rtol=2**-7, atol=0.0)
    dots = (mine.x.double() * torch.tensor(1e-3, dtype=torch.bfloat16).double()).sum(
        1, keepdim=True
    )
    assert torch.allclose(probs.grad.double(), dots * mine.routing_map, rtol=0.02, atol=2e-3)
    # Rows of the dispatch go back as they are too: they are dequantized on the way.
    again = fused_a2a.hybrid_ep_combine(hidden, handle)
    assert torch.equal(again, mine.x * 2)
    fused_a2a.init_hybrid_ep_buffer(context.group, HIDDEN, 16, 2, 24, 24, False)
    plain = fused_a2a.hybrid_ep_dispatch(x, mine.routing_map, probs, context.group, 2)
    assert not isinstance(plain[0], QuantizedRows)
    assert plain[2] is None
    del shared


@pytest.mark.parametrize("backend", ["host", "reference"])
def test_fp8_dispatch(backend: str) -> None:
    run_ranks(fp8_layer, 2, backend, mode="threads")
