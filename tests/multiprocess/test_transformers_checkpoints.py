"""Checkpoints of transformers' models: what ranks save, it loads alone; what it saves, ranks load.

`make test-transformers` installs transformers and runs this.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5.23")

from transformers import AutoModelForCausalLM
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from moe_comm.checkpoints import (
    compact_checkpoint,
    load_checkpoint,
    load_pretrained,
    save_checkpoint,
)
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
        for name in ("qwen3_moe", "gpt_oss", "qwen3", "deepseek_v3", "mixtral")
    }


def save_and_load(context: RankContext, folder: str, out: str, layouts: list[Layout]) -> list[str]:
    """Each layout saves what transformers gave it; and takes what `save_pretrained` wrote."""
    disk = models.on_disk(folder)
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
    # The weights of the last layout become what every earlier one saved.
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
    disk = models.on_disk(folders[name])
    expected = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32).state_dict()
    for layout in layouts:
        written = tmp_path / str(layout)
        found = models.on_disk(written)
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
    model.generation_config.max_new_tokens = 3

    def settings(folder: Path) -> None:
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)

    save_checkpoint(views, out, "step-0", add_files=settings)
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
    "weights of the last one, and refuses a delta, of which `load_pretrained` makes the same model",
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
    ours = load_pretrained(AutoModelForCausalLM, tmp_path, "step-2", dtype=torch.float32)
    assert ours.generation_config.to_dict() == model.generation_config.to_dict()
    assert ours.generation_config.max_new_tokens == 3
    assert found.keys() == expected.keys()
    assert all(torch.equal(ours.state_dict()[name], found[name]) for name in expected)
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


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_transformers_makes_those_modules_fp8_that_were_quantized(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    source = open_checkpoint(find_checkpoint(Path(folders[name]), None))
    target = conversion.NewFormat("fp8_block128")
    for _ in conversion.convert_checkpoint(source, tmp_path, "v", target):
        pass
    # Without a GPU it makes none FP8, and dequantizes; it can make them all the same.
    monkeypatch.setattr(
        FineGrainedFP8HfQuantizer, "validate_environment", lambda *given, **named: None
    )
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "v", output_loading_info=True)
    assert not any(report.values()), report
    dtypes = {tensor.dtype for tensor in model.state_dict().values()}
    assert {torch.float8_e4m3fn, torch.float32} <= dtypes


def load_both(
    context: RankContext, folder: str, layouts: list[Layout | None], dtype: torch.dtype
) -> list[str]:
    """Everything that a model has by name, as transformers loads it and as this package does."""
    faults = []
    for layout in layouts:
        plan = None if layout is None else models.plan_of("all_to_all", context, layout)
        expected, found = (
            load(AutoModelForCausalLM, folder, dtype=dtype, distributed_config=plan)
            for load in (
                lambda kind, *given, **named: kind.from_pretrained(*given, **named),
                load_pretrained,
            )
        )
        held = [
            dict((*each.named_parameters(remove_duplicate=False), *each.named_buffers()))
            for each in (expected, found)
        ]
        if list(held[0]) != list(held[1]) or found.training:
            faults.append(f"{layout}: not the same names, or training")
            continue
        for name, tensor in held[0].items():
            mine = held[1][name]
            same = (mine.dtype, mine.device, mine.shape) == (
                tensor.dtype,
                tensor.device,
                tensor.shape,
            )
            if not same or not torch.equal(local_tensor(mine), local_tensor(tensor)):
                faults.append(f"{layout}: {name}: {mine.dtype} {mine.device}, not {tensor.dtype}")
        tied = [len(set(map(id, each.parameters()))) for each in (expected, found)]
        settings = [each.generation_config.to_dict() for each in (expected, found)]
        tokens = models.batch(0, 5)
        texts = [
            each.generate(tokens, max_new_tokens=3, do_sample=False) for each in (expected, found)
        ]
        if tied[0] != tied[1] or settings[0] != settings[1] or not torch.equal(*texts):
            faults.append(f"{layout}: ties {tied}, settings or text")
    return faults


@pytest.mark.client(
    "transformers",
    way="`load_pretrained()`",
    ran="{name}, {dtype}, {num_ranks} ranks under every plan and without one: the parameters, buffers and text of "
    "`from_pretrained`",
)
@pytest.mark.parametrize(
    ("name", "num_ranks", "dtype"),
    [
        ("qwen3_moe", 2, torch.bfloat16),
        ("gpt_oss", 2, torch.float32),
        ("qwen3", 2, torch.float32),  # tied
        ("deepseek_v3", 2, torch.bfloat16),  # some stay float32
        ("qwen3_moe", 4, torch.float32),
    ],
)
def test_a_model_is_the_one_that_from_pretrained_makes(
    folders: dict[str, str], name: str, num_ranks: int, dtype: torch.dtype
) -> None:
    layouts = [each for each in LAYOUTS[num_ranks] if each.ep_size == 1 or name != "qwen3"]
    faults = run_fresh(load_both, num_ranks, folders[name], [*layouts, None], dtype)
    assert [fault for rank in faults for fault in rank] == []


def load_what_one_lacks(context: RankContext, folder: str, out: str) -> str:
    own = folder if context.rank_idx == 0 else out
    plan = models.plan_of("all_to_all", context, Layout(2))
    try:
        load_pretrained(AutoModelForCausalLM, own, distributed_config=plan)
    except Exception as error:  # noqa: BLE001 - it is looked at
        return str(error)
    return "nothing"


def test_a_rank_without_a_configuration_stops_all(folders: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    said = run_fresh(load_what_one_lacks, 2, folders["qwen3"], str(tmp_path))
    assert all("rank 1" in each and str(tmp_path) in each for each in said), said
