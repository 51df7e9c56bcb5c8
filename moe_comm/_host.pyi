"""Types of the native module; see csrc/bindings."""

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch

from moe_comm.ep.backends.native_endpoint import NativeEndpoint, Settings

class PeerMesh:
    @staticmethod
    def create() -> PeerMesh: ...
    @staticmethod
    def create_over_nodes(is_one_machine: bool, interfaces: str, route_to: str) -> PeerMesh: ...
    def address(self) -> bytes: ...
    def leave(self) -> None: ...
    def connect(
        self,
        rank_idx: int,
        addresses: list[bytes],
        timeout_s: float,
        check: Callable[[], None] | None = None,
        num_local_ranks: int = 0,
        link_timeout_s: float = 0.0,
    ) -> None: ...

class ShmHeap:
    @staticmethod
    def create(
        mesh: PeerMesh, limit_bytes: int, with_huge_pages: bool, poison: bool
    ) -> ShmHeap: ...

def set_warning_interval(seconds: float) -> None: ...

class HeapPages:
    def unshare(self) -> None: ...
    def abandon(self) -> None: ...

class Group:
    rank_idx: int
    num_ranks: int
    num_threads: int
    num_local_ranks: int
    is_aborted: bool
    num_recoveries: int
    @staticmethod
    def create(
        mesh: PeerMesh,
        heap: ShmHeap,
        channel: int,
        stall_timeout_s: float,
        arrival_timeout_s: float,
        num_threads: int,
        num_local_ranks: int = 0,
        num_machine_ranks: int = 0,
        check: Callable[[], None] | None = None,
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
        num_local_ranks: int = 0,
        num_machine_ranks: int = 0,
    ) -> Group: ...
    def all_gather(self, payload: bytes) -> list[bytes]: ...
    def empty(self, num_bytes: int) -> torch.Tensor: ...
    @staticmethod
    def has_pages(address: int, num_bytes: int) -> bool: ...
    def share(self, ranges: list[tuple[int, int]]) -> list[HeapPages]: ...
    def find(self, address: int, num_bytes: int) -> tuple[int, int] | None: ...
    def resolve(
        self, rank_idx: int, segment_idx: int, offset: int, num_bytes: int
    ) -> torch.Tensor: ...
    def reserve(self, num_bytes: int) -> None: ...
    def trim(self) -> int: ...
    def heap_stats(self) -> dict[str, int]: ...
    def recover(self) -> tuple[list[int], list[int]]: ...
    def shrink_agree(
        self, failed_ranks: list[int], call: str, agreed: str, problem: str, needs_majority: bool
    ) -> tuple[list[int], list[int], list[int]]: ...
    def shrink_gather(self, payload: bytes) -> list[bytes]: ...
    def shrink_finish(self, has_group: bool) -> tuple[list[int], list[int], list[int]] | None: ...
    def shrink_check(self) -> None: ...
    def shrink_refuse(self, text: str, is_mistake: bool) -> bool: ...
    def prepare_to_leave(self) -> None: ...
    def destroy(self) -> None: ...

class RailTransfer:
    state: str  # "moving", "moved" or "failed"
    error: str

class RailRequest(RailTransfer):
    is_send: bool
    node_idx: int
    num_bytes: int
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def complete(self) -> None: ...
    def fail(self, text: str) -> None: ...

class Rail:
    name: str
    sent_bytes: int
    received_bytes: int
    def send(self, node_idx: int, memory: Any) -> RailTransfer: ...
    def receive(self, node_idx: int, memory: Any) -> RailTransfer: ...
    def give_up(self, reason: str) -> None: ...

class QueuedRail(Rail):
    is_given_up: bool
    def __init__(self, name: str, num_nodes: int, node_idx: int) -> None: ...
    def next_send(self, node_idx: int, is_waiting: bool = True) -> RailRequest | None: ...
    def next_receive(self, node_idx: int, is_waiting: bool = True) -> RailRequest | None: ...
    def next(self, is_waiting: bool = True) -> RailRequest | None: ...

class Endpoint(NativeEndpoint):  # type: ignore[misc]  # whose methods it has
    isa: str
    @staticmethod
    def create(
        settings: Settings, isa: str, rail: Rail | None, checks_messages: bool
    ) -> Endpoint: ...
    def internode_bytes(self) -> tuple[int, int]: ...

class PreparedCopies:
    problem: str

class BatchedCopy:
    slot_bytes: int
    num_slots: int
    @staticmethod
    def create(group: Group, slot_bytes: int, num_slots: int) -> BatchedCopy: ...
    def prepare(
        self,
        sends: list[tuple[int, torch.Tensor, int]],
        receives: list[tuple[int, torch.Tensor, int]],
    ) -> PreparedCopies: ...
    def run(self, prepared: PreparedCopies, with_checksums: bool = False) -> dict[str, int]: ...
    def reject(self, message: str) -> NoReturn: ...
    def destroy(self) -> None: ...

