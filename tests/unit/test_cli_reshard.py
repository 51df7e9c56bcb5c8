"""`moe-comm reshard plan`: its formulas, and that what it prints adds up."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

from moe_comm.cli.app import app
from moe_comm.cli.options import parse_bytes
from moe_comm.cli.reshard.model_shapes import roster
from moe_comm.cli.reshard.published_shapes import PUBLISHED_SHAPES
from moe_comm.cli.reshard.shapes import ModelName
from moe_comm.cli.reshard.traffic import Links, Traffic, predict, schedule_steps
from moe_comm.resharding.describe.parallelism import Parallelism
from tests.helpers.explained_models import SHAPE
from tests.helpers.plots import cell_numbers

SIZES = (
    *("--model", "mixtral-8x7b", "--layers", "2", "--hidden", "64", "--heads", "8"),
    *("--query-groups", "4", "--experts", "8", "--expert-ffn", "32", "--vocab", "64"),
)


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["reshard", "plan", *arguments], catch_exceptions=False)


def plan(*arguments: str) -> dict[str, Any]:
    done = invoke(*SIZES, *arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def roster_bytes(parallelism: Parallelism, rank: int) -> int:
    return sum(
        math.prod(meta.shape) * meta.element_size for meta in roster(SHAPE, parallelism, rank)
    )


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("77", 77), ("4KiB", 4096), ("2 GiB", 2 << 30), ("1.5MB", 1_500_000)]
)
def test_sizes_have_units(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "4 kilo", "-1", "0", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"got '"):
        parse_bytes(text)


def test_every_published_model_has_a_name() -> None:
    assert set(get_args(ModelName)) == set(PUBLISHED_SHAPES)


def traffic(num_ranks: int, pairs: dict[tuple[int, int], int]) -> Traffic:
    made = Traffic(num_ranks)
    made.bytes_per_pair.update(pairs)
    return made


def test_predicted_time_is_of_the_rank_that_needs_longest() -> None:
    links = Links(ranks_per_node=2, intranode_gbs=100.0, internode_gbs=50.0, memory_gbs=1000.0)
    # Rank 1 receives 2 GB from its node and 5 GB from elsewhere, and sends 1 GB elsewhere.
    times = predict(
        traffic(4, {(0, 1): 2 * 10**9, (2, 1): 5 * 10**9, (1, 3): 10**9, (0, 0): 4 * 10**9}), links
    )
    assert times.intranode_ms == pytest.approx(20.0)
    assert times.internode_ms == pytest.approx(100.0)
    # Rank 0 reads and writes 4 GB, reads 2 GB more; through slots these are touched three times.
    assert times.memory_ms == pytest.approx(10.0)
    assert times.slots_memory_ms == pytest.approx(24.0)
    assert times.full_duplex_ms == times.slots_ms == pytest.approx(100.0)
    assert times.half_duplex_ms == pytest.approx(120.0)


def test_memory_decides_where_links_are_fast() -> None:
    links = Links(intranode_gbs=1e6, internode_gbs=1e6, memory_gbs=1.0)
    times = predict(traffic(2, {(0, 1): 10**9}), links)
    assert (times.full_duplex_ms, times.slots_ms) == (pytest.approx(1000), pytest.approx(3000))


def test_nothing_to_move_takes_no_time() -> None:
    assert predict(traffic(2, {}), Links()).half_duplex_ms == 0.0
    assert schedule_steps({}, 10) == {"full_duplex": 0, "half_duplex": 0}


def test_steps() -> None:
    ring = {(rank, (rank + 1) % 8): 100 for rank in range(8)}
    assert schedule_steps(ring, 100) == {"full_duplex": 1, "half_duplex": 2}
    all_to_all = {(src, dst): 100 for src in range(4) for dst in range(4)}
    assert schedule_steps(all_to_all, 100) == {"full_duplex": 3, "half_duplex": 6}
    assert schedule_steps({(0, 1): 101, (2, 1): 300}, 100) == {"full_duplex": 5, "half_duplex": 5}


@pytest.mark.parametrize("name", ["intranode_gbs", "internode_gbs", "memory_gbs"])
def test_links_without_bandwidth_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be > 0, got 0.0"):
        Links(**{name: 0.0})


@pytest.mark.parametrize("where", [(), ("--disjoint",)], ids=["collocated", "disjoint"])
def test_bytes_add_up(where: tuple[str, ...]) -> None:
    found = plan("--from", "ep4", "--to", "tp2.ep2", "--source-ranks", "4", *where)
    assert (found["from"], found["to"], found["disjoint"]) == ("ep4", "tp2.ep2", bool(where))
    assert found["are_pairs_verified"]
    offset = 4 if where else 0
    pairs = {
        (pair["source"], pair["destination"]): pair["bytes"] for pair in found["bytes_per_pair"]
    }
    for rank in range(4):
        written = sum(num_bytes for (_, dst), num_bytes in pairs.items() if dst == rank + offset)
        assert written == roster_bytes(Parallelism.parse("tp2.ep2", 4), rank)
    assert found["total_bytes"] == sum(pairs.values())
    assert found["local_bytes"] == sum(n for (src, dst), n in pairs.items() if src == dst)
    assert (found["local_bytes"] > 0) == (not where)
    sent, received = found["sent_bytes"], found["received_bytes"]
    assert (
        sum(sent.values()) == sum(received.values()) == found["total_bytes"] - found["local_bytes"]
    )
    assert set(received) <= {str(rank + offset) for rank in range(4)}
    assert found["num_pieces"] == sum(found["pieces_per_rank"].values()) > 4 * 30
    assert found["steps"]["full_duplex"] >= 1
    assert found["predicted"]["full_duplex_ms"] > 0.0


def test_a_wider_dtype_travels_as_the_narrower_one() -> None:
    arguments = (
        "--from",
        "ep2",
        "--to",
        "single",
        "--source-ranks",
        "2",
        "--destination-ranks",
        "1",
    )
    plain = plan(*arguments, "--disjoint")
    narrowed = plan(*arguments, "--disjoint", "--dtype", "fp32", "--destination-dtype", "bf16")
    assert narrowed["total_bytes"] == plain["total_bytes"]
    assert (narrowed["source_dtype"], narrowed["destination_dtype"]) == ("float32", "bfloat16")


def test_a_sample_says_that_it_is_one() -> None:
    arguments = ("--from", "ep4", "--to", "ep2", "--source-ranks", "4")
    found = plan(*arguments, "--sample", "2")
    assert found["planned_ranks"] == [0, 2]
    assert not found["is_whole"]
    assert found["sent_bytes"] is None
    assert found["total_bytes"] == 2 * roster_bytes(Parallelism.parse("ep2", 4), 0)
    done = invoke(*SIZES, *arguments, "--sample", "2")
    assert "2 of 4 destination ranks (0, 2)" in done.stdout


def test_tables_name_what_was_planned() -> None:
    done = invoke(*SIZES, "--from", "tp2.ep2", "--to", "tp4", "--source-ranks", "4")
    assert done.exit_code == 0
    assert (
        "2 layers, hidden 64, 8 experts of 32: tp2.ep2 on 4 ranks to tp4 on 4 ranks" in done.stdout
    )
    for text in ("written to destinations", "half-duplex, at least", "largest pairs", "same rank"):
        assert text in done.stdout
    assert "both ends of every piece agree" in done.stdout


def test_a_plot_shows_the_bytes_of_every_pair(tmp_path: Path) -> None:
    plot = tmp_path / "plan.svg"
    arguments = (*SIZES, "--from", "tp2", "--to", "tp4", "--source-ranks", "2")
    done = invoke(*arguments, "--destination-ranks", "4", "--plot", str(plot))
    assert done.exit_code == 0
    pairs = plan(*arguments, "--destination-ranks", "4")["bytes_per_pair"]
    assert len(pairs) < 2 * 4
    assert cell_numbers(plot) == [f"{pair['bytes'] / 1e6:.3g}" for pair in pairs]


def test_one_rank_lists_its_pieces() -> None:
    arguments = (*SIZES, "--from", "ep2", "--to", "tp2", "--source-ranks", "2", "--rank", "1")
    done = invoke(*arguments)
    assert done.stdout.startswith("rank 1 of 2: ")
    assert "embedding.word_embeddings.weight[32:64],[0:64] -> rank 1" in done.stdout
    document = json.loads(invoke(*arguments, "--json").stdout)
    received = [piece for piece in document["pieces"] if not piece["is_send"]]
    written = sum(2 * math.prod(b - a for a, b in piece["mine"]) for piece in received)
    assert written == roster_bytes(Parallelism.parse("tp2", 2), 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--from", "ep3", "--to", "ep2"), "does not divide 8 ranks"),
        (("--from", "zero3", "--to", "ep2"), "got 'zero3'"),
        (
            ("--from", "tp8", "--to", "ep2"),
            "num_query_groups must be a multiple of tp, got 4 and 8",
        ),
        (("--from", "ep2", "--to", "ep2", "--slot-bytes", "big"), "got 'big'"),
        (("--from", "ep2", "--to", "ep2", "--rank", "9"), r"in [0, 8), got 9"),
        (("--from", "ep2", "--to", "ep2", "--memory-gbs", "0"), "must be > 0, got 0.0"),
    ],
)
def test_bad_input_is_a_line_and_an_exit_code(arguments: tuple[str, ...], message: str) -> None:
    done = invoke(*SIZES, *arguments)
    assert done.exit_code == 1
    assert done.output.startswith("moe-comm reshard: ")
    assert message in done.output
