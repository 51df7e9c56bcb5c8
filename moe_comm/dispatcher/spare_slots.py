"""Layers of a framework that have replicas: slots behind a rank's own experts, and a balancer that fills them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from moe_comm.arguments import as_int, check_kind
from moe_comm.ep.buffer import EpBuffer
from moe_comm.ep.placement import Placement
from moe_comm.peers.missed_calls import GATHER, Telling, keep

if TYPE_CHECKING:
    from moe_comm.replicas import ExpertBalancer

__all__ = ["BalanceableLayer", "balance_layers", "with_spare_slots"]


class BalanceableLayer(Protocol):
    """What brings the tokens of one layer to their experts, over a buffer without a placement."""

    @property
    def buffer(self) -> EpBuffer:
        """That of the tokens."""

    def add_spare_slots(self, num_spare_slots: int, balancer: ExpertBalancer) -> None:
        """Compute replicas too from now on, and add the layer to the balancer. Collective."""


def with_spare_slots(buffer: EpBuffer, num_spare_slots: int) -> EpBuffer:
    """Make a buffer of the same experts and ranks whose ranks have empty slots behind theirs. Collective."""
    communicator, config = buffer.communicator, buffer.config
    placement = Placement.in_blocks(config.num_experts, communicator.num_ranks, num_spare_slots)
    return EpBuffer(
        communicator, dataclasses.replace(config, placement=placement, expert_rank=None)
    )


def balance_layers(
    layers: Sequence[BalanceableLayer],
    num_spare_slots: int,
    options: dict[str, object],
    needed: str,
) -> ExpertBalancer:
    """Give every layer spare slots, and a balancer that has them all. Collective.

    Args:
        layers: In the same order on all ranks, of one communicator.
        num_spare_slots: Of every rank and layer, >= 1.
        options: Of the balancer.
        needed: What layers are, for errors.

    Raises:
        ValueError: There are none, an argument of some rank breaks a rule, or ranks differ; on every rank.
        TypeError: An argument of some rank has another type; on every rank.
    """
    with Telling(keep, GATHER):
        if not layers:
            raise ValueError(f"model must have {needed}, got none")
    communicator = layers[0].buffer.communicator

    def check() -> str:
        for layer in layers:
            check_kind("buffer", layer.buffer, EpBuffer)
            if layer.buffer.communicator is not communicator:
                raise ValueError("all layers must be of one communicator, and some are of another")
            if layer.buffer.config.placement is not None:
                raise ValueError("the layers have spare slots already")
        num_slots = as_int("num_spare_slots", num_spare_slots, 1)
        return f"{len(layers)} layers with {num_slots} spare slots"

    communicator.check_together(check, "balance_experts", "ranks balance different layers")
    # Here, because it imports what moves weights.
    from moe_comm.replicas import ExpertBalancer

    balancer = ExpertBalancer(communicator, **options)  # type: ignore[arg-type]
    for layer in layers:
        layer.add_spare_slots(num_spare_slots, balancer)
    return balancer
