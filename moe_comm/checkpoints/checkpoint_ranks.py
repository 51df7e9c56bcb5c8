"""Ranks that save or load together: all go on, or all raise what any of them found."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

from moe_comm.errors import CommunicationError
from moe_comm.peers.agree import FirstError, Problem, raise_different, raise_together
from moe_comm.peers.bootstrap import Bootstrap
from moe_comm.resharding.hold.refit_group import RefitGroup, RefitRanks

MineT = TypeVar("MineT")


class CheckpointRanks:
    """The ranks of one save or load.

    Args:
        operation: "save" or "load", for messages.
        group: A process group, a `Bootstrap`, or None for the default group or this rank alone.

    Attributes:
        problem: The first error of this rank; blocks that may fail on one rank alone run within it.
        group: Group in the form that planning and barriers take.

    Raises:
        ValueError: This process is no member of the group.
    """

    def __init__(self, operation: str, group: dist.ProcessGroup | Bootstrap | None) -> None:
        ranks = RefitGroup(group)
        self._operation = operation
        self._ranks = RefitRanks(ranks, None)
        self.rank_idx, self.num_ranks = ranks.place
        self.problem: FirstError = ranks.problem
        self.group = ranks.handle

    def agree(self, mine: MineT | None = None) -> list[MineT]:
        """Tell every rank what this one has, or what is wrong here. Collective.

        Returns:
            Every rank's `mine`, in rank order.

        Raises:
            Exception: Some rank has a problem; all are named.
            CommunicationError: A peer is gone.
        """
        problem = self.problem.take()
        try:
            gathered = self._all_gather((problem, None if problem is not None else mine))
            # All may have found the same, as in files that all read.
            found: dict[str, Problem] = {}
            told = [
                each if found.setdefault(str(each), each) is each else None for each, _ in gathered
            ]
            raise_together(told, problem)
            return [its for _, its in gathered]
        finally:
            del problem  # or this frame, which it has passed, would keep it

    def agree_alike(self, mine: MineT, **said: object) -> list[MineT]:
        """Do as `agree`, and raise on every rank what ranks say differently. Collective.

        Raises:
            ValueError: Something differs; names both values and ranks.
        """
        told = self.agree((said, mine))
        raise_different(f"ranks {self._operation} different things", [its for its, _ in told])
        return [theirs for _, theirs in told]

    def _all_gather(self, item: Any) -> list[Any]:
        try:
            return self._ranks.all_gather(item)
        except CommunicationError as error:
            raise type(error)(
                f"a {self._operation} of a checkpoint ended: {error}",
                ranks=error.ranks,
                operation=self._operation,
            ) from error
