"""The table of formats, and that a format needs nothing but its record in it."""

from __future__ import annotations

import ast
import enum
import inspect
from pathlib import Path

import pytest

import moe_comm
from moe_comm import Quantization, QuantizationFormat, _host
from moe_comm.tensors import quantization
from moe_comm.tensors.quantization import _named_by
from tests.helpers.fresh_python import run_python

ROOT = Path(__file__).resolve().parents[2]


def test_formats_that_are_in_the_table_alone() -> None:
    done = run_python(
        *("-m", "pytest", "-q", "-p", "tests.helpers.more_wire_formats"),
        *("-p", "no:cacheprovider", "tests/unit/added_wire_formats.py"),
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_names_are_those_of_the_table() -> None:
    """What is written for readers: the enums are made from the table and have its names in any case."""
    classes = {
        node.name: [
            target.id
            for statement in node.body
            if isinstance(statement, ast.Assign)
            for target in statement.targets
            if isinstance(target, ast.Name)
        ]
        for node in ast.parse(inspect.getsource(quantization)).body
        if isinstance(node, ast.ClassDef)
    }
    formats = [each.name for each in _host.layout.WIRE_FORMATS]
    assert classes["QuantizationFormat"] == formats
    assert classes["ScaleFormat"] == [each.name for each in _host.layout.SCALE_FORMATS]
    page = (ROOT / "docs/quantization.md").read_text()
    for name in formats:
        assert getattr(moe_comm, name) == Quantization(format=QuantizationFormat[name])
        assert f"| `{name}` |" in page


@pytest.mark.parametrize("table", [["B", "A"], ["B"]])
def test_a_name_that_the_table_has_not_is_found(table: list[str]) -> None:
    with pytest.raises(ImportError, match=r"Written.A is 1, the table has \{'B': 1"):

        @_named_by(dict.fromkeys(table), first=1)
        class Written(enum.IntEnum):
            A = 1
