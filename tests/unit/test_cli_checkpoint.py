"""`moe-comm checkpoint` on what one rank saved, and on what others write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from moe_comm.checkpoints import convert as conversion
from moe_comm.checkpoints import save_checkpoint
from moe_comm.cli.app import app
from moe_comm.resharding import CheckpointView, CheckpointViews
from moe_comm.resharding.describe.intervals import whole
from moe_comm.resharding.formats.number_formats import (
    dequantize_fp8_block,
    dequantize_mxfp8,
    quantize_fp8_block,
    quantize_mxfp8,
)
from tests.helpers.plain_safetensors import plain_tensors, write_plain

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
    assert "BF16: 2 tensors, 16 bytes" in text
    assert "written by 1 rank, with checksums" in text
    assert "[2,4]" in text
    # On a narrow terminal names are cut, and nothing else.
    narrow = CliRunner().invoke(
        app, ["checkpoint", "show", str(folder), "--tensors"], env={"COLUMNS": "36"}
    )
    table = narrow.output.partition("checksums\n")[2].splitlines()
    assert max(map(len, table)) <= 36
    assert any(line.startswith("a      F32   [2,4] model-0000") for line in table), table


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
    assert done.stderr.startswith(f"moe-comm checkpoint: {path}: ")
    assert "expected checksum 0x" in done.stderr
    assert run("verify", folder, "--version", "first").exit_code == 0
    path.write_bytes(data[:-1])
    assert "it is cut short" in run("show", folder).stderr


def test_verify_without_checksums_says_so(tmp_path: Path) -> None:
    write_plain(tmp_path / "model.safetensors", TENSORS, {})
    done = run("verify", tmp_path)
    assert done.exit_code == 0
    assert "3 tensors in 1 file fit together; there are no checksums to compare" in done.output
    assert run("verify", tmp_path, "--version", "x").exit_code == 1


def test_deltas_are_shown_verified_converted_and_compacted(folder: Path, tmp_path: Path) -> None:
    changed = {**TENSORS, "a": TENSORS["a"] + 1}

    def config(where: Path) -> None:
        (where / "config.json").write_text('{"layers": 1}')
        (where / "words").mkdir()
        (where / "words" / "all.txt").write_text("a b")

    for number, tensors in enumerate((changed, {**changed, "b": TENSORS["b"] * 2})):
        views = CheckpointViews(
            CheckpointView(name, tuple(tensor.shape), tuple(map(whole, tensor.shape)), tensor)
            for name, tensor in tensors.items()
        )
        version, base = (("third", "second"), ("fourth", "third"))[number]
        save_checkpoint(views, folder, version, base=base, add_files=None if number else config)
    said = json.loads(run("show", folder, "--json", "--tensors").output)
    assert said["latest"] == "fourth"
    assert said["builds_on"] == ["third", "second"]
    assert said["dtypes"]["BF16"] == {"tensors": 2, "bytes": 16}
    assert {each["name"]: each["file"].split("/")[0] for each in said["tensors"]} == dict.fromkeys(
        TENSORS, "second"
    )
    text = run("show", folder).output
    assert "a delta over third, over second" in text
    assert "of which the delta itself has 5" in text
    by_itself = run("show", folder / "fourth")
    assert by_itself.exit_code == 1
    assert f"expected folder {folder} and version fourth" in by_itself.stderr
    assert json.loads(run("verify", folder, "--json").stdout)["checked_bytes"] == 48
    assert run("convert", folder, tmp_path / "out", "--to", "fp32").exit_code == 0
    found = plain_tensors(tmp_path / "out" / "fourth")
    assert torch.equal(found["b"], TENSORS["b"].float() * 2)
    done = json.loads(run("compact", folder, "--max-file-bytes", "40", "--json").stdout)
    assert done["builds_on"] == []
    assert done["read_bytes"] == 48
    assert done["latest"] == "fourth-whole"
    found = plain_tensors(folder / "fourth-whole")
    assert torch.equal(found["a"], changed["a"])
    # Files beside the tensors are those that were saved last.
    assert (folder / "fourth-whole" / "config.json").read_text() == '{"layers": 1}'
    assert (folder / "fourth-whole" / "words" / "all.txt").read_text() == "a b"
    assert run("verify", folder).exit_code == 0
    assert run("compact", folder).exit_code == 1
    assert run("compact", folder, "--version", "third", "--name", "old").exit_code == 0
    assert json.loads(run("show", folder, "--json").output)["latest"] == "fourth-whole"
    path = next((folder / "third").glob("*.blocks"))
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    done = run("verify", folder, "--version", "fourth")
    assert done.exit_code == 1
    assert done.stderr.startswith(f"moe-comm checkpoint: {path}: a elements 0 to 8: ")


# ---------------------------------------------------------------------------------------------
# convert


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder as others write it; chunks are small."""
    monkeypatch.setattr(conversion, "_CHUNK_ELEMENTS", 128 * 96)
    generator = torch.Generator().manual_seed(2)
    tensors = {
        "layers.0.up_proj.weight": torch.randn(300, 96, generator=generator).bfloat16(),
        "experts.down_proj.weight": torch.randn(2, 160, 96, generator=generator).bfloat16(),
        "norm.weight": torch.randn(96, generator=generator).bfloat16(),
        "head.weight": torch.randn(500, 96, generator=generator),
        "gate.e_score_correction_bias": 1 + torch.arange(4) / 1000,
        "steps": torch.tensor(7),
    }
    source = tmp_path / "model"
    source.mkdir()
    write_plain(source / "model.safetensors", tensors, {"format": "pt"})
    (source / "config.json").write_text('{"dtype": "bfloat16", "layers": 1}')
    (source / "tokenizer.json").write_text("[]")
    return source, tensors


