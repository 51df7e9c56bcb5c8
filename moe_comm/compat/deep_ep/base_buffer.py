"""`BufferBase`: what `EPBuffer`, `ElasticBuffer` and `BucketBuffer` share, as in DeepEP V2.5."""

from __future__ import annotations

import sys

import torch

from moe_comm.compat.deep_ep.group import GroupOwner
from moe_comm.compat.deep_ep.utils.event import EventHandle


class BufferBase:
    """Holds the group of a buffer until it is destroyed.

    Args:
        explicitly_destroy: `destroy()` may be called.
        owner: The buffers of the group.

    Attributes:
        explicitly_destroy: As given.
        runtime: Owner of the group; None once destroyed.
        num_bytes: Size of the buffer.
    """

    num_bytes: int = 0

    def __init__(self, explicitly_destroy: bool = False, *, owner: GroupOwner) -> None:
        self._owner = owner
        self.runtime: GroupOwner | None = owner
        self.explicitly_destroy = explicitly_destroy

    @property
    def main_context(self) -> GroupOwner | None:
        """`runtime`."""
        return self.runtime

    def print_memory_usage(self) -> None:
        """Write a line with the rank and the bytes that the buffer was made with."""
        sys.stdout.write(
            f"rank {self._owner.rank_idx}: {type(self).__name__} of {self.num_bytes} bytes\n"
        )

    def destroy(self) -> None:
        """Let go of the group; idempotent.

        Raises:
            ValueError: The buffer was made without `explicitly_destroy`.
        """
        if not self.explicitly_destroy:
            raise ValueError("destroy() needs explicitly_destroy=True, got False")
        self._owner.release()
        self.runtime = None

    @staticmethod
    def capture() -> EventHandle:
        """The end of what the current stream holds; on the CPU, the present."""
        return EventHandle()

    def get_comm_stream(self) -> torch.cuda.Stream | torch.cpu.Stream:
        """Return the communication stream, see `Buffer`."""
        return self._owner.current_comm_stream()

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Return the ranks between machines and within one, see `GroupOwner.get_physical_domain_size`."""
        return self._owner.get_physical_domain_size()

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Return the ranks of scale-out and of scale-up, see `GroupOwner.get_logical_domain_size`."""
        return self._owner.get_logical_domain_size()
