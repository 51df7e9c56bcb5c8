"""Definition of dispatch and combine, row by row, that every backend is held to.

A `Dispatch` is made of what all ranks ask for. It lists which row of which rank comes from which token,
and says what a rank receives and gets back. Rows are listed one at a time in Python and moved whole;
sums are added one row after the other. Nothing here knows peers, memory or kernels, and nothing is
shared with a backend but the rounding of single numbers (`moe_comm.tensors.arithmetic`).

The backward of a dispatch is a combine without weights, that of a combine is a cached dispatch. Where a
combine applied weights, the experts' rank takes `arithmetic.scale_rows` of the gradients that arrive,
and `arithmetic.dot_rows` of them and its outputs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from moe_comm.ep.config import Capacity, Layout
from moe_comm.errors import Overflow
from moe_comm.tensors import arithmetic
from moe_comm.tensors.quantization import Quantization, ScaleFormat, refusal

_SLOT_RANK_SHIFT = 48


class Origin(NamedTuple):
    """The token of a row; `topk_pos` is -1 where one row stands for all choices of a rank."""

    source_idx: int
    token_idx: int
    topk_pos: int


class Place(NamedTuple):
    """Position of a row: in the window of a rank."""

    rank_idx: int
    row_idx: int


@dataclasses.dataclass(frozen=True, eq=False)
class Window:
    """The rows that one rank receives.

    Args:
        rows: Origin of every row, None for padding and places that are not filled.
        num_tokens_per_expert: Kept choices of every local expert.
        num_dropped_per_expert: Choices of every local expert that were not kept.
        expert_offsets: First row of every local expert, then the end of the last.
        num_required_rows: Rows if nothing were dropped and no capacity fixed their number.
    """

    rows: list[Origin | None]
    num_tokens_per_expert: list[int]
    num_dropped_per_expert: list[int]
    expert_offsets: list[int]
    num_required_rows: int


@dataclasses.dataclass(frozen=True, eq=False)
class Received:
    """Tensors that a rank gets from a dispatch; M rows, see `DispatchOutput` for every other tensor.

    Args:
        is_defined: LOW_LATENCY: bool `[M]`, rows that some token sent; the others are undefined. Else
            None: what no token sent is zero.
    """

    x: torch.Tensor
    x_sf: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    num_tokens_per_expert: torch.Tensor
    num_dropped_per_expert: torch.Tensor
    num_required_rows: int
    expert_offsets: torch.Tensor
    is_defined: torch.Tensor | None


@dataclasses.dataclass(frozen=True, eq=False)
class Dispatch:
    """One dispatch of all ranks.

    Args:
        topk_idx: Choices of every rank, int64 `[T, K]`; T and K may differ between ranks. -1 is no
            choice.
        expert_rank: The rank of every expert.
        layout: Order of received rows.
        expert_alignment: Every expert begins at a multiple of this.
        num_places_per_expert: LOW_LATENCY: rows that every expert has, filled or not.
        capacities: Capacity of every rank; empty for no limits.
        masked_ranks: Named by any rank: nothing goes to them or comes from them.
        counts_of_earlier: `PlanTensors.counts` of the dispatch that this one repeats (a cached one), which
            say what is kept; None where limits and masks do.
    """

    topk_idx: Sequence[torch.Tensor]
    expert_rank: Sequence[int]
    layout: Layout
    expert_alignment: int = 1
    num_places_per_expert: int = 0
    capacities: Sequence[Capacity | None] = ()
    masked_ranks: frozenset[int] = frozenset()
    counts_of_earlier: torch.Tensor | None = None

    @property
    def is_cached(self) -> bool:
        """Return whether rows go to the places of an earlier dispatch."""
        return self.counts_of_earlier is not None

    @functools.cached_property
    def choices(self) -> list[list[list[int]]]:
        """Expert ids: `choices[rank][token][k]`."""
        return [of_rank.tolist() for of_rank in self.topk_idx]

    @property
    def num_ranks(self) -> int:
        """Ranks."""
        return len(self.topk_idx)

    @property
    def num_recv_topk(self) -> int:
        """Largest number of choices per token of all ranks."""
        return max(of_rank.shape[1] for of_rank in self.topk_idx)

    def experts_of(self, rank_idx: int) -> list[int]:
        """The local experts of a rank, by ascending global id."""
        return [idx for idx, owner in enumerate(self.expert_rank) if owner == rank_idx]

    def goes_to(self, token: Sequence[int], rank_idx: int) -> bool:
        """Return whether a token has a choice on a rank."""
        return any(expert >= 0 and self.expert_rank[expert] == rank_idx for expert in token)

    @functools.cached_property
    def asked(self) -> list[list[Origin]]:
        """All choices of every expert, in order of (source rank, token, k)."""
        asked: list[list[Origin]] = [[] for _ in self.expert_rank]
        for source_idx, tokens in enumerate(self.choices):
            for token_idx, token in enumerate(tokens):
                for topk_pos, expert_idx in enumerate(token):
                    if expert_idx >= 0:
                        asked[expert_idx].append(Origin(source_idx, token_idx, topk_pos))
        return asked

    @functools.cached_property
    def kept(self) -> list[list[Origin]]:
        """The choices of every expert that are kept, in the same order.

        First what touches a masked rank goes. Under "drop", an expert then keeps its first
        `num_rows_per_expert`, and of these what has its padded place within the `num_rows` of its rank.
        """
        if self.counts_of_earlier is not None:
            return self._kept_earlier(self.counts_of_earlier.tolist())
        kept = [
            [origin for origin in origins if not self.masked_ranks & {origin.source_idx, owner}]
            for origins, owner in zip(self.asked, self.expert_rank, strict=True)
        ]
        for rank_idx in range(self.num_ranks):
            capacity = self._capacity(rank_idx, "drop")
            if capacity is None:
                continue
            start = 0
            for expert_idx in self.experts_of(rank_idx):
                if capacity.num_rows_per_expert is not None:
                    del kept[expert_idx][capacity.num_rows_per_expert :]
                if capacity.num_rows is not None:
                    del kept[expert_idx][max(0, capacity.num_rows - start) :]
                start += self._padded(len(kept[expert_idx]))
        return kept

    def _kept_earlier(self, counts: list[list[int]]) -> list[list[Origin]]:
        """Return the first `counts[rank][expert]` of every rank's choices of an expert."""
        kept: list[list[Origin]] = []
        for expert_idx, origins in enumerate(self.asked):
            left = [of_rank[expert_idx] for of_rank in counts]
            kept.append([])
            for origin in origins:
                if left[origin.source_idx] > 0:
                    left[origin.source_idx] -= 1
                    kept[expert_idx].append(origin)
        return kept

    @functools.cached_property
    def overflows(self) -> list[Overflow]:
        """Everything for which the dispatch is refused on every rank.

        Under "raise" what is beyond a limit: experts first, then ranks. In LOW_LATENCY experts with more
        rows than places.
        """
        found: list[Overflow] = []
        for expert_idx, origins in enumerate(self.kept):
            owner = self.expert_rank[expert_idx]
            capacity = self._capacity(owner, "raise")
            most = None if capacity is None else capacity.num_rows_per_expert
            if self.layout is Layout.LOW_LATENCY:
                most = self.num_places_per_expert
            if most is not None and len(origins) > most:
                found.append(Overflow(owner, expert_idx, len(origins), most))
        for rank_idx in range(self.num_ranks):
            capacity = self._capacity(rank_idx, "raise")
            most = None if capacity is None else capacity.num_rows
            required = self._num_required_rows(rank_idx)
            if most is not None and required > most:
                found.append(Overflow(rank_idx, None, required, most))
        return found

    def _capacity(self, rank_idx: int, *on_overflow: str) -> Capacity | None:
        """The capacity of a rank where that is what it does, or None."""
        capacity = self.capacities[rank_idx] if self.capacities else None
        return capacity if capacity is not None and capacity.on_overflow in on_overflow else None

    def _padded(self, num_rows: int) -> int:
        """Rows that so many rows of an expert take."""
        if self.layout is Layout.LOW_LATENCY:
            return self.num_places_per_expert
        return num_rows + -num_rows % self.expert_alignment

    def _num_required_rows(self, rank_idx: int) -> int:
        if self.layout is Layout.RANK_MAJOR:
            return sum(self.goes_to(token, rank_idx) for tokens in self.choices for token in tokens)
        return sum(self._padded(len(self.asked[idx])) for idx in self.experts_of(rank_idx))

    def num_fixed_rows(self, rank_idx: int) -> int:
        """Rows of a rank's result where a capacity fixes their number, else -1."""
        if self.counts_of_earlier is not None:
            return int(self.counts_of_earlier[rank_idx, -2])
        capacity = self._capacity(rank_idx, "grow", "drop", "raise")
        if capacity is None or capacity.num_rows is None:
            return -1
        if capacity.on_overflow == "grow":
            return max(capacity.num_rows, self._num_required_rows(rank_idx))
        return capacity.num_rows

    @functools.cached_property
    def windows(self) -> list[Window]:
        """Contents of every row of every rank."""
        return [self.window(rank_idx) for rank_idx in range(self.num_ranks)]

    def window(self, rank_idx: int) -> Window:
        """Return the contents of every row of a rank.

        EXPERT_MAJOR: one row per kept choice, expert after expert, each begun at a multiple of the
        alignment. LOW_LATENCY: the same, each expert with all its places. RANK_MAJOR: one row per token
        that has a choice on the rank. Behind them what a capacity adds.
        """
        experts = self.experts_of(rank_idx)
        sizes = [len(self.kept[idx]) for idx in experts]
        rows: list[Origin | None] = []
        if self.layout is Layout.RANK_MAJOR:
            for source_idx, tokens in enumerate(self.choices):
                for token_idx, token in enumerate(tokens):
                    if self.goes_to(token, rank_idx):
                        rows.append(Origin(source_idx, token_idx, -1))
        else:
            for expert_idx, size in zip(experts, sizes, strict=True):
                rows += self.kept[expert_idx]
                rows += [None] * (self._padded(size) - size)
        rows += [None] * (self.num_fixed_rows(rank_idx) - len(rows))
        dropped = [len(self.asked[idx]) - len(self.kept[idx]) for idx in experts]
        offsets = [0, *itertools.accumulate(map(self._padded, sizes))]
        return Window(rows, sizes, dropped, offsets, self._num_required_rows(rank_idx))

    @functools.cached_property
    def places(self) -> list[list[list[Place | None]]]:
        """Position of the row of every choice: `places[rank][token][k]`, None for none."""
        places: list[list[list[Place | None]]] = [
            [[None] * len(token) for token in tokens] for tokens in self.choices
        ]
        for rank_idx, window in enumerate(self.windows):
            for row_idx, origin in enumerate(window.rows):
                if origin is None:
                    continue
                at_token = places[origin.source_idx][origin.token_idx]
                if origin.topk_pos >= 0:
                    at_token[origin.topk_pos] = Place(rank_idx, row_idx)
                    continue
                token = self.choices[origin.source_idx][origin.token_idx]
                for k, expert_idx in enumerate(token):
                    if expert_idx >= 0 and self.expert_rank[expert_idx] == rank_idx:
                        at_token[k] = Place(rank_idx, row_idx)
        return places

    def terms(self, rank_idx: int) -> list[list[Place | None]]:
        """The rows that are added for every token of a rank, in their order.

        By choice, with None for those without a row; RANK_MAJOR: one for every rank, ascending.
        """
        places = self.places[rank_idx]
        if self.layout is not Layout.RANK_MAJOR:
            return places
        return [[*sorted({place for place in token if place is not None})] for token in places]

    # The plan, as all backends hand it out.

    @functools.cached_property
    def counts(self) -> torch.Tensor:
        """Counts of every rank, see `PlanTensors.counts`."""
        matrix = []
        for source_idx, tokens in enumerate(self.choices):
            kept = [sum(each.source_idx == source_idx for each in origins) for origins in self.kept]
            to_rank = [
                sum(self.goes_to(token, rank_idx) for token in tokens)
                if any(kept[idx] for idx in self.experts_of(rank_idx))
                else 0
                for rank_idx in range(self.num_ranks)
            ]
            num_topk = self.topk_idx[source_idx].shape[1]
            matrix.append([*kept, *to_rank, self.num_fixed_rows(source_idx), num_topk])
        return torch.tensor(matrix, dtype=torch.int32)

    def slots(self, rank_idx: int) -> torch.Tensor:
        """Return the slots of a rank, see `PlanTensors.slots`."""
        num_slots = self.topk_idx[rank_idx].shape[1]
        if self.layout is Layout.RANK_MAJOR:
            num_slots = min(num_slots, self.num_ranks)
        rows = [
            [-1 if place is None else place.rank_idx << _SLOT_RANK_SHIFT | place.row_idx
             for place in token] + [-1] * (num_slots - len(token))
            for token in self.terms(rank_idx)
        ]  # fmt: skip
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, num_slots)

    def asked_rows(self, rank_idx: int) -> torch.Tensor:
        """Return the rows that a rank's result would have, see `PlanTensors.asked`."""
        sizes = [len(self.asked[idx]) for idx in self.experts_of(rank_idx)]
        return torch.tensor([self._num_required_rows(rank_idx), *sizes], dtype=torch.int64)

    @functools.cached_property
    def again(self) -> Dispatch:
        """A cached dispatch: to the same places, whatever is sent."""
        return self if self.is_cached else dataclasses.replace(self, counts_of_earlier=self.counts)

    def received(
        self,
        rank_idx: int,
        x: Sequence[torch.Tensor],
        topk_weights: Sequence[torch.Tensor] | None = None,
        *,
        x_sf: Sequence[torch.Tensor] | None = None,
        is_column_major: bool = False,
    ) -> Received:
        """Return the tensors that a rank receives. Rows, scale factors and weights are copied as bytes.

        Args:
            rank_idx: The receiver.
            x: `[T, hidden]` of every rank, quantized already where it is to be.
            topk_weights: `[T, K]` of every rank, or None.
            x_sf: `[T, num_scales]` of every rank, any strides, or None.
            is_column_major: Order of the scale factors on arrival.
        """
        window = self.windows[rank_idx]
        first = _starts([len(tokens) for tokens in self.choices])
        origin = [
            -1 if row is None else first[row.source_idx] + row.token_idx for row in window.rows
        ]
        is_filled = torch.tensor([row is not None for row in window.rows], dtype=torch.bool)
        factors = None if x_sf is None else _taken(x_sf, origin)
        return Received(
            x=_taken(x, origin),
            x_sf=None if factors is None else self._arranged(rank_idx, factors, is_column_major),
            topk_idx=self._local_topk_idx(rank_idx, window.rows),
            topk_weights=self._weights(rank_idx, window.rows, topk_weights),
            num_tokens_per_expert=torch.tensor(window.num_tokens_per_expert, dtype=torch.int64),
            num_dropped_per_expert=torch.tensor(window.num_dropped_per_expert, dtype=torch.int64),
            num_required_rows=window.num_required_rows,
            expert_offsets=torch.tensor(window.expert_offsets, dtype=torch.int32),
            is_defined=is_filled if self.layout is Layout.LOW_LATENCY else None,
        )

    def _local_topk_idx(self, rank_idx: int, rows: list[Origin | None]) -> torch.Tensor | None:
        """RANK_MAJOR: every row's choices as local experts of the rank, -1 for others and padding."""
        if self.layout is not Layout.RANK_MAJOR or self.is_cached:
            return None
        local = {expert: idx for idx, expert in enumerate(self.experts_of(rank_idx))}
        found = [[-1] * self.num_recv_topk for _ in rows]
        for row, origin in enumerate(rows):
            if origin is not None:
                for k, expert_idx in enumerate(self.choices[origin.source_idx][origin.token_idx]):
                    found[row][k] = local.get(expert_idx, -1)
        return torch.tensor(found, dtype=torch.int64).reshape(-1, self.num_recv_topk)

    def _weights(
        self, rank_idx: int, rows: list[Origin | None], topk_weights: Sequence[torch.Tensor] | None
    ) -> torch.Tensor | None:
        """One weight a row; RANK_MAJOR: of every choice on the rank, zero for the others."""
        if topk_weights is None:
            return None
        by_rank = self.layout is Layout.RANK_MAJOR
        num_columns = self.num_recv_topk if by_rank else 1
        first = _starts([weights.numel() for weights in topk_weights])
        elements = [[-1] * num_columns for _ in rows]
        for row, origin in enumerate(rows):
            if origin is None:
                continue
            token = self.choices[origin.source_idx][origin.token_idx]
            start = first[origin.source_idx] + origin.token_idx * len(token)
            if by_rank:
                for k, expert_idx in enumerate(token):
                    if expert_idx >= 0 and self.expert_rank[expert_idx] == rank_idx:
                        elements[row][k] = start + k
            else:
                elements[row][0] = start + origin.topk_pos
        columns = [weights.reshape(-1, 1) for weights in topk_weights]
        taken = _taken(columns, list(itertools.chain(*elements)))
        return taken.view(len(rows), num_columns) if by_rank else taken.view(-1)

    def _arranged(
        self, rank_idx: int, factors: torch.Tensor, is_column_major: bool
    ) -> torch.Tensor:
        """Arrived scale factors `[M, num_scales]` in the shape and the strides of `x_sf`."""
        num_rows, num_scales = factors.shape
        if self.layout is Layout.LOW_LATENCY:
            num_places = self.num_places_per_expert
            by_expert = factors.view(len(self.experts_of(rank_idx)), num_places, num_scales)
            return by_expert.mT.contiguous().mT if is_column_major else by_expert
        if not is_column_major:
            return factors
        stride = num_rows + -num_rows % (16 // factors.element_size())
        return factors.new_zeros(num_scales, stride)[:, :num_rows].T.copy_(factors)

    def sums(
        self,
        rank_idx: int,
        expert_out: Sequence[torch.Tensor],
        topk_weights: torch.Tensor | None = None,
        *,
        num_local_ranks: int | None = None,
        rank_reduction: bool = False,
    ) -> torch.Tensor:
        """The sums `[T, hidden]` that a rank gets from a combine.

        Args:
            rank_idx: The rank whose tokens these are.
            expert_out: `[M, hidden]` of every rank.
            topk_weights: `[T, K]` of the rank, which its rows are multiplied by, or None.
            num_local_ranks: Ranks of a node where rows are added on their node first; else None.
            rank_reduction: Rows are added on their rank first, and every such sum is rounded.
        """
        num_node_ranks = 1 if rank_reduction else num_local_ranks or self.num_ranks
        own_node = None if rank_reduction else rank_idx // num_node_ranks
        first = _starts([len(out) for out in expert_out])
        rows = torch.cat(list(expert_out))
        terms, dtype, hidden = self.terms(rank_idx), rows.dtype, rows.shape[1]
        sums = torch.zeros(len(terms), hidden, dtype=arithmetic.accumulator_dtype(dtype))
        columns = [some for _, some in arithmetic.chunks(1, hidden, rows.device)]
        with arithmetic.subnormals_kept():
            for token_idx, token in enumerate(terms):
                there = [(k, place) for k, place in enumerate(token) if place is not None]
                nodes = [place.rank_idx // num_node_ranks for _, place in there]
                index = [first[place.rank_idx] + place.row_idx for _, place in there]
                for some in columns:
                    added = list(arithmetic.widen(rows[:, some][index]))
                    if topk_weights is not None:
                        weights = topk_weights[token_idx]
                        added = [row * weights[k] for row, (k, _) in zip(added, there, strict=True)]
                    sums[token_idx, some] = sum_in_order(added, nodes, own_node, dtype)
        return arithmetic.round_to(sums, dtype)

    def pulled(self, rank_idx: int, row_weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """The weights `[T, K]` that come back with a combine, one for every choice of a rank.

        Args:
            rank_idx: The rank whose choices these are.
            row_weights: `[M]` (RANK_MAJOR: `[M, K]`) of every rank.
        """
        first = _starts([len(weights) for weights in row_weights])
        width = row_weights[0].shape[1] if self.layout is Layout.RANK_MAJOR else 1
        elements = [
            -1 if place is None
            else (first[place.rank_idx] + place.row_idx) * width + topk_pos % width
            for token in self.places[rank_idx]
            for topk_pos, place in enumerate(token)
        ]  # fmt: skip
        columns = [weights.reshape(-1, 1) for weights in row_weights]
        return _taken(columns, elements).view(self.topk_idx[rank_idx].shape)


def sum_in_order(
    terms: Sequence[torch.Tensor], nodes: Sequence[int], own_node: int | None, dtype: torch.dtype
) -> torch.Tensor | float:
    """The sum of one token: its rows, weighted already, added one after the other.

    Every addition is one IEEE operation in float32 (float64 for float64), from +0.0. Rows of a node are
    added among themselves first, then these sums in ascending order of nodes; the sum of another node
    than the token's own is rounded to the dtype of rows before, as it crosses.

    Args:
        terms: `[hidden]` each, of `arithmetic.accumulator_dtype`, in order.
        nodes: The node of every term.
        own_node: Node of the token; None where each sum is rounded.
        dtype: Dtype of the rows.

    Returns:
        `[hidden]`, not rounded yet; 0.0 where there is nothing to add.
    """
    total: torch.Tensor | float = 0.0
    for node in sorted(set(nodes)):
        partial = torch.zeros_like(terms[0])
        for term, its_node in zip(terms, nodes, strict=True):
            if its_node == node:
                partial += term
        if node != own_node:
            partial = arithmetic.widen(arithmetic.round_to(partial, dtype))
        total = total + partial
    return total


def quantize_rows(x: torch.Tensor, quantization: Quantization) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as they travel: e4m3 data `[T, hidden]` and row-major scale factors `[T, num_scales]`.

    Every block of a row is divided by a scale factor that makes its largest magnitude at most 448, the
    largest of e4m3. A block that holds a NaN or an infinity is NaN.

    Args:
        x: `[T, hidden]`, bfloat16, float16 or float32.
        quantization: Format and scale factors; their order is that of arrival.

    Raises:
        ValueError: There is no arithmetic for the format.
    """
    if not quantization.is_e4m3:
        raise ValueError(refusal("the definition", quantization))
    num_rows, hidden = x.shape
    block, num_blocks = quantization.format.block, quantization.num_blocks(hidden)
    padded = x.new_zeros(num_rows, num_blocks * block)
    padded[:, :hidden] = x.detach()
    blocks = padded.view(-1, block)
    are_exponents = quantization.scale_format is ScaleFormat.UE8M0
    data = torch.empty(blocks.shape, dtype=torch.uint8)
    factors = torch.empty(len(blocks), dtype=torch.uint8 if are_exponents else torch.float32)
    with arithmetic.subnormals_kept():
        for some, _ in arithmetic.chunks(len(blocks), block, x.device):
            data[some], factors[some] = _quantized(blocks[some], quantization)
    rows = data.view(num_rows, num_blocks * block)[:, :hidden].contiguous()
    sf = factors.view(num_rows, num_blocks)
    if are_exponents:
        # Four share an int32 where they are packed; what is over is zero.
        num_scales, dtype = quantization.num_scales(hidden), quantization.sf_dtype
        stored = sf.new_zeros(num_rows, num_scales * dtype.itemsize)
        stored[:, :num_blocks] = sf
        sf = stored.view(-1).view(dtype).view(num_rows, num_scales)
    return rows.view(torch.float8_e4m3fn), sf


def _quantized(
    blocks: torch.Tensor, quantization: Quantization
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes `[n, block]` and scale factors `[n]`, float32 or exponent bytes, of blocks `[n, block]`."""
    is_finite = blocks.isfinite().all(dim=1)
    values = torch.where(is_finite[:, None], blocks, 0).to(torch.float64)
    amax = values.abs().amax(dim=1).to(torch.float32)
    largest = torch.full_like(amax, 448.0)
    amax = amax.clamp(min=quantization.format.least_amax)
    factor = amax / largest
    bad: float = float("nan")
    if quantization.scale_format is ScaleFormat.FLOAT32:
        scaled = (values.to(torch.float32) * (largest / amax)[:, None]).to(torch.float64)
    else:
        # The least power of two that is not smaller than the factor, within those of float32.
        mantissa, above = torch.frexp(factor.to(torch.float64))
        exponent = torch.where(mantissa == 0.5, above - 1, above).to(torch.int64)
        exponent = torch.where(factor == 0, -127, exponent).clamp(-127, 127)
        scaled = values * _power_of_2(-exponent)[:, None]
        factor = _power_of_2(exponent).to(torch.float32)
        if quantization.scale_format is ScaleFormat.UE8M0:
            factor, bad = (exponent + 127).to(torch.uint8), 255
    codes = torch.where(is_finite[:, None], _e4m3(scaled), 0x7F)
    return codes.to(torch.uint8), torch.where(is_finite, factor, bad)


def _e4m3(values: torch.Tensor) -> torch.Tensor:
    """Codes of the nearest e4m3 values, halfway the even one, of finite float64; int64."""
    magnitude = values.abs().clamp(max=448.0)
    # Between two powers of two there are eight steps; below 2**-6 they get no smaller.
    exponent = torch.frexp(magnitude.clamp(min=2.0**-6)).exponent.to(torch.int64) - 1
    steps = torch.round(magnitude * _power_of_2(3 - exponent)).to(torch.int64)
    return 8 * (exponent + 6) + steps + torch.where(values.signbit(), 0x80, 0)


def _power_of_2(exponent: torch.Tensor) -> torch.Tensor:
    """2**e as float64, of int64 e."""
    return (exponent + 1023 << 52).view(torch.float64)


def _starts(sizes: Sequence[int]) -> list[int]:
    """Return the position at which each begins when they are laid end to end, then the end."""
    return [0, *itertools.accumulate(sizes)]


def _taken(parts: Sequence[torch.Tensor], places: Sequence[int]) -> torch.Tensor:
    """Row `places[i]` of all parts laid end to end, as bytes; zeros where it is -1."""
    num_columns, dtype = parts[0].shape[1], parts[0].dtype
    row_bytes = num_columns * dtype.itemsize
    # A copy first: what counts as contiguous may have strides that a view of bytes refuses.
    copies = [
        arithmetic.empty_rows(len(part), num_columns, dtype).copy_(part.detach()) for part in parts
    ]
    flat = [copy.view(-1).view(torch.uint8).view(len(copy), row_bytes) for copy in copies]
    # One more row, of zeros, is the last one, which -1 means.
    source = torch.cat([*flat, torch.zeros(1, row_bytes, dtype=torch.uint8)])
    taken = source[torch.tensor(places, dtype=torch.int64)]
    return taken.view(-1).view(dtype).view(len(places), num_columns)
