"""One pass of a refit: what a rank is given becomes an agreement, a plan and copies."""

from __future__ import annotations

import dataclasses
import enum
import functools
import secrets

from moe_comm.arguments import shown
from moe_comm.peers.agree import FirstError
from moe_comm.resharding.copy_services.base import CopyService
from moe_comm.resharding.copy_services.batched_copy import PreparedCopies
from moe_comm.resharding.copy_services.distributed_copy_service import DistributedCopyService
from moe_comm.resharding.describe.metadata import ParameterMetadata
from moe_comm.resharding.describe.module_tensors import ModuleState, local_tensor, module_state
from moe_comm.resharding.formats.mxfp8_weights import mxfp8_backend_of
from moe_comm.resharding.hold.deltas import Changed, Delta, DeltaReport
from moe_comm.resharding.hold.plan_cache import (
    CachedPlan,
    CachedPlans,
    PlanCacheKey,
    build_plan_cache_key,
    plan_cache,
)
from moe_comm.resharding.hold.refit_group import Agreement, RefitGroup, RefitRanks, agree
from moe_comm.resharding.hold.refit_models import (
    Model,
    Models,
    _harmonize_buffer_dtypes,
    _needs_mxfp8_conversion,
    _setup_mxfp8_transform_on_plan,
    config_of,
    planned_destinations,
    unwrap_models,
)
from moe_comm.resharding.hold.refit_options import RefitOptions
from moe_comm.resharding.hold.refit_services import check_serves, create_service, find_service
from moe_comm.resharding.hold.verification import prove_refit
from moe_comm.resharding.move import stale
from moe_comm.resharding.move.execution import execute
from moe_comm.resharding.plan.planner import build_local_reshard_plan
from moe_comm.resharding.plan.reshard_plan import ReshardPlan
from moe_comm.resharding.plan.transform_protocol import as_reshard_transform
from moe_comm.tensors.memory import storage_id


def _lines(**asked: object) -> str:
    """Return the text that ranks compare: a line for each argument."""
    lines = (f"{name}={shown(value)}".replace("\n", " ") for name, value in asked.items())
    return "\n".join(lines)


def _text_of_writes(
    plan: ReshardPlan,
    models: Models,
    states: tuple[ModuleState, ModuleState],
    before: tuple[int, ...],
) -> str:
    """Says which sources that are sent torch has counted writes of since; "" for none. A target's are the refit's."""
    found = stale.written_since(models.source, states[0], before)
    if found:
        sources, targets = states[0].tensors, states[1].tensors.values()
        sent = {piece.param_name for op in plan.send_ops for piece in op.pieces}
        read = {storage_id(local_tensor(sources[name])) for name in sent}
        read -= {storage_id(local_tensor(each)) for each in targets}
        for name, (tensor, *_) in list(found.items()):
            if storage_id(local_tensor(tensor)) not in read:
                del found[name]
    if not found:
        return ""
    name, (_, then, now) = next(iter(found.items()))
    more = f", as were {len(found) - 1} others" if len(found) > 1 else ""
    return (
        f"{name} of the source was written while the refit read it (torch had counted {then} writes of it, "
        f"and then {now}){more}"
    )


@dataclasses.dataclass(frozen=True)
class _Sides:
    """Both models as they are when a pass begins, and what was planned between them.

    Nothing of it is kept for the next run: by then wrappers may hold other models, these other tensors,
    and plans may be forgotten.
    """

    models: Models
    # A look at ten thousand tensors takes long enough to take one of each model.
    states: tuple[ModuleState, ModuleState]
    key: PlanCacheKey
    plans: CachedPlans


class RefitCall(enum.Enum):
    """Function that the caller called, in the words that ranks compare."""

    PREPARE = "prepare_swap_model_weights"
    SWAP = "swap_model_weights"
    RESHARD = "reshard_model_weights"
    REFIT = "Refit"
    REFIT_RUN = "Refit.run"

    @property
    def takes_service(self) -> bool:
        """Return whether its caller names a copy service."""
        return self is not RefitCall.PREPARE

    @property
    def converts_target(self) -> bool:
        """Return whether it makes plans, and converts a target that asks for it."""
        return self in (RefitCall.PREPARE, RefitCall.REFIT)


