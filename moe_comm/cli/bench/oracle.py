"""Comparison of dispatch and combine with the definition (`moe_comm.ep.spec`), of whole results.

Each rank knows from the seed what all ranks put in, so nothing is gathered: peers' rows are drawn again,
one source rank at a time. Quantized rows are compared with those of `moe_comm.tensors.quantized`, which unit
tests hold to the definition.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import torch

from moe_comm.cli.bench.case import BenchCase, make_places, make_topk_weights, make_x
from moe_comm.ep.config import Layout
from moe_comm.ep.spec import Dispatch, sum_in_order
from moe_comm.tensors import arithmetic
from moe_comm.tensors.quantized import dequantize, quantize

NUM_TOKENS_PER_BLOCK = 128
NUM_SCALES = 61


def expert_scale(case: BenchCase, label_idx: torch.Tensor) -> torch.Tensor:
    """Return the number that an expert multiplies its rows by: another one for neighboring experts.

    Args:
        case: The case.
        label_idx: Expert ids (EXPERT_MAJOR) or rank indices (RANK_MAJOR).

    Returns:
        The shape of `label_idx`, exact in every dtype of the benchmark.
    """
    scale = 1.0 + (label_idx % NUM_SCALES).to(torch.float64) / 64.0
    return scale.to(arithmetic.accumulator_dtype(case.torch_dtype))


class _Rows(NamedTuple):
    """Rows of one rank by the definition; labels are expert ids (RANK_MAJOR: rank indices).

    Args:
        source: int64 `[M, 3]`, of every received row the source rank, token and choice, else -1.
        label: int64 `[M]`, what the row is for, -1 where there is none.
        added_label: int64 `[T, N]`, of the rows that are added for every token, in their order, else -1.
        added_rank: int64 `[T, N]`, the rank of each.
    """

    source: torch.Tensor
    label: torch.Tensor
    added_label: torch.Tensor
    added_rank: torch.Tensor


@functools.lru_cache(maxsize=8)
def _rows_of(case: BenchCase, rank_idx: int) -> _Rows:
    """The definition applied to the case; only tensors are kept of it, because it is large."""
    by_rank = case.layout is Layout.RANK_MAJOR
    num_places = case.num_ranks * case.num_tokens if case.layout is Layout.LOW_LATENCY else 0
    dispatch = Dispatch(
        topk_idx=[make_places(case, rank_idx) for rank_idx in range(case.num_ranks)],
        expert_rank=case.place_rank.tolist(),
        layout=case.layout,
        expert_alignment=case.expert_alignment,
        num_places_per_expert=num_places,
    )
    rows = dispatch.windows[rank_idx].rows
    # Replicas have the number of their expert, as they do the same.
    expert_of = case.place_expert.tolist()
    source = [(-1, -1, -1) if origin is None else tuple(origin) for origin in rows]
    label = [
        -1 if origin is None
        else rank_idx if by_rank
        else expert_of[dispatch.choices[origin.source_idx][origin.token_idx][origin.topk_pos]]
        for origin in rows
    ]  # fmt: skip
    added = [
        [(place.rank_idx if by_rank else expert_of[token[k]], place.rank_idx)
         for k, place in enumerate(places) if place is not None]
        for token, places in zip(dispatch.choices[rank_idx], dispatch.terms(rank_idx), strict=True)
    ]  # fmt: skip
    if case.api == "hybrid_ep":
        # A routing map has no order of choices; its sums go by expert.
        added = [sorted(token) for token in added]
    most = max(map(len, added), default=0)
    padded = [token + [(-1, -1)] * (most - len(token)) for token in added]
    added_label, added_rank = _int64(padded, (case.num_tokens, most, 2)).unbind(2)
    return _Rows(_int64(source, (-1, 3)), _int64(label, (-1,)), added_label, added_rank)


def _int64(values: object, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64).reshape(shape)


def source_rows(
    case: BenchCase, rank_idx: int
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Find the rows of every source rank on one receiver.

    Returns:
        Row in the receiver's window, token on the source, and label (expert id, or receiving rank
        for RANK_MAJOR) of every source rank; int64, one entry per row that moves.
    """
    rows = _rows_of(case, rank_idx)
    per_source = []
    for source_idx in range(case.num_ranks):
        row_idx = (rows.source[:, 0] == source_idx).nonzero().flatten()
        per_source.append((row_idx, rows.source[row_idx, 1], rows.label[row_idx]))
    return per_source


def num_window_rows(case: BenchCase, rank_idx: int) -> int:
    """Rows of the receiver's window, padding included."""
    return len(_rows_of(case, rank_idx).label)


