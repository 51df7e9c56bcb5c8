"""One pass of a refit: what a rank is given becomes an agreement, a plan and copies."""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any, Literal, TypeAlias

import torch.distributed as dist

from moe_comm.arguments import as_int, check_bool, shown
from moe_comm.peers.bootstrap import Bootstrap
from moe_comm.resharding import stale
from moe_comm.resharding.copy_services.base import CopyService
from moe_comm.resharding.copy_services.distributed_copy_service import DistributedCopyService
from moe_comm.resharding.execution import execute
from moe_comm.resharding.kept import KeptWhile
from moe_comm.resharding.metadata import ParameterMetadata
from moe_comm.resharding.module_tensors import ModuleState, module_state
from moe_comm.resharding.mxfp8_weights import mxfp8_backend_of
from moe_comm.resharding.plan_cache import (
    KeptPlan,
    KeptPlans,
    PlanCacheKey,
    build_plan_cache_key,
)
from moe_comm.resharding.planner import build_local_reshard_plan
from moe_comm.resharding.refit_group import (
    Agreement,
    RefitGroup,
    agree,
    agree_that_it_ran,
    identity_of,
)
from moe_comm.resharding.refit_models import (
    Model,
    Models,
    _harmonize_buffer_dtypes,
    _needs_mxfp8_conversion,
    _setup_mxfp8_transform_on_plan,
    config_of,
    planned_destinations,
    unwrap_models,
)
from moe_comm.resharding.refit_services import (
    check_serves,
    get_or_create,
    known_service,
    service_cache,
)
from moe_comm.resharding.transform_protocol import ReshardTransform, as_reshard_transform
from moe_comm.resharding.verification import verify_refit

__all__ = ["VERIFY", "Group", "Options", "Pass", "Verify", "plan_cache"]

Verify = Literal["plan", "checksum"] | None
"""None; "plan": a plan is verified when it is made; "checksum": and every refit after it ran."""

VERIFY = (None, "plan", "checksum")

Group: TypeAlias = "dist.ProcessGroup | Bootstrap | None"

plan_cache: KeptWhile[PlanCacheKey, KeptPlans] = KeptWhile()
"""The plans of all refits of this process."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What all ranks must ask for alike, by the names that callers know."""

    function: str
    verify: Verify
    strict: bool
    num_dst_pools: int
    pool_index: int
    refit_method: str = ""
    group: str = ""
    refit: str = ""

    def __str__(self) -> str:
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return "\n".join(f"{name}={shown(value)}".replace("\n", " ") for name, value in values)

    @property
    def is_preparation(self) -> bool:
        """Whether nothing is to move yet."""
        return self.function in ("prepare_swap_model_weights", "Refit")


