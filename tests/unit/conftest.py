"""What tests of one process share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moe_comm import Communicator
from moe_comm.peers.bootstrap import RankThreads


@pytest.fixture(scope="module")
def communicator() -> Iterator[Communicator]:
    """Of one rank, for all tests of a module."""
    with Communicator(RankThreads(1)[0]) as made:
        yield made