class PieceChecksums:
    def __init__(self, pieces: list[tuple[int, torch.Tensor, int]]) -> None: ...
    def compute(self, sent: list[PreparedCopies], num_threads: int) -> bytes: ...
    def compute_blocks(
        self, block_bytes: int, sums: Any, wanted: Any | None, num_threads: int
    ) -> None: ...
    def of_blocks(self, block_bytes: int, sums: Any) -> bytes: ...
    def move_blocks(
        self,
        first: int,
        end: int,
        block_bytes: int,
        wanted: Any,
        packed: Any,
        is_packing: bool,
        num_threads: int,
    ) -> None: ...

def mark_ranges(masks: list[tuple[Any, Any]], marked: Any) -> None: ...

class TensorTable:
    def __init__(self, tensors: list[Any]) -> None: ...
    def matches(self, tensors: list[Any]) -> bool: ...

class WrittenTensors:
    def __init__(self, tensors: Iterable[torch.Tensor]) -> None: ...
    def count(self) -> None: ...

def problem_with_memory(tensor: torch.Tensor) -> str | None: ...

class SeenDicts:
    def __init__(self) -> None: ...

def hold_same(modules: list[Any], keys: list[str], values: list[Any], seen: SeenDicts) -> bool: ...
def any_has(modules: list[Any], key: str) -> bool: ...
def checksum(tensor: torch.Tensor) -> int: ...
def copy_tensors(
    sources: list[torch.Tensor], destinations: list[torch.Tensor], num_threads: int
) -> None: ...
def topk_of_routing_map(
    routing_map: torch.Tensor, probs: torch.Tensor | None, probs_type: int
) -> tuple[torch.Tensor, torch.Tensor | None]: ...
def dense_of_topk(
    values: torch.Tensor | None, topk_idx: torch.Tensor, num_experts: int, values_type: int
) -> torch.Tensor: ...

class layout:
    SLOT_ROW_BITS: int
    ROW_HEADER_BYTES: int
    CONTROL_BLOCK_BYTES: int

    SCALE_FORMATS: tuple[ScaleRecord, ...]
    WIRE_FORMATS: tuple[WireFormat, ...]

    class ScaleRecord:
        name: str
        dtype: str
        bytes: int

    class WireFormat:
        name: str
        dtype: str
        element_bits: int
        block: int
        least_amax: float
        packs_exponents: bool
        scale_formats: tuple[int, ...]
        def is_e4m3(self, scale: int) -> bool: ...
        def row_bytes(self, hidden: int) -> int: ...
        def scale_bytes(self, scale: int) -> int: ...
        def num_scales(self, hidden: int, scale: int) -> int: ...

    class Placement:
        num_ranks: int
        num_experts: int
        def __init__(self, expert_rank: torch.Tensor, num_ranks: int) -> None: ...
        def local_expert_idx(self) -> torch.Tensor: ...
        def num_local_experts(self, rank_idx: int) -> int: ...

    class Replicas:
        def __init__(
            self,
            slot_expert: list[int],
            num_experts: int,
            num_local_ranks: int,
            placement: layout.Placement,
        ) -> None: ...

    class Arrangement:
        num_places_per_expert: int
        def __init__(
            self, layout: int, expert_alignment: int = 1, num_places_per_expert: int = 0
        ) -> None: ...

    @staticmethod
    def fullest_rank(
        expert_rows: torch.Tensor, slot_rank: list[int], slot_expert: list[int], num_ranks: int
    ) -> int: ...
    @staticmethod
    def plan_placement(
        loads: torch.Tensor,
        present: torch.Tensor | None,
        *,
        num_experts: int,
        num_ranks: int,
        num_slots: int,
        ranks_per_node: int,
        move_price: float,
        scatter: float,
        num_kept: int,
    ) -> torch.Tensor: ...
    @staticmethod
    def count_choices(
        placement: Placement,
        topk_idx: torch.Tensor,
        row: torch.Tensor,
        replicas: Replicas | None = None,
    ) -> None: ...
    @staticmethod
    def share_rows(
        asked: torch.Tensor, replicas: Replicas, placement: Placement
    ) -> torch.Tensor: ...
    @staticmethod
    def choose_slots(
        topk_idx: torch.Tensor,
        counts: torch.Tensor,
        replicas: Replicas,
        placement: Placement,
        rank_idx: int,
    ) -> torch.Tensor: ...
    @staticmethod
    def check_overflow(
        asked: torch.Tensor,
        placement: Placement,
        arrangement: Arrangement,
        expert_capacity: int,
        on_overflow: int,
        row_bytes: int,
    ) -> None: ...
    @staticmethod
    def keep_rows(
        asked: torch.Tensor,
        placement: Placement,
        arrangement: Arrangement,
        expert_capacity: int,
        on_overflow: int,
    ) -> torch.Tensor: ...
    @staticmethod
    def num_required_rows(
        asked: torch.Tensor, placement: Placement, arrangement: Arrangement, rank_idx: int
    ) -> int: ...
    @staticmethod
    def received_rows(
        counts: torch.Tensor, placement: Placement, arrangement: Arrangement, rank_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor, int]: ...
    @staticmethod
    def assign_slots(
        topk_idx: torch.Tensor,
        counts: torch.Tensor,
        placement: Placement,
        arrangement: Arrangement,
        rank_idx: int,
    ) -> torch.Tensor: ...
    @staticmethod
    def row_streams(
        topk_idx: torch.Tensor,
        slots: torch.Tensor,
        counts: torch.Tensor,
        placement: Placement,
        arrangement: Arrangement,
        rank_idx: int,
    ) -> tuple[list[int], list[int], torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]: ...
    @staticmethod
    def num_counts(num_ranks: int, num_experts: int) -> int: ...
    @staticmethod
    def row_stride(num_ranks: int, num_experts: int) -> int: ...
    @staticmethod
    def workspace_bytes(num_ranks: int, num_experts: int, depth: int) -> int: ...
    @staticmethod
    def token_sets_bytes(
        *, num_ranks: int, num_shared: int, num_tokens: int, num_topk: int
    ) -> int: ...
    @staticmethod
    def rail_region_bytes(
        *,
        num_ranks: int,
        num_local_ranks: int,
        num_experts: int,
        depth: int,
        num_max_tokens: int,
        num_max_topk: int,
        max_row_bytes: int,
        node_reduction: bool,
        num_max_shared: int,
    ) -> int: ...
    @staticmethod
    def rank_sums_bytes(
        *, num_tokens: int, num_slots: int, number_bytes: int, num_rows: int, row_bytes: int
    ) -> int: ...
    @staticmethod
    def window_bytes(num_bytes: int) -> int: ...
    @staticmethod
    def scale_region_bytes(
        layout: int,
        num_rows: int,
        num_rows_per_expert: int,
        num_scales: int,
        scale_bytes: int,
        is_column_major: bool,
    ) -> int: ...
    @staticmethod
    def receive_window_bytes(
        layout: int,
        num_rows: int,
        num_rows_per_expert: int,
        row_bytes: int,
        num_scales: int,
        scale_bytes: int,
        is_column_major: bool,
        weight_bytes: int,
        num_topk: int,
        spans_devices: bool,
    ) -> int: ...

