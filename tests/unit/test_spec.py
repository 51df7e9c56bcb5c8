"""The definition against results worked out by hand: nothing here is computed by the package.

Three experts, 0 and 1 on rank 0 and 2 on rank 1. Rank 0 has the tokens a, b and c, rank 1 has d; their rows
hold 1, 2, 3 and 4.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from moe_comm.ep.config import Capacity, Layout
from moe_comm.ep.spec import Dispatch, quantize_rows
from moe_comm.errors import Overflow
from moe_comm.tensors.quantization import (
    FP8_BLOCK128,
    MXFP8,
    Quantization,
    QuantizationFormat,
    ScaleFormat,
)

NAN = math.nan
CHOICES = [torch.tensor([[2, 0], [0, -1], [1, 2]]), torch.tensor([[0, 2]])]
X = [torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[4.0]])]
WEIGHTS = [torch.tensor([[0.5, 0.25], [0.125, NAN], [2.0, 4.0]]), torch.tensor([[8.0, 16.0]])]
ON_RANK_1 = 1 << 48


def dispatch(layout: Layout = Layout.EXPERT_MAJOR, **changes: Any) -> Dispatch:
    is_low_latency = layout is Layout.LOW_LATENCY
    fields: dict[str, Any] = {
        "topk_idx": CHOICES,
        "expert_rank": [0, 0, 1],
        "layout": layout,
        "expert_alignment": 1 if is_low_latency else 2,
        "num_places_per_expert": 4 if is_low_latency else 0,
        **changes,
    }
    return Dispatch(**fields)


def rows(values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)[:, None]


def got(dispatched: Dispatch, rank_idx: int) -> dict[str, Any]:
    """Rows that a rank receives, as lists; rows of one element."""
    received = dispatched.received(rank_idx, X, WEIGHTS)
    fields = {each.name: getattr(received, each.name) for each in dataclasses.fields(received)}
    del fields["x_sf"], fields["is_defined"]
    fields["x"] = received.x[:, 0]
    return {
        name: value.tolist() if isinstance(value, torch.Tensor) else value
        for name, value in fields.items()
    }


def test_rows_by_expert() -> None:
    made = dispatch()
    assert got(made, 0) == {
        "x": [1, 2, 4, 0, 3, 0],
        "topk_idx": None,
        "topk_weights": [0.25, 0.125, 8, 0, 2, 0],
        "num_tokens_per_expert": [3, 1],
        "num_dropped_per_expert": [0, 0],
        "num_required_rows": 6,
        "expert_offsets": [0, 4, 6],
    }
    assert got(made, 1) == {
        "x": [1, 3, 4, 0],
        "topk_idx": None,
        "topk_weights": [0.5, 4, 16, 0],
        "num_tokens_per_expert": [3],
        "num_dropped_per_expert": [0],
        "num_required_rows": 4,
        "expert_offsets": [0, 4],
    }
    # Choices of experts 0, 1, 2; tokens for ranks 0, 1; no fixed number of rows; two choices a token.
    assert made.counts.tolist() == [[2, 1, 2, 3, 2, -1, 2], [1, 0, 1, 1, 1, -1, 2]]
    assert made.slots(0).tolist() == [[ON_RANK_1, 0], [1, -1], [4, ON_RANK_1 + 1]]
    assert made.slots(1).tolist() == [[2, ON_RANK_1 + 2]]
    assert made.received(0, X).topk_weights is None
    assert got(dispatch(expert_alignment=1), 0)["x"] == [1, 2, 4, 3]


def test_rows_by_rank() -> None:
    made = dispatch(Layout.RANK_MAJOR)
    assert got(made, 0) == {
        "x": [1, 2, 3, 4],
        "topk_idx": [[-1, 0], [0, -1], [1, -1], [0, -1]],
        "topk_weights": [[0, 0.25], [0.125, 0], [2, 0], [8, 0]],
        "num_tokens_per_expert": [3, 1],
        "num_dropped_per_expert": [0, 0],
        "num_required_rows": 4,
        "expert_offsets": [0, 4, 6],
    }
    assert got(made, 1) == {
        "x": [1, 3, 4],
        "topk_idx": [[0, -1], [-1, 0], [-1, 0]],
        "topk_weights": [[0.5, 0], [0, 4], [0, 16]],
        "num_tokens_per_expert": [3],
        "num_dropped_per_expert": [0],
        "num_required_rows": 3,
        "expert_offsets": [0, 4],
    }
    assert made.counts.tolist() == [[2, 1, 2, 3, 2, -1, 2], [1, 0, 1, 1, 1, -1, 2]]
    assert made.slots(0).tolist() == [[0, ON_RANK_1], [1, -1], [2, ON_RANK_1 + 1]]
    assert made.slots(1).tolist() == [[3, ON_RANK_1 + 2]]


def test_rows_in_fixed_places() -> None:
    made = dispatch(Layout.LOW_LATENCY)
    zero, one = got(made, 0), got(made, 1)
    filled = [[True, True, True, False, True, False, False, False], [True, True, True, False]]
    is_defined = [made.received(rank, X).is_defined for rank in (0, 1)]
    assert [None if each is None else each.tolist() for each in is_defined] == filled
    assert dispatch().received(0, X).is_defined is None
    assert zero["x"] == [1, 2, 4, 0, 3, 0, 0, 0]
    assert zero["topk_weights"] == [0.25, 0.125, 8, 0, 2, 0, 0, 0]
    assert (zero["num_tokens_per_expert"], zero["expert_offsets"]) == ([3, 1], [0, 4, 8])
    assert (one["x"], one["expert_offsets"], one["num_required_rows"]) == ([1, 3, 4, 0], [0, 4], 4)
    assert made.slots(0).tolist() == [[ON_RANK_1, 0], [1, -1], [4, ON_RANK_1 + 1]]


def test_choices_may_differ_in_number() -> None:
    made = dispatch(Layout.RANK_MAJOR, topk_idx=[torch.tensor([[2], [0], [1]]), CHOICES[1]])
    received = made.received(1, X, [torch.tensor([[0.5], [0.125], [2.0]]), WEIGHTS[1]])
    assert received.topk_idx.tolist() == [[0, -1], [-1, 0]]
    assert received.topk_weights.tolist() == [[0.5, 0], [0, 16]]
    assert made.counts[:, -1].tolist() == [1, 2]
    assert made.slots(0).tolist() == [[ON_RANK_1], [0], [1]]


def test_an_expert_chosen_twice_gets_two_rows() -> None:
    twice = torch.tensor([[1, 1], [-1, -1], [-1, -1]])
    by_expert = dispatch(topk_idx=[twice, CHOICES[1]])
    assert got(by_expert, 0)["x"] == [4, 0, 1, 1]
    assert by_expert.slots(0).tolist() == [[2, 3], [-1, -1], [-1, -1]]
    by_rank = dispatch(Layout.RANK_MAJOR, topk_idx=[twice, CHOICES[1]])
    assert got(by_rank, 0)["topk_idx"] == [[1, 1], [0, -1]]


def limited(num_rows: tuple[int | None, int | None], **limits: Any) -> Dispatch:
    return dispatch(capacities=[Capacity(num_rows=count, **limits) for count in num_rows])


def test_an_expert_keeps_its_first_rows() -> None:
    made = limited((None, None), num_rows_per_expert=2, on_overflow="drop")
    zero, one = got(made, 0), got(made, 1)
    assert (zero["x"], zero["expert_offsets"]) == ([1, 2, 3, 0], [0, 2, 4])
    assert (zero["num_tokens_per_expert"], zero["num_dropped_per_expert"]) == ([2, 1], [1, 0])
    assert zero["num_required_rows"] == 6
    assert (one["x"], one["num_dropped_per_expert"], one["num_required_rows"]) == ([1, 3], [1], 4)
    # d sends nothing any more.
    assert made.counts.tolist() == [[2, 1, 2, 3, 2, -1, 2], [0, 0, 0, 0, 0, -1, 2]]
    assert made.slots(1).tolist() == [[-1, -1]]
    outs = [rows([10, 20, 30, NAN]), rows([100, 200])]
    assert made.sums(0, outs).tolist() == [[110], [20], [230]]
    assert made.sums(1, outs).tolist() == [[0]]
    assert made.pulled(1, [torch.ones(4), torch.ones(2)]).tolist() == [[0, 0]]


def test_a_rank_keeps_what_has_its_padded_place_within() -> None:
    made = limited((4, 2), on_overflow="drop")
    zero, one = got(made, 0), got(made, 1)
    # Four rows of expert 0, one of them padding: none is left for expert 1.
    assert (zero["x"], zero["expert_offsets"]) == ([1, 2, 4, 0], [0, 4, 4])
    assert (zero["num_tokens_per_expert"], zero["num_dropped_per_expert"]) == ([3, 0], [0, 1])
    assert (one["x"], one["num_dropped_per_expert"]) == ([1, 3], [1])
    assert made.counts[:, -2].tolist() == [4, 2]
    assert got(limited((8, 2), on_overflow="drop"), 0)["x"] == [1, 2, 4, 0, 3, 0, 0, 0]
    assert got(limited((8, 2), on_overflow="drop"), 0)["expert_offsets"] == [0, 4, 6]
    # The limit of an expert comes first, and what it drops takes no room.
    both = limited((4, 0), num_rows_per_expert=1, on_overflow="drop")
    assert got(both, 0)["x"] == [1, 0, 3, 0]
    assert (got(both, 1)["x"], got(both, 1)["num_dropped_per_expert"]) == ([], [3])


def test_a_window_grows_where_it_must() -> None:
    made = limited((2, 8), on_overflow="grow")
    assert got(made, 0)["x"] == [1, 2, 4, 0, 3, 0]
    assert got(made, 1)["x"] == [1, 3, 4, 0, 0, 0, 0, 0]
    assert made.counts[:, -2].tolist() == [6, 8]
    by_rank = dispatch(Layout.RANK_MAJOR, capacities=[Capacity(num_rows=6), None])
    assert got(by_rank, 0)["topk_idx"][4:] == [[-1, -1], [-1, -1]]
    assert (got(by_rank, 0)["num_required_rows"], len(got(by_rank, 1)["x"])) == (4, 3)


def test_what_is_beyond_a_limit_that_raises() -> None:
    few = limited((None, None), num_rows_per_expert=2, on_overflow="raise")
    assert few.overflows == [Overflow(0, 0, 3, 2), Overflow(1, 2, 3, 2)]
    assert limited((4, 2), on_overflow="raise").overflows == [
        Overflow(0, None, 6, 4),
        Overflow(1, None, 4, 2),
    ]
    assert limited((6, 4), num_rows_per_expert=3, on_overflow="raise").overflows == []
    assert limited((0, 0), on_overflow="grow").overflows == []
    by_rank = Capacity(num_rows=3, on_overflow="raise")
    assert dispatch(Layout.RANK_MAJOR, capacities=[by_rank, by_rank]).overflows == [
        Overflow(0, None, 4, 3)
    ]
    two_places = dispatch(Layout.LOW_LATENCY, num_places_per_expert=2)
    assert two_places.overflows == [Overflow(0, 0, 3, 2), Overflow(1, 2, 3, 2)]
    assert dispatch(Layout.LOW_LATENCY, num_places_per_expert=3).overflows == []


def test_nothing_goes_to_a_masked_rank_or_comes_from_it() -> None:
    masked = frozenset({1})
    made = dispatch(Layout.LOW_LATENCY, num_places_per_expert=2, masked_ranks=masked)
    assert made.overflows == []  # expert 0 has two rows left
    zero, one = got(made, 0), got(made, 1)
    assert (zero["x"], zero["num_dropped_per_expert"]) == ([1, 2, 3, 0], [1, 0])
    assert (one["num_tokens_per_expert"], one["num_dropped_per_expert"]) == ([0], [3])
    assert made.counts.tolist() == [[2, 1, 0, 3, 0, -1, 2], [0, 0, 0, 0, 0, -1, 2]]
    assert made.slots(0).tolist() == [[-1, 0], [1, -1], [2, -1]]


def test_a_cached_dispatch_goes_to_the_same_places() -> None:
    again = limited((None, 6), num_rows_per_expert=2, on_overflow="drop").again
    tens = [10 * each for each in X]
    assert again.received(0, tens).x[:, 0].tolist() == [10, 20, 30, 0]
    assert again.received(1, tens).x[:, 0].tolist() == [10, 30, 0, 0, 0, 0]
    # It leaves out what the first has dropped: one of the three choices of expert 2.
    one = got(again, 1)
    assert (one["num_dropped_per_expert"], one["num_required_rows"]) == (
        [1],
        4,
    )  # padded to an even number
    assert again.asked_rows(1).tolist() == [4, 3]
    assert got(dispatch(Layout.RANK_MAJOR).again, 0)["topk_idx"] is None
    assert got(dispatch(Layout.RANK_MAJOR).again, 1)["topk_weights"] == [[0.5, 0], [0, 4], [0, 16]]


def test_rows_keep_every_byte() -> None:
    bits = torch.tensor([[0x7FA1], [-0x7FFF], [0x0001]], dtype=torch.int16)
    x = [bits.view(torch.bfloat16), torch.tensor([[-0.0]], dtype=torch.bfloat16)]
    received = dispatch(expert_alignment=1).received(0, x).x
    assert received.view(torch.int16).flatten().tolist() == [0x7FA1, -0x7FFF, -0x8000, 0x0001]


def test_sums_and_weights_of_choices() -> None:
    made = dispatch()
    outs = [rows([10, 20, 30, NAN, 40, NAN]), rows([100, 200, 300, NAN])]
    assert made.sums(0, outs).tolist() == [[110], [20], [240]]
    assert made.sums(1, outs).tolist() == [[330]]
    assert made.sums(0, outs, WEIGHTS[0]).tolist() == [[52.5], [2.5], [880]]
    assert made.sums(1, outs, WEIGHTS[1]).tolist() == [[5040]]
    row_weights = [torch.tensor([1.0, 2, 3, NAN, 4, NAN]), torch.tensor([5.0, 6, 7, NAN])]
    assert made.pulled(0, row_weights).tolist() == [[5, 1], [2, 0], [4, 6]]
    assert made.pulled(1, row_weights).tolist() == [[3, 7]]


def test_sums_and_weights_of_ranks() -> None:
    made = dispatch(Layout.RANK_MAJOR)
    outs = [rows([10, 20, 30, 40]), rows([100, 200, 300])]
    assert made.sums(0, outs).tolist() == [[110], [20], [230]]
    assert made.sums(1, outs).tolist() == [[340]]
    row_weights = [
        torch.tensor([[NAN, 1.0], [2, NAN], [3, NAN], [4, NAN]]),
        torch.tensor([[5.0, NAN], [NAN, 6], [NAN, 7]]),
    ]
    assert made.pulled(0, row_weights).tolist() == [[5, 1], [2, 0], [3, 6]]
    assert made.pulled(1, row_weights).tolist() == [[4, 7]]


def sum_of(
    values: list[float],
    choices: list[int],
    *,
    layout: Layout = Layout.EXPERT_MAJOR,
    dtype: torch.dtype = torch.float32,
    weights: list[float] | None = None,
    rank_idx: int = 0,
    num_local_ranks: int | None = None,
) -> float:
    """Sum of one token, whose expert e is on rank e and gives `values[e]`."""
    num_ranks = len(values)
    topk_idx = [torch.empty(0, len(choices), dtype=torch.int64)] * num_ranks
    topk_idx[rank_idx] = torch.tensor([choices])
    made = Dispatch(topk_idx, list(range(num_ranks)), layout)
    outs = [rows([value], dtype) for value in values]
    factors = None if weights is None else torch.tensor([weights])
    sums = made.sums(rank_idx, outs, factors, num_local_ranks=num_local_ranks)
    assert sums.dtype is dtype
    return float(sums[0, 0])


def test_the_order_of_a_sum() -> None:
    large = 2.0**27  # to which adding one changes nothing in float32
    assert sum_of([large, 1, -large], [0, 1, 2]) == 0
    assert sum_of([large, 1, -large], [0, 2, 1]) == 1
    assert sum_of([large, 1, -large], [2, 0, 1]) == 1
    assert sum_of([large, 1, -large], [2, 0, 1], layout=Layout.RANK_MAJOR) == 0
    assert sum_of([large, 1, -large], [0, 1, 2], dtype=torch.float64) == 1
    # A product is rounded before it is added: (1 + 2**-12) ** 2 is 1 + 2**-11 and 2**-24 more.
    assert sum_of([1 + 2**-12, -(1 + 2**-11)], [0, 1], weights=[1 + 2**-12, 1]) == 0
    # 257 lies halfway between 256 and 258, and 259 between 258 and 260.
    assert sum_of([256, 1], [0, 1], dtype=torch.bfloat16) == 256
    assert sum_of([256, 1, 1, 1], [0, 1, 2, 3], dtype=torch.bfloat16) == 260
    assert math.copysign(1, sum_of([-0.0, 1], [0, -1])) == 1


def test_sums_of_nodes() -> None:
    def of_nodes(rank_idx: int, num_local_ranks: int) -> float:
        return sum_of(
            [256, 1, 1, 1], [3, 1, 0, 2], dtype=torch.bfloat16, rank_idx=rank_idx,
            num_local_ranks=num_local_ranks,
        )  # fmt: skip

    assert of_nodes(0, 2) == 260  # 257 + bfloat16(2) = 259
    assert of_nodes(3, 2) == 258  # bfloat16(257) + 2
    assert of_nodes(1, 4) == 260
    assert of_nodes(2, 1) == 260  # rows of one rank each, none of which is rounded
    large = 2.0**27
    # Nodes are added in ascending order, and the rows of one in the order of the choices.
    assert sum_of([large, -large, 1], [2, 0, 1], num_local_ranks=1) == 1
    assert sum_of([large, 1, -large, 5], [3, 0, 2, 1], num_local_ranks=3) == 6
    assert sum_of([large, 1, -large, 5], [3, 0, 1, 2], num_local_ranks=3) == 5


def codes(data: torch.Tensor) -> list[list[int]]:
    return data.view(torch.uint8).tolist()  # type: ignore[no-any-return]


def with_scales(scale_format: ScaleFormat) -> Quantization:
    return Quantization(format=QuantizationFormat.FP8_BLOCK128, scale_format=scale_format)


def test_quantized_rows() -> None:
    x = torch.tensor([[448.0, -224, 1, 0, -0.0], [3, 0, 0, 0, 0.0]])
    data, factors = quantize_rows(x, FP8_BLOCK128)
    assert codes(data) == [[0x7E, 0xF6, 0x38, 0, 0x80], [0x7E, 0, 0, 0, 0]]
    assert factors.dtype is torch.float32
    assert factors[0].tolist() == [1.0]
    assert factors.view(torch.int32)[1].tolist() == [0x3BDB6DB7]  # 3 / 448, rounded
    data, factors = quantize_rows(x, MXFP8)  # 3 is 384 * 2**-7: with 2**-8 it would be beyond 448
    assert codes(data) == [[0x7E, 0xF6, 0x38, 0, 0x80], [0x7C, 0, 0, 0, 0]]
    assert factors.dtype is torch.float8_e8m0fnu
    assert codes(factors) == [[127], [120]]
    assert quantize_rows(x, with_scales(ScaleFormat.FLOAT32_POWER_OF_2))[1].tolist() == [
        [1.0],
        [2.0**-7],
    ]


def test_quantized_halves_go_to_even_codes() -> None:
    # Behind 448 the scale factor is one; steps are 2 from 16 on, and 2**-9 below 2**-6.
    x = torch.tensor([[448, 17, 19, -17, 2**-10, 1.5 * 2**-9, 447, 2**-6]])
    assert codes(quantize_rows(x, MXFP8)[0]) == [[0x7E, 0x58, 0x5A, 0xD8, 0, 2, 0x7E, 8]]


def test_quantized_blocks() -> None:
    x = torch.zeros(2, 129)
    x[0, 0], x[0, 128] = 448, 7  # 7 is 448 * 2**-6
    x[1, 1] = math.inf
    data, factors = quantize_rows(x, with_scales(ScaleFormat.UE8M0))
    assert factors.dtype is torch.int32
    # An empty block has the least amax of the format, 1e-4, hence 2**-22.
    assert factors.tolist() == [[127 | 121 << 8], [255 | 105 << 8]]
    assert codes(data[:, 128:]) == [[0x7E], [0]]
    assert codes(data[1:, :128]) == [[0x7F] * 128]
    assert quantize_rows(x, FP8_BLOCK128)[1].view(torch.int32)[1, 0] == 0x7FC00000
    assert codes(quantize_rows(x, MXFP8)[1]) == [[127, 0, 0, 0, 121], [255, 0, 0, 0, 0]]


def test_scale_factors_on_arrival() -> None:
    sf = [torch.tensor([[1.0, 10], [2, 20], [3, 30]]), torch.tensor([[4.0, 40]])]
    arrived = [[1, 10], [3, 30], [4, 40], [0, 0]]
    for is_column_major, stride in ((False, (2, 1)), (True, (1, 4))):
        x_sf = dispatch().received(1, X, x_sf=sf, is_column_major=is_column_major).x_sf
        assert (x_sf.tolist(), x_sf.stride()) == (arrived, stride)
    # Columns begin at whole 16 bytes: of five float32, three are added.
    five = dispatch(expert_alignment=5).received(1, X, x_sf=sf, is_column_major=True).x_sf
    assert five.stride() == (1, 8)
    for is_column_major, strides in ((False, (8, 2, 1)), (True, (8, 1, 4))):
        x_sf = (
            dispatch(Layout.LOW_LATENCY)
            .received(0, X, x_sf=sf, is_column_major=is_column_major)
            .x_sf
        )
        assert x_sf.stride() == strides
        assert x_sf[0, :3].tolist() == [[1, 10], [2, 20], [4, 40]]
        assert x_sf[1, :1].tolist() == [[3, 30]]


@pytest.mark.parametrize("layout", list(Layout))
def test_no_tokens_at_all(layout: Layout) -> None:
    made = dispatch(layout, topk_idx=[torch.empty(0, 2, dtype=torch.int64)] * 2)
    received = made.received(0, [torch.empty(0, 1)] * 2, [torch.empty(0, 2)] * 2)
    assert received.is_defined is None or not received.is_defined.any()
    assert received.num_tokens_per_expert.tolist() == [0, 0]
    outs = [torch.empty(len(window.rows), 1) for window in made.windows]
    assert made.sums(0, outs).shape == (0, 1)
