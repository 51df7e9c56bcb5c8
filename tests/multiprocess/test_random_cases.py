"""The conformance suite on drawn configurations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_comm.config import Layout
from moe_comm.testing import Case, Target, check_case
from moe_comm.testing.cases import ROUTINGS

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8, torch.int64]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_ranks = draw(st.integers(1, 5))
    num_experts = draw(st.integers(1, 12))
    dtype = draw(st.sampled_from(DTYPES))
    placement = st.lists(st.integers(0, num_ranks - 1), min_size=num_experts, max_size=num_experts)
    num_tokens = st.lists(st.integers(0, 12), min_size=num_ranks, max_size=num_ranks)
    return Case(
        name="drawn",
        num_ranks=num_ranks,
        num_tokens=tuple(draw(num_tokens)),
        hidden=16 // dtype.itemsize * draw(st.integers(1, 9)),
        num_experts=num_experts,
        num_topk=draw(st.integers(1, 10)),
        dtype=dtype,
        layout=draw(st.sampled_from(list(Layout))),
        expert_alignment=draw(st.sampled_from([1, 2, 7, 16])),
        expert_rank=draw(st.none() | placement.map(tuple)),
        routing=draw(st.sampled_from(ROUTINGS)),
        has_special_values=dtype.is_floating_point and draw(st.booleans()),
        num_spare_tokens=draw(st.integers(0, 3)),
    )


@pytest.mark.parametrize(
    ("name", "mode"), [("reference", "threads"), ("host", "threads"), ("collective", "processes")]
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_drawn_cases(name: str, mode: str, case: Case) -> None:
    check_case(Target(name=name), case, mode=mode)
