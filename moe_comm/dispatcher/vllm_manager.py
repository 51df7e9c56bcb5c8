"""vLLM's manager of all-to-all buffers: `All2AllManagerBase`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from moe_comm.arguments import as_int, check_kind, shown
from moe_comm.dispatcher.vllm_formats import (
    All2AllManagerBase,
    current_ubatch_id,
    num_experts_of_model,
    parallel_groups,
)
from moe_comm.ep.buffer import EpBuffer
from moe_comm.ep.config import Layout
from moe_comm.ep.group_buffers import group_buffers
from moe_comm.ep.handles import DispatchHandle
from moe_comm.ep.limits import ROW_BYTES_MULTIPLE
from moe_comm.peers.bootstrap import Bootstrap
from moe_comm.peers.missed_calls import GATHER, Telling, keep, keeps_unbound

__all__ = ["VllmAll2AllManager"]

# Names of vLLM and DeepEP for one thing.
_ALIASES = {
    "num_global_experts": "num_experts",
    "max_num_tokens_per_dp_rank": "num_max_tokens_per_rank",
    "max_num_tokens_per_rank": "num_max_tokens_per_rank",
}


class VllmAll2AllManager(All2AllManagerBase):  # type: ignore[misc]
    """Makes the buffers of one expert-parallel group, and gathers and scatters whole batches.

    Args:
        cpu_group: Process group, bootstrap, or None for the default group.
        tcp_store_group: Group of the same ranks, for vLLM's stateless groups: they find each other
            through its store because torch.distributed does not know `cpu_group` then. None for any
            other group.
        dp_rank: This rank among the data-parallel ranks. None: as vLLM has made its groups; without
            them every rank has tokens of its own.
        dp_world_size: Data-parallel ranks; None likewise.
        tp_group: Kept for callers that look at it; None for vLLM's.
        ubatch_id: Names the current micro-batch; None for vLLM's own, or one micro-batch without vLLM.
    """

    @keeps_unbound
    def __init__(
        self,
        cpu_group: dist.ProcessGroup | Bootstrap | None,
        tcp_store_group: Any = None,
        *,
        dp_rank: int | None = None,
        dp_world_size: int | None = None,
        tp_group: Any = None,
        ubatch_id: Callable[[], int] | None = None,
    ) -> None:
        is_store_group = _is_store_group(tcp_store_group)
        store_ranks = _StoreRanks(tcp_store_group) if is_store_group else None
        groups = parallel_groups() if isinstance(cpu_group, dist.ProcessGroup) else None
        # This is a group of CPUs wherever vLLM runs; its groups of parallel ranks know the device.
        device = None if groups is None else groups[0].device
        self._group_buffers = group_buffers(store_ranks or cpu_group, device=device)
        communicator = self._group_buffers.communicator

        def check() -> str:
            if tcp_store_group is not None and not is_store_group:
                raise TypeError(
                    "tcp_store_group must have rank, world_size and all_gather_obj, got "
                    f"{shown(tcp_store_group)}"
                )
            if isinstance(cpu_group, dist.ProcessGroup):
                found = f"rank {cpu_group.rank()} of {cpu_group.size()}"
                expected = f"rank {communicator.rank_idx} of {communicator.num_ranks}"
                if found != expected:
                    raise ValueError(f"cpu_group says {found}, tcp_store_group {expected}")
            if dp_world_size is not None:
                as_int("dp_world_size", dp_world_size, 1, communicator.num_ranks)
            if dp_rank is not None:
                as_int("dp_rank", dp_rank, 0, (dp_world_size or communicator.num_ranks) - 1)
            if ubatch_id is not None and not callable(ubatch_id):
                raise TypeError(f"ubatch_id must be callable, got {shown(ubatch_id)}")
            return f"VllmAll2AllManager(dp_world_size={dp_world_size})"

        self._group_buffers.check_together(check)
        if groups is None:
            self.cpu_group = cpu_group
            self.tcp_store_group = tcp_store_group
            self.dp_group = None
            self.tp_group = None
            self.rank = communicator.rank_idx
            self.world_size = communicator.num_ranks
            self.dp_rank = self.rank
            self.dp_world_size = self.world_size
            self.internode = communicator.num_nodes > 1
        else:
            super().__init__(cpu_group, tcp_store_group)
        if dp_rank is not None:
            self.dp_rank = dp_rank
        if dp_world_size is not None:
            self.dp_world_size = dp_world_size
        if tp_group is not None:
            self.tp_group = tp_group
        # vLLM's base says so of each of its objects.
        self.support_fault_tolerance = False
        self._ubatch_id = current_ubatch_id() if ubatch_id is None else ubatch_id
        self._gathered: dict[int, DispatchHandle] = {}

    @keeps_unbound
    def get_handle(self, kwargs: dict[str, Any]) -> EpBuffer:
        """The buffer for `VllmPrepareAndFinalize`, one per arguments. Collective.

        Args:
            kwargs: "num_experts" (or "num_global_experts"), which may be left out while vLLM loads or
                runs a model: those of the model; "num_max_tokens_per_rank" (or
                "max_num_tokens_per_dp_rank") for the batched format; "expert_rank". Checked where given:
                "num_ep_ranks", "num_local_experts". "token_hidden_size" is not needed: rows may be of
                any size.

        Raises:
            ValueError: A number of some rank does not fit this group, `num_experts` is missing, or ranks
                differ; on every rank.
            TypeError: A key of some rank is unknown; on every rank.
        """
        with Telling(keep, GATHER):
            check_kind("kwargs", kwargs, dict)
        wanted = {_ALIASES.get(name, name): value for name, value in kwargs.items()}
        num_experts = wanted.pop("num_experts", None)
        if num_experts is None:
            num_experts = num_experts_of_model()
        most_tokens = wanted.pop("num_max_tokens_per_rank", None)
        expert_rank = wanted.pop("expert_rank", None)
        num_ranks = wanted.pop("num_ep_ranks", self.world_size)
        num_local_experts = wanted.pop("num_local_experts", None)
        wanted.pop("token_hidden_size", None)

        def check() -> None:
            if num_experts is None:
                raise ValueError(
                    f"get_handle needs num_experts where vLLM has no model, got {sorted(kwargs)}"
                )
            if wanted:
                raise TypeError(f"get_handle does not know {sorted(wanted)}")
            if num_ranks != self.world_size:
                raise ValueError(
                    f"num_ep_ranks is {shown(num_ranks)}, the group has {self.world_size}"
                )

        return self._group_buffers.get_together(
            "get_handle",
            num_experts,
            num_max_tokens_per_rank=most_tokens,
            expert_rank=expert_rank,
            num_local_experts=num_local_experts,
            check=check,
        )

    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: list[torch.Tensor] | None = None,
    ) -> tuple[Any, ...]:
        """Bring every rank's batch to every rank, in rank order. Collective.

        For experts that work on whole batches; `VllmPrepareAndFinalize` moves each token to its experts
        only.

        Args:
            hidden_states: `[num_tokens, hidden]`, rows a multiple of 16 bytes; numbers of tokens may
                differ.
            topk_weights: `[num_tokens, num_topk]`.
            topk_ids: The same.
            is_sequence_parallel: Every rank has tokens of its own although tensors are parallel too.
            extra_tensors: More tensors of `num_tokens` rows, gathered as well.

        Returns:
            The three gathered, and the list of extra tensors where there are some.

        Raises:
            NotImplementedError: Ranks of one tensor-parallel group have the same tokens.
        """
        return self._gather(
            hidden_states, [topk_weights, topk_ids], is_sequence_parallel, extra_tensors
        )

    def dispatch_router_logits(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: list[torch.Tensor] | None = None,
    ) -> tuple[Any, ...]:
        """Dispatch like `dispatch`, with router logits in place of weights and ids."""
        return self._gather(hidden_states, [router_logits], is_sequence_parallel, extra_tensors)

    def combine(
        self, hidden_states: torch.Tensor, is_sequence_parallel: bool = False
    ) -> torch.Tensor:
        """Sum every rank's rows for the tokens of the dispatch before, in rank order. Collective.

        Args:
            hidden_states: `[sum of num_tokens of all ranks, hidden]`.
            is_sequence_parallel: As in `dispatch`.

        Returns:
            `[num_tokens, hidden]`, this rank's tokens.

        Raises:
            RuntimeError: There was no dispatch.
        """
        self._check_tokens_are_own(is_sequence_parallel)
        handle = self._gathered.pop(self._ubatch_id(), None)
        if handle is None:
            raise RuntimeError("combine is called before dispatch")
        return self._gather_buffer().combine(hidden_states.contiguous(), handle)

    def set_num_sms(self, num_sms: int) -> None:
        """Set the SMs of GPU kernels; checked, without effect on the CPU."""
        if isinstance(num_sms, bool) or not isinstance(num_sms, int) or num_sms < 0:
            raise ValueError(f"num_sms must be an int >= 0, got {num_sms!r}")

    def max_sms_used(self) -> int | None:
        """None: communication takes no SM on the CPU."""
        return None

    def destroy(self) -> None:
        """End the communicator of the group and all its buffers, also those of other layers. Idempotent."""
        self._group_buffers.destroy()

    def _gather_buffer(self) -> EpBuffer:
        # One expert on every rank: a token that chooses all of them goes everywhere.
        return self._group_buffers.get(self.world_size, key="whole batches")

    def _check_tokens_are_own(self, is_sequence_parallel: bool) -> None:
        if not is_sequence_parallel and self.dp_world_size != self.world_size:
            raise NotImplementedError(
                f"{self.dp_world_size} data-parallel ranks share their tokens among {self.world_size} "
                "ranks: use sequence parallelism, or a group of the data-parallel ranks"
            )

    def _gather(
        self,
        hidden_states: torch.Tensor,
        tensors: list[torch.Tensor],
        is_sequence_parallel: bool,
        extra_tensors: list[torch.Tensor] | None,
    ) -> tuple[Any, ...]:
        self._check_tokens_are_own(is_sequence_parallel)
        buffer = self._gather_buffer()
        ranks = torch.arange(self.world_size, device=hidden_states.device)
        everywhere = ranks.expand(hidden_states.shape[0], -1).contiguous()
        result = buffer.dispatch(hidden_states.contiguous(), everywhere, layout=Layout.RANK_MAJOR)
        self._gathered[self._ubatch_id()] = result.handle
        more = [] if extra_tensors is None else extra_tensors
        gathered = [_gather_rows(buffer, tensor, result.handle) for tensor in [*tensors, *more]]
        outputs = (result.x, *gathered[: len(tensors)])
        return outputs if extra_tensors is None else (*outputs, gathered[len(tensors) :])


def _is_store_group(group: Any) -> bool:
    return all(hasattr(group, name) for name in ("rank", "world_size", "all_gather_obj"))


class _StoreRanks:
    """The ranks of a `StatelessProcessGroup` of vLLM, which meet in a store."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank_idx: int = group.rank
        self.num_ranks: int = group.world_size

    def all_gather(self, item: Any) -> list[Any]:
        gathered: list[Any] = self._group.all_gather_obj(item)
        return gathered


def _gather_rows(buffer: EpBuffer, tensor: torch.Tensor, handle: DispatchHandle) -> torch.Tensor:
    """Send the rows of a tensor of any dtype and shape to the places of `handle`."""
    num_tokens = tensor.shape[0]
    data = tensor.reshape(num_tokens, math.prod(tensor.shape[1:])).contiguous().view(torch.uint8)
    num_bytes = data.shape[1]
    padded = torch.nn.functional.pad(data, (0, -num_bytes % ROW_BYTES_MULTIPLE))
    rows = buffer.dispatch(padded, None, handle=handle).x[:, :num_bytes].contiguous()
    return rows.view(tensor.dtype).view(rows.shape[0], *tensor.shape[1:])
