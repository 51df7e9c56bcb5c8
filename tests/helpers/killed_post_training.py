"""`examples/post_training.py` with trainers that die in the middle of a refit.

python -m tests.helpers.killed_post_training ARGUMENTS

Trainer 1 dies in its third refit, when its part has moved and nobody has been told so. Of the trainers
that are started anew, trainer 0 dies in its second, before its part moves: vLLM has an update open then.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from moe_comm.resharding.hold.refit import Refit

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import post_training

_run_trainer = post_training.run_trainer
# By attempt: the trainer, its refit, and whether its part has moved.
DEATHS = {0: (1, 3, True), 1: (0, 2, False)}


def run_trainer(settings: Any, rank: int, info: Any, first: int, attempt: int, report: Any) -> None:
    """A trainer that dies where it is its turn."""
    victim, number, has_moved = DEATHS.get(attempt, (-1, 0, False))
    refit, calls = Refit.run, []

    def run(self: Refit, **arguments: Any) -> None:
        calls.append(self)
        is_last = rank == victim and len(calls) == number
        if is_last and not has_moved:
            os.kill(os.getpid(), signal.SIGKILL)
        refit(self, **arguments)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(Refit, "run", run):
        _run_trainer(settings, rank, info, first, attempt, report)


if __name__ == "__main__":
    post_training.run_trainer = run_trainer
    sys.exit(post_training.main())