def check_dispatch(
    case: BenchCase,
    rank_idx: int,
    x: torch.Tensor,
    x_sf: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
) -> str | None:
    """Compare every received row with the row that was sent, bit for bit.

    Args:
        case: The case.
        rank_idx: The receiver.
        x: `[M, hidden]`.
        x_sf: Scale factors of quantized rows, else None.
        topk_weights: float32 `[M]` where the case sends weights, else None.

    Returns:
        None, or what is wrong and where.
    """
    problem = _problem_with_tensors(case, rank_idx, x, x_sf, topk_weights)
    if problem is not None:
        return problem
    num_rows = x.shape[0]
    received = [_bits(x)]
    if x_sf is not None:
        received.append(_bits(x_sf.reshape(num_rows, -1)))
    if topk_weights is not None:
        received.append(_bits(topk_weights.view(num_rows, -1)))
    return _problem_with_rows(
        case, rank_idx, received, topk_weights is not None
    ) or _problem_with_padding(case, rank_idx, received)


def _problem_with_tensors(
    case: BenchCase,
    rank_idx: int,
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
) -> str | None:
    """Return a problem of presence, shape, dtype or strides of the tensors that came, or None."""
    num_rows = num_window_rows(case, rank_idx)
    quantization = case.quantization
    dtype = case.torch_dtype if quantization is None else quantization.data_dtype
    if x.shape != (num_rows, case.hidden) or x.dtype != dtype:
        return (
            f"rank {rank_idx} received {tuple(x.shape)} {x.dtype}, expected "
            f"{(num_rows, case.hidden)} {dtype}"
        )
    for name, tensor, is_expected in (
        ("scale factors", x_sf, quantization is not None),
        ("weights", topk_weights, case.sends_weights),
    ):
        if (tensor is not None) != is_expected:
            return f"rank {rank_idx} received {'no ' if is_expected else ''}{name}"
    if x_sf is None:
        return None
    assert quantization is not None
    if x_sf.dtype is not quantization.sf_dtype:
        return (
            f"rank {rank_idx} received scale factors {x_sf.dtype}, expected {quantization.sf_dtype}"
        )
    if quantization.is_column_major and num_rows > 1 and x_sf.stride(-2) != 1:
        return f"rank {rank_idx} received scale factors with strides {x_sf.stride()}"
    return None


def _problem_with_rows(
    case: BenchCase, rank_idx: int, received: list[torch.Tensor], has_weights: bool
) -> str | None:
    """Rows that are not those that were sent."""
    origins = _rows_of(case, rank_idx).source
    for src_rank_idx in range(case.num_ranks):
        row_idx = (origins[:, 0] == src_rank_idx).nonzero().flatten()
        token_idx, topk_pos = origins[row_idx, 1], origins[row_idx, 2]
        sent = [_bits(tensor) for tensor in _quantized(case, make_x(case, src_rank_idx))]
        if case.sends_weights:
            weights = make_topk_weights(case, src_rank_idx)[token_idx, topk_pos]
        for block in _blocks(row_idx.numel()):
            rows, tokens = row_idx[block], token_idx[block]
            expected = [tensor[tokens] for tensor in sent]
            if has_weights:
                expected.append(_bits(weights[block, None]))
            differs = torch.zeros(rows.numel(), dtype=torch.bool)
            for ours, theirs in zip(received, expected, strict=True):
                if ours.shape[1] != theirs.shape[1]:
                    return (
                        f"rank {rank_idx} received {ours.shape[1]} scale factors a row, expected "
                        f"{theirs.shape[1]}"
                    )
                differs |= (ours[rows] != theirs).any(dim=1)
            if bool(differs.any()):
                first = int(differs.nonzero()[0])
                return (
                    f"rank {rank_idx} row {int(rows[first])} differs from rank {src_rank_idx} token "
                    f"{int(tokens[first])}"
                )
    return None


def _problem_with_padding(
    case: BenchCase, rank_idx: int, received: list[torch.Tensor]
) -> str | None:
    """Rows that nobody sends and that are not zero."""
    if case.layout is Layout.LOW_LATENCY:
        return None  # what is not filled is undefined
    origins = _rows_of(case, rank_idx).source
    padding_row = (origins[:, 0] < 0).nonzero().flatten()
    for block in _blocks(padding_row.numel()):
        rows = padding_row[block]
        for tensor in received:
            is_dirty = (tensor[rows] != 0).any(dim=1)
            if bool(is_dirty.any()):
                first = int(is_dirty.nonzero()[0])
                return f"rank {rank_idx} padding row {int(rows[first])} is not zero"
    return None


