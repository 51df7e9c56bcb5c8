"""A communicator that loses ranks and gains others while the processes that live go on.

Both end in a new communicator over new sockets and a new heap, made by the ordinary constructor over
the sockets of the old one. So a rank that was declared failed and lives can write into nothing that
the others go on to use. The idea of survivors who agree on the failed and rebuild is that of MPI's
user-level failure mitigation (Bland et al., 2013).
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Generic

import torch

from moe_comm.arguments import as_int, shown
from moe_comm.errors import PeerFailedError
from moe_comm.peers import missed_calls
from moe_comm.peers.agree import FirstError
from moe_comm.peers.bootstrap import Bootstrap
from moe_comm.peers.joining_ranks import InvitingRank, JoiningRank, JoiningRanks, open_store
from moe_comm.peers.missed_calls import tells_peers
from moe_comm.peers.peer_timeouts import CONNECT_TIMEOUT_S
from moe_comm.peers.survivors import (
    CommunicatorT,
    Decision,
    SocketRanks,
    Survivors,
    check_failed_ranks,
    failed_text,
    largest_node_size,
    make_grown,
    meet,
    rebuild,
)

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store
    from typing_extensions import Self

    from moe_comm import _host


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shrunk(Generic[CommunicatorT]):
    """Result of a shrink, with which the survivors go on.

    Args:
        communicator: Communicator of the survivors, numbered in their old order.
        failed_ranks: Old numbers of the ranks that are no part of it: those that a survivor reported
            or knows to have died or left.
        completed_epochs: Last epoch that completed on every survivor, by buffer or batched copy of the
            old communicator in the order they were made; -1 for none.
        former_ranks: Old number of every rank of `communicator`.
    """

    communicator: CommunicatorT
    failed_ranks: tuple[int, ...]
    completed_epochs: tuple[int, ...]
    former_ranks: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grown(Generic[CommunicatorT]):
    """Result of a growth, with which all ranks go on, those that were there and those that joined.

    Args:
        communicator: Communicator of all of them.
        former_ranks: Old number of every rank of `communicator`, -1 for those that joined.
        new_ranks: Numbers in `communicator` of those that joined, ascending.
    """

    communicator: CommunicatorT
    former_ranks: tuple[int, ...]
    new_ranks: tuple[int, ...]


def _refuse_to_shrink(error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell peers, who are in `shrink`."""
    args[0].require_native().shrink_agree([], "shrink", "", str(error), True)


