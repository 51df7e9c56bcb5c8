from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_comm.cli.bench import oracle, traffic
from moe_comm.cli.bench.case import BenchCase, make_routing_map, make_topk_idx, make_x
from moe_comm.cli.bench.roof import Roof
from moe_comm.cli.bench.run import (
    operation_bytes,
)
from moe_comm.ep.config import Layout, default_expert_rank
from moe_comm.ep.placement import Placement
from moe_comm.ep.replica_spec import choose_slots
from moe_comm.ep.routing_trace import save_routing_trace
from moe_comm.ep.spec import Dispatch, quantize_rows
from moe_comm.tensors.quantization import (
    FP8_BLOCK128,
    MXFP8,
    Quantization,
    QuantizationFormat,
    ScaleFormat,
)
from moe_comm.tensors.quantized import dequantize

SMALL = BenchCase(num_ranks=3, num_tokens=17, hidden=64, num_topk=3, num_experts=7, skew=0.7)
REPLICATED = dataclasses.replace(SMALL, placement=Placement([[5, 1, 0], [6, 5, 4], [-1, 2, 3]], 7))

CASES = [
    pytest.param(SMALL, id="expert-major"),
    pytest.param(dataclasses.replace(SMALL, expert_alignment=4), id="aligned"),
    pytest.param(dataclasses.replace(SMALL, layout=Layout.RANK_MAJOR), id="rank-major"),
    pytest.param(dataclasses.replace(SMALL, num_ranks=1), id="one-rank"),
    pytest.param(dataclasses.replace(SMALL, num_tokens=0), id="no-tokens"),
    pytest.param(dataclasses.replace(SMALL, dtype="fp64", hidden=6), id="fp64"),
    pytest.param(dataclasses.replace(SMALL, layout=Layout.LOW_LATENCY), id="low-latency"),
    pytest.param(REPLICATED, id="replicas"),
    pytest.param(
        dataclasses.replace(REPLICATED, layout=Layout.LOW_LATENCY, replica_rule="hash"),
        id="replicas-low-latency",
    ),
]


PACKED_COLUMNS = Quantization(
    format=QuantizationFormat.FP8_BLOCK128, scale_format=ScaleFormat.UE8M0, is_column_major=True
)


QUANTIZED_CASES = [
    pytest.param(dataclasses.replace(SMALL, hidden=160, quantization=FP8_BLOCK128), id="fp8"),
    pytest.param(
        dataclasses.replace(SMALL, hidden=640, quantization=PACKED_COLUMNS, expert_alignment=4),
        id="packed-columns",
    ),
    pytest.param(
        dataclasses.replace(SMALL, quantization=MXFP8, layout=Layout.LOW_LATENCY),
        id="mxfp8-low-latency",
    ),
]


def defined_rows(
    case: BenchCase,
    rank_idx: int,
    make_rows: Callable[[int], torch.Tensor] | None = None,
    unfilled: float = 77.0,
) -> torch.Tensor:
    """Received rows as the definition has them.

    Args:
        case: The case.
        rank_idx: The receiver.
        make_rows: `[num_tokens, n]` that every source rank sends; None for its x.
        unfilled: What stands in places of LOW_LATENCY that nobody filled.
    """
    is_low_latency = case.layout is Layout.LOW_LATENCY
    topk_idx = [make_topk_idx(case, source) for source in range(case.num_ranks)]
    expert_rank = default_expert_rank(case.num_experts, case.num_ranks).tolist()
    if case.placement is not None:
        topk_idx = choose_slots(topk_idx, case.placement, case.replica_rule, case.num_ranks)
        expert_rank = [*case.placement.slot_rank]
    dispatch = Dispatch(
        topk_idx=topk_idx,
        expert_rank=expert_rank,
        layout=case.layout,
        expert_alignment=case.expert_alignment,
        num_places_per_expert=case.num_ranks * case.num_tokens if is_low_latency else 0,
    )
    make_rows = make_rows or (lambda source: make_x(case, source))
    received = dispatch.received(rank_idx, [make_rows(rank) for rank in range(case.num_ranks)])
    if received.is_defined is not None:
        received.x[~received.is_defined] = torch.tensor(unfilled).to(received.x.dtype)
    return received.x


