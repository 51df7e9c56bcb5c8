"""One rank of layers whose experts an `ExpertBalancer` rearranges, and of the same without it."""

from __future__ import annotations

import dataclasses

import torch

import moe_comm
from moe_comm import Communicator, EpBuffer, EpConfig, Placement
from moe_comm.replicas import ExpertBalancer
from moe_comm.testing.cases import seeded

NUM_EXPERTS, NUM_TOPK, HIDDEN, NUM_TOKENS = 8, 2, 16, 48
BYTES_PER_EXPERT = HIDDEN * 4 + 2


def start_placement(num_ranks: int, num_spare: int = 1) -> Placement:
    """Every expert once, in blocks, and empty slots behind them."""
    size = NUM_EXPERTS // num_ranks
    return Placement(
        [
            [*range(rank_idx * size, (rank_idx + 1) * size), *[-1] * num_spare]
            for rank_idx in range(num_ranks)
        ],
        NUM_EXPERTS,
    )


def expert_weights(experts: list[int]) -> list[torch.Tensor]:
    """Weights that the experts in a rank's slots begin with, of two dtypes; another number for an empty slot."""
    ids = torch.tensor(experts)
    scales = (1 + ids)[:, None] * torch.linspace(0.5, 2, HIDDEN)
    return [scales, (ids * 3 - 7).to(torch.bfloat16)]


