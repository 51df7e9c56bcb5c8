"""What tables of tensors notice, natively and in Python alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_comm.resharding import tensor_table
from moe_comm.resharding.tensor_table import TensorTable, any_has, hold_same

Tensors = list[torch.Tensor]


def some_tensors() -> Tensors:
    return [
        torch.nn.Parameter(torch.zeros(4, 8, dtype=torch.bfloat16)),
        torch.zeros(6, 6).t(),
        torch.zeros(()),
        torch.zeros(0, 3, dtype=torch.int64),
        torch.zeros(16, dtype=torch.float8_e4m3fn),
    ]


@pytest.fixture(params=["native", "python"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(tensor_table, "_EXCHANGE_API", None)
    elif tensor_table._EXCHANGE_API is None:
        pytest.skip("this torch has no DLPack exchange API")
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


def drop(tensors: Tensors) -> None:
    tensors.pop()


def append(tensors: Tensors) -> None:
    tensors.append(torch.zeros(1))


def keep(tensors: Tensors) -> None:
    tensors[3] = tensors[3].data


@pytest.mark.parametrize(
    "change", [replace_data, transpose, move_one_element, reshape, retype, flatten, drop, append]
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


def held(parameters: dict[str, Any], buffers: dict[str, Any], modules: dict[str, Any]) -> Any:
    return {"_parameters": parameters, "_buffers": buffers, "_modules": modules, "training": True}


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
    assert not hold_same([{}], [], [])
    key = str(b"a key", "ascii")
    equal_key = str(b"a key", "ascii")
    assert key is not equal_key
    assert hold_same([held({key: one}, {}, {})], [equal_key], [one])
    with pytest.raises(ValueError, match="takes dicts, got list"):
        hold_same([[]], keys, values)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="number of values and of keys"):
        hold_same(modules, keys, values[:1])


def test_any_has() -> None:
    assert any_has([{}, {"a": None}], "a")
    assert not any_has([{}, {"a": None}], "b")
    assert not any_has([], "a")
    with pytest.raises(ValueError, match="takes dicts, got int"):
        any_has([1], "a")  # type: ignore[list-item]
