"""Weights of one model into another, as often as the source is trained: plans and services are kept."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from moe_comm.peers.agree import FirstError
from moe_comm.peers.missed_calls import tells_peers
from moe_comm.resharding.copy_services.base import CopyService
from moe_comm.resharding.hold.deltas import Changed, DeltaReport
from moe_comm.resharding.hold.plan_cache import plan_cache
from moe_comm.resharding.hold.refit_group import RefitGroup, agree
from moe_comm.resharding.hold.refit_models import Model
from moe_comm.resharding.hold.refit_options import DeltaKind, Group, RefitOptions, Verify
from moe_comm.resharding.hold.refit_pass import RefitCall, RefitPass
from moe_comm.resharding.hold.refit_services import (
    RefitBackendName,
    check_backend,
    clear_service_cache,
)

P = ParamSpec("P")
ResultT = TypeVar("ResultT")


def clear_plan_cache() -> None:
    """Forget all plans of this process. All ranks of a refit plan anew where one has forgotten."""
    plan_cache.clear()


def clear_all_caches() -> None:
    """Forget all services and plans of this process."""
    clear_service_cache()
    clear_plan_cache()


def _tells_group(position: int) -> Callable[[Callable[P, ResultT]], Callable[P, ResultT]]:
    """A decorator for refits: peers hear of arguments that Python cannot bind.

    Args:
        position: Position of `group` among the positional arguments, `self` included.
    """

    def tell(error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        group = kwargs.get("group", args[position] if len(args) > position else None)
        given = (*args, *kwargs.values())
        service = next((each for each in given if isinstance(each, CopyService)), None)
        problem = FirstError(error)
        del error  # kept in one place
        _agree_on_nothing(RefitGroup(group, service, is_in_doubt=True), problem)

    return tells_peers(tell)


def _agree_on_nothing(group: RefitGroup, problem: FirstError) -> None:
    """Raise what is wrong on this rank, after the others have heard of it."""
    agree(group, problem=problem, options="", has_service=False, plan_ids=[], nonce=0)


def _reject_run(error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell peers, who are in a run of the refit."""
    problem = FirstError(error)
    del error  # kept in one place
    _agree_on_nothing(args[0]._passes[0].ranks(), problem)


