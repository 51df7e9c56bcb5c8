"""What backends share whose operations run in an extension module of this package."""

from __future__ import annotations

import abc
import dataclasses
import weakref
import zlib
from collections.abc import Callable
from typing import Any, Generic, NoReturn, TypeVar, cast

import torch
from torch.utils.dlpack import from_dlpack

from moe_comm import env
from moe_comm.backends.base import (
    Backend,
    CombineOutput,
    DispatchOutput,
    Operation,
    Plan,
    PlanTensors,
)
from moe_comm.backends.native_endpoint import (
    NativeEndpoint,
    NativeGroupOwner,
    PendingNative,
    Settings,
    SubmittedCombine,
    SubmittedDispatch,
)
from moe_comm.budget import scale_column_stride
from moe_comm.config import Capacity, EpConfig, Layout, default_expert_rank
from moe_comm.quantization import Quantization
from moe_comm.tracing import PhaseRecord, write_trace

__all__ = ["NativeBackend", "NativeEndpoint", "NativePlan", "Settings"]

OutputT = TypeVar("OutputT")
EndedT = TypeVar("EndedT", bound="_Ended")

# DLPack's `type code << 8 | bits`. Other dtypes travel as bytes and are viewed afterwards.
_DLPACK_TYPES: dict[torch.dtype, int] = {
    torch.bfloat16: 4 << 8 | 16,
    torch.float16: 2 << 8 | 16,
    torch.float32: 2 << 8 | 32,
    torch.float64: 2 << 8 | 64,
    torch.int8: 0 << 8 | 8,
    torch.int16: 0 << 8 | 16,
    torch.int32: 0 << 8 | 32,
    torch.int64: 0 << 8 | 64,
    torch.uint8: 1 << 8 | 8,
}
_SUMMABLE_TYPES: dict[torch.dtype, int] = {
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float32: 3,
    torch.float64: 4,
}


_ON_OVERFLOW = {"grow": 0, "drop": 1, "raise": 2}


class _Submitted(Generic[OutputT]):
    """An asynchronous operation whose tensors are made once, by whoever looks first."""

    def __init__(
        self,
        native: PendingNative,
        materialize: Callable[[], OutputT],
        early: OutputT | None = None,
    ) -> None:
        self._native = native
        self._materialize = materialize
        self._output: OutputT | None = None
        self.early = early

    def wait(self) -> OutputT:
        if self._output is None:
            self._output = self._materialize()
        return self._output

    def is_complete(self) -> bool:
        return self._native.is_complete()


class NativePlan:
    """A native plan; see `Plan`."""

    __slots__ = (
        "_endpoint",
        "native",
        "num_recv_tokens",
        "num_recv_topk",
        "num_tokens",
        "num_topk",
    )

    def __init__(self, native: Any, endpoint: NativeEndpoint) -> None:
        self.native = native
        self._endpoint = endpoint
        # In one call: a decode step sees what a call costs.
        sizes: tuple[int, int, int, int] = native.sizes
        self.num_tokens, self.num_topk, self.num_recv_tokens, self.num_recv_topk = sizes

    def to_tensors(self) -> PlanTensors:
        """The plan as tensors that own their memory."""
        counts, slots, topk_idx = self._endpoint.export_plan(self.native)
        return PlanTensors(
            counts=from_dlpack(counts),
            slots=from_dlpack(slots),
            topk_idx=from_dlpack(topk_idx),
            layout=Layout(self.native.layout),
            expert_alignment=self.native.expert_alignment,
        )


