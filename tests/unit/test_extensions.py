"""A backend, a copy service or a dispatcher is in every list that it must be in, as CONTRIBUTING.md says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from moe_comm.cli.bench.reshard.case import TRANSPORTS
from moe_comm.ep.backends import BACKEND_CLASSES
from moe_comm.peers.backend_choice import BACKENDS
from moe_comm.resharding.hold.refit_services import SERVICES, RefitBackendName
from tests.helpers import copy_services
from tests.multiprocess.test_conformance import TARGETS

ROOT = Path(__file__).resolve().parents[2]
# Backends whose conformance is tested elsewhere: tests/gpu, tests/multiprocess/test_deep_ep_backend.py.
ELSEWHERE = {"cuda", "nvshmem", "deep_ep"}


def test_backends() -> None:
    assert {*BACKEND_CLASSES} == {*BACKENDS} - {"auto"}
    without_suite = {*BACKEND_CLASSES} - {each.name for each in TARGETS.values()} - ELSEWHERE
    assert not without_suite, (
        f"no target of tests/multiprocess/test_conformance.py: {without_suite}"
    )


def test_copy_services() -> None:
    assert {*SERVICES} == {*get_args(RefitBackendName)}
    assert {*TRANSPORTS} <= {*SERVICES}
    cases = " ".join(copy_services.SERVICES)
    without_case = [name for name in SERVICES if name not in cases]
    assert not without_case, f"no case in tests/helpers/copy_services.py: {without_case}"


def test_dispatchers() -> None:
    """Modules of the folder that no other module of the package imports are there for callers."""
    folder = ROOT / "moe_comm/dispatcher"
    product = "\n".join(file.read_text() for file in (ROOT / "moe_comm").rglob("*.py"))
    targets = (ROOT / "tests/helpers/dispatcher_targets.py").read_text()
    page = (ROOT / "docs/api.md").read_text()
    for name in sorted(file.stem for file in folder.glob("[a-z]*.py")):
        imported = re.compile(rf"dispatcher(\.| import ){name}\b")
        if imported.search(product):
            continue
        assert re.search(rf"`(moe_comm\.dispatcher)?\.{name}`", page), f"docs/api.md has no {name}"
        if not name.endswith(("_plugin", "routing_map")):
            assert imported.search(targets), f"tests/helpers/dispatcher_targets.py has no {name}"
