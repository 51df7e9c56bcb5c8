"""What ranks tell each other while they plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from moe_comm.peers.bootstrap import Bootstrap, bootstrap_for
from moe_comm.peers.communicator import Communicator
from moe_comm.peers.gather_objects import decode_all
from moe_comm.peers.plain_data import encode_plain
from moe_comm.resharding.nvshmem_copy_service.memory.symmetric_bytes import SymmetricBytes

__all__ = ["CommunicatorExchange", "Exchange", "Group", "exchange_for"]

# Of a message over the communicator's sockets; longer ones are read from the sender's heap.
_MAX_MESSAGE_BYTES = 64 * 1024


class Exchange(Protocol):
    """Collective messages between the ranks of a group."""

    def all_gather(self, item: Any) -> list[Any]:
        """Every rank's `item`, in rank order; None for ranks that failed and were excluded."""
        ...

    def all_to_all(self, payloads: Sequence[bytes]) -> list[bytes]:
        """What every rank has for this one, in rank order.

        Args:
            payloads: One for every rank, in rank order.
        """
        ...


class _BootstrapExchange:
    """Over whatever can gather objects."""

    def __init__(self, bootstrap: Bootstrap) -> None:
        self._bootstrap = bootstrap

    def all_gather(self, item: Any) -> list[Any]:
        return self._bootstrap.all_gather(item)

    def all_to_all(self, payloads: Sequence[bytes]) -> list[bytes]:
        gathered = self._bootstrap.all_gather(list(payloads))
        return [bytes(row[self._bootstrap.rank_idx]) for row in gathered]


class CommunicatorExchange:
    """Over a communicator's sockets and heap: a dead peer is named, and nobody reads what is for others."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def all_gather(self, item: Any) -> list[Any]:
        """Every rank's `item`; None for ranks that were excluded. Collective."""
        payload = encode_plain(item)
        is_short = len(payload) <= _MAX_MESSAGE_BYTES
        said = self._communicator.all_gather(b"s" + payload if is_short else b"l")
        if b"l" not in said:
            return decode_all([text[1:] for text in said])
        board = SymmetricBytes(self._communicator, len(payload))
        _write(board, payload)
        present = self._communicator.all_gather(b"written")
        texts = [
            bytes(board.peer(rank_idx).numpy()) if word else b""
            for rank_idx, word in enumerate(present)
        ]
        # Nobody gives its memory back while a peer reads it.
        self._communicator.all_gather(b"read")
        return decode_all(texts)

    def all_to_all(self, payloads: Sequence[bytes]) -> list[bytes]:
        """What every rank has for this one; b"" of ranks that were excluded. Collective."""
        rank_idx = self._communicator.rank_idx
        board = SymmetricBytes(self._communicator, sum(len(payload) for payload in payloads))
        _write(board, b"".join(payloads))
        sizes = self.all_gather([len(payload) for payload in payloads])
        received = []
        for peer_idx, peer_sizes in enumerate(sizes):
            if peer_sizes is None:
                received.append(b"")
                continue
            begin = sum(peer_sizes[:rank_idx])
            view = board.peer(peer_idx)[begin : begin + peer_sizes[rank_idx]]
            received.append(bytes(view.numpy()))
        self._communicator.all_gather(b"read")
        return received


Group = dist.ProcessGroup | Bootstrap | CommunicatorExchange | None
"""Over what PEs talk; None for the default process group."""


def _write(board: SymmetricBytes, payload: bytes) -> None:
    if payload:
        board.local.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))


def exchange_for(group: Group) -> Exchange:
    """The exchange behind a `group` argument: itself, or one over its object gather."""
    if isinstance(group, (CommunicatorExchange, _BootstrapExchange)):
        return group
    return _BootstrapExchange(bootstrap_for(group))
