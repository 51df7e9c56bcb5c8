"""An option of dispatch or combine is described once, and whoever needs it has it from there."""

import collections
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import pytest
import torch

import moe_comm
from moe_comm import MXFP8, Capacity, Communicator, EpBuffer, EpConfig, Layout
from moe_comm.ep import call_options as described
from moe_comm.ep.call_options import CombineOptions, DispatchOptions, Option, describe_options
from tests.helpers.option_values import VALUES

CONFIG = EpConfig(num_experts=8, num_topk=2, hidden=32, num_max_tokens_per_rank=4)
# Not an argument: EpBuffer.mask_ranks says it for all later calls.
OF_THE_BUFFER = {"masked_ranks"}

OptionTable = dict[str, Option]


def _defaults(kind: type[Any]) -> dict[str, object]:
    found: dict[str, object] = kind._field_defaults
    return {name: found[name] for name in kind._fields if name not in OF_THE_BUFFER}


def _keywords(call: Callable[..., Any]) -> dict[str, object]:
    parameters = inspect.signature(call).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}


def signatures(kind: type[Any]) -> list[str]:
    """Options that a public call does not take with the default they are described with."""
    wanted = _defaults(kind)
    calls = [(EpBuffer.dispatch if kind is not CombineOptions else EpBuffer.combine, wanted)]
    if kind is not CombineOptions:
        of_graphs = {n: wanted[n] for n, o in _table(kind).items() if o.encode is not None}
        calls.append((moe_comm.dispatch, of_graphs))
    return [
        f"{call.__qualname__}: {name}"
        for call, names in calls
        for name, default in names.items()
        if _keywords(call).get(name, _MISSING) != default
    ]


def docstring(kind: type[Any]) -> list[str]:
    """Options that the docstring of the call, of which the reference is made, does not describe."""
    call = EpBuffer.combine if kind is CombineOptions else EpBuffer.dispatch
    described_by = inspect.getdoc(call) or ""
    return [name for name in _defaults(kind) if f"\n    {name}: " not in described_by]


def native_calls(kind: type[Any]) -> list[str]:
    """Options that the native call does not read."""
    with Communicator(None) as communicator, EpBuffer(communicator, CONFIG) as buffer:
        x, topk_idx = torch.zeros(3, 32, dtype=torch.bfloat16), torch.tensor([[0, 1]] * 3)
        handle = buffer.dispatch(x, topk_idx).handle
        try:
            if kind is CombineOptions:
                rows = torch.zeros(6, 32, dtype=torch.bfloat16)
                buffer.run_combine(rows, handle, None, None, None, kind(), True)
            else:
                buffer._backend.dispatch(x, None, topk_idx, None, kind())
        except ValueError as error:
            return [str(error)]
    return []


def values(kind: type[Any]) -> list[str]:
    """Options of which the tests have no values to try."""
    return [name for name in kind._fields if name not in VALUES]


def _table(kind: type[Any]) -> OptionTable:
    return {name: hint.__metadata__[0] for name, hint in kind.__annotations__.items()}


_MISSING = object()
PLACES = [signatures, docstring, native_calls, values]


@pytest.mark.parametrize("kind", [DispatchOptions, CombineOptions])
@pytest.mark.parametrize("missing_in", PLACES)
def test_an_option_is_everywhere(kind: type[Any], missing_in: Callable[..., list[str]]) -> None:
    assert missing_in(kind) == []


# The options of a dispatch, and one that nothing but its description has.
_WithStride: Any = collections.namedtuple(
    "_WithStride", [*DispatchOptions._fields, "stride"], defaults=[*DispatchOptions(), 1]
)
_WithStride.__annotations__ = DispatchOptions.__annotations__ | {
    "stride": Annotated[
        int, Option(rule=int, ranks="equal", encode=lambda n: [n], decode=lambda n: n[0])
    ]
}


@pytest.mark.parametrize("missing_in", PLACES)
def test_an_option_that_is_forgotten_is_found(missing_in: Callable[..., list[str]]) -> None:
    found = missing_in(_WithStride)
    assert found
    assert all("stride" in each for each in found)


def test_operators_take_every_option_that_has_numbers() -> None:
    for name, option in describe_options(DispatchOptions).items():
        assert (option.encode is None) == (option.decode is None)
        for value in VALUES[name].good:
            options = DispatchOptions(**{name: value})
            back = described.decode_dispatch(*described.encode_dispatch(options))
            assert back == (options if option.encode is not None else DispatchOptions())
    several = DispatchOptions(Layout.RANK_MAJOR, 8, MXFP8, Capacity(num_rows=16))
    assert described.decode_dispatch(*described.encode_dispatch(several)) == several


BAD = [
    (name, bad)
    for name, of_option in VALUES.items()
    if name not in OF_THE_BUFFER
    for bad in of_option.bad
]


@pytest.mark.parametrize(("name", "bad"), BAD, ids=[f"{name}-{bad!r}" for name, bad in BAD])
def test_a_bad_value_is_refused_by_every_call(
    communicator: Communicator, name: str, bad: object
) -> None:
    x, topk_idx = torch.zeros(3, 32, dtype=torch.bfloat16), torch.tensor([[0, 1]] * 3)
    with EpBuffer(communicator, CONFIG) as buffer:
        calls: list[tuple[Callable[..., object], Callable[..., object]]] = [
            (EpBuffer.dispatch, lambda **asked: buffer.dispatch(x, topk_idx, **asked)),
            (EpBuffer.dispatch, lambda **asked: buffer.dispatch(x, None, handle=handle, **asked)),
            (
                moe_comm.dispatch,
                lambda **asked: moe_comm.dispatch(x, topk_idx, buffer=buffer, **asked),
            ),
            (EpBuffer.combine, lambda **asked: buffer.combine(rows, handle, **asked)),
        ]
        result = buffer.dispatch(x, topk_idx)
        rows, handle = result.x, result.handle
        # Whatever else is asked for.
        others: list[dict[str, object]] = [{}, {"copy_out": True}, {"async_op": True}]
        for form, call in calls:
            for other in others:
                if not {*other, name} <= _keywords(form).keys() or name in other:
                    continue
                call(**other)  # which the next one is, but for the bad value
                with pytest.raises((TypeError, ValueError), match=name):
                    call(**other, **{name: bad})
