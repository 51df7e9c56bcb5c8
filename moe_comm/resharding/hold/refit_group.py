"""The ranks of a refit, and the few bytes that they exchange before it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from moe_comm.arguments import shown
from moe_comm.errors import CommunicationError, PeerFailedError
from moe_comm.peers.agree import (
    FirstError,
    decode_problem,
    encode_problem,
    name_ranks,
    raise_together,
)
from moe_comm.peers.bootstrap import Bootstrap, bootstrap_for, process_group_of
from moe_comm.peers.communicator import Communicator
from moe_comm.peers.gather_objects import gather_objects
from moe_comm.peers.survivors import MESSAGE_BYTES
from moe_comm.resharding.copy_services.process_group import all_gather_bytes, failure_of

# The error text of a rank is cut here.
_TEXT_BYTES = 4096
MAX_PLANS = 4
"""Plans between the same models and ranks, as one rank sees them, that can be told apart."""

_ROW = struct.Struct(f"<?Q?Q{MAX_PLANS}Q")

_identities: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_next_identity = itertools.count(1)
_lock = threading.Lock()

# By the group: a communicator of its ranks, which hears of a dead peer at once. All ranks remember it
# at the same point of the same refit, so it is there for all whatever one of them asks for next.
_communicators: weakref.WeakKeyDictionary[Any, weakref.ref[Communicator]] = (
    weakref.WeakKeyDictionary()
)


def _nothing() -> None:
    return None


class _Latest(threading.local):
    """The group of the last refit of this rank, of which a process may have several as threads."""

    group: Callable[[], Any] = staticmethod(_nothing)


_latest = _Latest()


def identity_of(thing: Any) -> int:
    """A number that no other object of this process has or will have; 0 for None."""
    if thing is None:
        return 0
    with _lock:
        found = _identities.get(thing)
        if found is None:
            found = _identities[thing] = next(_next_identity)
        return found


class RefitGroup:
    """The ranks that take part in a refit.

    They ask each other over one channel, which follows from who the ranks are and from the refits that
    they had before, and from nothing else that a rank is given: so a mistake of one is heard by all.

    Args:
        group: A process group, a `Bootstrap`, or None for the ranks of `service`, and without one
            for the default group.
        service: A copy service, or None.
        is_in_doubt: Whether this rank was given a service that is none, and `group` may be None for
            that reason alone.

    Raises:
        ValueError: This process is no member of the group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | Bootstrap | None,
        service: object | None = None,
        *,
        is_in_doubt: bool = False,
    ) -> None:
        self._communicator = _communicator_of(service)
        self.problem = FirstError()
        """Problem of `group`, or of what else this rank gives, for `agree` to tell."""
        if group is None and service is not None:
            # Identities of the ranks of a service, if they are no process group.
            ranks = getattr(service, "communicator", None) or getattr(service, "ranks", None)
            group = getattr(service, "group", None) if ranks is None else ranks
        if isinstance(group, Communicator):
            group = group.group or process_group_of(group.bootstrap) or group.bootstrap
        given: Any = group
        if isinstance(given, int) and given == dist.GroupMember.NON_GROUP_MEMBER:
            # `dist.new_group` returns a number to processes that are not members.
            raise ValueError(
                "group must be a Bootstrap, or a process group that has this process as a "
                f"member, got {group!r}"
            )
        if not (group is None or isinstance(group, dist.ProcessGroup) or _is_bootstrap(group)):
            self.problem.keep(
                TypeError(
                    "group must be a Bootstrap, or a process group that has this process as a "
                    f"member, got {shown(given)} of type {type(given).__name__}"
                )
            )
            group, is_in_doubt = None, True
        if group is None and is_in_doubt:
            # Peers are taken to use what they used before.
            group = _latest.group()
        if group is None and dist.is_available() and dist.is_initialized():
            # The object, by which the group is told from a default group that is made later.
            group = dist.group.WORLD
        self.key: Any = group
        self.handle: dist.ProcessGroup | Bootstrap | None = given if given is None else group
        """Group for planning and barriers."""
        ranks_of = group if isinstance(group, dist.ProcessGroup) else bootstrap_for(group)
        if isinstance(ranks_of, dist.ProcessGroup):
            self.rank_idx, self.num_ranks = ranks_of.rank(), ranks_of.size()
            self._channel: Any = _widest(ranks_of)
            self._exchange: Callable[[bytes], list[bytes]] = _exchange_of(self._channel)
        else:
            self.rank_idx, self.num_ranks = ranks_of.rank_idx, ranks_of.num_ranks
            self._channel = group
            self._exchange = ranks_of.all_gather

    def __str__(self) -> str:
        """The same on every rank that is given the same group."""
        if self.key is None:
            return "this rank alone"
        if not isinstance(self.key, dist.ProcessGroup):
            return f"a {type(self.key).__name__} of {self.num_ranks} ranks"
        if self.key is dist.group.WORLD:
            return "the default group"
        try:
            return f"process group {self.key.group_name!r}"
        except RuntimeError:  # one that torch.distributed has not made
            return f"a process group of {self.num_ranks} ranks"

    def check(self, service: object) -> None:
        """Raise ValueError where a copy service has other ranks."""
        rank, size = getattr(service, "rank", None), getattr(service, "world_size", None)
        if isinstance(rank, int) and isinstance(size, int) and (rank, size) != self.place:
            raise ValueError(
                f"the copy service is of rank {rank} of {size}, the group of rank "
                f"{self.rank_idx} of {self.num_ranks}"
            )

    @property
    def place(self) -> tuple[int, int]:
        """This rank, and how many there are."""
        return self.rank_idx, self.num_ranks

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, all of one length, in rank order. Collective.

        Raises:
            CommunicationError: A peer is gone.
        """
        if self._channel is not None:
            _latest.group = weakref.ref(self.key)
        communicator = self._known_communicator()
        if communicator is not None:
            try:
                return communicator.all_gather(payload)
            except ValueError:
                # Destroyed here, of which the others hear.
                _communicators.pop(self._channel, None)
            except CommunicationError as error:
                text = str(error)
                # Not one that went to `recover()`, and waits there.
                has_left = " left" in text and not (" died" in text or "to recover" in text)
                is_replaced = self._communicator not in (None, communicator)
                if not (has_left or is_replaced):
                    raise
                # A rank closed its service and asks over the group, or all bring another service.
                _communicators.pop(self._channel, None)
        try:
            return self._exchange(payload)
        except CommunicationError:
            raise
        except RuntimeError as error:
            group = self.key if isinstance(self.key, dist.ProcessGroup) else None
            raise failure_of(
                group,
                "the ranks could not agree whether to go on",
                error,
                operation="refit",
                phase="rows",
            ) from error

    def remember(self, service: object) -> None:
        """Ask over the communicator of `service` from the next refit of this group on."""
        communicator = _communicator_of(service)
        if communicator is None or self._channel is None:
            return
        _communicators[self._channel] = weakref.ref(communicator)

    def _known_communicator(self) -> Communicator | None:
        reference = None if self._channel is None else _communicators.get(self._channel)
        return None if reference is None else reference()

    def all_gather_text(self, text: str) -> list[str]:
        """Every rank's text, cut where it is long, in rank order. Collective."""
        return _gather_text(text, self.all_gather)


