"""Cases of MoE layers around a dispatcher, and what they must compute, in plain torch and float64.

Which choices are kept and how rows are quantized comes from the definition (`moe_comm.ep.spec`).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from typing import Literal

import torch

from moe_comm.ep.config import Capacity, Layout, default_expert_rank
from moe_comm.ep.spec import Dispatch, quantize_rows
from moe_comm.tensors.quantization import FP8_BLOCK128, Quantization


@dataclasses.dataclass(frozen=True, kw_only=True)
class DispatcherCase:
    """One batch on every rank.

    Args:
        name: Name for test ids.
        num_tokens: Number of tokens of every rank.
        hidden: Elements of a token.
        num_experts: Number of experts over all ranks.
        num_topk: Choices per token.
        dtype: Type of tokens and experts.
        routing: "random"; "masked": a third of the choices is -1, and all of the first token;
            "one expert": the last, by the first choice of every token, others -1.
        expert_alignment: Multiple that an expert's grouped rows are padded to.
        quantization: Format of dispatched rows; scale factors float32.
        num_rows_per_expert: Most rows of an expert; what is beyond is dropped.
        capacity_factor: Capacity factor of the rows of every rank; what is beyond is dropped.
        with_backward: Whether gradients are compared too.
    """

    name: str
    num_tokens: tuple[int, ...]
    hidden: int = 64
    num_experts: int = 6
    num_topk: int = 2
    dtype: torch.dtype = torch.bfloat16
    routing: Literal["random", "masked", "one expert"] = "random"
    expert_alignment: int = 1
    quantization: Quantization | None = None
    num_rows_per_expert: int | None = None
    capacity_factor: float | None = None
    with_backward: bool = False

    @property
    def num_ranks(self) -> int:
        """Ranks."""
        return len(self.num_tokens)

    @property
    def features(self) -> frozenset[str]:
        """Abilities that a dispatcher needs to run it; see `DispatcherTarget`."""
        wanted = {
            "backward": self.with_backward,
            "fp8": self.quantization is not None,
            "rows per expert": self.num_rows_per_expert is not None,
            "rows": self.capacity_factor is not None,
        }
        return frozenset(feature for feature, is_wanted in wanted.items() if is_wanted)


@dataclasses.dataclass(frozen=True, eq=False)
class RankTokens:
    """Inputs of one rank.

    Args:
        x: `[T, hidden]`.
        topk_idx: int64 `[T, K]`.
        topk_weights: float32 `[T, K]`.
        grad: `[T, hidden]`, gradient of the output.
    """

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    grad: torch.Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Expected:
    """Results that one rank must get, float64, each with the error that its arithmetic may have.

    Args:
        y: `[T, hidden]`.
        grad_x: `[T, hidden]`.
        grad_weights: `[T, K]`.
        y_size: `[T]`: sum of the norms of what is added in a row of y.
        grad_x_size: `[T]`: the same of grad_x.
        grad_weights_size: `[T, K]`: product of the norms of the two factors.
    """

    y: torch.Tensor
    grad_x: torch.Tensor
    grad_weights: torch.Tensor
    y_size: torch.Tensor
    grad_x_size: torch.Tensor
    grad_weights_size: torch.Tensor


def expert_output(rows: torch.Tensor, expert_idx: torch.Tensor) -> torch.Tensor:
    """Every row through its expert: sin(row * (0.5 + e / 10)) + e / 100, in the dtype of the rows.

    Args:
        rows: `[M, hidden]`.
        expert_idx: int64 `[M]`, global ids.
    """
    number = expert_idx[:, None].to(torch.float64)
    scale, shift = (0.5 + number / 10).float(), (number / 100).float()
    return (torch.sin(rows.float() * scale) + shift).to(rows.dtype)


@functools.lru_cache(maxsize=64)
def all_tokens(case: DispatcherCase) -> tuple[RankTokens, ...]:
    """The input of every rank."""
    seed = int.from_bytes(hashlib.sha256(case.name.encode()).digest()[:4], "little")
    draw = torch.Generator().manual_seed(seed)
    tokens = []
    for num_tokens in case.num_tokens:
        x = torch.randn(num_tokens, case.hidden, generator=draw).to(case.dtype)
        grad = torch.randn(num_tokens, case.hidden, generator=draw).to(case.dtype)
        weights = torch.rand(num_tokens, case.num_topk, generator=draw) + 0.1
        order = torch.rand(num_tokens, case.num_experts, generator=draw).argsort(1)
        topk_idx = order[:, : case.num_topk].contiguous()
        if case.routing == "masked":
            topk_idx[torch.rand(topk_idx.shape, generator=draw) < 1 / 3] = -1
            topk_idx[:1] = -1
        elif case.routing == "one expert":
            topk_idx.fill_(-1)
            topk_idx[:, 0] = case.num_experts - 1
        tokens.append(RankTokens(x, topk_idx, weights, grad))
    return tuple(tokens)


def expected(case: DispatcherCase, rank_idx: int) -> Expected:
    """Results that `rank_idx` must get."""
    tokens = all_tokens(case)[rank_idx]
    kept = kept_choices(case)[rank_idx]
    x = tokens.x
    if case.quantization is not None:
        x = _after_quantization(x, case.quantization)
    grad = tokens.grad.double()
    weights = torch.where(kept, tokens.topk_weights.double(), 0)
    outputs, slopes = [], []
    for topk_pos in range(case.num_topk):
        expert_idx = tokens.topk_idx[:, topk_pos].clamp(min=0)
        outputs.append(expert_output(x, expert_idx).double())
        scale = 0.5 + expert_idx[:, None].double() / 10
        slopes.append(torch.cos(x.double() * scale) * scale)
    output, slope = torch.stack(outputs, 1), torch.stack(slopes, 1)
    added = weights[..., None] * output
    grad_added = weights[..., None] * slope * grad[:, None]
    return Expected(
        y=added.sum(1),
        grad_x=grad_added.sum(1),
        grad_weights=torch.where(kept, (output * grad[:, None]).sum(-1), 0),
        y_size=added.norm(dim=-1).sum(1),
        grad_x_size=grad_added.norm(dim=-1).sum(1),
        grad_weights_size=output.norm(dim=-1) * grad.norm(dim=-1)[:, None],
    )


@functools.lru_cache(maxsize=64)
def kept_choices(case: DispatcherCase) -> tuple[torch.Tensor, ...]:
    """Bool `[T, K]` of every rank: choices that are used and lie within the limits."""
    inputs = all_tokens(case)
    limits: list[Capacity | None] = [None] * case.num_ranks
    if case.num_rows_per_expert is not None or case.capacity_factor is not None:
        limits = [
            Capacity(
                num_rows=None if case.capacity_factor is None else fixed_rows(case, rank_idx),
                num_rows_per_expert=case.num_rows_per_expert,
                on_overflow="drop",
            )
            for rank_idx in range(case.num_ranks)
        ]
    dispatch = Dispatch(
        topk_idx=[rank.topk_idx for rank in inputs],
        expert_rank=default_expert_rank(case.num_experts, case.num_ranks).tolist(),
        layout=Layout.EXPERT_MAJOR,
        expert_alignment=case.expert_alignment,
        capacities=limits,
    )
    kept = [torch.zeros(rank.topk_idx.shape, dtype=torch.bool) for rank in inputs]
    for origin in itertools.chain(*dispatch.kept):
        kept[origin.source_idx][origin.token_idx, origin.topk_pos] = True
    return tuple(kept)


def fixed_rows(case: DispatcherCase, rank_idx: int) -> int:
    """Rows of a rank's result under `capacity_factor`; every rank sends as many tokens."""
    assert case.capacity_factor is not None
    owner = default_expert_rank(case.num_experts, case.num_ranks)
    num_local_experts = int((owner == rank_idx).sum())
    worst = case.num_tokens[0] * case.num_ranks * min(num_local_experts, case.num_topk)
    room = num_local_experts * (case.expert_alignment - 1)
    num_rows = int(worst * case.capacity_factor) + room
    return -(-num_rows // case.expert_alignment) * case.expert_alignment


def _after_quantization(x: torch.Tensor, quantization: Quantization) -> torch.Tensor:
    """X quantized with float32 scale factors, and back; hidden a multiple of the block."""
    data, factors = quantize_rows(x, quantization)
    blocks = data.float().view(*factors.shape, quantization.format.block) * factors[..., None]
    return blocks.view(x.shape).to(x.dtype)


def _cases() -> tuple[DispatcherCase, ...]:
    f32 = torch.float32
    return (
        DispatcherCase(name="two ranks", num_tokens=(7, 7)),
        DispatcherCase(name="one rank", num_tokens=(9,)),
        DispatcherCase(name="ragged", num_tokens=(5, 0, 12), num_experts=7, num_topk=3),
        DispatcherCase(name="nobody has tokens", num_tokens=(0, 0)),
        DispatcherCase(name="masked", num_tokens=(9, 6), num_topk=3, routing="masked"),
        DispatcherCase(name="all to one expert", num_tokens=(8, 5), routing="one expert"),
        DispatcherCase(name="top-k 64", num_tokens=(4, 3), num_experts=64, num_topk=64),
        DispatcherCase(
            name="backward", num_tokens=(7, 4), num_topk=3, dtype=f32, with_backward=True
        ),
        DispatcherCase(
            name="backward of masked and padded",
            num_tokens=(6, 0, 5),
            num_topk=3,
            dtype=f32,
            routing="masked",
            expert_alignment=8,
            with_backward=True,
        ),
        DispatcherCase(name="backward in bfloat16", num_tokens=(6, 5), with_backward=True),
        DispatcherCase(name="fp8", num_tokens=(6, 4), hidden=256, quantization=FP8_BLOCK128),
        DispatcherCase(
            name="fp8 backward",
            num_tokens=(6, 4),
            hidden=256,
            quantization=FP8_BLOCK128,
            expert_alignment=16,
            with_backward=True,
        ),
        DispatcherCase(
            name="rows per expert",
            num_tokens=(11, 9),
            num_rows_per_expert=4,
            dtype=f32,
            with_backward=True,
        ),
        DispatcherCase(
            name="rows of a rank",
            num_tokens=(10, 10),
            capacity_factor=0.25,
            expert_alignment=4,
            dtype=f32,
            with_backward=True,
        ),
        DispatcherCase(name="rows of a rank, worst case", num_tokens=(10, 10), capacity_factor=1.0),
    )


DISPATCHER_CASES = _cases()
