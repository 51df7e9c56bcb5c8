"""Ranks as threads of the test, for what needs a communicator but no processes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import moe_comm

T = TypeVar("T")


def on_ranks(num_ranks: int, body: Callable[[moe_comm.Communicator], T], **options: Any) -> list[T]:
    """What `body` gives on each rank; where several raise, the error that came first.

    Args:
        num_ranks: Threads.
        body: Gets the rank's communicator.
        **options: Of the communicator; the backend is "host" where they name none.
    """
    ranks = moe_comm.RankThreads(num_ranks)
    failures: list[BaseException] = []

    def be_rank(rank_idx: int) -> T:
        with moe_comm.Communicator(ranks[rank_idx], **{"backend": "host", **options}) as comm:
            try:
                result = body(comm)
                comm.bootstrap.all_gather(None)  # nobody leaves while others compare
            except BaseException as error:
                failures.append(error)
                ranks.abort()
                raise
            return result

    with ThreadPoolExecutor(num_ranks) as pool:
        futures = [pool.submit(be_rank, rank_idx) for rank_idx in range(num_ranks)]
        errors = [error for future in futures if (error := future.exception()) is not None]
    for error in failures + errors:
        raise error
    return [future.result() for future in futures]
