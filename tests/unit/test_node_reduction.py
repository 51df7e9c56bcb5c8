"""Sums with one partial sum a node, worked by hand: where the order or a rounding gives other bits."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moe_comm import EpConfig
from moe_comm.ep import spec
from moe_comm.ep.backends import messages
from moe_comm.peers.agree import raise_different
from moe_comm.tensors import arithmetic
from moe_comm.testing.case_list import NODE_REDUCTION_CASES
from moe_comm.testing.cases import Case
from moe_comm.testing.conformance import check_case
from moe_comm.testing.target import Target

BIG = 2.0**24  # BIG + 1 is BIG in float32


def sum_of(
    terms: list[float],
    nodes: list[int],
    own_node: int | None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    weights: list[float] | None = None,
) -> float:
    """The sum of one token whose row k holds `terms[k]` and lies on `nodes[k]`.

    With `rank_reduction` nodes are ranks, and none is the own one.
    """
    rows = torch.tensor(terms, dtype=dtype).unsqueeze(1).expand(-1, 8).contiguous()
    wide = arithmetic.accumulator_dtype(dtype)
    sums = arithmetic.sum_rows_by_node(
        rows,
        torch.arange(len(terms)).unsqueeze(0),
        torch.tensor([nodes]),
        own_node,
        None if weights is None else torch.tensor([weights], dtype=wide),
    )
    assert sums.dtype is dtype
    assert (sums == sums[0, 0]).all()
    wide_terms = [arithmetic.widen(row) for row in rows]
    if weights is not None:
        wide_terms = [row * weight for row, weight in zip(wide_terms, weights, strict=True)]
    defined = spec.sum_in_order(wide_terms, nodes, own_node, dtype)
    assert torch.equal(arithmetic.round_to(torch.as_tensor(defined), dtype), sums[0])
    return float(sums[0, 0])


@pytest.mark.parametrize(
    ("own_node", "expected"),
    [
        # bfloat16 has 256, 258, 260: 257 rounds to 256, 259 to 260 (ties to even).
        pytest.param(0, 260, id="own-sum-is-not-rounded"),  # 257 + 2 = 259
        pytest.param(1, 258, id="other-sum-is-rounded"),  # 256 + 2
        pytest.param(2, 258, id="both-are-rounded"),
        pytest.param(None, 258, id="so-they-are-by-rank"),
    ],
)
def test_what_crosses_is_rounded_once(own_node: int, expected: float) -> None:
    assert sum_of([256, 1, 1, 1], [0, 0, 1, 1], own_node) == expected
    # It matters which rows share a node, not where they stand among each other.
    assert sum_of([1, 256, 1, 1], [1, 0, 0, 1], own_node) == expected


def test_rows_one_by_one_have_other_bits() -> None:
    rows = torch.tensor([256.0, 1, 1, 1], dtype=torch.bfloat16).unsqueeze(1)
    assert float(arithmetic.sum_rows(rows, torch.arange(4).unsqueeze(0))) == 260


def test_a_node_adds_in_order_of_choices() -> None:
    assert sum_of([BIG, -BIG, 1], [1, 1, 1], 0) == 1
    assert sum_of([BIG, 1, -BIG], [1, 1, 1], 0) == 0
    assert sum_of([BIG, 1, -BIG], [0, 0, 0], 0) == 0


def test_nodes_are_added_in_ascending_order() -> None:
    """Wherever the token is: its own node's sum takes its turn among the others."""
    for own_node in (0, 1, 2):
        assert sum_of([1, -BIG, BIG], [2, 1, 0], own_node) == 1  # BIG, -BIG, 1
        assert sum_of([-BIG, 1, BIG], [2, 1, 0], own_node) == 0  # BIG, 1, -BIG
        assert sum_of([-BIG, 1, BIG], [1, 2, 0], own_node) == 1


def test_the_own_sum_is_one_term() -> None:
    # Node 0 has 1; the own node 1 has BIG and -BIG: row by row after node 0's, the 1 would be lost.
    assert sum_of([1, BIG, -BIG], [0, 1, 1], 1) == 1


def test_weights_are_applied_before_rounding() -> None:
    # 256 * 1 + 0.5 * 2 = 257, rounded to 256 where it crosses; times 1 at home.
    assert sum_of([256, 2, 2], [1, 1, 0], 0, weights=[1, 0.5, 1]) == 258
    assert sum_of([256, 2, 2], [1, 1, 0], 1, weights=[1, 0.5, 1]) == 260  # 257 + 2 = 259


def test_wide_rows_are_rounded_to_their_own_dtype() -> None:
    assert sum_of([BIG, 1, 1], [1, 1, 0], 0, dtype=torch.float32) == BIG  # BIG + 1 is BIG, + 1 too
    assert sum_of([BIG, 1, 1], [1, 1, 0], 0, dtype=torch.float64) == BIG + 2
    # float16 overflows where it crosses and not at home.
    assert sum_of([65504, 65504, -65504], [1, 1, 0], 0, dtype=torch.float16) == float("inf")
    assert sum_of([65504, 65504, -65504], [1, 1, 0], 1, dtype=torch.float16) == 65504


def test_a_token_without_rows_gets_zero() -> None:
    rows = torch.ones(1, 4, dtype=torch.bfloat16)
    nothing = torch.full((2, 3), -1)
    sums = arithmetic.sum_rows_by_node(rows, nothing, nothing, 0)
    assert sums.view(torch.int16).tolist() == [[0] * 4] * 2


def test_ranks_that_differ_are_told() -> None:
    plain = EpConfig(num_experts=4, num_topk=2, hidden=64, num_max_tokens_per_rank=8)
    reduced = dataclasses.replace(plain, node_reduction=True)
    with pytest.raises(ValueError, match="node_reduction is False on rank 0 and True on rank 1"):
        raise_different(
            "ranks differ",
            [
                messages.describe_config(config, "host", config.resolve_expert_rank(2))
                for config in (plain, reduced)
            ],
        )
    with pytest.raises(TypeError, match="node_reduction must be a bool, got 1"):
        dataclasses.replace(plain, node_reduction=1)
    with pytest.raises(TypeError, match="rank_reduction must be a bool, got 'yes'"):
        dataclasses.replace(plain, rank_reduction="yes")
    with pytest.raises(ValueError, match="must not both be True, got True and True"):
        dataclasses.replace(reduced, rank_reduction=True)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if idx % 12 == 0 else pytest.mark.full)
        for idx, case in enumerate(NODE_REDUCTION_CASES)
    ],
)
def test_reference(case: Case) -> None:
    check_case(Target(name="reference", can_overlap=False), case, mode="threads")
