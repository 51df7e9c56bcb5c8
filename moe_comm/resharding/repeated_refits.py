"""Refits that are run again: what was submitted is kept while every tensor stays where it is."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch

from moe_comm.resharding.copy_services.base import CopyService
from moe_comm.resharding.module_tensors import ModuleState
from moe_comm.resharding.plan import ReshardPlan

__all__ = ["RepeatedRefit", "RepeatedRefits"]

_ATTRIBUTE = "_reshard_repeats"

_Key = tuple[int, int, int]
States = tuple[ModuleState, ModuleState]


@dataclasses.dataclass
class RepeatedRefit:
    """One plan between two modules as a service has prepared it.

    Args:
        prepared: What the service's `prepare()` returned. It may hold views of the tensors.
        owners: The plan, then the modules; `RepeatedRefits` forgets this when one of them goes.
        ops: Lists of the plan, to notice that they were replaced.
        states: Of the source and the destination.
    """

    prepared: Any
    owners: list[weakref.ref[Any]]
    ops: tuple[list[Any], list[Any]]
    states: States

    def is_valid(self, plan: ReshardPlan, states: States) -> bool:
        """Whether a refit of these would submit the same memory again."""
        return (
            self.owners[0]() is plan
            and self.ops[0] is plan.send_ops
            and self.ops[1] is plan.recv_ops
            and self.states[0] is states[0]
            and self.states[1] is states[1]
        )


class RepeatedRefits:
    """The refits that a service has prepared. Kept on the service, and no longer than its models."""

    def __init__(self) -> None:
        self._refits: dict[_Key, RepeatedRefit] = {}

    @staticmethod
    def of(service: CopyService) -> RepeatedRefits | None:
        """Those of `service`; None where it cannot repeat."""
        kind = type(service)
        if not (hasattr(kind, "prepare") and hasattr(kind, "run_prepared")):
            return None
        refits = vars(service).setdefault(_ATTRIBUTE, RepeatedRefits())
        assert isinstance(refits, RepeatedRefits)
        return refits

    def find(
        self,
        plan: ReshardPlan,
        modules: tuple[torch.nn.Module | None, torch.nn.Module | None],
        states: States,
    ) -> RepeatedRefit | None:
        """The refit of this plan between these modules if it is still valid; else it is forgotten."""
        key = _key(plan, modules)
        refit = self._refits.get(key)
        if refit is not None and not refit.is_valid(plan, states):
            del self._refits[key]
            refit = None
        return refit

    def keep(
        self,
        prepared: Any,
        plan: ReshardPlan,
        modules: tuple[torch.nn.Module | None, torch.nn.Module | None],
        states: States,
    ) -> None:
        """Remember a refit until its plan, its source or its destination is gone."""
        key = _key(plan, modules)
        this = weakref.ref(self)

        def forget(_: weakref.ref[Any]) -> None:
            refits = this()
            if refits is not None:
                refits._refits.pop(key, None)

        self._refits[key] = RepeatedRefit(
            prepared,
            [weakref.ref(owner, forget) for owner in (plan, *modules) if owner is not None],
            (plan.send_ops, plan.recv_ops),
            states,
        )

    def forget(
        self,
        plan: ReshardPlan,
        modules: tuple[torch.nn.Module | None, torch.nn.Module | None],
    ) -> None:
        """Prepare anew next time."""
        self._refits.pop(_key(plan, modules), None)


def _key(plan: ReshardPlan, modules: tuple[torch.nn.Module | None, torch.nn.Module | None]) -> _Key:
    return id(plan), id(modules[0]), id(modules[1])
