"""The host backend for tensors on a device, which pass through the host's memory.

For GPUs that do not reach each other. What an operation reads is copied to the host in the caller's current
stream, which the call waits for; the host moves rows; what came is copied to the device again.
"""

from __future__ import annotations

import abc
import dataclasses
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar, cast

import torch

from moe_comm.ep.backends.base import (
    Backend,
    CombineOutput,
    DispatchOutput,
    Ended,
    Operation,
    Plan,
)
from moe_comm.ep.backends.host import HostBackend
from moe_comm.ep.call_options import CombineOptions, DispatchOptions
from moe_comm.ep.config import EpConfig, Layout
from moe_comm.errors import CapacityError
from moe_comm.peers.accelerators import has_pinned_memory, is_capturing
from moe_comm.peers.communicator import Communicator
from moe_comm.peers.missed_calls import Telling

OutputT = TypeVar("OutputT", bound=Ended)


class StagedBackend(HostBackend):
    """Operations by threads of the CPU on tensors of a device; see `Backend`.

    Tokens and sums cross by page-locked memory, which torch keeps and lends again; rows of experts by
    windows of the heap. Results are ordinary memory of the device.
    """

    def __init__(self, communicator: Communicator, config: EpConfig) -> None:
        self._device = communicator.device
        self._pins = has_pinned_memory(self._device)
        super().__init__(communicator, config)
        self._is_own_slot = (
            config.resolve_expert_rank(communicator.num_ranks) == communicator.rank_idx
        )

    def dispatch(
        self,
        x: torch.Tensor,
        x_sf: torch.Tensor | None,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        options: DispatchOptions,
    ) -> Operation[DispatchOutput]:
        with Telling(self.reject, "dispatch"):
            self._check_stream()
            rows, ids = self._fetch(x), self._fetch(topk_idx)
            scales, weights = self._fetch_optional(x_sf), self._fetch_optional(topk_weights)
        operation = super().dispatch(rows, scales, ids, weights, _left_in_heap(options))
        return _StagedDispatch(operation, self._device, is_async=options.async_op)

    def dispatch_unchecked(self, *_: object) -> None:
        return None  # a glance tells of memory of the host alone

    def dispatch_cached(
        self,
        x: torch.Tensor,
        x_sf: torch.Tensor | None,
        plan: Plan,
        topk_weights: torch.Tensor | None,
        options: DispatchOptions,
    ) -> Operation[DispatchOutput]:
        with Telling(self.reject, "dispatch"):
            self._check_stream()
            rows = self._fetch(x)
            scales, weights = self._fetch_optional(x_sf), self._fetch_optional(topk_weights)
        operation = super().dispatch_cached(rows, scales, plan, weights, _left_in_heap(options))
        return _StagedDispatch(operation, self._device, is_async=options.async_op)

    def combine(
        self,
        x: torch.Tensor | None,
        plan: Plan,
        topk_weights: torch.Tensor | None,
        row_weights: torch.Tensor | None,
        out: torch.Tensor | None,
        options: CombineOptions,
    ) -> Operation[CombineOutput]:
        rows = sums = None
        with Telling(self.reject, "combine"):
            self._check_stream()
            weights, pulled = (self._fetch_optional(each) for each in (topk_weights, row_weights))
            if x is not None:
                rows = self._fetch_rows(x, plan)
                shape = (plan.num_tokens, x.shape[1])
                sums = self._on_host(shape, x.dtype)
                if out is None:
                    out = torch.empty(shape, dtype=x.dtype, device=self._device)
        operation = super().combine(rows, plan, weights, pulled, sums, options)
        return _StagedCombine(operation, self._device, out, is_async=options.async_op)

    def combine_unchecked(self, *_: object) -> None:
        return None

    def weighted_gradient(
        self, gradient: torch.Tensor, expert_out: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        # Where the rows are; the bits are those of the host.
        return Backend.weighted_gradient(self, gradient, expert_out, weights)

    def empty_expert_output(self, plan: Plan, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((plan.num_recv_tokens, hidden), dtype=dtype, device=self._device)

    def _check_stream(self) -> None:
        if is_capturing(self._device):
            raise ValueError(
                f"the host backend cannot be captured into a graph: rows on {self._device} pass through "
                "the host's memory, and the call waits for their copies; call it outside of the capture"
            )

    def _on_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=self._pins)

    def _fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the host, and wait for it."""
        return self._on_host(tuple(tensor.shape), tensor.dtype).copy_(tensor.detach())

    def _fetch_optional(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else self._fetch(tensor)

    def _fetch_rows(self, x: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Copy rows of experts to where a combine reads them in place, and wait for it."""
        try:
            rows = super().empty_expert_output(plan, x.shape[1], x.dtype)
        except CapacityError:  # which the combine words for every rank, if there is no room then
            rows = self._on_host(tuple(x.shape), x.dtype)
        num_filled = None
        if plan.layout is Layout.LOW_LATENCY:
            choices = plan.total_choices(True)
            assert choices is not None
            num_filled = choices[self._is_own_slot]
        _copy(rows, x.detach(), num_filled)
        return rows


def _left_in_heap(options: DispatchOptions) -> DispatchOptions:
    """Options of a dispatch whose result is copied to the device at once, from where it has come."""
    return options._replace(copy_out=False)


def _copy(target: torch.Tensor, source: torch.Tensor, num_filled: torch.Tensor | None) -> None:
    """Copy rows, of LOW_LATENCY those alone that something was sent to, and wait for it.

    Args:
        target: As `source`, on the device, or on the host.
        source: `[M, ...]`, or `[num_local_experts, M // num_local_experts, ...]`.
        num_filled: int64 `[num_local_experts]`, the first of each that are there; None for all.
    """
    if not source.numel():
        return  # of a rank without experts, whose rows have no shape by expert
    pairs = [(target, source)] if num_filled is None else _filled(target, source, num_filled)
    for there, here in pairs:
        there.copy_(here)


def _filled(
    target: torch.Tensor, source: torch.Tensor, num_filled: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    experts = [
        each if each.dim() == 3 else each.view(len(num_filled), -1, *each.shape[1:])
        for each in (target, source)
    ]
    for expert_idx, num_rows in enumerate(num_filled.tolist()):
        if num_rows:
            there, here = (each[expert_idx, :num_rows] for each in experts)
            yield there, here


class _Staged(abc.ABC, Generic[OutputT]):
    """An operation whose output is copied to the device by whoever waits first."""

    def __init__(self, native: Operation[OutputT], device: torch.device, *, is_async: bool) -> None:
        self._native: Operation[OutputT] | None = native
        self._device = device
        self._output: OutputT | None = None
        self._lock = threading.Lock()
        if not is_async:
            self.wait()

    @property
    def early(self) -> OutputT | None:
        return self._output

    def wait(self) -> OutputT:
        with self._lock:
            if self._native is not None:
                self._output = self._bring(self._native.wait())
                self._native = None  # and the window is free again
            assert self._output is not None
            return self._output

    def is_complete(self) -> bool:
        native = self._native
        return native is None or native.is_complete()

    @abc.abstractmethod
    def _bring(self, output: OutputT) -> OutputT:
        """Copy what came to the device."""

    def _on_device(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else _empty_like(tensor, self._device).copy_(tensor)


def _empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


@dataclasses.dataclass(frozen=True)
class _Places:
    """Tensors of a dispatch whose shapes are known before its rows have come; see `Operation.early`."""

    x: torch.Tensor
    x_sf: torch.Tensor | None
    topk_weights: torch.Tensor | None

    @classmethod
    def of(cls, output: DispatchOutput, device: torch.device) -> _Places:
        """Tensors on the device like those of an output on the host."""
        scales, weights = (
            None if each is None else _empty_like(each, device)
            for each in (output.x_sf, output.topk_weights)
        )
        return cls(_empty_like(output.x, device), scales, weights)


class _StagedDispatch(_Staged[DispatchOutput]):
    def __init__(
        self, native: Operation[DispatchOutput], device: torch.device, *, is_async: bool
    ) -> None:
        early = native.early if is_async else None
        self._places = None if early is None else _Places.of(early, device)
        super().__init__(native, device, is_async=is_async)

    @property
    def early(self) -> DispatchOutput | None:
        return self._output or cast("DispatchOutput | None", self._places)

    def _bring(self, output: DispatchOutput) -> DispatchOutput:
        places = self._places or _Places.of(output, self._device)
        counts = output.num_tokens_per_expert
        num_filled = counts if output.plan.layout is Layout.LOW_LATENCY else None
        for name in ("x", "x_sf", "topk_weights"):
            if getattr(places, name) is not None:
                _copy(getattr(places, name), getattr(output, name), num_filled)
        offsets = self._on_device(output.expert_offsets)
        assert offsets is not None
        return DispatchOutput(
            x=places.x,
            x_sf=places.x_sf,
            topk_idx=self._on_device(output.topk_idx),
            topk_weights=places.topk_weights,
            num_tokens_per_expert=counts,
            num_dropped_per_expert=output.num_dropped_per_expert,
            num_required_rows=output.num_required_rows,
            expert_offsets=offsets,
            wait_ns=output.wait_ns,
            plan=output.plan,
            gradients=output.gradients,
        )


class _StagedCombine(_Staged[CombineOutput]):
    def __init__(
        self,
        native: Operation[CombineOutput],
        device: torch.device,
        out: torch.Tensor | None,
        *,
        is_async: bool,
    ) -> None:
        self._out = out
        super().__init__(native, device, is_async=is_async)

    def _bring(self, output: CombineOutput) -> CombineOutput:
        if self._out is not None:
            assert output.x is not None
            self._out.detach().copy_(output.x)
        return CombineOutput(
            x=self._out,
            topk_weights=self._on_device(output.topk_weights),
            wait_ns=output.wait_ns,
            gradients=output.gradients,
        )
