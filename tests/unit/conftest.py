"""Fixtures that tests of one process share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moe_comm import Communicator
from moe_comm.peers.bootstrap import RankThreads
from moe_comm.resharding.hold import refit
from tests.helpers.threaded_refits import count_plans


@pytest.fixture(scope="module")
def communicator() -> Iterator[Communicator]:
    """Communicator of one rank, for all tests of a module."""
    with Communicator(RankThreads(1)[0]) as made:
        yield made


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """A compiler that knows nothing of other tests."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=[False, True], ids=["keeps-subnormals", "flushes-subnormals"])
def flush_denormal(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Settings that the caller may have asked of torch must not change a bit."""
    flushes: bool = request.param
    if not torch.set_flush_denormal(flushes):
        pytest.skip("this machine cannot flush subnormals")
    yield flushes
    torch.set_flush_denormal(False)


@pytest.fixture
def no_refit_caches() -> Iterator[None]:
    """Nothing that refits of other tests have kept."""
    refit.clear_all_caches()
    yield
    refit.clear_all_caches()


@pytest.fixture
def plans_made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Plans that `count_plans` counts."""
    return count_plans(monkeypatch)
