"""A rank's GPU: who shares it, the SMs that buffers take of it, and the heap on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moe_comm import env
from moe_comm.peers import cuda_devices, nvshmem
from moe_comm.peers.agree import FirstError, agree
from moe_comm.peers.bootstrap import Bootstrap
from moe_comm.peers.sms_per_rank import default_num_sms, problem_with_sms

if TYPE_CHECKING:
    from moe_comm import _cuda, _host


class UnreachableGpusError(ValueError):
    """GPUs of a node that do not reach each other, on every rank."""


class RankGpu:
    """The GPU of this rank, as its communicator and the buffers on it use it.

    Args:
        device: "cuda" for the current GPU of this process.
        num_sms: SMs for the kernels of one buffer; None for the parent's, else for what the GPUs
            allow.
        parent: GPU of the communicator's parent, whose heap and SMs these are; or None.

    Raises:
        ValueError: This process cannot use the GPU.
    """

    def __init__(self, device: torch.device, num_sms: int | None, parent: RankGpu | None) -> None:
        reason = cuda_devices.unusable_reason(device.index or 0)
        if reason is not None:
            raise ValueError(reason)
        if not torch.cuda.is_available():
            raise ValueError("this build of torch has no CUDA, and rows are its tensors")
        if device == torch.device("cuda"):  # without a number
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self._owner: RankGpu = self if parent is None else parent._owner
        self._num_sms: int | None = num_sms
        if num_sms is None and parent is not None:
            self._num_sms = parent._num_sms
        self._num_claimed_sms = 0
        self._own = cuda_devices.identify(device.index)
        self._devices = [self._own]
        self._heap: _cuda.Heap | None = None

    def learn_peers(self, bootstrap: Bootstrap, local_ranks: range) -> None:
        """Learn which rank has which GPU. Collective.

        Args:
            bootstrap: Bootstrap of the communicator.
            local_ranks: Ranks of this node, whose GPUs must reach each other.

        Raises:
            UnreachableGpusError: The GPUs of two ranks of a node do not reach each other; on every rank.
        """
        self._devices = bootstrap.all_gather(self._own)
        if self._num_sms is None:
            self._num_sms = default_num_sms(self._devices)
        problem = cuda_devices.problem_with_devices(bootstrap.rank_idx, self._devices, local_ranks)
        try:
            agree(bootstrap.all_gather, problem)
        except ValueError as error:
            raise UnreachableGpusError(str(error)) from None

    def make_heap(
        self,
        native: _host.Group,
        bootstrap: Bootstrap,
        max_heap_bytes: int | None,
        nvshmem_id: bytes | None,
    ) -> None:
        """Make this rank's memory on its GPU, which peers can open; a child's is its parent's. Collective.

        Args:
            native: Native group of the communicator; destroyed if this raises.
            bootstrap: Bootstrap of the communicator.
            max_heap_bytes: As in `Communicator`.
            nvshmem_id: Id by which ranks of several nodes meet (`nvshmem.agree`); None within a node.

        Raises:
            ValueError: A rank cannot make its memory; on every rank.
        """
        if self._owner is not self:
            self._heap = self._owner.heap
            return
        with FirstError() as first:
            # torch and this module use one context of the device; torch's is made first.
            torch.empty(0, device=self.device)
            arguments = (
                native,
                self.device.index,
                cuda_devices.max_connections(self._own, self._devices),
                max_heap_bytes or 0,
                env.poison_windows(),
            )
            if nvshmem_id is None:
                self._heap = cuda_devices.load_cuda_module().Heap.create(*arguments)
            else:
                module = nvshmem.load_nvshmem_module()
                self._heap = module.InternodeHeap.create(*arguments, nvshmem_id)
        try:
            agree(bootstrap.all_gather, first.take_line())
        except ValueError:
            native.destroy()
            raise

    @property
    def heap(self) -> _cuda.Heap:
        """This rank's memory on its GPU."""
        assert self._heap is not None, "before make_heap"
        return self._heap

    @property
    def num_sms(self) -> int:
        """SMs that the kernels of one buffer take on every rank."""
        assert self._num_sms is not None, "before learn_peers"
        return self._num_sms

    def claim_sms(self) -> tuple[int, str]:
        """SMs for one more buffer on this rank, and what is wrong with that ("" if nothing).

        `return_sms` gives them back, also after a problem. Children claim from their parent.
        """
        num_sms = self.num_sms
        owner = self._owner
        problem = problem_with_sms(owner._devices, num_sms, owner._num_claimed_sms)
        owner._num_claimed_sms += num_sms
        return num_sms, problem

    def return_sms(self, num_sms: int) -> None:
        """Give back what `claim_sms` gave."""
        self._owner._num_claimed_sms -= num_sms
