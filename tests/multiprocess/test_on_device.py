"""The adapter through which GPUs are held to the conformance suite, held to it on the CPU."""

from __future__ import annotations

import pytest

from moe_comm import Communicator, EpConfig
from moe_comm.ep.backends.base import Backend
from moe_comm.ep.backends.host import HostBackend
from moe_comm.testing.case_list import CASES
from moe_comm.testing.cases import Case
from moe_comm.testing.conformance import check_case
from moe_comm.testing.target import Target
from tests.helpers.on_device import OnDevice


def connect_host(group: object) -> Communicator:
    return Communicator(group, backend="host")


def make_on_cpu(communicator: Communicator, config: EpConfig) -> Backend:
    return OnDevice(communicator, config, HostBackend)


@pytest.mark.sampled(1, of=("layout", "rows", "capacity"))
@pytest.mark.parametrize("case", CASES[::11], ids=lambda case: case.name)
def test_case(case: Case) -> None:
    check_case(Target(name="adapter", make=make_on_cpu, connect=connect_host), case, mode="threads")
