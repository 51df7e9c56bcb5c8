"""Probe whether this machine has an MPI that mpi4py and a launcher share."""

from __future__ import annotations

from moe_comm.cli.bench.peers.mpi_launcher import MpiNotFoundError, find_mpi


def why_no_mpi() -> str:
    """Empty where there is one."""
    try:
        find_mpi()
    except MpiNotFoundError as missing:
        return str(missing)
    return ""
