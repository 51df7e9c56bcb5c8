"""The main functions of ranks' processes: they call methods of a worker when the parent asks."""

from __future__ import annotations

import functools
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from moe_comm.peers.bootstrap import Bootstrap, RankThreads

# Errors that users and their machines cause; for any other the place is told.
EXPECTED_ERRORS = (ValueError, RuntimeError, OSError, MemoryError, ImportError)


def serve_worker(make_worker: Callable[[], Any], pipe: Connection) -> None:
    """Serve (method, arguments) from `pipe` until "close"; answers are ("ok", value) or ("error", text).

    The text is the message of an error that says what is wrong, else a traceback.
    """
    try:
        worker = make_worker()
        pipe.send(("ok", None))
        method = ""
        while method != "close":
            method, arguments = pipe.recv()
            pipe.send(("ok", getattr(worker, method)(*arguments)))
    except EOFError:
        # The parent is gone, nobody waits for an answer.
        return
    except KeyboardInterrupt:
        # The terminal has interrupted the parent too, which ends its ranks.
        raise SystemExit(1) from None
    except EXPECTED_ERRORS as error:
        pipe.send(("error", str(error) or type(error).__name__))
        raise SystemExit(1) from None
    except Exception:  # noqa: BLE001 - the parent prints it
        pipe.send(("error", f"\n{traceback.format_exc()}"))
        raise SystemExit(1) from None


def serve_threads(
    make_worker: Callable[[int, Bootstrap], Any], pipes: Sequence[Connection]
) -> None:
    """`serve_worker` in a thread for every rank; `make_worker` gets the rank and its bootstrap."""
    ranks = RankThreads(len(pipes))

    def serve(rank_idx: int) -> None:
        try:
            serve_worker(functools.partial(make_worker, rank_idx, ranks[rank_idx]), pipes[rank_idx])
        except SystemExit:
            ranks.abort()  # the parent has been told why; others must not wait for this rank

    threads = [
        # Threads that hang must not keep a process that its parent has given up.
        threading.Thread(target=serve, args=(rank_idx,), name=f"rank {rank_idx}", daemon=True)
        for rank_idx in range(len(pipes))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
