"""Every option of a call on two ranks: what they say of it, and what it does on every backend."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest
import torch

from moe_comm import Communicator, DispatchResult, EpBuffer, EpConfig, Layout
from moe_comm.ep.autograd.operators import zero_unfilled
from moe_comm.ep.call_options import CombineOptions, DispatchOptions, describe_options
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.option_values import VALUES

CONFIG = EpConfig(num_experts=4, num_topk=2, hidden=128, num_max_tokens_per_rank=4)


Brought: TypeAlias = dict[tuple[str, str], list[Any]]
BACKENDS = ["host", "simt", "collective", "reference"]


def dispatch_with(buffer: EpBuffer, name: str, value: object, **others: Any) -> DispatchResult:
    """Dispatch rows of this rank with one option."""
    generator = torch.Generator().manual_seed(buffer.communicator.rank_idx)
    x = torch.randn(4, 128, generator=generator).to(torch.bfloat16)
    topk_idx = torch.tensor([[0, 3], [0, 1], [3, 0], [2, 0]])
    buffer.mask_ranks(value if name == "masked_ranks" else ())  # type: ignore[arg-type]
    if name != "masked_ranks":
        others[name] = value
    result = buffer.dispatch(x, topk_idx, **others)
    result.event.wait()
    return result


def say_different_things(buffer: EpBuffer) -> dict[str, str | None]:
    """Error of a dispatch on this rank where the ranks give the values of an option, by its name."""

    def error_of(name: str, value: object) -> str | None:
        try:
            result = dispatch_with(buffer, name, value)
            # Equal values: seen at a glance, where there is one.
            buffer.combine(result.x, result.handle)
        except ValueError as error:
            return str(error)
        return None

    rank_idx = buffer.communicator.rank_idx
    return {name: error_of(name, values.good[rank_idx]) for name, values in VALUES.items()}


def say_the_same(buffer: EpBuffer) -> Brought:
    """Bytes that every value of an option brings to this rank, by operation and option."""

    def dispatched(name: str, value: object) -> Sequence[torch.Tensor | None]:
        others = {"layout": Layout.LOW_LATENCY} if name == "masked_ranks" else {}
        result = dispatch_with(buffer, name, value, **others)
        if result.handle.layout is Layout.LOW_LATENCY:
            zero_unfilled(result)
        return result.x, result.x_sf, result.num_tokens_per_expert, result.expert_offsets

    handle = dispatch_with(buffer, "layout", Layout.EXPERT_MAJOR).handle
    rows = torch.randn(handle.num_recv_tokens, 128, generator=torch.Generator().manual_seed(7))

    def repeated(name: str, value: object) -> Sequence[torch.Tensor | None]:
        x = rows[:1].expand(handle.num_tokens, 128).contiguous()
        result = buffer.dispatch(x, None, handle=handle, **{name: value})  # type: ignore[arg-type]
        return result.x, result.x_sf

    def combined(name: str, value: object) -> Sequence[torch.Tensor | None]:
        sums = buffer.combine(rows, handle, **{name: value})  # type: ignore[call-overload]
        return [sums if isinstance(sums, torch.Tensor) else sums.x]

    def bytes_of(operation: Callable[..., Sequence[torch.Tensor | None]], *said: Any) -> Any:
        try:
            brought = operation(*said)
        except ValueError as error:
            return str(error)
        return tuple(
            None if each is None else each.contiguous().view(torch.uint8).numpy().tobytes()
            for each in brought
        )

    of_calls = [name for name in DispatchOptions._fields if name != "masked_ranks"]
    return {
        (operation.__name__, name): [
            bytes_of(operation, name, value) for value in VALUES[name].good
        ]
        for operation, names in (
            (dispatched, DispatchOptions._fields),
            (repeated, of_calls),
            (combined, CombineOptions._fields),
        )
        for name in names
    }


def use_options(context: RankContext, backend: str) -> tuple[Any, Any]:
    """Both of the above on a buffer of this rank."""
    with (
        Communicator(context.group, backend=backend) as communicator,
        EpBuffer(communicator, CONFIG) as buffer,
    ):
        return say_different_things(buffer), say_the_same(buffer)


@functools.cache
def results_of_ranks(backend: str) -> list[tuple[Any, Any]]:
    return run_ranks(use_options, 2, backend, timeout_s=120.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_agree_on_an_option_as_described(backend: str) -> None:
    of_ranks = [said for said, _ in results_of_ranks(backend)]
    assert of_ranks[0] == of_ranks[1]
    for name, option in describe_options(DispatchOptions).items():
        said = of_ranks[0][name]
        if option.ranks != "equal":
            assert said is None, name
            continue
        assert said is not None, f"{name}: ranks that say different things do not hear of it"
        first, second = VALUES[name].words[:2]
        assert f"{first}" in said.split(" on rank 0 ")[0], said
        assert f"{second}" in said.split(" on rank 0 ")[1], said


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_option_does_the_same_on_every_backend(backend: str) -> None:
    brought = [of_rank for _, of_rank in results_of_ranks(backend)]
    defined = [of_rank for _, of_rank in results_of_ranks("reference")]
    for operation, name in defined[0]:
        values = VALUES[name]
        found, right = (
            [*zip(*(rank[operation, name] for rank in ranks), strict=True)]
            for ranks in (brought, defined)
        )
        others = [value for value, a, b in zip(values.good, found, right, strict=True) if a != b]
        assert not others, (
            f"{operation} with {name}={others}: {backend} does not do what the definition does"
        )
        if operation != "repeated":  # to places that other options decided on
            assert len({*right}) == (len(right) if values.moves_rows else 1), name
