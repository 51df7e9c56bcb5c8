"""Ranks laid out on several nodes of this machine, for tests."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch.distributed as dist

from moe_comm import Communicator
from moe_comm.peers.bootstrap import Bootstrap, bootstrap_for
from moe_comm.testing import RankContext
from moe_comm.testing.target import Target


def connect(
    group: dist.ProcessGroup | Bootstrap | None, most_local_ranks: int, rail: str
) -> Communicator:
    num_ranks = bootstrap_for(group).num_ranks
    return Communicator(
        group,
        backend="host",
        num_local_ranks=math.gcd(num_ranks, most_local_ranks),
        rail=rail if num_ranks > math.gcd(num_ranks, most_local_ranks) else "auto",
        check_messages=most_local_ranks == 1,
    )


def target(most_local_ranks: int, rail: str) -> Target:
    """The host backend; so many ranks share a node, or the largest divisor of both where they cannot.

    Messages between nodes of one rank are checked.
    """
    return Target(
        name="host",
        connect=functools.partial(connect, most_local_ranks=most_local_ranks, rail=rail),
    )


def launched(context: RankContext, num_local_ranks: int, fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn` as torchrun would with so many processes a node: communicators find that out."""
    told = {
        "RANK": context.rank_idx,
        "WORLD_SIZE": context.num_ranks,
        "LOCAL_WORLD_SIZE": num_local_ranks,
    }
    with mock.patch.dict(os.environ, {name: str(value) for name, value in told.items()}):  # noqa: TID251
        return fn(context, *args)
