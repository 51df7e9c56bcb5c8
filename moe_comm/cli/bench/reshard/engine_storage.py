"""Destinations as inference engines hold them, and the way in which their weights come to them today."""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist

from moe_comm.cli.bench.reshard.case import FULL_TENSORS
from moe_comm.cli.reshard.described_tensors import held_dims
from moe_comm.cli.reshard.model_shapes import ShapedModel
from moe_comm.cli.reshard.world import PlanningCase
from moe_comm.resharding.describe.checkpoint_views import CheckpointView
from moe_comm.resharding.describe.module_tensors import named_refit_tensors
from moe_comm.resharding.describe.parallelism import Parallelism


def stack_experts(module: ShapedModel) -> None:
    """Have equal tensors of a layer's experts share one storage, `[experts, ...]`, in place."""
    tensors = dict(named_refit_tensors(module))
    stacks = defaultdict(list)
    for tensor in module.shape.tensors(module.parallelism, module.rank):
        if tensor.expert_idx is not None:
            stacks[tensor.name.rstrip("0123456789")].append(tensors[tensor.name])
    for parts in stacks.values():
        for part, place in zip(parts, torch.stack([part.data for part in parts]), strict=True):
            part.data = place


def views_of(module: ShapedModel) -> list[CheckpointView]:
    """Say what a rank holds in the names and shapes of the whole model."""
    tensors = dict(named_refit_tensors(module))
    views = []
    for tensor in module.shape.tensors(module.parallelism, module.rank):
        shape, dims = held_dims(tensor, module.parallelism, module.rank)
        held = tensors[tensor.name].detach()
        views.append(CheckpointView(tensor.resolved_name, shape, dims, held))
    return views


def check_uncut(case: PlanningCase) -> None:
    """Return whether every tensor lies whole on the ranks that hold it.

    Raises:
        ValueError: A layout cuts tensors.
    """
    for side, layout in (("source", case.source), ("destination", case.destination)):
        if layout.tp > 1 or layout.etp > 1:
            raise ValueError(
                f"{FULL_TENSORS} needs layouts that cut no tensor, got tp = {layout.tp} and "
                f"expert_tp = {layout.etp} in the {side}"
            )


class FullTensorsByName:
    """Whole tensors, one after the other, from a rank that holds each to all that want it.

    Each is received into memory of its own and copied, as an engine's loader does.

    Args:
        case: Case whose layouts cut no tensor.
        rank: This rank.
    """

    def __init__(self, case: PlanningCase, rank: int) -> None:
        self._rank = rank

        def held(layout: Parallelism, rank_in_layout: int) -> dict[str, str]:
            tensors = case.shape.tensors(layout, rank_in_layout)
            return {tensor.resolved_name: tensor.name for tensor in tensors}

        sources = {owner: held(case.source, owner) for owner in range(case.source.num_ranks)}
        targets = {
            to: held(case.destination, to - case.destination_offset)
            for to in case.destination_ranks
        }
        self._own, self._wanted = sources.get(rank, {}), targets.get(rank, {})
        owners = {name: owner for owner in reversed(sources) for name in sources[owner]}
        self._routes = sorted(
            (name, to if name in sources.get(to, {}) else owners[name], to)
            for to, names in targets.items()
            for name in names
        )

    def run(self, source: ShapedModel | None, target: ShapedModel | None) -> None:
        """Bring all tensors. Collective."""
        sent = {} if source is None else dict(named_refit_tensors(source))
        taken = {} if target is None else dict(named_refit_tensors(target))
        with torch.no_grad():
            for name, owner, to in self._routes:
                if owner == to == self._rank:
                    taken[self._wanted[name]].copy_(sent[self._own[name]])
                elif owner == self._rank:
                    dist.send(sent[self._own[name]].detach(), to)
                elif to == self._rank:
                    place = taken[self._wanted[name]]
                    received = torch.empty_like(place)
                    dist.recv(received, owner)
                    place.copy_(received)
