"""A case of the conformance suite and the input that belongs to it."""

from __future__ import annotations

import dataclasses
import zlib

import torch

from moe_comm.ep.config import Capacity, EpConfig, Layout
from moe_comm.tensors.arithmetic import ADDABLE_DTYPES, accumulator_dtype
from moe_comm.tensors.quantization import Quantization

ROUTINGS = ("uniform", "masked", "skewed", "one_expert", "one_rank", "repeated", "nothing")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration and the kind of input it is given.

    Args:
        name: Readable id.
        num_ranks: Ranks.
        num_tokens: Tokens of every rank.
        hidden: Elements per row.
        num_experts: Experts over all ranks.
        num_topk: Choices per token.
        dtype: Dtype of dispatched rows.
        layout: Order of received rows.
        expert_alignment: Padding of every expert's rows.
        expert_rank: Placement, None for the default.
        routing: One of `ROUTINGS`.
        has_special_values: Rows and weights hold NaN, infinities, -0.0 and subnormals.
        num_spare_tokens: Tokens by which `num_max_tokens_per_rank` exceeds the most of a rank.
        quantization: Rows are quantized in dispatch.
        pair: Dtype and number of the scale factors where rows, of a one-byte dtype, are quantized
            already; `quantization` then only has their order on arrival.
        capacities: Capacity of every rank; None for no limits.
        masked_ranks: Ranks that each rank masks, for every rank; None for none.
        num_topk_per_rank: Choices per token of every rank, at most `num_topk`; None for `num_topk`.
        is_elastic: The configuration leaves open what every call brings.
        num_local_ranks: Ranks of a node; None where no result depends on it.
        node_reduction: As in `EpConfig`; with `num_local_ranks`.
        rank_reduction: As in `EpConfig`.
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
    quantization: Quantization | None = None
    pair: tuple[torch.dtype, int] | None = None
    capacities: tuple[Capacity | None, ...] | None = None
    masked_ranks: tuple[tuple[int, ...], ...] | None = None
    num_topk_per_rank: tuple[int, ...] | None = None
    is_elastic: bool = False
    num_local_ranks: int | None = None
    node_reduction: bool = False
    rank_reduction: bool = False

    @property
    def config(self) -> EpConfig:
        """Configuration of the buffer."""
        if self.is_elastic:
            needs_tokens = self.layout is Layout.LOW_LATENCY
            return EpConfig(
                num_experts=self.num_experts,
                num_topk=None,
                hidden=None,
                num_max_tokens_per_rank=self.num_max_tokens if needs_tokens else None,
                dtype=None,
                expert_rank=self.expert_rank,
                node_reduction=self.node_reduction,
                rank_reduction=self.rank_reduction,
            )
        return EpConfig(
            num_experts=self.num_experts,
            num_topk=self.num_topk,
            hidden=self.hidden,
            num_max_tokens_per_rank=self.num_max_tokens,
            dtype=self.dtype,
            expert_rank=self.expert_rank,
            node_reduction=self.node_reduction,
            rank_reduction=self.rank_reduction,
        )

    @property
    def num_max_tokens(self) -> int:
        """Most tokens of a rank."""
        return max(self.num_tokens) + self.num_spare_tokens

    @property
    def num_recv_topk(self) -> int:
        """Largest number of choices per token of all ranks."""
        return max(self.num_topk_per_rank or (self.num_topk,))

    def capacity_of(self, rank_idx: int) -> Capacity | None:
        """Return the capacity that a rank passes."""
        return None if self.capacities is None else self.capacities[rank_idx]

    def masked_by(self, rank_idx: int) -> tuple[int, ...]:
        """Return the ranks that a rank masks."""
        return () if self.masked_ranks is None else self.masked_ranks[rank_idx]

    @property
    def weights_dtype(self) -> torch.dtype:
        """Dtype of `topk_weights`."""
        return accumulator_dtype(self.dtype)

    @property
    def combine_dtype(self) -> torch.dtype:
        """Dtype of expert outputs: rows that only move as bytes come back as float32."""
        return self.dtype if self.dtype in ADDABLE_DTYPES else torch.float32

    @property
    def combine_hidden(self) -> int:
        """Hidden size of expert outputs: `hidden`, or the next that makes whole units of 16 bytes."""
        per_unit = 16 // self.combine_dtype.itemsize
        return self.hidden + -self.hidden % per_unit


