"""`moe-comm checkpoint` on what one rank saved, and on what others write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from moe_comm.checkpoints import save_checkpoint
from moe_comm.cli.app import app
from moe_comm.resharding import CheckpointView, CheckpointViews
from moe_comm.resharding.describe.intervals import whole
from tests.helpers.plain_safetensors import write_plain

TENSORS = {
    "a": torch.arange(8.0).reshape(2, 4),
    "b": torch.ones(3, dtype=torch.bfloat16),
    "c": torch.ones(5, dtype=torch.bfloat16),
}


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    views = CheckpointViews(
        CheckpointView(name, tuple(tensor.shape), tuple(map(whole, tensor.shape)), tensor)
        for name, tensor in TENSORS.items()
    )
    for version in ("first", "second"):
        save_checkpoint(views, tmp_path, version, max_file_bytes=40)
    return tmp_path


def test_show_says_what_is_there(folder: Path) -> None:
    said = json.loads(run("show", folder, "--tensors", "--json").output)
    assert said["versions"] == ["first", "second"]
    assert said["latest"] == "second"
    assert said["folder"] == str(folder / "second")
    assert said["dtypes"] == {
        "BF16": {"tensors": 2, "bytes": 16},
        "F32": {"tensors": 1, "bytes": 32},
    }
    assert said["num_tensors"] == 3
    assert len(said["files"]) == 2
    assert {"name": "a", "dtype": "F32", "shape": [2, 4]}.items() <= said["tensors"][0].items()
    text = run("show", folder, "--version", "first", "--tensors").output
    assert "versions: first, second; the latest is second" in text
    assert "3 tensors in 2 files" in text
    assert "BF16: 2 tensors, 0.000 GB" in text
    assert "written by 1 ranks, with checksums" in text
    assert "(2, 4)" in text or "[2, 4]" in text


def test_show_reads_what_others_write(tmp_path: Path) -> None:
    write_plain(tmp_path / "model.safetensors", TENSORS, {})
    said = json.loads(run("show", tmp_path, "--json").output)
    assert said["versions"] == []
    assert said["has_checksums"] is False
    assert "tensors" not in said
    assert "without checksums" in run("show", tmp_path).output


def test_verify_counts_every_byte_and_finds_a_wrong_one(folder: Path, tmp_path: Path) -> None:
    said = json.loads(run("verify", folder, "--json").stdout)
    assert said["checked_bytes"] == 48
    assert "3 tensors in 2 files are whole: 48 bytes" in run("verify", folder).output
    path = folder / "second" / "model-00002-of-00002.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    done = run("verify", folder)
    assert done.exit_code == 1
    assert done.stderr.lstrip().startswith(f"moe-comm checkpoint: {path}: ")
    assert "expected checksum 0x" in done.stderr
    assert run("verify", folder, "--version", "first").exit_code == 0
    path.write_bytes(data[:-1])
    assert "it is cut short" in run("show", folder).stderr


def test_verify_without_checksums_says_so(tmp_path: Path) -> None:
    write_plain(tmp_path / "model.safetensors", TENSORS, {})
    done = run("verify", tmp_path)
    assert done.exit_code == 0
    assert "3 tensors in 1 files fit together; there are no checksums to compare" in done.output
    assert run("verify", tmp_path, "--version", "x").exit_code == 1
