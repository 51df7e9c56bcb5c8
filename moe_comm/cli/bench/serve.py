"""The main function of a rank's process: calls methods of a worker when the parent asks."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["serve_worker"]

# What users cause, and their machines: of anything else the place is told.
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
