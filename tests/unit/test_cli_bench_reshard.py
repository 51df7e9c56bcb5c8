"""`moe-comm bench reshard` without processes: cases, bytes, options, tables."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_comm.cli.bench.reshard.case import ReshardCase, ReshardOptions, shape_of_bytes
from moe_comm.cli.bench.reshard.report import (
    reshard_table,
    reshard_title,
    write_reshard_plot,
)
from moe_comm.cli.bench.reshard.run import ReshardRow
from moe_comm.cli.bench.result import to_json
from moe_comm.cli.bench_reshard_command import _layouts
from moe_comm.cli.command_rules import wide_console
from moe_comm.cli.reshard.model_shapes import MoEShape, TensorList, roster
from moe_comm.cli.reshard.world import PlanningCase
from moe_comm.resharding.describe.parallelism import Parallelism
from tests.helpers.command_line import output_of

SHAPE = shape_of_bytes(8 << 20, torch.bfloat16)
BF16 = (torch.bfloat16, torch.bfloat16)


def case_of(shape: MoEShape | TensorList, **changes: Any) -> ReshardCase:
    layouts = PlanningCase(
        shape=shape,
        source=Parallelism.parse("ep4", 4),
        destination=Parallelism.parse(changes.pop("to", "single"), 4),
        **changes,
    )
    return ReshardCase(layouts=layouts)


ROW = ReshardRow(
    case=case_of(SHAPE, to="tp4"),
    p50_us=2000.0,
    p95_us=3000.0,
    op_us=2500.0,
    bytes=50_000_000,
    gbs=20.0,
    outside_copies_us=450.0,
    memory_bytes={"heap": 4_000_000, "private": 1000, "second_heap": 0, "second_private": 0},
    num_tensors=620,
    roof_gbs=25.0,
    fraction_of_roof=0.8,
    speedup={"gloo": 7.25},
    peer_p50_us={"gloo": 15000.0},
    num_pairs=9,
    num_dropped=2,
    roof_state="slow",
    extra={"roof_bytes": 7},
)


@pytest.mark.parametrize("num_bytes", [4 << 20, 50 << 20, 1 << 30, 2 << 30, 3 << 30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_model_has_about_the_bytes_that_were_asked_for(
    num_bytes: int, dtype: torch.dtype
) -> None:
    if num_bytes == 4 << 20 and dtype is torch.float32:
        with pytest.raises(ValueError, match=r"at least 76[0-9]+ bytes, got 4194304"):
            shape_of_bytes(num_bytes, dtype)
        return
    shape = shape_of_bytes(num_bytes, dtype)
    assert 0.8 * num_bytes < shape.num_bytes(dtype) <= num_bytes
    for layout in ("tp4", "tp2.ep2", "ep4", "tp8.ep8.etp1", "pp4.ep2"):
        shape.check(Parallelism.parse(layout, 8))


def test_bytes_are_those_of_destinations_read_and_written() -> None:
    written = sum(
        math.prod(meta.shape)
        for rank in range(4)
        for meta in roster(SHAPE, Parallelism.parse("tp4", 4), rank)
    )
    assert case_of(SHAPE, to="tp4").num_bytes() == written * (2 + 2)
    wide = case_of(SHAPE, to="tp4", source_dtype=torch.float32)
    assert wide.num_bytes() == written * (4 + 2)
    tensors = TensorList(num_tensors=40, size=16)
    assert case_of(tensors).num_elements() == 4 * 40 * 16
    assert case_of(tensors, is_disjoint=True).num_ranks == 8


def test_layouts_have_defaults_for_models_and_for_lists() -> None:
    layouts = _layouts((4, None, None), None, None, SHAPE, BF16)
    assert (str(layouts.source), str(layouts.destination)) == ("tp2.ep2", "tp4")
    assert not layouts.is_disjoint
    tensors = TensorList(num_tensors=40, size=16)
    layouts = _layouts((4, None, None), None, None, tensors, BF16)
    assert (str(layouts.source), str(layouts.destination)) == ("ep4", "single")
    layouts = _layouts((4, 2, 4), "ep2", "tp4", SHAPE, BF16)
    assert (layouts.is_disjoint, layouts.num_ranks) == (True, 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--source-ranks", "2"), "belong together, got 2 and None"),
        (("--bytes", "1KiB"), "at least 3820032 bytes, got 1024"),
        (("--tensors", "8", "--tensor-bytes", "3"), "whole elements of 2 bytes, got 3"),
        (("--tensors", "7"), "num_tensors must be a multiple of ep, got 7 and 4"),
        (("--from", "ep3"), "does not divide 4 ranks"),
        (
            ("--peers", "nccl"),
            "peers must be of gloo, full-tensors, checksum, delta, delta-mask, got nccl",
        ),
    ],
)
def test_bad_input_is_a_line_and_an_exit_code(arguments: tuple[str, ...], message: str) -> None:
    said = output_of("bench", "reshard", *arguments, exit_code=1)
    assert said.startswith("moe-comm bench: ")
    assert message in said


def test_cases_and_options_reject_what_they_do_not_know() -> None:
    with pytest.raises(ValueError, match="heap, shared, outside, got 'disk'"):
        dataclasses.replace(ROW.case, memory="disk")
    with pytest.raises(ValueError, match="got 'pigeon'"):
        dataclasses.replace(ROW.case, transport="pigeon")
    with pytest.raises(ValueError, match="num_repeats must be >= 1, got 0"):
        ReshardOptions(num_repeats=0)


def test_table_and_document_have_every_number(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    outside = dataclasses.replace(
        ROW,
        case=dataclasses.replace(ROW.case, memory="outside"),
        outside_copies_us=None,
        roof_gbs=None,
        fraction_of_roof=None,
        speedup={},
    )
    wide_console().print(reshard_table([ROW, outside]))
    said = capsys.readouterr().out
    assert "ep4 on 4 ranks to tp4 on 4, collocated, 4 layers, hidden 128" in said
    for text in ("2.00", "3.00", "50.0", "25.0", "0.800", "9 (2)", "0.45", "slow", "7.2x", "ok"):
        assert text in said
    assert "620 tensors" in said
    assert "first refit 4.0 MB of the heap" in said
    document = to_json({"cores": 2}, [ROW, outside], {})
    first = document["cases"][0]
    assert first["op"] == "reshard"
    assert (first["from"], first["to"], first["destination"]) == ("ep4", "tp4", "heap")
    assert (first["fraction_of_roof"], first["speedup"]["gloo"], first["roof_bytes"]) == (
        0.8,
        7.25,
        7,
    )
    assert document["cases"][1]["roof_gbs"] is None

    pytest.importorskip("matplotlib")
    environment = {"transparent_huge_pages": {"shmem_enabled": "never"}, "load_average": 0.0}
    names = ("version", "commit", "cpu", "cores", "isa", "kernel", "torch")
    write_reshard_plot(
        tmp_path / "plot.png", [ROW, outside], environment | dict.fromkeys(names, "x")
    )
    assert (tmp_path / "plot.png").stat().st_size > 0


def test_title_says_what_differs() -> None:
    case = case_of(TensorList(num_tensors=40, size=16), source_dtype=torch.float32)
    assert "40 tensors of 16 elements, float32 to bfloat16" in reshard_title(case)


@pytest.mark.parametrize(
    ("layouts", "side"), [(("tp2", "single"), "source"), (("ep2", "tp2"), "destination")]
)
def test_full_tensors_need_whole_ones(layouts: tuple[str, str], side: str) -> None:
    options = ("--ranks", 2, "--from", layouts[0], "--to", layouts[1], "--peers", "full-tensors")
    said = output_of("bench", "reshard", *options, exit_code=1)
    assert f"got tp = 2 and expert_tp = 2 in the {side}" in said