class internode:
    @staticmethod
    def dispatch_bytes(
        *,
        layout: int,
        row_bytes: int,
        scale_bytes: int,
        weight_bytes: int,
        num_topk: int,
        num_local_ranks: int,
        with_ids: bool,
        num_rows: int,
        num_nodes: int,
        checks_messages: bool = ...,
    ) -> int: ...
    @staticmethod
    def pull_checksum_bytes(
        *,
        num_wanted_rows: int,
        num_supplied: int,
        are_sums: bool,
        row_bytes: int,
        num_slots: int,
        num_nodes: int,
    ) -> int: ...
    @staticmethod
    def combine_bytes(
        *,
        num_wanted_rows: int,
        num_supplied_rows: int,
        row_bytes: int,
        weight_bytes: int,
        num_weights: int,
    ) -> int: ...
    @staticmethod
    def reduction_bytes(
        *,
        num_wanted_rows: int,
        applied_bytes: int,
        num_supplied_sums: int,
        row_bytes: int,
    ) -> int: ...

class files:
    @staticmethod
    def read_rows(
        descriptor: int,
        offset: int,
        num_runs: int,
        run_bytes: int,
        step: int,
        memory: Any,
        cached_bytes: int,
        max_gap_bytes: int,
    ) -> int | None: ...
    @staticmethod
    def begin_writeback(descriptor: int, offset: int, num_bytes: int) -> None: ...
    @staticmethod
    def reserve(descriptor: int, num_bytes: int) -> None: ...

class kernels:
    @staticmethod
    def instruction_sets() -> list[str]: ...
    @staticmethod
    def best_instruction_set() -> str: ...
    @staticmethod
    def checksum_instruction_sets() -> list[str]: ...
    @staticmethod
    def crc32c(data: Any, isa: str | None = ..., crc: int = ...) -> int: ...
    @staticmethod
    def roof_fan_out(
        src: Any,
        row_bytes: int,
        dst: list[Any],
        isa: str | None = ...,
        *,
        streaming: bool = ...,
        num_passes: int = ...,
    ) -> None: ...
    @staticmethod
    def roof_sum(
        src: list[Any],
        dst: Any,
        isa: str | None = ...,
        *,
        streaming: bool = ...,
        num_passes: int = ...,
    ) -> None: ...
    @staticmethod
    def roof_of_meeting_ranks(
        fan_outs: list[tuple[Any, list[Any]]],
        sums: list[tuple[list[Any], Any]],
        row_bytes: int,
        words: Any,
        rank_idx: int,
        isa: str | None = ...,
        *,
        streaming: bool = ...,
        num_passes: int = ...,
    ) -> None: ...
    @staticmethod
    def roof_copy(
        src: Any,
        dst: Any,
        isa: str | None = ...,
        *,
        streaming: bool = ...,
        num_passes: int = ...,
    ) -> None: ...