class ElasticRanks:
    """Half of a `Communicator` that makes another one when ranks are lost or come."""

    # Attributes of the communicator.
    bootstrap: Bootstrap
    rank_idx: int
    num_ranks: int
    num_local_ranks: int
    device: torch.device
    backend: str
    stall_timeout_s: float
    arrival_timeout_s: float
    check_messages: bool
    require_native: Callable[[], _host.Group]
    check_process: Callable[[str], None]
    destroy: Callable[[], None]
    all_gather: Callable[[bytes], list[bytes]]
    _options: dict[str, Any]
    _closed_by: str
    # By rank, the node it was on before nodes were broken up because ranks of them had failed.
    _home_nodes: tuple[int, ...]

    if TYPE_CHECKING:

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def _successor(self, bootstrap: Bootstrap, num_local_ranks: int | None) -> Self:
        """The communicator that its ranks go on with. Collective over them."""
        return type(self)(
            bootstrap, self.device, None, num_local_ranks, backend=self.backend, **self._options
        )

    def _close(self, closed_by: str) -> None:
        self._closed_by = closed_by
        self.destroy()

    @property
    def end_text(self) -> str:
        """Why a communicator that has been destroyed can be used no more."""
        if self._closed_by:
            return f"the communicator was closed by {self._closed_by}; use the one that it returned"
        return "the communicator has been destroyed"

    @property
    def buffer_end_text(self) -> str:
        """Why a buffer that has been destroyed can be used no more."""
        if self._closed_by:
            return f"this EpBuffer has been destroyed: {self.end_text}"
        return "this EpBuffer has been destroyed"

    @tells_peers(_refuse_to_shrink)
    def shrink(
        self,
        failed_ranks: Iterable[int] = (),
        *,
        num_local_ranks: int | None = None,
        require_majority: bool = True,
    ) -> Shrunk[Self]:
        """Go on with the survivors, in a new communicator. Collective over the survivors.

        The survivors agree over the communicator's own sockets on which ranks have failed: every rank that one
        of them reports or knows to have died or left. Further deaths meanwhile make the set larger.
        Operations that still run are brought to an end, as by `recover`. Then they make a new
        communicator over new sockets and a new heap, with the arguments of this one but for `rail`
        (sockets), and this one is closed with its buffers and children; tensors handed out stay valid,
        and its memory goes back as they die. A reported rank that lives gets `EvictedError` from its
        next call and can write into nothing that the survivors go on to use.

        Args:
            failed_ranks: Ranks to leave behind, such as `error.ranks`; survivors may report different
                ones. The dead need not be named.
            num_local_ranks: Ranks of a node of the new communicator; None for one node if this one
                has one, else for the most that leave old nodes whole or divide them: those before
                the first of several shrinks.
            require_majority: Go on only if the survivors are more than half of the ranks that are not
                known to have ended, or half of them with the lowest: so never two groups go on. A rank
                of another node that answers no more may live. False: the caller knows better.

        Returns:
            The communicator, which ranks have failed, and the last epochs that completed on all survivors.

        Raises:
            EvictedError: Another rank declares this one failed.
            PeerFailedError: The survivors are too few to know that they are the only ones.
            PeerTimeoutError: A living rank did not call in `arrival_timeout_s`, or stopped on the way:
                call again, with it among `failed_ranks`.
            ValueError: An argument is wrong on some rank, or they differ; the communicator stays as it
                is.
        """
        native = self.require_native()
        missed_calls.take()  # peers have left them
        reported: list[int] = []
        agreed = ""
        with FirstError() as first:
            reported = check_failed_ranks(failed_ranks, self.rank_idx, self.num_ranks)
            if not isinstance(require_majority, bool):
                raise TypeError(f"require_majority must be a bool, got {shown(require_majority)}")
            if num_local_ranks is not None:
                num_local_ranks = as_int("num_local_ranks", num_local_ranks, 1)
            agreed = f"num_local_ranks={num_local_ranks!r}, require_majority={require_majority!r}"
        found = native.shrink_agree(
            *(reported, "shrink", agreed, first.take_line() or "", require_majority is not False)
        )

        def make(decision: Decision) -> Any:  # Self, which a nested function cannot return
            size = num_local_ranks
            home_nodes = tuple(self._home_nodes[rank] for rank in decision.survivors)
            if size is None and len(set(self._home_nodes)) > 1:
                size = largest_node_size(home_nodes)
            communicator = self._successor(Survivors(native, decision), num_local_ranks=size)
            if num_local_ranks is None:
                communicator._home_nodes = home_nodes
            return communicator

        communicator: Self
        communicator, decision = rebuild(native, Decision(*(tuple(part) for part in found)), make)
        communicator.bootstrap = SocketRanks(communicator.require_native())
        self._close("shrink()")
        return Shrunk(
            communicator=communicator,
            failed_ranks=decision.failed_ranks,
            completed_epochs=decision.completed_epochs,
            former_ranks=decision.survivors,
        )

    def grow(
        self,
        rendezvous: Store | str,
        num_new_ranks: int = 1,
        *,
        num_local_ranks: int | None = None,
        timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> Grown[Self]:
        """Go on with processes that `join`, in a new communicator. Collective over the living.

        Either all living ranks return with the new communicator, and this one is closed as by
        `shrink`; or all of them raise, and this one goes on. No process group is needed.

        Args:
            rendezvous: A torch.distributed store that rank 0 and those that join reach, such as a
                `TCPStore`; or "host:port", where rank 0 listens for the time of the call: at an
                address of its machine, and no other.
            num_new_ranks: Number of processes that join, >= 1.
            num_local_ranks: Ranks of a node of the new communicator; None for those of this one if
                it has several nodes, else for what the machines tell.
            timeout_s: Limit for their coming, and for each step after it.

        Raises:
            PeerFailedError: A living rank has failed (shrink first), or one that joins failed.
            PeerTimeoutError: Too few came in time.
            ValueError: An argument is wrong on some rank, or they differ; or ranks that join ask for
                numbers that cannot be.
        """
        self.check_process("grow")
        native = self.require_native()
        host: InvitingRank | None = None
        with FirstError() as first:
            if operator.index(num_new_ranks) < 1:
                raise ValueError(f"num_new_ranks must be >= 1, got {num_new_ranks}")
            if not timeout_s > 0.0:
                raise ValueError(f"timeout_s must be > 0, got {timeout_s}")
            if self.rank_idx == 0:
                host = InvitingRank(open_store(rendezvous, True, timeout_s), num_new_ranks)
        problem = "" if first.error is None else f"grow: {first.take_line()}"
        agreed = f"num_new_ranks={num_new_ranks!r}, num_local_ranks={num_local_ranks!r}"
        failed_ranks, _, _ = native.shrink_agree([], "grow", agreed, problem, True)
        if failed_ranks:
            text = failed_text(failed_ranks)
            native.shrink_refuse(text, False)
            raise PeerFailedError(text, ranks=failed_ranks, operation="grow")
        size = num_local_ranks
        if size is None and self.num_local_ranks < self.num_ranks:
            size = self.num_local_ranks
        options = {
            "num_local_ranks": size,
            "backend": self.backend,
            "check_messages": self.check_messages,
        }
        timeouts = {
            "stall_timeout_s": self.stall_timeout_s,
            "arrival_timeout_s": self.arrival_timeout_s,
        }

        def make(joining: JoiningRanks) -> Any:
            made = self._successor(joining, num_local_ranks=size)
            meet(made)
            return made

        joining = JoiningRanks(native, host, timeout_s)
        communicator: Self = make_grown(native, joining, {**options, **timeouts}, make)
        communicator.bootstrap = SocketRanks(communicator.require_native())
        self._close("grow()")
        return Grown(
            communicator=communicator,
            former_ranks=joining.former_ranks,
            new_ranks=joining.new_ranks,
        )

    @classmethod
    def join(
        cls,
        rendezvous: Store | str,
        *,
        rank_idx: int | None = None,
        timeout_s: float = CONNECT_TIMEOUT_S,
        device: str | torch.device = "cpu",
        max_heap_bytes: int | None = None,
        num_threads: int | None = None,
        with_huge_pages: bool = True,
        num_sms: int | None = None,
    ) -> Grown[Self]:
        """Become a rank of a communicator whose ranks call `grow`. Needs no process group.

        Args:
            rendezvous: As in `grow`.
            rank_idx: Number to have in the grown communicator, such as the one this process had
                before; None for one of the last.
            timeout_s: Limit for being called by `grow`.
            device: As of the constructor; backend, nodes, time limits and `check_messages` are those of
                the living.
            max_heap_bytes: As of the constructor.
            num_threads: As of the constructor.
            with_huge_pages: As of the constructor.
            num_sms: As of the constructor.

        Raises:
            PeerFailedError: A rank failed while the communicator was made.
            PeerTimeoutError: Nobody called `grow` in time.
            ValueError: The living refused, because of `rank_idx` or another argument; or `rank_idx` or
                `timeout_s` can never be.
        """
        if rank_idx is not None:
            rank_idx = operator.index(rank_idx)
            if rank_idx < 0:
                raise ValueError(f"rank_idx must be >= 0, got {rank_idx}")
        if not timeout_s > 0.0:
            raise ValueError(f"timeout_s must be > 0, got {timeout_s}")
        joining = JoiningRank(open_store(rendezvous, False, timeout_s), rank_idx, timeout_s)
        invitation = joining.invitation
        try:
            communicator = cls(
                joining,
                device,
                max_heap_bytes=max_heap_bytes,
                num_threads=num_threads,
                with_huge_pages=with_huge_pages,
                num_sms=num_sms,
                **invitation.options,
            )
        except BaseException as error:
            joining.give_up(error)
            raise
        meet(communicator, joining.give_up)
        communicator.bootstrap = SocketRanks(communicator.require_native())
        new_ranks = [rank for rank, former in enumerate(invitation.former_ranks) if former < 0]
        return Grown(
            communicator=communicator,
            former_ranks=invitation.former_ranks,
            new_ranks=tuple(new_ranks),
        )
