"""Options of a communicator beside its ranks; a communicator that replaces it gets the same."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any

import torch

from moe_comm.arguments import as_int, check_bool, shown

# No machine has more cores, SMs or bytes.
_MOST = {"max_heap_bytes": (1 << 63) - 1, "num_threads": 4096, "num_sms": (1 << 31) - 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommunicatorOptions:
    """Arguments of `Communicator` of the same names, which explains them."""

    stall_timeout_s: float
    arrival_timeout_s: float
    max_heap_bytes: int | None
    num_threads: int | None
    with_huge_pages: bool
    num_sms: int | None
    check_messages: bool

    @classmethod
    def checked(cls, device: torch.device, **given: Any) -> CommunicatorOptions:
        """Options of a communicator for rows on `device`.

        Raises:
            TypeError: A value is no number, no int or no bool.
            ValueError: It breaks a rule of `Communicator`.
        """
        values = dict(given)
        for name in ("stall_timeout_s", "arrival_timeout_s"):
            seconds = given[name]
            if isinstance(seconds, bool) or not isinstance(seconds, numbers.Real):
                raise TypeError(f"{name} must be a number of seconds, got {shown(seconds)}")
            values[name] = float(seconds)
            if not values[name] > 0.0:
                raise ValueError(f"{name} must be > 0, got {seconds}")
        for name, most in _MOST.items():
            if given[name] is not None:
                values[name] = as_int(name, given[name], 1, most)
        for name in ("with_huge_pages", "check_messages"):
            check_bool(name, given[name])
        if given["num_sms"] is not None and device.type == "cpu":
            raise ValueError(f"num_sms is for a GPU, got {given['num_sms']} with device {device}")
        return cls(**values)
