"""What every rank must get, computed without peers from what all ranks put in.

Rows are listed one by one, in Python, from the definition of the layouts. Nothing here is shared with a
backend but the sums of `moe_comm.arithmetic`, which unit tests hold to scalar arithmetic.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from moe_comm import arithmetic
from moe_comm.config import Capacity, Layout
from moe_comm.quantization import Quantization
from moe_comm.testing.cases import Case, RankInput, random_weights, rows_of_case, seeded
from moe_comm.testing.compare import flat_copy
from moe_comm.testing.quantized_oracle import quantized_rows

__all__ = ["Expected", "ExpectedSums", "ExpectedWindow", "Oracle"]

_MakeRows = Callable[[int, torch.Generator], torch.Tensor]


class Origin(NamedTuple):
    """Where a row comes from; `topk_pos` is -1 where one row stands for all choices of a rank."""

    source_idx: int
    token_idx: int
    topk_pos: int


@dataclasses.dataclass(frozen=True, eq=False)
class ExpectedWindow:
    """The rows one rank receives.

    Args:
        rows: Origin of every row, None where there is none.
        num_tokens_per_expert: Kept choices of every local expert.
        num_dropped_per_expert: The others.
        expert_offsets: Padded starts; the last is the padded total.
        num_required_rows: Rows without a capacity.
        fixed_rows: Rows that a capacity fixed, else -1.
    """

    rows: list[Origin | None]
    num_tokens_per_expert: list[int]
    num_dropped_per_expert: list[int]
    expert_offsets: list[int]
    num_required_rows: int
    fixed_rows: int = -1

    def with_fixed_rows(self, capacity: Capacity | None) -> ExpectedWindow:
        """With the tail that a capacity asks for."""
        if capacity is None or capacity.num_rows is None:
            return self
        fixed = capacity.num_rows
        if capacity.on_overflow == "grow":
            fixed = max(fixed, self.num_required_rows)
        tail: list[Origin | None] = [None] * (fixed - len(self.rows))
        return dataclasses.replace(self, rows=self.rows + tail, fixed_rows=fixed)


@dataclasses.dataclass(frozen=True, eq=False)
class Expected:
    """What a dispatch must give; as `DispatchOutput`.

    Args:
        is_defined: bool `[M]`, rows whose content is defined; None for all.
        x_sf: Row-major `[M, num_scales]`, whatever the order of the result.
        scale_shape: Of the result.
        scale_strides: Of the result.
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
    scale_shape: tuple[int, ...]
    scale_strides: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class ExpectedSums:
    """What a combine must give; as `CombineOutput`."""

    x: torch.Tensor | None
    topk_weights: torch.Tensor | None


