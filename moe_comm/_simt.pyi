"""Types of the emulator's module; see csrc/bindings."""

from typing import Any

import torch

from moe_comm import _host

def set_warning_interval(seconds: float) -> None: ...
def rail_region_bytes(
    *,
    num_ranks: int,
    num_local_ranks: int,
    num_experts: int,
    depth: int,
    num_max_tokens: int,
    num_max_topk: int,
    max_row_bytes: int,
) -> int: ...
def strided_copies(
    targets: list[torch.Tensor], sources: list[torch.Tensor], num_sms: int = 0
) -> None: ...

class Plan:
    sizes: tuple[int, int, int, int]  # num_tokens, num_topk, num_recv_tokens, num_recv_topk
    expert_alignment: int
    layout: int

class SubmittedDispatch:
    def is_complete(self) -> bool: ...
    def plan(self) -> Plan: ...
    def x(self) -> Any: ...
    def topk_idx(self) -> Any: ...
    def topk_weights(self) -> Any: ...
    def x_sf(self) -> Any: ...
    def num_dropped_per_expert(self) -> Any: ...
    def num_required_rows(self) -> int: ...
    def wait_ns(self) -> Any: ...
    def num_tokens_per_expert(self) -> Any: ...
    def expert_offsets(self) -> Any: ...
    def status(self) -> Any: ...

class SubmittedCombine:
    def is_complete(self) -> bool: ...
    def was_copied_in(self) -> bool: ...
    def wait_ns(self) -> Any: ...
    def result(self) -> tuple[Any, Any]: ...

class Graph:
    num_nodes: int
    def replay(self) -> None: ...
    def synchronize(self) -> None: ...

class Endpoint:
    def begin_capture(self) -> None: ...
    def end_capture(self) -> Graph: ...
    buffer_number: int
    @staticmethod
    def create(
        group: _host.Group,
        num_experts: int,
        num_max_tokens: int,
        expert_rank: list[int],
        depth: int,
        node_reduction: bool,
        agreed: list[tuple[str, str]],
        num_sms: int,
        num_threads: int,
        tokens_per_chunk: int,
        num_max_topk: int,
        max_row_bytes: int,
    ) -> Endpoint: ...
    def dispatch(
        self,
        x: torch.Tensor,
        x_sf: torch.Tensor | None,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        plan: Plan | None,
        dtype: int,
        layout: int,
        expert_alignment: int,
        scales: tuple[int, ...] | None,
        capacity: tuple[int, int, int] | None,
        masked_ranks: tuple[int, ...],
        copy_out: bool | None,
        is_async: bool,
    ) -> SubmittedDispatch: ...
    def combine(
        self,
        x: torch.Tensor | None,
        plan: Plan,
        topk_weights: torch.Tensor | None,
        row_weights: torch.Tensor | None,
        out: torch.Tensor | None,
        dtype: int,
        copy_out: bool | None,
        is_async: bool,
    ) -> SubmittedCombine: ...
    def reject(self, operation: str, message: str, is_type_error: bool) -> None: ...
    def empty_rows(self, plan: Plan, hidden: int, row_bytes: int, dtype: int) -> Any: ...
    def weighted_gradient(
        self,
        gradient: torch.Tensor,
        expert_out: torch.Tensor,
        weights: torch.Tensor,
        dots: torch.Tensor,
        dtype: int,
    ) -> None: ...
    def import_plan(
        self, counts: torch.Tensor, topk_idx: torch.Tensor, layout: int, expert_alignment: int
    ) -> Plan: ...
    def export_plan(self, plan: Plan) -> tuple[Any, Any, Any]: ...
    def wait_statistics(self) -> tuple[list[int], list[int]]: ...
    def enable_trace(self) -> None: ...
    def take_trace(self) -> list[tuple[int, str, str, int, int, int]]: ...
    def destroy(self) -> None: ...
