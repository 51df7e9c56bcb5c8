"""Inputs of the conformance suite: what every backend must get right."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator
from typing import Any

import torch

from moe_comm.backends.arithmetic import ADDABLE_DTYPES, accumulator_dtype
from moe_comm.config import EpConfig, Layout

__all__ = ["CASES", "Case", "RankInput", "case_inputs", "random_rows", "random_weights", "seeded"]

ROUTINGS = ("uniform", "masked", "skewed", "one_expert", "one_rank", "repeated", "nothing")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration and the kind of input it is given.

    Args:
        name: Readable id.
        num_ranks: Ranks.
        num_tokens: Tokens of every rank.
        hidden: Elements per row.
        num_experts: Over all ranks.
        num_topk: Choices per token.
        dtype: Of dispatched rows.
        layout: Order of received rows.
        expert_alignment: Padding of every expert's rows.
        expert_rank: Placement, None for the default.
        routing: One of `ROUTINGS`.
        has_special_values: Rows and weights hold NaN, infinities, -0.0 and subnormals.
        num_spare_tokens: How much `num_max_tokens_per_rank` exceeds the most tokens of a rank.
    """

    name: str
    num_ranks: int
    num_tokens: tuple[int, ...]
    hidden: int = 64
    num_experts: int = 8
    num_topk: int = 2
    dtype: torch.dtype = torch.bfloat16
    layout: Layout = Layout.EXPERT_MAJOR
    expert_alignment: int = 1
    expert_rank: tuple[int, ...] | None = None
    routing: str = "uniform"
    has_special_values: bool = False
    num_spare_tokens: int = 0

    @property
    def config(self) -> EpConfig:
        """For the buffer."""
        return EpConfig(
            num_experts=self.num_experts,
            num_topk=self.num_topk,
            hidden=self.hidden,
            num_max_tokens_per_rank=max(self.num_tokens) + self.num_spare_tokens,
            dtype=self.dtype,
            expert_rank=self.expert_rank,
        )

    @property
    def weights_dtype(self) -> torch.dtype:
        """Of `topk_weights`."""
        return accumulator_dtype(self.dtype)

    @property
    def combine_dtype(self) -> torch.dtype:
        """Of expert outputs: rows that only move as bytes come back as float32."""
        return self.dtype if self.dtype in ADDABLE_DTYPES else torch.float32


@dataclasses.dataclass(frozen=True, eq=False)
class RankInput:
    """What one rank dispatches.

    Args:
        x: `[T, hidden]`.
        topk_idx: int64 `[T, K]`.
        topk_weights: `[T, K]`; NaN where the choice is -1, which nobody may look at.
    """

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


def seeded(*key: object) -> torch.Generator:
    """A generator for a key, the same in every process."""
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def random_rows(
    num_rows: int,
    hidden: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    has_special_values: bool = False,
) -> torch.Tensor:
    """`[num_rows, hidden]` of any dtype."""
    if dtype not in ADDABLE_DTYPES:
        row_bytes = hidden * dtype.itemsize
        raw = torch.randint(0, 256, (num_rows, row_bytes), dtype=torch.uint8, generator=generator)
        return raw.view(dtype)
    rows = torch.randn(num_rows, hidden, dtype=torch.float64, generator=generator).to(dtype)
    if has_special_values:
        values = _special_values(dtype)
        choice = torch.randint(0, len(values), rows.shape, generator=generator)
        is_special = torch.rand(rows.shape, generator=generator) < 0.25
        # Selected as bits: arithmetic might quiet a NaN or flush a subnormal.
        bits = _BITS[dtype]
        rows = torch.where(is_special, values.view(bits)[choice], rows.view(bits)).view(dtype)
    return rows


def random_weights(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    has_special_values: bool = False,
) -> torch.Tensor:
    """Router weights: in [0, 1), or with signs, zeros and extremes among them."""
    weights = torch.rand(shape, dtype=torch.float64, generator=generator).to(dtype)
    if has_special_values:
        values = torch.tensor([-0.0, 0.0, -1.5, 1e-40, 3e38, float("inf")], dtype=dtype)
        choice = torch.randint(0, 2 * len(values), shape, generator=generator)
        weights = torch.where(
            choice < len(values), values[choice.clamp(max=len(values) - 1)], weights
        )
    return weights


def case_inputs(case: Case, round_idx: int = 0) -> list[RankInput]:
    """The input of every rank. Tokens in rank order do not depend on how many ranks share them."""
    generator = seeded(
        case.num_experts, case.num_topk, case.hidden, case.dtype, case.routing, round_idx
    )
    total = sum(case.num_tokens)
    special = case.has_special_values
    x = random_rows(total, case.hidden, case.dtype, generator, has_special_values=special)
    topk_idx = _choices(case, total, generator)
    weights = random_weights(
        (total, case.num_topk), case.weights_dtype, generator, has_special_values=special
    )
    weights = torch.where(topk_idx < 0, float("nan"), weights)
    return [
        RankInput(x=rows.clone(), topk_idx=choices.clone(), topk_weights=some.clone())
        for rows, choices, some in zip(
            torch.split(x, list(case.num_tokens)),
            torch.split(topk_idx, list(case.num_tokens)),
            torch.split(weights, list(case.num_tokens)),
            strict=True,
        )
    ]


