"""Fixtures that tests of one process share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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
def no_refit_caches() -> Iterator[None]:
    """Nothing that refits of other tests have kept."""
    refit.clear_all_caches()
    yield
    refit.clear_all_caches()


@pytest.fixture
def plans_made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Plans that `count_plans` counts."""
    return count_plans(monkeypatch)
