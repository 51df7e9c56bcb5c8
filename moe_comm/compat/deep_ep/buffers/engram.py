"""`deep_ep.buffers.engram`."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["EngramBuffer"]


class EngramBuffer:
    """Not offered: what DeepEP reads out of other ranks' memory needs no call of theirs."""

    def __init__(self, *_: Any, **__: Any) -> None:
        _refuse("EngramBuffer")

    @staticmethod
    def get_storage_size_hint(*_: Any, **__: Any) -> NoReturn:
        """Not offered."""
        _refuse("EngramBuffer.get_storage_size_hint")

    @staticmethod
    def get_theoretical_config(*_: Any, **__: Any) -> NoReturn:
        """Not offered."""
        _refuse("EngramBuffer.get_theoretical_config")


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(
        f"{what} reads rows of other ranks without a call of theirs, which this deep_ep does not do; "
        "dispatch and combine of EPBuffer ask their owners for them, BucketBuffer.all_gather brings whole tables"
    )