@dataclasses.dataclass(frozen=True, eq=False)
class RankInput:
    """Tensors that one rank dispatches.

    Args:
        x: `[T, hidden]`.
        topk_idx: int64 `[T, K]`.
        topk_weights: `[T, K]`; NaN where the choice is -1, which nobody may look at.
        x_sf: `[T, num_scales]` of a pair, else None.
    """

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    x_sf: torch.Tensor | None = None


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
    x = rows_of_case(case, total, case.hidden, case.dtype, generator)
    topk_idx = _choices(case, total, generator)
    weights = random_weights(
        (total, case.num_topk), case.weights_dtype, generator, has_special_values=special
    )
    weights = torch.where(topk_idx < 0, float("nan"), weights)
    scales = scales_of_case(case, "inputs", round_idx)
    inputs = []
    first = 0
    for rank_idx, num_tokens in enumerate(case.num_tokens):
        some = slice(first, first + num_tokens)
        num_topk = (case.num_topk_per_rank or (case.num_topk,) * case.num_ranks)[rank_idx]
        inputs.append(
            RankInput(
                x=x[some].clone(),
                topk_idx=topk_idx[some, :num_topk].contiguous().clone(),
                topk_weights=weights[some, :num_topk].contiguous().clone(),
                x_sf=None if scales is None else scales[rank_idx],
            )
        )
        first += num_tokens
    return inputs


def rows_of_case(
    case: Case, num_rows: int, hidden: int, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """`[num_rows, hidden]` with what makes the case interesting."""
    if case.quantization is not None and dtype in ADDABLE_DTYPES:
        return _rows_to_quantize(num_rows, hidden, dtype, generator)
    return random_rows(
        num_rows, hidden, dtype, generator, has_special_values=case.has_special_values
    )


def scales_of_case(case: Case, *key: object) -> list[torch.Tensor] | None:
    """Scale factors `[T, num_scales]` of every rank, of random bits; None where there are none.

    The strides are those of rows, of columns, or of every other column of something larger.
    """
    if case.pair is None:
        return None
    dtype, num_scales = case.pair
    scales = []
    for rank_idx, num_tokens in enumerate(case.num_tokens):
        generator = seeded("scales", rank_idx, *key)
        rows = random_rows(num_tokens, num_scales, torch.uint8, generator)
        shape = (num_tokens, 2 * num_scales * dtype.itemsize)
        raw = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        rows = raw.view(-1).view(dtype).view(num_tokens, 2 * num_scales)
        order = int(torch.randint(0, 3, (), generator=generator))
        rows = rows[:, ::2]
        if order == 0:
            rows = rows.contiguous()
        elif order == 1:
            rows = rows.T.contiguous().T
        scales.append(rows)
    return scales


def _rows_to_quantize(
    num_rows: int, hidden: int, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Blocks of every magnitude, halves between two e4m3 values, zeros, some NaN and infinity."""
    rows = torch.randn(num_rows, hidden, dtype=torch.float64, generator=generator)
    num_blocks = -(-hidden // 32)
    lowest, highest = (-24, 15) if dtype == torch.float16 else (-149, 127)
    near = torch.randint(-12, 12, (num_rows, num_blocks), generator=generator)
    far = torch.randint(lowest, highest, (num_rows, num_blocks), generator=generator)
    is_far = torch.rand(num_rows, num_blocks, generator=generator) < 0.3
    exponent = torch.where(is_far, far, near).repeat_interleave(32, dim=1)[:, :hidden]
    # Few bits, so that a scaling with a power of two gives many halves.
    is_coarse = torch.rand(rows.shape, generator=generator) < 0.3
    rows = torch.where(is_coarse, (rows * 16).round() / 16, rows)
    rows = torch.ldexp(rows, exponent)
    kind = torch.rand(rows.shape, generator=generator)
    rows = torch.where(kind < 0.1, 0.0, rows)
    rows = torch.where((kind > 0.1) & (kind < 0.12), -0.0, rows)
    rows[torch.rand(num_rows, generator=generator) < 0.1] = 0.0
    most = torch.finfo(dtype).max
    rows = rows.clamp(-most, most).to(dtype)
    for value in (float("nan"), float("inf"), -float("inf"), most):
        for row in (torch.rand(num_rows, generator=generator) < 0.07).nonzero().flatten().tolist():
            rows[row, int(torch.randint(0, hidden, (), generator=generator))] = value
    return rows


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
