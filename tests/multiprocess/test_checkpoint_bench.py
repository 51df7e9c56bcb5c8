"""`moe-comm bench checkpoint` on small sizes: what it checks and what it reports, not how fast it is."""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from moe_comm.cli.app import app
from moe_comm.cli.bench.checkpoint import case as cases
from moe_comm.cli.bench.checkpoint.case import CheckpointCase, build_model, differences, fill_model
from moe_comm.cli.bench.checkpoint.run import file_system
from moe_comm.cli.bench.checkpoint.worker import FILES, CheckpointWorker
from moe_comm.cli.bench.processes import WorkerProcesses
from moe_comm.cli.bench.reshard.case import shape_of_bytes
from moe_comm.cli.bench.statistics import Interval
from moe_comm.resharding.describe.parallelism import Parallelism
from moe_comm.testing import RankContext, run_ranks

pytest.importorskip("moe_comm._host")

SHAPE = shape_of_bytes(4 << 20, torch.bfloat16)


def bench(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "checkpoint", *arguments], catch_exceptions=False)


@pytest.mark.full
def test_every_way_is_checked_and_timed(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    place = tmp_path / "place"
    place.mkdir()
    done = bench(
        *("--ranks", "2", "--bytes", "4MiB", "--peers", "dcp,dcp-state", "--repeats", "2"),
        *("--folder", str(place), "--json", str(out)),
    )
    assert done.exit_code == 0, done.output
    document = json.loads(out.read_text())
    assert document["environment"]["file_system"] == file_system(place)
    rows = {(row["op"], row["way"]): row for row in document["cases"]}
    loads = {op for op, _ in rows} - {"save"}
    assert loads in ({"load"}, {"load", "load cold"})
    assert set(rows) == {(op, way) for op in {"save", *loads} for way in ("files", "dcp-state")}
    for (_, way), row in rows.items():
        others = {"files", "dcp-state", "dcp"} - {way}
        assert (row["from"], row["to"], row["ranks"], row["check"]) == ("ep2", "tp2", 2, "ok")
        assert set(row["speedup"]) == set(row["peer_p50_us"]) == others
        assert row["bytes"] == row["model_bytes"] <= 4 << 20
        assert len(row["pairs"]) == 2
        assert row["fraction_of_roof"] > 0
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--peers", "tar"), "--peers must be of dcp,"),
        (("--from", "ep2"), "N * M = 4 ranks, got ep2"),
        (("--to", "tp2.pp2"), "N * M = 4 ranks, got tp2.pp2"),
        (("--to", "ep4", "--experts", "6"), "does not divide"),
        (
            ("--folder", "/nowhere"),
            "--folder /nowhere: expected a folder to write to, got nothing there",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_before_processes(
    arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("processes have been started")

    monkeypatch.setattr("moe_comm.cli.bench.processes.WorkerProcesses.__init__", start)
    done = bench("--bytes", "16MiB", *arguments)
    assert done.exit_code == 1
    assert said in " ".join(done.output.split())


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is not None, reason="transformers is installed"
)
def test_a_peer_that_is_not_installed_is_named(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = bench(
        *("--ranks", "1", "--bytes", "4MiB", "--peers", "transformers", "--repeats", "1"),
        *("--folder", str(tmp_path), "--json", str(out)),
    )
    assert done.exit_code == 0, done.output
    assert "transformers: not here: pip install transformers" in done.output
    assert json.loads(out.read_text())["missing_peers"] == {
        "transformers": "pip install transformers"
    }


class BadWorker(CheckpointWorker):
    """A rank whose save or load goes wrong in one bit."""

    def __init__(self, fault: str, made: CheckpointCase, folder: Path, rank_idx: int) -> None:
        super().__init__(made, folder, rank_idx)
        self.fault = fault

    def save(self, way: str) -> Interval:
        times = super().save(way)
        if self.fault == "save" and self.rank_idx == 0:
            path = min((self.case.folder / way).rglob("*.safetensors"))
            with path.open("r+b") as file:
                file.seek(-1, 2)
                last = file.read(1)[0]
                file.seek(-1, 2)
                file.write(bytes([last ^ 1]))
        self.barrier.wait()
        return times

    def load(self, way: str, is_cold: bool) -> Interval:
        times = super().load(way, is_cold)
        if self.fault == "load":
            weight = self.target.get_parameter("layers_1_experts_down").detach()
            weight.to_local().view(torch.int16)[0, 0, 0] ^= 1
        return times


@pytest.mark.parametrize("fault", ["load", "save", ""])
def test_a_wrong_bit_has_no_speed(tmp_path: Path, fault: str) -> None:
    layouts = (Parallelism.parse("ep2", 2), Parallelism.parse("tp2", 2))
    made = CheckpointCase(shape=SHAPE, source=layouts[0], target=layouts[1], folder=tmp_path)
    with WorkerProcesses(2, functools.partial(BadWorker, fault, made)) as ranks:
        found = ranks.call("check", FILES)
    said = [each for each in found if each is not None]
    assert bool(said) == bool(fault), said
    if fault == "load":
        assert len(said) == 2
        assert all("layers_1_experts_down: 1 elements are not" in each for each in said)


def test_elements_of_neighbors_and_of_tensors_differ() -> None:
    values = cases.known_values("up", (2, 64, 64), (0, 0, 0), (2, 64, 64))
    for dim in range(3):
        first, second = values.unfold(dim, 2, 1).unbind(-1)
        assert int((first == second).sum()) < first.numel() // 100
    part = cases.known_values("up", (2, 64, 64), (1, 8, 16), (1, 4, 5))
    assert torch.equal(part, values[1:2, 8:12, 16:21])
    assert not torch.equal(values, cases.known_values("down", (2, 64, 64), (0, 0, 0), (2, 64, 64)))


def one_rank(_: RankContext) -> tuple[list[str], list[str]]:
    single = Parallelism.parse("single", 1)
    made = CheckpointCase(shape=SHAPE, source=single, target=single, folder=Path("/"))
    model = build_model(made, single)
    before = differences(model)
    fill_model(model)
    return before, differences(model)


def test_a_model_that_was_not_loaded_differs() -> None:
    ((before, after),) = run_ranks(one_rank, 1)
    assert len(before) == 4 * SHAPE.num_layers + 1
    assert after == []
