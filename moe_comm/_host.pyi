"""Types of the native module; see csrc/bindings."""

from typing import Any

import torch

class PeerMesh:
    @staticmethod
    def create() -> PeerMesh: ...
    def address(self) -> bytes: ...
    def connect(self, rank_idx: int, addresses: list[bytes], timeout_s: float) -> None: ...

class ShmHeap:
    @staticmethod
    def create(
        mesh: PeerMesh, limit_bytes: int, with_huge_pages: bool, poison: bool
    ) -> ShmHeap: ...

def set_warning_interval(seconds: float) -> None: ...

class Group:
    rank_idx: int
    num_ranks: int
    @staticmethod
    def create(
        mesh: PeerMesh,
        heap: ShmHeap,
        channel: int,
        stall_timeout_s: float,
        arrival_timeout_s: float,
        num_threads: int,
    ) -> Group: ...
    @staticmethod
    def create_child(
        parent: Group,
        parent_ranks: list[int],
        rank_idx: int,
        channel: int,
        stall_timeout_s: float,
        arrival_timeout_s: float,
        num_threads: int,
    ) -> Group: ...
    def all_gather(self, payload: bytes) -> list[bytes]: ...
    def reserve(self, num_bytes: int) -> None: ...
    def trim(self) -> int: ...
    def heap_stats(self) -> dict[str, int]: ...
    def recover(self) -> tuple[list[int], list[int]]: ...
    def prepare_to_leave(self) -> None: ...
    def destroy(self) -> None: ...

class Plan:
    num_tokens: int
    num_topk: int
    num_recv_topk: int
    expert_alignment: int
    layout: int
    num_recv_tokens: int
    def export(self) -> tuple[Any, Any, Any]: ...

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

class SubmittedCombine:
    def is_complete(self) -> bool: ...
    def was_copied_in(self) -> bool: ...
    def wait_ns(self) -> Any: ...
    def result(self) -> tuple[Any, Any]: ...

class Endpoint:
    isa: str
    buffer_number: int
    @staticmethod
    def create(
        group: Group,
        num_experts: int,
        num_max_tokens: int,
        expert_rank: list[int],
        depth: int,
        isa: str,
        agreed: list[tuple[str, str]],
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
    def enable_trace(self) -> None: ...
    def take_trace(self) -> list[tuple[int, str, str, int, int, int]]: ...
    def destroy(self) -> None: ...

def workspace_bytes(num_ranks: int, num_experts: int, depth: int) -> int: ...

class kernels:
    @staticmethod
    def instruction_sets() -> list[str]: ...
    @staticmethod
    def best_instruction_set() -> str: ...
    @staticmethod
    def quantize_row(
        isa: str,
        dtype: str,
        block: int,
        scale_format: str,
        src: Any,
        dst: list[Any],
        scales: Any,
        *,
        streaming: bool,
    ) -> None: ...
    @staticmethod
    def roof_fan_out(src: Any, row_bytes: int, dst: list[Any], isa: str | None = ...) -> None: ...
    @staticmethod
    def roof_sum(src: list[Any], dst: Any, isa: str | None = ...) -> None: ...
    @staticmethod
    def roof_copy(src: Any, dst: Any, isa: str | None = ...) -> None: ...
