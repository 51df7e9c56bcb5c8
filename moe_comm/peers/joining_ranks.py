"""Rendezvous of a living communicator with processes that come to it: a torch.distributed store.

Only the lowest living rank and those that come touch the store; the living speak over their own
sockets. What is in the store is plain data (`plain_data`), which is parsed and checked.

Keys, below the prefix `moe_comm`: `tickets`, how many processes have come; `ticket/<i>`, what the i-th
asks for; `taken`, how many of them were called or given up; `call/<i>`, what it is told. Then, below a
random name: `up/<k>/<j>`, what the j-th says in the k-th exchange; `down/<k>`, what everybody said;
`over`, why nothing comes of it; `failed/<j>`, why nothing comes of the j-th.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from moe_comm.arguments import shown
from moe_comm.errors import PeerFailedError, PeerTimeoutError
from moe_comm.peers.agree import first_line
from moe_comm.peers.gather_objects import gather_objects
from moe_comm.peers.plain_data import decode_plain, encode_plain, travels

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from moe_comm import _host

POLL_S = 0.01
ResultT = TypeVar("ResultT")


# Arguments of `Communicator` that a process which comes takes from the living.
_OPTIONS = frozenset(
    {"num_local_ranks", "backend", "check_messages", "stall_timeout_s", "arrival_timeout_s"}
)


@travels
@dataclasses.dataclass(frozen=True, kw_only=True)
class Invitation:
    """Invitation to a process that comes.

    Args:
        prefix: Prefix of the keys of this growth.
        position: Index of the process among those that come.
        rank_idx: Its rank in the grown communicator.
        former_ranks: Old number of every rank, -1 for those that come.
        timeout_s: Limit for every exchange.
        options: Arguments of `Communicator` that are the living ranks'.

    Raises:
        ValueError: A value is none that a living rank writes.
    """

    prefix: str
    position: int
    rank_idx: int
    former_ranks: tuple[int, ...]
    timeout_s: float
    options: dict[str, Any]

    def __post_init__(self) -> None:
        num_ranks = len(self.former_ranks)
        if (
            not isinstance(self.prefix, str)
            or not isinstance(self.timeout_s, (int, float))
            or set(self.options) != _OPTIONS
            or not 0 <= self.position < num_ranks
            or not 0 <= self.rank_idx < num_ranks
            or self.former_ranks[self.rank_idx] != -1
        ):
            raise ValueError(f"{self} is no invitation")


def open_store(
    rendezvous: Store | str,
    is_host: bool,
    timeout_s: float,
    absent: str = "no living rank has called grow() there",
) -> Store:
    """The store behind a `rendezvous` argument: itself, or the one at "host:port".

    Args:
        rendezvous: The argument.
        is_host: Listen at the address.
        timeout_s: Limit for what waits in the store.
        absent: Reason why nobody may listen at the address.

    Raises:
        PeerTimeoutError: Nobody listens at the address.
        OSError: This process cannot listen at the address, which is none of its machine's or taken.
        TypeError: It is neither a store nor a string.
        ValueError: The string is no address.
    """
    if isinstance(rendezvous, str):
        host, colon, port = rendezvous.rpartition(":")
        if not colon or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ValueError(f'rendezvous must be a store or "host:port", got {rendezvous!r}')
        listener = _listener(host, int(port)) if is_host else None
        try:
            rendezvous = _tcp_store(host, int(port), timeout_s, listener)
        except dist.DistNetworkError as error:
            if is_host:
                raise
            raise PeerTimeoutError(
                f"join: nobody listens at {rendezvous} within {timeout_s} s: {absent} "
                f"({str(error).splitlines()[0]})",
                operation="join",
            ) from error
    if not isinstance(rendezvous, dist.Store):  # type: ignore[attr-defined]
        raise TypeError(
            f'rendezvous must be a torch.distributed store or "host:port", got '
            f"{type(rendezvous).__name__}"
        )
    return dist.PrefixStore("moe_comm", rendezvous)  # type: ignore[attr-defined]


def host_store(host: str, port: int, timeout_s: float) -> tuple[Store, int]:
    """A store that listens at an interface of this machine, and at no other.

    Args:
        host: Address of the interface.
        port: 0 for any that is free.
        timeout_s: Limit for what waits in the store.

    Returns:
        The store, and its port.

    Raises:
        OSError: This process cannot listen there.
    """
    listener = _listener(host, port)
    port = listener.getsockname()[1]
    store = _tcp_store(host, port, timeout_s, listener)
    return dist.PrefixStore("moe_comm", store), port  # type: ignore[attr-defined]


def _tcp_store(host: str, port: int, timeout_s: float, listener: socket.socket | None) -> Store:
    """The store at an address; with a listener this process hosts it."""
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        is_master=listener is not None,
        timeout=dt.timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _listener(host: str, port: int) -> socket.socket:
    """A socket bound to the named interface alone, where torch would take all of them."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return socket.create_server(found[0][4], family=found[0][0])
    except OSError as error:
        raise OSError(
            error.errno, f"rank 0 cannot listen at {host}:{port}: {error.strerror or error}"
        ) from error


