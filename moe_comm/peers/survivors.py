"""Construction of a new communicator by the ranks that go on, over the sockets of the one they leave."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from moe_comm.errors import EvictedError, PeerFailedError, PeerTimeoutError
from moe_comm.peers.agree import first_line
from moe_comm.peers.gather_objects import gather_objects
from moe_comm.peers.joining_ranks import JoiningRanks

if TYPE_CHECKING:
    from moe_comm import _host

MESSAGE_BYTES = 1 << 20
# Rounds in which nobody is found to be gone, yet the group could not be made.
NUM_MAX_REBUILDS = 8


class _Destroyable(Protocol):
    def destroy(self) -> None: ...


class _Gathering(_Destroyable, Protocol):
    def all_gather(self, payload: bytes) -> list[bytes]: ...


CommunicatorT = TypeVar("CommunicatorT", bound=_Destroyable)


@dataclasses.dataclass(frozen=True)
class Decision:
    """Decision of the survivors, in old numbers."""

    failed_ranks: tuple[int, ...]
    survivors: tuple[int, ...]
    completed_epochs: tuple[int, ...]


class Survivors:
    """The bootstrap of a new communicator: the old one's sockets.

    Args:
        shrunk_group: Native group of the old communicator, which has decided.
        decision: Decision on who goes on.
    """

    def __init__(self, shrunk_group: _host.Group, decision: Decision) -> None:
        self.shrunk_group = shrunk_group
        self.rank_idx = decision.survivors.index(shrunk_group.rank_idx)
        self.num_ranks = len(decision.survivors)

    def all_gather(self, item: Any) -> list[Any]:
        """Every survivor's `item`, in rank order. Collective."""
        return gather_objects(self.shrunk_group.shrink_gather, item)

    def check(self) -> None:
        """Raise what `all_gather` would, for a caller that waits elsewhere for survivors. Local."""
        self.shrunk_group.shrink_check()


class SocketRanks:
    """The bootstrap of a communicator that has come from another: its own sockets.

    A rank that has failed since gives None.
    """

    def __init__(self, native: _host.Group) -> None:
        self._native = native
        self.rank_idx = native.rank_idx
        self.num_ranks = native.num_ranks

    def all_gather(self, item: Any) -> list[Any]:
        """Every rank's `item`, in rank order. Collective."""
        return gather_objects(self._native.all_gather, item, piece_bytes=MESSAGE_BYTES)


def check_failed_ranks(failed_ranks: Iterable[int], rank_idx: int, num_ranks: int) -> list[int]:
    """The ranks that the caller reports, ascending. ValueError where they cannot be."""
    try:
        reported = sorted({operator.index(rank) for rank in failed_ranks})
    except Exception as error:
        raise ValueError(f"failed_ranks must hold integers: {first_line(error)}") from error
    for rank in reported:
        if not 0 <= rank < num_ranks:
            raise ValueError(f"failed_ranks: {rank} is not a rank of a communicator of {num_ranks}")
        if rank == rank_idx:
            raise ValueError(f"failed_ranks: {rank} is the rank that calls")
    return reported


def largest_node_size(home_nodes: Sequence[int]) -> int:
    """Most ranks a node may have so that all nodes of the survivors are old nodes or parts of them.

    Args:
        home_nodes: Old node of every survivor.

    Example:
        Ranks 0 to 5 of nodes of 4, `[0, 0, 0, 0, 1, 1]`, give 2; `[0, 0, 0, 1]` gives 1.
    """
    return math.gcd(*(len(list(ranks)) for _, ranks in itertools.groupby(home_nodes)))


def rebuild(
    native: _host.Group,
    decision: Decision,
    make: Callable[[Decision], CommunicatorT],
) -> tuple[CommunicatorT, Decision]:
    """Make a communicator of survivors, anew whenever one of them dies meanwhile. Collective.

    Args:
        native: Native group of the old communicator, which has decided.
        decision: Decision on who goes on.
        make: The new communicator of one decision.

    Returns:
        The communicator that every survivor has, and what was decided for it.
    """
    num_spurious = 0
    while True:
        made: CommunicatorT | None = None
        why = ""
        try:
            made = make(decision)
        except PeerFailedError as error:
            why = str(error)
        except (EvictedError, PeerTimeoutError):
            raise
        except BaseException as error:
            _refuse(native, error)
            raise
        try:
            later = native.shrink_finish(made is not None)
        except BaseException:
            if made is not None:
                made.destroy()
            raise
        if later is None:
            assert made is not None
            return made, decision
        if made is not None:
            made.destroy()
        found = Decision(*(tuple(part) for part in later))
        num_spurious = num_spurious + 1 if found.failed_ranks == decision.failed_ranks else 0
        if num_spurious == NUM_MAX_REBUILDS:
            text = f"the communicator could not be made in {NUM_MAX_REBUILDS} rounds: {why}"
            native.shrink_refuse(text, False)
            raise PeerFailedError(text, ranks=found.failed_ranks, operation="shrink")
        decision = found


def make_grown(
    native: _host.Group,
    joining: JoiningRanks,
    options: dict[str, Any],
    make: Callable[[JoiningRanks], CommunicatorT],
) -> CommunicatorT:
    """Make a communicator of the living and those that come. Collective over the living.

    Either every living rank has it, or every one raises and the old communicator goes on.

    Args:
        native: Native group of the old communicator, which has agreed to grow.
        joining: The bootstrap.
        options: Arguments of `Communicator` that those that come take from the living.
        make: The communicator over the bootstrap.
    """
    made: CommunicatorT | None = None
    why = ""
    try:
        joining.invite(options)
        made = make(joining)
    except PeerFailedError as error:
        why = str(error)
    except EvictedError:
        raise
    except BaseException as error:
        joining.end(_refuse(native, error))
        raise
    try:
        later = native.shrink_finish(made is not None)
    except BaseException as error:
        if made is not None:
            made.destroy()
        joining.end(first_line(error))
        raise
    if later is None:
        assert made is not None
        return made
    if made is not None:
        made.destroy()
    failed_ranks = tuple(later[0])
    try:
        text = failed_text(failed_ranks) if failed_ranks else joining.explain(why)
    except PeerFailedError as error:  # another rank has explained it to all already
        text = first_line(error)
    joining.end(text)
    native.shrink_refuse(text, False)
    raise PeerFailedError(text, ranks=failed_ranks, operation="grow")


def meet(
    communicator: _Gathering, give_up: Callable[[BaseException], object] | None = None
) -> None:
    """Return once every rank has the communicator, and needs the store no more. Collective.

    Args:
        communicator: Just made.
        give_up: Tells the others of an error, before they see that this rank has left.
    """
    try:
        communicator.all_gather(b"")
    except BaseException as error:
        if give_up is not None:
            give_up(error)
        communicator.destroy()
        raise


def _refuse(native: _host.Group, error: BaseException) -> str:
    """End the attempt on every rank for what this rank alone has met; what the others raise."""
    is_mistake = isinstance(error, (TypeError, ValueError))
    text = first_line(error)
    # The error of an exchange names its rank, and this one may be the first that it ends for.
    if not re.match(r"rank \d+: ", text):
        text = f"rank {native.rank_idx}: {text}"
    return text if native.shrink_refuse(text, is_mistake) else first_line(error)


def failed_text(failed_ranks: Sequence[int]) -> str:
    """Why a communicator with failed ranks does not grow."""
    return f"grow: ranks {list(failed_ranks)} have failed; call shrink() first"
