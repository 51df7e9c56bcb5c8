"""An installed DeepEP moves the rows, behind the same buffer and with the same bits.

The ranks agree on counts as in the collective backend. Dispatch is one DeepEP dispatch: every token
crosses to a rank once, with its choices there, and is put into its slots on arrival. Combine carries
the rows of a token home unreduced and adds them there in the order of every other backend; bfloat16
sums of `RANK_MAJOR`, whose order is DeepEP's own, are DeepEP's combine.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere

from moe_comm.ep.backends import local_ops
from moe_comm.ep.backends.collective import CollectiveBackend
from moe_comm.ep.backends.collective_plan import CollectivePlan
from moe_comm.ep.backends.collective_rows import ReceivedRows, RowMover
from moe_comm.ep.backends.collective_transport import CollectiveTransport
from moe_comm.ep.backends.deep_ep_transport import (
    Arrival,
    DeepEpTransport,
    Rows,
    problem_with_deep_ep,
)
from moe_comm.ep.backends.expert_ranks import Placement
from moe_comm.ep.backends.rows import as_bytes
from moe_comm.ep.config import EpConfig, Layout
from moe_comm.peers.agree import agree

# Dispatches whose DeepEP handles are kept: the layers and microbatches between forward and backward.
_MAX_NUM_ROUTES = 256


class DeepEpBackend(CollectiveBackend):
    """DeepEP's V1 `Buffer` moves rows; needs a torch.distributed group, or a single rank.

    Works with the package's own module of that name too (`moe_comm.compat`), on CPU ranks. DeepEP
    itself moves rows on GPUs: rows that are on the CPU are copied there and back. Of a single rank,
    nothing is moved and DeepEP is not asked.
    """

    name = "deep_ep"
    has_node_reduction = False
    has_rank_reduction = False
    has_balanced_replicas = False

    def __init__(self, communicator: object, config: EpConfig) -> None:
        super().__init__(communicator, config)
        placement = self._placement
        if placement.num_ranks == 1:
            return
        num_local_experts = max(map(placement.native.num_local_experts, range(placement.num_ranks)))
        problem = problem_with_deep_ep(placement.num_ranks, num_local_experts)
        try:
            agree(self._peers.bootstrap.all_gather, problem)
        except ValueError:
            self._transport.destroy()
            raise
        self._rows = DeepEpRows(self._transport, placement, num_local_experts, config.row_bytes)

    def destroy(self) -> None:
        """Release what the buffer holds, after what is in flight."""
        rows = self._rows
        if isinstance(rows, DeepEpRows):
            if self._progress.is_idle():
                rows.destroy()
            else:
                self._progress.submit(rows.destroy)
        super().destroy()


@dataclasses.dataclass(frozen=True, eq=False)
class _Route:
    """Route of the rows of a plan, known once they have travelled.

    Args:
        generation: Generation of the transport that `handle` belongs to.
        handle: DeepEP's.
        origin: int64 `[M]`, the arriving (row, choice) that every row of the window is, as
            `row * K + choice`; -1 in padding. None for RANK_MAJOR, whose rows are as they arrive.
    """

    generation: int
    handle: object
    origin: torch.Tensor | None


class DeepEpRows(RowMover):
    """Moves what a plan says, over DeepEP. Every method is collective.

    Args:
        transport: Transport of the buffer; says who knows a plan's route.
        placement: Placement of the experts.
        num_local_experts: Most experts of one rank.
        row_bytes: Bytes of a row to expect, 0 if not known.
    """

    def __init__(
        self,
        transport: CollectiveTransport,
        placement: Placement,
        num_local_experts: int,
        row_bytes: int,
    ) -> None:
        super().__init__(transport, placement)
        assert transport.group is not None  # of several ranks
        self.transport = DeepEpTransport(transport.group, num_local_experts, row_bytes)
        self._num_local_experts = num_local_experts
        # By what a plan says: a plan that was exported and imported again finds its route.
        self._routes: collections.OrderedDict[bytes, _Route] = collections.OrderedDict()

    def destroy(self) -> None:
        """Let go of DeepEP's buffer and handles. Local, idempotent."""
        self._routes.clear()
        self.transport.destroy()

    def dispatch(
        self,
        x: torch.Tensor,
        sf: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        plan: CollectivePlan,
        *,
        is_cached: bool,
    ) -> ReceivedRows:
        # One dispatch of DeepEP carries rows, scale factors, choices and weights.
        rows = Rows(x, sf)
        self.transport.reserve(rows)
        # A cached dispatch of DeepEP carries no weights.
        route = self._route_known_to_all(plan) if is_cached and topk_weights is None else None
        if route is not None:
            arrived = self.transport.multicast_again(rows, route.handle)
            return self._placed(arrived, None, None, plan, route)
        arrival = self.transport.multicast(
            rows, self._expert_ids(plan), self._widened_weights(topk_weights, plan)
        )
        route = self._remember(plan, arrival)
        has_ids = plan.layout is Layout.RANK_MAJOR and not is_cached
        topk_idx = arrival.topk_idx if has_ids else None
        return self._placed(arrival.rows, topk_idx, arrival.topk_weights, plan, route)

    def sum_home(
        self,
        x: torch.Tensor,
        plan: CollectivePlan,
        topk_weights: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        # DeepEP adds where its order of additions is that of the layout.
        if (
            plan.layout is Layout.RANK_MAJOR
            and x.dtype is torch.bfloat16
            and self.transport.adds_in_rank_order
        ):
            self.transport.reserve(Rows(x))
            route = self._route_known_to_all(plan)
            if route is not None:
                rows = x[: plan.source_rows.numel()]
                sums = self.transport.reduce(rows, route.handle)
                return sums if out is None else out.copy_(sums)
        return super().sum_home(x, plan, topk_weights, out)

    def _carry(
        self,
        arrived: torch.Tensor,
        sent: torch.Tensor,
        recv_splits: list[int],
        send_splits: list[int],
        operation: str,
    ) -> None:
        self.transport.all_to_all(arrived, sent, send_splits, operation)

    def _expert_ids(self, plan: CollectivePlan) -> torch.Tensor:
        """Kept choices as DeepEP numbers experts, every rank having as many: int64 `[T, K]`."""
        chosen = plan.topk_idx.clamp(min=0)
        owner = self._placement.expert_rank[chosen]
        ids = owner * self._num_local_experts + self._placement.local_expert_idx[chosen]
        return self._widened(torch.where(plan.is_kept(), ids, -1), plan, fill=-1)

    def _widened_weights(
        self, topk_weights: torch.Tensor | None, plan: CollectivePlan
    ) -> torch.Tensor | None:
        return None if topk_weights is None else self._widened(topk_weights, plan, fill=0)

    def _remember(self, plan: CollectivePlan, arrival: Arrival) -> _Route:
        """The route of a plan whose rows have arrived."""
        source_rows = plan.source_rows
        origin = None
        if plan.layout is Layout.RANK_MAJOR:
            num_arrived = arrival.topk_idx.shape[0]
        else:
            # Rows arrive in order of (source rank, token), so that a stable sort by expert is the
            # order of the window.
            ids = arrival.topk_idx.cpu().flatten()
            num_arrived = int((ids >= 0).sum())
            by_expert = torch.where(ids < 0, self._num_local_experts, ids).argsort(stable=True)
            origin = torch.full((plan.num_recv_tokens,), -1)
        self.transport.check_num_rows(num_arrived, source_rows.numel(), "dispatch")
        if origin is not None:
            origin[source_rows.sort().values] = by_expert[:num_arrived]
        route = _Route(self.transport.generation, arrival.handle, origin)
        self._routes[_identity(plan)] = route
        if len(self._routes) > _MAX_NUM_ROUTES:
            self._routes.popitem(last=False)
        return route

    def _route_known_to_all(self, plan: CollectivePlan) -> _Route | None:
        """The route of a plan, if every rank has it: there is none of a plan of another buffer."""
        route = self._routes.get(_identity(plan))
        is_known = route is not None and route.generation == self.transport.generation
        known = self._transport.all_gather_row(torch.tensor([int(is_known)]), "dispatch")
        return route if bool(known.all()) else None

    def _placed(
        self,
        arrived: Rows,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        plan: CollectivePlan,
        route: _Route,
    ) -> ReceivedRows:
        """Arrived rows in the slots of the window, in memory that is nobody else's."""
        if route.origin is None:
            # A result of a fixed number of rows has a tail.
            tail = plan.num_recv_tokens - arrived.x.shape[0]
            return ReceivedRows(
                x=_with_tail(arrived.x, tail),
                sf=None if arrived.sf is None else _with_tail(arrived.sf, tail),
                topk_idx=None if topk_idx is None else F.pad(topk_idx, (0, 0, 0, tail), value=-1),
                topk_weights=(
                    None if topk_weights is None else F.pad(topk_weights, (0, 0, 0, tail))
                ),
            )
        origin = route.origin.to(arrived.x.device)
        num_recv_topk = plan.num_recv_topk
        row_idx = torch.where(origin < 0, -1, origin // num_recv_topk)
        weights = None
        if topk_weights is not None:
            weights = _gathered(topk_weights.reshape(-1, 1), origin).view(-1)
        return ReceivedRows(
            x=_gathered(arrived.x, row_idx),
            sf=None if arrived.sf is None else _gathered(arrived.sf, row_idx),
            topk_idx=None,
            topk_weights=weights,
        )


def _identity(plan: CollectivePlan) -> bytes:
    """Equal for plans whose rows go to the same places."""
    digest = hashlib.blake2b(f"{plan.layout} {plan.expert_alignment}".encode(), digest_size=16)
    for part in (plan.counts, plan.slots):
        digest.update(repr(part.shape).encode())
        digest.update(part.contiguous().numpy().tobytes())
    return digest.digest()


def _gathered(rows: torch.Tensor, row_idx: torch.Tensor) -> torch.Tensor:
    """`rows[row_idx]` as bytes, zeros where the index is -1."""
    source = as_bytes(rows)
    out = torch.empty(row_idx.numel(), source.shape[1], dtype=torch.uint8, device=rows.device)
    local_ops.place_rows(source, row_idx, out)
    return out.view(rows.dtype)


def _with_tail(rows: torch.Tensor, num_more: int) -> torch.Tensor:
    """Append so many rows of zeros."""
    return F.pad(as_bytes(rows), (0, 0, 0, num_more)).view(rows.dtype) if num_more else rows
