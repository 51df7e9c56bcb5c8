"""One rank of the MPI pipeline; mpiexec starts it as `python -m moe_comm.cli.bench.peers.mpi_worker`."""

from __future__ import annotations

import pickle
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from moe_comm.cli.bench.barrier import SpinBarrier, bind_to_core
from moe_comm.cli.bench.case import BenchCase
from moe_comm.cli.bench.peers.mpi_control import ControlFile
from moe_comm.cli.bench.peers.runner import PipelineRunner


class MpiTransport:
    """`MPI_Alltoallv` of rows as one derived datatype, so that counts stay below 2^31."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi: Any = MPI
        self.communicator: Any = MPI.COMM_WORLD
        self._row_types: dict[int, Any] = {}

    def __call__(
        self,
        recv: torch.Tensor,
        send: torch.Tensor,
        recv_counts: Sequence[int],
        send_counts: Sequence[int],
    ) -> None:
        """Rows to every rank and from every rank, see `Transport`."""
        row_type = self._row_type(int(send.shape[1]))
        self.communicator.Alltoallv(
            [send.numpy(), (list(send_counts), _starts(send_counts)), row_type],
            [recv.numpy(), (list(recv_counts), _starts(recv_counts)), row_type],
        )

    def _row_type(self, num_words: int) -> Any:
        if num_words not in self._row_types:
            row_type = self._mpi.INT64_T.Create_contiguous(num_words)
            row_type.Commit()
            self._row_types[num_words] = row_type
        return self._row_types[num_words]


def _starts(counts: Sequence[int]) -> list[int]:
    starts = [0]
    for count in counts[:-1]:
        starts.append(starts[-1] + count)
    return starts


def main(case_file: str, control_file: str, barrier_file: str, binding: str) -> None:
    """Serve commands until told to stop."""
    torch.set_num_threads(1)
    case: BenchCase = pickle.loads(Path(case_file).read_bytes())
    transport = MpiTransport()
    rank_idx = int(transport.communicator.Get_rank())
    if binding == "pinned":
        bind_to_core(rank_idx)
    control = ControlFile(Path(control_file), case.num_ranks)
    barrier = SpinBarrier(Path(barrier_file), rank_idx, case.num_ranks)
    try:
        size = int(transport.communicator.Get_size())
        if size != case.num_ranks:
            raise RuntimeError(f"MPI_COMM_WORLD must have {case.num_ranks} ranks, got {size}")
        runner = PipelineRunner(case, rank_idx, transport, barrier)
        number = 0
        while True:
            number, command, num_iterations = control.next_command(number)
            if command == "stop":
                break
            if command == "check":
                runner.check()
                control.answer(rank_idx, number, [])
            else:
                control.answer(rank_idx, number, runner.run(command, num_iterations))
    except BaseException:
        control.fail(rank_idx, traceback.format_exc())
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
