"""Memory in the heap of every rank that every rank can address."""

from __future__ import annotations

import torch

from moe_comm import errors
from moe_comm.arguments import as_int
from moe_comm.peers.communicator import Communicator, gathers
from moe_comm.peers.gather_objects import decode_all
from moe_comm.peers.plain_data import encode_plain

__all__ = ["SymmetricBytes"]


class SymmetricBytes:
    """The same number of bytes in the heap of every rank, each of which every rank can address.

    Collective. Nothing orders what ranks store here and what others load: the caller does, for
    instance by `Communicator.all_gather`.

    Args:
        communicator: Whose heap; its backend must be "host".
        num_bytes: Of each rank, >= 0; may differ from rank to rank.

    Raises:
        ValueError: The backend has no heap, or `num_bytes` is out of range on some rank; on every rank.
        TypeError: `num_bytes` is no int on some rank; on every rank.
        CapacityError: A rank's heap cannot hold it; on every rank.
        PeerFailedError: A peer died or left.
        PeerTimeoutError: A peer did not arrive.
    """

    @gathers
    def __init__(self, communicator: Communicator, num_bytes: int) -> None:
        native = communicator.require_native()
        problem = ""
        needed_bytes = available_bytes = size = 0
        place = (0, 0)
        try:
            size = as_int("num_bytes", num_bytes, 0, (1 << 63) - 1)
            self._local = communicator.empty(size, dtype=torch.uint8)
            place = native.find(self._local.data_ptr(), size) or place
        except errors.CapacityError as error:
            problem = str(error)
            needed_bytes, available_bytes = error.needed_bytes, error.available_bytes
        except Exception as error:  # noqa: BLE001 - whatever it is, peers must hear of it
            communicator.reject(error)
        said = encode_plain((problem, needed_bytes, available_bytes, (*place, size)))
        # Failed ranks say nothing.
        gathered = decode_all(communicator.exchange("SymmetricBytes", said))
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
            rank_idx: native.resolve(rank_idx, *item[3])
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
