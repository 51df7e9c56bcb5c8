"""Ranks as threads of the test, for what needs a communicator but no processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import moe_comm
from moe_comm.peers.bootstrap import ThreadRank
from moe_comm.testing import RankContext, RankError, run_ranks
from tests.helpers.failing_ranks import HANG_S

T = TypeVar("T")


def on_ranks(num_ranks: int, body: Callable[[moe_comm.Communicator], T], **options: Any) -> list[T]:
    """Results of `body` on each rank; where several raise, the error that came first.

    Args:
        num_ranks: Threads.
        body: Gets the rank's communicator.
        **options: Of the communicator; the backend is "host" where they name none.
    """
    failures: list[BaseException] = []

    def be_rank(context: RankContext) -> T:
        with moe_comm.Communicator(context.group, **{"backend": "host", **options}) as comm:
            try:
                result = body(comm)
                assert isinstance(comm.bootstrap, ThreadRank)
                comm.bootstrap.arrival_timeout_s = HANG_S  # others may be waiting out their own
                comm.bootstrap.all_gather(None)  # nobody leaves while others compare
            except BaseException as error:
                failures.append(error)
                raise
            return result

    try:
        return run_ranks(be_rank, num_ranks, mode="threads")
    except RankError as error:
        first = failures[0] if failures else error.__cause__
    assert first is not None
    raise first