def _set(store: Store, key: str, value: Any) -> None:
    store.set(key, encode_plain(value))  # type: ignore[arg-type]  # it takes bytes as well


def _get(store: Store, key: str, *kinds: type) -> Any:
    """Return the decoded value of a key.

    Raises:
        ValueError: It is no plain data, or of none of these types, where some are given.
    """
    value = decode_plain(bytes(store.get(key)), f"key {key!r} of the rendezvous")
    if kinds and type(value) not in kinds:
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"key {key!r} of the rendezvous: expected {expected}, got {shown(value)}")
    return value


def assign_ranks(
    num_living: int, wishes: Sequence[int | None]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The number of every living rank and of everyone who comes, in a communicator of all of them.

    Those that come get the number they ask for, else the last ones in the order they came; the living
    keep their order.

    Raises:
        ValueError: Two ask for the same number, or one for a number that there is not.

    Example:
        3 living ranks, and one asks for 1: `((0, 2, 3), (1,))`.
    """
    num_ranks = num_living + len(wishes)
    asked = [wish for wish in wishes if wish is not None]
    for wish in asked:
        if not 0 <= wish < num_ranks:
            raise ValueError(
                f"a rank that joins asks for rank_idx {wish} in a communicator of {num_ranks}"
            )
        if asked.count(wish) > 1:
            raise ValueError(f"{asked.count(wish)} ranks that join ask for rank_idx {wish}")
    free = [rank_idx for rank_idx in range(num_ranks) if rank_idx not in asked]
    rest = iter(free[num_living:])
    return tuple(free[:num_living]), tuple(next(rest) if wish is None else wish for wish in wishes)


class JoiningRank:
    """The bootstrap of a process that comes.

    Args:
        store: Store from `open_store`.
        wish: The rank it asks for, or None.
        timeout_s: Limit for being called.

    Raises:
        PeerTimeoutError: Nobody called in time.
        ValueError: The living ranks refused it.
    """

    def __init__(self, store: Store, wish: int | None, timeout_s: float) -> None:
        self._store = store
        self._num_gathers = 0
        self._timeout_s = timeout_s
        self._over = ""
        ticket = store.add("tickets", 1) - 1
        _set(store, f"ticket/{ticket}", wish)
        called = self._await(f"call/{ticket}", "call grow()", str, Invitation)
        if not isinstance(called, Invitation):
            raise ValueError(called)  # noqa: TRY004 - why the living refuse
        self.invitation = called
        self.rank_idx = self.invitation.rank_idx
        self.num_ranks = len(self.invitation.former_ranks)
        self._over = f"{self.invitation.prefix}/over"
        self._timeout_s = self.invitation.timeout_s

    def all_gather(self, item: Any) -> list[Any]:
        """Every rank's `item`, in rank order. Collective over the living and those that come."""
        prefix, position = self.invitation.prefix, self.invitation.position
        _set(self._store, f"{prefix}/up/{self._num_gathers}/{position}", item)
        items = self._await(f"{prefix}/down/{self._num_gathers}", "go on in grow()", list)
        self._num_gathers += 1
        if len(items) != self.num_ranks:
            raise ValueError(
                f"the rendezvous has what {len(items)} ranks say, expected {self.num_ranks}"
            )
        return list(items)

    def check(self) -> None:
        """Raise where the living have given up, for a caller that waits elsewhere for them. Local."""
        if self._over and self._store.check([self._over]):
            text = self._store.get(self._over).decode(errors="replace")
            raise PeerFailedError(f"join: {text}", operation="join")

    def give_up(self, error: BaseException) -> None:
        """Tell the living ranks why nothing comes of this process. Local."""
        invitation = self.invitation
        text = f"rank {self.rank_idx}, which joins: {first_line(error)}"
        with contextlib.suppress(Exception):  # the store ends with the call of the living
            self._store.set(f"{invitation.prefix}/failed/{invitation.position}", text)

    def _await(self, key: str, what: str, *kinds: type) -> Any:
        deadline = time.monotonic() + self._timeout_s
        while not self._store.check([key]):
            self.check()
            if time.monotonic() > deadline:
                raise PeerTimeoutError(
                    f"join: the living ranks did not {what} within {self._timeout_s} s",
                    operation="join",
                )
            time.sleep(POLL_S)
        return _get(self._store, key, *kinds)


class InvitingRank:
    """Actions of the lowest living rank at the store."""

    def __init__(self, store: Store, num_new_ranks: int) -> None:
        self._store = store
        self._num_new_ranks = num_new_ranks
        self._first = 0
        self._prefix = secrets.token_hex(16)

    def wishes(self) -> list[int | None] | None:
        """Return the wishes of those that came; None before all have come."""
        self._first = self._store.add("taken", 0)
        if self._store.add("tickets", 0) - self._first < self._num_new_ranks:
            return None
        keys = [f"ticket/{self._first + j}" for j in range(self._num_new_ranks)]
        if not self._store.check(keys):
            return None
        self._store.add("taken", self._num_new_ranks)
        return [_get(self._store, key, int, type(None)) for key in keys]

    @property
    def missing_text(self) -> str:
        """Text of how many processes have come, and how many should."""
        num_come = self._store.add("tickets", 0) - self._first
        return f"processes to join: {num_come} of {self._num_new_ranks} came"

    @property
    def prefix(self) -> str:
        """Prefix of the keys of this growth."""
        return self._prefix

    def call(self, position: int, invitation: Invitation | str) -> None:
        """Invite one of those that came, or tell it why not."""
        _set(self._store, f"call/{self._first + position}", invitation)

    def collect(self, gather_idx: int) -> list[Any] | None:
        """Return the objects that those that come sent in one exchange; None before all have."""
        keys = [f"{self._prefix}/up/{gather_idx}/{j}" for j in range(self._num_new_ranks)]
        if not self._store.check(keys):
            return None
        return [_get(self._store, key) for key in keys]

    def failure(self) -> str:
        """Why nothing comes of one of those that came; "" if there is no such one."""
        for j in range(self._num_new_ranks):
            key = f"{self._prefix}/failed/{j}"
            if self._store.check([key]):
                return self._store.get(key).decode(errors="replace")
        return ""

    def tell(self, gather_idx: int, items: list[Any]) -> None:
        """Say what everybody said."""
        _set(self._store, f"{self._prefix}/down/{gather_idx}", items)

    def end(self, text: str) -> None:
        """Say why nothing comes of it."""
        self._store.set(f"{self._prefix}/over", text)


class _JoinerFailed(Exception):  # noqa: N818 - told to all, and raised as what it is then
    """Failure of a process that joins."""


class JoiningRanks:
    """The bootstrap of a living rank: its old sockets, and the store behind the lowest one.

    Args:
        native: Native group of the old communicator, whose ranks have agreed to grow.
        host: Host of the growth, on the lowest living rank; else None.
        timeout_s: Limit for every exchange.
    """

    def __init__(self, native: _host.Group, host: InvitingRank | None, timeout_s: float) -> None:
        self.shrunk_group = native
        self.rank_idx = -1
        self.num_ranks = -1
        self.former_ranks: tuple[int, ...] = ()
        self._joined: tuple[int, ...] = ()  # in the order they came
        self._host = host
        self._timeout_s = timeout_s
        self._num_gathers = 0

    def invite(self, options: dict[str, Any]) -> None:
        """Wait for those that come, and give everybody a number. Collective over the living.

        Raises:
            PeerTimeoutError: Too few came in time, on every rank.
            ValueError: Processes that come ask for what cannot be; on every rank.
        """
        wishes: list[int | None] = self._in_step(
            lambda host: host.wishes(), lambda host: host.missing_text
        )
        num_living = self.shrunk_group.num_ranks
        try:
            living, self._joined = assign_ranks(num_living, wishes)
        except ValueError as error:
            if self._host is not None:
                for position in range(len(wishes)):
                    self._host.call(position, str(error))
            raise
        self.rank_idx = living[self.shrunk_group.rank_idx]
        self.num_ranks = num_living + len(wishes)
        self.former_ranks = tuple(
            living.index(rank_idx) if rank_idx in living else -1
            for rank_idx in range(self.num_ranks)
        )
        if self._host is not None:
            for position, rank_idx in enumerate(self._joined):
                invitation = Invitation(
                    prefix=self._host.prefix,
                    position=position,
                    rank_idx=rank_idx,
                    former_ranks=self.former_ranks,
                    timeout_s=self._timeout_s,
                    options=options,
                )
                self._host.call(position, invitation)

    @property
    def new_ranks(self) -> tuple[int, ...]:
        """Numbers of those that come."""
        return tuple(sorted(self._joined))

    def all_gather(self, item: Any) -> list[Any]:
        """Every rank's `item`, in rank order. Collective over the living and those that come."""
        mine = gather_objects(self.shrunk_group.shrink_gather, item)
        gather_idx = self._num_gathers
        self._num_gathers += 1

        def collect(host: InvitingRank) -> list[Any] | None:
            heard = host.collect(gather_idx)
            if heard is None and (why := host.failure()):
                raise _JoinerFailed(why)
            return heard

        theirs: list[Any] = self._in_step(collect, lambda _: "the processes that join to go on")
        gathered = [mine[former] if former >= 0 else None for former in self.former_ranks]
        for rank_idx, item_of_joined in zip(self._joined, theirs, strict=True):
            gathered[rank_idx] = item_of_joined
        if self._host is not None:
            self._host.tell(gather_idx, gathered)
        return gathered

    def check(self) -> None:
        """Raise what `all_gather` would, for a caller that waits elsewhere for ranks. Local."""
        self.shrunk_group.shrink_check()
        if self._host is not None and (why := self._host.failure()):
            raise PeerFailedError(why, operation="grow")

    def explain(self, why: str) -> str:
        """Why nothing came of it although all living ranks live, as the lowest rank knows it.

        Collective over the living.

        Args:
            why: Reason that this rank knows.
        """
        if self._host is not None:
            why = self._host.failure() or why
        told = self.shrunk_group.shrink_gather(why.encode())[0].decode()
        return f"grow: a rank that joins failed: {told}"

    def end(self, text: str) -> None:
        """Tell those that come why nothing comes of it. Local."""
        if self._host is not None:
            self._host.end(text)

    def _in_step(
        self, poll: Callable[[InvitingRank], ResultT | None], what: Callable[[InvitingRank], str]
    ) -> ResultT:
        """Return the lowest rank's find at the store, on every living rank; all hear of a death meanwhile.

        Args:
            poll: Function that looks at the store, on the lowest rank; returns None for nothing yet.
            what: Function that returns what was waited for, when time is up.

        Raises:
            PeerFailedError: A process that joins has failed, on every rank.
            PeerTimeoutError: It found nothing in time, on every rank.
            RuntimeError: The store failed, on every rank.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            said = ("wait", None)
            if self._host is not None:
                said = self._poll(poll, what, deadline)
            state, value = gather_objects(self.shrunk_group.shrink_gather, said)[0]
            if state == "found":
                found: ResultT = value
                return found
            if state != "wait":
                self._wait_until_all_know()
            if state == "late":
                raise PeerTimeoutError(f"grow: {value}", operation="grow")
            if state == "joiner":
                raise PeerFailedError(value, operation="grow")
            if state == "failed":
                raise RuntimeError(f"grow: the rendezvous failed on the lowest rank: {value}")
            time.sleep(POLL_S)

    def _wait_until_all_know(self) -> None:
        """Return once every living rank knows what the lowest one found.

        A rank that knows it gives up, and a rank that hears of that first would take it for a failure.
        """
        # This rank knows: that others have given up, or failed, changes nothing any more.
        with contextlib.suppress(PeerFailedError, ValueError):
            self.shrunk_group.shrink_gather(b"")

    def _poll(
        self,
        poll: Callable[[InvitingRank], Any],
        what: Callable[[InvitingRank], str],
        deadline: float,
    ) -> tuple[str, Any]:
        assert self._host is not None
        try:
            found = poll(self._host)
            if found is None and time.monotonic() > deadline:
                return "late", f"waited {self._timeout_s} s for {what(self._host)}"
        except _JoinerFailed as error:
            return "joiner", str(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, peers must hear of it
            return "failed", first_line(error)
        return ("wait", None) if found is None else ("found", found)
