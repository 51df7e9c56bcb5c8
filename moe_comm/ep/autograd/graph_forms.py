"""A handle and what a dispatch brought, as tensors alone: the forms that live in a compiled graph."""

# A graph cannot look into tensors: what a handle says of itself is read when it is asked.
# mypy: disable-error-code="override"

from __future__ import annotations

import dataclasses
import functools

import torch

from moe_comm.ep.autograd import operators
from moe_comm.ep.autograd.quantized_rows import wrap_rows
from moe_comm.ep.backends.base import Ended, Plan, most_topk
from moe_comm.ep.buffer import EpBuffer, resolve_buffer
from moe_comm.ep.config import Layout
from moe_comm.ep.handles import DispatchHandle
from moe_comm.tensors.quantization import Quantization


class TensorHandle(DispatchHandle):
    """A handle whose contents are tensors, so that it can live inside a compiled graph.

    Args:
        counts: int32 `[num_ranks, num_experts + num_ranks + 2]`; see `PlanTensors`.
        slots: int64 `[num_tokens, num_slots]`; see `PlanTensors`.
        topk_idx: int64 `[num_tokens, num_topk]`.
        meta: int64 `[8 + num_local_experts]`: buffer id, generation, layout, expert alignment, received
            rows, what the ranks said of gradients, `PlanTensors.hash` and `PlanTensors.asked`.
        link: As in `DispatchHandle`.
        local: The handle that the tensors stand for, where this process has it.
    """

    counts: torch.Tensor
    slots: torch.Tensor
    topk_idx: torch.Tensor
    meta: torch.Tensor
    link: torch.Tensor
    local: DispatchHandle | None

    def __init__(
        self,
        counts: torch.Tensor,
        slots: torch.Tensor,
        topk_idx: torch.Tensor,
        meta: torch.Tensor,
        link: torch.Tensor,
        local: DispatchHandle | None = None,
    ) -> None:
        self.counts = counts
        self.slots = slots
        self.topk_idx = topk_idx
        self.meta = meta
        self.link = link
        self.local = local

    @property
    def buffer_id(self) -> int:
        """Id of the buffer that made it, see `DispatchHandle`."""
        return int(self.meta[operators.META_BUFFER_ID])

    @property
    def generation(self) -> int:
        """Generation of that buffer when it made it, see `DispatchHandle`."""
        return int(self.meta[operators.META_GENERATION])

    @property
    def layout(self) -> Layout:
        """Order of received rows, see `DispatchHandle`."""
        return Layout(int(self.meta[operators.META_LAYOUT]))

    @property
    def expert_alignment(self) -> int:
        """Alignment of the rows of an expert, see `DispatchHandle`."""
        return int(self.meta[operators.META_ALIGNMENT])

    @property
    def num_tokens(self) -> int:
        """Number of tokens of this rank, see `DispatchHandle`."""
        return self.topk_idx.shape[0]

    @property
    def num_topk(self) -> int:
        """Number of choices per token of this rank, see `DispatchHandle`."""
        return self.topk_idx.shape[1]

    @property
    def num_recv_tokens(self) -> int:
        """Number of rows of this rank's result, see `DispatchHandle`."""
        return int(self.meta[operators.META_NUM_RECV_TOKENS])

    @property
    def num_recv_topk(self) -> int:
        """Largest number of choices per token of all ranks, see `DispatchHandle`."""
        return most_topk(self.counts)

    @functools.cached_property
    def plan(self) -> Plan:
        """Plan of the dispatch, see `DispatchHandle`."""
        return self.of_buffer(resolve_buffer(self.buffer_id)).plan

    def of_buffer(self, buffer: EpBuffer) -> DispatchHandle:
        """Return the handle that `buffer` takes; see `operators.local_handle`."""
        if self.local is not None:
            return self.local
        return operators.local_handle(buffer, *self.tensors())

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the tensors that operators take for a handle."""
        return self.counts, self.slots, self.topk_idx, self.meta


@dataclasses.dataclass(frozen=True, eq=False)
class OperatorOutput(Ended):
    """Output of the operator, as a `DispatchOutput`."""

    rows: torch.Tensor  # x, or where it was quantized here: what its gradient flows to
    data: torch.Tensor | None
    x_sf: torch.Tensor | None
    quantization: Quantization | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    num_tokens_per_expert: torch.Tensor
    expert_offsets: torch.Tensor
    limited: tuple[torch.Tensor, torch.Tensor] | None
    handle: TensorHandle

    status = None  # operators are not captured

    @property
    def x(self) -> torch.Tensor:
        """Rows; `QuantizedRows` where they were quantized in this dispatch."""
        if self.data is None:
            return self.rows
        kept: torch.Tensor | None = self.__dict__.get("_x")
        if kept is not None:
            return kept
        assert self.x_sf is not None
        assert self.quantization is not None
        x = wrap_rows(self.rows, self.data, self.x_sf, self.quantization)
        if not torch.compiler.is_compiling():
            # Never in a compiled region: what it keeps here would become an output of its graph.
            self.__dict__["_x"] = x
        return x

    @property
    def num_dropped_per_expert(self) -> torch.Tensor:
        """Number of choices of every local expert that were dropped, see `DispatchOutput`."""
        if self.limited is None:
            return torch.zeros_like(self.num_tokens_per_expert)
        return self.limited[0]

    @property
    def num_required_rows(self) -> torch.Tensor:
        """Number of rows if nothing were dropped, see `DispatchOutput`."""
        if self.limited is None:
            return self.handle.meta[operators.META_NUM_RECV_TOKENS]
        return self.limited[1]

    @property
    def wait_ns(self) -> torch.Tensor:
        """Nanoseconds that this rank waited for each rank, see `DispatchOutput`."""
        return torch.zeros(self.handle.counts.shape[0], dtype=torch.int64, device="cpu")

    @property
    def gradients(self) -> int:
        """Words of all ranks on gradients, united; see `DispatchOutput`."""
        return int(self.handle.meta[operators.META_GRADIENTS])

    @property
    def plan(self) -> Plan:
        """Plan of the dispatch, see `DispatchOutput`."""
        return self.handle.plan