@dataclasses.dataclass
class RefitPass:
    """One collective pass of a refit on this rank: from one source to one pool of targets.

    Args:
        call: Function that the caller called.
        src_model: Source model as the caller gave it.
        target_model: Target model; None on ranks whose target is of another pool.
        service: A service or the name of one; None where there is none.
        options: Options as the caller gave them.
        pool_index: Index of the pool that this pass writes; a refit has one pass for each pool.
        problem: Error in an argument, if any, for all ranks to hear of.
        refit: Name by which ranks tell the `Refit` that runs from another; empty for none.
    """

    call: RefitCall
    src_model: Model
    target_model: Model
    service: CopyService | str | None
    options: RefitOptions
    pool_index: int
    problem: FirstError
    refit: str = ""

    def __post_init__(self) -> None:
        with self.problem:
            self.options.check()
            if self.options.transform is not None:
                transform = as_reshard_transform(self.options.transform)
                self.options = self.options._replace(transform=transform)

    def prepare(self) -> int:
        """Make the plan, and convert a target that asks for it.

        Returns:
            The id of the plan, equal on all ranks.
        """
        group = self.ranks()
        sides, agreement = self._agree(group, *find_service(self.service, group))
        cached = sides.plans.find(agreement.plan_id) or self._plan(sides, agreement, group)
        if self.options.transform is None:
            _setup_mxfp8_transform_on_plan(cached.plan, self.target_model)
        # The target may have been converted just now.
        cached.states = cached.states[0], module_state(sides.models.target)
        return cached.plan_id

    def run(self, changed: Changed | None = None) -> DeltaReport | None:
        """Move the weights, or what changed of them.

        Args:
            changed: As of `Refit.run`.

        Returns:
            Numbers of a refit with deltas; None for one without.
        """
        group = self.ranks()
        if changed is not None and self.options.deltas is None:
            group.problem.keep(ValueError("changed is for a refit with deltas, and this has none"))
        backend, service, refit_method = find_service(self.service, group)
        if isinstance(service, DistributedCopyService):
            # Ranks that lost each other have lost the group: they could not agree any more.
            service.check_usable()
        sides, agreement = self._agree(group, backend, service, refit_method)
        if backend and not agreement.has_service:
            service = create_service(backend, group)
        assert service is not None
        try:
            states = sides.states
            cached = sides.plans.find(agreement.plan_id)
            if cached is None:
                cached = self._plan(sides, agreement, group)
                states = cached.states
            if self.options.deltas is None:
                self._move(cached.plan, sides.models, states, service, group)
                return None
            return self._move_changes(
                cached, sides.models, states, service, group, agreement, changed
            )
        finally:
            # Connected by now, also where the refit failed.
            group.remember(service)

    def ranks(self) -> RefitGroup:
        """Return the group that takes part, as of now: a default group may be another than the last time."""
        service = self.service if isinstance(self.service, CopyService) else None
        is_in_doubt = self.service is None and self.call.takes_service
        return RefitGroup(self.options.group, service, is_in_doubt=is_in_doubt)

    def _agree(
        self, group: RefitGroup, backend: str, service: CopyService | None, refit_method: str
    ) -> tuple[_Sides, Agreement]:
        """Look at both models, tell the other ranks, hear from them. Collective.

        Args:
            group: The ranks.
            backend: Name that `find_service` returned, like what follows.
            service: The service, if there is one.
            refit_method: Name of the service that ranks compare.

        Raises:
            Exception: Something is wrong on some rank, or ranks ask for different things; on all.
        """
        problem = self.problem or group.problem
        sides, plan_ids = None, []
        with problem:
            if backend:
                check_serves(backend, group)
            else:
                group.check(service)
            sides = self._look(group)
            plan_ids = sides.plans.fitting(
                sides.states,
                self.options.transform,
                is_strict=self.options.strict,
                execution_batch_bytes=self.options.execution_batch_bytes,
            )
        own, of_refit = self._compared
        agreement = agree(
            group,
            problem=problem,
            options=f"{own}\n{_lines(refit_method=refit_method, group=str(group))}\n{of_refit}",
            has_service=service is not None or not backend,
            plan_ids=plan_ids,
            nonce=secrets.randbits(64),
        )
        assert sides is not None
        return sides, agreement

    @functools.cached_property
    def _compared(self) -> tuple[str, str]:
        """Texts of a pass that ranks compare in every run alike, before and after what may differ."""
        own = _lines(
            function=self.call.value,
            verify=self.options.verify,
            strict=self.options.strict,
            deltas=self.options.deltas,
            num_dst_pools=self.options.num_dst_pools,
            pool_index=self.pool_index,
        )
        return own, _lines(refit=self.refit)

    def _look(self, group: RefitGroup) -> _Sides:
        models = unwrap_models(self.src_model, self.target_model)
        if self.call.converts_target and _needs_mxfp8_conversion(self.target_model):
            mxfp8_backend_of(config_of(self.target_model))
        states = module_state(models.source), module_state(models.target)
        source = models.source
        if source is not None and (reason := stale.stale_reason(source, look_again=False)):
            raise ValueError(f"the source model is stale and must not be read: {reason}")
        key = build_plan_cache_key(models, group, self.options, self.pool_index)
        return _Sides(models, states, key, plan_cache.get(key) or CachedPlans())

    def _plan(self, sides: _Sides, agreement: Agreement, group: RefitGroup) -> CachedPlan:
        """A plan that all ranks make together, because one of them has none."""
        source, target = sides.models.source, sides.models.target
        # Parameters that a transform has taken out of the target are planned as they were the last time.
        old = sides.plans.last
        known = {} if old is None else old.destinations
        transform = self.options.transform or (None if old is None else old.plan.transform)
        planned: dict[str, ParameterMetadata] = {}

        def adjust(metas: list[ParameterMetadata]) -> list[ParameterMetadata]:
            chosen = planned_destinations(target, metas, known, transform)
            planned.update((meta.name, meta) for meta in chosen)
            return chosen

        plan = build_local_reshard_plan(
            source,
            target,
            num_experts=sides.models.num_experts,
            group=group.handle,
            src_rank_offset=self.options.src_rank_offset,
            dst_rank_offset=self.options.dst_rank_offset,
            strict=self.options.strict,
            verify=self.options.verify is not None,
            adjust_destination=adjust,
            is_transformed=None if transform is None else transform.should_transform,
            execution_batch_bytes=self.options.execution_batch_bytes,
        )
        if old is not None:
            plan.transform = old.plan.transform
        _harmonize_buffer_dtypes(plan, source, target, group.handle)
        # Buffers may have another dtype by now.
        states = module_state(source), module_state(target)
        transformed: frozenset[str] = frozenset()
        if transform is not None:
            names = (*states[0].tensors, *planned)
            transformed = frozenset(filter(transform.should_transform, names))
        cached = CachedPlan(
            plan,
            agreement.new_plan_id,
            states,
            planned,
            self.options.strict,
            self.options.execution_batch_bytes,
            transformed,
        )
        if old is not None:  # what ranks still know of each other holds for any plan
            cached.deltas = old.deltas
        sides.plans.put(cached)
        plan_cache.put(sides.key, sides.plans, (source, target, group.key))
        return cached

    def _move(
        self,
        plan: ReshardPlan,
        models: Models,
        states: tuple[ModuleState, ModuleState],
        service: CopyService,
        group: RefitGroup,
    ) -> None:
        transform = self.options.transform or plan.transform
        modules = models.source, models.target
        asked = plan, modules, states, service, group.handle, transform
        # All that has been planned is there, so `strict`.
        if self.options.verify != "checksum":
            execute(*asked, strict=True)
            return
        problem, written = FirstError(), ""
        copies: list[PreparedCopies] = []
        before = stale.counted_by_torch(models.source, states[0])
        with problem:
            copies = execute(*asked, strict=True, with_checksums=True)
            written = _text_of_writes(plan, models, states, before)
        # Others may have come further than this rank, and would wait for its checksums.
        ranks = RefitRanks(group, service)
        ranks.agree_that_it_ran(problem)
        prove_refit(plan, *modules, ranks, transform, copies, written=written)

    def _move_changes(
        self,
        cached: CachedPlan,
        models: Models,
        states: tuple[ModuleState, ModuleState],
        service: CopyService,
        group: RefitGroup,
        agreement: Agreement,
        changed: Changed | None,
    ) -> DeltaReport:
        plan, deltas = cached.plan, cached.deltas
        modules = models.source, models.target
        ranks = RefitRanks(group, service)
        delta = Delta(
            plan=plan,
            modules=modules,
            states=states,
            service=service,
            group=group.handle,
            ranks=ranks,
            transform=self.options.transform or plan.transform,
            # No other refit of these ranks has it.
            token=agreement.new_plan_id,
            is_checked=self.options.deltas == "checked",
            most_bytes=self.options.execution_batch_bytes,
            changed=changed,
        )
        problem, written = FirstError(), ""
        is_proven = self.options.verify == "checksum"
        before = stale.counted_by_torch(models.source, states[0]) if is_proven else ()
        with problem:
            report = deltas.run(delta)
            if is_proven:
                written = _text_of_writes(plan, models, states, before)
        if is_proven:
            ranks.agree_that_it_ran(problem)
            prove_refit(
                plan, *modules, ranks, delta.transform, hashed=deltas.checksums, written=written
            )
        problem.raise_own()
        deltas.commit(delta)
        return report