class NativeBackend(Backend):
    """Dispatch and combine through windows of a symmetric heap; see `Backend`."""

    def __init__(self, communicator: NativeGroupOwner, config: EpConfig) -> None:
        super().__init__(communicator, config)
        problem = ""
        try:
            placement = config.resolve_expert_rank(communicator.num_ranks)
        except ValueError as error:
            # Peers are about to compare configurations, and must hear of it.
            problem = str(error)
            placement = default_expert_rank(config.num_experts, communicator.num_ranks)
        agreed = [
            ("num_experts", str(config.num_experts)),
            ("num_topk", str(config.num_topk)),
            ("hidden", str(config.hidden)),
            ("num_max_tokens_per_rank", str(config.num_max_tokens_per_rank)),
            ("dtype", str(config.dtype)),
            ("num_max_in_flight", str(config.num_max_in_flight)),
            ("backend", self.name),
            ("expert_rank", problem or str(placement.tolist())),
        ]
        self._endpoint = self._create_endpoint(
            Settings(
                group=communicator.require_native(),
                num_experts=config.num_experts,
                num_max_tokens=-1
                if config.num_max_tokens_per_rank is None
                else config.num_max_tokens_per_rank,
                expert_rank=placement.tolist(),
                depth=config.num_max_in_flight,
                agreed=agreed,
                num_max_topk=config.num_topk or 0,
                max_row_bytes=config.rail_row_bytes,
            )
        )
        if problem:
            self._endpoint.destroy()
            raise ValueError(problem)
        self._rank_idx = communicator.rank_idx
        self._num_ranks = communicator.num_ranks
        self._num_local_experts = int((placement == communicator.rank_idx).sum())
        self._write_trace: Callable[[], object] | None = None
        path = env.trace_path()
        if path is not None:
            self._endpoint.enable_trace()
            # Runs once: at destroy(), when the buffer is dropped, or at the interpreter's exit.
            self._write_trace = weakref.finalize(
                self, _write_records, path, self._rank_idx, self._endpoint
            )

    @abc.abstractmethod
    def _create_endpoint(self, settings: Settings) -> NativeEndpoint:
        """The endpoint of this rank. Collective."""

    def dispatch(
        self,
        x: torch.Tensor,
        x_sf: torch.Tensor | None,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        *,
        layout: Layout,
        expert_alignment: int,
        quantization: Quantization | None,
        capacity: Capacity | None,
        masked_ranks: tuple[int, ...],
        copy_out: bool | None,
        async_op: bool,
    ) -> Operation[DispatchOutput]:
        """See `Backend.dispatch`."""
        scales = None
        if quantization is not None or x_sf is not None:
            scales = self._describe_scales(x, x_sf, quantization, layout)
        limits = None
        if capacity is not None:
            limits = (
                -1 if capacity.num_rows is None else capacity.num_rows,
                -1 if capacity.num_rows_per_expert is None else capacity.num_rows_per_expert,
                _ON_OVERFLOW[capacity.on_overflow],
            )
        native = self._endpoint.dispatch(
            x,
            x_sf,
            topk_idx,
            topk_weights,
            None,
            _dlpack_type(x.dtype),
            int(layout),
            expert_alignment,
            None if scales is None else scales.arguments,
            limits,
            masked_ranks,
            copy_out,
            async_op,
        )
        return self._dispatched(native, x.dtype, scales, async_op, layout is Layout.LOW_LATENCY)

    def dispatch_cached(
        self,
        x: torch.Tensor,
        x_sf: torch.Tensor | None,
        plan: Plan,
        topk_weights: torch.Tensor | None,
        *,
        quantization: Quantization | None,
        copy_out: bool | None,
        async_op: bool,
    ) -> Operation[DispatchOutput]:
        """See `Backend.dispatch_cached`."""
        native_plan = _native_plan(plan)
        layout = Layout(native_plan.layout)
        scales = None
        if quantization is not None or x_sf is not None:
            scales = self._describe_scales(x, x_sf, quantization, layout)
        native = self._endpoint.dispatch(
            x,
            x_sf,
            None,
            topk_weights,
            native_plan,
            _dlpack_type(x.dtype),
            0,
            1,
            None if scales is None else scales.arguments,
            None,
            (),
            copy_out,
            async_op,
        )
        return self._dispatched(native, x.dtype, scales, async_op, layout is Layout.LOW_LATENCY)

    def _describe_scales(
        self,
        x: torch.Tensor,
        x_sf: torch.Tensor | None,
        quantization: Quantization | None,
        layout: Layout,
    ) -> _Scales:
        is_column_major = quantization is not None and quantization.is_column_major
        code = 1 | is_column_major << 1
        by_expert = None
        if layout is Layout.LOW_LATENCY:
            assert self.config.num_max_tokens_per_rank is not None  # checked by EpBuffer
            num_places = self._num_ranks * self.config.num_max_tokens_per_rank
            by_expert = (self._num_local_experts, num_places)
        if x_sf is not None:
            num_scales, itemsize = x_sf.shape[1], x_sf.dtype.itemsize
            row_stride, step = x_sf.stride()
            return _Scales(
                (code, 0, 0, 0, num_scales, itemsize, row_stride * itemsize, step * itemsize),
                dtype=x_sf.dtype,
                data_dtype=x.dtype,
                num_scales=num_scales,
                is_column_major=is_column_major,
                by_expert=by_expert,
            )
        assert quantization is not None
        scale_format = quantization.scale_format
        assert scale_format is not None
        code |= quantization.format << 4 | scale_format << 8
        num_scales = quantization.num_scales(x.shape[1])
        return _Scales(
            (
                code,
                quantization.format.block,
                int(scale_format),
                _SUMMABLE_TYPES[x.dtype],
                num_scales,
                quantization.sf_dtype.itemsize,
                0,
                0,
            ),
            dtype=quantization.sf_dtype,
            data_dtype=quantization.data_dtype,
            num_scales=num_scales,
            is_column_major=is_column_major,
            by_expert=by_expert,
        )

    def _dispatched(
        self,
        native: SubmittedDispatch,
        dtype: torch.dtype,
        scales: _Scales | None,
        async_op: bool,
        is_low_latency: bool,
    ) -> Operation[DispatchOutput]:
        arrived = _Arrived(native, self._endpoint, dtype, scales)
        if not async_op:
            return arrived  # type: ignore[return-value]  # its own output, see _Ended
        output = cast("DispatchOutput", arrived)

        def materialize() -> DispatchOutput:
            native.plan()  # blocks until the end, raises what ended it
            return output

        return _Submitted(native, materialize, output if is_low_latency else None)

    def combine(
        self,
        x: torch.Tensor | None,
        plan: Plan,
        topk_weights: torch.Tensor | None,
        row_weights: torch.Tensor | None,
        *,
        out: torch.Tensor | None,
        copy_out: bool | None,
        async_op: bool,
    ) -> Operation[CombineOutput]:
        """See `Backend.combine`."""
        native = self._endpoint.combine(
            x,
            _native_plan(plan),
            topk_weights,
            row_weights,
            out,
            0 if x is None else _SUMMABLE_TYPES[x.dtype],
            copy_out,
            async_op,
        )

        if async_op:
            return _Submitted(native, lambda: cast("CombineOutput", _combined(native, out)))
        return _combined(native, out)  # type: ignore[return-value]  # its own output, see _Ended

    def weighted_gradient(
        self, gradient: torch.Tensor, expert_out: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """See `Backend.weighted_gradient`."""
        dots = torch.empty_like(weights)
        self._endpoint.weighted_gradient(
            gradient, expert_out, weights, dots, _SUMMABLE_TYPES[gradient.dtype]
        )
        return dots

    def empty_expert_output(self, plan: Plan, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Backend.empty_expert_output`; a window of the heap."""
        rows = self._endpoint.empty_rows(
            _native_plan(plan),
            hidden * dtype.itemsize if dtype not in _DLPACK_TYPES else hidden,
            hidden * dtype.itemsize,
            _DLPACK_TYPES.get(dtype, _DLPACK_TYPES[torch.uint8]),
        )
        return _as_dtype(from_dlpack(rows), dtype)

    def import_plan(self, tensors: PlanTensors) -> Plan:
        """See `Backend.import_plan`."""
        native = self._endpoint.import_plan(
            tensors.counts.cpu().contiguous(),
            tensors.topk_idx.cpu().contiguous(),
            int(tensors.layout),
            tensors.expert_alignment,
        )
        return NativePlan(native, self._endpoint)

    def reject(self, operation: str, error: Exception) -> NoReturn:
        """See `Backend.reject`."""
        self._endpoint.reject(operation, str(error), isinstance(error, TypeError))
        raise AssertionError("a rejected operation did not raise") from error

    def wait_statistics(self) -> tuple[list[int], list[int]]:
        """See `Backend.wait_statistics`."""
        return self._endpoint.wait_statistics()

    def take_trace(self) -> list[PhaseRecord]:
        """Records since the last call, oldest first. The first call turns recording on."""
        self._endpoint.enable_trace()
        return _take_records(self._endpoint, self._rank_idx)

    def destroy(self) -> None:
        """See `Backend.destroy`; also writes the trace that `MOE_COMM_TRACE` asked for."""
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


def _native_plan(plan: Plan) -> Any:
    assert isinstance(plan, NativePlan)
    return plan.native


def _dlpack_type(dtype: torch.dtype) -> int:
    """A number that is equal on all ranks for a dtype, and DLPack's where DLPack can name it."""
    known = _DLPACK_TYPES.get(dtype)
    if known is not None:
        return known
    # Above every DLPack code: rows are handed out as bytes, ranks still compare the dtype.
    return (0x100 + zlib.crc32(str(dtype).encode()) % 0x7FFF00) << 8


def _as_dtype(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return rows if rows.dtype is dtype else rows.view(dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class _Scales:
    """Scale factors of a dispatch: what the native call is told, and how to read its answer."""

    arguments: tuple[int, ...]
    dtype: torch.dtype
    data_dtype: torch.dtype
    num_scales: int
    is_column_major: bool
    by_expert: tuple[int, int] | None  # LOW_LATENCY: local experts, and places of each

    def view(self, flat: torch.Tensor, num_rows: int) -> torch.Tensor:
        """`x_sf` over the elements as they lie in memory."""
        elements = flat if flat.dtype is self.dtype else flat.view(self.dtype)
        if self.by_expert is not None:
            num_experts, num_places = self.by_expert
            if self.is_column_major:
                return elements.view(num_experts, self.num_scales, num_places).transpose(1, 2)
            return elements.view(num_experts, num_places, self.num_scales)
        if self.is_column_major:
            # Where there are no rows, torch wants a stride all the same.
            stride = max(scale_column_stride(num_rows, self.dtype.itemsize), 1)
            return elements.as_strided((num_rows, self.num_scales), (1, stride))
        return elements.view(num_rows, self.num_scales)


class _Ended:
    """An `Operation` that has ended and is its own output: a decode step makes one object less."""

    __slots__ = ()

    @property
    def early(self: EndedT) -> EndedT:
        return self

    def wait(self: EndedT) -> EndedT:
        return self

    def is_complete(self) -> bool:
        return True


class _Arrived(_Ended):
    """A native outcome as a `DispatchOutput` whose tensors are made when they are first looked at.

    A tensor costs half a microsecond, and few callers read all of them. Where two threads look at
    once, each gets a tensor over the same memory.
    """

    __slots__ = ("_dtype", "_endpoint", "_made", "_native", "_plan", "_scales")

    def __init__(
        self,
        native: SubmittedDispatch,
        endpoint: NativeEndpoint,
        dtype: torch.dtype,
        scales: _Scales | None,
    ) -> None:
        self._native = native
        self._endpoint = endpoint
        self._dtype = dtype if scales is None else scales.data_dtype
        self._scales = scales
        self._made: dict[str, torch.Tensor | None] = {}
        self._plan: NativePlan | None = None

    @property
    def plan(self) -> NativePlan:
        if self._plan is None:
            self._plan = NativePlan(self._native.plan(), self._endpoint)
        return self._plan

    @property
    def x(self) -> torch.Tensor:
        x = self._made.get("x")
        if x is None:
            self._made["x"] = x = _as_dtype(from_dlpack(self._native.x()), self._dtype)
        return x

    @property
    def x_sf(self) -> torch.Tensor | None:
        if self._scales is None:
            return None
        x_sf = self._made.get("x_sf")
        if x_sf is None:
            flat = from_dlpack(self._native.x_sf())
            self._made["x_sf"] = x_sf = self._scales.view(flat, self.x.shape[0])
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

    def _present(self, name: str, make_capsule: Callable[[], object]) -> torch.Tensor:
        tensor = self._optional(name, make_capsule)
        assert tensor is not None
        return tensor

    def _optional(self, name: str, make_capsule: Callable[[], object]) -> torch.Tensor | None:
        if name not in self._made:
            capsule = make_capsule()
            self._made[name] = None if capsule is None else from_dlpack(capsule)
        return self._made[name]


def _combined(native: SubmittedCombine, out: torch.Tensor | None) -> _Combined:
    sums, weights = native.result()
    return _Combined(
        out if sums is None else from_dlpack(sums),
        None if weights is None else from_dlpack(weights),
        native,
    )


class _Combined(_Ended):
    """A `CombineOutput` whose waiting times become a tensor when they are looked at."""

    __slots__ = ("_native", "topk_weights", "x")

    def __init__(
        self,
        x: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        native: SubmittedCombine,
    ) -> None:
        self.x = x
        self.topk_weights = topk_weights
        self._native = native

    @property
    def wait_ns(self) -> torch.Tensor:
        return from_dlpack(self._native.wait_ns())
