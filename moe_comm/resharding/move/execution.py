"""Runs a reshard plan: reads the source, hands pieces to a copy service, writes the destination."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from moe_comm.arguments import check_resolved
from moe_comm.errors import CommunicationError
from moe_comm.peers.bootstrap import Bootstrap
from moe_comm.resharding.copy_services.base import CopyService
from moe_comm.resharding.copy_services.batched_copy import PreparedCopies
from moe_comm.resharding.copy_services.process_group import failure_of
from moe_comm.resharding.copy_services.symmetric_copy_service import PreparedBatch
from moe_comm.resharding.describe.module_tensors import (
    ModuleState,
    RefitSide,
    local_tensor,
    module_state,
    modules_with,
    problem_with_places,
)
from moe_comm.resharding.formats.number_formats import is_mxfp8_tensor
from moe_comm.resharding.move import stale
from moe_comm.resharding.move.scratch_pages import Staging, most_staged_bytes
from moe_comm.resharding.move.sources import Sources, piece_of, reduce_partial_sources
from moe_comm.resharding.move.weak_cache import WeakCache
from moe_comm.resharding.plan.joined_pieces import MAX_DIMS
from moe_comm.resharding.plan.plan_check import num_elements_of
from moe_comm.resharding.plan.reshard_plan import ReshardPlan, TensorSpec
from moe_comm.resharding.plan.transfer_op import JoinedPieces, TransferOp
from moe_comm.resharding.plan.transform_protocol import ReshardTransform, as_reshard_transform
from moe_comm.tensors.memory import check_memory, problem_with_memory, storage_id

logger = logging.getLogger(__name__)


# Tensors of one piece, after the first, take ids that no piece has: see `_task_ids`.
_TENSOR_SHIFT = 58
_MAX_TENSORS = 1 << (63 - _TENSOR_SHIFT)


def _copy(received: torch.Tensor, place: torch.Tensor) -> None:
    """Write `received` where it belongs."""
    # Tensors that were made in inference mode are written in it alone.
    with torch.inference_mode(place.is_inference()):
        place.copy_(received)


def _finalize(transform: ReshardTransform, op: TransferOp, buffers: list[torch.Tensor]) -> None:
    """Have a transform write what it received; its error names the parameter."""
    try:
        transform.finalize_recv_of(op, buffers)
    except Exception as error:
        text = str(error)
        if op.param_name not in text:
            error.args = (f"{op.param_name}: {text}", *error.args[1:])
        raise


def _get_mxfp8_accumulator(
    pending: dict[int, tuple[Any, ...]], dst_param: torch.Tensor
) -> tuple[torch.Tensor, list[Any]]:
    """The bfloat16 tensor that an MXFP8 parameter is assembled in before it is quantized, once.

    Args:
        pending: Entries by `id(dst_param)`: the parameter, that tensor (not initialized: pieces cover it),
            and a list for pieces. Gets an entry.
        dst_param: The parameter.

    Returns:
        The tensor and the list.
    """
    if id(dst_param) not in pending:
        full = torch.empty(dst_param.shape, dtype=torch.bfloat16, device=dst_param.device)
        pending[id(dst_param)] = (dst_param, full, [])
    _, full, pieces = pending[id(dst_param)]
    return full, pieces


def _refresh_module_caches(dst_module: RefitSide | None) -> None:
    """Call `refresh_cache()` of every module that has one: it derives things from its parameters."""
    if dst_module is None:
        return
    for module in modules_with(dst_module, "refresh_cache", look_again=False):
        refresh: Any = module.refresh_cache
        refresh()


def _synchronize() -> None:
    """Wait for all CUDA work of this process."""
    if torch.cuda.is_available() and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    try:
        torch.cuda.synchronize()
    except (AssertionError, RuntimeError):
        # There is no CUDA here: everything has happened already.
        if torch.cuda.is_available():
            raise


def _barrier(group: dist.ProcessGroup | Bootstrap | None) -> None:
    """Wait for all ranks.

    Raises:
        CommunicationError: A peer is gone or did not come.
    """
    if group is not None and not isinstance(group, dist.ProcessGroup):
        group.all_gather(None)
    elif group is not None or (dist.is_available() and dist.is_initialized()):
        try:
            dist.barrier(group=group)
        except CommunicationError:
            raise
        except RuntimeError as error:
            raise failure_of(
                group or dist.group.WORLD, "the barrier after the copies failed", error
            ) from error


def _task_ids(task_id: int | None, num_tensors: int) -> list[int | None]:
    """Ids of the tensors that one piece travels as, equal on both ends.

    The first has the id of the piece.

    Raises:
        ValueError: They do not fit into 63 bits.
    """
    if task_id is None or num_tensors < 2:
        return [task_id] * num_tensors
    if num_tensors > _MAX_TENSORS or task_id >> _TENSOR_SHIFT:
        raise ValueError(
            f"a piece of several tensors takes at most {_MAX_TENSORS} and a task id below "
            f"2^{_TENSOR_SHIFT}, got {num_tensors} tensors and task id {task_id}"
        )
    return [task_id | i << _TENSOR_SHIFT for i in range(num_tensors)]


def _problem_with(
    ops: list[TransferOp],
    specs: Mapping[str, TensorSpec],
    tensors: Mapping[str, torch.Tensor],
    side: str,
    strict: bool,
) -> str | None:
    """Return the reason that this rank's tensors are not what the plan was made for, or None."""
    for name in dict.fromkeys(piece.param_name for op in ops for piece in op.pieces):
        tensor, spec = tensors.get(name), specs.get(name)
        if tensor is None:
            if strict:
                return f"the plan moves {name}, which the {side} module does not have"
        elif spec is not None:
            shape = tuple(local_tensor(tensor).shape)
            if shape != tuple(spec.shape):
                return (
                    f"{name} of the {side} module was planned with shape {tuple(spec.shape)}, "
                    f"it has {shape}"
                )
            if strict and tensor.dtype != spec.dtype:
                return (
                    f"{name} of the {side} module was planned as {spec.dtype}, it is {tensor.dtype}"
                )
        for part in () if tensor is None else _parts_with_memory(tensor):
            if (problem := problem_with_memory(part)) is not None:
                return f"{name} of the {side} module {problem}"
    for op in ops:
        if op.joined is not None and (problem := _problem_with_joined(op.joined, tensors)):
            return f"the {side}: {problem}"
    return None


