"""Layers of a framework that have replicas: slots behind a rank's own experts, and a balancer that fills them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from moe_comm.arguments import as_int, check_kind
from moe_comm.ep.buffer import EpBuffer
from moe_comm.ep.placement import Placement
from moe_comm.peers.missed_calls import GATHER, Telling, keep

if TYPE_CHECKING:
    from moe_comm.replicas import ExpertBalancer


class BalanceableLayer(Protocol):
    """Layer whose tokens come to their experts over a buffer without a placement."""

    @property
    def buffer(self) -> EpBuffer:
        """Buffer that moves the tokens."""

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
    model: nn.Module,
    layer_of: Callable[[nn.Module], BalanceableLayer | None],
    num_spare_slots: int,
    options: dict[str, object],
    needed: str,
) -> ExpertBalancer:
    """Give every layer of a model spare slots, and a balancer that has them all. Collective.

    Args:
        model: Has its layers in the same order on all ranks, of one communicator.
        layer_of: The layer that a module is, or None; may raise what is wrong with it.
        num_spare_slots: Slots for replicas, of every rank and layer, >= 1.
        options: Options of the balancer.
        needed: Description of the layers that a model must have, for errors.

    Raises:
        ValueError: There are none, an argument of some rank breaks a rule, or ranks differ; on every rank.
        TypeError: An argument of some rank has another type; on every rank.
    """
    with Telling(keep, GATHER):
        check_kind("model", model, nn.Module)
        found = map(layer_of, model.modules())
        layers = [layer for layer in found if layer is not None]
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


def check_whole(experts: nn.Module, num_own_experts: int, needed: str) -> str:
    """Check that every parameter of a module has all of this rank's experts, whole.

    Args:
        experts: Parameters `[num_own_experts, ...]`.
        num_own_experts: Experts of this rank.
        needed: Description of the meshes that are needed, for errors.

    Returns:
        Text that must be equal on all ranks.

    Raises:
        ValueError: A parameter lacks experts or is cut or repeated over further ranks.
    """
    for name, parameter in experts.named_parameters(recurse=False):
        own = _local_of(parameter)
        others = [own.shape[1:] != parameter.shape[1:]]
        if isinstance(parameter, DTensor):
            sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
            others += [size > 1 and placed != Shard(0) for placed, size in sizes]
        if not own.dim() or own.shape[0] != num_own_experts or any(others):
            at = getattr(parameter, "placements", "")
            raise ValueError(
                f"{name} must hold {num_own_experts} experts on this rank, got shape {tuple(own.shape)} "
                f"{at}: replicas need ranks that have their experts whole ({needed})"
            )
    return f"parameters {[name for name, _ in experts.named_parameters(recurse=False)]}"


class SpareParameters:
    """Parameters of replicas, which take the place of a module's own for a call of its forward.

    They belong to no module, so that optimizers and checkpoints have each expert once.

    Args:
        experts: The module; `check_whole` holds.
        num_own_experts: Experts of its parameters on this rank.
        num_spare_slots: Spare slots of this rank.
        divisor: Divisor of their gradients.
    """

    def __init__(
        self,
        experts: nn.Module,
        num_own_experts: int,
        num_spare_slots: int,
        divisor: float = 1.0,
    ) -> None:
        self._num_own_experts = num_own_experts
        self._num_spare_slots = num_spare_slots
        self._experts: Any = experts
        self._parameters: dict[str, nn.Parameter] = {}
        for name, parameter in experts.named_parameters(recurse=False):
            own = _local_of(parameter)
            spare = nn.Parameter(
                own.new_zeros(num_spare_slots, *own.shape[1:]),
                requires_grad=parameter.requires_grad,
            )
            if spare.requires_grad and divisor != 1:
                spare.register_hook(functools.partial(torch.mul, other=1 / divisor))  # type: ignore[no-untyped-call]
            self._parameters[name] = spare

    def weights(self) -> list[list[torch.Tensor]]:
        """Return tensors of all slots, the module's own first, as `ExpertBalancer.add_layer` takes them."""
        own = self._experts.named_parameters(recurse=False)
        return [[parameter, self._parameters[name]] for name, parameter in own]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def run_too(
        self,
        run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        rows: torch.Tensor,
        num_rows_per_slot: torch.Tensor,
    ) -> torch.Tensor:
        """Compute the rows of the module's own experts, then those of replicas.

        Args:
            run: Calls the module: rows `[M, hidden]` and numbers of rows `[num_experts]`, to `[M, hidden]`.
            rows: Rows of all slots, in their order.
            num_rows_per_slot: Integers `[num_local_slots]`.

        Returns:
            Result of `run`, of all rows.
        """
        num_own = self._num_own_experts
        num_own_rows = int(num_rows_per_slot[:num_own].sum())
        own = run(rows[:num_own_rows], num_rows_per_slot[:num_own])
        with self._in_place():
            others = run(rows[num_own_rows:], num_rows_per_slot[num_own:])
        return torch.cat([own, others])

    @contextlib.contextmanager
    def _in_place(self) -> Iterator[None]:
        """A block in which the module has the replicas, in the dtypes that its own parameters have there."""
        held = self._experts._parameters
        own, num_experts = dict(held), self._experts.num_experts
        held.update({name: spare.to(own[name].dtype) for name, spare in self._parameters.items()})
        self._experts.num_experts = self._num_spare_slots
        try:
            yield
        finally:
            held.update(own)
            self._experts.num_experts = num_experts


def _local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
