"""One rank of any benchmark: its processes' meeting place, its clock, and its end."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from moe_comm.cli.bench.barrier import SpinBarrier, bind_to_core
from moe_comm.cli.bench.statistics import Interval
from moe_comm.peers.bootstrap import Bootstrap


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One operation on one rank, between two roofs (None where there is no roof)."""

    op: Interval
    roof_before: Interval | None
    roof_after: Interval | None


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done what this thread asked for; CPU operations are done when they return.

    Not until the whole device is idle: where ranks are threads, kernels of other ranks may wait for
    what this one does next.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class RankWorker:
    """One rank; every method is called on all ranks in the same order.

    Args:
        num_ranks: Ranks.
        folder: Files for rendezvous and barrier.
        rank_idx: This rank.
        is_pinned: Whether it is bound to one core.
        group: Group of ranks that are threads; None for a process, which makes a process group.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        num_ranks: int,
        folder: Path,
        rank_idx: int,
        *,
        is_pinned: bool = False,
        group: Bootstrap | None = None,
    ) -> None:
        # Rows are moved by the communicator's threads; torch's own would compete for the cores.
        torch.set_num_threads(1)
        if is_pinned:
            bind_to_core(rank_idx)
        self.rank_idx = rank_idx
        self._has_process_group = group is None
        if group is None:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder / 'rendezvous'}",
                rank=rank_idx,
                world_size=num_ranks,
            )
        self.barrier = SpinBarrier(folder / "barrier", rank_idx, num_ranks)

    def close(self) -> None:
        """Leave in good order."""
        if self._has_process_group:
            dist.destroy_process_group()

    def _timed(self, call: Callable[[], object]) -> Interval:
        synchronize(self.device)
        self.barrier.wait()
        start = time.perf_counter_ns()
        call()
        synchronize(self.device)
        return start, time.perf_counter_ns()
