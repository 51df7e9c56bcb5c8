"""Results of an extension module's operations, as tensors that are made when looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from moe_comm.ep.backends.base import PlanTensors
from moe_comm.ep.backends.native_dtypes import as_dtype
from moe_comm.ep.backends.native_endpoint import (
    Brought,
    EndpointPlan,
    NativeEndpoint,
    PendingNative,
    SubmittedCombine,
    SubmittedDispatch,
)
from moe_comm.ep.backends.native_scales import Scales
from moe_comm.ep.config import Layout

IssuedT = TypeVar("IssuedT", bound="_Issued")


class NativePlan:
    """A native plan; see `Plan`."""

    __slots__ = ("_endpoint", "_sizes", "native")

    def __init__(self, native: EndpointPlan, endpoint: NativeEndpoint) -> None:
        self.native = native
        self._endpoint = endpoint
        self._sizes: tuple[int, int, int, int] | None = None

    def _read(self) -> tuple[int, int, int, int]:
        # When asked for, and in one call: a decode step, which need not ask, sees what a call costs.
        if self._sizes is None:
            self._sizes = self.native.sizes
        return self._sizes

    @property
    def num_tokens(self) -> int:
        return self._read()[0]

    @property
    def num_topk(self) -> int:
        return self._read()[1]

    @property
    def num_recv_tokens(self) -> int:
        return self._read()[2]

    @property
    def num_recv_topk(self) -> int:
        return self._read()[3]

    @property
    def layout(self) -> Layout:
        return Layout(self.native.layout)

    @property
    def expert_alignment(self) -> int:
        return self.native.expert_alignment

    def total_choices(self, waits: bool) -> torch.Tensor | None:
        return self.native.total_choices(waits)

    def to_tensors(self) -> PlanTensors:
        """The plan as tensors that own their memory."""
        counts, slots, topk_idx, asked, plan_hash = self._endpoint.export_plan(self.native)
        return PlanTensors(
            counts=counts,
            slots=slots,
            topk_idx=topk_idx,
            layout=self.layout,
            expert_alignment=self.expert_alignment,
            num_recv_tokens=self.num_recv_tokens,
            asked=asked,
            hash=plan_hash,
        )


class _Issued:
    """An `Operation` that is its own output, whose tensors are made when they are looked at.

    The caller's stream may run behind it, and then the host may not have heard what all ranks say.
    """

    __slots__ = ("_is_early", "_native")

    _native: PendingNative
    _is_early: bool

    @property
    def early(self: IssuedT) -> IssuedT | None:
        return self if self._is_early else None

    def wait(self: IssuedT) -> IssuedT:
        self._native.judge()
        return self

    def is_complete(self) -> bool:
        return self._native.is_complete()


class NativeDispatchOutput(_Issued):
    """A dispatch as a `DispatchOutput` whose tensors are made when they are first looked at.

    A tensor costs half a microsecond, and few callers read all of them. Where two threads look at
    once, each gets a tensor over the same memory.

    Args:
        native: The dispatch.
        endpoint: Endpoint of its buffer.
        dtype: Dtype of the rows that were sent.
        scales: Scale factors of rows that travel quantized, or None.
        is_early: See `Operation.early`: False where shapes are not known before the end.
        brought: Parts of the result that came along, or None: made when looked at.
    """

    __slots__ = ("_dtype", "_endpoint", "_gradients", "_made", "_plan", "_scales", "_x")

    _native: SubmittedDispatch

    def __init__(
        self,
        native: SubmittedDispatch,
        endpoint: NativeEndpoint,
        dtype: torch.dtype,
        scales: Scales | None,
        is_early: bool = True,
        brought: Brought | None = None,
    ) -> None:
        self._native = native
        self._is_early = is_early
        self._endpoint = endpoint
        self._dtype = dtype if scales is None else scales.data_dtype
        self._scales = scales
        self._x: torch.Tensor | None = None
        self._made: dict[str, torch.Tensor | None] = {}
        self._plan: NativePlan | None = None
        self._gradients: int | None = None
        if brought is not None:
            plan, x, weights, counts, self._gradients = brought
            self._plan = NativePlan(plan, endpoint)
            self._x = as_dtype(x, self._dtype)
            self._made["topk_weights"] = weights
            if counts is not None:
                self._made["num_tokens_per_expert"] = counts

    @property
    def plan(self) -> NativePlan:
        if self._plan is None:
            self._plan = NativePlan(self._native.plan(), self._endpoint)
        return self._plan

    @property
    def x(self) -> torch.Tensor:
        x = self._x
        if x is None:
            self._x = x = as_dtype(self._native.x(), self._dtype)
        return x

    @property
    def x_sf(self) -> torch.Tensor | None:
        if self._scales is None:
            return None
        x_sf = self._made.get("x_sf")
        if x_sf is None:
            factors = self._native.x_sf()
            assert factors is not None
            self._made["x_sf"] = x_sf = as_dtype(factors, self._scales.dtype)
        return x_sf

    @property
    def topk_idx(self) -> torch.Tensor | None:
        return self._optional("topk_idx", self._native.topk_idx)

    @property
    def topk_weights(self) -> torch.Tensor | None:
        return self._optional("topk_weights", self._native.topk_weights)

    @property
    def num_tokens_per_expert(self) -> torch.Tensor:
        return self._present("num_tokens_per_expert", self._native.num_tokens_per_expert)

    @property
    def num_dropped_per_expert(self) -> torch.Tensor:
        return self._present("num_dropped_per_expert", self._native.num_dropped_per_expert)

    @property
    def num_required_rows(self) -> int:
        return self._native.num_required_rows()

    @property
    def wait_ns(self) -> torch.Tensor:
        return self._present("wait_ns", self._native.wait_ns)

    @property
    def expert_offsets(self) -> torch.Tensor:
        return self._present("expert_offsets", self._native.expert_offsets)

    @property
    def status(self) -> torch.Tensor | None:
        return self._optional("status", self._native.status)

    @property
    def gradients(self) -> int:
        return self._native.gradients() if self._gradients is None else self._gradients

    def _present(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        tensor = self._optional(name, make)
        assert tensor is not None
        return tensor

    def _optional(self, name: str, make: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]


class NativeCombineOutput(_Issued):
    """A combine as a `CombineOutput`; see `NativeDispatchOutput`.

    Args:
        native: The combine.
        out: The caller's memory for the sums, or None.
        is_early: Whether it was not asynchronous.
    """

    __slots__ = ("_out", "_result")

    _native: SubmittedCombine

    def __init__(
        self, native: SubmittedCombine, out: torch.Tensor | None, is_early: bool = True
    ) -> None:
        self._native = native
        self._is_early = is_early
        self._out = out
        self._result: tuple[torch.Tensor | None, torch.Tensor | None, int] | None = None

    def _read(self) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
        if self._result is None:
            self._result = self._native.result()
        return self._result

    @property
    def x(self) -> torch.Tensor | None:
        sums = self._read()[0]
        return self._out if sums is None else sums

    @property
    def topk_weights(self) -> torch.Tensor | None:
        return self._read()[1]

    @property
    def wait_ns(self) -> torch.Tensor:
        return self._native.wait_ns()

    @property
    def gradients(self) -> int:
        return self._read()[2]
