"""`moe-comm reshard explain`: what of one model becomes what of another, on the meta device."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from moe_comm.cli.app import app
from tests.helpers import explained_models
from tests.helpers.command_line import output_of
from tests.helpers.explained_models import HIDDEN, INNER, NUM_EXPERTS, NUM_LAYERS

MODELS = explained_models.__name__


def invoke(source: str, destination: str, *arguments: str) -> Any:
    done = CliRunner().invoke(
        app,
        ["reshard", "explain", f"{MODELS}:{source}", f"{MODELS}:{destination}", *arguments],
        catch_exceptions=False,
        env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"},
    )
    assert not dist.is_initialized()
    return done


def document(*arguments: str, exit_code: int = 0) -> dict[str, Any]:
    done = invoke(*arguments, "--json")
    assert done.exit_code == exit_code, done.output
    return json.loads(done.stdout)


def pairs(found: dict[str, Any]) -> dict[tuple[int, int], int]:
    return {
        (each["source"], each["destination"]): each["bytes"] for each in found["bytes_per_pair"]
    }


def test_an_engine_is_explained_by_its_loader() -> None:
    ranks = ("--source-ranks", "2", "--destination-ranks", "2", "--disjoint")
    found = document("trainer", "Engine", *ranks)
    by_name = {each["name"]: each for each in found["tensors"]}
    assert by_name["layers.*.experts.*.up.weight"] == {
        "name": "layers.*.experts.*.up.weight",
        "shape": [INNER, HIDDEN],
        "num_tensors": NUM_LAYERS * NUM_EXPERTS,
        "source": [{"name": "layers.*.gate_up", "ranks": [0, 1]}],
        "destination": [{"name": "w13", "ranks": [2, 3]}],
    }
    assert set(by_name) == {
        "layers.*.norm.weight",
        *(f"layers.*.experts.*.{projection}.weight" for projection in ("gate", "up", "down")),
    }
    # Each engine's rank has half of all experts from either trainer, and the norms from one.
    moved = pairs(found)
    experts = NUM_LAYERS * NUM_EXPERTS * 3 * INNER * HIDDEN * 4
    norms = NUM_LAYERS * HIDDEN * 4
    assert moved.keys() == {(0, 2), (0, 3), (1, 2), (1, 3)}
    assert all(experts // 4 <= each <= experts // 4 + norms for each in moved.values())
    assert found["total_bytes"] == sum(moved.values()) == experts + 2 * norms
    assert found["missing"] == found["extra"] == []
    assert found["are_pairs_verified"]
    assert found["local_bytes"] == 0


def test_the_text_fits_80_columns() -> None:
    done = invoke("trainer", "Engine", "--source-ranks", "2", "--destination-ranks", "1")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == f"from {MODELS}:trainer, ranks 0-1"
    assert lines[1] == f"to   {MODELS}:Engine, rank 0"
    at = lines.index(f"layers.*.experts.*.down.weight ({HIDDEN}, {INNER}), 8 tensors")
    assert lines[at + 1 : at + 3] == ["  from layers.*.down, ranks 0-1", "  to   w2, rank 0"]
    assert "same rank" in done.stdout
    assert "both ends of every piece agree" in " ".join(done.stdout.split())


def test_what_is_missing_and_what_is_extra() -> None:
    ranks = ("--source-ranks", "2")
    done = invoke("trainer_without_downs", "trainer", *ranks)
    assert done.exit_code == 1
    line = f"missing: layers.0.experts.0.down.weight ({HIDDEN}, {INNER}): no source has it, and 7"
    text = " ".join(done.stdout.split())
    assert f"{line} more like layers.*.experts.*.down.weight" in text
    assert "largest pairs" not in text
    found = document("trainer_without_downs", "trainer", *ranks, exit_code=1)
    assert len(found["missing"]) == NUM_LAYERS * NUM_EXPERTS
    assert found["bytes_per_pair"] is None
    found = document("trainer", "trainer_without_downs", *ranks)
    assert found["missing"] == []
    assert len(found["extra"]) == NUM_LAYERS * NUM_EXPERTS
    assert found["total_bytes"] > 0
    done = invoke("trainer", "trainer_without_downs", *ranks, "--strict")
    assert done.exit_code == 1
    assert "extra: layers.0.experts.0.down.weight" in done.stdout


def test_shapes_that_differ_are_told_with_both() -> None:
    done = invoke("wider_trainer", "trainer", "--source-ranks", "2")
    assert done.exit_code == 1
    text = " ".join(done.stdout.split())
    assert "differs: layers.0.norm.weight ((12,), (10,)): shapes of source and destination" in text
    assert "differs: layers.0.experts.0.up.weight ((6, 12), (6, 10)): shapes of" in text
    assert "and 7 more like layers.*.experts.*.up.weight" in text
    assert "from layers.*.norm" not in text
    found = document("wider_trainer", "trainer", "--source-ranks", "2", exit_code=1)
    assert len(found["differing"]) == NUM_LAYERS * (1 + 3 * NUM_EXPERTS)
    assert found["differing"][0] == {
        "name": "layers.0.norm.weight",
        "source_shape": [12],
        "destination_shape": [10],
    }


def test_a_loader_may_be_the_source() -> None:
    found = document("Engine", "trainer", "--source-ranks", "1", "--destination-ranks", "2")
    assert found["missing"] == found["extra"] == []
    assert pairs(found).keys() == {(0, 0), (0, 1)}


def test_modules_by_layouts_move_what_their_plan_says() -> None:
    layouts = ("--from", "ep4", "--to", "tp2.ep2", "--source-ranks", "4", "--disjoint")
    found = document("shaped", "shaped", *layouts)
    sizes = ("--layers", "2", "--hidden", "64", "--heads", "8", "--query-groups", "4")
    sizes += ("--experts", "8", "--expert-ffn", "32", "--vocab", "64", "--model", "mixtral-8x7b")
    done = CliRunner().invoke(app, ["reshard", "plan", *sizes, *layouts, "--json"])
    planned = json.loads(done.stdout)
    for key in ("bytes_per_pair", "total_bytes", "num_pieces", "are_pairs_verified"):
        assert found[key] == planned[key]


@pytest.mark.parametrize("destination", ["replicated", "half"])
def test_tensors_over_meshes_are_placed_without_processes(destination: str) -> None:
    found = document("sharded", destination, "--source-ranks", "2", "--disjoint")
    expected = {(0, 2): 96, (0, 3): 96, (1, 2): 96, (1, 3): 96}
    if destination == "half":
        expected = {(0, 2): 96, (1, 3): 96}
    assert pairs(found) == expected


def test_one_rank_lists_its_pieces() -> None:
    done = invoke("sharded", "half", "--source-ranks", "2", "--disjoint", "--rank", "3")
    assert done.stdout.startswith("rank 3 of 4: 0 sends, 1 receives, 96 bytes")


@pytest.mark.parametrize(
    ("models", "arguments", "message"),
    [
        (("Engine", "Engine"), (), "are both described by a loader"),
        (("trainer_without_downs", "Engine"), (), "w2 of shape (2, 4, 10, 6): the loader fills it"),
        (("wider_trainer", "Engine"), (), "layers.0.norm.weight: the loader refuses it: "),
        (("shaped", "Engine"), (), "says nothing of its name and shape in a checkpoint"),
        (("nothing", "trainer"), (), "it made a str"),
        (("none", "trainer"), (), f"{MODELS} has no none"),
        (("__name__", "trainer"), (), "must be a function or class, it is a str"),
        (
            ("trainer", "trainer"),
            ("--from", "tp1"),
            "is called with (rank, number of ranks, tp1): too",
        ),
        (("trainer", "trainer"), ("--rank", "2"), "rank must be in [0, 1), got 2"),
        (("shaped", "shaped"), ("--from", "tp3"), "does not divide 1 ranks"),
    ],
)
def test_bad_input_is_a_line_and_an_exit_code(
    models: tuple[str, str], arguments: tuple[str, ...], message: str
) -> None:
    done = invoke(*models, *arguments)
    assert done.exit_code == 1
    assert done.output.lstrip().startswith("moe-comm reshard: ")
    assert message in done.output


def test_a_module_that_is_not_there() -> None:
    said = output_of("reshard", "explain", "no_such:thing", "no_such:thing", exit_code=1)
    assert said == "moe-comm reshard: no_such:thing: No module named 'no_such'\n"


def test_a_module_that_cannot_be_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torn_models.py").write_text("def maker(rank, num_ranks:\n")
    monkeypatch.syspath_prepend(tmp_path)
    said = output_of("reshard", "explain", "torn_models:maker", "no_such:thing", exit_code=1)
    assert said.startswith("moe-comm reshard: torn_models:maker: ")
    assert "(torn_models.py, line 1)" in said


@pytest.mark.parametrize(
    ("transformers", "message"),
    [
        (None, "a model by its configuration needs transformers"),
        (types.SimpleNamespace(__version__="4.57"), "transformers 4.57 has no DistributedConfig"),
    ],
)
def test_a_name_without_transformers(
    transformers: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    said = output_of("reshard", "explain", "Qwen/Qwen3-30B-A3B", f"{MODELS}:trainer", exit_code=1)
    assert f"moe-comm reshard: Qwen/Qwen3-30B-A3B: {message}" in said


def test_a_misspelt_class_is_not_looked_for_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bool]] = []

    def from_pretrained(text: str, local_files_only: bool = False) -> Any:
        asked.append((text, local_files_only))
        raise OSError(f"no {text}")

    fake: Any = types.ModuleType("transformers")
    fake.__dict__.update(
        __version__="5.24.0",
        AutoConfig=types.SimpleNamespace(from_pretrained=from_pretrained),
        DistributedConfig=dict,
        PreTrainedModel=torch.nn.Module,
        PretrainedConfig=dict,
        Qwen3MoeConfig=dict,
        Qwen3MoeForCausalLM=torch.nn.Module,
        logging=types.SimpleNamespace(set_verbosity_error=lambda: None),
    )
    monkeypatch.setitem(sys.modules, "transformers", fake)
    said = output_of("reshard", "explain", "Qwen3MoeConfg", f"{MODELS}:trainer", exit_code=1)
    assert "Qwen3MoeConfg: no folder here, and no class of a model or configuration" in said
    assert "near it: Qwen3MoeConfig)" in said
    assert asked == [("Qwen3MoeConfg", True)]
    output_of("reshard", "explain", "owner/moe", f"{MODELS}:trainer", exit_code=1)
    assert asked[1:] == [("owner/moe", True), ("owner/moe", False)]