class Refit:
    """Weights of one model into another: planned once, run as often as the source is trained.

    Collective: all ranks make it, and run it in the same order among their other refits. It keeps both
    models alive. Making it does what `prepare_swap_model_weights` does, and plans are shared with that
    function and with `swap_model_weights`. The first run connects the transport and prepares the copies;
    later ones repeat them.

    Before each run every rank sees whether both models still hold what was planned for. A rank where
    tensors were replaced, or their memory, prepares its copies anew. Where names, shapes, dtypes or the
    way in which tensors are cut are others on one rank, all ranks plan anew.

    Args:
        src_model: Part of the source that this rank holds, or None.
        target_model: Part of the target that this rank holds, or None. Runs write it in place. A target whose
            config asks for MXFP8 inference is converted here.
        refit_method: "symmetric", "gloo", "nccl", "nvshmem", or a `CopyService`.
        group: The ranks, as for `swap_model_weights`, like all that follow.
        src_rank_offset: Added to the ranks of the source's groups.
        dst_rank_offset: Added to the ranks of the target's groups.
        transform: A `ReshardTransform`, or an object with its methods; None for none.
        num_dst_pools: Groups of ranks that each hold a whole target.
        dst_pool_index: Index of the pool, in [0, `num_dst_pools`), that this rank's target belongs to.
        verify: "plan", "checksum" or None.
        strict: Whether source parameters without a destination are refused.
        execution_batch_bytes: As in `swap_model_weights`.
        deltas: "blocks": after the first run, of what lies in CPU memory only blocks of 64 KiB travel that
            changed since their destination got them. "checked": and targets are read before, for blocks
            that are not what was sent. None: everything travels.

    Attributes:
        last_delta: Numbers of the last run with deltas, a `DeltaReport`; None before it.

    Raises:
        TypeError, ValueError, RuntimeError, CommunicationError: As `swap_model_weights`, on every rank.

    Example:
        refit = Refit(trained, served, "symmetric")
        for batch in batches:
            train(trained, batch)
            refit.run()
    """

    @_tells_group(4)
    def __init__(
        self,
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
        execution_batch_bytes: int | None = None,
        deltas: DeltaKind = None,
    ) -> None:
        self.last_delta: DeltaReport | None = None
        self._passes: list[RefitPass] = []
        for each in _passes(
            RefitCall.REFIT,
            src_model,
            target_model,
            *_service_of(refit_method),
            RefitOptions(
                group,
                src_rank_offset,
                dst_rank_offset,
                transform,
                num_dst_pools,
                dst_pool_index,
                verify,
                strict,
                execution_batch_bytes,
                deltas,
            ),
        ):
            # The plans of all ranks have the same id, by which they tell this refit from another.
            plan_id = each.prepare()
            refit = self._passes[0].refit if self._passes else f"{plan_id:016x}"
            self._passes.append(dataclasses.replace(each, call=RefitCall.REFIT_RUN, refit=refit))

    @tells_peers(_reject_run)
    def run(self, *, changed: Changed | None = None) -> None:
        """Copy the weights of the source as they are now into the target. Collective, blocking.

        Args:
            changed: Tensors of this rank's source that may have changed since the last run; only with deltas,
                which then read these alone. A mapping by name, or a callable that gets each name, to True,
                False or a bool tensor that broadcasts to this rank's part of it. A name that a mapping lacks
                has not changed. What a destination has not got yet travels in any case. None: all are read.

        Raises:
            ValueError: The source is stale, no plan can be made for what the models hold now, or ranks
                run different refits; on every rank, before anything moves.
            RuntimeError: An error of the service.
            RefitError: The target does not hold what its source holds; only with `verify="checksum"`.
            CommunicationError: A peer is gone or did not come.
        """
        reports = [report for each in self._passes if (report := each.run(changed)) is not None]
        self.last_delta = functools.reduce(operator.add, reports) if reports else None


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
    execution_batch_bytes: int | None = None,
) -> None:
    """Make the plans of later `swap_model_weights` calls. Collective.

    Called while both models hold ordinary weights. A target whose config asks for MXFP8 inference
    (`transformer_impl` "inference_optimized", `fp8_recipe` "mxfp8") is converted; later refits
    quantize into the same memory. A caller that converts its target by itself does so after this.

    Args:
        src_model: Part of the source that this rank holds, or None.
        target_model: Part of the target that this rank holds, or None.
        group: The ranks; None for the default group.
        src_rank_offset: Added to the ranks of the source's groups.
        dst_rank_offset: Added to the ranks of the target's groups.
        transform: A `ReshardTransform`, or an object with its methods; None for none.
        num_dst_pools: Groups of ranks that each hold a whole target.
        dst_pool_index: Index of the pool, in [0, `num_dst_pools`), that this rank's target belongs to.
        verify: Mode of verification: other than None, the plan is verified.
        strict: As in `swap_model_weights`.
        execution_batch_bytes: As in `swap_model_weights`.

    Raises:
        ValueError, RuntimeError, TypeError: As `swap_model_weights`.
    """
    for each in _passes(
        RefitCall.PREPARE,
        src_model,
        target_model,
        None,
        FirstError(),
        RefitOptions(
            group,
            src_rank_offset,
            dst_rank_offset,
            transform,
            num_dst_pools,
            dst_pool_index,
            verify,
            strict,
            execution_batch_bytes,
        ),
    ):
        each.prepare()


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
    execution_batch_bytes: int | None = None,
) -> None:
    """Copy the weights of `src_model` into `target_model`, however each is cut. Collective.

    Plans and services are kept: the next call with the same models moves data and little else. Ranks
    agree on whether they have them, so that all plan anew when a parameter of one changed.

    Models are `torch.nn.Module`s with `pg_collection` (see `parallelism.ProcessGroups`) or of
    DTensors, alone or in a list of one, or `CheckpointViews`. A rank may have both, one, or none: then it takes part and
    moves nothing.

    Args:
        src_model: Part of the source that this rank holds, or None.
        target_model: Part of the target that this rank holds, or None. Written in place.
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
        dst_pool_index: Index of the pool, in [0, `num_dst_pools`), that this rank's target belongs to.
        verify: "plan": a plan is verified when it is made. "checksum": and what each refit moved is
            compared at both ends. None: neither.
        strict: Whether a source parameter without a destination is an error, and a target parameter that a
            member of its tensor parallel or expert parallel group or device mesh lacks, or that one of these
            or a replica has with another dtype. Else, as in Megatron, whose trainers have heads that
            generators lack, such a source parameter stays where it is. A destination without a source is
            always an error.
        execution_batch_bytes: Most bytes that a rank needs at once beside both models and the slots of its
            transport: pieces that change their dtype, that a transform makes or that a transport takes only
            contiguous wait in memory of their own. The refit then runs in batches, and ranks take the
            smallest number. More is needed for a quantized parameter that is larger by itself, and for
            pending sums, which are reduced whole. None: all at once.

    Raises:
        TypeError: `refit_method` is neither a name nor a service, or a model is no module.
        ValueError: An argument is wrong on some rank, ranks ask for different things, the source is
            stale, or no plan can be made; on every rank, before anything moves.
        RuntimeError: A model has no `pg_collection`, on every rank; or an error of the service.
        CommunicationError: A peer is gone or did not come.
    """
    for each in _passes(
        RefitCall.SWAP,
        src_model,
        target_model,
        *_service_of(refit_method),
        RefitOptions(
            group,
            src_rank_offset,
            dst_rank_offset,
            transform,
            num_dst_pools,
            dst_pool_index,
            verify,
            strict,
            execution_batch_bytes,
        ),
    ):
        each.run()


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
    execution_batch_bytes: int | None = None,
) -> None:
    """One pass of `swap_model_weights`, over a service that is there. Collective.

    Args:
        src_model: Part of the source that this rank holds, or None.
        target_model: Target model; None on ranks whose target is of another pool.
        service: The transport.
        group: The ranks; None for those of the service.
        src_rank_offset: Added to the ranks of the source's groups.
        dst_rank_offset: Added to the ranks of the target's groups.
        transform: A `ReshardTransform`, or an object with its methods; None for that of
            `prepare_swap_model_weights`, if any.
        pool_index: Index of the pool that this pass writes.
        verify: As in `swap_model_weights`.
        strict: As in `swap_model_weights`.
        execution_batch_bytes: As in `swap_model_weights`.

    Raises:
        ValueError, RuntimeError, TypeError, CommunicationError: As `swap_model_weights`.
    """
    given: Any = service
    problem = FirstError()
    if not isinstance(given, CopyService):
        problem.keep(TypeError(f"service must be a CopyService, got {type(given).__name__}"))
        given = None
    RefitPass(
        RefitCall.RESHARD,
        src_model,
        target_model,
        given,
        RefitOptions(
            group,
            src_rank_offset,
            dst_rank_offset,
            transform,
            verify=verify,
            strict=strict,
            execution_batch_bytes=execution_batch_bytes,
        ),
        pool_index,
        problem,
    ).run()


def _service_of(refit_method: Any) -> tuple[CopyService | str | None, FirstError]:
    """A service or the name of one, and what is wrong with it."""
    problem = FirstError()
    with problem:
        if isinstance(refit_method, str):
            check_backend(refit_method)
        elif not isinstance(refit_method, CopyService):
            raise TypeError(
                "refit_method must be a backend name or a CopyService instance, got "
                f"{type(refit_method).__name__}"
            )
    return refit_method if isinstance(refit_method, str | CopyService) else None, problem


def _passes(
    call: RefitCall,
    src_model: Model,
    target_model: Model,
    service: CopyService | str | None,
    problem: FirstError,
    options: RefitOptions,
) -> Iterator[RefitPass]:
    """One for each pool of targets, of which the first raises what is wrong, on every rank."""
    with problem:
        options.check_pools()
    # Made one by one: a number of pools that other ranks do not share may be any number.
    for pool_index in range(1 if problem else options.num_dst_pools):
        target = target_model if pool_index == options.dst_pool_index else None
        yield RefitPass(call, src_model, target, service, options, pool_index, problem)
