"""`examples/reshard_moe.py`: its claim after few steps, and what it says when a bit differs."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def reshard_moe() -> Iterator[types.ModuleType]:
    names = ("train_moe", "laid_out_moe", "reshard_moe")
    before = {name: sys.modules.pop(name, None) for name in names}
    sys.path.insert(0, str(EXAMPLES))
    yield importlib.import_module("reshard_moe")
    sys.path.remove(str(EXAMPLES))
    for name, module in before.items():
        del sys.modules[name]
        if module is not None:
            sys.modules[name] = module


@pytest.mark.full
def test_three_layouts_generate_the_same_bits() -> None:
    options = {
        "--steps": 3,
        "--characters": 3,
        "--rounds": 2,
        "--text-bytes": 50_000,
        "--apart": "ep2",
    }
    arguments = [str(word) for pair in options.items() for word in pair]
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES / "reshard_moe.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    # 2 rounds, 4 sequences, 3 characters, 128 logits each.
    assert "identical: 3072 logits and 2 x 4 texts under 3 layouts" in ended.stdout
    assert ended.stdout.count("==") == 4


@pytest.mark.parametrize("what", ["nothing", "logit", "text", "all NaN"])
def test_a_difference_is_found(
    reshard_moe: types.ModuleType,
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
            return reshard_moe.Generated(logits, characters, 1.0)

        return [2.5], [{name: generated(name) for name in ("source", "collocated", "apart")}]

    monkeypatch.setattr(reshard_moe, "run", run)
    code = reshard_moe.main(["--rounds", "1"])
    said = capsys.readouterr().out
    assert code == (0 if what == "nothing" else 1)
    assert ("identical" in said) == (what == "nothing")
    assert ("DIFFERENT in round 0, model apart" in said) == (what != "nothing")
    if what == "logit":
        assert "1 of 1024 logits, first in sequence 1, step 1, character 7" in " ".join(
            said.split()
        )


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
    reshard_moe: types.ModuleType,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    with pytest.raises(SystemExit):
        reshard_moe.main(arguments)
    assert message in capsys.readouterr().err
