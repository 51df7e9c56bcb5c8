"""Results that DeepEP's calls must return: the definition (`moe_comm.ep.spec`) in the terms of its contract.

Every rank makes every rank's input from the case, so that no communication is needed to know what is
right.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch

from moe_comm import Communicator
from moe_comm.compat.deep_ep import Buffer
from moe_comm.ep.config import Layout, default_expert_rank
from moe_comm.ep.group_buffers import group_buffers
from moe_comm.ep.spec import Dispatch, sum_in_order
from moe_comm.testing import RankContext


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    num_experts: int
    num_topk: int
    hidden: int
    num_tokens: tuple[int, ...]  # of ranks 0, 1, ...
    share_unused: float = 0.2
    is_skewed: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def num_ranks(self) -> int:
        return len(self.num_tokens)

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass
class Given:
    """The input of one rank."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return self.x.shape[0]


CASES = [
    Case("one_rank", 4, 2, 128, (5,)),
    Case("two_ranks", 8, 3, 256, (9, 14)),
    Case("two_ranks_wide_topk", 24, 20, 136, (6, 3), share_unused=0.5),
    Case("skewed", 6, 2, 64, (7, 5), is_skewed=True, share_unused=0.0),
    Case("empty_rank", 6, 2, 48, (0, 6, 4)),
    Case("three_ranks", 12, 4, 384, (8, 1, 11)),
]


def given(case: Case, rank_idx: int, salt: int = 0) -> Given:
    """Input of a rank; magnitudes of rows vary."""
    random = torch.Generator().manual_seed(1000 * salt + 10 * case.num_experts + rank_idx)
    num_tokens = case.num_tokens[rank_idx]
    scale = torch.exp2(torch.randint(-4, 5, (num_tokens, 1), generator=random).float())
    x = (torch.randn(num_tokens, case.hidden, generator=random) * scale).to(case.dtype)
    pool = case.num_experts // 2 if case.is_skewed else case.num_experts
    topk_idx = torch.rand(num_tokens, pool, generator=random).argsort(dim=1)[:, : case.num_topk]
    unused = torch.rand(topk_idx.shape, generator=random) < case.share_unused
    topk_idx = topk_idx.masked_fill(unused, -1).contiguous()
    topk_weights = torch.rand(topk_idx.shape, generator=random) + 0.1
    return Given(x, topk_idx, topk_weights)


def all_given(case: Case, salt: int = 0) -> list[Given]:
    return [given(case, rank_idx, salt) for rank_idx in range(case.num_ranks)]


def owners(case: Case) -> list[int]:
    """The rank of every expert: contiguous blocks, the first ranks have one more where they do not divide."""
    return default_expert_rank(case.num_experts, case.num_ranks).tolist()  # type: ignore[no-any-return]


def experts_of(case: Case, rank_idx: int) -> range:
    start = sum(owner < rank_idx for owner in owners(case))
    return range(start, start + owners(case).count(rank_idx))


def rank_of(case: Case, expert_idx: int) -> int:
    return owners(case)[expert_idx]


def dispatched(case: Case, inputs: list[Given], layout: Layout) -> Dispatch:
    """DeepEP's calls in terms of this package."""
    return Dispatch([each.topk_idx for each in inputs], owners(case), layout)


def layout(case: Case, mine: Given) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens per rank, tokens per expert, is token in rank."""
    alone = dispatched(case, [mine], Layout.RANK_MAJOR)
    ranks = range(case.num_ranks)
    in_rank = [[alone.goes_to(token, rank_idx) for rank_idx in ranks] for token in alone.choices[0]]
    is_in_rank = torch.tensor(in_rank, dtype=torch.bool).reshape(-1, case.num_ranks)
    per_expert = torch.tensor([len(origins) for origins in alone.asked], dtype=torch.int32)
    return is_in_rank.sum(0).to(torch.int32), per_expert, is_in_rank


def arrivals(case: Case, inputs: list[Given], rank_idx: int) -> list[tuple[int, int]]:
    """(source rank, token) of every row a rank receives, one per token."""
    rows = dispatched(case, inputs, Layout.RANK_MAJOR).window(rank_idx).rows
    return [(origin.source_idx, origin.token_idx) for origin in rows if origin is not None]


def expert_arrivals(case: Case, inputs: list[Given], expert_idx: int) -> list[tuple[int, int, int]]:
    """(source rank, token, k) of every row an expert receives."""
    return [tuple(each) for each in dispatched(case, inputs, Layout.EXPERT_MAJOR).asked[expert_idx]]


def summed(terms: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Terms added one by one in float32 from 0, rounded once to the dtype of `like`."""
    total = sum_in_order([term.float() for term in terms], [0] * len(terms), 0, like.dtype)
    return torch.as_tensor(total).expand(like.shape).to(like.dtype)


@contextlib.contextmanager
def backend_of_group(context: RankContext, backend: str) -> Iterator[None]:
    """Buffers of the context's group use this backend inside."""
    with Communicator(context.group, backend=backend) as communicator:
        held = group_buffers(communicator)
        yield
        del held


def routing(buffer: Buffer, topk_idx: torch.Tensor, num_experts: int) -> dict[str, torch.Tensor]:
    """Layout as `Buffer.dispatch` is told it, by its keywords."""
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
    return {
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
    }