def batch(step: int, layer_idx: int, rank_idx: int) -> tuple[torch.Tensor, ...]:
    """Rows, choices and weights; which experts are hot changes with the layer, and every few steps."""
    generator = seeded("balanced", step, layer_idx, rank_idx)
    hot = (3 * (step // 12) + 5 * layer_idx) % NUM_EXPERTS
    odds = torch.full((NUM_EXPERTS,), 0.3)
    odds[[hot, (hot + 1) % NUM_EXPERTS]] = torch.tensor([4.0, 2.0])
    topk_idx = torch.multinomial(odds.expand(NUM_TOKENS, -1), NUM_TOPK, generator=generator)
    x = torch.randn(NUM_TOKENS, HIDDEN, generator=generator)
    return x, topk_idx, torch.rand(NUM_TOKENS, NUM_TOPK, generator=generator)


@dataclasses.dataclass
class Layer:
    """A buffer, and the weights in the slots of this rank."""

    buffer: EpBuffer
    weights: list[torch.Tensor]

    @classmethod
    def of(cls, comm: Communicator, placement: Placement | None) -> Layer:
        config = EpConfig(
            num_experts=NUM_EXPERTS,
            num_topk=NUM_TOPK,
            hidden=HIDDEN,
            dtype=torch.float32,
            placement=placement,
        )
        slots = (placement or start_placement(comm.num_ranks, 0)).slots
        return cls(EpBuffer(comm, config), expert_weights([*slots[comm.rank_idx]]))

    def run(self, step: int, layer_idx: int) -> tuple[torch.Tensor, int]:
        """Sums of a batch, and how many rows this rank had."""
        x, topk_idx, topk_weights = batch(step, layer_idx, self.buffer.communicator.rank_idx)
        result = self.buffer.dispatch(x, topk_idx)
        sizes = result.expert_offsets.diff().to(torch.int64)
        scales, offsets = (each.repeat_interleave(sizes, 0) for each in self.weights)
        out = result.x * scales + offsets.float()[:, None]
        return self.buffer.combine(out, result.handle, topk_weights=topk_weights), len(out)

    def check_weights(self) -> None:
        """Every slot has the weights of its expert, to the bit."""
        placement = self.buffer.config.placement
        experts = placement.slots[self.buffer.communicator.rank_idx]
        filled = [slot for slot, expert in enumerate(experts) if expert >= 0]
        for found, expected in zip(self.weights, expert_weights([*experts]), strict=True):
            assert torch.equal(found[filled], expected[filled])


def excess(comm: Communicator, rows: int) -> float:
    """Rows of the fullest rank above the mean."""
    every = [int(said) for said in comm.all_gather(str(rows).encode())]
    return max(every) - sum(every) / len(every)


def check_balanced(comm: Communicator, num_steps: int = 36, num_layers: int = 2) -> None:
    """Sums keep the bits of those without replicas while placements change; the excess drops."""
    placement = start_placement(comm.num_ranks)
    layers = [Layer.of(comm, placement) for _ in range(num_layers)]
    plain = [Layer.of(comm, None) for _ in range(num_layers)]
    with ExpertBalancer(comm, num_steps=4, layers_per_step=1) as balancer:
        for layer_idx, layer in enumerate(layers):
            assert balancer.add_layer(layer.buffer, layer.weights) == layer_idx
        above = [0.0, 0.0]
        num_switches = 0
        for step in range(num_steps):
            for layer_idx in range(num_layers):
                found, rows = layers[layer_idx].run(step, layer_idx)
                expected, plain_rows = plain[layer_idx].run(step, layer_idx)
                assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
                above[0] += excess(comm, rows)
                above[1] += excess(comm, plain_rows)
            before = [layer.buffer.config.placement for layer in layers]
            balancer.step()
            changed = [
                layer_idx
                for layer_idx, layer in enumerate(layers)
                if layer.buffer.config.placement != before[layer_idx]
            ]
            assert len(changed) <= 1
            num_switches += len(changed)
            report = balancer.last_report
            if changed:
                (move,) = report.moves
                assert (report.step, move.layer_idx) == (step + 1, changed[0])
                assert move.moved_bytes == move.num_moves * BYTES_PER_EXPERT
                layers[changed[0]].check_weights()
        for layer in layers:
            layer.check_weights()
    assert num_switches >= 4
    assert above[0] < 0.5 * above[1], above


def skewed_pair(comm: Communicator, balancer: ExpertBalancer) -> list[Layer]:
    """Two layers that have run a batch, the first of which the balancer has moved, and the second not yet."""
    layers = [Layer.of(comm, start_placement(comm.num_ranks)) for _ in range(2)]
    for layer_idx, layer in enumerate(layers):
        balancer.add_layer(layer.buffer, layer.weights)
        layer.run(0, layer_idx)
    balancer.step(rebalance=True)
    report = balancer.last_report
    assert report.num_waiting == 1
    if report.moves[0].layer_idx:
        layers.reverse()
    return layers


def train(
    comm: Communicator,
    num_spare: int,
    num_steps: int,
    *,
    keeps_owners: bool = False,
    step_bytes: int | None = None,
) -> tuple[dict[tuple[int, int], list[float]], int]:
    """Weights by step and expert, with momentum, which moves along, and how often placements changed.

    Numbers are such that sums are exact, in whatever order they are taken.

    Args:
        comm: The ranks.
        num_spare: Empty slots that each rank begins with; 0 for no balancer.
        num_steps: Number of steps to take.
        keeps_owners: Whether experts stay where they are, and the optimizer steps those alone.
        step_bytes: Bytes of a step of the balancer, as in `ExpertBalancer`.
    """
    placement = start_placement(comm.num_ranks, num_spare)
    layer = Layer.of(comm, placement if num_spare else None)
    experts = torch.tensor(placement.slots[comm.rank_idx])
    weight = (experts[:, None] * torch.ones(HIDDEN)).requires_grad_()
    momentum = torch.zeros(weight.shape)
    num_kept = NUM_EXPERTS // comm.num_ranks if keeps_owners else 0
    balancer = ExpertBalancer(comm, num_steps=3, step_bytes=step_bytes) if num_spare else None
    num_changes = 0
    found = {}
    if balancer is not None:
        weights = [weight] if keeps_owners else [weight, momentum]
        balancer.add_layer(layer.buffer, weights, num_kept_slots=num_kept)
    for step in range(num_steps):
        x, topk_idx, _ = batch(step, 0, comm.rank_idx)
        result = moe_comm.dispatch(x.round(), topk_idx, buffer=layer.buffer)
        sizes = result.expert_offsets.diff().to(torch.int64)
        out = result.x * weight.repeat_interleave(sizes, 0)
        moe_comm.combine(out, result.handle, buffer=layer.buffer).sum().backward()
        if balancer is not None:
            balancer.reduce_gradients()
        assert weight.grad is not None
        stepped = slice(num_kept or None)
        with torch.no_grad():
            momentum += weight.grad
            weight[stepped] -= 0.25 * momentum[stepped]
        weight.grad = None
        if balancer is not None:
            before = layer.buffer.config.placement
            balancer.step()
            num_changes += layer.buffer.config.placement != before
        placement = layer.buffer.config.placement or placement
        rows = zip(placement.slots[comm.rank_idx], weight.tolist(), strict=True)
        found |= {(step, expert): row for expert, row in rows if expert >= 0}
    return found, num_changes
