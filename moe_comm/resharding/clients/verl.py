"""A checkpoint engine of verl; importing this where verl is registers it, as `custom_backend_module` wants."""

from __future__ import annotations

import datetime as dt
import socket
import uuid
from collections.abc import AsyncIterator, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from moe_comm.resharding.clients.frameworks import class_of, module_of
from moe_comm.resharding.clients.tensor_stream import StreamError, TensorStream

__all__ = ["BACKEND", "MoeCommCheckpointEngine"]

BACKEND = "moe_comm"
"""Name in verl's registry: `checkpoint_engine.backend`."""

_base = module_of("verl.checkpoint_engine.base")
_Base: Any = class_of(_base, "CheckpointEngine")


class MoeCommCheckpointEngine(_Base):  # type: ignore[misc]
    """Full tensors from the first actor to the rollout ranks, over a group that outlives an update.

    verl builds a topology for every update. Where it is that of the update before, and every rank still has
    the group of it, the group is used again.

    Args:
        bucket_size: Bytes that travel at a time.
        is_master: Whether this is the first actor; verl says so on actors.
        timeout_s: Limit of every wait.
        host: Address by which rollout ranks reach the first actor; None for that of its host name.
    """

    wire_format = "named_tensors"

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        timeout_s: float = 600.0,
        host: str | None = None,
    ) -> None:
        self.bucket_size = bucket_size
        self.is_master = is_master
        self._timeout = dt.timedelta(seconds=timeout_s)
        self._host = host
        self._server: Any = None
        self._joined: tuple[str, int, int] | None = None
        self._stream: TensorStream | None = None

    def prepare(self) -> dict[str, Any]:
        """Return which group this rank has, and on the first actor where others find it."""
        if not self.is_master:
            return {"joined": self._joined}
        if self._server is None:
            host = self._host or socket.gethostbyname(socket.gethostname())
            self._server = dist.TCPStore(  # type: ignore[attr-defined]
                host, 0, is_master=True, timeout=self._timeout, wait_for_workers=False
            )
        return {"joined": self._joined, "host": self._server.host, "port": self._server.port}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the arguments of `init_process_group`, for every actor and every rollout rank.

        Raises:
            ValueError: `metadata` is not what every rank prepared, or no actor is the first.
        """
        total = actor_wg_world_size + rollout_world_size
        if len(metadata) != total:
            raise ValueError(f"expected metadata of {total} ranks, got {len(metadata)}")
        if "port" not in metadata[0]:
            raise ValueError(
                f"expected the first actor's address in its metadata, got {metadata[0]}"
            )
        size = 1 + rollout_world_size
        members = [metadata[0], *metadata[actor_wg_world_size:]]
        joined = [each["joined"] for each in members]
        known = joined[0][0] if joined[0] else None
        is_kept = known is not None and all(
            each is not None and tuple(each) == (known, rank, size)
            for rank, each in enumerate(joined)
        )
        group_id = known if is_kept else uuid.uuid4().hex
        address = metadata[0]["host"], metadata[0]["port"]

        def entries(ranks: list[int]) -> dict[str, list[Any]]:
            count = len(ranks)
            return {
                "rank": ranks,
                "world_size": [size] * count,
                "group_id": [group_id] * count,
                "address": [address] * count,
            }

        actors = [0, *[-1] * (actor_wg_world_size - 1)]
        return entries(actors), entries(list(range(1, size)))

    def init_process_group(
        self, rank: int, world_size: int, group_id: str, address: tuple[str, int]
    ) -> None:
        """Join the group, unless this rank has it; actors but the first have none (rank -1)."""
        if rank < 0 or self._joined == (group_id, rank, world_size):
            return
        self._joined = self._stream = None
        store = self._server
        if store is None:
            host, port = address
            store = dist.TCPStore(  # type: ignore[attr-defined]
                host, port, is_master=False, timeout=self._timeout
            )
        group = dist.ProcessGroupGloo(
            PrefixStore(group_id, store), rank, world_size, timeout=self._timeout
        )
        self._stream = TensorStream(group, self.bucket_size)
        self._joined = group_id, rank, world_size

    def finalize(self) -> None:
        """Keep group and buckets, for the next update."""

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> None:
        """Send full tensors by the names of Hugging Face; actors but the first only take part in making them.

        All of them are taken, also where it fails, since the other actors wait in making them.

        Raises:
            StreamError: The tensors did not arrive whole; the group is joined anew at the next update.
        """
        rest = iter(weights)
        try:
            if self._stream is not None:
                self._stream.send(rest, None if global_steps is None else str(global_steps))
        except StreamError:
            self._joined = self._stream = None
            raise
        finally:
            for _ in rest:
                pass

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield name and full tensor; one is what it is until the next is asked for.

        Raises:
            StreamError: The tensors did not arrive whole, or are those of another step (before the first).
            RuntimeError: This rank has no group.
        """
        if self._stream is None:
            raise RuntimeError("receive_weights before init_process_group: this rank has no group")
        try:
            for named in self._stream.receive(None if global_steps is None else str(global_steps)):
                yield named
        except StreamError:
            self._joined = self._stream = None
            raise


if _base is not None:
    _base.CheckpointEngineRegistry.register(BACKEND)(MoeCommCheckpointEngine)
