"""The calls that are measured: `EpBuffer`, and HybridEP's functions over it."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from moe_comm.cli.bench.case import (
    BenchCase,
    make_places,
    make_routing_map,
    make_topk_idx,
    make_topk_weights,
)
from moe_comm.ep.buffer import EpBuffer
from moe_comm.ep.group_buffers import GroupBuffers
from moe_comm.fused_a2a import hybrid_ep_combine, hybrid_ep_dispatch
from moe_comm.peers.communicator import Communicator


class Received(Protocol):
    """Tensors that a dispatch brought."""

    @property
    def x(self) -> torch.Tensor:
        """`[M, hidden]`."""

    @property
    def x_sf(self) -> torch.Tensor | None:
        """Scale factors of quantized rows."""

    @property
    def topk_weights(self) -> torch.Tensor | None:
        """`[M]`, where weights were sent."""

    @property
    def handle(self) -> Any:
        """Handle for combine."""


class Exchange(Protocol):
    """One way to make the calls of a case on one rank; every call is collective."""

    def dispatch(self) -> Received:
        """Send the tokens of this rank."""

    def combine(self, rows: torch.Tensor, handle: Any) -> torch.Tensor:
        """Sums `[num_tokens, hidden]` of rows `[M, hidden]`."""

    def empty_expert_output(self, handle: Any) -> torch.Tensor:
        """`[M, hidden]` in the heap, which combine reads in place. Local."""


class NativeExchange:
    """`EpBuffer.dispatch` and `EpBuffer.combine`.

    Args:
        communicator: Communicator of the ranks.
        case: Case of api "native".
        rank_idx: This rank.
        x: `[num_tokens, hidden]`.
    """

    def __init__(
        self, communicator: Communicator, case: BenchCase, rank_idx: int, x: torch.Tensor
    ) -> None:
        self.buffer = EpBuffer(communicator, case.config)
        self._x = x
        make_ids = make_places if case.are_slots_given else make_topk_idx
        self._topk_idx = make_ids(case, rank_idx).to(x.device)
        self._topk_weights = None
        if case.sends_weights:
            self._topk_weights = make_topk_weights(case, rank_idx).to(x.device)
        self._layout = case.layout
        self._alignment = case.expert_alignment
        self._quantization = case.quantization

    def dispatch(self) -> Received:
        """Send the tokens of this rank."""
        return self.buffer.dispatch(
            self._x,
            self._topk_idx,
            self._topk_weights,
            layout=self._layout,
            expert_alignment=self._alignment,
            quantization=self._quantization,
        )

    def combine(self, rows: torch.Tensor, handle: Any) -> torch.Tensor:
        """Sums `[num_tokens, hidden]` of rows `[M, hidden]`."""
        return self.buffer.combine(rows, handle)

    def empty_expert_output(self, handle: Any) -> torch.Tensor:
        """`[M, hidden]` in the heap, which combine reads in place. Local."""
        return self.buffer.empty_expert_output(handle)


class HybridEpRows(NamedTuple):
    """`Received` of HybridEP."""

    x: torch.Tensor
    x_sf: torch.Tensor | None
    topk_weights: torch.Tensor | None
    handle: Any


class HybridEpExchange:
    """`hybrid_ep_dispatch` and `hybrid_ep_combine` of `moe_comm.fused_a2a`.

    A routing map and dense probabilities go in, permuted rows and their probabilities come out.

    Args:
        groups: Holds the communicator that these functions use.
        case: Case of api "hybrid_ep".
        rank_idx: This rank.
        x: `[num_tokens, hidden]`.
    """

    def __init__(
        self, groups: GroupBuffers, case: BenchCase, rank_idx: int, x: torch.Tensor
    ) -> None:
        self._group = groups.group
        self._x = x
        self._routing_map, self._probs = make_routing_map(case, rank_idx)
        self._num_local_experts = case.num_experts // case.num_ranks
        self._pad_multiple = case.expert_alignment
        self._hidden, self._dtype = case.hidden, case.torch_dtype

    def dispatch(self) -> Received:
        """Send the tokens of this rank."""
        x, probs, scaling_factor, _, handle = hybrid_ep_dispatch(
            self._x,
            self._routing_map,
            self._probs,
            self._group,
            self._num_local_experts,
            pad_multiple=self._pad_multiple,
        )
        return HybridEpRows(x, scaling_factor, probs, handle)

    def combine(self, rows: torch.Tensor, handle: Any) -> torch.Tensor:
        """Sums `[num_tokens, hidden]` of rows `[M, hidden]`."""
        return hybrid_ep_combine(rows, handle, pad_multiple=self._pad_multiple)

    def empty_expert_output(self, handle: Any) -> torch.Tensor:
        """`[M, hidden]` in the heap, which combine reads in place. Local."""
        buffer: EpBuffer = handle.buffer
        return buffer.empty_expert_output(handle.places, hidden=self._hidden, dtype=self._dtype)
