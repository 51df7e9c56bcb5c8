"""What dispatch and combine must give, computed by each rank alone from the seed, and compared whole.

Written apart from the package's own routing functions, so that a mistake there shows. Quantised rows are
compared with those of the reference (`moe_comm.quantized`). Peers' rows are drawn again from
the seed, one source rank at a time; nothing is gathered.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from moe_comm.cli.bench.case import BenchCase, make_topk_idx, make_topk_weights, make_x
from moe_comm.config import Layout, default_expert_rank
from moe_comm.quantized import dequantize, quantize

__all__ = ["check_combine", "check_dispatch", "expert_scale", "run_experts", "source_rows"]

NUM_TOKENS_PER_BLOCK = 128
NUM_SCALES = 61


def expert_scale(case: BenchCase, label_idx: torch.Tensor) -> torch.Tensor:
    """What an expert multiplies its rows by: another number for neighbouring experts.

    Args:
        case: The case.
        label_idx: Expert ids (EXPERT_MAJOR) or rank indices (RANK_MAJOR).

    Returns:
        The shape of `label_idx`, exact in every dtype of the benchmark.
    """
    scale = 1.0 + (label_idx % NUM_SCALES).to(torch.float64) / 64.0
    return scale.to(_accumulator(case.torch_dtype))


def source_rows(
    case: BenchCase, rank_idx: int
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Where the rows of every source rank lie on one receiver.

    Returns:
        For every source rank: row in the receiver's window, token on the source, and label (expert id,
        or receiving rank for RANK_MAJOR); int64, one entry per row that moves.
    """
    expert_rank = default_expert_rank(case.num_experts, case.num_ranks).to(torch.int64)
    per_source = []
    for src_rank_idx in range(case.num_ranks):
        topk_idx = make_topk_idx(case, src_rank_idx)
        is_here = (topk_idx >= 0) & (expert_rank[topk_idx.clamp(min=0)] == rank_idx)
        if case.layout == Layout.RANK_MAJOR:
            token_idx = is_here.any(dim=1).nonzero().flatten()
            label = torch.full_like(token_idx, rank_idx)
        else:
            token_idx, topk_pos = is_here.nonzero(as_tuple=True)
            label = topk_idx[token_idx, topk_pos]
            # Tokens ascend, choices ascend within a token; a stable sort keeps that per expert.
            order = torch.sort(label, stable=True).indices
            token_idx, label = token_idx[order], label[order]
        per_source.append((token_idx, label))

    if case.layout == Layout.RANK_MAJOR:
        starts = [0]
        for token_idx, _ in per_source:
            starts.append(starts[-1] + token_idx.numel())
        return [
            (torch.arange(start, start + token_idx.numel()), token_idx, label)
            for start, (token_idx, label) in zip(starts, per_source, strict=False)
        ]

    counts = torch.stack(
        [torch.bincount(label, minlength=case.num_experts) for _, label in per_source]
    )
    padded = -(-counts.sum(dim=0) // case.expert_alignment) * case.expert_alignment
    if case.layout is Layout.LOW_LATENCY:
        # Every local expert owns as many rows, whatever was routed to it.
        padded = (expert_rank == rank_idx).to(torch.int64) * case.num_ranks * case.num_tokens
    next_row = padded.cumsum(0) - padded
    rows = []
    for src_rank_idx, (token_idx, label) in enumerate(per_source):
        sent = counts[src_rank_idx]
        first_of_expert = sent.cumsum(0) - sent
        position = torch.arange(label.numel()) - first_of_expert[label]
        rows.append((next_row[label] + position, token_idx, label))
        next_row = next_row + sent
    return rows


def num_window_rows(case: BenchCase, rank_idx: int) -> int:
    """Rows of the receiver's window, padding included."""
    if case.layout is Layout.LOW_LATENCY:
        is_local = default_expert_rank(case.num_experts, case.num_ranks) == rank_idx
        return int(is_local.sum()) * case.num_ranks * case.num_tokens
    rows = source_rows(case, rank_idx)
    num_rows = sum(row.numel() for row, _, _ in rows)
    if case.layout == Layout.RANK_MAJOR or num_rows == 0:
        return num_rows
    label = torch.cat([label for _, _, label in rows])
    counts = torch.bincount(label, minlength=case.num_experts)
    return int((-(-counts // case.expert_alignment) * case.expert_alignment).sum())


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
        x_sf: Scale factors of quantised rows, else None.
        topk_weights: float32 `[M]` where the case sends weights, else None.

    Returns:
        None, or what is wrong and where.
    """
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
    received = [_bits(x)]
    if x_sf is not None:
        assert quantization is not None
        if x_sf.dtype is not quantization.sf_dtype:
            return (
                f"rank {rank_idx} received scale factors {x_sf.dtype}, expected "
                f"{quantization.sf_dtype}"
            )
        if quantization.is_column_major and num_rows > 1 and x_sf.stride(-2) != 1:
            return f"rank {rank_idx} received scale factors with strides {x_sf.stride()}"
        received.append(_bits(x_sf.reshape(num_rows, -1)))
    if topk_weights is not None:
        received.append(_bits(topk_weights.view(num_rows, -1)))
    is_padding = torch.ones(num_rows, dtype=torch.bool)
    for src_rank_idx, (row_idx, token_idx, label) in enumerate(source_rows(case, rank_idx)):
        is_padding[row_idx] = False
        sent = [_bits(tensor) for tensor in _quantized(case, make_x(case, src_rank_idx))]
        weights = _weights_of_rows(case, src_rank_idx, token_idx, label)
        for block in _blocks(row_idx.numel()):
            rows, tokens = row_idx[block], token_idx[block]
            expected = [tensor[tokens] for tensor in sent]
            if topk_weights is not None:
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
    if case.layout is Layout.LOW_LATENCY:
        return None  # what is not filled is undefined
    padding_row = is_padding.nonzero().flatten()
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


def _weights_of_rows(
    case: BenchCase, src_rank_idx: int, token_idx: torch.Tensor, label: torch.Tensor
) -> torch.Tensor:
    """float32, one per row: the weight that the token gives the expert `label`."""
    if not case.sends_weights:
        return torch.empty(token_idx.numel())
    is_choice = make_topk_idx(case, src_rank_idx)[token_idx] == label[:, None]
    topk_pos = is_choice.to(torch.uint8).argmax(dim=1)
    return make_topk_weights(case, src_rank_idx)[token_idx, topk_pos]


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
        x_sf: Scale factors of quantised rows, which are dequantised first.
    """
    if x_sf is not None:
        assert case.quantization is not None
        x = dequantize(x, x_sf, case.quantization, case.torch_dtype)
    label = torch.full((x.shape[0],), -1, dtype=torch.int64)
    for row_idx, _, row_label in source_rows(case, rank_idx):
        label[row_idx] = row_label
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
    label = _labels_in_order(case, rank_idx)
    x = make_x(case, rank_idx)
    if case.quantization is not None:
        data, scales = _quantized(case, x)
        x = dequantize(data, scales, case.quantization, case.torch_dtype)
    for block in _blocks(case.num_tokens):
        y_rows = y[block]
        add = _sum_in_order
        if case.reduced_local_ranks is not None:
            add = functools.partial(_sum_by_node, rank_idx=rank_idx)
        expected = add(case, x[block], label[block])
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


def _sum_in_order(case: BenchCase, x_rows: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return _accumulated(case, x_rows, label).to(case.torch_dtype)


def _sum_by_node(
    case: BenchCase, x_rows: torch.Tensor, label: torch.Tensor, rank_idx: int
) -> torch.Tensor:
    """With `EpConfig.node_reduction`, for tokens of a rank; docs/nodes.md."""
    num_local_ranks = case.reduced_local_ranks
    assert num_local_ranks is not None
    rank = label
    if case.layout is not Layout.RANK_MAJOR:
        expert_rank = default_expert_rank(case.num_experts, case.num_ranks).to(torch.int64)
        rank = expert_rank[label.clamp(min=0)]
    node = rank.div(num_local_ranks, rounding_mode="floor")
    acc = torch.zeros_like(x_rows, dtype=_accumulator(case.torch_dtype))
    for node_idx in range(case.num_ranks // num_local_ranks):
        partial = _accumulated(case, x_rows, torch.where(node == node_idx, label, -1))
        if node_idx != rank_idx // num_local_ranks:
            partial = partial.to(case.torch_dtype).to(partial.dtype)
        acc = acc + partial
    return acc.to(case.torch_dtype)


def _accumulated(case: BenchCase, x_rows: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Rows of one token after the other, not rounded at the end."""
    accumulator = _accumulator(case.torch_dtype)
    wide_x = x_rows.to(accumulator)
    acc = torch.zeros_like(wide_x)
    for position in range(label.shape[1]):
        scale = expert_scale(case, label[:, position].clamp(min=0))
        row = (wide_x * scale[:, None]).to(case.torch_dtype).to(accumulator)
        contributes = (label[:, position] >= 0)[:, None]
        acc = torch.where(contributes, acc + row, acc)
    return acc


def _labels_in_order(case: BenchCase, rank_idx: int) -> torch.Tensor:
    """Labels of the rows of every token in the order they are added, -1 for none."""
    topk_idx = make_topk_idx(case, rank_idx)
    if case.api == "hybrid_ep":
        # A routing map has no order of choices; its sums go by expert.
        return topk_idx.sort(dim=1).values
    if case.layout != Layout.RANK_MAJOR:
        return topk_idx
    expert_rank = default_expert_rank(case.num_experts, case.num_ranks).to(torch.int64)
    dst_rank = torch.where(topk_idx >= 0, expert_rank[topk_idx.clamp(min=0)], -1)
    rank = torch.arange(case.num_ranks)
    goes_to = (dst_rank[:, :, None] == rank).any(dim=1)
    return torch.where(goes_to, rank, -1)


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    )


def _ordered_bits(x: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the floats, so that their difference counts representable steps."""
    bits = _bits(x).to(torch.int64)
    lowest = -(2 ** (8 * x.dtype.itemsize - 1))
    return torch.where(bits < 0, lowest - bits, bits)
