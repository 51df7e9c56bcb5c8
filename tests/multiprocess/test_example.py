"""`examples/train_moe.py`: its claim on a few steps, its trace file, and what it says when bits differ."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from moe_comm.ep.routing_trace import load_routing_trace

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_moe.py"


@pytest.fixture(scope="module")
def train_moe() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("train_moe", EXAMPLE)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_moe"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_losses_on_several_ranks_and_on_one_are_identical(tmp_path: Path, num_ranks: int) -> None:
    trace_path = tmp_path / "trace.npz"
    options = {"--ranks": num_ranks, "--steps": 6, "--text-bytes": 50_000, "--trace": trace_path}
    arguments = [str(word) for pair in options.items() for word in pair]
    ended = subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments], capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"identical: 6 losses on {num_ranks} ranks and on 1 rank" in ended.stdout
    losses = [float(line.split("│")[2]) for line in ended.stdout.splitlines() if "==" in line]
    assert losses[-1] < losses[0] - 0.5  # it learns

    trace = load_routing_trace(trace_path)
    assert (trace.num_experts, trace.num_ranks, trace.num_topk) == (16, num_ranks, 2)
    # 4 steps of 2 layers; 32 sequences of 64 characters.
    assert trace.topk_idx.shape == (8, 2048, 2)
    assert (trace.topk_idx[..., 0] != trace.topk_idx[..., 1]).all()


@pytest.mark.parametrize("what", ["nothing", "loss", "routing"])
def test_a_difference_is_found(
    train_moe: types.ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    what: str,
) -> None:
    def run(num_ranks: int, options: object, progress: object) -> object:
        losses = [4.0, 3.0, 2.0]
        topk_idx = torch.zeros(1, 8, 2, dtype=torch.int64)
        if num_ranks == 1 and what == "loss":
            losses[1] += 2.0**-22  # one unit in the last place
        if num_ranks == 1 and what == "routing":
            topk_idx[0, 3, 1] = 1
        return train_moe.RunResult(losses, topk_idx, 1.0)

    monkeypatch.setattr(train_moe, "run", run)
    code = train_moe.main(["--trace", str(tmp_path / "trace.npz"), "--steps", "3"])
    said = capsys.readouterr().out
    assert code == (0 if what == "nothing" else 1)
    assert ("identical" in said) == (what == "nothing")
    if what == "loss":
        assert "DIFFERENT from step 1 on: 40400000 and 40400001" in said


def test_the_text_is_that_of_every_machine_with_this_python(train_moe: types.ModuleType) -> None:
    text = train_moe.read_text(5000)
    assert text.shape == (5000,)
    assert int(text.max()) < 128
    assert "import" in bytes(text.tolist()).decode()
