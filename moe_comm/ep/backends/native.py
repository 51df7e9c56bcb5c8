"""Code shared by backends whose operations run in an extension module of this package."""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from moe_comm import env
from moe_comm.ep.backends import messages
from moe_comm.ep.backends.base import (
    Backend,
    CombineOutput,
    DispatchOutput,
    Operation,
    Plan,
    PlanTensors,
)
from moe_comm.ep.backends.native_dtypes import (
    DLPACK_TYPES,
    SUMMABLE_TYPES,
    as_dtype,
    dlpack_type,
)
from moe_comm.ep.backends.native_endpoint import (
    Brought,
    EndpointPlan,
    NativeEndpoint,
    NativeGroupOwner,
    Settings,
    SubmittedDispatch,
)
from moe_comm.ep.backends.native_outcomes import (
    NativeCombineOutput,
    NativeDispatchOutput,
    NativePlan,
)
from moe_comm.ep.backends.native_scales import Scales, describe_scales, quantization_code
from moe_comm.ep.call_options import CombineOptions, DispatchOptions
from moe_comm.ep.config import EpConfig, Layout, default_expert_rank
from moe_comm.ep.placement import Placement
from moe_comm.ep.tracing import PhaseRecord, check_trace_path, write_trace
from moe_comm.tensors.quantization import QUANTIZABLE_DTYPES, Quantization

__all__ = ["NativeBackend", "NativeEndpoint", "NativePlan", "Settings"]


