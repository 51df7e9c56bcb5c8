"""The model of `train_moe.py` under any layout of tensor and expert parallelism, for generation.

A matrix product that is cut differently usually adds in another order, and so gives other bits. Here
generation is written so that it does not, under any layout:

- Weights are cut along the dimension of their outputs only, in attention, in the experts and in the
  head. Every element of a product is then computed on one rank, from whole rows, and ranks only put
  their columns side by side.
- `product` multiplies and adds one index after the other, element by element. What it gives for an
  element depends neither on the shape of the matrices around it nor on how many rows there are.
- Every token passes its experts one after the other in the order of its choices: combine of moe_comm
  adds in that order on any number of ranks.

So bits differ where a weight differs, and only there.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by
from torch import nn
from train_moe import MoeModel, Options

import moe_comm
from moe_comm.dispatcher import TokenDispatcher
from moe_comm.resharding import Parallelism, RankGroup

TEMPERATURE = 0.7
NUM_CHARACTERS = 128


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`[..., rows, K] @ [..., K, columns]`, added in the order of k whatever the shapes."""
    total = x[..., :1] * weight[..., :1, :]
    for k in range(1, x.shape[-1]):
        total += x[..., k : k + 1] * weight[..., k : k + 1, :]
    return total


class Columns:
    """The ranks among which columns of weights are divided.

    Args:
        ranks: Of the group, numbered in the default group.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.size = len(ranks)
        # Only members call: the other model's ranks are busy elsewhere.
        self.group = (
            dist.new_group(list(ranks), use_local_synchronization=True) if self.size > 1 else None
        )

    def gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, in order. Collective."""
        if self.group is None:
            return [mine]
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine.contiguous(), group=self.group)
        return parts

    def join(self, mine: torch.Tensor) -> torch.Tensor:
        """Columns of all ranks side by side. Collective."""
        return torch.cat(self.gather(mine), -1)


def parameter(*shape: int, dim: int | None = None, stride: int = 1, is_expert: bool = False) -> Any:
    """An unset parameter with the attributes that say how it is sharded."""
    made = nn.Parameter(torch.full(shape, float("nan")), requires_grad=False)
    attributes: dict[str, Any] = {
        "tensor_model_parallel": dim is not None,
        "partition_dim": dim or 0,
        "partition_stride": stride,
        "allreduce": not is_expert,
    }
    if is_expert:
        attributes["expert_dim"] = 0
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


class Linear(nn.Module):
    """Some of the columns of a linear layer; every output is computed from a whole row."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.weight = parameter(outputs, inputs, dim=0, stride=stride)
        self.bias = parameter(outputs, dim=0, stride=stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., inputs]` to `[..., outputs]`."""
        return product(x, self.weight.t()) + self.bias


class Norm(nn.Module):
    """Layer normalization."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = parameter(hidden)
        self.bias = parameter(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Every row on its own."""
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias)


class Embedding(nn.Module):
    """Some of the rows of the table of characters."""

    def __init__(self, characters: int, hidden: int) -> None:
        super().__init__()
        self.weight = parameter(characters, hidden, dim=0)


