"""Part of a product of cases that `make test` runs: every pair of values, nothing twice, in a fixed choice."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest

from moe_comm.testing.case_list import CASES, NODE_REDUCTION_CASES, RANK_REDUCTION_CASES
from tests.helpers.dispatcher_cases import DISPATCHER_CASES
from tests.helpers.selection import (
    ALONE,
    Attributes,
    attributes_of,
    check_margin,
    idea_of,
    mark_what_no_sample_has,
    sample,
)

BACKENDS = ("reference", "collective", "host", "simt")


def drawn(seed: int) -> Attributes:
    draw = random.Random(seed)
    return {name: draw.randrange(3 + idx) for idx, name in enumerate("abcdef")}


PRODUCTS: dict[str, list[Attributes]] = {
    "cases": [attributes_of({"case": case}) for case in CASES],
    "cases of node reduction": [attributes_of({"case": case}) for case in NODE_REDUCTION_CASES],
    "cases of rank reduction": [attributes_of({"case": case}) for case in RANK_REDUCTION_CASES],
    "cases of dispatchers": [
        attributes_of({"target": target, "case": case})
        for target in ("plain", "megatron", "deep_ep")
        for case in DISPATCHER_CASES
    ],
    "cases on backends": [
        attributes_of({"backend": backend, "mode": mode, "case": case})
        for backend, mode in itertools.product(BACKENDS, ("threads", "processes"))
        for case in CASES
    ],
    "a grid": [dict(zip("abcd", v, strict=True)) for v in itertools.product(range(3), repeat=4)],
    "drawn": [drawn(seed) for seed in range(300)],
}


def values_of(cases: list[Attributes]) -> set[Any]:
    return {(name, case[name]) for case in cases for name in case}


def together(values: set[Any]) -> set[Any]:
    return {value for value in values if not value[0].startswith(ALONE)}


def pairs_of(cases: list[Attributes]) -> set[object]:
    return {
        (first, case[first], second, case[second])
        for case in cases
        for first, second in itertools.permutations(case, 2)
        if not first.startswith(ALONE) and not second.startswith(ALONE)
    }


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_sample_has_every_value_and_every_pair_of_the_product(name: str) -> None:
    product = PRODUCTS[name]
    chosen = [product[idx] for idx in sample(product)]
    assert values_of(chosen) == values_of(product)
    assert len(pairs_of(product)) > len(values_of(product))
    assert pairs_of(chosen) == pairs_of(product)
    once = [product[idx] for idx in sample(product, 1)]
    assert together(values_of(once)) == together(values_of(product))
    assert len(once) < len(chosen)


def test_a_sample_is_small() -> None:
    assert len(sample(PRODUCTS["cases on backends"])) < len(PRODUCTS["cases on backends"]) / 10
    assert 9 <= len(sample(PRODUCTS["a grid"])) <= 15
    assert len(sample(PRODUCTS["a grid"], 1)) == 3


def test_equal_cases_are_taken_once() -> None:
    cases: list[Attributes] = [{"a": 1, "b": 2}, {"a": 1, "b": 2}, {"a": 1, "b": 3}]
    assert sample(cases) == [0, 2]
    assert sample([]) == []


@pytest.mark.parametrize("strength", [1, 2])
def test_a_list_of_one_parameter_is_kept(strength: int) -> None:
    values = (3, 1, 3, 2, 1)
    assert sample([{"a": value} for value in values], strength) == [0, 1, 3]


def test_every_idea_behind_a_case_is_in_the_sample() -> None:
    chosen = [CASES[idx] for idx in sample(PRODUCTS["cases"])]
    assert len({idea_of(case) for case in CASES}) > 90
    for what in (idea_of, lambda case: case.quantization, lambda case: case.pair):
        assert {what(case) for case in chosen} == {what(case) for case in CASES}


class _Item(SimpleNamespace):
    """Attributes of `pytest.Item` that the marking looks at."""

    def get_closest_marker(self, name: str) -> Any:
        return self.marks.get(name)

    def add_marker(self, name: str) -> None:
        self.marks[name] = pytest.mark.__getattr__(name).mark


def items(function: str, *marks: Any, **values: Any) -> list[Any]:
    return [
        _Item(
            nodeid=f"{function}[{parameters}]",
            callspec=SimpleNamespace(params=dict(zip(values, parameters, strict=True))),
            marks={mark.mark.name: mark.mark for mark in marks},
        )
        for parameters in itertools.product(*values.values())
    ]


def test_what_is_outside_a_sample_is_marked() -> None:
    whole = items("f", a=range(3), b=range(4), c=range(2))
    pairs = items("g", pytest.mark.sampled(2), a=range(3), b=range(4), c=range(2))
    single = items("h", pytest.mark.sampled(1), a=range(3), b=range(4), c=range(2))
    both = items("i", pytest.mark.sampled(1, 2), a=range(3), b=range(4), c=range(2))
    slow = items("h", pytest.mark.sampled(1), pytest.mark.slow, a=range(9))
    mark_what_no_sample_has([*whole, *pairs, *single, *both, *slow])
    kept = [sum("full" not in item.marks for item in tests) for tests in (whole, pairs, single)]
    assert kept == [24, 12, 4]
    assert [sum(name in item.marks for item in both) for name in ("full", "slow")] == [8, 12]
    assert not any("full" in item.marks for item in slow)


def test_a_sample_may_be_of_some_attributes_only() -> None:
    few = items("f", pytest.mark.sampled(1, of=("a", "c")), a=range(3), b=range(4), c=range(2))
    both = items("g", pytest.mark.sampled(1, 2, of=("a",)), a=range(3), b=range(4), c=range(2))
    mark_what_no_sample_has([*few, *both])
    kept = [item for item in few if "full" not in item.marks]
    assert len(kept) == 3
    assert {item.callspec.params["c"] for item in kept} == {0, 1}
    assert [sum(name in item.marks for item in both) for name in ("full", "slow")] == [9, 12]
    with pytest.raises(pytest.UsageError, match=r"no case has some attribute of .*'d'"):
        mark_what_no_sample_has(items("f", pytest.mark.sampled(1, of=("a", "d")), a=range(3)))


def test_the_cheaper_case_is_sampled() -> None:
    attributes = [{"a": value % 2} for value in range(6)]
    assert sample(attributes, 1, [3.0, 1.0, 2.0, 1.0, 1.0, 5.0]) == [1, 4]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("second", [0, 1])
@pytest.mark.parametrize("first", [0, 1])
def test_the_marking_is_in_force(request: pytest.FixtureRequest, first: int, second: int) -> None:
    """`make test` runs two of these four tests."""
    name = request.node.originalname
    here = [item for item in request.session.items if getattr(item, "originalname", "") == name]
    assert sum(item.get_closest_marker("full") is None for item in here) <= 2


@pytest.mark.parametrize("arguments", [(), (0,), (3,), (2, 1)])
def test_strengths_are_one_and_two(arguments: tuple[int, ...]) -> None:
    with pytest.raises(pytest.UsageError, match="sampled takes 1, 2, or 1 and 2, got"):
        mark_what_no_sample_has(items("f", pytest.mark.sampled(*arguments), a=range(2)))


def test_a_limit_of_the_clock_states_its_margin() -> None:
    check_margin("f", pytest.mark.clock(usual_s=0.2, limit_s=1.0).mark)
    for mark in (
        pytest.mark.clock,
        pytest.mark.clock(0.2, 1.0),
        pytest.mark.clock(limit_s=1.0),
        pytest.mark.clock(usual_s=0.2),
        pytest.mark.clock(usual_s=0.2, limit_s=1.0, of="a rank"),
    ):
        with pytest.raises(pytest.UsageError, match="f: clock takes usual_s and limit_s, got"):
            check_margin("f", mark.mark)
    for usual_s in (0.0, -1.0, 0.21):
        with pytest.raises(pytest.UsageError, match=f"what takes {usual_s} s needs .* got 1.0"):
            check_margin("f", pytest.mark.clock(usual_s=usual_s, limit_s=1.0).mark)
