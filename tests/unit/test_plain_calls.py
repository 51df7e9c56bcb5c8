"""What is let through at a glance must be what the checks one by one let through."""

import itertools

import pytest
import torch

from moe_comm import EpConfig, Layout
from moe_comm.ep import call_checks, validation
from moe_comm.ep.handles import DispatchHandle

CONFIG = EpConfig(num_experts=8, num_topk=2, hidden=16, num_max_tokens_per_rank=4)


def _rows() -> list[object]:
    good = torch.zeros(3, 16, dtype=torch.bfloat16)
    return [
        good,
        good[:0],
        good.float(),
        torch.zeros(3, 32, dtype=torch.bfloat16),
        torch.zeros(3, 32, dtype=torch.bfloat16)[:, ::2],
        torch.zeros(5, 16, dtype=torch.bfloat16),
        torch.zeros(16, dtype=torch.bfloat16),
        torch.zeros(3, 16, dtype=torch.bfloat16, device="meta"),
        torch.nn.Parameter(good),
        torch._neg_view(good),
        (good, good),
        None,
    ]


def _choices() -> list[object]:
    good = torch.zeros(3, 2, dtype=torch.int64)
    return [
        good,
        good[:0],
        torch.zeros(5, 2, dtype=torch.int64),
        good.int(),
        torch.zeros(3, 4, dtype=torch.int64)[:, ::2],
        torch.zeros(3, 3, dtype=torch.int64),
        torch.zeros(6, dtype=torch.int64),
        torch.zeros(3, 2, dtype=torch.int64, device="meta"),
        None,
    ]


def _weights() -> list[object]:
    return [
        None,
        torch.zeros(3, 2),
        torch.zeros(3, 2, dtype=torch.float64),
        torch.zeros(2, 3),
        torch.zeros(3, 4)[:, ::2],
        torch.zeros(3, 2, device="meta"),
        1.0,
    ]


def test_a_plain_dispatch_passes_every_check() -> None:
    num_plain = 0
    for x, topk_idx, weights, layout, alignment in itertools.product(
        _rows(), _choices(), _weights(), [*Layout, 2, None], [1, 4, True, 1.0, "1"]
    ):
        if not call_checks.is_plain_dispatch(CONFIG, x, topk_idx, weights, layout, alignment):
            continue
        num_plain += 1
        validation.check_rows(x, None)
        validation.check_devices(torch.device("cpu"), x=x, topk_idx=topk_idx, topk_weights=weights)
        validation.check_dispatch(
            CONFIG, x, topk_idx, weights, layout, alignment, is_quantized=False
        )
        validation.check_capacity(None, layout, alignment)
    # Rows of every layout, with and without weights; and none.
    assert num_plain == 3 * 2 + 3 * 1


@pytest.mark.parametrize("most_tokens", [None, 0, 2, 3])
@pytest.mark.parametrize("layout", list(Layout))
def test_any_number_of_tokens_is_plain_where_none_is_configured(
    most_tokens: int | None, layout: Layout
) -> None:
    x, topk_idx = torch.zeros(3, 16, dtype=torch.bfloat16), torch.zeros(3, 2, dtype=torch.int64)
    config = EpConfig(num_experts=8, num_topk=2, hidden=16, num_max_tokens_per_rank=most_tokens)
    is_plain = call_checks.is_plain_dispatch(config, x, topk_idx, None, layout, 1)
    assert is_plain == (
        most_tokens == 3 or (most_tokens is None and layout is not Layout.LOW_LATENCY)
    )
    if not is_plain:
        with pytest.raises(ValueError, match="num_max_tokens_per_rank"):
            validation.check_dispatch(config, x, topk_idx, None, layout, 1, is_quantized=False)


def test_an_open_configuration_leaves_a_dispatch_to_the_checks() -> None:
    x, topk_idx = torch.zeros(3, 16, dtype=torch.bfloat16), torch.zeros(3, 2, dtype=torch.int64)
    for change in ({"num_topk": None}, {"hidden": None}, {"dtype": None}):
        fields = {"num_topk": 2, "hidden": 16, "num_max_tokens_per_rank": 4, **change}
        config = EpConfig(num_experts=8, **fields)
        assert not call_checks.is_plain_dispatch(config, x, topk_idx, None, Layout.LOW_LATENCY, 1)


@pytest.mark.parametrize("layout", list(Layout))
def test_a_plain_combine_passes_every_check(layout: Layout) -> None:
    handle = DispatchHandle(
        buffer_id=1,
        generation=0,
        layout=layout,
        expert_alignment=1,
        num_tokens=3,
        num_topk=2,
        num_recv_tokens=3,
        num_recv_topk=2,
        plan=None,
    )
    num_plain = 0
    for expert_out, weights in itertools.product(_rows(), _weights()):
        if not call_checks.is_plain_combine(handle, expert_out, weights, CONFIG):
            continue
        num_plain += 1
        validation.check_devices(torch.device("cpu"), expert_out=expert_out, topk_weights=weights)
        validation.check_combine(handle, expert_out, weights, None, None)
    assert num_plain == (1 if layout is Layout.RANK_MAJOR else 2)
