"""When a test runs: of a product of cases `make test` runs a sample, `make test-full` the rest.

A fault of two things together (a layout and a dtype, a rail and a capacity) shows in some case of a
sample of pairs. One that takes three at once may not: the whole product is for it.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import heapq
import itertools
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import pytest

from moe_comm.ep.config import Capacity
from moe_comm.testing.cases import Case

Attributes = Mapping[str, Hashable]
ALONE = "alone: "
"""Begins the names of attributes whose values are wanted once, not with every value of others."""
LATER = ("full", "slow", "clock", "gpu", "multinode", "benchmark")
"""Marks of tests that are in no sample: `make test` runs none of them."""
LEAST_MARGIN = 5
_QUANTIZATION_IN_NAME = re.compile(r"^(fp8-block128|mxfp8)-.*(rows|columns)-(?=\w+-\d+$)")
_FEW_RANKS = 3
"""Classes of numbers of ranks: each up to this one, and more."""
_CHEAP_ELEMENTS = 50_000
"""Elements of rows that a case sends, as many as take about as long as the calls themselves."""


def sample(
    attributes: Sequence[Attributes], strength: int = 2, costs: Sequence[float] | None = None
) -> list[int]:
    """Indices, ascending, of a small part of the cases that has what the whole has.

    With strength 1 that is every value of every attribute but those that begin with `ALONE`. With
    strength 2 it is every value of those too, and every two values of two other attributes that some
    case has together. The same cases always give the same sample.

    Args:
        attributes: Attributes of every case: values by name.
        strength: 1 or 2.
        costs: Cost of every case, > 0: of two that add as much, the cheaper one is taken. None: all
            equal.
    """
    wanted = [_parts(case, strength) for case in attributes]
    weights = [1.0] * len(wanted) if costs is None else costs
    # Cases that add most for their cost come first. What one would add only falls: an outdated number is a bound.
    queue = [(-len(parts) / weights[idx], idx) for idx, parts in enumerate(wanted)]
    heapq.heapify(queue)
    covered: set[Hashable] = set()
    chosen = []
    while queue:
        bound, idx = heapq.heappop(queue)
        gain = len(wanted[idx] - covered) / weights[idx]
        if gain == -bound and gain > 0:
            chosen.append(idx)
            covered |= wanted[idx]
        elif gain > 0:
            heapq.heappush(queue, (-gain, idx))
    return sorted(chosen)


def _parts(case: Attributes, strength: int) -> frozenset[Hashable]:
    values = sorted(case.items(), key=lambda item: item[0])
    together = [value for value in values if not value[0].startswith(ALONE)]
    if strength == 1:
        return frozenset(together)
    return frozenset(itertools.chain(values, itertools.combinations(together, 2)))


def mark_what_no_sample_has(items: Iterable[pytest.Item]) -> None:
    """Mark as `full` what the samples of the tests marked `sampled` leave over.

    A sample is taken of all parameters of one test function together. `sampled(1, 2)` is for a product
    that is too large for `make test-full`: single values for `make test`, pairs for `make test-full`,
    and the rest is marked as `slow`. `sampled(1, of=("layout", "target"))` is for what is tested
    elsewhere with every value: here the sample of `make test` has every value of these attributes.

    Raises:
        pytest.UsageError: A mark has other strengths than (1), (2) or (1, 2), or names an attribute
            that no case has.
    """
    products = collections.defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None and not any(item.get_closest_marker(name) for name in LATER):
            of = tuple(mark.kwargs.get("of", ()))
            products[item.nodeid.split("[")[0], mark.args, of].append(item)
    for (function, strengths, of), product in products.items():
        if strengths not in [(1,), (2,), (1, 2)]:
            raise pytest.UsageError(f"{function}: sampled takes 1, 2, or 1 and 2, got {strengths}")
        marks = ("full",) if len(strengths) == 1 else ("slow", "full")
        for strength, name in zip(reversed(strengths), marks, strict=True):
            parameters = [item.callspec.params for item in product]  # type: ignore[attr-defined]
            attributes = [attributes_of(given) for given in parameters]
            if of and name == marks[-1]:
                attributes = [_only(of, values) for values in attributes]
                if not all(any(name in values for values in attributes) for name in of):
                    raise pytest.UsageError(f"{function}: no case has some attribute of {of}")
            chosen = set(sample(attributes, strength, [_cost_of(given) for given in parameters]))
            for idx, item in enumerate(product):
                if idx not in chosen:
                    item.add_marker(name)
            product = [product[idx] for idx in sorted(chosen)]


def check_margin(nodeid: str, mark: pytest.Mark) -> None:
    """Hold a mark `clock(usual_s=..., limit_s=...)` to the margin that a busy machine needs.

    Raises:
        pytest.UsageError: One of the two is missing, or the limit is less than `LEAST_MARGIN` times
            what it usually takes.
    """
    usual_s, limit_s = (mark.kwargs.get(name) for name in ("usual_s", "limit_s"))
    if mark.args or usual_s is None or limit_s is None or len(mark.kwargs) != 2:
        raise pytest.UsageError(
            f"{nodeid}: clock takes usual_s and limit_s, got {mark.args} {mark.kwargs}"
        )
    if not 0 < LEAST_MARGIN * usual_s <= limit_s:
        raise pytest.UsageError(
            f"{nodeid}: what takes {usual_s} s needs a limit of at least {LEAST_MARGIN * usual_s:g} s, "
            f"got {limit_s}"
        )


def _only(names: Iterable[str], attributes: Attributes) -> Attributes:
    """These attributes, each for itself."""
    plain = {name.removeprefix(ALONE): value for name, value in attributes.items()}
    return {name: plain[name] for name in names if name in plain}


def _cost_of(parameters: Mapping[str, Any]) -> float:
    """Cost of a test with ranks: every one works out what all of them must find, row by row."""
    costs = [1.0]
    for value in parameters.values():
        num_ranks = getattr(value, "num_ranks", 1)
        costs.append(num_ranks**2 + 4)
        if isinstance(value, Case):
            num_elements = sum(value.num_tokens) * value.num_topk * value.hidden
            costs[-1] *= 1 + num_elements / _CHEAP_ELEMENTS
    return max(costs)


def attributes_of(parameters: Mapping[str, Any]) -> dict[str, Hashable]:
    """The attributes of a test, from its parameters: of a dataclass its fields, else the value."""
    found: dict[str, Hashable] = {}
    for name, value in parameters.items():
        if isinstance(value, Case):
            found |= _attributes_of_case(value)
        elif dataclasses.is_dataclass(value) and hasattr(value, "name"):
            found |= {f"{name}.{key}": kind for key, kind in _kinds_of_fields(value)}
            found[f"{ALONE}{name}"] = str(value.name)
        else:
            found[name] = _plain(value)
    return found


def _kinds_of_fields(value: Any) -> Iterable[tuple[str, Hashable]]:
    """Sizes and lists count as given or not given, and by whether they are one or more."""
    for field in dataclasses.fields(value):
        content = getattr(value, field.name)
        if field.name == "name":
            continue
        if isinstance(content, bool) or not isinstance(
            content, (int, float, tuple, list, frozenset)
        ):
            yield field.name, _plain(content)
        elif isinstance(content, (int, float)):
            yield field.name, "many" if content > 1 else content
        else:
            yield field.name, "some" if content else "none"


def _plain(value: Any) -> Hashable:
    """Something that is equal for equal values, and the same in every process."""
    if isinstance(value, (str, int, float, bool, bytes, type(None))):
        return value
    if isinstance(value, enum.Enum):
        return str(value)
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    return repr(value)


def idea_of(case: Case) -> str:
    """The name of a case without its layout: what it is there for.

    The list of cases has products too, in which alignments and quantizations are named beside
    something else. Those are attributes: here the name is that of the rest.
    """
    name = case.name.removeprefix(f"{case.layout.name.lower().replace('_', '-')}-")
    name = name.removesuffix(f"-alignment-{case.expert_alignment}").removesuffix("-quantized")
    return _QUANTIZATION_IN_NAME.sub("quantized-", name)


def _attributes_of_case(case: Case) -> dict[str, Hashable]:
    """Values that code branches on, sizes in classes; and once each, what the case is there for."""
    return {
        "layout": str(case.layout),
        "num_ranks": case.num_ranks if case.num_ranks <= _FEW_RANKS else "more",
        "dtype": str(case.dtype),
        "rows": _kind_of_rows(case),
        "routing": case.routing,
        "capacity": _kind_of_capacities(case.capacities or ()),
        "masks ranks": case.masked_ranks is not None,
        "is aligned": case.expert_alignment > 1,
        "is placed": case.expert_rank is not None,
        "is elastic": case.is_elastic,
        f"{ALONE}idea": idea_of(case),
        f"{ALONE}quantization": repr(case.quantization),
        f"{ALONE}pair": repr(case.pair),
    }


def _kind_of_rows(case: Case) -> str:
    if case.quantization is None:
        return "special" if case.has_special_values else "plain" if case.pair is None else "pair"
    order = "columns" if case.quantization.is_column_major else "rows"
    return f"{'pair' if case.pair else case.quantization.format.name} in {order}"


def _kind_of_capacities(capacities: Iterable[Capacity | None]) -> str:
    given = [capacity for capacity in capacities if capacity is not None]
    if not given:
        return "none"
    per_expert = any(capacity.num_rows_per_expert is not None for capacity in given)
    return f"{given[0].on_overflow}{' per expert' if per_expert else ''}"
