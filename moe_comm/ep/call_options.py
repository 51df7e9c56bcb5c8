"""Options of dispatch and combine, each described once.

An option is a field of `DispatchOptions` or `CombineOptions`, annotated with its type and an `Option`. The
checks, the errors of ranks that disagree, and the integers of the torch operators follow from it. To add
one: a field here, the signature in `buffer.py`, and csrc/bindings/shared/call_options.cpp, which reads the
fields by name (CONTRIBUTING.md has the rest). Rules about tensors or two options: `validation`. Calls make
options by `__new__`, which takes two thirds of the time of calling the class.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar

from moe_comm.arguments import as_int, check_bool, shown
from moe_comm.ep.config import ON_OVERFLOW, Capacity, Layout, numbers_of
from moe_comm.ep.gradient_word import check_word
from moe_comm.tensors.quantization import Quantization, QuantizationFormat, ScaleFormat

CopyOut: TypeAlias = bool | Literal["auto"]
OptionsT = TypeVar("OptionsT", bound=tuple[Any, ...])
_NO_OPTION: list[int] = []


def encode_quantization(quantization: Quantization | None) -> list[int]:
    """`[format, scale_format, is_column_major]`, or `[]` for None."""
    if quantization is None:
        return _NO_OPTION
    assert quantization.scale_format is not None
    return [
        int(quantization.format),
        int(quantization.scale_format),
        int(quantization.is_column_major),
    ]


def decode_quantization(encoded: Sequence[int]) -> Quantization | None:
    """The quantization that `encode_quantization` was given."""
    if not encoded:
        return None
    form, scale_format, is_column_major = encoded
    return Quantization(
        format=QuantizationFormat(form),
        scale_format=ScaleFormat(scale_format),
        is_column_major=bool(is_column_major),
    )


def _encode_capacity(capacity: Capacity | None) -> list[int]:
    return [] if capacity is None else [*numbers_of(capacity)]


def _decode_capacity(encoded: Sequence[int]) -> Capacity | None:
    if not encoded:
        return None
    num_rows, per_expert, on_overflow = encoded
    return Capacity(
        num_rows=None if num_rows < 0 else num_rows,
        num_rows_per_expert=None if per_expert < 0 else per_expert,
        on_overflow=ON_OVERFLOW[on_overflow],
    )


def _check_layout(layout: object) -> object:
    if not isinstance(layout, Layout):
        raise TypeError(f"layout must be a Layout, got {shown(layout)}")
    return layout


def check_alignment(expert_alignment: object) -> int:
    """Return a valid alignment as an int; raise TypeError or ValueError for any other."""
    expert_alignment = as_int("expert_alignment", expert_alignment)
    if not 1 <= expert_alignment < 2**31:
        raise ValueError(f"expert_alignment must be in [1, 2**31), got {expert_alignment}")
    return expert_alignment


def _check_quantization(quantization: object) -> object:
    if quantization is not None and not isinstance(quantization, Quantization):
        raise TypeError(f"quantization must be a Quantization, got {shown(quantization)}")
    return quantization


def _check_capacity(capacity: object) -> object:
    if capacity is not None and not isinstance(capacity, Capacity):
        raise TypeError(f"capacity must be a Capacity, got {shown(capacity)}")
    return capacity


def _check_copy_out(copy_out: object) -> object:
    if copy_out is True or copy_out is False or (isinstance(copy_out, str) and copy_out == "auto"):
        return copy_out
    raise ValueError(f'copy_out must be True, False or "auto", got {shown(copy_out)}')


def _check_async_op(async_op: object) -> object:
    check_bool("async_op", async_op)
    return async_op


def _check_gradients(gradients: object) -> object:
    check_word(gradients)
    return gradients


def _limits(capacity: Capacity | None) -> str:
    # A rank without a capacity and one whose capacity grows drop the same, which is nothing.
    if capacity is None or capacity.on_overflow == "grow":
        return ""
    most = capacity.num_rows_per_expert
    per_expert = "" if most is None else f", num_rows_per_expert={most}"
    return f"on_overflow={capacity.on_overflow}{per_expert}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """One option of a call, besides its name, type and default.

    Args:
        rule: Checks a value and returns it normalized; raises TypeError or ValueError that states it.
        ranks: "own": ranks may differ. "equal": different values are a ValueError that states both.
            "united": the union over all ranks holds for all.
        words: A value as text, for the error of ranks that disagree; "" to leave it out. None if the
            option is not in that text, or is described with the rows.
        encode: The value as integers of a torch operator; None for an option that `moe_comm.dispatch`
            does not have.
        decode: Inverse of `encode`.
        is_size: Whether these integers may be symbolic sizes of a compiled graph (SymInt).
    """

    rule: Callable[[Any], Any]
    ranks: Literal["own", "equal", "united"]
    words: Callable[[Any], str] | None = None
    encode: Callable[[Any], list[int]] | None = None
    decode: Callable[[Sequence[int]], Any] | None = None
    is_size: bool = False


class DispatchOptions(NamedTuple):
    """Options of one dispatch: how its rows go.

    Args:
        layout: Order of received rows. A dispatch with a handle uses the handle's layout, alignment,
            capacity and masks instead.
        expert_alignment: As in `EpBuffer.dispatch`.
        quantization: Quantization of x, or None. If x is quantized already it only says whether the
            scale factors arrive column-major.
        capacity: Limits; None for none. How many rows they allow is each rank's own.
        masked_ranks: LOW_LATENCY: ranks that take no part in this operation: nothing goes to them or
            comes from them.
        copy_out: Whether results are copied out of the heap; "auto": the backend decides.
        async_op: Return before the operation has ended.
        gradients: Bit mask of this rank, see `moe_comm.ep.gradient_word`. Ranks exchange it before rows
            move: the output has the union, and masks that contradict each other are a ValueError on
            every rank.
    """

    layout: Annotated[
        Layout,
        Option(
            rule=_check_layout,
            ranks="equal",
            words=lambda layout: layout.name,
            encode=lambda layout: [int(layout)],
            decode=lambda encoded: Layout(encoded[0]),
        ),
    ] = Layout.EXPERT_MAJOR
    expert_alignment: Annotated[
        int,
        Option(
            rule=check_alignment,
            ranks="equal",
            words=lambda expert_alignment: f"expert_alignment={expert_alignment}",
            encode=lambda expert_alignment: [expert_alignment],
            decode=lambda encoded: encoded[0],
        ),
    ] = 1
    quantization: Annotated[
        Quantization | None,
        Option(
            rule=_check_quantization,
            ranks="equal",
            encode=encode_quantization,
            decode=decode_quantization,
        ),
    ] = None
    capacity: Annotated[
        Capacity | None,
        Option(
            rule=_check_capacity,
            ranks="equal",
            words=_limits,
            encode=_encode_capacity,
            decode=_decode_capacity,
            is_size=True,
        ),
    ] = None
    masked_ranks: Annotated[
        tuple[int, ...], Option(rule=tuple, ranks="united")  # of EpBuffer.mask_ranks, which checks
    ] = ()
    copy_out: Annotated[CopyOut, Option(rule=_check_copy_out, ranks="own")] = "auto"
    async_op: Annotated[bool, Option(rule=_check_async_op, ranks="own")] = False
    gradients: Annotated[int, Option(rule=_check_gradients, ranks="united")] = 0


class CombineOptions(NamedTuple):
    """Options of one combine: how its sums come back.

    Args:
        copy_out: As in `DispatchOptions`, for the sums.
        async_op: As in `DispatchOptions`.
        gradients: As in `DispatchOptions`; ranks also compare whether weights are applied.
    """

    copy_out: Annotated[CopyOut, Option(rule=_check_copy_out, ranks="own")] = "auto"
    async_op: Annotated[bool, Option(rule=_check_async_op, ranks="own")] = False
    gradients: Annotated[int, Option(rule=_check_gradients, ranks="united")] = 0


_DESCRIBED: dict[type, dict[str, Option]] = {
    kind: {name: hint.__metadata__[0] for name, hint in kind.__annotations__.items()}
    for kind in (DispatchOptions, CombineOptions)
}


def describe_options(kind: type[tuple[Any, ...]]) -> dict[str, Option]:
    """Every option of `DispatchOptions` or `CombineOptions` by its name, in order."""
    return _DESCRIBED[kind]


def check_options(options: OptionsT) -> OptionsT:
    """Return the options, each checked and normalized by its rule.

    Raises:
        ValueError: A value is out of range.
        TypeError: A value is of a wrong type.
    """
    described = describe_options(type(options)).values()
    checked = (option.rule(value) for option, value in zip(described, options, strict=True))
    return tuple.__new__(type(options), checked)


def encode_dispatch(options: DispatchOptions) -> tuple[list[int], list[int]]:
    """The options of `moe_comm.dispatch` as an operator takes them: numbers, and sizes of a graph.

    In the numbers, each option begins with the count of its integers. Only `capacity` has sizes.
    """
    numbers: list[int] = []
    sizes: list[int] = []
    for option, value in zip(describe_options(DispatchOptions).values(), options, strict=True):
        if option.encode is not None:
            encoded = option.encode(value)
            if option.is_size:
                sizes = encoded
            else:
                numbers += [len(encoded), *encoded]
    return numbers, sizes


def decode_dispatch(numbers: Sequence[int], sizes: Sequence[int]) -> DispatchOptions:
    """The options that `encode_dispatch` was given; others have their defaults."""
    rest = iter(numbers)
    values = {}
    for name, option in describe_options(DispatchOptions).items():
        if option.decode is not None:
            encoded = sizes if option.is_size else [next(rest) for _ in range(next(rest))]
            values[name] = option.decode(encoded)
    return DispatchOptions(**values)