def _gather_text(text: str, all_gather: Callable[[bytes], list[bytes]]) -> list[str]:
    encoded = text.encode(errors="backslashreplace")[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    return [item.rstrip(b"\0").decode(errors="ignore") for item in all_gather(encoded)]


def _is_bootstrap(group: Any) -> bool:
    return all(hasattr(group, name) for name in ("rank_idx", "num_ranks", "all_gather"))


def _widest(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The default group in the place of another one of all its ranks: a rank may be given either."""
    world = dist.group.WORLD
    if world is None or world is group:
        return group
    try:
        is_whole = dist.get_process_group_ranks(group) == dist.get_process_group_ranks(world)
    except (KeyError, RuntimeError, ValueError):  # of worlds that were initialized apart
        return group
    return world if is_whole else group


def _communicator_of(service: object) -> Communicator | None:
    """Return the communicator of a service whose ranks have connected."""
    communicator = getattr(service, "communicator", None)
    return communicator if isinstance(communicator, Communicator) else None


def _exchange_of(group: dist.ProcessGroup) -> Callable[[bytes], list[bytes]]:
    """An all-gather of bytes over a group."""
    device = torch.device("cpu")
    if device not in group._device_types:
        device = torch.device("cuda", torch.cuda.current_device())

    return functools.partial(all_gather_bytes, group, device)


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Facts that all ranks know of each other before a refit.

    Args:
        has_service: Whether every rank has the copy service already.
        plan_id: Id of the plan that every rank has already; 0 if there is none.
        new_plan_id: Id of the plan that they build where they have none; equal on all ranks.
    """

    has_service: bool
    plan_id: int
    new_plan_id: int


def agree(
    group: RefitGroup,
    *,
    problem: FirstError,
    options: str,
    has_service: bool,
    plan_ids: Sequence[int],
    nonce: int,
) -> Agreement:
    """Tell each other what every rank has and wants. Collective.

    Args:
        group: The ranks.
        problem: Error in this rank's input, if any.
        options: Options that all ranks must have asked for alike: lines of `argument=value`.
        has_service: Whether this rank has the copy service.
        plan_ids: Ids of the plans that this rank has, at most `MAX_PLANS`, none of them 0.
        nonce: Number at random, below 2^64.

    Raises:
        ValueError: Ranks asked for different things; on all of them.
        Exception: `problem` where it is; on other ranks one of the same type, or a ValueError, that
            names the rank.
    """
    wish = _hash_of(options)
    offered = (*plan_ids, *([0] * MAX_PLANS))[:MAX_PLANS]
    row = _ROW.pack(problem.error is not None, wish, has_service, nonce, *offered)
    gathered = group.all_gather(row)
    failed = [rank_idx for rank_idx, item in enumerate(gathered) if not item]
    if failed:
        raise PeerFailedError(
            f"ranks {failed} of the refit have failed: the others go on in a group of their own",
            ranks=failed,
            operation="refit",
        )
    rows = [_ROW.unpack(item) for item in gathered]
    if any(is_bad for is_bad, *_ in rows):
        _raise_own_or_peers(group.all_gather_text(encode_problem(problem.error)), problem)
    if len({wish for _, wish, *_ in rows}) > 1:
        texts = group.all_gather_text(options)
        raise ValueError(f"ranks ask for different refits: {_differences(texts)}")
    shared = set.intersection(*(set(ids) for _, _, _, _, *ids in rows)) - {0}
    new_plan_id = 0
    for _, _, _, other_nonce, *_ in rows:
        new_plan_id ^= other_nonce
    return Agreement(
        has_service=all(has for _, _, has, *_ in rows),
        # Any of them fits, the choice must only be the same everywhere.
        plan_id=min(shared, default=0),
        # 0 means that there is none.
        new_plan_id=new_plan_id or 1,
    )


class RefitRanks:
    """The ranks of a refit as the bootstrap of what follows its copies.

    They talk over the communicator of the service where it has one, which hears of dead peers and of
    those that went to `recover()`; a process group would have them wait for its timeout.

    Args:
        group: The ranks.
        service: Service that moved the weights.
    """

    def __init__(self, group: RefitGroup, service: object) -> None:
        self.rank_idx, self.num_ranks = group.place
        communicator = getattr(service, "communicator", None)
        ranks = communicator if isinstance(communicator, Communicator) else group
        native = communicator.native if isinstance(communicator, Communicator) else None
        self.num_threads = torch.get_num_threads() if native is None else native.num_threads
        self._exchange: Callable[[bytes], list[bytes]] = ranks.all_gather

    def all_gather(self, item: Any) -> list[Any]:
        """Every rank's `item`, plain data, in rank order. Collective.

        Raises:
            CommunicationError: A peer is gone.
        """
        return gather_objects(self._exchange, item, piece_bytes=MESSAGE_BYTES)

    def agree_that_it_ran(self, problem: FirstError) -> None:
        """Tell each other that a refit ran on this rank, or that it did not. Collective.

        Args:
            problem: Error that the refit raised on this rank, if any.

        Raises:
            Exception: As `agree` raises a rank's problem.
            CommunicationError: A peer is gone.
        """
        try:
            texts = _gather_text(encode_problem(problem.error), self._exchange)
        except CommunicationError:
            problem.raise_own()
            raise
        if any(texts):
            _raise_own_or_peers(texts, problem)


def _differences(options: Sequence[str]) -> str:
    """The arguments that ranks do not give alike, and which ranks give which value."""
    texts = []
    for lines in zip(*(text.split("\n") for text in options), strict=True):
        ranks_of: dict[str, list[int]] = {}
        for rank_idx, line in enumerate(lines):
            ranks_of.setdefault(line, []).append(rank_idx)
        if len(ranks_of) > 1:
            given = (f"{line} on {name_ranks(ranks)}" for line, ranks in ranks_of.items())
            texts.append(", ".join(given))
    return "; ".join(texts)


def _raise_own_or_peers(texts: Sequence[str], own: FirstError) -> None:
    """Raise this rank's problem, or say whose it is."""
    own.raise_own()
    raise_together(decode_problem(text) for text in texts)


def _hash_of(text: str) -> int:
    """Equal on all ranks, unlike `hash`."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