class Pass:
    """One collective pass of a refit on this rank: from one source to one pool of targets."""

    def __init__(
        self,
        src_model: Model,
        target_model: Model,
        group: Group,
        rank_offsets: tuple[int, int],
        transform: Any,
        options: Options,
        service: CopyService | str | None,
        problem: Exception | None,
    ) -> None:
        self.rank_offsets = rank_offsets
        self.group = RefitGroup(
            group,
            service if isinstance(service, CopyService) else None,
            # Only a preparation is without a service.
            is_in_doubt=service is None and options.function != "prepare_swap_model_weights",
        )
        self.service, refit_method = known_service(service, self.group)
        self.options = dataclasses.replace(
            options, refit_method=refit_method, group=str(self.group)
        )
        self.problem = problem or self.group.problem
        self.models = Models(None, None, None)
        self.transform: ReshardTransform | None = None
        # A look at ten thousand tensors takes long enough to take one of each model.
        self.states: tuple[ModuleState, ModuleState] | None = None
        self.target_model = target_model
        self.key = build_plan_cache_key(None, None, None, self.group)
        try:
            self._read(src_model, target_model, transform)
            self.key = build_plan_cache_key(
                self.models.source,
                self.models.target,
                self.models.num_experts,
                self.group,
                *rank_offsets,
                options.pool_index,
            )
        except Exception as error:  # noqa: BLE001 # raised on every rank, by `agree`
            self.problem = self.problem or error

    def _read(self, src_model: Model, target_model: Model, transform: Any) -> None:
        if not (self.options.verify is None or self.options.verify in VERIFY):
            raise ValueError(f"verify must be one of {VERIFY}, got {self.options.verify!r}")
        check_bool("strict", self.options.strict)
        for side, offset in zip(("src", "dst"), self.rank_offsets, strict=True):
            as_int(f"{side}_rank_offset", offset, 0)
        self.models = unwrap_models(src_model, target_model)
        self.transform = None if transform is None else as_reshard_transform(transform)
        if isinstance(self.service, str):
            check_serves(self.service, self.group)
        else:
            self.group.check(self.service)
        if self.options.is_preparation and _needs_mxfp8_conversion(target_model):
            mxfp8_backend_of(config_of(target_model))
        source = self.models.source
        self.states = self._look()
        if source is not None and (reason := stale.stale_reason(source, look_again=False)):
            raise ValueError(f"the source model is stale and must not be read: {reason}")

    def agree(self) -> Agreement:
        """Tell the other ranks, hear from them; find the plan if there is one."""
        is_named = isinstance(self.service, str)
        known = (self.service, identity_of(self.group.key))
        plan_ids: list[int] = []
        if self.problem is None:
            try:
                plan_ids = self._fitting_plans()
            except Exception as error:  # noqa: BLE001 # raised on every rank
                self.problem = error
        return agree(
            self.group,
            problem=self.problem,
            options=str(self.options),
            has_service=not is_named or known in service_cache,
            plan_ids=plan_ids,
            nonce=secrets.randbits(64),
        )

    def _fitting_plans(self) -> list[int]:
        """Plans that were made for what the models hold now."""
        kept = plan_cache.get(self.key)
        if kept is None:
            return []
        states = self.states or self._look()
        return kept.fitting(states, self.transform, is_strict=self.options.strict)

    def _look(self) -> tuple[ModuleState, ModuleState]:
        return module_state(self.models.source), module_state(self.models.target)

    def plan(self, agreement: Agreement) -> KeptPlan:
        """The plan, made by all ranks together unless all have it."""
        known_plans = plan_cache.get(self.key) or KeptPlans()
        kept = known_plans.find(agreement.plan_id)
        if kept is not None:
            return kept
        self.states = None  # planning may change the dtype of buffers
        # What a transform has taken out of the target is planned as it was the last time.
        old = known_plans.last
        known = {} if old is None else old.destinations
        transform = self.transform or (None if old is None else old.plan.transform)
        planned: dict[str, ParameterMetadata] = {}

        def adjust(metas: list[ParameterMetadata]) -> list[ParameterMetadata]:
            chosen = planned_destinations(self.models.target, metas, known, transform)
            planned.update((meta.name, meta) for meta in chosen)
            return chosen

        plan = build_local_reshard_plan(
            self.models.source,
            self.models.target,
            num_experts=self.models.num_experts,
            group=self.group.handle,
            src_rank_offset=self.rank_offsets[0],
            dst_rank_offset=self.rank_offsets[1],
            strict=self.options.strict,
            verify=self.options.verify is not None,
            adjust_destination=adjust,
        )
        if old is not None:
            plan.transform = old.plan.transform
        source, target = self.models.source, self.models.target
        _harmonize_buffer_dtypes(plan, source, target, self.group.handle)
        kept = KeptPlan(plan, agreement.new_plan_id, self._look(), planned, self.options.strict)
        known_plans.put(kept)
        plan_cache.put(self.key, known_plans, (source, target, self.group.key))
        return kept

    def prepare(self) -> int:
        """Make the plan, and convert a target that asks for it.

        Returns:
            The id of the plan, equal on all ranks.
        """
        kept = self.plan(self.agree())
        if self.transform is None:
            _setup_mxfp8_transform_on_plan(kept.plan, self.target_model)
        # The target may have been converted just now.
        kept.states = kept.states[0], self._look()[1]
        return kept.plan_id

    def run(self) -> None:
        """Move the weights."""
        known = self.service
        if isinstance(known, str):
            known = service_cache.get((known, identity_of(self.group.key)))
        if isinstance(known, DistributedCopyService):
            # Ranks that lost each other have lost the group: they could not agree any more.
            known.check_usable()
        agreement = self.agree()
        service = self.service
        if isinstance(service, str):
            service = get_or_create(service, self.group, is_new=not agreement.has_service)
        assert isinstance(service, CopyService)
        try:
            self._run_over(service, agreement)
        finally:
            # Connected by now, also where the refit failed.
            self.group.remember(service)

    def _run_over(self, service: CopyService, agreement: Agreement) -> None:
        plan = self.plan(agreement).plan
        source, target = self.models.source, self.models.target
        transform = self.transform or plan.transform
        problem: Exception | None = None
        try:
            execute(
                plan,
                (source, target),
                self.states or self._look(),
                service,
                self.group.handle,
                transform,
                strict=True,  # what has been planned is there
            )
        except Exception as error:
            if self.options.verify != "checksum":
                raise
            problem = error
        if self.options.verify == "checksum":
            # Others may have come further than this rank, and would wait for its checksums.
            agree_that_it_ran(self.group, service, problem)
            verify_refit(plan, source, target, self.group.handle, transform=transform)
