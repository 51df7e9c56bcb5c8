"""The cases of the conformance suite: what every backend must get right."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from moe_comm.ep.config import Capacity, Layout
from moe_comm.tensors.arithmetic import ADDABLE_DTYPES
from moe_comm.tensors.quantization import (
    FP8_BLOCK128,
    MXFP8,
    Quantization,
    QuantizationFormat,
)
from moe_comm.testing.cases import ROUTINGS, Case

_RAGGED = (5, 0, 9, 3, 17, 1, 0, 4)


def _case(name: str, num_ranks: int, **fields: Any) -> Case:
    return Case(name=name, num_ranks=num_ranks, **{"num_tokens": _RAGGED[:num_ranks], **fields})


def _cases_of_a_layout() -> Iterator[Case]:
    for num_ranks in (1, 2, 3, 4, 6, 8):
        yield _case(f"{num_ranks}-ranks", num_ranks, num_experts=13, num_topk=3)
    for dtype in (torch.float16, torch.float32, torch.float64):
        yield _case(_short(dtype), 3, dtype=dtype)
    for dtype in (torch.float8_e4m3fn, torch.uint8, torch.int32, torch.bool):
        yield _case(_short(dtype), 2, dtype=dtype, routing="masked")
    for dtype in ADDABLE_DTYPES:
        yield _case(f"special-{_short(dtype)}", 2, dtype=dtype, num_topk=4, has_special_values=True)
    for routing in ROUTINGS[1:]:
        yield _case(routing.replace("_", "-"), 4, num_topk=4, routing=routing)
    for num_topk in (1, 5, 17, 64):
        yield _case(f"top-{num_topk}", 2, num_topk=num_topk, routing="masked")
    yield _case("top-64-of-64", 3, num_topk=64, num_experts=64)
    for hidden in (8, 24, 1000, 2880):
        yield _case(f"hidden-{hidden}", 2, hidden=hidden)
    for alignment in (8, 128):
        yield _case(f"alignment-{alignment}", 3, expert_alignment=alignment, routing="masked")
    yield _case("one-element-rows", 2, hidden=1, dtype=torch.complex128)
    yield _case("empty-everywhere", 3, num_tokens=(0, 0, 0), expert_alignment=8)
    yield _case("empty-first", 4, num_tokens=(0, 6, 6, 6))
    yield _case("one-token", 4, num_tokens=(0, 0, 1, 0))
    yield _case("spare-capacity", 2, num_spare_tokens=100)
    yield _case("one-expert-in-all", 3, num_experts=1, num_topk=1)
    yield _case("experts-on-last-rank", 3, expert_rank=(2,) * 8)
    yield _case("rank-without-experts", 4, expert_rank=(0, 0, 2, 2, 3, 3, 3, 0))
    yield _case("interleaved-experts", 3, expert_rank=(2, 0, 1, 2, 1, 0, 0, 2), num_topk=3)
    yield _case(
        "larger", 2, num_tokens=(200, 123), hidden=512, num_experts=64, num_topk=8,
        expert_alignment=16,
    )  # fmt: skip
    yield _case(
        "larger-8-ranks", 8, num_tokens=(30, 64, 1, 0, 64, 17, 40, 2), hidden=256,
        num_experts=64, num_topk=8, routing="skewed",
    )  # fmt: skip


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def in_layout(case: Case, layout: Layout) -> Case:
    """The case in a layout, with places enough for LOW_LATENCY."""
    case = dataclasses.replace(case, name=f"{_dashed(layout.name)}-{case.name}", layout=layout)
    if layout is not Layout.LOW_LATENCY:
        return case
    can_repeat = case.num_topk > case.num_experts or case.routing in ("one_expert", "one_rank", "repeated")  # fmt: skip
    spare = max(case.num_tokens) * case.num_topk if can_repeat else case.num_spare_tokens
    return dataclasses.replace(case, expert_alignment=1, num_spare_tokens=spare)


def _dashed(name: str) -> str:
    return name.lower().replace("_", "-")


QUANTIZATIONS = tuple(
    Quantization(format=form, scale_format=scale_format, is_column_major=is_column_major)
    for form in QuantizationFormat
    for scale_format in form.e4m3_scales
    for is_column_major in (False, True)
)
"""Everything that the definition can quantize rows to."""


def _quantized_cases() -> Iterator[Case]:
    for quantization in QUANTIZATIONS:
        scale_format = quantization.scale_format
        assert scale_format is not None
        order = "columns" if quantization.is_column_major else "rows"
        name = f"{_dashed(quantization.format.name)}-{_dashed(scale_format.name)}-{order}"
        for dtype, hidden in (
            (torch.bfloat16, 200), (torch.float16, 1040), (torch.float32, 128), (torch.float32, 36),
        ):  # fmt: skip
            yield _case(
                f"{name}-{_short(dtype)}-{hidden}", 3, dtype=dtype, hidden=hidden, num_topk=3,
                quantization=quantization, routing="masked", expert_alignment=4,
            )  # fmt: skip
    in_columns = dataclasses.replace(FP8_BLOCK128, is_column_major=True)
    pairs: list[tuple[torch.dtype, int, torch.dtype, int, Quantization | None]] = [
        (torch.float8_e4m3fn, 7, torch.float32, 1, None),
        (torch.float8_e4m3fn, 129, torch.int32, 2, in_columns),
        (torch.float8_e5m2, 64, torch.float8_e8m0fnu, 3, in_columns),
        (torch.uint8, 33, torch.float64, 5, None),
        (torch.int8, 1, torch.int16, 1, in_columns),
    ]
    for data, hidden, scales, num_scales, asked in pairs:
        yield _case(
            f"pair-{_short(data)}-{hidden}-with-{num_scales}-{_short(scales)}", 3, dtype=data,
            hidden=hidden, pair=(scales, num_scales), quantization=asked, num_topk=3,
            routing="masked", expert_alignment=4, is_elastic=True,
        )  # fmt: skip
    for asked in (None, in_columns):
        yield _case(f"pair-of-one{'' if asked is None else '-in-columns'}", 3, num_tokens=(1, 1, 1), num_experts=3, num_topk=1,
                    hidden=1, dtype=torch.uint8, pair=(torch.float32, 1), quantization=asked,
                    is_elastic=True)  # fmt: skip
    yield _case("mxfp8-empty", 2, num_tokens=(0, 0), quantization=MXFP8)
    yield _case("fp8-block128-elastic", 3, quantization=FP8_BLOCK128, num_topk=5,
                num_topk_per_rank=(2, 5, 1), is_elastic=True, hidden=136)  # fmt: skip


def _capacity_cases() -> Iterator[Case]:
    """Yield cases of EXPERT_MAJOR."""

    def drop(*rows: int | None, per_expert: int | None = None) -> tuple[Capacity, ...]:
        return tuple(
            Capacity(num_rows=count, num_rows_per_expert=per_expert, on_overflow="drop")
            for count in rows
        )  # fmt: skip

    def grow(*rows: int) -> tuple[Capacity, ...]:
        return tuple(Capacity(num_rows=count) for count in rows)

    def fit(*rows: int) -> tuple[Capacity, ...]:
        limit = {"num_rows_per_expert": 100, "on_overflow": "raise"}
        return tuple(Capacity(num_rows=count, **limit) for count in rows)  # type: ignore[arg-type]

    shape: dict[str, Any] = {"num_tokens": (9, 4, 12), "num_topk": 3}
    for alignment in (1, 4):
        shape["expert_alignment"] = alignment
        end = f"alignment-{alignment}"
        for per_expert in (0, 1, 5, 1000):
            none = drop(None, None, None, per_expert=per_expert)
            yield _case(f"drop-{per_expert}-per-expert-{end}", 3, **shape, capacities=none)
        for name, rows in (
            ("zero", (0, 0, 0)), ("ragged", (0, 24, 8)), ("plenty", (100, 40, 64)),
            ("exact-multiple", (4, 4, 4)),
        ):  # fmt: skip
            yield _case(f"drop-{name}-rows-{end}", 3, **shape, capacities=drop(*rows))
        both = drop(12, None, 0, per_expert=4)
        yield _case(f"drop-both-{end}", 3, **shape, capacities=both)
        yield _case(
            f"drop-both-masked-routing-{end}", 3, **shape, capacities=both, routing="masked"
        )
        yield _case(f"grow-{end}", 3, **shape, capacities=grow(0, 100, 8))
        some = (Capacity(num_rows=100), None, Capacity(num_rows=0))
        yield _case(f"grow-on-some-{end}", 3, **shape, capacities=some)
        yield _case(f"raise-and-fit-{end}", 3, **shape, capacities=fit(80, 100, 120))
    shape["expert_alignment"] = 8
    for dtype in (torch.bfloat16, torch.float32):
        yield _case(
            f"drop-special-{_short(dtype)}", 3, **shape, capacities=drop(16, 24, 8), dtype=dtype,
            has_special_values=True,
        )  # fmt: skip
    for routing in ("one_expert", "one_rank", "repeated", "nothing", "skewed"):
        yield _case(
            f"drop-{_dashed(routing)}", 3, **shape, capacities=drop(16, 16, 16, per_expert=7),
            routing=routing,
        )  # fmt: skip
    yield _case("drop-quantized", 3, **shape, capacities=drop(24, 0, 16), quantization=MXFP8,
                hidden=200)  # fmt: skip
    yield _case("drop-quantized-columns", 3, **shape, capacities=drop(24, 0, 48), hidden=200,
                quantization=dataclasses.replace(FP8_BLOCK128, is_column_major=True))  # fmt: skip
    yield _case("drop-elastic", 3, num_tokens=(9, 4, 12), num_topk=5, num_topk_per_rank=(1, 5, 2),
                is_elastic=True, capacities=drop(8, 8, 8, per_expert=3))  # fmt: skip
    yield _case("drop-interleaved", 3, **shape, capacities=drop(8, 16, 24, per_expert=6),
                expert_rank=(2, 0, 1, 2, 1, 0, 0, 2))  # fmt: skip
    yield _case("drop-without-experts", 4, num_tokens=(5, 6, 7, 8), num_topk=3,
                expert_rank=(0, 0, 2, 2, 3, 3, 3, 0), capacities=drop(5, 3, 1, 0))  # fmt: skip


def _rank_major_capacity_cases() -> Iterator[Case]:
    shape: dict[str, Any] = {"num_tokens": (9, 4, 12), "num_topk": 3, "layout": Layout.RANK_MAJOR}
    grown = tuple(Capacity(num_rows=count) for count in (0, 60, 7))
    fitting = tuple(Capacity(num_rows=count, on_overflow="raise") for count in (25, 30, 60))
    for name, capacities in (("grow", grown), ("raise-and-fit", fitting)):
        yield _case(f"rank-major-{name}", 3, **shape, capacities=capacities)
        yield _case(
            f"rank-major-{name}-quantized", 3, **shape, capacities=capacities, hidden=200,
            quantization=dataclasses.replace(MXFP8, is_column_major=True),
        )  # fmt: skip
    yield _case("rank-major-grow-elastic", 3, **{**shape, "num_topk": 4}, capacities=grown,
                num_topk_per_rank=(4, 1, 2), is_elastic=True)  # fmt: skip


def _low_latency_cases() -> Iterator[Case]:
    shape: dict[str, Any] = {"layout": Layout.LOW_LATENCY, "num_topk": 3}
    for name, masked in (
        ("one", ((1,), (), ())),
        ("by-itself", ((), (1,), ())),
        ("two-by-two", ((2,), (), (0,))),
        ("all", ((0, 1, 2), (), ())),
        ("alike", ((0,), (0,), (0,))),
    ):
        yield _case(f"low-latency-mask-{name}", 3, **shape, masked_ranks=masked)
        yield _case(f"low-latency-mask-{name}-quantized", 3, **shape, masked_ranks=masked,
                    quantization=FP8_BLOCK128, hidden=136)  # fmt: skip
    yield _case("low-latency-mask-special", 3, **shape, masked_ranks=((), (), (1,)),
                has_special_values=True, routing="masked")  # fmt: skip
    yield _case("low-latency-full", 2, layout=Layout.LOW_LATENCY, num_topk=1, routing="one_expert",
                num_tokens=(6, 6))  # fmt: skip
    # Without the mask the expert would have twice as many rows as places.
    yield _case("low-latency-mask-makes-room", 2, layout=Layout.LOW_LATENCY, num_topk=2,
                routing="one_expert", num_tokens=(1, 1), masked_ranks=((0,), ()))  # fmt: skip
    yield _case("low-latency-no-tokens-allowed", 2, **shape, num_tokens=(0, 0))


def _elastic_cases() -> Iterator[Case]:
    yield _case("elastic", 3, num_topk=3, is_elastic=True)
    yield _case("elastic-ragged-topk", 3, num_topk=6, num_topk_per_rank=(6, 1, 3), is_elastic=True)
    yield _case("elastic-wide-on-an-empty-rank", 3, num_topk=8, num_topk_per_rank=(1, 8, 2),
                is_elastic=True, routing="masked", expert_alignment=4)  # fmt: skip


CASES: tuple[Case, ...] = (
    *(in_layout(case, layout) for layout in Layout for case in _cases_of_a_layout()),
    *(in_layout(case, layout) for layout in Layout for case in _quantized_cases()),
    *(in_layout(case, layout) for layout in Layout for case in _elastic_cases()),
    *_capacity_cases(),
    *_rank_major_capacity_cases(),
    *_low_latency_cases(),
)


def _reduced(name: str, num_nodes: int, num_local_ranks: int, **fields: Any) -> Case:
    return _with_sums(
        f"node-reduction-{num_nodes}x{num_local_ranks}-{name}",
        num_nodes * num_local_ranks,
        num_local_ranks=num_local_ranks,
        node_reduction=True,
        **fields,
    )


def _with_sums(name: str, num_ranks: int, **fields: Any) -> Case:
    case = _case(name, num_ranks, **{"num_topk": 5, "num_experts": 13, **fields})
    if case.layout is Layout.LOW_LATENCY:
        case = dataclasses.replace(in_layout(case, case.layout), name=case.name)
    return case


def _node_reduction_cases() -> Iterator[Case]:
    for num_nodes, num_local_ranks in ((2, 2), (3, 2), (2, 1), (3, 1), (2, 3)):
        for layout in Layout:
            yield _reduced(_dashed(layout.name), num_nodes, num_local_ranks, layout=layout)
    for dtype in (torch.float16, torch.float32, torch.float64):
        yield _reduced(_short(dtype), 2, 2, dtype=dtype, routing="masked")
    for dtype in ADDABLE_DTYPES:
        yield _reduced(f"special-{_short(dtype)}", 2, 2, dtype=dtype, has_special_values=True)
    yield _reduced("as-bytes", 2, 2, dtype=torch.uint8, routing="masked")
    for routing in ("one_rank", "repeated", "nothing", "skewed"):
        yield _reduced(_dashed(routing), 2, 2, routing=routing, hidden=1000)
    yield _reduced("rank-major-one-expert", 2, 2, routing="one_expert", layout=Layout.RANK_MAJOR)
    yield _reduced("one-token", 3, 1, num_tokens=(0, 1, 0))
    yield _reduced("empty-everywhere", 2, 2, num_tokens=(0, 0, 0, 0))
    yield _reduced("node-without-experts", 3, 1, expert_rank=(0, 2) * 6 + (0,))
    yield _reduced("interleaved-experts", 2, 2, expert_rank=(3, 0, 2, 1, 2, 3, 0, 1, 1, 2, 3, 0, 2))
    yield _reduced("ragged-topk", 2, 2, num_topk=6, num_topk_per_rank=(6, 1, 3, 2), is_elastic=True)
    yield _reduced("rank-major-ragged-topk", 3, 1, num_topk=6, num_topk_per_rank=(1, 6, 3),
                   is_elastic=True, layout=Layout.RANK_MAJOR)  # fmt: skip
    yield _reduced("top-64", 2, 2, num_topk=64, num_tokens=(9, 0, 4, 12))
    drop = Capacity(num_rows=16, num_rows_per_expert=6, on_overflow="drop")
    for num_nodes, num_local_ranks in ((2, 2), (3, 1)):
        capacities = (drop,) * (num_nodes * num_local_ranks)
        yield _reduced("drop", num_nodes, num_local_ranks, capacities=capacities)
    yield _reduced("mask", 2, 2, layout=Layout.LOW_LATENCY, masked_ranks=((), (2,), (), (2,)))
    yield _reduced("mask-a-node", 3, 1, layout=Layout.LOW_LATENCY, masked_ranks=((1,), (), ()))


def _added_by_rank(name: str, num_ranks: int, **fields: Any) -> Case:
    return _with_sums(
        f"rank-reduction-{num_ranks}-{name}", num_ranks, rank_reduction=True, **fields
    )


def _rank_reduction_cases() -> Iterator[Case]:
    for num_ranks in (1, 2, 3, 4):
        for layout in Layout:
            yield _added_by_rank(_dashed(layout.name), num_ranks, layout=layout)
    for dtype in ADDABLE_DTYPES:
        yield _added_by_rank(_short(dtype), 3, dtype=dtype, routing="masked")
        yield _added_by_rank(f"special-{_short(dtype)}", 2, dtype=dtype, has_special_values=True)
    yield _added_by_rank("as-bytes", 2, dtype=torch.uint8, routing="masked")
    for routing in ("one_rank", "one_expert", "repeated", "nothing", "skewed"):
        yield _added_by_rank(_dashed(routing), 3, routing=routing, hidden=1000)
    yield _added_by_rank("odd-rows", 2, hidden=1208, expert_alignment=4)
    yield _added_by_rank("one-token", 3, num_tokens=(0, 1, 0))
    yield _added_by_rank("empty-everywhere", 2, num_tokens=(0, 0))
    yield _added_by_rank("rank-without-experts", 3, expert_rank=(0, 2) * 6 + (0,))
    yield _added_by_rank("interleaved-experts", 4,
                         expert_rank=(3, 0, 2, 1, 2, 3, 0, 1, 1, 2, 3, 0, 2))  # fmt: skip
    for layout in (Layout.EXPERT_MAJOR, Layout.LOW_LATENCY):
        yield _added_by_rank(f"ragged-topk-{_dashed(layout.name)}", 3, num_topk=6, layout=layout,
                             num_topk_per_rank=(1, 6, 3), is_elastic=True)  # fmt: skip
    yield _added_by_rank("top-64", 3, num_topk=64, num_tokens=(9, 0, 4))
    drop = Capacity(num_rows=16, num_rows_per_expert=6, on_overflow="drop")
    yield _added_by_rank("drop", 3, capacities=(drop,) * 3)
    yield _added_by_rank("mask", 3, layout=Layout.LOW_LATENCY, masked_ranks=((), (2,), (2,)))
    for quantization in (FP8_BLOCK128, MXFP8):
        yield _added_by_rank(f"quantized-{quantization.format.name.lower()}", 2, hidden=1024,
                             quantization=quantization)  # fmt: skip


NODE_REDUCTION_CASES: tuple[Case, ...] = tuple(_node_reduction_cases())
"""Cases that a backend with `EpConfig.node_reduction` must get right; every case says its nodes."""

RANK_REDUCTION_CASES: tuple[Case, ...] = tuple(_rank_reduction_cases())
"""Cases that a backend with `EpConfig.rank_reduction` must get right."""
