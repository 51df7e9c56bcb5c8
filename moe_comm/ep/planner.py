"""Planner of replicas of experts: placements from the loads that were seen."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence

import numpy as np
import torch

from moe_comm import _host
from moe_comm.arguments import as_int, shown
from moe_comm.ep.limits import NUM_MAX_EXPERTS
from moe_comm.ep.placement import EMPTY_SLOT, Placement

MOST_SCATTER = 2.0
"""Loads above it, which differ by factors of thousands, say nothing of later ones."""


def plan_placement(
    loads: torch.Tensor,
    num_ranks: int,
    num_slots_per_rank: int,
    *,
    ranks_per_node: int | None = None,
    present: Sequence[Placement] | None = None,
    bytes_per_expert: int = 0,
    price_per_byte: float = 0.0,
    scatter: float = 0.3,
    num_kept_slots: int = 0,
) -> list[Placement]:
    """Place the experts of every layer, and copies of those with much load, into the slots of ranks.

    A plan makes the load of the fullest rank small, also where later loads differ from these, as long as
    the rows of an expert may go to any of its slots (the rule "balanced"). One thread computes it, from
    its arguments alone: ranks that pass the same get the same.

    With `present`, what is minimized is that load, on the mean over loads that differ as `scatter` says,
    plus `price_per_byte * bytes_per_expert` for every expert that comes to a rank that does not hold it.
    Without, nothing is anywhere, and moves have no price. Experts that stay on a rank stay in their slots.

    Args:
        loads: `[layers, num_experts]`, any real dtype, >= 0: rows of every logical expert, in a window of
            steps or in a batch; fewer than 2**63 in a layer.
        num_ranks: Ranks, in [1, 131072].
        num_slots_per_rank: Slots of every rank. All together they hold every expert at least once.
        ranks_per_node: Ranks of a node, which follow each other; divides `num_ranks`. Copies of an expert
            go to different nodes where that costs little. None for one node.
        present: The placement of every layer that moves start from, or None. Any numbers of slots.
        bytes_per_expert: Bytes of the weights of one expert, fewer than 2**63.
        price_per_byte: Rows, as `loads` counts them, that a moved byte must take off the fullest rank to
            be worth it, >= 0.
        scatter: Standard deviation of the logarithm of later loads, each over the planned one, in [0, 2].
        num_kept_slots: The first slots of every rank, which keep what they hold in `present`: together every
            expert once, and so only copies are placed. 0 for none.

    Returns:
        A placement for every layer. Slots that nothing needs keep what they hold, or stay empty.

    Raises:
        ValueError: A shape, a value or the number of slots breaks a rule above.
        TypeError: An argument has another type.

    Example:
        2 ranks of 2 slots, loads `[[6, 2, 2]]`: `[Placement([[0, 1], [0, 2]], 3)]`.
    """
    if not isinstance(loads, torch.Tensor) or loads.is_complex() or loads.layout != torch.strided:
        raise TypeError(f"loads must be a dense tensor of real numbers, got {shown(loads)}")
    if loads.dim() != 2 or not 1 <= loads.shape[1] <= NUM_MAX_EXPERTS:
        raise ValueError(
            f"loads must be [layers, num_experts] of 1 to {NUM_MAX_EXPERTS} experts, "
            f"got {tuple(loads.shape)}"
        )
    weights = loads.detach().to("cpu", torch.float64).contiguous()
    bad = (~((weights >= 0) & weights.isfinite())).nonzero()
    if len(bad):
        layer_idx, expert_idx = bad[0].tolist()
        raise ValueError(
            f"the load of expert {expert_idx} in layer {layer_idx} must be finite and >= 0, "
            f"got {weights[layer_idx, expert_idx].item()}"
        )
    totals = weights.sum(1)
    for layer_idx in (totals >= 2**63).nonzero().flatten().tolist():
        raise ValueError(
            f"the loads of layer {layer_idx} must be fewer than 2**63 rows, got {totals[layer_idx].item()}"
        )
    num_layers, num_experts = loads.shape
    num_ranks = as_int("num_ranks", num_ranks, 1, 2 * NUM_MAX_EXPERTS)
    num_slots = as_int("num_slots_per_rank", num_slots_per_rank, 1, 2 * NUM_MAX_EXPERTS)
    if not num_experts <= num_ranks * num_slots < 2**31:
        raise ValueError(
            f"{num_ranks} ranks of {num_slots} slots do not hold {num_experts} experts"
            if num_ranks * num_slots < num_experts
            else f"num_ranks * num_slots_per_rank must be below 2**31, got {num_ranks * num_slots}"
        )
    node_size = num_ranks
    if ranks_per_node is not None:
        node_size = as_int("ranks_per_node", ranks_per_node, 1)
        if num_ranks % node_size:
            raise ValueError(f"ranks_per_node = {node_size} must divide num_ranks = {num_ranks}")
    expert_bytes = as_int("bytes_per_expert", bytes_per_expert, 0, 2**63 - 1)
    deviation = at_least_zero("scatter", scatter, MOST_SCATTER)
    # No move takes more than all load off a rank, which scatters by six deviations at most: a price above
    # that is as good as any.
    most_price = 1 + 2 * max(totals.tolist(), default=0.0) * math.exp(6 * deviation)
    price = min(at_least_zero("price_per_byte", price_per_byte) * expert_bytes, most_price)
    num_kept = as_int("num_kept_slots", num_kept_slots, 0, num_slots)
    if num_kept and present is None:
        raise ValueError(f"num_kept_slots = {num_kept} needs present, got None")
    slots = _host.layout.plan_placement(
        weights.abs(),  # the bits of -0.0 sort above all others
        None
        if present is None
        else _slots_of(present, num_layers, num_experts, num_ranks, num_kept, num_slots),
        num_experts=num_experts,
        num_ranks=num_ranks,
        num_slots=num_slots,
        ranks_per_node=node_size,
        move_price=price,
        scatter=deviation,
        num_kept=num_kept,
    )
    return [
        Placement.of_valid(layer, num_experts)
        for layer in slots.view(num_layers, num_ranks, num_slots).tolist()
    ]


def fullest_rank(loads: torch.Tensor, placement: Placement) -> int:
    """Rows of the fullest rank, shared out as "balanced" does: the least that a placement allows.

    Args:
        loads: int64 `[num_experts]` on the host, >= 0: rows of every logical expert.
        placement: Placement of the experts.
    """
    return _host.layout.fullest_rank(
        loads.contiguous(),
        [*placement.slot_rank],
        [*placement.slot_expert],
        placement.num_ranks,
    )


def at_least_zero(name: str, value: float, most: float = math.inf) -> float:
    """A finite number in [0, most] as a float; TypeError or ValueError with its name for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {shown(value)}")
    if not 0 <= value <= min(most, sys.float_info.max):
        raise ValueError(
            f"{name} must be finite and >= 0, got {value}"
            if math.isinf(most)
            else f"{name} must be in [0, {most}], got {value}"
        )
    return float(value)


