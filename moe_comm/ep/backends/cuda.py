"""Kernels on NVIDIA GPUs that reach each other: one NVLink or PCIe domain, or ranks on one GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

from moe_comm.ep.backends.native import Settings
from moe_comm.ep.backends.stream_callers import StreamCallersBackend
from moe_comm.ep.config import EpConfig

if TYPE_CHECKING:
    from moe_comm import _cuda
    from moe_comm.peers.communicator import Communicator

NUM_THREADS = 0  # what each kernel is made for
TOKENS_PER_CHUNK = 64

ResultT = TypeVar("ResultT")


class CudaBackend(StreamCallersBackend):
    """Operations by kernels, in the order of the caller's current stream; see `Backend`."""

    name = "cuda"
    has_node_reduction = True  # of one node, where it changes nothing
    has_rank_reduction = True

    def __init__(self, communicator: Communicator, config: EpConfig) -> None:
        self._gpu = communicator.require_gpu()
        self._device = self._gpu.device
        self._cuda_endpoint: _cuda.Endpoint | None = None
        super().__init__(communicator, config)

    def _create_endpoint(self, settings: Settings) -> _cuda.Endpoint:
        num_sms, problem = self._gpu.claim_sms()
        try:
            # Peers are about to compare, and must hear of a problem.
            agreed = [*settings.agreed, ("num_sms", problem or str(num_sms))]
            self._cuda_endpoint = self._endpoint_class().create(
                dataclasses.replace(settings, agreed=agreed),
                self._gpu.heap,
                num_sms,
                NUM_THREADS,
                TOKENS_PER_CHUNK,
            )
            if problem:
                self._cuda_endpoint.destroy()
                raise ValueError(problem)
        except BaseException:
            self._gpu.return_sms(num_sms)
            raise
        self._num_sms = num_sms
        return self._cuda_endpoint

    def _endpoint_class(self) -> type[_cuda.Endpoint]:
        """The native part."""
        from moe_comm import _cuda

        return _cuda.Endpoint

    @property
    def num_sms(self) -> int:
        """SMs that this buffer's kernels take on this rank."""
        return self._num_sms

    def destroy(self) -> None:
        super().destroy()
        if self._cuda_endpoint is not None:
            self._cuda_endpoint = None
            self._gpu.return_sms(self._num_sms)

    def _in_stream(self, call: Callable[[], ResultT]) -> ResultT:
        """Run `call` for the stream that is current now, with this device current."""
        assert self._cuda_endpoint is not None
        stream = torch.cuda.current_stream(self._device)
        self._cuda_endpoint.set_caller_stream(stream.cuda_stream)
        with torch.cuda.device(self._device):
            return call()
