"""Types of the emulator's module; see csrc/bindings."""

import torch

from moe_comm.backends.native_endpoint import NativeEndpoint, Settings

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
    node_reduction: bool,
) -> int: ...
def strided_copies(
    targets: list[torch.Tensor], sources: list[torch.Tensor], num_sms: int = 0
) -> None: ...

class Graph:
    num_nodes: int
    def replay(self) -> None: ...
    def synchronize(self) -> None: ...

class Endpoint(NativeEndpoint):  # type: ignore[misc]  # whose methods it has
    @staticmethod
    def create(
        settings: Settings, num_sms: int, num_threads: int, tokens_per_chunk: int
    ) -> Endpoint: ...
    def device_calls(self) -> dict[str, int]: ...
    def begin_capture(self) -> None: ...
    def end_capture(self) -> Graph: ...
