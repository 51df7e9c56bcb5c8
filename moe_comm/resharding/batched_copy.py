"""Memory that peers share, and many copies between ranks in one call."""

from __future__ import annotations

import pickle

import torch
import torch.utils.dlpack

from moe_comm import errors
from moe_comm.communicator import Communicator

__all__ = ["SymmetricBytes"]


class SymmetricBytes:
    """The same number of bytes in the heap of every rank, each of which every rank can address.

    Collective. Nothing orders what ranks store here and what others load: the caller does, for
    instance by `Communicator.all_gather`.

    Args:
        communicator: Whose heap; its backend must be "host".
        num_bytes: Of each rank, >= 0; may differ from rank to rank.

    Raises:
        ValueError: The backend has no heap, or `num_bytes` is negative on some rank.
        CapacityError: A rank's heap cannot hold it; on every rank.
        PeerFailedError: A peer died or left.
        PeerTimeoutError: A peer did not arrive.
    """

    def __init__(self, communicator: Communicator, num_bytes: int) -> None:
        native = communicator.require_native()
        problem = ""
        needed_bytes = available_bytes = 0
        place = (0, 0)
        if num_bytes < 0:
            problem = f"num_bytes must be >= 0, got {num_bytes}"
        else:
            try:
                self._local = communicator.empty(num_bytes, dtype=torch.uint8)
                place = native.find(self._local.data_ptr(), num_bytes) or place
            except errors.CapacityError as error:
                problem = str(error)
                needed_bytes, available_bytes = error.needed_bytes, error.available_bytes
        said = pickle.dumps((problem, needed_bytes, available_bytes, (*place, max(num_bytes, 0))))
        # Failed ranks say nothing.
        gathered = [pickle.loads(item) if item else None for item in native.all_gather(said)]
        for rank_idx, item in enumerate(gathered):
            if item is None or not item[0]:
                continue
            if item[1] == 0:
                raise ValueError(f"rank {rank_idx}: {item[0]}")
            raise errors.CapacityError(
                f"rank {rank_idx}: {item[0]}",
                needed_bytes=item[1],
                available_bytes=item[2],
                ranks=(rank_idx,),
            )
        self._peers: dict[int, torch.Tensor] = {
            rank_idx: torch.utils.dlpack.from_dlpack(native.resolve(rank_idx, *item[3]))
            for rank_idx, item in enumerate(gathered)
            if item is not None
        }

    @property
    def local(self) -> torch.Tensor:
        """This rank's bytes, uint8."""
        return self._local

    def peer(self, rank_idx: int) -> torch.Tensor:
        """The bytes of `rank_idx` themselves, uint8: what is stored there, their owner sees.

        Valid until their owner drops its `SymmetricBytes` and every tensor over `local`.

        Raises:
            ValueError: `rank_idx` is not a living rank of the communicator.
        """
        if rank_idx not in self._peers:
            raise ValueError(f"rank_idx must be one of {sorted(self._peers)}, got {rank_idx}")
        return self._peers[rank_idx]
