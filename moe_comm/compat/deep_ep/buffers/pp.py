"""`deep_ep.buffers.pp`."""

from __future__ import annotations

from typing import Any

__all__ = ["PPBuffer"]


class PPBuffer:
    """Not offered: every transfer here is a call of all ranks of a group."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(
            "PPBuffer sends between two ranks of a group, which this deep_ep does not do; "
            "torch.distributed.send and recv of the group do, isend and irecv for several in flight"
        )
