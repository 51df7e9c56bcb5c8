"""Numbers of tokens that chose every expert, from the counts that dispatches exchange anyway."""

from __future__ import annotations

import collections

import torch

from moe_comm.ep.backends.base import DispatchOutput, Operation, Plan
from moe_comm.ep.placement import Placement


class ExpertLoads:
    """Choices of every logical expert by all ranks, added up over dispatches.

    A dispatch whose counts the host does not know yet is remembered by its plan, and counted when they are
    there: nothing here waits but `read`.

    Args:
        num_experts: Logical ones.
        placement: Placement whose slots later plans count, or None if they count experts.
    """

    def __init__(self, num_experts: int, placement: Placement | None) -> None:
        self._total = torch.zeros(num_experts, dtype=torch.int64, device="cpu")
        self._awaited: collections.deque[
            tuple[Operation[DispatchOutput] | None, Plan | None, torch.Tensor | None]
        ] = collections.deque()
        self.place(placement)

    def place(self, placement: Placement | None) -> None:
        """Count the slots of another placement from now on; dispatches of before are of theirs."""
        self._experts: torch.Tensor | None = None
        if placement is not None:
            # Nobody chooses an empty slot: what it counts for is all the same.
            self._experts = torch.tensor(placement.slot_expert, device="cpu").clamp_(min=0)

    def expect(self, operation: Operation[DispatchOutput], output: DispatchOutput | None) -> None:
        """Count a dispatch when its counts are known.

        Args:
            operation: Uncached.
            output: Output of the operation if it is not asynchronous, else None.
        """
        is_known = output is not None
        self._awaited.append(
            (None if is_known else operation, output.plan if output else None, self._experts)
        )
        self.collect()

    def collect(self, *, waits: bool = False) -> None:
        """Count, and forget, the dispatches whose counts are known, in their order.

        Args:
            waits: Whether to wait until all are. An error of a dispatch is then raised here; else its
                caller hears of it.
        """
        while self._awaited:
            operation, plan, experts = self._awaited[0]
            try:
                if plan is None:
                    assert operation is not None
                    if not waits and not operation.is_complete():
                        return
                    plan = operation.wait().plan
                choices = plan.total_choices(waits)
            except Exception:
                self._awaited.popleft()
                if waits:
                    raise
                continue
            if choices is None:
                return
            self._awaited.popleft()
            if experts is not None:
                self._total.index_add_(0, experts[: len(choices)], choices)
            elif len(choices):
                self._total += choices

    def read(self, *, reset: bool) -> torch.Tensor:
        """The sum so far, int64 `[num_experts]`; with `reset`, later ones begin at 0."""
        self.collect(waits=True)
        total = self._total.clone()
        if reset:
            self._total.zero_()
        return total
