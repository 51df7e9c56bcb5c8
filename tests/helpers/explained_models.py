"""Parts of small models and engines, as `moe-comm reshard explain` asks for them by `module:name`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from moe_comm.cli.reshard.model_shapes import MoEShape, ShapedModel
from moe_comm.resharding import CheckpointView, CheckpointViews, Parallelism
from moe_comm.resharding.describe.intervals import Interval, whole

NUM_LAYERS, NUM_EXPERTS, INNER, HIDDEN = 2, 4, 6, 10

SHAPE = MoEShape(
    num_layers=2,
    hidden=64,
    num_heads=8,
    num_query_groups=4,
    num_experts=8,
    expert_ffn=32,
    vocab=64,
    has_expert_bias=False,
)


class Trainer(torch.nn.Module):
    """Experts stacked, gate over up, divided by rank; norms on every rank. No weight has values."""

    hidden = HIDDEN

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__()
        assert (dist.get_rank(), dist.get_world_size()) == (rank, num_ranks)
        self.num_local = NUM_EXPERTS // num_ranks
        self.first = rank * self.num_local
        self.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(NUM_LAYERS))
        for layer in self.layers:
            for name, shape in (
                ("norm", (self.hidden,)),
                ("gate_up", (self.num_local, 2 * INNER, self.hidden)),
                ("down", (self.num_local, self.hidden, INNER)),
            ):
                layer.register_parameter(name, torch.nn.Parameter(torch.empty(shape)))
        assert all(parameter.is_meta for parameter in self.parameters())

    def views(self) -> Iterator[CheckpointView]:
        for layer in range(NUM_LAYERS):
            path = f"layers.{layer}"
            yield _whole(f"{path}.norm.weight", self.get_parameter(f"{path}.norm"))
            gate_up = self.get_parameter(f"{path}.gate_up").data
            down = self.get_parameter(f"{path}.down").data
            for local in range(self.num_local):
                expert = f"{path}.experts.{self.first + local}"
                yield _whole(f"{expert}.gate.weight", gate_up[local, :INNER])
                yield _whole(f"{expert}.up.weight", gate_up[local, INNER:])
                yield _whole(f"{expert}.down.weight", down[local])


def _whole(name: str, tensor: torch.Tensor) -> CheckpointView:
    shape = tuple(tensor.shape)
    return CheckpointView(name, shape, tuple(map(whole, shape)), tensor)


def trainer(rank: int, num_ranks: int) -> CheckpointViews:
    made = Trainer(rank, num_ranks)
    return CheckpointViews(made.views, made)


class _Wider(Trainer):
    hidden = HIDDEN + 2


def wider_trainer(rank: int, num_ranks: int) -> CheckpointViews:
    made = _Wider(rank, num_ranks)
    return CheckpointViews(made.views, made)


def trainer_without_downs(rank: int, num_ranks: int) -> CheckpointViews:
    made = Trainer(rank, num_ranks)
    return CheckpointViews([view for view in made.views() if ".down." not in view.name], made)


class Engine(torch.nn.Module):
    """Every expert, their inner width divided; its loader says where they go."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__()
        self.inner = INNER // num_ranks
        self.rows = slice(rank * self.inner, (rank + 1) * self.inner)
        self.norms = torch.nn.Parameter(torch.empty(NUM_LAYERS, HIDDEN))
        self.w13 = torch.nn.Parameter(torch.empty(NUM_LAYERS, NUM_EXPERTS, 2 * self.inner, HIDDEN))
        self.w2 = torch.nn.Parameter(torch.empty(NUM_LAYERS, NUM_EXPERTS, HIDDEN, self.inner))

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            _, layer, kind, *rest = name.split(".")
            if kind == "norm":
                self.norms.data[int(layer)].copy_(tensor)
                continue
            expert, projection, _ = rest
            if projection == "down":
                self.w2.data[int(layer), int(expert)].copy_(tensor[:, self.rows])
            else:
                first = 0 if projection == "gate" else self.inner
                place = self.w13.data[int(layer), int(expert), first : first + self.inner]
                place.copy_(tensor[self.rows])


def shaped(rank: int, num_ranks: int, layout: str = "single") -> ShapedModel:
    return ShapedModel(SHAPE, Parallelism.parse(layout, num_ranks), rank, dtype=torch.bfloat16)


def sharded(rank: int, num_ranks: int) -> torch.nn.Module:
    """A matrix of which every rank has rows."""
    mesh = init_device_mesh("cpu", (num_ranks,))
    made = torch.nn.Module()
    tensor = distribute_tensor(torch.empty(8, 6), mesh, [Shard(0)])
    assert isinstance(tensor, DTensor)
    made.register_parameter("w", torch.nn.Parameter(tensor))
    return made


def replicated(rank: int, num_ranks: int) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (num_ranks,))
    made = torch.nn.Module()
    tensor = distribute_tensor(torch.empty(8, 6), mesh, [Replicate()])
    made.register_parameter("w", torch.nn.Parameter(tensor))
    return made


def half(rank: int, num_ranks: int) -> CheckpointViews:
    rows = (Interval(rank * 4, 0, 4),)
    return CheckpointViews([CheckpointView("w", (8, 6), (rows, whole(6)), torch.empty(4, 6))])


def nothing(rank: int, num_ranks: int) -> str:
    return "a model"