def _problem_with_joined(joined: JoinedPieces, tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Return the reason that pieces cannot move as one, or None."""
    first = tensors.get(joined.ops[0].param_name)
    for op, planned in zip(joined.ops, joined.views, strict=True):
        tensor = tensors.get(op.param_name)
        if tensor is None or first is None:
            return f"the plan moves {op.param_name} among others, of which one is not there"
        found = tensor.storage_offset(), tensor.stride()
        if found != planned:
            return (
                f"{op.param_name} was planned at element {planned[0]} of its storage with strides "
                f"{planned[1]}, it lies at {found[0]} with {found[1]}"
            )
        if storage_id(tensor) != storage_id(first):
            return (
                f"{op.param_name} was planned in one storage with {joined.ops[0].param_name}, it "
                "lies in another"
            )
    return None


def _parts_with_memory(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that hold a parameter's elements on this rank; none where its class alone knows."""
    parts: list[Any] = [local_tensor(tensor)]
    if is_mxfp8_tensor(tensor):
        parts = [getattr(tensor, name, None) for name in ("data", "scale")]
    return [
        part
        for part in parts
        if isinstance(part, torch.Tensor) and not hasattr(part, "__tensor_flatten__")
    ]


States = tuple[ModuleState, ModuleState]
"""States of the source and the destination."""


class PlanExecution:
    """A plan between two modules as it was submitted to a service, and what is left to do after that.

    One that `is_repeatable` runs again for as long as it `is_of` the plan and the modules. It refers to
    none of these, nor to the service, since it goes with the first of them.

    Args:
        plan: This rank's.
        states: States of the source and the destination.
        transform: Transform of the parameters that it names; None for none.
    """

    def __init__(
        self, plan: ReshardPlan, states: States, transform: ReshardTransform | None
    ) -> None:
        self._ops = plan.send_ops, plan.recv_ops
        self._states = states
        self._transform = transform
        self.is_repeatable = transform is None and not plan.reductions
        """Whether the service prepared it: nothing but views of the modules' own tensors."""
        self._prepared: Any = None
        self.skipped: dict[str, str] = {}
        """Sides, by name, of parameters that a module does not have."""
        self._is_direct = False  # a peer may write into the destination before the service is done
        self._takes_strided = False
        self._writebacks: list[Callable[[], None]] = []
        self._pending_quantized: dict[int, tuple[Any, ...]] = {}

    def is_of(self, plan: ReshardPlan, states: States) -> bool:
        """Return whether these would submit the same memory again. Lists of a plan may be replaced."""
        return (
            self._ops[0] is plan.send_ops
            and self._ops[1] is plan.recv_ops
            and self._states[0] is states[0]
            and self._states[1] is states[1]
        )

    def begin(self, plan: ReshardPlan, *, strict: bool) -> dict[str, torch.Tensor]:
        """Look at all tensors of a plan, and reduce pending sums, before anything moves.

        Returns:
            Reduced sources, by name.

        Raises:
            ValueError: A tensor is not what the plan was made for.
        """
        if self._transform is not None:
            self._transform.begin()
        sources, destinations = (state.tensors for state in self._states)
        problem = self._problem(plan, sources, destinations, strict)
        return reduce_partial_sources(plan, sources, problem)

    def submit(
        self,
        plan: ReshardPlan,
        service: Any,
        reduced: Mapping[str, torch.Tensor],
        pending_quantized: dict[int, tuple[Any, ...]],
        staging: Staging,
    ) -> None:
        """Give all pieces to the service, which prepares them where it can run them again.

        Args:
            plan: This, or a batch of it.
            service: The transport.
            reduced: Reduced sources that `begin` returned.
            pending_quantized: Parameters that are assembled, also by other batches.
            staging: Memory for pieces that wait or are converted, until this has run.
        """
        self._pending_quantized = pending_quantized
        sources, destinations = (state.tensors for state in self._states)
        # Mock services have neither attribute nor constructor of the base class.
        self._takes_strided = getattr(type(service), "takes_strided_tensors", False) is True
        self._submit_sends(plan, service, sources, reduced, staging)
        self._submit_recvs(plan, service, destinations, staging)
        can_repeat = all(hasattr(type(service), name) for name in ("prepare", "run_prepared"))
        self.is_repeatable &= can_repeat and not self.skipped
        if self.is_repeatable:
            self._prepared = service.prepare()
            if isinstance(self._prepared, PreparedBatch):
                # It is repeated for as long as it `is_of` modules in the same state.
                self._prepared = dataclasses.replace(self._prepared, are_in_place=True)

    def _problem(
        self,
        plan: ReshardPlan,
        sources: Mapping[str, torch.Tensor],
        destinations: Mapping[str, torch.Tensor],
        strict: bool,
    ) -> str | None:
        """Return the reason that the tensors are not those of the plan; looked for once per state."""
        key = (id(plan), *map(id, self._states), strict)
        checked = _checked.get(key) or ([], [])
        if self._transform is None and all(map(operator.is_, checked, self._ops)):
            return None
        received = plan.recv_ops
        if self._transform is not None:
            for op in (*plan.send_ops, *plan.recv_ops):
                names = [piece.param_name for piece in op.pieces[1:]]
                name = next(filter(self._is_transformed, names), None)
                if name is not None:
                    return f"{name} is for a transform that the plan was not made with"
            received = [op for op in received if not self._is_transformed(op.param_name)]
        problem = _problem_with(plan.send_ops, plan.sources, sources, "source", strict)
        problem = problem or _problem_with(
            received, plan.destinations, destinations, "destination", strict
        )
        if problem is None:  # memory may be another than when it was planned
            written = {piece.param_name for op in received for piece in op.pieces}
            problem = problem_with_places(
                {name: tensor for name, tensor in destinations.items() if name in written}
            )
        if problem is None and self._transform is None:
            _checked.put(key, self._ops, (plan, *self._states))
        return problem

    def _is_transformed(self, name: str) -> bool:
        return self._transform is not None and self._transform.should_transform(name)

    def _submit_sends(
        self,
        plan: ReshardPlan,
        service: CopyService,
        tensors: Mapping[str, torch.Tensor],
        reduced: Mapping[str, torch.Tensor],
        staging: Staging,
    ) -> None:
        sources = Sources(plan, tensors, reduced, self._is_transformed)
        for op in plan.send_ops:
            if op.param_name not in tensors:
                self.skipped[op.param_name] = "source"
                continue
            if self._is_transformed(op.param_name):
                assert self._transform is not None
                pieces = self._transform.prepare_send_of(op, sources.given(op.param_name))
                for piece in pieces:
                    check_memory(f"what the transform sends of {op.param_name}", piece)
            else:
                piece = piece_of(sources.get(op.param_name), op)
                if op.wire_dtype is not None and piece.dtype != op.wire_dtype:
                    piece = staging.cast(piece, op.wire_dtype)
                    self.is_repeatable = False
                check_resolved(f"{op.param_name} of the source module", piece)
                self.is_repeatable &= not sources.is_fresh(op.param_name)
                pieces = [piece]
            for piece, task_id in zip(pieces, _task_ids(op.task_id, len(pieces)), strict=True):
                service.submit_send(self._sendable(piece, staging), op.peer_rank, task_id=task_id)

    def _can_copy(self, tensor: torch.Tensor) -> bool:
        """Return whether the service takes a tensor with the strides that it has."""
        return tensor.is_contiguous() or (self._takes_strided and tensor.dim() <= MAX_DIMS)

    def _sendable(self, tensor: torch.Tensor, staging: Staging) -> torch.Tensor:
        if self._can_copy(tensor):
            return tensor
        self.is_repeatable = False
        return staging.contiguous(tensor)

    def _submit_recvs(
        self,
        plan: ReshardPlan,
        service: CopyService,
        tensors: Mapping[str, torch.Tensor],
        staging: Staging,
    ) -> None:
        name_at: dict[tuple[Any, ...], str] = {}
        for op in plan.recv_ops:
            if self._is_transformed(op.param_name):
                assert self._transform is not None
                buffers = self._transform.prepare_recv_of(op)
                for buffer in buffers:
                    check_memory(f"a buffer that the transform receives {op.param_name} in", buffer)
                targets = [self._target_of_buffer(buffer, staging) for buffer in buffers]
                self._writebacks.append(functools.partial(_finalize, self._transform, op, buffers))
            elif (destination := tensors.get(op.param_name)) is not None:
                target = self._target_of_piece(op, destination, name_at, staging)
                check_resolved(f"{op.param_name} of the destination module", target)
                targets = [target]
            else:
                self.skipped[op.param_name] = "destination"
                continue
            for target, task_id in zip(targets, _task_ids(op.task_id, len(targets)), strict=True):
                service.submit_recv(target, op.peer_rank, task_id=task_id)

    def _target_of_buffer(self, buffer: torch.Tensor, staging: Staging) -> torch.Tensor:
        """Return the tensor that receives a buffer of a transform."""
        if self._can_copy(buffer):
            return buffer
        staged = staging.empty(buffer.shape, buffer.dtype, buffer.device)
        self._writebacks.append(functools.partial(_copy, staged, buffer))
        return staged

    def _target_of_piece(
        self,
        op: TransferOp,
        destination: torch.Tensor,
        name_at: dict[tuple[Any, ...], str],
        staging: Staging,
    ) -> torch.Tensor:
        """Return the tensor that receives a piece: its destination where that takes it, else fresh memory.

        Args:
            op: The transfer.
            destination: The parameter.
            name_at: First name that is received at each place. Gets an entry.
            staging: Source of the fresh memory.
        """
        is_quantized = is_mxfp8_tensor(destination)
        if is_quantized:
            self.is_repeatable = False
            whole, _ = _get_mxfp8_accumulator(self._pending_quantized, destination)
        else:
            whole = local_tensor(destination)
        # Memory that is received under another name too is not received twice at once.
        place = (whole.data_ptr(), whole.dtype, whole.shape, whole.stride())
        name = op.param_name
        is_tied = whole.numel() > 0 and name_at.setdefault(place, name) != name
        piece = piece_of(whole, op)
        wire_dtype = op.wire_dtype or piece.dtype
        if piece.dtype == wire_dtype and self._can_copy(piece) and not is_tied:
            self._is_direct |= not is_quantized
            return piece
        self.is_repeatable = False
        staged = staging.empty(piece.shape, wire_dtype, piece.device)
        self._writebacks.append(functools.partial(_copy, staged, piece))
        return staged

    def run(
        self,
        service: Any,
        group: dist.ProcessGroup | Bootstrap | None,
        dst_module: RefitSide | None,
        *,
        later: Collection[int] = (),
        is_last: bool = True,
        with_checksums: bool = False,
    ) -> list[PreparedCopies]:
        """Move the data, write what was staged, refresh caches.

        Args:
            service: The transport.
            group: The plan's group.
            dst_module: Destinations.
            later: `id`s of MXFP8 parameters that later batches receive more of.
            is_last: Whether this is all of the plan, or its last batch.
            with_checksums: Whether to hash what is sent as it is copied, where the service can.

        Returns:
            Copies that the service may have hashed.
        """
        prepared = self._prepared
        if isinstance(prepared, PreparedBatch):
            prepared = dataclasses.replace(prepared, with_checksums=with_checksums)
        may_be_torn = self._is_direct
        had_quantized = bool(self._pending_quantized)
        try:
            try:
                if self.is_repeatable:
                    service.run_prepared(prepared)
                else:
                    service.run()
            except ValueError:
                # The services' word for a batch that they refused: nothing has moved.
                may_be_torn = False
                raise
            _synchronize()
            if service.requires_process_group_barrier:
                _barrier(group)
            may_be_torn |= had_quantized or bool(self._writebacks)
            # Peers are about to run the next batch.
            telling = contextlib.nullcontext() if is_last else _telling_peers(service)
            with telling, torch.no_grad():
                self._write_back(later, is_last=is_last)
            may_be_torn = dst_module is not None
            if is_last:
                _refresh_module_caches(dst_module)
            # Copies and refreshes are queued: a caller may capture graphs over the weights at once.
            _synchronize()
        except BaseException as error:
            if may_be_torn:
                stale.mark_torn(dst_module, "a refit", error)
            raise
        if had_quantized and torch.cuda.is_available():
            # The allocator would keep the accumulators, as large as the model in bfloat16. Does
            # nothing in a process that has not used CUDA.
            torch.cuda.empty_cache()
        copies = prepared.copies if isinstance(prepared, PreparedBatch) else None
        return [] if copies is None else [copies]

    def _write_back(self, later: Collection[int], *, is_last: bool) -> None:
        """Write what was staged. Each buffer is dropped as soon as it is written."""
        self._writebacks.reverse()
        while self._writebacks:
            self._writebacks.pop()()
        for number in self._pending_quantized.keys() - later:
            # Once per parameter: a block's scale depends on all of its elements.
            dst_param, full, _ = self._pending_quantized.pop(number)
            dst_param.quantize_(full)
        if self._transform is not None and is_last:
            self._transform.finish()


_checked: WeakCache[tuple[int | bool, ...], tuple[list[TransferOp], list[TransferOp]]] = WeakCache()
"""By the `id`s of plan and states: sends and receives that were found to fit."""

_executions: WeakCache[tuple[int, ...], PlanExecution] = WeakCache()
"""By the `id`s of service, plan, source and destination: what can run again."""


def execute_reshard_plan(
    plan: ReshardPlan,
    src_module: RefitSide | None,
    dst_module: RefitSide | None,
    service: CopyService,
    group: dist.ProcessGroup | Bootstrap | None = None,
    transform: ReshardTransform | None = None,
    *,
    strict: bool = False,
) -> None:
    """Move weights as a plan says. Collective over the plan's group.

    Blocks until this rank's destinations are written, the caches of their modules are refreshed, and
    its sources may change. Work that was queued on the current CUDA stream happens before.

    What does not fit where it belongs (another dtype, strides that the service does not take, MXFP8,
    a transform, memory that is received under another name too) is received into fresh memory and
    written when all has arrived; the rest is received in place. So when the refit fails on its way, a
    destination that would have been written by such copies alone is untouched, and any other is
    marked stale (`moe_comm.resharding.is_stale`). A refit that wrote everything takes the mark away.

    A service with `prepare()` and `run_prepared()` is not given anything anew when the same plan runs
    between the same modules, all in place, and no tensor has moved.

    Args:
        plan: This rank's.
        src_module: Sources; None on a rank that only receives.
        dst_module: Destinations; None on a rank that only sends.
        service: The transport; `submit_send`, `submit_recv` and `run` are all it must have.
        group: The plan's group, for the barrier of a service that needs one.
        transform: Transform of the parameters that it names; None for that of the plan.
        strict: Whether a tensor that is missing, or whose dtype is not the planned one, is an error; else it
            is skipped with a warning, or converted.

    Raises:
        ValueError: A tensor is not what the plan was made for; on every rank if the service can tell
            the others. Nothing has moved.
        Exception: Error that the service raises.
    """
    with _telling_peers(service):
        states = module_state(src_module), module_state(dst_module)
        chosen = plan.transform if transform is None else transform
    execute(plan, (src_module, dst_module), states, service, group, chosen, strict=strict)


def execute(
    plan: ReshardPlan,
    modules: tuple[RefitSide | None, RefitSide | None],
    states: States,
    service: CopyService,
    group: dist.ProcessGroup | Bootstrap | None,
    transform: ReshardTransform | None,
    *,
    strict: bool,
    with_checksums: bool = False,
) -> list[PreparedCopies]:
    """`execute_reshard_plan` for a caller that has just looked at the modules.

    Args:
        plan: This rank's.
        modules: Source and destination.
        states: States of `modules`, as `module_state` gave them.
        service: The transport.
        group: The plan's group.
        transform: Transform of the parameters that it names; None for none.
        strict: As there.
        with_checksums: Whether to hash what is sent as it is copied, where the service can.

    Returns:
        Copies that the service may have hashed.
    """
    dst_module = modules[1]
    if dst_module is not None and plan.recv_ops:
        stale.count_write(dst_module)
    copies: list[PreparedCopies] = []
    batches = plan.batches or [plan]
    logger.info("Executing %d sends and %d receives", len(plan.send_ops), len(plan.recv_ops))
    reduced: dict[str, torch.Tensor] = {}
    with _telling_peers(service), torch.no_grad():
        hooks = None if transform is None else as_reshard_transform(transform)
        known = [_known_execution(batch, modules, states, service, hooks) for batch in batches]
        if None in known:
            reduced = PlanExecution(plan, states, hooks).begin(plan, strict=strict)
    pending_quantized: dict[int, tuple[Any, ...]] = {}
    later = _later_quantized(batches, states[1])
    staging = Staging(_most_staged_bytes(batches) if None in known else 0)
    has_written = has_skipped = False
    for number, (batch, execution) in enumerate(zip(batches, known, strict=True)):
        owners = (service, batch, *modules)
        key = tuple(map(id, owners))
        try:
            if execution is None:
                with _telling_peers(service), torch.no_grad():
                    execution = PlanExecution(batch, states, hooks)
                    execution.submit(batch, service, reduced, pending_quantized, staging)
                    if execution.is_repeatable:
                        _executions.put(key, execution, owners)
            if execution.skipped:
                has_skipped = True
                logger.warning(
                    "Skipped parameters that a module does not have: %s", execution.skipped
                )
            copies += execution.run(
                service,
                group,
                dst_module,
                later=later[number],
                is_last=number + 1 == len(batches),
                with_checksums=with_checksums,
            )
        except BaseException as error:
            _executions.drop(key)
            if has_written:
                stale.mark_torn(dst_module, "a refit", error)
            raise
        has_written |= bool(batch.recv_ops)
        # Its staged tensors go before the next batch stages more.
        del execution
        known[number] = None
        staging.clear()
    if dst_module is not None and plan.recv_ops and not has_skipped:
        stale.clear_stale(dst_module, look_again=False)
    logger.info("Reshard complete")
    return copies


def exchange(
    service: CopyService,
    group: dist.ProcessGroup | Bootstrap | None,
    submit: Callable[[], None],
) -> None:
    """Run what `submit` gives to a service, all of it between memory of no module. Collective.

    Raises:
        Exception: Error of `submit`, of which the other ranks hear; or one that the service raises.
    """
    with _telling_peers(service), torch.no_grad():
        submit()
    service.run()
    if service.requires_process_group_barrier:
        _barrier(group)


def write_beside(
    dst_module: RefitSide | None, write: Callable[[], None], *, has_written: bool
) -> None:
    """Have a target written of what has arrived, as the last step of a refit. Local.

    Args:
        dst_module: The target, which is whole after that, and marked stale where it fails.
        write: Does it.
        has_written: Whether there is anything that caches have to be refreshed for.
    """
    try:
        with torch.no_grad():
            write()
        if has_written:
            _refresh_module_caches(dst_module)
            _synchronize()
    except BaseException as error:
        stale.mark_torn(dst_module, "a refit", error)
        raise
    if dst_module is not None:
        stale.clear_stale(dst_module, look_again=False)


def _known_execution(
    batch: ReshardPlan,
    modules: tuple[RefitSide | None, RefitSide | None],
    states: States,
    service: CopyService,
    hooks: ReshardTransform | None,
) -> PlanExecution | None:
    """Return the execution that has run before between the same tensors, and can run again."""
    key = tuple(map(id, (service, batch, *modules)))
    execution = None if hooks is not None else _executions.get(key)
    if execution is None or execution.is_of(batch, states):
        return execution
    _executions.drop(key)
    return None


def _most_staged_bytes(batches: list[ReshardPlan]) -> int:
    """Bound of what any of several batches converts and makes contiguous; 0 for one, whose memory goes piece by piece."""
    if len(batches) < 2:
        return 0
    return max(
        sum(most_staged_bytes(num_elements_of(op)) for op in (*batch.send_ops, *batch.recv_ops))
        for batch in batches
    )


def _later_quantized(batches: list[ReshardPlan], state: ModuleState) -> list[set[int]]:
    """For each batch, `id`s of the MXFP8 parameters that batches behind it receive."""
    later: list[set[int]] = [set()]
    tensors = state.tensors if len(batches) > 1 else {}
    for batch in reversed(batches[1:]):
        names = {op.param_name for op in batch.recv_ops}
        received = (tensors[name] for name in names if name in tensors)
        later.append(later[-1].union(id(each) for each in received if is_mxfp8_tensor(each)))
    return later[::-1]


@contextlib.contextmanager
def _telling_peers(service: CopyService) -> Iterator[None]:
    """Peers wait in `run()`: a rank that does not get there says so, and which it is."""
    try:
        yield
    except Exception as error:
        if hasattr(type(service), "abandon"):
            service.abandon(str(error).split("\n", 1)[0])
        rank_idx = getattr(service, "rank", None)
        if type(error) is ValueError and isinstance(rank_idx, int):
            raise ValueError(f"rank {rank_idx}: {error}") from error
        raise
