"""Changes that tables of tensors notice, natively and in Python alike."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_comm.resharding.describe.tensor_table import HeldObjects, TensorTable, any_has
from tests.helpers.described_tensors import HAS_DESCRIBED_TENSORS

Tensors = list[torch.Tensor]


def some_tensors() -> Tensors:
    return [
        torch.nn.Parameter(torch.zeros(4, 8, dtype=torch.bfloat16)),
        torch.zeros(6, 6).t(),
        torch.zeros(()),
        torch.zeros(0, 3, dtype=torch.int64),
        torch.zeros(16, dtype=torch.float8_e4m3fn),
        torch.zeros(2, dtype=torch.complex64),
        torch.zeros(2, 3, 2, 1, 2, 3).transpose(0, 4),
    ]


@pytest.fixture(params=["native", "python"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":

        def describe_none(_: object) -> None:
            raise ValueError

        monkeypatch.setattr("moe_comm._host.TensorTable", describe_none)
    elif not HAS_DESCRIBED_TENSORS:
        pytest.skip("this torch describes no tensors in C")
    return str(request.param)


def replace_data(tensors: Tensors) -> None:
    tensors[0].data = tensors[0].data.clone()


def transpose(tensors: Tensors) -> None:
    tensors[1].t_()


def move_one_element(tensors: Tensors) -> None:
    tensors[4] = torch.zeros(17, dtype=torch.float8_e4m3fn)[1:]


def reshape(tensors: Tensors) -> None:
    tensors[1].resize_(4, 9)


def retype(tensors: Tensors) -> None:
    tensors[0] = tensors[0].data.view(torch.float16)


def flatten(tensors: Tensors) -> None:
    tensors[2] = tensors[2].view(1)


def negate(tensors: Tensors) -> None:
    tensors[0].data = torch._neg_view(tensors[0].data)


def conjugate(tensors: Tensors) -> None:
    tensors[5] = tensors[5].conj()


def move_storage(tensors: Tensors) -> None:
    tensors[4].share_memory_()


def swap_what_is_behind(tensors: Tensors) -> None:
    torch.utils.swap_tensors(tensors[4], torch.zeros(16, dtype=torch.float8_e4m3fn))


def transpose_many_dimensions(tensors: Tensors) -> None:
    tensors[6].transpose_(0, 2)


def drop(tensors: Tensors) -> None:
    tensors.pop()


def append(tensors: Tensors) -> None:
    tensors.append(torch.zeros(1))


def keep(tensors: Tensors) -> None:
    tensors[3] = tensors[3].data


@pytest.mark.parametrize(
    "change",
    [
        replace_data,
        transpose,
        move_one_element,
        reshape,
        retype,
        flatten,
        negate,
        conjugate,
        move_storage,
        swap_what_is_behind,
        transpose_many_dimensions,
        drop,
        append,
    ],
)
def test_every_change_is_noticed(kind: str, change: Callable[[Tensors], None]) -> None:
    tensors = some_tensors()
    table = TensorTable(tensors)
    assert (table._native is not None) == (kind == "native")
    keep(tensors)
    assert table.matches(tensors)
    change(tensors)
    assert not table.matches(tensors)


def test_a_change_among_many_is_noticed() -> None:
    tensors = [torch.zeros(2) for _ in range(100)]
    table = TensorTable(tensors)
    assert table.matches(tensors)
    for changed in (0, 50, 99):
        other = [*tensors[:changed], torch.zeros(2), *tensors[changed + 1 :]]
        assert not table.matches(other)


def test_what_dlpack_cannot_describe_is_described_in_python() -> None:
    tensors = [torch.zeros(3), torch.quantize_per_tensor(torch.ones(4), 0.5, 0, torch.qint8)]
    table = TensorTable(tensors)
    assert table._native is None
    assert table.matches(tensors)
    assert not table.matches([tensors[0], torch.zeros(4)])
    assert not TensorTable([torch.zeros(3), torch.zeros(4)]).matches(tensors)


class Holder:
    """A module as seen by those who look at its attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def held(parameters: dict[str, Any], buffers: dict[str, Any], modules: dict[str, Any]) -> Holder:
    return Holder(_parameters=parameters, _buffers=buffers, _modules=modules, training=True)