class NativeBackend(Backend):
    """Dispatch and combine through windows of a symmetric heap; see `Backend`."""

    has_balanced_replicas = True

    def __init__(self, communicator: NativeGroupOwner, config: EpConfig) -> None:
        super().__init__(communicator, config)
        problem = ""
        try:
            placement = config.resolve_expert_rank(communicator.num_ranks)
            check_trace_path(env.trace_path(), communicator.rank_idx)
        except ValueError as error:
            # Peers are about to compare configurations, and must hear of it.
            problem = str(error)
            placement = default_expert_rank(config.num_slots, communicator.num_ranks)
        agreed = messages.describe_config(config, self.name, placement)
        if problem:
            agreed["expert_rank"] = problem
        self._endpoint = self._create_endpoint(
            Settings(
                group=communicator.require_native(),
                num_experts=config.num_slots,
                num_max_tokens=-1
                if config.num_max_tokens_per_rank is None
                else config.num_max_tokens_per_rank,
                expert_rank=placement.tolist(),
                depth=config.num_max_in_flight,
                num_low_latency_windows=config.num_windows_to_reserve,
                node_reduction=config.node_reduction,
                rank_reduction=config.rank_reduction,
                balances_replicas=config.placement is not None
                and config.replica_rule == "balanced",
                agreed=list(agreed.items()),
                num_max_topk=config.num_topk or 0,
                max_row_bytes=config.rail_row_bytes,
                hidden=config.hidden or 0,
                row_type=0 if config.dtype is None else dlpack_type(config.dtype),
            )
        )
        if problem:
            self._endpoint.destroy()
            raise ValueError(problem)
        # A glance sees where a tensor lies by its memory, which must tell devices apart, and does not
        # know of a buffer that takes no token.
        self._has_glances = (
            communicator.device.type in ("cpu", "cuda") and config.num_max_tokens_per_rank != 0
        )
        self._rank_idx = communicator.rank_idx
        self._num_local_ranks = communicator.num_local_ranks
        self._latest_scales: tuple[Quantization, torch.dtype, int, Scales] | None = None
        self._write_trace: Callable[[], object] | None = None
        path = env.trace_path()
        if path is not None:
            self._endpoint.enable_trace()
            # Runs once: at destroy(), when the buffer is dropped, or at the interpreter's exit.
            self._write_trace = weakref.finalize(
                self, _write_records, path, self._rank_idx, self._endpoint
            )

    def balance_replicas(self, placement: Placement | None) -> None:
        if placement is None:
            self._endpoint.balance_replicas(None, 0, 1)
        else:
            self._endpoint.balance_replicas(
                [*placement.slot_expert], placement.num_experts, self._num_local_ranks
            )

    @abc.abstractmethod
    def _create_endpoint(self, settings: Settings) -> NativeEndpoint:
        """The endpoint of this rank. Collective."""

    def can_quantize(self, quantization: Quantization) -> bool:
        return self._endpoint.can_quantize(quantization_code(quantization))

    def dispatch(
        self,
        x: torch.Tensor,
        x_sf: torch.Tensor | None,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        options: DispatchOptions,
    ) -> Operation[DispatchOutput]:
        return self._dispatch(x, x_sf, topk_idx, topk_weights, None, options)

    def dispatch_cached(
        self,
        x: torch.Tensor,
        x_sf: torch.Tensor | None,
        plan: Plan,
        topk_weights: torch.Tensor | None,
        options: DispatchOptions,
    ) -> Operation[DispatchOutput]:
        return self._dispatch(x, x_sf, None, topk_weights, plan, options)

    def _dispatch(
        self,
        x: torch.Tensor,
        x_sf: torch.Tensor | None,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        plan: Plan | None,
        options: DispatchOptions,
    ) -> Operation[DispatchOutput]:
        scales = None
        if x_sf is not None or options.quantization is not None:
            scales = describe_scales(x, x_sf, options.quantization)
        native_plan = None if plan is None else _native_plan(plan)
        made = self._endpoint.dispatch(
            *(x, x_sf, topk_idx, topk_weights, native_plan),
            *(None if scales is None else scales.arguments, options, dlpack_type(x.dtype)),
        )
        assert made is not None
        return self._output(*made, x.dtype, plan, options, scales)

    def dispatch_unchecked(
        self,
        x: Any,
        topk_idx: object,
        topk_weights: object,
        plan: Plan | None,
        options: DispatchOptions,
    ) -> Operation[DispatchOutput] | None:
        if not self._has_glances:
            return None
        scales = None
        if options.quantization is not None:
            scales = self._scales_at_a_glance(x, options.quantization)
            if scales is None:
                return None
        made = self._endpoint.dispatch(
            x,
            None,
            topk_idx,
            topk_weights,
            None if plan is None else _native_plan(plan),
            None if scales is None else scales.arguments,
            options,
            None,
        )
        if made is None:
            return None
        native, brought = made
        return self._output(native, brought, x.dtype, plan, options, scales)

    def _output(
        self,
        native: SubmittedDispatch,
        brought: Brought | None,
        dtype: torch.dtype,
        plan: Plan | None,
        options: DispatchOptions,
        scales: Scales | None,
    ) -> Operation[DispatchOutput]:
        is_early = not options.async_op or (
            (options.layout if plan is None else plan.layout) is Layout.LOW_LATENCY
        )
        return NativeDispatchOutput(native, self._endpoint, dtype, scales, is_early, brought)  # type: ignore[return-value]

    def _scales_at_a_glance(self, x: object, quantization: object) -> Scales | None:
        """Return the scales of a quantized x; None where a glance does not show that x can be quantized."""
        if type(x) is not torch.Tensor or type(quantization) is not Quantization:
            return None
        if x.dtype not in QUANTIZABLE_DTYPES or x.dim() != 2:
            return None
        hidden = x.shape[1]
        latest = self._latest_scales
        if latest is None or latest[:3] != (quantization, x.dtype, hidden):
            if not self.can_quantize(quantization):
                return None
            scales = describe_scales(x, None, quantization)
            latest = self._latest_scales = (quantization, x.dtype, hidden, scales)
        return latest[3]

    def combine(
        self,
        x: torch.Tensor | None,
        plan: Plan,
        topk_weights: torch.Tensor | None,
        row_weights: torch.Tensor | None,
        out: torch.Tensor | None,
        options: CombineOptions,
    ) -> Operation[CombineOutput]:
        native = self._endpoint.combine(
            x,
            _native_plan(plan),
            topk_weights,
            row_weights,
            out,
            options,
            0 if x is None else SUMMABLE_TYPES[x.dtype],
            False,
        )
        return NativeCombineOutput(native, out, is_early=not options.async_op)  # type: ignore[arg-type, return-value]

    def combine_unchecked(
        self,
        x: object,
        plan: Plan,
        topk_weights: object,
        row_weights: object,
        out: Any,
        options: CombineOptions,
        as_sums: bool,
    ) -> Operation[CombineOutput] | tuple[torch.Tensor, int] | None:
        if not self._has_glances:
            return None
        made = self._endpoint.combine(
            x, _native_plan(plan), topk_weights, row_weights, out, options, None, as_sums
        )
        if made is None or isinstance(made, tuple):
            return made
        return NativeCombineOutput(made, out, is_early=not options.async_op)  # type: ignore[return-value]

    def weighted_gradient(
        self, gradient: torch.Tensor, expert_out: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        dots = torch.empty_like(weights)
        self._endpoint.weighted_gradient(
            gradient, expert_out, weights, dots, SUMMABLE_TYPES[gradient.dtype]
        )
        return dots

    def empty_expert_output(self, plan: Plan, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        # A window of the heap, which combine reads in place.
        rows = self._endpoint.empty_rows(
            _native_plan(plan),
            hidden * dtype.itemsize if dtype not in DLPACK_TYPES else hidden,
            hidden * dtype.itemsize,
            DLPACK_TYPES.get(dtype, DLPACK_TYPES[torch.uint8]),
        )
        return as_dtype(rows, dtype)

    def import_plan(self, tensors: PlanTensors) -> Plan:
        native = self._endpoint.import_plan(
            tensors.counts.cpu().contiguous(),
            tensors.topk_idx.cpu().contiguous(),
            tensors.asked.cpu().contiguous(),
            int(tensors.layout),
            tensors.expert_alignment,
            tensors.hash,
        )
        return NativePlan(native, self._endpoint)

    def reject(self, operation: str, error: Exception) -> NoReturn:
        self._endpoint.reject(operation, str(error), isinstance(error, TypeError))
        raise AssertionError("a rejected operation did not raise") from error

    def wait_statistics(self) -> tuple[list[int], list[int]]:
        return self._endpoint.wait_statistics()

    def take_trace(self) -> list[PhaseRecord]:
        """Records since the last call, oldest first. The first call turns recording on."""
        self._endpoint.enable_trace()
        return _take_records(self._endpoint, self._rank_idx)

    def destroy(self) -> None:
        """Release what the buffer holds, and write the trace that `MOE_COMM_TRACE` asked for."""
        self._endpoint.destroy()
        if self._write_trace is not None:
            self._write_trace()


def _take_records(endpoint: NativeEndpoint, rank_idx: int) -> list[PhaseRecord]:
    return [
        PhaseRecord(
            rank=rank_idx,
            buffer=endpoint.buffer_number,
            epoch=epoch,
            operation=operation,
            phase=phase,
            start_ns=start_ns,
            end_ns=end_ns,
            peer=peer,
        )
        for epoch, operation, phase, start_ns, end_ns, peer in endpoint.take_trace()
    ]


def _write_records(path: str, rank_idx: int, endpoint: NativeEndpoint) -> None:
    write_trace(path, rank_idx, _take_records(endpoint, rank_idx))


def _native_plan(plan: Plan) -> EndpointPlan:
    assert isinstance(plan, NativePlan)
    return plan.native
