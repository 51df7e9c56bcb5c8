"""EpBuffer: dispatch and combine, eager."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal, NoReturn, ParamSpec, TypeVar, overload

import torch

from moe_comm.arguments import as_utf8, check_bool, check_kind, text_of
from moe_comm.ep import validation
from moe_comm.ep.backends.base import CombineOutput, DispatchOutput, Operation, Plan, PlanTensors
from moe_comm.ep.backends.buffer_agreement import agree_on_backend
from moe_comm.ep.call_options import CombineOptions, CopyOut, DispatchOptions, check_options
from moe_comm.ep.config import Capacity, EpConfig, Layout
from moe_comm.ep.expert_loads import ExpertLoads
from moe_comm.ep.handles import CombineResult, DispatchHandle, DispatchResult, WaitStatistics
from moe_comm.ep.placement import Placement
from moe_comm.ep.routing_map import list_choices
from moe_comm.ep.slot_table import SlotTable
from moe_comm.errors import interrupted_once
from moe_comm.peers import missed_calls
from moe_comm.peers.communicator import Communicator, check_communicator, gathers
from moe_comm.peers.destroyable import Destroyable
from moe_comm.peers.exclusive_use import in_use, use_alone
from moe_comm.peers.missed_calls import Telling
from moe_comm.tensors.memory import as_resolved
from moe_comm.tensors.quantization import Quantization, refusal

P = ParamSpec("P")
ResultT = TypeVar("ResultT")
_NOTHING = 0  # default of `gradients`; compared by identity, which is faster

# The operator registry: torch.library operators carry a buffer as an int64 id.
_buffers: weakref.WeakValueDictionary[int, EpBuffer] = weakref.WeakValueDictionary()
_buffer_ids = itertools.count(1)


def rejects_unbound(
    operation: str, buffer_of: Callable[[tuple[Any, ...], dict[str, Any]], EpBuffer | None]
) -> Callable[[Callable[P, ResultT]], Callable[P, ResultT]]:
    """A decorator for collective calls: arguments that Python cannot bind are an error on every rank.

    Args:
        operation: "dispatch" or "combine": what peers are in.
        buffer_of: The buffer of the call, from its arguments; None where they do not tell. Then peers
            hear of the mistake by this rank's next call.
    """

    def tell(error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            buffer = buffer_of(args, kwargs)
        except Exception:  # noqa: BLE001 - wrong arguments may raise anything
            buffer = None
        if isinstance(buffer, EpBuffer):
            buffer.reject(operation, error)
        missed_calls.keep(operation, error)

    return missed_calls.tells_peers(tell)


def resolve_buffer(buffer_id: int) -> EpBuffer:
    """The living buffer behind an operator's id.

    Raises:
        ValueError: No such buffer lives in this process.
    """
    buffer = _buffers.get(buffer_id)
    if buffer is None:
        raise ValueError(f"no living EpBuffer has id {buffer_id}")
    return buffer


class EpBuffer(Destroyable):
    """Moves tokens to the ranks of their experts and back.

    Collective: every rank of the communicator makes it, with an equal configuration and in the same
    order, and issues the same operations on it in the same order. One thread uses it at a time.

    A mistake of one rank (shape, dtype, handle, expert id, ...) is raised on every rank before
    anything is sent: ValueError or TypeError naming the rank and both values; the buffer stays
    usable.

    Args:
        communicator: Owner of the peers.
        config: Shape of the exchange.

    Raises:
        ValueError: Configurations differ between ranks; both values are named on every rank.
    """

    @gathers
    def __init__(self, communicator: Communicator, config: EpConfig) -> None:
        check_communicator(communicator)
        communicator.check_process("EpBuffer")
        backend_class = agree_on_backend(communicator, config)
        self.communicator = communicator
        self.config = config
        self.buffer_id = next(_buffer_ids)
        # A compiled graph takes the id as data, so that layers with other buffers share the graph.
        self.id_tensor = torch.tensor(self.buffer_id, device="cpu")
        with torch.inference_mode(mode=False):
            # Empty; makes autograd record an operation for which no tensor of this rank needs a gradient.
            self.gradient_anchor = torch.empty(0, requires_grad=True, device="cpu")
        self.generation = 0
        self._reference = weakref.ref(self)
        self._busy = threading.Lock()
        self._is_destroyed = False
        self._has_warned = False
        self._masked_ranks: tuple[int, ...] = ()
        self._waits_at_reset: torch.Tensor | None = None
        # Maps expert ids to slots; None where ids are slots already, or the backend maps them.
        self._slot_table: SlotTable | None = None
        # Replays of graphs read the tables of their capture.
        self._former_tables: list[SlotTable] = []
        self._loads: ExpertLoads | None = None
        # The backend compares configurations between ranks, so a mistake of one is raised on all.
        self._backend = backend_class(communicator, config)
        communicator.adopt(self)
        self.expert_rank = config.resolve_expert_rank(communicator.num_ranks)
        self.num_local_experts = int((self.expert_rank == communicator.rank_idx).sum())
        if config.placement is not None:
            self._place(config.placement)
        _buffers[self.buffer_id] = self

    @property
    def is_destroyed(self) -> bool:
        """Return whether it has been destroyed, by itself or with its communicator."""
        return self._is_destroyed

    @property
    def backend(self) -> str:
        """Name of the backend."""
        return self._backend.name

    @gathers
    def replace_placement(self, placement: Placement) -> None:
        """Have later dispatches find experts where `placement` says. Collective.

        Operations that were called before, and their handles, keep the old placement: a handle holds
        slots, which do not move. Moving the weights between slots is up to the caller.

        Args:
            placement: Placement of the configuration's experts, with as many slots a rank as the
                configuration's; empty slots leave room for more replicas later. Becomes that of
                `config`.

        Raises:
            ValueError: The buffer has no placement, or the argument of some rank does not fit or differs
                from another's; on every rank, and the present placement stays.
            TypeError: The argument of some rank is not a Placement.
            RuntimeError: Another thread is using this buffer.
        """
        use_alone(self._busy, "replace_placement", lambda: self._replace_placement(placement))

    def _replace_placement(self, placement: Placement) -> None:
        def check() -> str:
            self._check_alive()
            present = self.config.placement
            if present is None:
                raise ValueError(
                    "the buffer was made without a placement, which another would have to replace"
                )
            check_kind("placement", placement, Placement)
            dataclasses.replace(self.config, placement=placement)
            found, expected = ([*map(len, each.slots)] for each in (placement, present))
            if found != expected:
                raise ValueError(f"placement must have {expected} slots a rank, got {found}")
            return str(placement.slots)

        self.communicator.check_together(
            check, "replace_placement", "ranks have different placements"
        )
        self.switch_placement(placement)

    def switch_placement(self, placement: Placement) -> None:
        """Replace the placement without a check. Local.

        For callers whose ranks have checked it, and agreed on it together with other things.
        """
        self.config = dataclasses.replace(self.config, placement=placement)
        self._place(placement)

    def _place(self, placement: Placement) -> None:
        """Map expert ids of later dispatches to slots: by a table here, or by counts in the backend."""
        if self._loads is not None:
            self._loads.place(placement)
        rule = self.config.replica_rule
        is_balanced = rule == "balanced" and placement.has_replicas
        if rule == "balanced":
            self._backend.balance_replicas(placement if is_balanced else None)
        if self._slot_table is not None and self.communicator.device.type != "cpu":
            self._former_tables.append(self._slot_table)
        self._slot_table = None
        if not is_balanced:
            table = SlotTable(
                placement,
                rule,
                self.communicator.rank_idx,
                self.communicator.num_local_ranks,
                self.communicator.device,
            )
            self._slot_table = None if table.keeps_ids else table

    @rejects_unbound("dispatch", lambda args, _: args[0])
    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None = None,
        *,
        layout: Layout = Layout.EXPERT_MAJOR,
        expert_alignment: int = 1,
        quantization: Quantization | None = None,
        capacity: Capacity | None = None,
        handle: DispatchHandle | None = None,
        copy_out: CopyOut = "auto",
        async_op: bool = False,
        gradients: int = 0,
    ) -> DispatchResult:
        """Send each token to the ranks of its experts.

        Collective: every rank calls it, in the same order. On a GPU, later work in the current stream may
        use the results; with `handle` and in LOW_LATENCY an error of a peer may be raised only in
        `result.event.wait()`, the next operation or `destroy()`. Records no gradient,
        and warns once where an input requires one; `moe_comm.dispatch` is the differentiable form.

        Args:
            x: `[num_tokens, hidden]`, dtype of the configuration, contiguous, on the communicator's
                device like all tensors of a call. With `handle`, any dtype and any hidden whose rows
                are a multiple of 16 bytes. Or `(data, sf)`, rows that are quantized already: data
                `[num_tokens, hidden]` of a one-byte dtype, contiguous, and sf
                `[num_tokens, num_scales]` of elements of 1, 2, 4 or 8 bytes, any strides; both travel
                as they are.
            topk_idx: int64 `[num_tokens, num_topk]`, contiguous; -1 marks an unused choice. Or a routing
                map, bool `[num_tokens, num_experts]`: a token goes to its experts in ascending order.
                None with `handle`.
            topk_weights: float32 `[num_tokens, num_topk]` (float64 allowed when x is float64), or
                None. Forwarded, not applied. Of a map `[num_tokens, num_experts]`, read where it is
                true; of any floating dtype, and float32 on its way.
            layout: Order of received rows.
            expert_alignment: Rows per local expert are padded with zero rows to a multiple of this.
                RANK_MAJOR: affects `expert_offsets` only. LOW_LATENCY: 1.
            quantization: Rows are quantized while they are written: `result.x` is e4m3 and
                `result.x_sf` has the scale factors. x is bfloat16, float16 or float32. None: rows
                travel as they are. With `(data, sf)` it says what the pair is, which must fit, and
                whether the factors arrive column-major; None takes any pair.
            capacity: Limits on what is delivered, and what happens beyond them. Not with `handle`,
                whose limits hold, and not with LOW_LATENCY.
            handle: Send to the places of an earlier dispatch of this buffer; its layout and
                alignment hold, counts are not exchanged again.
            copy_out: True: rows are copied out of the heap into ordinary memory and the window is
                free again at once. False: the result lies in the heap. "auto": copied out only when
                less than one further window would stay free.
            async_op: Return at once. `result.event.wait()` before x is read or the input
                overwritten; attributes of the result wait for their shape.
            gradients: Bit mask, for callers with a backward of their own (`moe_comm.ep.gradient_word`): 0 runs
                no backward; 1 can run one; + 2 needs the gradient of x; + 4 needs that of the weights.
                `result.gradients` is the union over all ranks: if it needs any gradient, every rank
                runs the backward.

        Returns:
            See `DispatchResult`.

        Raises:
            ValueError: A rule above is broken on some rank, or ranks disagree; also where a gradient
                is needed on some rank and another says 0.
            TypeError: A dtype or type is wrong on some rank.
            CapacityError: Some rank's heap cannot hold what it would receive, or `capacity` says to
                raise; nothing was sent.
            PeerFailedError: A peer died or gave up.
            PeerTimeoutError: A peer stopped progressing.
            RuntimeError: Another thread is using this buffer.

        Example:
            2 ranks, 2 experts, `topk_idx = [[1], [0]]` on rank 0 and `[[1], [1]]` on rank 1: rank 1
            receives 3 rows in the order (rank 0, token 0), (rank 1, token 0), (rank 1, token 1).
        """
        says_nothing = gradients is _NOTHING
        if says_nothing and not self._has_warned and _is_in_graph(x, topk_weights):
            self._warn_of_gradients("dispatch", x=x, topk_weights=topk_weights)
        # By hand: the constructor of a named tuple takes twice as long.
        options = tuple.__new__(
            DispatchOptions,
            (layout, expert_alignment, quantization, capacity, (), copy_out, async_op, gradients),
        )
        return self.run_dispatch(x, topk_idx, topk_weights, handle, options)

    def run_dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        handle: DispatchHandle | None,
        options: DispatchOptions,
        takes_strides: bool = False,
    ) -> DispatchResult:
        """Run `dispatch` for callers that hand its options on whole.

        Args:
            x: As in `dispatch`.
            topk_idx: As in `dispatch`.
            topk_weights: As in `dispatch`.
            handle: As in `dispatch`.
            options: The others, but for `masked_ranks`, which are this buffer's.
            takes_strides: Tensors of any strides are taken, and lazy conjugates and negations.
        """
        is_mine = True  # as in `use_alone`, which takes twice as long
        try:
            if not self._busy.acquire(False):
                is_mine = False
                self._check_alive()
                raise in_use("dispatch")
            self._begin("dispatch")
            if self._masked_ranks and handle is None and options.layout is Layout.LOW_LATENCY:
                options = options._replace(masked_ranks=self._masked_ranks)
            operation = plan = None
            if (
                self._slot_table is None
                if handle is None
                else (plan := self._plan_of(handle)) is not None
            ):
                operation = self._backend.dispatch_unchecked(
                    x, topk_idx, topk_weights, plan, options
                )
            if operation is None:
                operation = self._dispatch_by_rules(
                    x, topk_idx, topk_weights, handle, options, takes_strides
                )
            output = None if options.async_op else operation.early
            maker = (self.buffer_id, self.generation)
            if self._loads is not None and handle is None:
                self._loads.expect(operation, output)
        finally:
            if is_mine:
                self._busy.release()
        return DispatchResult(operation, output, options.capacity, maker=maker, handle=handle)

    def _begin(self, operation: str) -> None:
        """Begin a collective call of this buffer, while no other one runs."""
        if self._is_destroyed or self.communicator.is_forked():
            self._check_alive()
        self.communicator.latest_buffer = self._reference
        if self._loads is not None:
            self._loads.collect()  # releases results of dispatches that have ended
        if missed_calls.kept.calls:
            self.communicator.tell_missed(operation, self._backend.reject)

    def _plan_of(self, handle: object) -> Plan | None:
        """The plan of a handle of this buffer; None for anything else."""
        if (
            isinstance(handle, DispatchHandle)
            and handle.buffer_id == self.buffer_id
            and handle.generation == self.generation
        ):
            return handle.plan
        return None

    def _dispatch_by_rules(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        handle: DispatchHandle | None,
        options: DispatchOptions,
        takes_strides: bool,
    ) -> Operation[DispatchOutput]:
        """A dispatch that is checked rule by rule; an error on every rank where one is broken."""
        with Telling(self._backend.reject, "dispatch"):
            options = check_options(options)
            if handle is not None:
                validation.check_handle(handle, self.buffer_id, self.generation)
            if takes_strides:
                x = (as_resolved(x[0]), *x[1:]) if isinstance(x, tuple) and x else as_resolved(x)
                topk_idx, topk_weights = as_resolved(topk_idx), as_resolved(topk_weights)
            rows, scales = validation.check_rows(x, options.quantization)
            quantization = options.quantization
            is_pair = scales is not None
            if quantization and not is_pair and not self._backend.can_quantize(quantization):
                raise ValueError(refusal(f"backend {self._backend.name}", quantization))
            validation.check_devices(
                self.communicator.device,
                x=rows,
                sf=scales,
                topk_idx=topk_idx,
                topk_weights=topk_weights,
            )
            if handle is None and getattr(topk_idx, "dtype", None) is torch.bool:
                topk_idx, topk_weights = list_choices(self.config, rows, topk_idx, topk_weights)
            if handle is None:
                validation.check_dispatch(
                    *(self.config, rows, topk_idx, topk_weights, options),
                    is_quantized=scales is not None,
                )
                if self._slot_table is not None:
                    assert topk_idx is not None
                    topk_idx = self._slot_table.take(topk_idx)
            else:
                validation.check_cached_dispatch(
                    *(handle, rows, topk_idx, topk_weights, options),
                    is_quantized=scales is not None or options.quantization is not None,
                )
        if handle is not None:
            return self._backend.dispatch_cached(rows, scales, handle.plan, topk_weights, options)
        assert topk_idx is not None
        return self._backend.dispatch(rows, scales, topk_idx, topk_weights, options)

    def mask_ranks(self, ranks: Iterable[int]) -> None:
        """Leave ranks out of this buffer's LOW_LATENCY dispatches, beginning with this rank's next. Local.

        Nothing is sent to a masked rank and nothing comes from it; choices of its experts count in
        `num_dropped_per_expert` on its side and add nothing to the sum. A rank is masked in a dispatch
        when any rank masks it: the ranks agree in the dispatch itself. A masked rank still makes the
        calls; a dead one is masked after `Communicator.recover`.

        Args:
            ranks: All masked ranks; replaces those masked before.

        Raises:
            ValueError: Not a rank of this communicator.
            TypeError: Not an int.
        """
        masked = sorted({operator.index(rank_idx) for rank_idx in ranks})
        num_ranks = self.communicator.num_ranks
        for rank_idx in masked:
            if not 0 <= rank_idx < num_ranks:
                raise ValueError(f"{rank_idx} is not a rank of a communicator of {num_ranks}")
        self._masked_ranks = tuple(masked)

    def wait_statistics(self, *, reset: bool = False) -> WaitStatistics:
        """Return the time this rank has waited for each rank on this buffer. Local, also during operations.

        Counts from when the buffer was made or the last reset, over operations of every kind.
        Backends that cannot tell ("collective", "deep_ep", "reference") have zeros.

        Args:
            reset: Later calls count from here.

        Raises:
            ValueError: The buffer has been destroyed.
        """
        self._check_alive()
        num_ranks = self.communicator.num_ranks
        totals = torch.zeros(2, num_ranks, dtype=torch.int64, device="cpu")
        for row, values in zip(totals, self._backend.wait_statistics(), strict=True):
            if values:
                row.copy_(torch.tensor(values, device="cpu"))
        wait_ns, num_waits = (
            totals if self._waits_at_reset is None else totals - self._waits_at_reset
        )
        if reset:
            self._waits_at_reset = totals.clone()
        return WaitStatistics(wait_ns=wait_ns, num_waits=num_waits)

    def count_loads(self, enabled: bool = True) -> None:
        """Start or stop counting, from 0, how often later dispatches choose each expert. Local.

        The ranks exchange these counts in any case; counting adds up what has come, and waits for nothing.

        Args:
            enabled: Whether to count.

        Raises:
            ValueError: The buffer has been destroyed.
            TypeError: `enabled` is not a bool.
            RuntimeError: Another thread is using this buffer.
        """
        check_bool("enabled", enabled)
        use_alone(self._busy, "count_loads", lambda: self._count_loads(enabled))

    def _count_loads(self, enabled: bool) -> None:
        self._check_alive()
        self._loads = (
            ExpertLoads(self.config.num_experts, self.config.placement) if enabled else None
        )

    def expert_loads(self, *, reset: bool = False) -> torch.Tensor:
        """Return how many tokens, of all ranks, chose each logical expert since `count_loads()`. Local.

        Counts delivered rows: not choices that a capacity or a mask dropped, not dispatches with a handle
        (the same batch again), and not replays of a captured dispatch. Equal on all ranks that have called
        the same dispatches.

        Args:
            reset: Later calls count from here.

        Returns:
            int64 `[num_experts]` on the host; waits for dispatches in flight.

        Raises:
            ValueError: Nothing is counted, or the buffer has been destroyed.
            RuntimeError: Another thread is using this buffer.
            PeerFailedError, PeerTimeoutError: A dispatch failed after its call had returned. It is not
                counted, and the next call works.
        """
        read: list[torch.Tensor] = []
        use_alone(self._busy, "expert_loads", lambda: read.append(self._expert_loads(reset)))
        return read[0]

    def _expert_loads(self, reset: bool) -> torch.Tensor:
        self._check_alive()
        if self._loads is None:
            raise ValueError(
                "expert_loads has nothing to say: call count_loads() before the dispatches"
            )
        return self._loads.read(reset=reset)

    @property
    def masked_ranks(self) -> tuple[int, ...]:
        """Ranks that this rank masks, ascending."""
        return self._masked_ranks

    @overload
    def combine(
        self,
        expert_out: torch.Tensor,
        handle: DispatchHandle,
        *,
        topk_weights: torch.Tensor | None = ...,
        row_weights: None = ...,
        out: torch.Tensor | None = ...,
        copy_out: CopyOut = ...,
        async_op: Literal[False] = ...,
        gradients: Literal[0] = ...,
    ) -> torch.Tensor: ...

    @overload
    def combine(
        self,
        expert_out: torch.Tensor | None,
        handle: DispatchHandle,
        *,
        topk_weights: torch.Tensor | None = ...,
        row_weights: torch.Tensor | None = ...,
        out: torch.Tensor | None = ...,
        copy_out: CopyOut = ...,
        async_op: bool = ...,
        gradients: int = ...,
    ) -> torch.Tensor | CombineResult: ...

    @rejects_unbound("combine", lambda args, _: args[0])
    def combine(
        self,
        expert_out: torch.Tensor | None,
        handle: DispatchHandle,
        *,
        topk_weights: torch.Tensor | None = None,
        row_weights: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        copy_out: CopyOut = "auto",
        async_op: bool = False,
        gradients: int = 0,
    ) -> torch.Tensor | CombineResult:
        """Return expert outputs to the ranks their tokens came from, and sum them.

        Collective: every rank calls it, in the same order. When it returns, this rank's sums are
        complete and no peer reads `expert_out` any more. On a GPU this holds for later work in the
        current stream, and an error of a peer may be raised only in `event.wait()`, the next
        operation or `destroy()`. Records no gradient, and warns once where an input requires one;
        `moe_comm.combine` is the differentiable form.

        Args:
            expert_out: `[num_recv_tokens, hidden]`, contiguous: bfloat16, float16, float32 or
                float64, rows a multiple of 16 bytes; dtype and hidden may differ from the dispatch.
                Read in place when it lies in the heap (`empty_expert_output`, or the dispatched x
                itself), else copied in once. None to pull `row_weights` only.
            handle: Handle of a dispatch of this buffer.
            topk_weights: float32 `[num_tokens, num_topk]` (float64 allowed when rows are float64):
                each row is multiplied by its weight before it is added. Not RANK_MAJOR.
            row_weights: float32 (or float64) `[num_recv_tokens]`, RANK_MAJOR:
                `[num_recv_tokens, num_recv_topk]`: one number per row or choice, brought
                back unsummed as `CombineResult.topk_weights`.
            out: `[num_tokens, hidden]`, contiguous, to write the sums to.
            copy_out: As in `dispatch`, for the sums.
            async_op: Return at once with a `CombineResult`.
            gradients: As in `dispatch`; 2 more where any gradient is needed, and then 8 more for rows
                that come from those of the dispatch, or 16 more for others that require a gradient.
                Where any is needed, `topk_weights` are given on every rank or on none.

        Returns:
            `[num_tokens, hidden]` sums in the dtype of `expert_out`; a `CombineResult` with
            `async_op`, `row_weights` or `gradients`. RANK_MAJOR adds in rank order, the others in top-k order.

        Raises:
            ValueError: A rule above is broken on some rank, or ranks disagree.
            TypeError: A dtype or type is wrong on some rank.
            CapacityError: Some rank's heap cannot hold its rows or sums.
            PeerFailedError: A peer died or gave up.
            PeerTimeoutError: A peer stopped progressing.
            RuntimeError: Another thread is using this buffer.
        """
        says_nothing = gradients is _NOTHING
        if (
            says_nothing
            and not self._has_warned
            and _is_in_graph(expert_out, topk_weights, row_weights, out)
        ):
            self._warn_of_gradients(
                "combine",
                expert_out=expert_out,
                topk_weights=topk_weights,
                row_weights=row_weights,
                out=out,
            )
        # By hand, as in dispatch.
        options = tuple.__new__(CombineOptions, (copy_out, async_op, gradients))
        as_sums = row_weights is None and says_nothing
        combined = self.run_combine(
            expert_out, handle, topk_weights, row_weights, out, options, as_sums
        )
        if isinstance(combined, tuple):
            return combined[0]
        return CombineResult(combined, None if async_op else combined.early)

    def run_combine(
        self,
        expert_out: torch.Tensor | None,
        handle: DispatchHandle,
        topk_weights: torch.Tensor | None,
        row_weights: torch.Tensor | None,
        out: torch.Tensor | None,
        options: CombineOptions,
        as_sums: bool,
        takes_strides: bool = False,
    ) -> Operation[CombineOutput] | tuple[torch.Tensor, int]:
        """Run `combine` for callers that hand its options on whole.

        Args:
            expert_out: As in `combine`.
            handle: As in `combine`.
            topk_weights: As in `combine`.
            row_weights: As in `combine`.
            out: As in `combine`.
            options: The others.
            as_sums: Return `(sums, gradients of all ranks)` unless it is asynchronous.
            takes_strides: As in `run_dispatch`.
        """
        is_mine = True  # as in `use_alone`, which takes twice as long
        try:
            if not self._busy.acquire(False):
                is_mine = False
                self._check_alive()
                raise in_use("combine")
            self._begin("combine")
            combined = None
            if (plan := self._plan_of(handle)) is not None:
                combined = self._backend.combine_unchecked(
                    expert_out, plan, topk_weights, row_weights, out, options, as_sums
                )
            if combined is not None:
                return combined
            with Telling(self._backend.reject, "combine"):
                options = check_options(options)
                validation.check_handle(handle, self.buffer_id, self.generation)
                if takes_strides:
                    expert_out, topk_weights = as_resolved(expert_out), as_resolved(topk_weights)
                validation.check_devices(
                    self.communicator.device,
                    expert_out=expert_out,
                    topk_weights=topk_weights,
                    row_weights=row_weights,
                    out=out,
                )
                validation.check_combine(handle, expert_out, topk_weights, row_weights, out)
            operation = self._backend.combine(
                expert_out, handle.plan, topk_weights, row_weights, out, options
            )
            if options.async_op or not as_sums:
                return operation
            output = operation.early
            assert output is not None
            assert output.x is not None
            return output.x, output.gradients
        finally:
            if is_mine:
                self._busy.release()

    def empty_expert_output(
        self,
        handle: DispatchHandle,
        *,
        hidden: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """`[num_recv_tokens, hidden]`, uninitialized, which combine reads in place. Local.

        Args:
            handle: Handle of a dispatch of this buffer.
            hidden: Elements per row; None for the configuration's.
            dtype: None for the configuration's.

        Raises:
            ValueError: The handle is not of this buffer, or rows are not a multiple of 16 bytes.
            CapacityError: The heap cannot hold it.
        """
        self._check_alive()
        validation.check_handle(handle, self.buffer_id, self.generation)
        hidden = self.config.hidden if hidden is None else hidden
        dtype = self.config.dtype if dtype is None else dtype
        if hidden is None or dtype is None:
            raise ValueError(
                f"the configuration leaves hidden or dtype open: give both, got {hidden} and {dtype}"
            )
        validation.check_row("hidden", hidden, dtype)
        return self._backend.empty_expert_output(handle.plan, hidden, dtype)

    def reject(self, operation: str, error: Exception) -> NoReturn:
        """Raise `error` on every rank, in place of an operation that they enter and this rank cannot.

        For callers that check input of their own before a collective call. The buffer stays usable.

        Args:
            operation: "dispatch" or "combine": what the other ranks call.
            error: Raised as a TypeError where it is one, else as a ValueError, with this rank's number
                in front.
        """
        self._check_alive()
        text = text_of(error)
        if not isinstance(error, TypeError | ValueError) or not text.isascii():
            text = as_utf8(text)
            error = TypeError(text) if isinstance(error, TypeError) else ValueError(text)
        use_alone(self._busy, operation, lambda: self._backend.reject(operation, error))
        raise AssertionError("a rejected operation did not raise")

    def weighted_gradient(
        self, gradient: torch.Tensor, expert_out: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Local backward of weights applied in combine; see `Backend.weighted_gradient`."""
        self._check_alive()
        validation.check_devices(
            self.communicator.device, gradient=gradient, expert_out=expert_out, weights=weights
        )
        validation.check_weighted_gradient(gradient, expert_out, weights)
        return self._backend.weighted_gradient(gradient, expert_out, weights)

    def import_handle(self, tensors: PlanTensors) -> DispatchHandle:
        """The handle that a plan of this buffer was exported from (`handle.plan.to_tensors()`)."""
        return DispatchHandle(self._backend.import_plan(tensors), self.buffer_id, self.generation)

    def internode_bytes(self) -> tuple[int, int]:
        """Bytes between nodes so far: `(sent, received)` by this rank. ValueError on a single node."""
        return self._backend.internode_bytes()

    def destroy(self) -> None:
        """Release what the buffer holds. Local, idempotent; tensors handed out stay valid.

        Waits for operations in flight, `stall_timeout_s` at most: then they are aborted, and raise on
        every rank. A peer that goes on to use its buffer gets a ValueError that names this rank.

        Raises:
            RuntimeError: Another thread is using this buffer.
            ValueError, TypeError, PeerFailedError, PeerTimeoutError: An operation on a GPU failed
                after its call had returned. Everything has been released.
        """
        if not self._is_destroyed:
            use_alone(self._busy, "destroy", self._destroy)

    def _destroy(self) -> None:
        with interrupted_once():
            self._is_destroyed = True
            self.generation += 1
            self._backend.destroy()

    def _check_alive(self) -> None:
        if self._is_destroyed:
            raise ValueError(self.communicator.buffer_end_text)
        self.communicator.check_process("EpBuffer")

    def _warn_of_gradients(self, operation: str, **tensors: object) -> None:
        """Say once that what an eager operation returns has no gradient, where one is expected."""
        self._has_warned = True
        name = next(name for name, tensor in tensors.items() if _is_in_graph(tensor))
        with Telling(self.reject, operation):  # where a filter makes an error of it
            warnings.warn(
                f"EpBuffer.{operation} records no gradient, and {name} requires one: call "
                f"moe_comm.{operation}(..., buffer=buffer), or this under torch.no_grad()",
                stacklevel=4,  # past this, the operation, and what tells peers of wrong arguments
            )


def _is_in_graph(*tensors: object) -> bool:
    """Return whether autograd records what is done with any of them; asked before every eager call."""
    for tensor in tensors:
        if tensor is not None and getattr(tensor, "requires_grad", False):
            return torch.is_grad_enabled()
    return False
