"""One transfer between ranks: what kind it is, and how it is started and waited for."""

from __future__ import annotations

import contextlib
import datetime as dt
import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from moe_comm.errors import PeerFailedError, PeerTimeoutError, has_timed_out
from moe_comm.resharding.ir import groups
from moe_comm.tensors.memory import bytes_of


class TransferType(enum.Enum):
    """Kind of a transfer, by the ranks that take part."""

    SELF_COPY = "self_copy"
    """Source and target are one rank."""
    P2P = "p2p"
    """One other rank receives."""
    BROADCAST = "broadcast"
    """Several other ranks receive."""
    SHADOW = "shadow"
    """Nobody receives: this rank only takes part in the reduction of a cell that another ships."""


def type_of(num_receivers: int) -> TransferType:
    """Return the type of a transfer to so many ranks."""
    return (TransferType.SHADOW, TransferType.P2P, TransferType.BROADCAST)[min(num_receivers, 2)]


@dataclass(slots=True, kw_only=True)
class Transferable:
    """Base of chunks and buckets. Ranks are those of `group`.

    Args:
        transfer_type: Kind of the transfer.
        is_source: Whether this rank sends, reduces or copies to itself; False: it receives.
        src_rank: Rank that holds the data.
        dst_ranks: Ranks that receive it, ascending; empty for SHADOW.
        buffer: Contiguous memory that is sent, or received into.
        work: The transfer under way.
        group: Process group; None for the default group.
    """

    transfer_type: TransferType
    is_source: bool
    src_rank: int
    dst_ranks: tuple[int, ...]
    buffer: torch.Tensor | None = None
    work: dist.Work | None = None
    group: dist.ProcessGroup | None = None

    def execute(self) -> dist.Work | None:
        """Start the transfer of `buffer`.

        A broadcast for which `m2m_to_chunks` has made no process group is sent to one after the other.

        Returns:
            Work to wait for; None where nothing travels: SELF_COPY, SHADOW, an empty buffer.

        Raises:
            PeerFailedError, PeerTimeoutError: It could not be started; the message names the ranks.
            RuntimeError: There is no buffer: `prepare` was not called.
        """
        if self.transfer_type in (TransferType.SELF_COPY, TransferType.SHADOW):
            return None
        if self.buffer is None:
            raise RuntimeError(f"{self.describe()} was executed before it was prepared")
        if self.buffer.numel() == 0:
            return None
        # Backends do not know every dtype.
        payload = bytes_of(self.buffer.contiguous())
        if not self.is_source:
            increment_version(self.buffer)  # torch.distributed does not count what it writes
        with self.naming("start"):
            if self.transfer_type is TransferType.BROADCAST:
                ranks = tuple(sorted((self.src_rank, *self.dst_ranks)))
                subgroup = groups.find_subgroup(self.group, ranks)
                if subgroup is not None:
                    work: dist.Work | None = dist.broadcast(
                        payload,
                        group=subgroup,
                        group_src=ranks.index(self.src_rank),
                        async_op=True,
                    )
                    return work
            if not self.is_source:
                return dist.irecv(payload, group=self.group, group_src=self.src_rank)
            sends = [dist.isend(payload, group=self.group, group_dst=dst) for dst in self.dst_ranks]
            return sends[0] if len(sends) == 1 else _Sends(sends)

    def wait(self) -> None:
        """Wait for the transfer under way, if there is one.

        Raises:
            PeerFailedError, PeerTimeoutError: It failed; the message names the ranks.
        """
        if self.work is not None:
            with self.naming("end"):
                self.work.wait()
            self.work = None

    def describe(self) -> str:
        """Describe the sender, the data and the receivers, in a few words."""
        if self.transfer_type is TransferType.SHADOW:
            return f"the reduction of a cell on rank {self.src_rank}"
        to = "itself" if self.transfer_type is TransferType.SELF_COPY else f"ranks {self.dst_ranks}"
        return f"the transfer from rank {self.src_rank} to {to}"

    @contextlib.contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """Turn an error of the communication library into one that names this transfer.

        Args:
            what: Action that failed: "start", "end", "reduce".
        """
        try:
            yield
        except (PeerFailedError, PeerTimeoutError):
            raise
        except RuntimeError as error:
            kind = PeerTimeoutError if has_timed_out(error) else PeerFailedError
            peers = self.dst_ranks if self.is_source else (self.src_rank,)
            raise kind(
                f"{self.describe()} did not {what}: {error}",
                ranks=peers,
                operation="reshard",
                phase="data",
            ) from error


class _Sends(dist.Work):
    """Sends of one buffer, as one piece of work."""

    def __init__(self, sends: Sequence[dist.Work | None]) -> None:
        super().__init__()
        self._sends = [send for send in sends if send is not None]

    def wait(self, timeout: dt.timedelta | None = None) -> bool:
        """Wait for all, each for its group's timeout unless told otherwise."""
        for send in self._sends:
            if timeout is None:
                send.wait()
            else:
                send.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Return whether all have ended."""
        return all(send.is_completed() for send in self._sends)
