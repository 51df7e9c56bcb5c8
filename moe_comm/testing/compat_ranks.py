"""Ranks for which `moe_comm.compat` provides what it provides here."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

from moe_comm import compat
from moe_comm.testing.launch import RankContext, run_ranks

ResultT = TypeVar("ResultT")


def run_ranks_alike(
    fn: Callable[..., ResultT],
    num_ranks: int,
    *args: Any,
    mode: str = "processes",
    **options: Any,
) -> list[ResultT]:
    """`run_ranks`, whose processes have the modules that `compat.install` has put in place in this one.

    They have them before the module of `fn` is imported, and no longer than the call takes.
    """
    names = compat.installed()
    if mode != "processes" or not names:
        return run_ranks(fn, num_ranks, *args, mode=mode, **options)
    call = pickle.dumps((fn, args))
    return run_ranks(_call_with, num_ranks, names, call, mode=mode, **options)


def _call_with(context: RankContext, names: tuple[str, ...], call: bytes) -> Any:
    new = [name for name in names if name not in compat.installed()]
    for name in new:
        compat.install(name, replace=True)
    try:
        fn, args = pickle.loads(call)  # imports its module, which may import one of these names
        return fn(context, *args)
    finally:
        for name in new:
            compat.uninstall(name)