def _choices(case: Case, total: int, generator: torch.Generator) -> torch.Tensor:
    shape = (total, case.num_topk)
    num_experts = case.num_experts
    if case.routing == "nothing":
        return torch.full(shape, -1)
    if case.routing == "one_expert":
        return torch.full(shape, num_experts - 1)
    if case.routing == "repeated":
        return torch.randint(0, min(3, num_experts), shape, generator=generator)
    if case.routing == "one_rank":
        owner = case.config.resolve_expert_rank(case.num_ranks)
        on_last = (owner == owner[-1]).nonzero().flatten()
        return on_last[torch.randint(0, len(on_last), shape, generator=generator)]
    scores = torch.rand(total, num_experts, generator=generator)
    if case.routing == "skewed":
        scores = scores ** torch.arange(1, num_experts + 1).pow(2)
    if case.num_topk <= num_experts:
        chosen = scores.topk(case.num_topk, dim=1).indices
    else:
        chosen = torch.randint(0, num_experts, shape, generator=generator)
    if case.routing == "masked":
        chosen[torch.rand(shape, generator=generator) < 0.3] = -1
        chosen[total // 2 : total // 2 + 1] = -1  # one token without any expert
    return chosen


_BITS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def _special_values(dtype: torch.dtype) -> torch.Tensor:
    info = torch.finfo(dtype)
    subnormal = info.tiny / 4
    values = torch.tensor(
        [
            float("inf"),
            -float("inf"),
            -0.0,
            subnormal,
            -subnormal,
            info.tiny,
            info.max,
            -info.max,
            1.0,
        ],
        dtype=torch.float64,
    ).to(dtype)
    # NaNs with payloads, one of them signalling, of either sign.
    one_nan = torch.tensor([float("nan")], dtype=dtype).view(_BITS[dtype])
    mantissa_bits = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23, torch.float64: 52}
    quiet = 1 << (mantissa_bits[dtype] - 1)
    sign = torch.iinfo(_BITS[dtype]).min
    nans = torch.cat([one_nan | 5, (one_nan & ~quiet) | 3, one_nan | sign | 1])
    return torch.cat([values.view(_BITS[dtype]), nans]).view(dtype)


_RAGGED = (5, 0, 9, 3, 17, 1, 0, 4)


def _case(name: str, num_ranks: int, **fields: Any) -> Case:
    return Case(name=name, num_ranks=num_ranks, **{"num_tokens": _RAGGED[:num_ranks], **fields})


def _cases_of_a_layout() -> Iterator[Case]:
    for num_ranks in (1, 2, 3, 4, 6, 8):
        yield _case(f"{num_ranks}-ranks", num_ranks, num_experts=13, num_topk=3)
    for dtype in (torch.float16, torch.float32, torch.float64):
        yield _case(_short(dtype), 3, dtype=dtype)
    for dtype in (torch.float8_e4m3fn, torch.uint8, torch.int32, torch.bool):
        yield _case(_short(dtype), 2, dtype=dtype, routing="masked")
    for dtype in ADDABLE_DTYPES:
        yield _case(f"special-{_short(dtype)}", 2, dtype=dtype, num_topk=4, has_special_values=True)
    for routing in ROUTINGS[1:]:
        yield _case(routing.replace("_", "-"), 4, num_topk=4, routing=routing)
    for num_topk in (1, 5, 17, 64):
        yield _case(f"top-{num_topk}", 2, num_topk=num_topk, routing="masked")
    yield _case("top-64-of-64", 3, num_topk=64, num_experts=64)
    for hidden in (8, 24, 1000, 2880):
        yield _case(f"hidden-{hidden}", 2, hidden=hidden)
    for alignment in (8, 128):
        yield _case(f"alignment-{alignment}", 3, expert_alignment=alignment, routing="masked")
    yield _case("one-element-rows", 2, hidden=1, dtype=torch.complex128)
    yield _case("empty-everywhere", 3, num_tokens=(0, 0, 0), expert_alignment=8)
    yield _case("empty-first", 4, num_tokens=(0, 6, 6, 6))
    yield _case("one-token", 4, num_tokens=(0, 0, 1, 0))
    yield _case("spare-capacity", 2, num_spare_tokens=100)
    yield _case("one-expert-in-all", 3, num_experts=1, num_topk=1)
    yield _case("experts-on-last-rank", 3, expert_rank=(2,) * 8)
    yield _case("rank-without-experts", 4, expert_rank=(0, 0, 2, 2, 3, 3, 3, 0))
    yield _case("interleaved-experts", 3, expert_rank=(2, 0, 1, 2, 1, 0, 0, 2), num_topk=3)
    yield _case(
        "larger", 2, num_tokens=(200, 123), hidden=512, num_experts=64, num_topk=8,
        expert_alignment=16,
    )  # fmt: skip
    yield _case(
        "larger-8-ranks", 8, num_tokens=(30, 64, 1, 0, 64, 17, 40, 2), hidden=256,
        num_experts=64, num_topk=8, routing="skewed",
    )  # fmt: skip


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


CASES: tuple[Case, ...] = tuple(
    dataclasses.replace(
        case, name=f"{layout.name.lower().replace('_', '-')}-{case.name}", layout=layout
    )
    for layout in Layout
    for case in _cases_of_a_layout()
)
