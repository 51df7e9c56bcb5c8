"""The main function of a rank's process: calls methods of a worker when the parent asks."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["serve_worker"]


def serve_worker(make_worker: Callable[[], Any], pipe: Connection) -> None:
    """Serve (method, arguments) from `pipe` until "close"; answers are ("ok", value) or ("error", text)."""
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
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
        raise
