"""Rendezvous of processes of several programs, which become ranks of one group: a store, and a thread that assembles them.

The thread of the process that hosts decides alone; all others ask it over the store. A generation is one
assembly of all places. Whoever lives when it ends asks for the next, with whoever has been started anew.

Values are plain data (`plain_data`) behind a code that only those who have the key can make (HMAC). Keys
of the store: `tickets`, how many have asked; `ticket/<i>`, what the i-th asks for; `beat/<i>`, which it
counts up while it lives; `left/<i>`, why it has given up; `call/<i>`, what it is told; below the random
prefix of a generation `<k>/<rank>`, what a rank says in the k-th exchange, `done`, how many have the group,
and `over`, why nothing comes of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from moe_comm.arguments import as_int, shown
from moe_comm.errors import PeerFailedError, PeerTimeoutError
from moe_comm.peers.agree import first_line
from moe_comm.peers.joining_ranks import host_store, open_store
from moe_comm.peers.node_layout import own_machine
from moe_comm.peers.plain_data import decode_plain, encode_plain

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_POLL_S = 0.02
_BEAT_S = 0.25
_LIVENESS_S = 5.0
"""Without a beat for so long, a process that waits has died or stopped."""
_GRACE_S = 5.0
"""Beyond its limit a process waits so long for what the host says of it."""
_LATE_S = 30.0
"""At least so long after a mistake those that are still to come hear of it."""
_MAC_BYTES = 32

Place = tuple[str, int]
"""A role, and the rank within it."""
ResultT = TypeVar("ResultT")


def places_of(roles: Mapping[str, int]) -> list[Place]:
    """All places, in the order of their ranks in the group."""
    return [(role, rank) for role, size in roles.items() for rank in range(size)]


def _names(places: list[Place]) -> str:
    return ", ".join(f"{role} {rank}" for role, rank in places)


class _SignedStore:
    """Plain data in a store, which only those who have the key can have written."""

    def __init__(self, store: Store, key: str) -> None:
        self.store = store
        self._key = key.encode()

    def _code(self, name: str, data: bytes) -> bytes:
        return hmac.digest(self._key, name.encode() + b"\0" + data, "sha256")

    def set(self, name: str, value: Any) -> None:
        data = encode_plain(value)
        self.store.set(name, self._code(name, data) + data)  # type: ignore[arg-type]

    def get(self, name: str, kind: type) -> Any:
        """Return the value at `name`.

        Raises:
            ValueError: It was written with another key, is no plain data, or of another type.
        """
        said = bytes(self.store.get(name))
        code, data = said[:_MAC_BYTES], said[_MAC_BYTES:]
        if not hmac.compare_digest(code, self._code(name, data)):
            raise ValueError(f"{name!r} of the rendezvous was written with another key")
        value = decode_plain(data, f"key {name!r} of the rendezvous")
        if type(value) is not kind:
            raise ValueError(
                f"{name!r} of the rendezvous: expected {kind.__name__}, got {shown(value)}"
            )
        return value

    def has(self, *names: str) -> bool:
        return bool(self.store.check(list(names)))


@dataclasses.dataclass
class _Ticket:
    """A process that waits, as the host sees it. Times are of `time.monotonic`."""

    number: int
    place: Place
    machine: str
    deadline: float
    timeout_s: float
    beat: int = -1
    seen: float = 0.0
    num_beats: int = 0


@dataclasses.dataclass
class _Forming:
    """A generation whose ranks are making their group."""

    prefix: str
    tickets: list[_Ticket]


@dataclasses.dataclass
class _Refusal:
    """A mistake that ended an attempt, of which its late processes hear as they come."""

    text: str
    until: float
    heard: set[Place]

    def takes(self, place: Place, now: float) -> bool:
        """Return whether a process that comes is of that attempt: the first of its place, and in time."""
        if now > self.until or place in self.heard:
            return False
        self.heard.add(place)
        return True


class RoleHost:
    """The process where all others meet: it listens, and a thread of it assembles generations.

    Args:
        address: "host:port" of an interface of this machine; port 0 for any that is free.
        roles: Sizes by role, in the order of ranks.
        version: Version of the package, which all ranks must have.
        key: Secret of the group; None for a random one.

    Attributes:
        address: Address where it listens.
        key: Secret that all others need.

    Raises:
        ValueError: The address is none that others can be told.
        OSError: This process cannot listen there.
    """

    def __init__(
        self, address: str, roles: Mapping[str, int], version: str, key: str | None = None
    ) -> None:
        self._version = version
        host, colon, port = str(address).rpartition(":")
        if (
            not colon
            or not port.isdecimal()
            or not int(port) < 1 << 16
            or host in ("", "0.0.0.0", "::")
        ):
            raise ValueError(
                f'address must be "host:port" of one interface of this machine, got {address!r}'
            )
        self.roles = {role: as_int(f"number of {role}s", size, 1) for role, size in roles.items()}
        if key is not None and (not isinstance(key, str) or not key):
            raise ValueError(f"key must be a text, got {type(key).__name__}")
        self.key = secrets.token_hex(16) if key is None else key
        store, found = host_store(host, int(port), 300.0)
        self.address = f"{host}:{found}"
        self._signed = _SignedStore(store, self.key)
        self._num_seen = 0
        self._unwritten: dict[int, float] = {}
        self._waiting: dict[Place, _Ticket] = {}
        self._rivals: dict[Place, _Ticket] = {}
        self._refused: list[str] = []
        self._refusal: _Refusal | None = None
        self._forming: _Forming | None = None
        self._num_generations = 0
        self._over = ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="moe_comm rendezvous", daemon=True)
        self._thread.start()

    def refuse(self, why: str) -> None:
        """Tell those that wait, and all that come from now on, why no further generation is assembled."""
        self._over = why

    def close(self) -> None:
        """Tell those that wait that nothing comes of it, and listen no more. Idempotent."""
        self._closing.set()
        self._thread.join()

    def _serve(self) -> None:
        while not self._closing.wait(_POLL_S):
            try:
                self._look(time.monotonic())
            except Exception as error:  # noqa: BLE001, PERF203 - those that wait must hear of it
                self._refuse_all("RuntimeError", f"the rendezvous failed: {first_line(error)}")
        self._refuse_all("RuntimeError", "the process that hosts has closed the rendezvous")

    def _look(self, now: float) -> None:
        self._take_tickets(now)
        if self._over:
            self._refuse_all("ValueError", self._over)
        for ticket in [*self._waiting.values(), *self._rivals.values()]:
            self._listen(ticket, now)
        self._drop_the_dead(now)
        if self._forming is not None:
            self._watch(self._forming, now)
        places = places_of(self.roles)
        if self._forming is None and len(self._waiting) == len(places) and not self._rivals:
            self._form([self._waiting[place] for place in places])
        late = [each for each in self._waiting.values() if now > each.deadline]
        if late and self._forming is None:
            missing = [place for place in places if place not in self._waiting]
            who = late[0]
            whom = _names(missing) or f"one living process for {_names(list(self._rivals))}"
            also = "; ".join(["", *self._refused])
            self._refuse_all(
                "PeerTimeoutError",
                f"{whom} did not come within {who.timeout_s} s of {_names([who.place])}{also}",
            )

    def _take_tickets(self, now: float) -> None:
        num_tickets = self._signed.store.add("tickets", 0)
        for number in range(self._num_seen, num_tickets):
            self._unwritten[number] = now
        self._num_seen = max(self._num_seen, num_tickets)
        for number, since in list(self._unwritten.items()):
            if self._signed.has(f"ticket/{number}"):
                del self._unwritten[number]
                self._take(number, now)
            elif now - since > _LIVENESS_S:
                del self._unwritten[number]

    def _take(self, number: int, now: float) -> None:
        try:
            said = self._signed.get(f"ticket/{number}", dict)
        except ValueError as error:
            # A stranger stops nobody; those that wait hear of it if somebody does not come.
            self._refused = [*self._refused[-2:], f"a process was refused: {error}"]
            self._tell(number, "ValueError", f"the key is another than the host's: {error}")
            return
        try:
            if said["version"] != self._version:
                raise ValueError(f"it has moe_comm {said['version']}, the host has {self._version}")
            if said["roles"] != self.roles:
                raise ValueError(f"it expects ranks {said['roles']}, the host {self.roles}")
            role, rank = said["role"], said["rank"]
            if role not in self.roles or not 0 <= rank < self.roles[role]:
                raise ValueError(f"there is no such place in a group of {self.roles}")
            if said.get("refusal"):
                raise ValueError(said["refusal"])
            timeout_s = float(said["timeout_s"])
            ticket = _Ticket(
                number, (role, rank), str(said["machine"]), now + timeout_s, timeout_s, seen=now
            )
        except (KeyError, TypeError, ValueError) as error:
            text = f"{said.get('role')} {said.get('rank')} was refused: {first_line(error)}"
            self._tell(number, "ValueError", text)
            self._refuse_all("ValueError", text, now)
            if said.get("refusal") and self._refusal is not None:
                # Those that are asked by it have not been asked.
                others = (place for place in places_of(self.roles) if place[0] != said["role"])
                self._refusal.heard.update(others)
            return
        if self._refusal is not None and self._refusal.takes(ticket.place, now):
            self._tell(number, "ValueError", self._refusal.text)
            return
        self._refusal = None
        if ticket.place in self._waiting:
            # It may have been started in the place of one that was killed while it waited.
            before = self._rivals.pop(ticket.place, None)
            if before is not None:
                self._tell(before.number, "ValueError", "another process has come in its place")
            self._rivals[ticket.place] = ticket
            self._waiting[ticket.place].num_beats = 0
        else:
            self._waiting[ticket.place] = ticket

    def _listen(self, ticket: _Ticket, now: float) -> None:
        beat = self._signed.store.add(f"beat/{ticket.number}", 0)
        if beat != ticket.beat:
            ticket.beat, ticket.seen = beat, now
            ticket.num_beats += 1

    def _drop_the_dead(self, now: float) -> None:
        for waiting in (self._rivals, self._waiting):
            for place, ticket in list(waiting.items()):
                has_left = self._signed.has(f"left/{ticket.number}")
                if has_left or now - ticket.seen > _LIVENESS_S:
                    del waiting[place]
                    self._tell(ticket.number, "PeerTimeoutError", "it was silent for too long")
        for place, rival in list(self._rivals.items()):
            if place not in self._waiting:
                self._waiting[place] = self._rivals.pop(place)
            elif self._waiting[place].num_beats >= 3 and rival.num_beats >= 3:
                text = f"two processes that live are {_names([place])}"
                self._refuse_all("ValueError", text, now)
                return

    def _form(self, tickets: list[_Ticket]) -> None:
        prefix = secrets.token_hex(16)
        self._num_generations += 1
        is_one_machine = len({ticket.machine for ticket in tickets}) == 1
        for rank_idx, ticket in enumerate(tickets):
            called = {
                "prefix": prefix,
                "generation": self._num_generations,
                "rank_idx": rank_idx,
                "is_one_machine": is_one_machine,
            }
            self._signed.set(f"call/{ticket.number}", called)
        self._forming = _Forming(prefix, tickets)
        self._waiting.clear()
        self._refused.clear()

    def _watch(self, forming: _Forming, now: float) -> None:
        if self._signed.store.add(f"{forming.prefix}/done", 0) == len(forming.tickets):
            self._forming = None
            return
        for ticket in forming.tickets:
            self._listen(ticket, now)
            left = f"left/{ticket.number}"
            if self._signed.has(left):
                why = str(self._signed.get(left, str))
            elif now - ticket.seen > _LIVENESS_S:
                why = "died or stopped"
            else:
                continue
            text = f"{_names([ticket.place])}, while the group was made: {why}"
            self._signed.set(f"{forming.prefix}/over", text)
            self._forming = None
            return

    def _tell(self, number: int, kind: str, text: str) -> None:
        self._signed.set(f"call/{number}", {"kind": kind, "text": text})

    def _refuse_all(self, kind: str, text: str, now: float | None = None) -> None:
        """Tell all that wait; with `now`, a mistake of which those that are still to come hear as well."""
        heard = [ticket for waiting in (self._waiting, self._rivals) for ticket in waiting.values()]
        if now is not None:
            until = max([now + _LATE_S, *(ticket.deadline for ticket in heard)])
            self._refusal = _Refusal(text, until, {ticket.place for ticket in heard})
        self._waiting.clear()
        self._rivals.clear()
        self._refused.clear()
        for ticket in heard:
            with contextlib.suppress(Exception):  # the store has ended
                self._tell(ticket.number, kind, text)


class RoleRank:
    """The bootstrap of a process that has a place in a group of several programs.

    Use it under `with`: at the end the others hear whether this rank has the group.

    Args:
        address: Address of the host.
        key: Key of the host.
        roles: Sizes by role, as the caller knows them.
        place: Place of this process.
        timeout_s: Limit for all to come, and for each exchange after that.
        version: Version of the package.
        refusal: Reason why this process will not be a rank: all that wait raise it, and so does this.

    Attributes:
        rank_idx: Rank of this process in the group.
        num_ranks: Ranks of the group.
        generation: Number of groups that have been assembled, with this one.
        is_one_machine: Whether all ranks can share memory.

    Raises:
        PeerTimeoutError: Nobody listens at the address, or not everybody came in time.
        PeerFailedError: A rank died on the way.
        ValueError: The host refused this process or another one.
    """

    def __init__(
        self,
        address: str,
        key: str,
        roles: Mapping[str, int],
        place: Place,
        timeout_s: float,
        version: str,
        refusal: str = "",
    ) -> None:
        self._places = places_of(roles)
        self._timeout_s = timeout_s
        self._address = address
        self._num_gathers = 0
        self._prefix = ""
        self._number = -1
        self._asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="moe_comm join", daemon=True).start()
        try:
            store = self._do(
                lambda: open_store(address, False, timeout_s, "the host of the world has gone"),
                timeout_s + _GRACE_S,
            )
            self._signed = _SignedStore(store, key)
            number: int = self._do(lambda: store.add("tickets", 1)) - 1
            ticket = {
                "version": version,
                "roles": dict(roles),
                "role": place[0],
                "rank": place[1],
                "machine": str(own_machine()),
                "timeout_s": timeout_s,
                "refusal": refusal,
            }
            self._do(lambda: self._signed.set(f"ticket/{number}", ticket))
            self._number = number
            self._await_call()
        except BaseException as error:
            self._end(error)
            raise

    def __enter__(self) -> RoleRank:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end(error)

    @property
    def store(self) -> Store:
        """Store of torch.distributed, for a process group of this generation's ranks."""
        import torch.distributed as dist

        prefixed: Store = dist.PrefixStore(self._prefix, self._signed.store)  # type: ignore[attr-defined]
        return prefixed

    def all_gather(self, item: Any) -> list[Any]:
        """Every rank's `item`, plain data, in rank order. Collective.

        Raises:
            PeerFailedError: A rank died or gave up.
            PeerTimeoutError: A rank did not come in time.
        """
        names = [f"{self._prefix}/{self._num_gathers}/{rank}" for rank in range(self.num_ranks)]
        self._num_gathers += 1
        self._do(lambda: self._signed.set(names[self.rank_idx], [item]))
        deadline = time.monotonic() + self._timeout_s
        while not self._do(lambda: self._signed.has(*names)):
            self.check()
            if time.monotonic() > deadline:
                late = [rank for rank, name in enumerate(names) if not self._has(name)]
                text = f"{_names([self._places[rank] for rank in late])} did not go on within {self._timeout_s} s"
                raise PeerTimeoutError(f"join: {text}", ranks=late, operation="join")
            time.sleep(_POLL_S)
        return self._do(lambda: [self._signed.get(name, list)[0] for name in names])

    def check(self) -> None:
        """Raise where the others have given up, for a caller that waits elsewhere for them. Local."""
        name = f"{self._prefix}/over"
        if self._has(name):
            text = self._do(lambda: self._signed.get(name, str))
            failed = [
                rank
                for rank, place in enumerate(self._places)
                if text.startswith(f"{_names([place])},")
            ]
            raise PeerFailedError(f"join: {text}", ranks=failed, operation="join")

    def _has(self, name: str) -> bool:
        return self._do(lambda: self._signed.has(name))

    def _await_call(self) -> None:
        name = f"call/{self._number}"
        deadline = time.monotonic() + self._timeout_s + _GRACE_S
        while not self._has(name):
            if time.monotonic() > deadline:
                raise self._silent()
            time.sleep(_POLL_S)
        called = self._do(lambda: self._signed.get(name, dict))
        if "kind" in called:
            if called["kind"] == "PeerTimeoutError":
                raise PeerTimeoutError(f"join: {called['text']}", operation="join")
            kind = ValueError if called["kind"] == "ValueError" else RuntimeError
            raise kind(f"join: {called['text']}")
        self._prefix = str(called["prefix"])
        self.generation = as_int("generation", called["generation"], 1)
        self.rank_idx = as_int("rank_idx", called["rank_idx"], 0, len(self._places) - 1)
        self.num_ranks = len(self._places)
        self.is_one_machine = bool(called["is_one_machine"])

    def _silent(self) -> PeerTimeoutError:
        return PeerTimeoutError(
            f"join: the host at {self._address} does not answer", operation="join"
        )

    def _do(self, what: Callable[[], ResultT], limit_s: float | None = None) -> ResultT:
        """The result of a call of the store, for which no host that has stopped lets this rank wait."""
        answer: queue.SimpleQueue[tuple[ResultT | None, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                answer.put((what(), None))
            except BaseException as error:  # noqa: BLE001 - raised by who asked
                answer.put((None, error))

        self._asked.put(run)
        try:
            result, error = answer.get(timeout=self._timeout_s if limit_s is None else limit_s)
        except queue.Empty:
            raise self._silent() from None
        if error is not None:
            if isinstance(error, RuntimeError) and not isinstance(error, PeerTimeoutError):
                raise PeerFailedError(
                    f"join: the host at {self._address} has gone: {first_line(error)}",
                    operation="join",
                ) from error
            raise error
        return result  # type: ignore[return-value]

    def _serve(self) -> None:
        """Run what is asked, and tell the host that this process lives."""
        while True:
            try:
                run = self._asked.get(timeout=_BEAT_S)
            except queue.Empty:
                run = self._beat
            if run is None:
                return
            run()
            if run is not self._beat and time.monotonic() - self._beaten > _BEAT_S:
                self._beat()

    _beaten = 0.0

    def _beat(self) -> None:
        if self._number >= 0:
            self._beaten = time.monotonic()
            with contextlib.suppress(Exception):  # who asks next hears that the host has gone
                self._signed.store.add(f"beat/{self._number}", 1)

    def _end(self, error: BaseException | None) -> None:
        number, self._number = self._number, -1
        if number >= 0:
            with contextlib.suppress(Exception):  # the host has gone, or hears it by its silence
                if error is None:
                    self._do(lambda: self._signed.store.add(f"{self._prefix}/done", 1), _GRACE_S)
                else:
                    self._do(
                        lambda: self._signed.set(f"left/{number}", first_line(error)), _GRACE_S
                    )
        self._asked.put(None)