def _slots_of(
    present: Sequence[Placement],
    num_layers: int,
    num_experts: int,
    num_ranks: int,
    num_kept: int,
    num_slots: int,
) -> torch.Tensor:
    """Slots of all layers and ranks, int32 `[layers, ranks * slots]`, with empty ones up to the most."""
    if len(present) != num_layers:
        raise ValueError(
            f"present must have a placement for each of {num_layers} layers, got {len(present)}"
        )
    for layer_idx, placement in enumerate(present):
        if not isinstance(placement, Placement):
            raise TypeError(f"present[{layer_idx}] must be a Placement, got {shown(placement)}")
        if (placement.num_experts, placement.num_ranks) != (num_experts, num_ranks):
            raise ValueError(
                f"present[{layer_idx}] must place {num_experts} experts on {num_ranks} ranks, got "
                f"{placement.num_experts} on {placement.num_ranks}"
            )
        if num_kept:
            most = max(map(len, placement.slots))
            if most > num_slots:
                raise ValueError(
                    f"present[{layer_idx}] has {most} slots on a rank, num_slots_per_rank is {num_slots}"
                )
            placement.first_slots(num_kept)
    lists = [of_rank for placement in present for of_rank in placement.slots]
    by_slot = itertools.chain(*itertools.zip_longest(*lists, fillvalue=EMPTY_SLOT))
    most_slots = max(map(len, lists), default=1)
    table = np.fromiter(by_slot, np.int32).reshape(most_slots, len(lists))
    return torch.from_numpy(table.T.reshape(num_layers, num_ranks * most_slots)).contiguous()
