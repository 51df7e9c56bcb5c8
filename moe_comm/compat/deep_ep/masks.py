"""Mask of the ranks that a `Buffer` leaves out in its low-latency mode."""

from __future__ import annotations

import torch

from moe_comm.compat.deep_ep.arguments import check_bools, check_ints, check_tensor, ints_as_bools
from moe_comm.compat.deep_ep.group import GroupOwner
from moe_comm.compat.deep_ep.streams import on_device


class MaskedRanks:
    """The part of `Buffer` that masks ranks; `Buffer` sets its attributes."""

    _owner: GroupOwner
    _masked: set[int]
    enable_shrink: bool
    group_size: int

    @ints_as_bools
    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Mask a rank in later low-latency dispatches, or unmask it. Local.

        Nothing goes to a masked rank or comes from it, on any rank. It still makes the calls.
        """
        self._require_shrink()
        check_ints(0, rank_to_mask=rank_to_mask)
        check_bools(mask=mask)
        if rank_to_mask >= self.group_size:
            raise ValueError(f"{rank_to_mask} is not a rank of {self.group_size}")
        if mask:
            self._masked.add(rank_to_mask)
        else:
            self._masked.discard(rank_to_mask)

    @on_device
    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Write 1 for ranks masked from this rank on, else 0, into int32 `[R]`. Local."""
        self._require_shrink()
        check_tensor("mask_status", mask_status, (self.group_size,), torch.int32)
        mask_status.zero_()
        mask_status[sorted(self._masked)] = 1

    def low_latency_clean_mask_buffer(self) -> None:
        """Unmask all ranks. Local."""
        self._require_shrink()
        self._masked.clear()

    def _require_shrink(self) -> None:
        self._owner.shared()
        if not self.enable_shrink:
            raise ValueError("masking needs a Buffer made with enable_shrink=True, got False")
