"""Weights of one model into another, as often as the source is trained: plans and services are kept."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar

import torch.distributed as dist

from moe_comm.arguments import as_int, check_bool, shown
from moe_comm.bootstrap import Bootstrap
from moe_comm.missed_calls import tells_peers
from moe_comm.resharding import stale
from moe_comm.resharding.copy_services.base import CopyService
from moe_comm.resharding.copy_services.distributed_copy_service import DistributedCopyService
from moe_comm.resharding.execution import execute
from moe_comm.resharding.metadata import ParameterMetadata
from moe_comm.resharding.module_tensors import ModuleState, module_state
from moe_comm.resharding.mxfp8_weights import mxfp8_backend_of
from moe_comm.resharding.plan import ReshardPlan
from moe_comm.resharding.plan_cache import (
    CachedPlan,
    Contents,
    PlanCache,
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
    RefitBackendName,
    check_backend,
    clear_service_cache,
    get_or_create,
    get_or_create_service,
    known_service,
    service_cache,
)
from moe_comm.resharding.transform_protocol import ReshardTransform, as_reshard_transform
from moe_comm.resharding.verification import verify_refit

__all__ = [
    "RefitBackendName",
    "Verify",
    "_PlanCacheKey",
    "_harmonize_buffer_dtypes",
    "_needs_mxfp8_conversion",
    "_setup_mxfp8_transform_on_plan",
    "clear_all_caches",
    "clear_plan_cache",
    "clear_service_cache",
    "get_or_create_service",
    "prepare_swap_model_weights",
    "reshard_model_weights",
    "swap_model_weights",
]

Verify = Literal["plan", "checksum"] | None
"""None; "plan": a plan is verified when it is made; "checksum": and every refit after it ran."""

Group = dist.ProcessGroup | Bootstrap | None
P = ParamSpec("P")
ResultT = TypeVar("ResultT")

_PlanCacheKey = PlanCacheKey

_VERIFY = (None, "plan", "checksum")

_plan_cache = PlanCache()


# ------------------------------------------------------------------------------------------------
# Services.


def clear_plan_cache() -> None:
    """Forget all plans of this process."""
    _plan_cache.clear()


def clear_all_caches() -> None:
    """Forget all services and plans of this process."""
    clear_service_cache()
    clear_plan_cache()


# ------------------------------------------------------------------------------------------------
# A refit.


@dataclasses.dataclass(frozen=True)
class _Options:
    """What all ranks must ask for alike, by the names that callers know."""

    function: str
    verify: Verify
    strict: bool
    num_dst_pools: int
    pool_index: int
    refit_method: str = ""
    group: str = ""

    def __str__(self) -> str:
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return "\n".join(f"{name}={shown(value)}".replace("\n", " ") for name, value in values)


class _Pass:
    """One collective pass of a refit on this rank: from one source to one pool of targets."""

    def __init__(
        self,
        src_model: Model,
        target_model: Model,
        group: Group,
        rank_offsets: tuple[int, int],
        transform: Any,
        options: _Options,
        service: CopyService | str | None,
        problem: Exception | None,
    ) -> None:
        self.rank_offsets = rank_offsets
        self.group = RefitGroup(
            group,
            service if isinstance(service, CopyService) else None,
            is_in_doubt=service is None and problem is not None,
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
        if not (self.options.verify is None or self.options.verify in _VERIFY):
            raise ValueError(f"verify must be one of {_VERIFY}, got {self.options.verify!r}")
        check_bool("strict", self.options.strict)
        for side, offset in zip(("src", "dst"), self.rank_offsets, strict=True):
            as_int(f"{side}_rank_offset", offset, 0)
        self.models = unwrap_models(src_model, target_model)
        self.transform = None if transform is None else as_reshard_transform(transform)
        if not isinstance(self.service, str):
            self.group.check(self.service)
        if self.options.function == "prepare_swap_model_weights" and _needs_mxfp8_conversion(
            target_model
        ):
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
        found = _plan_cache.get(self.key)
        if not found:
            return []
        source, target = self._contents(self.states or self._look())
        return [
            cached.plan_id
            for cached in found
            if cached.is_strict >= self.options.strict
            and cached.source.is_same(source, None)
            and cached.target.is_same(target, self.transform or cached.plan.transform)
        ]

    def _look(self) -> tuple[ModuleState, ModuleState]:
        return module_state(self.models.source), module_state(self.models.target)

    def _contents(self, states: tuple[ModuleState, ModuleState]) -> tuple[Contents, Contents]:
        models = self.models.source, self.models.target
        return Contents.of(models[0], states[0]), Contents.of(models[1], states[1])

    def plan(self, agreement: Agreement) -> ReshardPlan:
        """The plan, made by all ranks together unless all have it."""
        found = _plan_cache.get(self.key)
        for cached in found:
            if cached.plan_id == agreement.plan_id:
                _plan_cache.put(self.key, cached)
                return cached.plan
        self.states = None  # planning may change the dtype of buffers
        # What a transform has taken out of the target is planned as it was the last time.
        old = next(iter(found), None)
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
        self.keep(plan, agreement.new_plan_id, planned)
        return plan

    def keep(self, plan: ReshardPlan, plan_id: int, planned: dict[str, ParameterMetadata]) -> None:
        """Remember a plan, for what the models hold now."""
        _harmonize_buffer_dtypes(plan, self.models.source, self.models.target, self.group.handle)
        contents = self._contents(self._look())
        owners = (self.models.source, self.models.target, self.group.key)
        cached = CachedPlan(plan, plan_id, *contents, planned, self.options.strict)
        _plan_cache.put(self.key, cached, owners)

    def prepare(self) -> None:
        """Make the plan, and convert a target that asks for it."""
        agreement = self.agree()
        plan = self.plan(agreement)
        if self.transform is None:
            _setup_mxfp8_transform_on_plan(plan, self.target_model)
        # The target may have been converted just now.
        _plan_cache.get(self.key)[0].target = self._contents(self._look())[1]

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
        plan = self.plan(agreement)
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


def _tells_group(position: int) -> Callable[[Callable[P, ResultT]], Callable[P, ResultT]]:
    """A decorator for refits: peers hear of arguments that Python cannot bind.

    Args:
        position: Of `group` among the positional arguments.
    """

    def tell(error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        group = kwargs.get("group", args[position] if len(args) > position else None)
        given = (*args, *kwargs.values())
        service = next((each for each in given if isinstance(each, CopyService)), None)
        _agree_on_nothing(RefitGroup(group, service, is_in_doubt=True), error)

    return tells_peers(tell)


def _agree_on_nothing(group: RefitGroup, problem: Exception) -> None:
    """Raise what is wrong on this rank, after the others have heard of it."""
    agree(group, problem=problem, options="", has_service=False, plan_ids=[], nonce=0)


@_tells_group(2)
def prepare_swap_model_weights(
    src_model: Model,
    target_model: Model,
    group: Group = None,
    src_rank_offset: int = 0,
    dst_rank_offset: int = 0,
    *,
    transform: Any = None,
    num_dst_pools: int = 1,
    dst_pool_index: int = 0,
    verify: Verify = "plan",
    strict: bool = False,
) -> None:
    """Make the plans of later `swap_model_weights` calls. Collective.

    Called while both models hold ordinary weights. A target whose config asks for MXFP8 inference
    (`transformer_impl` "inference_optimized", `fp8_recipe` "mxfp8") is converted; later refits
    quantise into the same memory. A caller that converts its target by itself does so after this.

    Args:
        src_model: See `swap_model_weights`, like the others.
        target_model: See there.
        group: See there.
        src_rank_offset: See there.
        dst_rank_offset: See there.
        transform: See there.
        num_dst_pools: See there.
        dst_pool_index: See there.
        verify: See there.
        strict: See there.

    Raises:
        ValueError, RuntimeError, TypeError: As `swap_model_weights`.
    """
    problem = _problem_with_pools(num_dst_pools, dst_pool_index)
    # The first pass raises it, on every rank.
    for pool_index in range(1 if problem is not None else num_dst_pools):
        _Pass(
            src_model,
            target_model if pool_index == dst_pool_index else None,
            group,
            (src_rank_offset, dst_rank_offset),
            transform,
            _Options("prepare_swap_model_weights", verify, strict, num_dst_pools, pool_index),
            None,
            problem,
        ).prepare()


@_tells_group(3)
def swap_model_weights(
    src_model: Model,
    target_model: Model,
    refit_method: RefitBackendName | CopyService,
    group: Group = None,
    src_rank_offset: int = 0,
    dst_rank_offset: int = 0,
    transform: Any = None,
    num_dst_pools: int = 1,
    dst_pool_index: int = 0,
    *,
    verify: Verify = "plan",
    strict: bool = False,
) -> None:
    """Copy the weights of `src_model` into `target_model`, however each is cut. Collective.

    Plans and services are kept: the next call with the same models moves data and little else. Ranks
    agree on whether they have them, so that all plan anew when a parameter of one changed.

    Models are `torch.nn.Module`s with `pg_collection` (see `parallelism.ProcessGroups`) or of
    DTensors, alone or in a list of one. A rank may have both, one, or none: then it takes part and
    moves nothing.

    Args:
        src_model: What this rank holds of the source, or None.
        target_model: What this rank holds of the target, or None. Written in place.
        refit_method: "symmetric", "gloo", "nccl", "nvshmem", or a `CopyService`.
        group: The ranks; a process group, a `Bootstrap`, or None for those of the service, and
            without one for the default group.
        src_rank_offset: Added to the ranks of the source's groups, where sources and targets are
            worlds of their own joined by `group`.
        dst_rank_offset: Added to the ranks of the target's groups.
        transform: A `ReshardTransform`, or an object with its methods; None for that of
            `prepare_swap_model_weights`, if any.
        num_dst_pools: Groups of ranks that each hold a whole target. They are written one after the
            other.
        dst_pool_index: Of these, the one that this rank's target belongs to.
        verify: "plan": a plan is verified when it is made. "checksum": and what each refit moved is
            compared at both ends. None: neither.
        strict: A source parameter without a destination is an error, and so is a target parameter that
            a member of its tensor parallel or expert parallel group or device mesh lacks, or that one
            of these or a replica has with another dtype. Else, as in Megatron, whose trainers have
            heads that generators lack, such a source parameter stays where it is. A destination
            without a source is always an error.

    Raises:
        TypeError: `refit_method` is neither a name nor a service, or a model is no module.
        ValueError: An argument is wrong on some rank, ranks ask for different things, the source is
            stale, or no plan can be made; on every rank, before anything moves.
        RuntimeError: A model has no `pg_collection`, on every rank; or an error of the service.
        CommunicationError: A peer is gone or did not come.
    """
    problem = _problem_with_pools(num_dst_pools, dst_pool_index)
    service: Any = refit_method
    if isinstance(service, str):
        try:
            check_backend(service)
        except ValueError as error:
            problem = error
    elif not isinstance(service, CopyService):
        problem = TypeError(
            "refit_method must be a backend name or a CopyService instance, got "
            f"{type(refit_method).__name__}"
        )
        service = None
    # The first pass raises what is wrong, on every rank.
    for pool_index in range(1 if problem is not None else num_dst_pools):
        _Pass(
            src_model,
            target_model if pool_index == dst_pool_index else None,
            group,
            (src_rank_offset, dst_rank_offset),
            transform,
            _Options("swap_model_weights", verify, strict, num_dst_pools, pool_index),
            service,
            problem,
        ).run()


@_tells_group(3)
def reshard_model_weights(
    src_model: Model,
    target_model: Model,
    service: CopyService,
    group: Group = None,
    src_rank_offset: int = 0,
    dst_rank_offset: int = 0,
    transform: Any = None,
    pool_index: int = 0,
    *,
    verify: Verify = "plan",
    strict: bool = False,
) -> None:
    """One pass of `swap_model_weights`, over a service that is there. Collective.

    Args:
        src_model: See `swap_model_weights`, like the others.
        target_model: None on ranks whose target is of another pool.
        service: The transport.
        group: See there.
        src_rank_offset: See there.
        dst_rank_offset: See there.
        transform: See there.
        pool_index: Which pool this pass writes.
        verify: See there.
        strict: See there.

    Raises:
        ValueError, RuntimeError, TypeError, CommunicationError: As `swap_model_weights`.
    """
    given: Any = service
    problem: Exception | None = None
    if not isinstance(given, CopyService):
        problem = TypeError(f"service must be a CopyService, got {type(given).__name__}")
        given = None
    _Pass(
        src_model,
        target_model,
        group,
        (src_rank_offset, dst_rank_offset),
        transform,
        _Options("reshard_model_weights", verify, strict, 1, pool_index),
        given,
        problem,
    ).run()


def _problem_with_pools(num_dst_pools: Any, dst_pool_index: Any) -> Exception | None:
    try:
        num_dst_pools = as_int("num_dst_pools", num_dst_pools, 1)
        dst_pool_index = as_int("dst_pool_index", dst_pool_index)
    except (TypeError, ValueError) as error:
        return error
    if not 0 <= dst_pool_index < num_dst_pools:
        return ValueError(f"dst_pool_index must be in [0, {num_dst_pools}), got {dst_pool_index}")
    return None
