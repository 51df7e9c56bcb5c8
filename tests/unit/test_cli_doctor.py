from __future__ import annotations

import json
import sys
import types

import pytest

import moe_comm
from moe_comm.cli import doctor
from tests.helpers.command_line import output_of
from tests.helpers.fresh_python import run_python


def test_every_missing_thing_has_a_remedy() -> None:
    for finding in doctor.examine():
        assert finding.is_present or finding.remedy, finding


def test_clients_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {finding.name for finding in doctor.examine()}
    assert {"triton", "megatron-core", "torchtitan", "transformers", "deep_ep"} <= names
    monkeypatch.setitem(sys.modules, "deep_ep", types.ModuleType("deep_ep"))
    found = {finding.name: finding for finding in doctor.examine()}
    assert found["deep_ep"].is_present


def test_doctor_says_that_the_default_backend_works() -> None:
    pytest.importorskip("moe_comm._host")
    said = output_of("doctor", "--json")
    document = json.loads(said)
    assert document["works"]
    found = {finding["name"]: finding for finding in document["findings"]}
    assert found["default backend"]["is_present"]
    assert found["native module"]["detail"].startswith("uses ")
    assert found["moe_comm"]["detail"] == moe_comm.__version__


def test_doctor_fails_without_the_native_module(monkeypatch: pytest.MonkeyPatch) -> None:
    # An entry of None makes the import fail, as on a machine where the module cannot be loaded.
    monkeypatch.setitem(sys.modules, "moe_comm._host", None)
    monkeypatch.delitem(sys.modules, "moe_comm.ep.backends.host", raising=False)
    monkeypatch.delattr("moe_comm._host", raising=False)
    said = output_of("doctor", exit_code=1)
    assert "does not work" in said


def test_the_command_says_that_the_native_module_is_missing() -> None:
    """In a process that has imported nothing yet."""
    hide = "import sys; sys.modules['moe_comm._host'] = None; sys.argv = ['moe-comm', 'doctor', '--json']"
    done = run_python("-c", f"{hide}; from moe_comm import cli; cli.main()")
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    found = {finding["name"]: finding for finding in document["findings"]}
    assert not document["works"]
    assert found["native module"]["detail"] == "moe_comm._host cannot be imported"
    assert found["default backend"]["detail"].startswith(
        "ModuleNotFoundError: import of moe_comm._host"
    )


def test_self_test_reports_a_wrong_row(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("moe_comm._host")
    assert doctor.self_test() is None
    monkeypatch.setattr(
        "moe_comm.cli.bench.oracle.check_dispatch", lambda *_: "rank 0 row 1 differs"
    )
    assert "rank 0 row 1 differs" in str(doctor.self_test())