def test_convert_to_other_files_keeps_every_bit(
    model: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    source, tensors = model
    done = run("convert", source, tmp_path / "out", "--max-file-bytes", "50kB", "--json")
    said = json.loads(done.stdout)
    assert len(said["files"]) == 5
    assert said["read_bytes"] == sum(t.numel() * t.element_size() for t in tensors.values())
    found = plain_tensors(tmp_path / "out" / "model")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert (tmp_path / "out" / "model" / "tokenizer.json").read_text() == "[]"
    assert (tmp_path / "out" / "model" / "config.json").read_text() == (
        source / "config.json"
    ).read_text()
    assert run("verify", tmp_path / "out").exit_code == 0
    again = run("convert", source, tmp_path / "out")
    assert again.exit_code == 1
    assert "version model is there already" in again.stderr
    assert run("convert", source, tmp_path / "out", "--name", "second").exit_code == 0
    assert json.loads(run("show", tmp_path / "out", "--json").output)["versions"] == [
        "model",
        "second",
    ]


def test_convert_to_a_dtype(model: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    source, tensors = model
    assert run("convert", source, tmp_path / "out", "--to", "fp16").exit_code == 0
    found = plain_tensors(tmp_path / "out" / "model")
    for name, tensor in tensors.items():
        # Biases of routers stay float32: rounded, they choose other experts.
        is_rounded = tensor.is_floating_point() and "bias" not in name
        assert torch.equal(found[name], tensor.half() if is_rounded else tensor)
    config = json.loads((tmp_path / "out" / "model" / "config.json").read_text())
    assert config == {"dtype": "float16", "layers": 1}


@pytest.mark.parametrize("target", ["fp8_block128", "mxfp8"])
def test_convert_to_fp8_is_what_quantizing_the_whole_weight_gives(
    model: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, target: str
) -> None:
    source, tensors = model
    out = tmp_path / "out"
    done = run("convert", source, out, "--to", target, "--name", "v")
    assert done.exit_code == 0, done.stderr
    found = plain_tensors(out / "v")
    quantize = quantize_mxfp8 if target == "mxfp8" else quantize_fp8_block
    for name, tensor in tensors.items():
        if "_proj" in name:
            data, scale = quantize(tensor)
            assert torch.equal(found[name].view(torch.uint8), data.view(torch.uint8)), name
            scaled = found.pop(f"{name}_scale_inv")
            assert torch.equal(scaled.view(torch.uint8), scale.view(torch.uint8)), name
        else:
            assert torch.equal(found[name], tensor)
    assert found.keys() == tensors.keys()
    config = json.loads((out / "v" / "config.json").read_text())
    words = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["head", "lm_head"],
    }
    if target == "mxfp8":
        words |= {"weight_block_size": [1, 32], "scale_fmt": "ue8m0"}
    assert config["quantization_config"] == words
    # And back: the products, rounded once.
    assert run("convert", out, tmp_path / "back", "--to", "fp32").exit_code == 0
    back = plain_tensors(tmp_path / "back" / "v")
    assert back.keys() == tensors.keys()
    config = json.loads((tmp_path / "back" / "v" / "config.json").read_text())
    assert config == {"dtype": "float32", "layers": 1}
    for name, tensor in tensors.items():
        if "_proj" in name:
            data, scale = quantize(tensor)
            dequantize = dequantize_mxfp8 if target == "mxfp8" else dequantize_fp8_block
            assert torch.equal(back[name], dequantize(data, scale, dtype=torch.float32)), name
    assert run("verify", tmp_path / "back").exit_code == 0


def test_convert_names_the_modules_that_are_not_quantized(tmp_path: Path) -> None:
    left = ["attn.weights_proj", "lm_head", "mlp.gate", "moe", "moe.input_linear"]
    matrices = [
        "attn.q_proj",
        "attn.weights_proj",
        "mlp.gate",
        "mlp.experts.0.w1",
        "mlp.experts.1.w2",
    ]
    tensors = {f"{name}.weight": torch.ones(8, 8) for name in matrices}
    tensors |= {"attn.decay": torch.ones(1, 8), "moe.input_linear.weight": torch.ones(2, 8, 8)}
    source, out = tmp_path / "model", tmp_path / "out"
    source.mkdir()
    write_plain(source / "model.safetensors", tensors, {"format": "pt"})
    (source / "config.json").write_text("{}")
    for version, options, more in (
        ("all", [], []),
        ("one", ["--quantized", "q_proj"], ["mlp.experts"]),
    ):
        done = run("convert", source, out, "--to", "fp8_block128", "--name", version, *options)
        assert done.exit_code == 0, done.stderr
        config = json.loads((out / version / "config.json").read_text())
        assert config["quantization_config"]["modules_to_not_convert"] == sorted(left + more)


def test_what_cannot_be_converted_is_named_and_leaves_nothing(
    model: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    source, _ = model
    out = tmp_path / "out"
    done = run("convert", source, out, "--to", "mxfp8", "--quantized", "norm")
    assert done.exit_code == 1
    assert "norm.weight: mxfp8 needs a matrix of a multiple of 32 columns, got (96,)" in done.stderr
    done = run("convert", source, out, "--to", "fp8_block128", "--quantized", "steps|nobody")
    assert done.exit_code == 1
    assert "have 'steps|nobody' in them" in done.stderr
    assert "of 6 names, such as 'experts.down_proj.weight', none has" in done.stderr
    assert run("convert", source, out, "--to", "mxfp8", "--quantized", "(").exit_code == 1
    assert run("convert", source, out, "--name", "..").exit_code == 1
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert "cut short" in run("convert", source, out).stderr
    assert not out.exists()


def test_weights_that_are_quantized_otherwise_are_not_converted(tmp_path: Path) -> None:
    """Nor is their configuration taken away."""
    source, out = tmp_path / "v", tmp_path / "out"
    source.mkdir()
    weight = torch.ones(128, 128, dtype=torch.float8_e4m3fn)
    write_plain(source / "model.safetensors", {"w": weight, "w.scale": torch.ones(1)}, {})
    done = run("convert", source, out, "--to", "bf16")
    assert done.exit_code == 1
    text = "w is torch.float8_e4m3fn: to become numbers, it must be torch.float8_e4m3fn with its scale factors under"
    assert text in done.stderr
    write_plain(source / "model.safetensors", {"w": weight.view(torch.int8)}, {})
    for method in ("gptq", {"quant_method": "gptq"}):
        (source / "config.json").write_text(json.dumps({"quantization_config": method}))
        done = run("convert", source, out, "--to", "bf16")
        assert done.exit_code == 1
        assert "quant_method 'fp8', whose weights can become bf16, got 'gptq'" in done.stderr
    assert [path.name for path in out.iterdir()] == [".lock"]
    assert run("convert", source, out).exit_code == 0


def test_a_damaged_configuration_is_named(
    model: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    source, _ = model
    (source / "config.json").write_text("{")
    done = run("convert", source, tmp_path / "out", "--to", "fp16")
    assert done.exit_code == 1
    assert f"{source / 'config.json'}: expected JSON, got 1 bytes" in done.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]
