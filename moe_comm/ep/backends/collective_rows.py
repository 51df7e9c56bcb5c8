"""Rows, weights and ids of the `collective` backend, on their way to the experts and home again."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere

from moe_comm import _host
from moe_comm.ep.backends import local_ops
from moe_comm.ep.backends.buffer_agreement import Peers
from moe_comm.ep.backends.collective_plan import CollectivePlan
from moe_comm.ep.backends.collective_transport import CollectiveTransport
from moe_comm.ep.backends.expert_ranks import Placement, local_topk_idx
from moe_comm.ep.backends.rows import as_bytes
from moe_comm.ep.config import EpConfig, Layout
from moe_comm.tensors import arithmetic


@dataclasses.dataclass(frozen=True, eq=False)
class ReceivedRows:
    """Rows that a dispatch moved to this rank, in the slots of its window.

    Args:
        x: `[M, hidden]`.
        sf: `[M, num_scales]`, row-major, or None.
        topk_idx: RANK_MAJOR and not cached: int64 `[M, K]`, else None.
        topk_weights: `[M]`, or RANK_MAJOR `[M, K]`, or None.
    """

    x: torch.Tensor
    sf: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None


@dataclasses.dataclass(frozen=True)
class NodeReduction:
    """Rows are added on the node they lie on before they cross; see `EpConfig.node_reduction`.

    With `rank_reduction` each rank is as a node, and its own sums are as those of others.

    Args:
        num_local_ranks: Ranks of a node; consecutive ones share it.
        own_node: Node of the rank that gets the sums, where its sum is not rounded.
    """

    num_local_ranks: int
    own_node: int | None

    @classmethod
    def of(cls, peers: Peers, config: EpConfig) -> NodeReduction | None:
        """Return the way in which this rank's sums are added, None for row by row."""
        if config.rank_reduction:
            return cls(1, None)
        if not config.node_reduction or peers.num_local_ranks == peers.num_ranks:
            return None
        return cls(peers.num_local_ranks, peers.rank_idx // peers.num_local_ranks)

    def node_of(self, slots: torch.Tensor) -> torch.Tensor:
        """The node every slot lies on, below 0 for a slot of -1."""
        return (slots >> _host.layout.SLOT_ROW_BITS) // self.num_local_ranks


class RowMover:
    """Moves what a plan says, over one transport. Every method is collective.

    Args:
        transport: Transport of the buffer.
        placement: Placement of the experts.
        node_reduction: Reduction of rows on their nodes; None to add row by row.
    """

    def __init__(
        self,
        transport: CollectiveTransport,
        placement: Placement,
        node_reduction: NodeReduction | None = None,
    ) -> None:
        self._transport = transport
        self._placement = placement
        self._node_reduction = node_reduction
        self.staging: dict[str, torch.Tensor] = {}

    def dispatch(
        self,
        x: torch.Tensor,
        sf: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        plan: CollectivePlan,
        *,
        is_cached: bool,
    ) -> ReceivedRows:
        """Everything of a dispatch.

        Args:
            x: `[T, hidden]`, any dtype, contiguous.
            sf: `[T, num_scales]`, any strides, or None.
            topk_weights: `[T, K]`, or None.
            plan: Plan of the dispatch.
            is_cached: It is not the one that made the plan.
        """
        has_ids = plan.layout is Layout.RANK_MAJOR and not is_cached
        return ReceivedRows(
            sf=None if sf is None else self.to_experts(sf.contiguous(), plan),
            x=self.to_experts(x, plan),
            topk_idx=self.ids_to_experts(plan).to(x.device) if has_ids else None,
            topk_weights=(
                None
                if topk_weights is None
                else self.weights_to_experts(topk_weights, plan).to(x.device)
            ),
        )

    def to_experts(self, x: torch.Tensor, plan: CollectivePlan) -> torch.Tensor:
        """Contiguous rows `[T, n]` of any dtype to `[M, n]` in their slots, others zero.

        LOW_LATENCY: rows that nobody sends are undefined.
        """
        token_idx = plan.sent_token_idx
        sent = self._stage("send", token_idx.numel(), _row_bytes(x))
        local_ops.gather_rows(as_bytes(x), token_idx, sent)
        return self._place(sent, plan).to(x.device).view(x.dtype)

    def ids_to_experts(self, plan: CollectivePlan) -> torch.Tensor:
        """RANK_MAJOR: choices of every row in this rank's own expert ids, int64 `[M, K]`, else -1."""
        local = self._widened(self._local_topk_idx(plan), plan, fill=-1)
        return self._with_tail(self._send_small(local, plan), plan, fill=-1)

    def weights_to_experts(self, topk_weights: torch.Tensor, plan: CollectivePlan) -> torch.Tensor:
        """`[M]`, or RANK_MAJOR `[M, K]`, on the CPU; 0 where there is none."""
        weights = topk_weights.cpu()
        if plan.layout is not Layout.RANK_MAJOR:
            arrived = self._send_small(weights.flatten()[plan.sent_slots].unsqueeze(1), plan)
            placed = torch.zeros(plan.num_recv_tokens, dtype=weights.dtype)
            placed[plan.source_rows] = arrived.squeeze(1)
            return placed
        zero = torch.zeros((), dtype=weights.dtype)
        is_absent = self._local_topk_idx(plan) < 0
        local = torch.where(is_absent, zero, weights[plan.sent_token_idx])
        return self._with_tail(
            self._send_small(self._widened(local, plan, fill=0), plan), plan, fill=0
        )

    def sum_home(
        self,
        x: torch.Tensor,
        plan: CollectivePlan,
        topk_weights: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Expert outputs `[M, hidden]` to sums `[T, hidden]`."""
        source_rows = plan.source_rows
        if plan.layout is Layout.RANK_MAJOR and x.device == self._transport.device:
            # Every row that came, in the order in which it came.
            sent = as_bytes(x)[: source_rows.numel()]
        else:
            sent = self._stage("send", source_rows.numel(), _row_bytes(x))
            local_ops.gather_rows(as_bytes(x), source_rows, sent)
        arrived = self._stage("receive", plan.sent_slots.numel(), _row_bytes(x))
        self._carry(arrived, sent, plan.send_splits, plan.recv_splits, "combine")
        rows = arrived.to(x.device).view(x.dtype)
        positions = plan.slot_positions
        if self._node_reduction is None:
            return local_ops.sum_rows(rows, positions, topk_weights, out=out)
        return arithmetic.sum_rows_by_node(
            rows,
            positions.to(rows.device),
            self._node_reduction.node_of(plan.slots).to(rows.device),
            self._node_reduction.own_node,
            topk_weights,
            out=out,
        )

    def pull(self, row_weights: torch.Tensor, plan: CollectivePlan) -> torch.Tensor:
        """`[M]`, or RANK_MAJOR `[M, K]`, to `[T, K]`; 0 where a choice is unused or was dropped."""
        weights = row_weights.cpu()
        if weights.dim() == 1:
            weights = weights.unsqueeze(1)
        arrived = self._carry_small(
            weights[plan.source_rows], plan.send_splits, plan.recv_splits, "combine"
        )
        pulled = torch.zeros(plan.topk_idx.shape, dtype=weights.dtype)
        token_idx, topk_pos = (plan.choice_positions >= 0).nonzero(as_tuple=True)
        is_by_choice = plan.layout is Layout.RANK_MAJOR
        column = topk_pos if is_by_choice else torch.zeros_like(topk_pos)
        positions = plan.choice_positions[token_idx, topk_pos]
        pulled[token_idx, topk_pos] = arrived[positions, column]
        return pulled.to(row_weights.device)

    def _place(self, sent: torch.Tensor, plan: CollectivePlan) -> torch.Tensor:
        """Carry dispatched rows and put them into their slots; uint8 `[M, row_bytes]`."""
        num_arriving = plan.source_rows.numel()
        row_bytes = sent.shape[1]
        x = torch.empty(plan.num_recv_tokens, row_bytes, dtype=torch.uint8, device=sent.device)
        if plan.layout is Layout.RANK_MAJOR:
            self._carry(x[:num_arriving], sent, plan.recv_splits, plan.send_splits, "dispatch")
            x[num_arriving:].zero_()
            return x
        # One more row, of zeros, is where padding comes from.
        arrived = self._stage("receive", num_arriving + 1, row_bytes)
        self._carry(arrived[:num_arriving], sent, plan.recv_splits, plan.send_splits, "dispatch")
        if plan.layout is Layout.LOW_LATENCY:
            x[plan.source_rows.to(x.device)] = arrived[:num_arriving]
            return x
        arrived[num_arriving].zero_()
        origin = torch.full((plan.num_recv_tokens,), num_arriving)
        origin[plan.source_rows] = torch.arange(num_arriving)
        local_ops.gather_rows(arrived, origin, x)
        return x

    def _local_topk_idx(self, plan: CollectivePlan) -> torch.Tensor:
        """RANK_MAJOR: choices of every sent row in its receiver's own expert ids, -1 elsewhere."""
        dst_rank = torch.arange(self._placement.num_ranks).repeat_interleave(
            torch.tensor(plan.send_splits)
        )
        choices = plan.topk_idx[plan.sent_token_idx]
        return local_topk_idx(choices, dst_rank, self._placement)

    def _widened(self, values: torch.Tensor, plan: CollectivePlan, *, fill: int) -> torch.Tensor:
        """Widen to as many columns as the rank of the most choices per token has."""
        return F.pad(values, (0, plan.num_recv_topk - values.shape[1]), value=fill)

    def _with_tail(self, values: torch.Tensor, plan: CollectivePlan, *, fill: int) -> torch.Tensor:
        """Lengthen to as many rows as the result has."""
        return F.pad(values, (0, 0, 0, plan.num_recv_tokens - values.shape[0]), value=fill)

    def _send_small(self, values: torch.Tensor, plan: CollectivePlan) -> torch.Tensor:
        return self._carry_small(values, plan.recv_splits, plan.send_splits, "dispatch")

    def _carry_small(
        self, values: torch.Tensor, recv_splits: list[int], send_splits: list[int], operation: str
    ) -> torch.Tensor:
        """Carry weights or ids `[n, k]` from the CPU to the CPU."""
        sent = as_bytes(values.contiguous()).to(self._transport.device)
        arrived = torch.empty(
            sum(recv_splits), sent.shape[1], dtype=torch.uint8, device=sent.device
        )
        self._carry(arrived, sent, recv_splits, send_splits, operation)
        return arrived.cpu().view(values.dtype)

    def _carry(
        self,
        arrived: torch.Tensor,
        sent: torch.Tensor,
        recv_splits: list[int],
        send_splits: list[int],
        operation: str,
    ) -> None:
        self._transport.all_to_all(arrived, sent, recv_splits, send_splits, operation)

    def _stage(self, name: str, num_rows: int, row_bytes: int) -> torch.Tensor:
        """A uint8 `[num_rows, row_bytes]` that the next call may use again.

        Fresh memory for every call would cost more than the call: the kernel zeroes its pages.
        """
        num_bytes = num_rows * row_bytes
        kept = self.staging.get(name)
        if kept is None or kept.numel() < num_bytes:
            with torch.inference_mode(mode=False):  # later calls write to it in any mode
                kept = torch.empty(num_bytes, dtype=torch.uint8, device=self._transport.device)
            self.staging[name] = kept
        return kept[:num_bytes].view(num_rows, row_bytes)


def _row_bytes(rows: torch.Tensor) -> int:
    return rows.shape[1] * rows.element_size()
