"""Weights of miles' trainers in its SGLang servers: a transfer protocol of miles.

Given by its path: `--update-weight-transfer-mode external --custom-weight-transfer-protocol-path
moe_comm.resharding.clients.miles.MoeCommWeightTransfer`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from moe_comm.peers.agree import FirstError, agree
from moe_comm.peers.gather_objects import gather_objects_of_group
from moe_comm.resharding.clients.frameworks import class_of, module_of
from moe_comm.resharding.clients.sglang import SglangStream, own_address

__all__ = ["MoeCommWeightTransfer"]

_base = module_of("miles.backends.training_utils.weight_update.protocol")
_Base: Any = class_of(_base, "WeightTransferProtocol")


class MoeCommWeightTransfer(_Base):  # type: ignore[misc]
    """A `WeightTransferProtocol`: buckets of full tensors from the first trainer, as an `SglangStream`.

    Whatever fails, every trainer takes part in the rest of the buckets, and all raise in `finalize`, before
    miles names a new version; servers serve the one before. The next update has a stream of its own.

    Args:
        args: Arguments of miles. May have `moe_comm_address` ("host:port" of this machine, else that of its
            host name) and `moe_comm_timeout_s` (limit of every wait, else 600).
    """

    if _base is not None:
        # The first trainer has everything.
        required_placement = type(_Base.required_placement)(gather_pp=True)

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self._stream: SglangStream | None = None
        self._problem = FirstError()
        self._version = 0
        self._has_begun = False

    def connect(
        self,
        rollout_engines: Sequence[Any],
        engine_gpu_counts: Sequence[int] | None,
        engine_gpu_offsets: Sequence[int] | None,
        *_: object,
    ) -> None:
        """Take the servers' clients; where they are used, the servers find this process."""
        self.rollout_engines = rollout_engines
        self.is_sender = dist.get_rank() == 0
        if not self.is_sender:
            return
        counts = engine_gpu_counts or [self.args.rollout_num_gpus_per_engine] * len(rollout_engines)
        async_utils = importlib.import_module("miles.utils.async_utils")

        def post(server: int, body: dict[str, Any]) -> object:
            client = rollout_engines[server]
            return async_utils.run(client.update_weights_from_tensor(**body))

        self._stream = SglangStream(
            getattr(self.args, "moe_comm_address", None) or own_address(),
            counts,
            post,
            bucket_bytes=self.args.update_weight_buffer_size,
            timeout_s=getattr(self.args, "moe_comm_timeout_s", 600.0),
        )

    def begin_sync(self, weight_version: int, iter_buckets: Callable[..., Any]) -> bool:
        """Expect the buckets of a version."""
        self._version, self._has_begun = weight_version, False
        self._problem = FirstError()
        return True

    def send_bucket(self, bucket: list[tuple[str, torch.Tensor]]) -> None:
        """Send a bucket; after a mistake nothing is sent."""
        if self._problem:
            return
        assert self._stream is not None
        with self._problem:
            if not self._has_begun:
                self._stream.begin(str(self._version))
                self._has_begun = True
            for name, tensor in bucket:
                self._stream.add(name, tensor)

    def after_base_weights(self) -> None:
        """Wait until every rank of the servers has the version, on the first trainer."""
        if self._stream is None:
            return
        with self._problem:
            if not self._problem:
                if not self._has_begun:
                    raise ValueError(f"version {self._version}: miles has sent no tensor")
                self.update_weight_metrics["perf/moe_comm_bytes"] = float(self._stream.end())
        if self._problem.error is not None:
            self._stream.fail(self._problem.error)

    def finalize(self, weight_version: int) -> None:
        """Raise on every trainer if any has found a mistake. Collective.

        Raises:
            Exception: As `SglangStream.send`.
        """
        group = importlib.import_module("miles.utils.distributed_utils").get_gloo_group()
        agree(functools.partial(gather_objects_of_group, group), self._problem.take())
