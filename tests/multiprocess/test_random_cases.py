"""The conformance suite on drawn configurations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_comm.ep.config import Capacity, Layout
from moe_comm.tensors.quantization import QUANTIZABLE_DTYPES
from moe_comm.testing import Case, Target, check_case
from moe_comm.testing.case_list import QUANTIZATIONS, in_layout
from moe_comm.testing.cases import ROUTINGS
from tests.helpers.node_ranks import target

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8, torch.int64]


SCALES = [torch.float32, torch.int32, torch.float8_e8m0fnu, torch.float64, torch.bfloat16]


@st.composite
def row_fields(draw: st.DrawFn) -> dict[str, Any]:
    """Dtype, size and quantization of rows."""
    kind = draw(st.sampled_from(["plain", "quantized", "pair"]))
    if kind == "pair":
        return {
            "dtype": draw(st.sampled_from([torch.float8_e4m3fn, torch.uint8])),
            "hidden": draw(st.integers(1, 150)),
            "pair": (draw(st.sampled_from(SCALES)), draw(st.integers(1, 6))),
            "quantization": draw(st.none() | st.sampled_from(QUANTIZATIONS)),
            "is_elastic": True,
        }
    is_quantized = kind == "quantized"
    dtype = draw(st.sampled_from(QUANTIZABLE_DTYPES if is_quantized else DTYPES))
    units = draw(st.integers(1, 40 if is_quantized else 9))
    return {
        "dtype": dtype,
        "hidden": 16 // dtype.itemsize * units,
        "has_special_values": dtype.is_floating_point and draw(st.booleans()),
        "quantization": draw(st.sampled_from(QUANTIZATIONS)) if is_quantized else None,
        "is_elastic": draw(st.booleans()),
    }


@st.composite
def capacity_lists(draw: st.DrawFn, num_ranks: int, alignment: int) -> tuple[Capacity, ...]:
    """Limits that go with EXPERT_MAJOR; "raise" has a test of its own."""
    drops = draw(st.booleans())
    per_expert = draw(st.none() | st.integers(0, 12)) if drops else None
    units = st.integers(0, 8)
    num_rows = units.map(lambda count: count * alignment)
    if per_expert is not None:
        num_rows = st.none() | num_rows
    return tuple(
        Capacity(
            num_rows=draw(num_rows),
            num_rows_per_expert=per_expert,
            on_overflow="drop" if drops else "grow",
        )
        for _ in range(num_ranks)
    )


@st.composite
def cases(draw: st.DrawFn, rank_counts: tuple[int, ...] = (1, 2, 3, 4)) -> Case:
    num_ranks = draw(st.sampled_from(rank_counts))
    num_experts = draw(st.integers(1, 12))
    placement = st.lists(st.integers(0, num_ranks - 1), min_size=num_experts, max_size=num_experts)
    num_tokens = st.lists(st.integers(0, 12), min_size=num_ranks, max_size=num_ranks)
    layout = draw(st.sampled_from(list(Layout)))
    alignment = draw(st.sampled_from([1, 2, 7, 16]))
    num_topk = draw(st.integers(1, 10))
    fields = draw(row_fields())
    if layout is Layout.EXPERT_MAJOR and draw(st.booleans()):
        fields["capacities"] = draw(capacity_lists(num_ranks, alignment))
    if layout is Layout.LOW_LATENCY and draw(st.booleans()):
        masked = st.lists(st.integers(0, num_ranks - 1), max_size=2, unique=True).map(tuple)
        fields["masked_ranks"] = tuple(draw(masked) for _ in range(num_ranks))
    if fields["is_elastic"]:
        narrower = st.integers(1, num_topk)
        fields["num_topk_per_rank"] = tuple(draw(narrower) for _ in range(num_ranks))
    case = Case(
        name="drawn",
        num_ranks=num_ranks,
        num_tokens=tuple(draw(num_tokens)),
        num_experts=num_experts,
        num_topk=num_topk,
        expert_alignment=alignment,
        expert_rank=draw(st.none() | placement.map(tuple)),
        routing=draw(st.sampled_from(ROUTINGS)),
        num_spare_tokens=draw(st.integers(0, 3)),
        **fields,
    )
    return in_layout(case, layout)


@settings(max_examples=6)
@given(case=cases())
def test_a_few_drawn_cases(case: Case) -> None:
    check_case(Target(name="host"), case, mode="threads")


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "mode"), [("reference", "threads"), ("host", "threads"), ("collective", "processes")]
)
@settings(max_examples=25)
@given(case=cases())
def test_drawn_cases(name: str, mode: str, case: Case) -> None:
    check_case(Target(name=name), case, mode=mode)


@pytest.mark.full
@pytest.mark.parametrize(
    ("rail", "mode", "most_local_ranks"),
    [
        ("sockets", "threads", 2),
        ("sockets", "threads", 1),
        ("sockets", "threads", 3),
        ("gloo", "processes", 2),
    ],
)
@settings(max_examples=25)
@given(case=cases((3, 4, 6)))
def test_drawn_cases_across_nodes(rail: str, mode: str, most_local_ranks: int, case: Case) -> None:
    check_case(target(most_local_ranks, rail), case, mode=mode)
