from __future__ import annotations

import pytest

from moe_comm import Bootstrap, Communicator, _host
from moe_comm.ep.backends.host import HostBackend
from moe_comm.ep.config import Layout
from moe_comm.testing.case_list import CASES
from moe_comm.testing.cases import Case
from moe_comm.testing.conformance import CHECKS, check_case
from moe_comm.testing.target import Target
from tests.helpers.on_stream import (
    connect_streams,
    make_on_devices,
    make_on_devices_and_streams,
    make_on_stream,
)

TARGETS = {
    "reference": Target(name="reference", can_overlap=False),
    "collective": Target(name="collective"),
    "host": Target(name="host"),
    "simt": Target(name="simt"),
    "simt-streams": Target(name="simt", make=make_on_stream, connect=connect_streams),
    "simt-devices": Target(name="simt", make=make_on_devices, connect=connect_streams),
    "simt-devices-streams": Target(
        name="simt", make=make_on_devices_and_streams, connect=connect_streams
    ),
}
# The collective backend needs a process group, of which a process has one. A sample takes the first of
# what it might take: cases of special interest run on the CPU backend.
MODES = [
    ("host", "processes"),
    ("host", "threads"),
    ("simt", "processes"),
    ("simt", "threads"),
    ("simt-streams", "threads"),
    ("simt-streams", "processes"),
    ("simt-devices", "processes"),
    ("simt-devices-streams", "threads"),
    ("collective", "processes"),
    ("reference", "threads"),
    ("reference", "processes"),
]
# `make test` has large windows, and has 8 ranks, but not both at once: that takes longest of all.
LONG = {True: (pytest.mark.full,), False: ()}
CASES_BY_MODE = [
    pytest.param(
        name, mode, case, id=f"{name}-{mode}-{case.name}", marks=LONG["larger-8" in case.name]
    )
    for name, mode in MODES
    # Processes make a group anew for another number of ranks.
    for case in sorted(CASES, key=lambda case: case.num_ranks)
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "mode", "case"), CASES_BY_MODE)
def test_case(name: str, mode: str, case: Case) -> None:
    check_case(TARGETS[name], case, mode=mode)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(("name", "mode"), MODES)
def test_check(name: str, mode: str, check: str) -> None:
    CHECKS[check](TARGETS[name], mode=mode)


def connect_with_three_threads(group: Bootstrap) -> Communicator:
    return Communicator(group, backend="host", num_threads=3)


SPECIAL_CASES = [
    pytest.param(case, id=case.name, marks=LONG["larger" in case.name])
    for case in CASES
    if "special" in case.name
    or "larger" in case.name
    or (case.quantization is not None and case.layout is Layout.EXPERT_MAJOR)
]


@pytest.mark.sampled(1, of=("instruction_set", "layout", "rows"))
@pytest.mark.parametrize("case", SPECIAL_CASES)
@pytest.mark.parametrize("instruction_set", _host.kernels.instruction_sets())
def test_instruction_set(instruction_set: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_COMM_ISA", instruction_set)
    with Communicator(backend="host") as communicator:
        backend = TARGETS["host"].backend(communicator, case.config)
        assert isinstance(backend, HostBackend)
        assert backend.instruction_set == instruction_set
        backend.destroy()
    check_case(TARGETS["host"], case, mode="threads")


@pytest.mark.sampled(1, of=("layout", "rows"))
@pytest.mark.parametrize("case", SPECIAL_CASES)
def test_several_threads_per_rank(case: Case) -> None:
    check_case(Target(name="host", connect=connect_with_three_threads), case, mode="threads")
