"""Cost of `import moe_comm` beyond torch: counted in modules, not in time."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys

import pytest

import moe_comm
from moe_comm import compat
from tests.helpers.fresh_python import run_python

PROGRAM = """
import json, sys
import torch
before = set(sys.modules)
{statement}
print(json.dumps(sorted(set(sys.modules) - before)))
"""

# Standard library modules that torch has not loaded and that are worth their time.
NUM_MAX_STDLIB_MODULES = 40


def modules_added_by(statement: str) -> list[str]:
    """Modules that `statement` loads in a fresh interpreter that has imported torch."""
    run = run_python("-c", PROGRAM.format(statement=statement))
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def expensive(modules: list[str]) -> list[str]:
    """Those of `modules` that are neither the package's own nor the standard library's."""
    cheap = sys.stdlib_module_names | {"moe_comm"}
    return [module for module in modules if module.split(".")[0] not in cheap]


@pytest.mark.full
def test_the_count_sees_an_expensive_import() -> None:
    assert "rich.table" in expensive(modules_added_by("import rich.table"))


@pytest.fixture(scope="module")
def added() -> list[str]:
    return modules_added_by("import moe_comm; moe_comm.Layout")


def test_import_loads_almost_nothing_before_a_name_is_used() -> None:
    program = (
        "import sys; before = set(sys.modules); import moe_comm\n"
        "assert set(moe_comm.__all__) <= set(dir(moe_comm))\n"
        "assert not any(hasattr(moe_comm, name) for name in ('unheard_of', '__path', 'no.module'))\n"
        "added = set(sys.modules) - before\n"
        "print(sorted({m for m in added if m.split('.')[0] not in sys.stdlib_module_names}))\n"
        "assert moe_comm.errors is sys.modules['moe_comm.errors']  # a module, as if it were imported\n"
        "import moe_comm.env, moe_comm.ep.config\n"
        "assert 'moe_comm.names' not in sys.modules\n"
        "moe_comm.quantize = given = object()  # as who replaces it for a test does\n"
        "assert moe_comm.Layout and moe_comm.quantize is given\n"
        "moe_comm.quantize = moe_comm.names.quantize\n"
        "from moe_comm import *\n"
        "assert EpBuffer is moe_comm.EpBuffer is sys.modules['moe_comm.ep.buffer'].EpBuffer\n"
        "assert all(name in globals() and name in vars(moe_comm) for name in moe_comm.__all__)\n"
        "import torch; torch.ops.moe_comm.dispatch\n"
    )
    run = run_python("-c", program)
    assert run.returncode == 0, run.stderr
    loaded = ["moe_comm", "moe_comm._version", "moe_comm.compat", "moe_comm.env"]
    assert run.stdout.splitlines()[0] == str(loaded)


def test_public_names_are_those_that_are_loaded() -> None:
    """The names that type checkers read (`names`) and what the package offers is one list."""
    names = importlib.import_module("moe_comm.names")
    public = {name for name in vars(names) if not name.startswith("_")} - {"annotations"}
    assert public == set(moe_comm.__all__)


def test_import_loads_only_the_package_and_the_standard_library(added: list[str]) -> None:
    assert "moe_comm.ep.buffer" in added
    assert expensive(added) == []


def test_import_leaves_the_command_line_and_the_test_suite_alone(added: list[str]) -> None:
    on_demand = ("moe_comm.cli", "moe_comm.testing")
    assert [module for module in added if module.startswith(on_demand)] == []


def test_import_loads_few_modules_of_the_standard_library(added: list[str]) -> None:
    stdlib = [module for module in added if module.split(".")[0] != "moe_comm"]
    assert len(stdlib) <= NUM_MAX_STDLIB_MODULES, stdlib


UTILS = "tests.helpers.deep_ep_utils"
GONE = {
    "moe_comm.testing.dispatcher_cases": "tests.helpers.dispatcher_cases",
    "moe_comm.testing.dispatcher_conformance": "tests.helpers.dispatcher_conformance",
    "moe_comm.testing.dispatchers": "tests.helpers.dispatcher_targets",
    "moe_comm.testing.megatron": "tests.helpers.megatron_on_cpu",
    **{
        f"{package}deep_ep.utils.{name}": f"{UTILS}.{name}"
        for package in ("", "moe_comm.compat.")
        for name in ("envs", "gate", "refs", "testing")
    },
}


@pytest.mark.parametrize(("name", "place"), GONE.items())
def test_a_module_that_has_left_the_package_says_where_it_is(name: str, place: str) -> None:
    compat.install("deep_ep")
    with pytest.raises(ModuleNotFoundError) as told:
        importlib.import_module(name)
    assert str(told.value) == f"{name} is no part of the package: in a checkout write {place}"
    assert importlib.util.find_spec(place) is not None
    package, _, last = name.rpartition(".")
    with pytest.raises(ModuleNotFoundError, match=r"^No module named"):
        importlib.import_module(f"{package}.x{last}")
    compat.uninstall("deep_ep")


def test_a_name_that_has_left_its_module_says_where_it_is() -> None:
    there = importlib.import_module(f"{UTILS}.math")
    here = importlib.import_module("moe_comm.compat.deep_ep.utils.math")
    names = set(there.__all__) - set(here.__all__)
    assert len(names) == 6
    for name in names:
        with pytest.raises(
            ModuleNotFoundError, match=rf"\.{name} is no part .* write {UTILS}\.math\.{name}$"
        ):
            getattr(here, name)
    with pytest.raises(AttributeError, match="has no attribute 'unheard_of'"):
        here.unheard_of  # noqa: B018