def _quantized(case: BenchCase, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows as they are dispatched: themselves, or data and row-major scale factors."""
    if case.quantization is None:
        return (x,)
    return quantize(x, dataclasses.replace(case.quantization, is_column_major=False))


def run_experts(
    case: BenchCase,
    rank_idx: int,
    x: torch.Tensor,
    out: torch.Tensor,
    x_sf: torch.Tensor | None = None,
) -> None:
    """Stand in for the experts: multiply every row by its expert's scale, with one rounding.

    Padding rows become NaN, which shows in the sums if one is read.

    Args:
        case: The case.
        rank_idx: The receiver.
        x: `[M, hidden]`, dispatched rows.
        out: `[M, hidden]`, written.
        x_sf: Scale factors of quantized rows, which are dequantized first.
    """
    if x_sf is not None:
        assert case.quantization is not None
        x = dequantize(x, x_sf, case.quantization, case.torch_dtype)
    label = _rows_of(case, rank_idx).label
    scale = expert_scale(case, label.clamp(min=0))
    scale[label < 0] = torch.nan
    for block in _blocks(x.shape[0]):
        out[block] = (x[block].to(scale.dtype) * scale[block, None]).to(out.dtype)


def check_combine(
    case: BenchCase, rank_idx: int, y: torch.Tensor, *, max_ulps: int = 0
) -> str | None:
    """Compare every sum with rows added one by one in the order the package documents.

    Args:
        case: The case.
        rank_idx: The source.
        y: `[num_tokens, hidden]`, from rows that `run_experts` wrote.
        max_ulps: Steps of the row's dtype that a sum may be off; 0 compares bits.

    Returns:
        None, or what is wrong and where.
    """
    if y.shape != (case.num_tokens, case.hidden) or y.dtype != case.torch_dtype:
        return (
            f"rank {rank_idx} got sums {tuple(y.shape)} {y.dtype}, expected "
            f"{(case.num_tokens, case.hidden)} {case.torch_dtype}"
        )
    x = make_x(case, rank_idx)
    if case.quantization is not None:
        data, scales = _quantized(case, x)
        x = dequantize(data, scales, case.quantization, case.torch_dtype)
    for block in _blocks(case.num_tokens):
        y_rows = y[block]
        expected = _sums(case, rank_idx, x[block], block)
        is_off = _bits(y_rows) != _bits(expected)
        if max_ulps > 0:
            is_off &= (_ordered_bits(y_rows) - _ordered_bits(expected)).abs() > max_ulps
        is_wrong = is_off.any(dim=1)
        if bool(is_wrong.any()):
            first = int(is_wrong.nonzero()[0])
            element = int(is_off[first].nonzero()[0])
            return (
                f"rank {rank_idx} token {block.start + first} element {element} is "
                f"{float(y_rows[first, element])!r}, expected {float(expected[first, element])!r}"
            )
    return None


def _blocks(num_rows: int) -> list[slice]:
    """Few enough rows at a time that temporaries stay in the cache."""
    starts = range(0, num_rows, NUM_TOKENS_PER_BLOCK)
    return [slice(start, start + NUM_TOKENS_PER_BLOCK) for start in starts]


def _sums(case: BenchCase, rank_idx: int, x: torch.Tensor, tokens: slice) -> torch.Tensor:
    """Return the sums of what experts make of the rows `[n, hidden]` of some tokens."""
    rows = _rows_of(case, rank_idx)
    num_node_ranks = 1 if case.rank_reduction else case.reduced_local_ranks or case.num_ranks
    own_node = None if case.rank_reduction else rank_idx // num_node_ranks
    wide = x.to(arithmetic.accumulator_dtype(x.dtype))
    terms, nodes = [], []
    for label, rank in zip(rows.added_label[tokens].T, rows.added_rank[tokens].T, strict=True):
        scale = expert_scale(case, label.clamp(min=0))
        output = (wide * scale[:, None]).to(x.dtype).to(wide.dtype)
        node_of = torch.where(label < 0, -1, rank // num_node_ranks)
        for node in range(case.num_ranks // num_node_ranks):
            is_here = node_of == node
            if bool(is_here.any()):
                # Elsewhere +0.0, which changes no sum: none is ever -0.0.
                terms.append(
                    output if bool(is_here.all()) else torch.where(is_here[:, None], output, 0.0)
                )
                nodes.append(node)
    total = sum_in_order(terms, nodes, own_node, x.dtype)
    return torch.as_tensor(total).expand(x.shape).to(x.dtype)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    )


def _ordered_bits(x: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the floats, so that their difference counts representable steps."""
    bits = _bits(x).to(torch.int64)
    lowest = -(2 ** (8 * x.dtype.itemsize - 1))
    return torch.where(bits < 0, lowest - bits, bits)