@pytest.mark.parametrize("case", CASES)
def test_oracle_accepts_exactly_the_right_rows(case: BenchCase) -> None:
    for rank_idx in range(case.num_ranks):
        rows = defined_rows(case, rank_idx)
        assert oracle.check_dispatch(case, rank_idx, rows) is None
        if rows.shape[0] == 0:
            continue
        filled = torch.cat([row for row, _, _ in oracle.source_rows(case, rank_idx)]).tolist()
        if case.layout != Layout.RANK_MAJOR:
            for source, (_, tokens, labels) in enumerate(oracle.source_rows(case, rank_idx)):
                assert (make_topk_idx(case, source)[tokens] == labels[:, None]).any(dim=1).all()
        for row_idx in {filled[0], filled[len(filled) // 2], filled[-1]}:
            wrong = rows.clone()
            wrong.view(torch.uint8)[row_idx, 3] ^= 1
            problem = oracle.check_dispatch(case, rank_idx, wrong)
            assert problem is not None
            assert f"row {row_idx} " in problem
        assert oracle.check_dispatch(case, rank_idx, rows[:-1]) is not None


@pytest.mark.parametrize("case", QUANTIZED_CASES)
def test_oracle_accepts_exactly_the_right_quantized_rows(case: BenchCase) -> None:
    quantization = case.quantization
    assert quantization is not None
    for rank_idx in range(case.num_ranks):
        parts = []
        for part_idx in (0, 1):

            def part_of(source: int, part_idx: int = part_idx) -> torch.Tensor:
                part = quantize_rows(make_x(case, source), quantization)[part_idx]
                # float8 has no torch.full and no comparison: bytes instead.
                return part.view(torch.uint8)

            parts.append(defined_rows(case, rank_idx, part_of))
        data = parts[0].view(torch.float8_e4m3fn)
        scales = parts[1].view(quantization.sf_dtype)
        if quantization.is_column_major:
            assert oracle.check_dispatch(case, rank_idx, data, scales) is not None
            scales = scales.T.contiguous().T
        assert oracle.check_dispatch(case, rank_idx, data, scales) is None
        row_idx = int(oracle.source_rows(case, rank_idx)[1][0][-1])
        for tensor in (data, scales):
            bits = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
            kept = bits[row_idx, -1].clone()
            bits[row_idx, -1] += 1
            assert f"row {row_idx} " in str(oracle.check_dispatch(case, rank_idx, data, scales))
            bits[row_idx, -1] = kept
        assert oracle.check_dispatch(case, rank_idx, data) is not None
        assert oracle.check_dispatch(case, rank_idx, data, scales.double()) is not None
        # Experts read what was dequantized, and so do the sums.
        out = torch.empty(data.shape, dtype=case.torch_dtype)
        oracle.run_experts(case, rank_idx, data, out, scales)
        first = oracle.source_rows(case, rank_idx)[0]
        row, token, label = (int(values[0]) for values in first)
        sent = quantize_rows(make_x(case, 0), quantization)
        x = dequantize(*sent, quantization, case.torch_dtype)[token]
        assert torch.equal(out[row], (x.float() * (1 + label % 61 / 64)).to(x.dtype))


def test_oracle_compares_weights_and_sums_of_hybrid_ep() -> None:
    case = dataclasses.replace(SMALL, num_experts=6, api="hybrid_ep", expert_alignment=4)
    expert_rank = default_expert_rank(6, 3).tolist()
    for rank_idx in range(case.num_ranks):
        rows = defined_rows(case, rank_idx)
        weights = torch.zeros(rows.shape[0])
        for source, (row_idx, token_idx, label) in enumerate(oracle.source_rows(case, rank_idx)):
            probs = make_routing_map(case, source)[1]
            weights[row_idx] = probs[token_idx, label]
        assert oracle.check_dispatch(case, rank_idx, rows, None, weights) is None
        assert oracle.check_dispatch(case, rank_idx, rows) is not None
        weights[(weights > 0).nonzero()[-1]] += 0.5
        assert oracle.check_dispatch(case, rank_idx, rows, None, weights) is not None
        routing_map, _ = make_routing_map(case, rank_idx)
        x = make_x(case, rank_idx).float()
        sums = torch.zeros_like(x)
        for expert in range(6):  # in ascending order, whatever the order of the choices
            out = (x * (1 + expert % 61 / 64)).to(case.torch_dtype).float()
            sums += torch.where(routing_map[:, expert, None], out, 0)
        assert oracle.check_combine(case, rank_idx, sums.to(case.torch_dtype)) is None
        native = dataclasses.replace(case, api="native", with_weights=True)
        assert torch.equal(make_topk_idx(native, rank_idx), make_topk_idx(case, rank_idx))
    assert expert_rank == [0, 0, 1, 1, 2, 2]


def test_a_map_cannot_say_a_choice_twice(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    save_routing_trace(path, torch.tensor([[[0, 0], [1, 0]]]), num_experts=2, num_ranks=1)
    case = BenchCase(num_ranks=1, num_tokens=2, hidden=8, num_topk=2, num_experts=2, routing=path)
    with pytest.raises(ValueError, match="twice"):
        make_routing_map(case, 0)


@pytest.mark.parametrize("case", CASES)
def test_oracle_accepts_exactly_the_right_sums(case: BenchCase) -> None:
    wide = torch.float64 if case.dtype == "fp64" else torch.float32
    expert_rank = default_expert_rank(case.num_experts, case.num_ranks).tolist()
    for rank_idx in range(case.num_ranks):
        x, topk_idx = make_x(case, rank_idx), make_topk_idx(case, rank_idx).tolist()
        sums = torch.empty_like(x)
        for token_idx, choices in enumerate(topk_idx):
            labels = choices
            if case.layout == Layout.RANK_MAJOR:
                labels = sorted({expert_rank[expert] for expert in choices})
            acc = torch.zeros(case.hidden, dtype=wide)
            for label in labels:
                scale = 1.0 + (label % 61) / 64.0
                acc += (x[token_idx].to(wide) * scale).to(x.dtype).to(wide)
            sums[token_idx] = acc.to(x.dtype)
        assert oracle.check_combine(case, rank_idx, sums) is None
        if case.num_tokens:
            sums.view(torch.uint8)[case.num_tokens - 1, 0] ^= 1
            problem = oracle.check_combine(case, rank_idx, sums)
            assert problem is not None
            assert f"token {case.num_tokens - 1} " in problem
            assert oracle.check_combine(case, rank_idx, sums, max_ulps=1) is None


def test_experts_mark_padding_with_nan() -> None:
    case = dataclasses.replace(SMALL, expert_alignment=8)
    rows = defined_rows(case, 0)
    out = torch.empty_like(rows)
    oracle.run_experts(case, 0, rows, out)
    is_padding = (rows == 0).all(dim=1)
    assert is_padding.any()
    assert torch.equal(out.isnan().all(dim=1), is_padding)


@pytest.mark.parametrize("case", CASES)
def test_traffic_counts_rows(case: BenchCase) -> None:
    num_sent = sum(traffic.rank_traffic(case, i).num_sent_rows for i in range(case.num_ranks))
    num_received = 0
    for rank_idx in range(case.num_ranks):
        of_rank = traffic.rank_traffic(case, rank_idx)
        num_received += of_rank.num_recv_rows
        rows = defined_rows(case, rank_idx)
        assert of_rank.num_window_rows == rows.shape[0]
        if case.layout != Layout.LOW_LATENCY:
            assert of_rank.num_recv_rows + of_rank.num_padding_rows == rows.shape[0]
    assert num_sent == num_received


def test_byte_formulas_of_the_balanced_case() -> None:
    case = BenchCase(num_ranks=2, num_tokens=64, hidden=128, num_topk=8, num_experts=16)
    row_bytes, num_tokens, k = 256, 2 * 64, 8
    assert operation_bytes(case) == {
        "dispatch": num_tokens * (k + 1) * row_bytes,
        "combine": num_tokens * (k + 1) * row_bytes,
        "combine_copy_in": num_tokens * (3 * k + 1) * row_bytes,
        "dispatch+combine": 2 * num_tokens * (k + 1) * row_bytes,
    }


def test_byte_formulas_of_quantized_rows() -> None:
    case = BenchCase(num_ranks=2, num_tokens=64, hidden=256, num_topk=8, num_experts=16)
    fp8 = operation_bytes(dataclasses.replace(case, quantization=FP8_BLOCK128))
    # Two float32 scale factors a row; or eight bytes.
    assert fp8["dispatch"] == 2 * 64 * (512 + 8 * (256 + 2 * 4))
    mxfp8 = operation_bytes(dataclasses.replace(case, quantization=MXFP8))
    assert mxfp8["dispatch"] == 2 * 64 * (512 + 8 * (256 + 8))
    assert fp8["combine"] == operation_bytes(case)["combine"]


class CountingKernels:
    """Counts the bytes that the roofs ask for."""

    def __init__(self) -> None:
        self.num_read = self.num_written = 0

    def roof_fan_out(self, src: Any, row_bytes: int, dst: list[Any]) -> None:
        assert src.size % row_bytes == 0
        assert all(copy.size == src.size for copy in dst)
        self.num_read += src.size
        self.num_written += src.size * len(dst)

    def roof_sum(self, src: list[Any], dst: Any) -> None:
        self.num_read += sum(stream.size for stream in src)
        self.num_written += dst.size

    def roof_copy(self, src: Any, dst: Any) -> None:
        self.num_read += src.size
        self.num_written += dst.size


@pytest.mark.parametrize("quantization", [None, FP8_BLOCK128, MXFP8])
def test_roof_moves_the_bytes_of_the_operation(quantization: Quantization | None) -> None:
    case = BenchCase(
        num_ranks=2,
        num_tokens=200,
        hidden=1024,
        num_topk=5,
        num_experts=16,
        quantization=quantization,
    )
    of_rank = traffic.rank_traffic(case, 0)
    rows = torch.empty(of_rank.num_window_rows, 1024, dtype=torch.bfloat16)
    sums = torch.empty(200, 1024, dtype=torch.bfloat16)
    kernels = CountingKernels()
    roof = Roof(kernels, of_rank, make_x(case, 0), rows, sums, rows)
    roof.dispatch()
    assert kernels.num_read + kernels.num_written == roof.dispatch_bytes
    assert kernels.num_read == of_rank.dispatch_read_bytes
    # Whole lines: at most one of them is written once too often or not at all.
    assert abs(kernels.num_written - of_rank.dispatch_written_bytes) <= 64
    kernels.num_read = kernels.num_written = 0
    roof.combine()
    assert kernels.num_read + kernels.num_written == roof.combine_bytes
    assert roof.combine_bytes == traffic.combine_bytes(of_rank)