@dataclasses.dataclass(frozen=True, eq=False)
class Oracle:
    """The definition of the operations applied to one set of inputs.

    Args:
        case: Its configuration.
        inputs: Of every rank.
    """

    case: Case
    inputs: Sequence[RankInput]

    @functools.cached_property
    def owner(self) -> list[int]:
        """The rank of every expert."""
        owners: list[int] = self.case.config.resolve_expert_rank(self.case.num_ranks).tolist()
        return owners

    @functools.cached_property
    def choices(self) -> list[list[list[int]]]:
        """`choices[rank][token][k]`."""
        return [rank.topk_idx.tolist() for rank in self.inputs]

    @functools.cached_property
    def asked(self) -> list[list[Origin]]:
        """Choices of every expert, in order of (source rank, token, k)."""
        asked: list[list[Origin]] = [[] for _ in self.owner]
        for source_idx, tokens in enumerate(self.choices):
            for token_idx, token in enumerate(tokens):
                for topk_pos, expert_idx in enumerate(token):
                    if expert_idx >= 0:
                        asked[expert_idx].append(Origin(source_idx, token_idx, topk_pos))
        return asked

    def experts_of(self, rank_idx: int) -> list[int]:
        """Global ids of a rank's experts."""
        return [idx for idx, owner in enumerate(self.owner) if owner == rank_idx]

    @functools.cached_property
    def windows(self) -> list[ExpectedWindow]:
        """Of every rank."""
        make = {
            Layout.EXPERT_MAJOR: self._expert_major,
            Layout.RANK_MAJOR: self._rank_major,
            Layout.LOW_LATENCY: self._low_latency,
        }[self.case.layout]
        return [
            make(rank_idx).with_fixed_rows(self.case.capacity_of(rank_idx))
            for rank_idx in range(self.case.num_ranks)
        ]

    @functools.cached_property
    def places(self) -> dict[tuple[Origin, int], int]:
        """(origin, receiving rank) to row of its window."""
        return {
            (origin, rank_idx): row
            for rank_idx, window in enumerate(self.windows)
            for row, origin in enumerate(window.rows)
            if origin is not None
        }

    @functools.cached_property
    def counts(self) -> torch.Tensor:
        """As `PlanTensors.counts`."""
        ranks = range(self.case.num_ranks)
        kept = [[0] * len(self.owner) for _ in ranks]
        by_choice = self.case.layout is Layout.RANK_MAJOR
        for expert_idx, origins in enumerate(self.asked):
            for origin in origins:
                is_kept = by_choice or (origin, self.owner[expert_idx]) in self.places
                kept[origin.source_idx][expert_idx] += is_kept
        matrix = []
        for source_idx, tokens in enumerate(self.choices):
            to_rank = [
                sum(any(e >= 0 and self.owner[e] == peer for e in token) for token in tokens)
                for peer in ranks
            ]
            for peer in ranks:
                if not any(kept[source_idx][e] for e in self.experts_of(peer)):
                    to_rank[peer] = 0
            num_topk = self.inputs[source_idx].topk_idx.shape[1]
            fixed = self.windows[source_idx].fixed_rows
            matrix.append([*kept[source_idx], *to_rank, fixed, num_topk])
        return torch.tensor(matrix, dtype=torch.int32)

    def slots(self, rank_idx: int) -> torch.Tensor:
        """As `PlanTensors.slots` of a rank."""
        num_topk = self.inputs[rank_idx].topk_idx.shape[1]
        by_choice = self.case.layout is not Layout.RANK_MAJOR
        num_slots = num_topk if by_choice else min(num_topk, self.case.num_ranks)
        rows = []
        for token_idx in range(len(self.inputs[rank_idx].topk_idx)):
            places = self._places_of_token(rank_idx, token_idx)
            slots = [-1 if place is None else place[0] << 48 | place[1] for place in places]
            rows.append(slots + [-1] * (num_slots - len(slots)))
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, num_slots)

    def dispatched(
        self,
        rank_idx: int,
        rows: Sequence[torch.Tensor],
        topk_weights: Sequence[torch.Tensor] | None,
        *,
        scales: Sequence[torch.Tensor] | None = None,
        quantization: Quantization | None = None,
        is_cached: bool = False,
    ) -> Expected:
        """What a rank receives when every rank r sends `rows[r]` and `topk_weights[r]`.

        Args:
            rank_idx: Of the receiver.
            rows: `[T, hidden]` of every rank.
            topk_weights: `[T, K]` of every rank, or None.
            scales: `[T, num_scales]` of every rank where rows are quantised already.
            quantization: How they are quantised, and the order of scale factors.
            is_cached: To the places of an earlier dispatch.
        """
        if quantization is not None and scales is None:
            pairs = [quantized_rows(x, quantization) for x in rows]
            rows, scales = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        window = self.windows[rank_idx]
        first_token = [0, *itertools.accumulate(len(rank.topk_idx) for rank in self.inputs)]
        origin = [
            -1 if row is None else first_token[row.source_idx] + row.token_idx
            for row in window.rows
        ]
        x_sf = None if scales is None else _taken(scales, origin)
        by_choice = self.case.layout is Layout.RANK_MAJOR
        is_defined = None
        if self.case.layout is Layout.LOW_LATENCY:
            is_defined = torch.tensor([row is not None for row in window.rows], dtype=torch.bool)
        dropped = torch.tensor(window.num_dropped_per_expert, dtype=torch.int64)
        shape, strides = self._form_of_scales(rank_idx, x_sf, quantization)
        return Expected(
            x=_taken(rows, origin),
            x_sf=x_sf,
            topk_idx=self._local_topk_idx(rank_idx) if by_choice and not is_cached else None,
            topk_weights=self._sent_weights(rank_idx, topk_weights),
            num_tokens_per_expert=torch.tensor(window.num_tokens_per_expert, dtype=torch.int64),
            num_dropped_per_expert=torch.zeros_like(dropped) if is_cached else dropped,
            num_required_rows=self._num_rows_without_tail(rank_idx)
            if is_cached
            else window.num_required_rows,
            expert_offsets=torch.tensor(window.expert_offsets, dtype=torch.int32),
            is_defined=is_defined,
            scale_shape=shape,
            scale_strides=strides,
        )

    def combined(
        self,
        rank_idx: int,
        expert_out: Sequence[torch.Tensor] | None,
        topk_weights: torch.Tensor | None,
        row_weights: Sequence[torch.Tensor] | None,
    ) -> ExpectedSums:
        """What a rank gets back from the expert outputs and row weights of every rank."""
        first_row = [0, *itertools.accumulate(len(window.rows) for window in self.windows)]
        tokens = range(len(self.inputs[rank_idx].topk_idx))
        num_topk = self.inputs[rank_idx].topk_idx.shape[1]
        sums = None
        if expert_out is not None:
            terms = [self._places_of_token(rank_idx, token_idx) for token_idx in tokens]
            width = max((len(token) for token in terms), default=0)
            positions = [
                [-1 if place is None else first_row[place[0]] + place[1] for place in token]
                + [-1] * (width - len(token))
                for token in terms
            ]
            rows = torch.cat(list(expert_out))
            shape = (len(tokens), width)
            places = torch.tensor(positions, dtype=torch.int64).reshape(shape)
            if self.case.node_reduction:
                assert self.case.num_local_ranks is not None  # nodes decide on bits
                nodes = [
                    [
                        -1 if place is None else place[0] // self.case.num_local_ranks
                        for place in token
                    ]
                    + [-1] * (width - len(token))
                    for token in terms
                ]
                sums = arithmetic.sum_rows_by_node(
                    rows,
                    places,
                    torch.tensor(nodes, dtype=torch.int64).reshape(shape),
                    rank_idx // self.case.num_local_ranks,
                    topk_weights,
                )
            else:
                sums = arithmetic.sum_rows(rows, places, topk_weights)
        pulled = None
        if row_weights is not None:
            width = row_weights[0].shape[1] if row_weights[0].dim() > 1 else 1
            elements = [
                -1 if place is None else (first_row[place[0]] + place[1]) * width + topk_pos % width
                for token in self._places_of_choices(rank_idx)
                for topk_pos, place in enumerate(token)
            ]
            pulled = _elements(row_weights, elements).reshape(len(tokens), num_topk)
        return ExpectedSums(x=sums, topk_weights=pulled)

    def rows(self, key: object, hidden: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Rows `[T, hidden]` for every rank to dispatch; in rank order independent of the ranks."""
        sizes = list(self.case.num_tokens)
        rows = rows_of_case(self.case, sum(sizes), hidden, dtype, seeded("rows", key))
        return [some.clone() for some in torch.split(rows, sizes)]

    def expert_outputs(self, key: object, hidden: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """`[M, hidden]` of every rank. By expert, whoever has it (not RANK_MAJOR); NaN elsewhere."""
        plain = dataclasses.replace(self.case, quantization=None)
        return self._windows_of(
            key, lambda num_rows, made: rows_of_case(plain, num_rows, hidden, dtype, made)
        )

    def row_weights(self, key: object, dtype: torch.dtype) -> list[torch.Tensor]:
        """`[M, K]` (RANK_MAJOR) or `[M]` of every rank, NaN where there is no row."""
        by_choice = self.case.layout is Layout.RANK_MAJOR
        more = (self.case.num_recv_topk,) if by_choice else ()
        special = self.case.has_special_values
        return self._windows_of(
            key,
            lambda num_rows, made: random_weights(
                (num_rows, *more), dtype, made, has_special_values=special
            ),
        )

    def _num_rows_without_tail(self, rank_idx: int) -> int:
        window = self.windows[rank_idx]
        if self.case.layout is Layout.RANK_MAJOR:
            return window.num_required_rows
        return window.expert_offsets[-1]

    def _expert_major(self, rank_idx: int) -> ExpectedWindow:
        capacity = self.case.capacity_of(rank_idx)
        drops = capacity is not None and capacity.on_overflow == "drop"
        alignment = self.case.expert_alignment
        rows: list[Origin | None] = []
        kept_sizes, dropped, offsets = [], [], [0]
        num_required = 0
        for expert_idx in self.experts_of(rank_idx):
            asked = self.asked[expert_idx]
            kept = asked
            if drops and capacity is not None and capacity.num_rows_per_expert is not None:
                kept = kept[: capacity.num_rows_per_expert]
            if drops and capacity is not None and capacity.num_rows is not None:
                kept = kept[: max(0, capacity.num_rows - len(rows))]
            rows += kept
            rows += [None] * (-len(rows) % alignment)
            kept_sizes.append(len(kept))
            dropped.append(len(asked) - len(kept))
            offsets.append(len(rows))
            num_required += len(asked) + -len(asked) % alignment
        return ExpectedWindow(rows, kept_sizes, dropped, offsets, num_required)

    def _rank_major(self, rank_idx: int) -> ExpectedWindow:
        rows: list[Origin | None] = [
            Origin(source_idx, token_idx, -1)
            for source_idx, tokens in enumerate(self.choices)
            for token_idx, token in enumerate(tokens)
            if any(e >= 0 and self.owner[e] == rank_idx for e in token)
        ]
        sizes = [len(self.asked[e]) for e in self.experts_of(rank_idx)]
        padded = [size + -size % self.case.expert_alignment for size in sizes]
        offsets = [0, *itertools.accumulate(padded)]
        return ExpectedWindow(rows, sizes, [0] * len(sizes), offsets, len(rows))

    def _low_latency(self, rank_idx: int) -> ExpectedWindow:
        num_places = self.case.num_ranks * self.case.num_max_tokens
        masked = {peer for ranks in self.case.masked_ranks or () for peer in ranks}
        rows: list[Origin | None] = []
        kept_sizes, dropped = [], []
        experts = self.experts_of(rank_idx)
        for expert_idx in experts:
            asked = self.asked[expert_idx]
            kept = [
                origin for origin in asked if not masked.intersection((origin.source_idx, rank_idx))
            ]
            assert len(kept) <= num_places, "the case has more choices of an expert than places"
            rows += kept
            rows += [None] * (num_places - len(kept))
            kept_sizes.append(len(kept))
            dropped.append(len(asked) - len(kept))
        offsets = [idx * num_places for idx in range(len(experts) + 1)]
        return ExpectedWindow(rows, kept_sizes, dropped, offsets, len(rows))

    @functools.cached_property
    def _known_places(self) -> dict[int, list[list[tuple[int, int] | None]]]:
        return {}

    def _places_of_choices(self, rank_idx: int) -> list[list[tuple[int, int] | None]]:
        """`[token][k]`: receiving rank and row of its window."""
        if rank_idx not in self._known_places:
            num_tokens, num_topk = self.inputs[rank_idx].topk_idx.shape
            self._known_places[rank_idx] = [
                [self._place_of_choice(rank_idx, token_idx, k) for k in range(num_topk)]
                for token_idx in range(num_tokens)
            ]
        return self._known_places[rank_idx]

    def _place_of_choice(
        self, rank_idx: int, token_idx: int, topk_pos: int
    ) -> tuple[int, int] | None:
        expert_idx = self.choices[rank_idx][token_idx][topk_pos]
        if expert_idx < 0:
            return None
        peer = self.owner[expert_idx]
        by_choice = self.case.layout is not Layout.RANK_MAJOR
        origin = Origin(rank_idx, token_idx, topk_pos if by_choice else -1)
        row = self.places.get((origin, peer))
        return None if row is None else (peer, row)

    def _places_of_token(self, rank_idx: int, token_idx: int) -> list[tuple[int, int] | None]:
        """In the order in which they are added: by choice, or RANK_MAJOR by rank."""
        places = self._places_of_choices(rank_idx)[token_idx]
        if self.case.layout is not Layout.RANK_MAJOR:
            return places
        distinct = sorted({place for place in places if place is not None})
        return list(distinct)

    def _local_topk_idx(self, rank_idx: int) -> torch.Tensor:
        local = {expert: idx for idx, expert in enumerate(self.experts_of(rank_idx))}
        rows = []
        for origin in self.windows[rank_idx].rows:
            token = [] if origin is None else self.choices[origin.source_idx][origin.token_idx]
            found = [local.get(expert_idx, -1) for expert_idx in token]
            rows.append(found + [-1] * (self.case.num_recv_topk - len(found)))
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, self.case.num_recv_topk)

    def _sent_weights(
        self, rank_idx: int, topk_weights: Sequence[torch.Tensor] | None
    ) -> torch.Tensor | None:
        if topk_weights is None:
            return None
        rows = self.windows[rank_idx].rows
        by_choice = self.case.layout is Layout.RANK_MAJOR
        num_columns = self.case.num_recv_topk if by_choice else 1
        first = [0, *itertools.accumulate(weights.numel() for weights in topk_weights)]
        elements = [[-1] * num_columns for _ in rows]
        for row, origin in enumerate(rows):
            if origin is None:
                continue
            num_topk = topk_weights[origin.source_idx].shape[1]
            place = first[origin.source_idx] + origin.token_idx * num_topk
            if not by_choice:
                elements[row][0] = place + origin.topk_pos
                continue
            for k, expert_idx in enumerate(self.choices[origin.source_idx][origin.token_idx]):
                if expert_idx >= 0 and self.owner[expert_idx] == rank_idx:
                    elements[row][k] = place + k
        sent = _elements(topk_weights, list(itertools.chain(*elements)))
        return sent.reshape(len(rows), num_columns) if by_choice else sent

    def _form_of_scales(
        self, rank_idx: int, x_sf: torch.Tensor | None, quantization: Quantization | None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if x_sf is None:
            return (), ()
        num_rows, num_scales = x_sf.shape
        is_column_major = quantization is not None and quantization.is_column_major
        if self.case.layout is Layout.LOW_LATENCY:
            num_places = self.case.num_ranks * self.case.num_max_tokens
            shape = (len(self.experts_of(rank_idx)), num_places, num_scales)
            per_expert = num_places * num_scales
            return shape, (per_expert, 1, num_places) if is_column_major else (
                per_expert, num_scales, 1,
            )  # fmt: skip
        per_16_bytes = 16 // x_sf.element_size()
        stride = num_rows + -num_rows % per_16_bytes
        return (num_rows, num_scales), (1, stride) if is_column_major else (num_scales, 1)

    def _windows_of(self, key: object, make: _MakeRows) -> list[torch.Tensor]:
        windows = []
        for rank_idx, window in enumerate(self.windows):
            num_rows = len(window.rows)
            if self.case.layout is Layout.RANK_MAJOR:
                filled = make(num_rows, seeded(key, "rank", rank_idx))
                windows.append(filled)
                continue
            rows = make(0, seeded(key))
            rows = rows.new_full((num_rows, *rows.shape[1:]), float("nan"))
            for expert_idx, start, size in zip(
                self.experts_of(rank_idx),
                window.expert_offsets[:-1],
                window.num_tokens_per_expert,
                strict=True,
            ):
                rows[start : start + size] = make(size, seeded(key, "expert", expert_idx))
            windows.append(rows)
        return windows


def _elements(parts: Sequence[torch.Tensor], places: list[int]) -> torch.Tensor:
    """Element `places[i]` of all parts end to end; zero where it is -1."""
    # One more element, zero, is the last one, which -1 means.
    source = torch.cat([*(part.reshape(-1) for part in parts), parts[0].new_zeros(1)])
    return source[torch.tensor(places, dtype=torch.int64)]


def _taken(rows: Sequence[torch.Tensor], origin: list[int]) -> torch.Tensor:
    """`[M, n]`: row `origin[i]` of all rows end to end, as bytes; zero where it is -1."""
    row_bytes = rows[0].shape[1] * rows[0].element_size()
    flat = [flat_copy(some).view(torch.uint8).view(len(some), row_bytes) for some in rows]
    # One more row, of zeros, is the last one, which -1 means.
    source = torch.cat([*flat, torch.zeros(1, row_bytes, dtype=torch.uint8)])
    taken = source[torch.tensor(origin, dtype=torch.int64)]
    return taken.view(-1).view(rows[0].dtype).view(len(origin), rows[0].shape[1])