def hold_same(modules: list[Any], keys: list[str], values: list[Any]) -> bool:
    return HeldObjects(keys, values).are_in(modules)


def test_the_very_objects_count() -> None:
    one, other = torch.zeros(2), torch.zeros(2)
    first = held({"a": one, "b": None}, {}, {"c": other})
    modules = [first, held({}, {}, {})]
    keys, values = ["a", "b", "c"], [one, None, other]
    assert hold_same(modules, keys, values)
    assert not hold_same([*modules, held({"d": one}, {}, {})], keys, values)
    assert not hold_same([held({"a": one, "b": None}, {}, {})], keys, values)
    assert not hold_same([held({"a": other, "b": None}, {}, {"c": other})], keys, values)
    assert not hold_same([held({"a": one, "e": None}, {}, {"c": other})], keys, values)
    assert not hold_same([Holder()], [], [])
    key = str(b"a key", "ascii")
    equal_key = str(b"a key", "ascii")
    assert key is not equal_key
    assert hold_same([held({key: one}, {}, {})], [equal_key], [one])
    with pytest.raises(ValueError, match="modules have attributes, got list"):
        hold_same([[]], keys, values)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="number of values and of keys"):
        hold_same(modules, keys, values[:1])


def test_any_has() -> None:
    modules = [Holder(), Holder(a=None)]
    for given in (modules, list(map(weakref.ref, modules))):
        assert any_has(given, "a")
        assert not any_has(given, "b")
    assert not any_has([], "a")
    with pytest.raises(ValueError, match="modules have attributes, got int"):
        any_has([1], "a")


def test_weak_references_are_what_they_refer_to(kind: str) -> None:
    tensors = some_tensors()
    references = list(map(weakref.ref, tensors))
    table = TensorTable(references)
    for has_dtensors in (False, True):
        assert table.matches(references, has_dtensors=has_dtensors)
    assert table.matches(tensors)
    tensors[1].t_()
    assert not table.matches(references, has_dtensors=False)
    tensors[1].t_()
    assert table.matches(references, has_dtensors=False)
    del tensors[2]
    for has_dtensors in (False, True):
        assert not table.matches(references, has_dtensors=has_dtensors)
    with pytest.raises(ValueError, match="must be alive, one of 7 is gone"):
        TensorTable(references)


def test_objects_are_held_weakly_or_not() -> None:
    one = torch.zeros(2)
    modules = [held({"a": one}, {}, {}) for _ in range(2)]
    known, values = list(map(weakref.ref, modules)), [weakref.ref(one)] * 2
    objects = HeldObjects(["a", "a"], values)
    for _ in range(2):
        assert objects.are_in(known)
        vars(modules[1])["_parameters"]["a"] = torch.zeros(2)
        assert not objects.are_in(known)
        vars(modules[1])["_parameters"]["a"] = one
        assert objects.are_in(known)
        assert not objects.are_in(known[:1])
    del modules[0]
    assert not hold_same(known, ["a"], values[:1])
    assert not any_has(known[:1], "a")


def test_objects_that_change_places_are_seen() -> None:
    tensors = [torch.zeros(1) for _ in range(3)]
    modules = [held({name: each}, {}, {}) for name, each in zip("abc", tensors, strict=True)]
    objects = HeldObjects(list("abc"), tensors)
    assert objects.are_in(modules)
    # The first has what follows it, the second still has it, and the third has nothing.
    vars(modules[0])["_parameters"]["b"] = tensors[1]
    vars(modules[2])["_parameters"].clear()
    assert not objects.are_in(modules)
    vars(modules[0])["_parameters"] = {"a": tensors[0]}
    vars(modules[2])["_parameters"] = {"c": tensors[2]}
    assert objects.are_in(modules)
