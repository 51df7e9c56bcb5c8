"""One rank in a network namespace: `python -m tests.helpers.namespace_ranks JOB.json RANK`.

Writes its `Outcome` as JSON beside the job, by rename, so that it is there whole or not at all.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_comm import Communicator, EpBuffer, errors
from moe_comm.testing import RankContext
from moe_comm.testing.cases import Case
from moe_comm.testing.scripts import run_case
from moe_comm.testing.target import Target
from tests.helpers import failing_ranks

HANG_S = 240.0
"""Limit for what should take seconds; only a hang reaches it."""


@dataclasses.dataclass(frozen=True)
class Job:
    """Orders for all ranks.

    Args:
        num_ranks: Ranks.
        num_hosts: Namespaces; equally many ranks in each.
        address: Address of rank 0.
        rail: Rail of the communicator.
        task: "conform" or "until_error".
        stall_timeout_s: Stall timeout of the communicator, in seconds.
    """

    num_ranks: int
    num_hosts: int
    address: str
    rail: str
    task: str
    stall_timeout_s: float = 30.0
    port: int = 29611


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Observations of a rank.

    Args:
        faults: Descriptions of what was wrong.
        error: Name of the exception class that ended an operation.
        message: Text of the exception.
        ranks: Ranks that it names.
        raised_at: CLOCK_MONOTONIC when it was raised.
        left_at: CLOCK_MONOTONIC after everything was destroyed.
    """

    faults: list[str] = dataclasses.field(default_factory=list)
    error: str = ""
    message: str = ""
    ranks: tuple[int, ...] = ()
    raised_at: float = 0.0
    left_at: float = 0.0


def outcome_path(folder: Path, rank_idx: int) -> Path:
    return folder / f"rank{rank_idx}.json"


def started_path(folder: Path, rank_idx: int) -> Path:
    """Exists once a rank has done some steps."""
    return folder / f"rank{rank_idx}.started"


def connect(job: Job, **options: Any) -> Communicator:
    communicator = Communicator(
        None,
        backend="host",
        rail=job.rail,
        stall_timeout_s=job.stall_timeout_s,
        arrival_timeout_s=3 * job.stall_timeout_s,
        **options,
    )
    # Found from the machines, of which a namespace is one.
    assert communicator.num_local_ranks == job.num_ranks // job.num_hosts
    return communicator


def conform(job: Job, rank_idx: int, folder: Path) -> Outcome:
    faults: list[str] = []
    context = RankContext(rank_idx, job.num_ranks, None)
    target = Target(name="host", connect=lambda _: connect(job))
    for name, fields in {
        "plain": {"dtype": torch.bfloat16},
        "wide rows": {"dtype": torch.float32, "hidden": 1500},
    }.items():
        case = Case(
            name=name,
            num_ranks=job.num_ranks,
            num_tokens=(40, 0, 75, 13, 5, 60)[: job.num_ranks],
            num_experts=2 * job.num_ranks + 1,
            num_topk=4,
            **fields,  # type: ignore[arg-type]
        )
        faults += run_case(context, target, case)
    return Outcome(faults)


def until_error(job: Job, rank_idx: int, folder: Path) -> Outcome:
    """Steps of some size until one raises; then everything is destroyed."""
    communicator = connect(job)
    config = failing_ranks.config_for(job.num_ranks, num_tokens=256, hidden=2048)
    buffer = EpBuffer(communicator, config)
    for seed in range(3):
        failing_ranks.step(buffer, seed)
    started_path(folder, rank_idx).touch()
    error, raised_at = failing_ranks.steps_until_error(buffer, HANG_S)
    ranks = error.ranks if isinstance(error, errors.CommunicationError) else ()
    communicator.destroy()
    return Outcome([], type(error).__name__, str(error), tuple(ranks), raised_at, time.monotonic())


def main(job_file: str, rank: str) -> None:
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    torch.set_num_threads(1)
    folder = Path(job_file).parent
    job, rank_idx = Job(**json.loads(Path(job_file).read_text())), int(rank)
    store = dist.TCPStore(
        job.address, job.port, job.num_ranks, rank_idx == 0, timedelta(seconds=HANG_S)
    )
    dist.init_process_group("gloo", store=store, rank=rank_idx, world_size=job.num_ranks)
    try:
        outcome = {"conform": conform, "until_error": until_error}[job.task](job, rank_idx, folder)
    except Exception:  # noqa: BLE001 - the test shows it
        outcome = Outcome([traceback.format_exc()])
    path = outcome_path(folder, rank_idx)
    path.with_suffix(".part").write_text(json.dumps(dataclasses.asdict(outcome)))
    path.with_suffix(".part").rename(path)
    # Threads of Gloo that outlive Python would abort the process now and then.
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
