"""Contents of Megatron's module globals, one for every process group."""

from __future__ import annotations

from typing import NoReturn, TypeAlias

import torch
import torch.distributed as dist

from moe_comm.ep.buffer import EpBuffer
from moe_comm.ep.group_buffers import GroupBuffers, group_buffers, is_alive
from moe_comm.peers.bootstrap import Bootstrap

Group: TypeAlias = dist.ProcessGroup | Bootstrap | None


class GroupBuffer:
    """Contents of Megatron's globals: one for every group, with the attributes that callers read.

    Its buffers are on the device that the first call works on, on which all ranks agree. The memory
    behind it is sized by every call, whatever stands here.

    Attributes:
        group: As given.
        rank: Rank of this process in the group.
        group_size: Ranks of the group.
        num_nvl_bytes: Largest `hidden_bytes` that was asked for.
        num_rdma_bytes: 0.
        hidden_dim: Largest that a HybridEP call brought, or was announced.
        max_num_of_tokens_per_rank: Likewise.
        num_local_experts: Local experts of the latest HybridEP call, or as announced; 0 before.
        use_fp8: Whether HybridEP dispatches quantize.
    """

    def __init__(self, shared: GroupBuffers) -> None:
        self.group = shared.group
        self.rank = shared.communicator.rank_idx
        self.group_size = shared.communicator.num_ranks
        self.num_nvl_bytes = 0
        self.num_rdma_bytes = 0
        self.hidden_dim = 0
        self.max_num_of_tokens_per_rank = 0
        self.num_local_experts = 0
        self.use_fp8 = False
        self._first = self._shared = shared
        self._is_first_on_cpu = shared.device.type == "cpu"
        self._is_on_device = False
        self._latest: EpBuffer | None = None
        shared.is_adopted = True

    def is_of(self, shared: GroupBuffers) -> bool:
        """Return whether it stands on what the group shares now."""
        return self._first is shared and self._shared.is_current()

    def is_sure(self) -> bool:
        """Return whether it is what the group would find again, without asking what the group shares.

        On the CPU, that is; of a GPU the current device has a say.
        """
        if not (self._is_first_on_cpu and self._first.is_current()):
            return False
        return self._shared is self._first or self._shared.is_current()

    def see(self, shape: torch.Size, num_local_experts: int) -> None:
        """Note a HybridEP call, which brings rows of such a shape, for so many experts a rank."""
        num_tokens, hidden = shape[0], shape[-1]
        if hidden > self.hidden_dim:
            self.hidden_dim = hidden
        if num_tokens > self.max_num_of_tokens_per_rank:
            self.max_num_of_tokens_per_rank = num_tokens
        self.num_local_experts = num_local_experts

    def ep_buffer(self, num_experts: int, x: torch.Tensor) -> EpBuffer:
        """The buffer beneath for so many experts of the group; collective on first use.

        Args:
            num_experts: Experts over all ranks.
            x: Rows of the call.
        """
        if not self._is_on_device:
            # The call refuses what is no tensor.
            device = x.device if isinstance(x, torch.Tensor) else self._shared.device
            self._shared = self._shared.for_device(
                device, lambda: f"buffers of fused_a2a on {device.type}"
            )
            self._is_on_device = True
        latest = self._latest
        if latest is None or latest.is_destroyed or latest.config.num_experts != num_experts:
            latest = self._latest = self._shared.get(num_experts)
        return latest

    @property
    def latest(self) -> EpBuffer | None:
        """The buffer beneath of the call before; None before the first."""
        return self._latest

    def reject(self, operation: str, error: Exception) -> NoReturn:
        """Raise `error` on every rank where this one cannot tell which buffer the call is for.

        The peers are taken to use that of the call before; if there was none, they are about to make it.

        Args:
            operation: "dispatch" or "combine": what the other ranks call.
            error: A ValueError or TypeError.
        """
        if self._latest is None:
            self._shared.reject(error)
        self._latest.reject(operation, error)


def buffer_of_group(buffers: dict[int, GroupBuffer], group: Group) -> GroupBuffer:
    """The entry of a group. Where it is made, entries of destroyed process groups are dropped."""
    given = group
    if given is None and dist.is_available() and dist.is_initialized():
        given = dist.group.WORLD
    known = buffers.get(id(given))
    if known is not None and known.group is given and known.is_sure():
        return known
    for key, buffer in list(buffers.items()):
        if isinstance(buffer.group, dist.ProcessGroup) and not is_alive(buffer.group):
            buffers.pop(key, None)
    shared = group_buffers(group)
    found = buffers.get(id(shared.group))
    if found is None or not found.is_of(shared):
        found = buffers[id(shared.group)] = GroupBuffer(shared)
    return found