class Router(nn.Module):
    """The matrix of `moe_comm.nn.TopKRouter`."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.weight = parameter(options.num_experts, options.hidden)


class Experts(nn.Module):
    """Some columns of the experts of this rank; all of them in two tensors."""

    def __init__(self, options: Options, layout: Parallelism) -> None:
        super().__init__()
        num_local, ffn = options.num_experts // layout.ep, 2 * options.hidden
        hidden = options.hidden
        self.up = parameter(num_local, hidden, ffn // layout.etp, dim=2, is_expert=True)
        self.down = parameter(num_local, ffn, hidden // layout.etp, dim=2, is_expert=True)


class Block(nn.Module):
    """One layer."""

    def __init__(self, options: Options, layout: Parallelism) -> None:
        super().__init__()
        hidden = options.hidden
        self.num_heads = options.num_heads // layout.tp
        self.attention_norm = Norm(hidden)
        # Queries, keys and values of a rank's heads: three segments.
        self.qkv = Linear(hidden, 3 * hidden // layout.tp, stride=3)
        self.project = Linear(hidden, hidden // layout.tp)
        self.expert_norm = Norm(hidden)
        self.router = Router(options)
        self.experts = Experts(options, layout)


class LaidOutModel(nn.Module):
    """One rank's part of the model of `train_moe.py` under a layout, for generation.

    Args:
        options: Of the model.
        layout: Of this model.
        first_rank: Where its ranks begin in the default group.
        num_sequences: Most sequences of all ranks together.
    """

    def __init__(
        self, options: Options, layout: Parallelism, first_rank: int, num_sequences: int
    ) -> None:
        super().__init__()
        self.options = options
        rank = dist.get_rank() - first_rank
        # What resharding reads: the groups, and the number of experts.
        self.pg_collection = layout.groups(rank, first_rank)
        self.config = types.SimpleNamespace(num_moe_experts=options.num_experts)
        self.columns = Columns(_ranks(self.pg_collection.tp))
        self.expert_columns = Columns(_ranks(self.pg_collection.expt_tp))
        self.num_parts = layout.num_ranks // layout.tp
        self.part_idx = self.pg_collection.dp.rank()
        self.reports = self.pg_collection.tp.rank() == 0

        self.token = Embedding(NUM_CHARACTERS // layout.tp, options.hidden)
        self.position = parameter(options.context, options.hidden)
        self.blocks = nn.ModuleList(Block(options, layout) for _ in range(options.num_layers))
        self.norm = Norm(options.hidden)
        self.head = Linear(options.hidden, NUM_CHARACTERS // layout.tp)
        unset = torch.full((options.num_layers, options.num_experts), float("nan"))
        self.register_buffer("balance", unset)

        expert_ranks = list(_ranks(self.pg_collection.ep))
        self.communicator = moe_comm.Communicator(
            dist.new_group(expert_ranks, use_local_synchronization=True)
        )
        num_tokens = num_sequences // self.num_parts * options.context
        self.buffer = options.make_buffer(self.communicator, num_tokens)
        self.dispatcher = TokenDispatcher(
            options.num_experts, buffer=self.buffer, weighted_by="combine"
        )

    def adopt(self, trained: MoeModel) -> None:
        """Take over the memory of a model in training, which goes on changing it."""
        theirs = dict(trained.trunk.named_parameters())
        for layer_idx, layer in enumerate(trained.layers):
            for name, tensor in layer.experts.named_parameters():
                theirs[f"blocks.{layer_idx}.experts.{name}"] = tensor
        for name, mine in self.named_parameters():
            assert mine.shape == theirs[name].shape, name
            mine.data = theirs[name].data
        self.balance = trained.balance

    def close(self) -> None:
        """Collective over the model's ranks."""
        self.buffer.destroy()
        self.communicator.destroy()

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Logits `[num_sequences, NUM_CHARACTERS]` of what follows int64 `[num_sequences, length]`."""
        x = self._embed(characters) + self.position[: characters.shape[1]]
        for layer_idx in range(self.options.num_layers):
            block: Any = self.blocks[layer_idx]
            x = x + self._attend(block, block.attention_norm(x))
            x = x + self._route(block, layer_idx, block.expert_norm(x).flatten(0, 1)).view_as(x)
        return self.columns.join(self.head(self.norm(x[:, -1])))

    def _embed(self, characters: torch.Tensor) -> torch.Tensor:
        num_here = self.token.weight.shape[0]
        first = self.pg_collection.tp.rank() * num_here
        mine = F.embedding((characters - first).clamp(0, num_here - 1), self.token.weight)
        parts = torch.stack(self.columns.gather(mine))
        owner = (characters // num_here)[None, :, :, None].expand(1, *mine.shape)
        return parts.gather(0, owner)[0]

    def _attend(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        heads = block.qkv(x).unflatten(-1, (3, block.num_heads, -1))
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(2))
        scores = product(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        is_later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        mixed = product(scores.masked_fill(is_later, float("-inf")).softmax(-1), v)
        whole = self.columns.join(mixed.transpose(1, 2).flatten(2))
        return self.columns.join(block.project(whole))

    def _route(self, block: Any, layer_idx: int, x: torch.Tensor) -> torch.Tensor:
        scores = product(x, block.router.weight.t()).softmax(-1)
        balance: Any = self.balance
        topk_idx = (scores + balance[layer_idx]).topk(self.options.num_topk).indices
        topk_weights = scores.gather(-1, topk_idx)
        topk_weights = topk_weights / topk_weights.sum(-1, keepdim=True)
        routed = self.dispatcher.dispatch(x, topk_weights, topk_idx=topk_idx)
        sizes = routed.expert_offsets.diff().tolist()
        by_expert = nn.utils.rnn.pad_sequence(routed.tokens.split(sizes), batch_first=True)
        experts = block.experts
        between = torch.relu(self.expert_columns.join(product(by_expert, experts.up)))
        padded = self.expert_columns.join(product(between, experts.down))
        out = torch.cat([rows[:size] for rows, size in zip(padded, sizes, strict=True)])
        return self.dispatcher.combine(out, routed)


def _ranks(group: Any) -> tuple[int, ...]:
    assert isinstance(group, RankGroup)
    return group.ranks


@torch.no_grad()
def generate(
    model: LaidOutModel, prompts: torch.Tensor, num_new: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Continue this rank's part of the prompts; logits and characters, see `Generated`."""
    noise = torch.rand(
        num_new, len(prompts), NUM_CHARACTERS, generator=torch.Generator().manual_seed(7)
    )
    gumbel = -torch.log(-torch.log(noise.clamp(1e-6, 1.0 - 1e-6)))
    mine = prompts.chunk(model.num_parts)[model.part_idx]
    my_gumbel = gumbel.chunk(model.num_parts, 1)[model.part_idx]
    all_logits = []
    for step in range(num_new):
        logits = model(mine[:, -model.options.context :])
        following = (logits / TEMPERATURE + my_gumbel[step]).argmax(-1)
        mine = torch.cat([mine, following[:, None]], 1)
        all_logits.append(logits)
    return torch.stack(all_logits, 1), mine[:, -num_new:]
