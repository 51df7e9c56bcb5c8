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
# Every backend's whole product runs with its ranks in one way, of emulated devices with one and with two,
# with callers that are hosts and that are streams. The collective backend needs a process group, of
# which a process has one. A sample takes the first of what it might take: cases of special interest run
# on the CPU backend.
MODES = [
    ("host", "processes"),
    ("simt", "processes"),
    ("simt-devices-streams", "threads"),
    ("collective", "processes"),
    ("reference", "threads"),
]
# The same parts put together in other ways.
OTHER_MODES = [
    ("host", "threads"),
    ("simt", "threads"),
    ("simt-streams", "processes"),
    ("simt-streams", "threads"),
    ("simt-devices", "processes"),
    ("reference", "processes"),
]


def in_modes(modes: list[tuple[str, str]], long: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """Every case in every mode; `long` marks what has large windows and 8 ranks, which takes longest."""
    return pytest.mark.parametrize(
        ("name", "mode", "case"),
        [
            pytest.param(
                *(name, mode, case),
                id=f"{name}-{mode}-{case.name}",
                marks=(long,) if "larger-8" in case.name else (),
            )
            for name, mode in modes
            # Processes make a group anew for another number of ranks.
            for case in sorted(CASES, key=lambda case: case.num_ranks)
        ],
    )


@pytest.mark.sampled(2)
@in_modes(MODES, long=pytest.mark.full)
def test_case(name: str, mode: str, case: Case) -> None:
    check_case(TARGETS[name], case, mode=mode)


@pytest.mark.sampled(1, 2)
@in_modes(OTHER_MODES, long=pytest.mark.slow)
def test_case_in_the_other_mode(name: str, mode: str, case: Case) -> None:
    check_case(TARGETS[name], case, mode=mode)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(("name", "mode"), MODES + OTHER_MODES)
def test_check(name: str, mode: str, check: str) -> None:
    CHECKS[check](TARGETS[name], mode=mode)


def connect_with_three_threads(group: Bootstrap) -> Communicator:
    return Communicator(group, backend="host", num_threads=3)


SPECIAL_CASES = [
    pytest.param(case, id=case.name, marks=(pytest.mark.full,) if "larger" in case.name else ())
    for case in CASES
    if "special" in case.name
    or "larger" in case.name
    or (case.quantization is not None and case.layout is Layout.EXPERT_MAJOR)
]


@pytest.mark.sampled(1, 2, of=("instruction_set", "layout", "rows"))
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
