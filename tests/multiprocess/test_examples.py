"""Programs of `examples/`: what each claims, on a few steps, and what it says when bits differ."""

from __future__ import annotations

import importlib
import re
import sys
import types
from pathlib import Path

import pytest
import torch

from moe_comm.ep.routing_trace import load_routing_trace
from tests.helpers.source_tree import captured

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def said_by(example: str, *arguments: object, timeout: float = 300) -> str:
    ended = captured(
        [sys.executable, str(EXAMPLES / f"{example}.py"), *map(str, arguments)], timeout=timeout
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The program whose name is the parameter, as a module; it and those it imports are new."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for path in EXAMPLES.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    return importlib.import_module(request.param)


def of(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("example", [name], indirect=True, ids=[""])


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_losses_on_several_ranks_and_on_one_are_identical(tmp_path: Path, num_ranks: int) -> None:
    path = tmp_path / "trace.npz"
    options = ("--ranks", num_ranks, "--steps", 6, "--text-bytes", 50_000, "--trace", path)
    said = said_by("train_moe", *options)
    assert f"identical: 6 losses on {num_ranks} ranks and on 1 rank" in said
    losses = [float(line.split("│")[2]) for line in said.splitlines() if "==" in line]
    assert losses[-1] < losses[0] - 0.5  # it learns

    trace = load_routing_trace(path)
    assert (trace.num_experts, trace.num_ranks, trace.num_topk) == (16, num_ranks, 2)
    # 4 steps of 2 layers; 32 sequences of 64 characters.
    assert trace.topk_idx.shape == (8, 2048, 2)
    assert (trace.topk_idx[..., 0] != trace.topk_idx[..., 1]).all()


@of("train_moe")
@pytest.mark.parametrize("what", ["nothing", "loss", "routing"])
def test_a_difference_between_ranks_is_found(
    example: types.ModuleType,
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
        return example.RunResult(losses, topk_idx, 1.0)

    monkeypatch.setattr(example, "run", run)
    code = example.main(["--trace", str(tmp_path / "trace.npz"), "--steps", "3"])
    said = capsys.readouterr().out
    assert code == (0 if what == "nothing" else 1)
    assert ("identical" in said) == (what == "nothing")
    if what == "loss":
        assert "DIFFERENT from step 1 on: 40400000 and 40400001" in said


@of("train_moe")
def test_the_text_is_that_of_every_machine_with_this_python(example: types.ModuleType) -> None:
    text = example.read_text(5000)
    assert text.shape == (5000,)
    assert int(text.max()) < 128
    assert "import" in bytes(text.tolist()).decode()


@pytest.mark.parametrize("ranks", ["2,3,1", pytest.param("4,3,1", marks=pytest.mark.full)])
def test_losses_over_restarts_and_on_one_rank_are_identical(ranks: str) -> None:
    options = ("--ranks", ranks, "--steps", 12, "--every", 2, "--text-bytes", 50_000)
    said = said_by("resume_moe", *options)
    assert f"identical: 12 losses over starts on {ranks} ranks" in said
    assert "killed in save 4" in said
    assert "PeerFailedError" in said or "a save of a checkpoint ended" in said


@of("resume_moe")
@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("nothing", "identical: 12"),
        ("loss", "DIFFERENT at step 7"),
        ("step", "MISSING steps [7]"),
    ],
)
def test_a_difference_after_restarts_is_found(
    example: types.ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    what: str,
    expected: str,
) -> None:
    first = 0

    def run(part: object, *_: object) -> object:
        nonlocal first
        number, first = first, first + 1
        steps = range(6 * (number % 2), 6 * (number % 2) + 6) if number < 2 else range(12)
        losses = {step: 4.0 - step / 4 for step in steps}
        if what == "loss" and number == 1:
            losses[7] += 2.0**-22
        if what == "step" and number == 1:
            del losses[7]
        return example.Outcome(losses=losses)

    monkeypatch.setattr(example, "run", run)
    code = example.main(["--ranks", "1,1", "--steps", "12", "--every", "2"])
    assert code == (0 if what == "nothing" else 1)
    assert expected in capsys.readouterr().out


@pytest.mark.full
def test_three_layouts_generate_the_same_bits() -> None:
    options = ("--steps", 3, "--characters", 3, "--rounds", 2, "--text-bytes", 50_000)
    said = said_by("reshard_moe", *options, "--apart", "ep2")
    # 2 rounds, 4 sequences, 3 characters, 128 logits each.
    assert "identical: 3072 logits and 2 x 4 texts under 3 layouts" in said
    assert said.count("==") == 4


@of("reshard_moe")
@pytest.mark.parametrize("what", ["nothing", "logit", "text", "all NaN"])
def test_a_difference_between_layouts_is_found(
    example: types.ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    what: str,
) -> None:
    def run(settings: object, console: object) -> object:
        def generated(name: str) -> object:
            logits = torch.linspace(0.5, 1.5, 4 * 2 * 128).view(4, 2, 128)
            characters = torch.full((4, 2), 65)
            if name == "apart" and what == "logit":
                logits[1, 1, 7] += 2.0**-23  # one unit in the last place
            if name == "apart" and what == "text":
                characters[3, 1] = 66
            if what == "all NaN":
                logits.fill_(float("nan"))
            return example.Generated(logits, characters, 1.0)

        return [2.5], [{name: generated(name) for name in ("source", "collocated", "apart")}]

    monkeypatch.setattr(example, "run", run)
    code = example.main(["--rounds", "1"])
    said = " ".join(capsys.readouterr().out.split())
    assert code == (0 if what == "nothing" else 1)
    assert ("identical" in said) == (what == "nothing")
    assert ("DIFFERENT in round 0, model apart" in said) == (what != "nothing")
    if what == "logit":
        assert "1 of 1024 logits, first in sequence 1, step 1, character 7" in said


@of("reshard_moe")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "pp2"], "generation here has no pipeline, got pp2"),
        (["--apart", "tp2", "--apart-ranks", "1"], "does not divide 1 ranks"),
        (["--apart-ranks", "6", "--apart", "tp2"], "4 sequences cannot be divided by 3 for tp2"),
        (["--steps", "0"], "--steps must be >= 1, got 0"),
    ],
)
def test_bad_arguments_are_refused(
    example: types.ModuleType,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    with pytest.raises(SystemExit):
        example.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.full
def test_the_balancer_follows_the_routing() -> None:
    said = said_by("balanced_moe", "--ranks", 2, "--steps", 62)
    pattern = r"step (\d+): fullest rank (\d+) -> (\d+) rows \(mean (\d+)\), (\d+) experts"
    moves = [[int(number) for number in line] for line in re.findall(pattern, said)]
    assert moves[0][0] == 20
    assert moves[-1][0] == 60  # the hot experts have changed at 40
    for _, before, after, mean, num_moves in moves:
        assert mean <= after < before
        assert num_moves > 0
    # In the window after the first move the fullest rank is near the mean.
    assert moves[0][2] < 1.05 * moves[0][3] < moves[0][1]


# Two ranks that die at once do so within 60 ms, several times: often the second in the middle of the shrink.
@pytest.mark.parametrize(
    ("options", "pieces"),
    [
        pytest.param(
            "--ranks 3 --steps 14 --kills 2 --no-return",
            ["identical: 14 losses on 1 ranks at the end, 2 killed"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "--ranks 3 --steps 10 --kills 1",
            ["identical: 10 losses on 3 ranks at the end, 1 killed", "grew to 3 ranks"],
            marks=pytest.mark.full,
        ),
        *(
            pytest.param(
                f"--ranks 4 --steps 30 --kills 3 --at-once 2 --seed {seed}",
                ["identical: 30 losses"],
                marks=pytest.mark.slow,
            )
            for seed in range(4)
        ),
    ],
    ids=["two-deaths", "a-return", *(f"deaths-at-once-{seed}" for seed in range(4))],
)
def test_losses_of_a_run_with_deaths(options: str, pieces: list[str]) -> None:
    """Ranks are killed at random, and the losses are those of an undisturbed run."""
    said = said_by("train_elastic", "--text-bytes", 20_000, *options.split(), timeout=900)
    assert [piece for piece in pieces if piece not in said] == []
    if "--no-return" in options:
        assert said.count("failed") == 2
