"""Holds a backend whose tensors are not the host's to suites that are written for the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, NoReturn, TypeVar

import torch

from moe_comm import Communicator, EpConfig
from moe_comm.ep.backends.base import (
    Backend,
    CombineOutput,
    DispatchOutput,
    Operation,
    Plan,
    PlanTensors,
)
from moe_comm.ep.backends.cuda import CudaBackend
from moe_comm.ep.backends.nvshmem import NvshmemBackend
from moe_comm.ep.call_options import CombineOptions, DispatchOptions
from moe_comm.peers import cuda_devices
from moe_comm.peers.bootstrap import bootstrap_for
from tests.helpers.staging import Staging, warm_up_allocator

NUM_SMS = 4
"""SMs of one buffer on one rank: all buffers of all ranks that a check has at a time fit one GPU."""

ARRIVAL_TIMEOUT_S = 60.0
"""Less than a check may take: where ranks hang, a kernel says who waits for whom."""

OutputT = TypeVar("OutputT")


class _Fetched(Generic[OutputT]):
    """An operation whose output is copied to the host by whoever waits first."""

    def __init__(self, operation: Operation[Any], fetch: Callable[[Any], OutputT]) -> None:
        self._operation = operation
        self._fetch = fetch
        self._output: OutputT | None = None

    @property
    def early(self) -> None:
        return None

    def wait(self) -> OutputT:
        if self._output is None:
            self._output = self._fetch(self._operation.wait())
        return self._output

    def is_complete(self) -> bool:
        return self._operation.is_complete()


class OnDevice(Backend):
    """Takes and gives tensors of the host; `inner` sees them on the communicator's device."""

    def __init__(
        self,
        communicator: Communicator,
        config: EpConfig,
        inner: Callable[[Communicator, EpConfig], Backend],
    ) -> None:
        super().__init__(communicator, config)
        self._device = communicator.device
        self._staging = Staging(self._device)  # before any rank can have this buffer's kernels
        self._inner = inner(communicator, config)
        self.name = self._inner.name
        # By address on the host: windows that combine reads in place.
        self._windows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Copy from the host to the device; returns `target`."""
        return self._staging.put(target, source)

    def _fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy from the device to the host."""
        return self._staging.fetch(tensor)

    def _to_device(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        on_device = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device
        )
        return self._copy(on_device, tensor)

    def _rows_to_device(self, rows: torch.Tensor | None) -> torch.Tensor | None:
        if rows is None or rows.data_ptr() not in self._windows:
            return self._to_device(rows)
        _, window = self._windows[rows.data_ptr()]
        return self._copy(window, rows) if window.shape == rows.shape else self._to_device(rows)

    def _to_host(self, value: Any) -> Any:
        return self._fetch(value) if isinstance(value, torch.Tensor) else value

    def _fetch_dispatch(self, output: DispatchOutput) -> DispatchOutput:
        names = [field.name for field in dataclasses.fields(DispatchOutput)]
        return DispatchOutput(**{name: self._to_host(getattr(output, name)) for name in names})

    def dispatch(
        self,
        x: torch.Tensor,
        x_sf: torch.Tensor | None,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        options: DispatchOptions,
    ) -> Operation[DispatchOutput]:
        tensors = [self._to_device(tensor) for tensor in (x, x_sf, topk_idx, topk_weights)]
        return _Fetched(self._inner.dispatch(*tensors, options), self._fetch_dispatch)

    def dispatch_cached(
        self,
        x: torch.Tensor,
        x_sf: torch.Tensor | None,
        plan: Plan,
        topk_weights: torch.Tensor | None,
        options: DispatchOptions,
    ) -> Operation[DispatchOutput]:
        operation = self._inner.dispatch_cached(
            self._to_device(x),
            self._to_device(x_sf),
            plan,
            self._to_device(topk_weights),
            options,
        )
        return _Fetched(operation, self._fetch_dispatch)

    def combine(
        self,
        x: torch.Tensor | None,
        plan: Plan,
        topk_weights: torch.Tensor | None,
        row_weights: torch.Tensor | None,
        out: torch.Tensor | None,
        options: CombineOptions,
    ) -> Operation[CombineOutput]:
        on_device = None if out is None else torch.empty_like(out, device=self._device)
        operation = self._inner.combine(
            self._rows_to_device(x),
            plan,
            self._to_device(topk_weights),
            self._to_device(row_weights),
            on_device,
            options,
        )

        def fetch(output: CombineOutput) -> CombineOutput:
            names = [field.name for field in dataclasses.fields(CombineOutput)]
            values = {name: self._to_host(getattr(output, name)) for name in names}
            if out is not None:
                values["x"] = out.copy_(values["x"])
            return CombineOutput(**values)

        return _Fetched(operation, fetch)

    def weighted_gradient(
        self, gradient: torch.Tensor, expert_out: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        on_device = self._to_device(gradient)
        dots = self._inner.weighted_gradient(
            on_device, self._to_device(expert_out), self._to_device(weights)
        )
        gradient.copy_(self._to_host(on_device))
        return self._fetch(dots)

    def empty_expert_output(self, plan: Plan, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        window = self._inner.empty_expert_output(plan, hidden, dtype)
        rows = torch.empty_like(window, device="cpu")
        self._windows[rows.data_ptr()] = (rows, window)
        return rows

    def import_plan(self, tensors: PlanTensors) -> Plan:
        return self._inner.import_plan(tensors)

    def reject(self, operation: str, error: Exception) -> NoReturn:
        self._inner.reject(operation, error)

    def destroy(self) -> None:
        self._windows.clear()
        self._inner.destroy()


def _take_gpu(group: Any) -> None:
    """Take the GPU of the calling rank, in turn, with memory of torch's for its stream."""
    cuda_devices.take_device(bootstrap_for(group).rank_idx)
    warm_up_allocator(torch.device("cuda", torch.cuda.current_device()))


def connect_to_gpu(group: Any) -> Communicator:
    """A communicator whose rows live on a GPU, in turn by rank; ranks may share one."""
    _take_gpu(group)
    return Communicator(group, device="cuda", num_sms=NUM_SMS, arrival_timeout_s=ARRIVAL_TIMEOUT_S)


def make_on_gpu(communicator: Communicator, config: EpConfig) -> Backend:
    """The CUDA backend behind CPU tensors."""
    return OnDevice(communicator, config, CudaBackend)


def connect_nodes_to_gpu(group: Any, num_local_ranks: int) -> Communicator:
    """The same, where so many ranks share a node."""
    _take_gpu(group)
    return Communicator(
        group,
        device="cuda",
        num_local_ranks=num_local_ranks,
        backend="nvshmem",
        num_sms=NUM_SMS,
        arrival_timeout_s=ARRIVAL_TIMEOUT_S,
    )


def make_across_nodes(communicator: Communicator, config: EpConfig) -> Backend:
    """The backend across nodes behind CPU tensors."""
    return OnDevice(communicator, config, NvshmemBackend)
