"""Checkpoints of transformers' models: what ranks save, it loads alone; what it saves, ranks load.

`make test-transformers` installs transformers and runs this.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5.23")

from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from moe_comm.checkpoints import compact_checkpoint, load_checkpoint, save_checkpoint
from moe_comm.checkpoints import convert as conversion
from moe_comm.checkpoints.chains import open_checkpoint
from moe_comm.checkpoints.stored_checkpoint import find_checkpoint
from moe_comm.resharding import transformers_views
from moe_comm.resharding.describe.module_tensors import local_tensor
from moe_comm.testing import RankContext, run_ranks
from tests.helpers import transformers_models as models
from tests.helpers.checkpoint_oracle import faults_of
from tests.helpers.transformers_models import Layout

run_fresh = functools.partial(run_ranks, fresh=True)

# Experts over FSDP, tensor parallel, and both.
LAYOUTS = {2: [Layout(2), Layout(1, 2), Layout(1)], 4: [Layout(2, 2), Layout(4), Layout(1, 4)]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The checkpoint of every model, as `save_pretrained` writes it."""
    return {
        name: models.save_model(name, tmp_path_factory.mktemp(name))
        for name in ("qwen3_moe", "gpt_oss", "qwen3")
    }


def on_disk(folder: str | Path) -> dict[str, torch.Tensor]:
    disk: dict[str, torch.Tensor] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        disk |= load_file(path)
    return disk


def save_and_load(context: RankContext, folder: str, out: str, layouts: list[Layout]) -> list[str]:
    """Each layout saves what transformers gave it; and takes what `save_pretrained` wrote."""
    disk = on_disk(folder)
    faults = []
    for layout in layouts:
        model = models.load(folder, "all_to_all", context, layout)
        save_checkpoint(
            transformers_views(model),
            out,
            str(layout),
            add_files=model.config.save_pretrained,
            max_file_bytes=100_000,
        )
        with torch.no_grad():
            for tensor in model.state_dict().values():
                local_tensor(tensor).fill_(7)
        load_checkpoint(transformers_views(model), folder)
        faults += [
            f"{layout}: {fault}" for fault in faults_of(transformers_views(model).views, disk)
        ]
    # What the last layout holds becomes what every earlier one saved.
    for layout in layouts:
        with torch.no_grad():
            for tensor in model.state_dict().values():
                local_tensor(tensor).fill_(7)
        load_checkpoint(transformers_views(model), out, str(layout), checksums=True)
        faults += [
            f"of {layout}: {fault}" for fault in faults_of(transformers_views(model).views, disk)
        ]
    return faults


@pytest.mark.client(
    "transformers",
    way="`save_checkpoint()` and `load_checkpoint()` of `transformers_views()`",
    ran="{name}, {num_ranks} ranks: `from_pretrained` of one process reads what they wrote, they read what "
    "`save_pretrained` wrote, and each layout what another one wrote",
)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "qwen3"])
def test_ranks_and_transformers_read_what_the_other_wrote(
    folders: dict[str, str], tmp_path: Path, name: str, num_ranks: int
) -> None:
    layouts = [each for each in LAYOUTS[num_ranks] if each.ep_size == 1 or name != "qwen3"]
    faults = run_fresh(save_and_load, num_ranks, folders[name], str(tmp_path), layouts)
    assert [fault for rank in faults for fault in rank] == []
    disk = on_disk(folders[name])
    expected = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32).state_dict()
    for layout in layouts:
        written = tmp_path / str(layout)
        found = on_disk(written)
        assert found.keys() == disk.keys()
        assert all(torch.equal(found[tensor], disk[tensor]) for tensor in disk)
        model, report = AutoModelForCausalLM.from_pretrained(
            written, dtype=torch.float32, output_loading_info=True
        )
        assert not any(report.values()), report
        state = model.state_dict()
        assert all(torch.equal(state[tensor], expected[tensor]) for tensor in expected)


def train_and_save(context: RankContext, folder: str, out: str) -> None:
    """Save a model, and what changed of it at two of three layers' parts, twice."""
    model = models.load(folder, "all_to_all", context, Layout(4))
    views = transformers_views(model)
    save_checkpoint(views, out, "step-0", add_files=model.config.save_pretrained)
    for step in (1, 2):
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                if "layers.0" in name:
                    local_tensor(tensor).mul_(step + 1)
        save_checkpoint(views, out, f"step-{step}", base=f"step-{step - 1}")


@pytest.mark.client(
    "transformers",
    way="`compact_checkpoint()`",
    ran="qwen3_moe, deltas of 4 ranks under expert parallelism and FSDP2 made whole: `from_pretrained` reads the "
    "weights of the last one, and refuses a delta",
)
def test_transformers_reads_compacted_deltas(folders: dict[str, str], tmp_path: Path) -> None:
    run_fresh(train_and_save, 4, folders["qwen3_moe"], str(tmp_path))
    with pytest.raises((OSError, ValueError)):
        AutoModelForCausalLM.from_pretrained(tmp_path / "step-2")
    whole = compact_checkpoint(tmp_path, "step-2", max_file_bytes=100_000)
    assert whole == tmp_path / "step-2-whole"
    assert len(list(whole.glob("*.safetensors"))) > 1
    model, report = AutoModelForCausalLM.from_pretrained(
        whole, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    first = AutoModelForCausalLM.from_pretrained(folders["qwen3_moe"], dtype=torch.float32)
    found, expected = model.state_dict(), first.state_dict()
    assert found.keys() == expected.keys()
    assert sum("layers.0" in name for name in expected) > 5
    for name, tensor in expected.items():
        changed = tensor * 2 * 3 if "layers.0" in name else tensor
        assert torch.equal(found[name], changed), name


@pytest.mark.client(
    "transformers",
    way="`moe-comm checkpoint convert`",
    ran="qwen3_moe to FP8 in blocks and to MXFP8: `from_pretrained` reads the values that `load_checkpoint` does",
)
@pytest.mark.parametrize("target", ["fp8_block128", "mxfp8"])
def test_transformers_reads_what_was_quantized(
    folders: dict[str, str], tmp_path: Path, target: conversion.ConversionTarget
) -> None:
    source = open_checkpoint(find_checkpoint(Path(folders["qwen3_moe"]), None))
    for _ in conversion.convert_checkpoint(source, tmp_path, "v", conversion.NewFormat(target)):
        pass
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "v", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    plain = AutoModelForCausalLM.from_pretrained(folders["qwen3_moe"], dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    load_checkpoint(transformers_views(plain), tmp_path)
    found, expected = model.state_dict(), plain.state_dict()
    assert found.keys() == expected.keys()
    assert sum(not torch.equal(before[name], expected[name]) for name in before) > 5
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
