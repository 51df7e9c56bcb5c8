"""Models of transformers as sources and targets of a refit, by the names that are on disk.

`make test-transformers` installs transformers and runs this. The oracle is what `save_pretrained` wrote.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

pytest.importorskip("transformers", minversion="5.23")

from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from typer.testing import CliRunner

from moe_comm.checkpoints import CheckingLoadPlanner, CheckpointState
from moe_comm.cli.app import app
from moe_comm.cli.reshard.model_sides import ModelSide
from moe_comm.resharding import PlanError, Refit, transformers_views
from moe_comm.resharding.describe.module_tensors import local_tensor
from moe_comm.testing import RankContext, run_ranks
from tests.helpers import transformers_models as models
from tests.helpers.checkpoint_oracle import faults_of, indices, uncovered
from tests.helpers.command_line import output_of
from tests.helpers.transformers_models import Layout

run_fresh = functools.partial(run_ranks, fresh=True)

# Experts over FSDP and not, over tensor parallel ranks, cut themselves, and tensor parallel alone.
LAYOUTS = {
    2: [Layout(2), Layout(1), Layout(2, 2), Layout(1, 2)],
    4: [Layout(2), Layout(4, 2), Layout(1, 4)],
}
# Their code has no plan for experts.
WITHOUT_EP = {"llama4", "qwen3"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The checkpoint of every model, made when it is asked for."""
    return models.Folders(tmp_path_factory)


@pytest.mark.client(
    "transformers",
    way="`transformers_views()`",
    ran="{name}, whole: what is on disk, name by name",
)
@pytest.mark.parametrize("name", models.CONFIGS | models.VIEWED_CONFIGS)
def test_views_of_a_whole_model_are_what_is_on_disk(folders: dict[str, str], name: str) -> None:
    disk = models.on_disk(folders[name])
    # With the conversions that it was loaded by, and with those of its family.
    loaded = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32)
    fresh = AutoModelForCausalLM.from_config(loaded.config)
    fresh.load_state_dict(loaded.state_dict())
    for model in (loaded, fresh):
        views = transformers_views(model).views
        assert faults_of(views, disk) == []
        assert uncovered([(view.name, view.shape, view.dims) for view in views], disk) == []
        assert {view.name for view in views} == set(disk)


def hold_views_against(
    context: RankContext, folder: str, layouts: list[Layout]
) -> list[tuple[list[str], list[Any]]]:
    """Per layout: what is off, and what this rank holds."""
    disk = models.on_disk(folder)
    found = []
    for layout in layouts:
        model = models.load(folder, "all_to_all", context, layout)
        views = transformers_views(model).views
        faults = faults_of(views, disk)
        # The model as a target: what is written arrives in the model, and nothing in it is left as it was.
        local = {name: local_tensor(tensor) for name, tensor in model.state_dict().items()}
        before = {name: tensor.clone() for name, tensor in local.items()}
        for tensor in local.values():
            tensor.fill_(7)
        for view in views:
            view.tensor.copy_(disk[view.name].reshape(view.shape)[indices(view.dims)])
        faults += [
            f"{name} was not written" for name in local if not local[name].equal(before[name])
        ]
        held = [(view.name, view.shape, view.dims) for view in views]
        found.append(([f"{layout}: {fault}" for fault in faults], held))
    return found


@pytest.mark.client(
    "transformers",
    way="`transformers_views()`",
    ran="{name}, {num_ranks} ranks: each rank's part of what is on disk, read and written, in every layout",
)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    "name", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "glm4_moe", "qwen3"]
)
def test_views_of_every_rank_are_its_part_of_what_is_on_disk(
    folders: dict[str, str], name: str, num_ranks: int
) -> None:
    layouts = [
        layout for layout in LAYOUTS[num_ranks] if layout.ep_size == 1 or name not in WITHOUT_EP
    ]
    found = run_fresh(hold_views_against, num_ranks, folders[name], layouts)
    disk = models.on_disk(folders[name])
    for number, layout in enumerate(layouts):
        by_rank = [rank[number] for rank in found]
        assert [fault for faults, _ in by_rank for fault in faults] == []
        held = [each for _, views in by_rank for each in views]
        assert uncovered(held, disk) == [], layout
        if layout.ep_size > 1:
            names = [{name for name, _, _ in views if "experts.1." in name} for _, views in by_rank]
            assert name == "gpt_oss" or len(set.union(*names)) > min(map(len, names))


def refit_between_plans(context: RankContext, folder: str) -> list[str]:
    """Experts over FSDP into tensor parallel ranks of a model of other weights, twice."""
    disk = models.on_disk(folder)
    source = models.load(folder, "all_to_all", context, Layout(2))
    target = models.load(folder, "all_to_all", context, Layout(1, 2))
    refit = Refit(
        transformers_views(source),
        transformers_views(target),
        "gloo",
        verify="checksum",
        strict=True,
    )
    faults = []
    for factor in (1.0, 2.0):
        with torch.no_grad():
            for parameter in target.parameters():
                local_tensor(parameter).fill_(7)
            if factor != 1:
                for parameter in source.parameters():
                    local_tensor(parameter).mul_(factor)
        refit.run()
        whole = {name: tensor * factor for name, tensor in disk.items()}
        faults += faults_of(transformers_views(target).views, whole)
    return faults


@pytest.mark.client(
    "transformers",
    way="`transformers_views()`",
    ran="a refit from experts over FSDP into tensor parallel ranks, with checksums",
)
def test_a_refit_moves_one_plan_into_another(folders: dict[str, str]) -> None:
    faults = run_fresh(refit_between_plans, 2, folders["qwen3_moe"])
    assert [fault for rank in faults for fault in rank] == []


def save_trained(context: RankContext, folder: str, saved: str, layout: Layout) -> None:
    model = models.load(folder, "all_to_all", context, layout)
    state = CheckpointState(transformers_views(model), beside(model))
    dcp.save({"app": state}, checkpoint_id=saved)


def beside(model: torch.nn.Module, factor: float = 2.0) -> torch.optim.Optimizer:
    """An optimizer that has moments of so many times the values that it found."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for parameter, state in optimizer.state.items():
        for key in ("exp_avg", "exp_avg_sq"):
            local_tensor(state[key]).copy_(local_tensor(parameter)).mul_(factor)
    return optimizer


def load_trained(context: RankContext, folder: str, saved: str, layout: Layout) -> list[str]:
    disk = models.on_disk(folder)
    model = models.load(folder, "all_to_all", context, layout)
    for parameter in model.parameters():
        local_tensor(parameter).fill_(7)
    optimizer = beside(model)
    state = CheckpointState(transformers_views(model), optimizer)
    dcp.load({"app": state}, checkpoint_id=saved, planner=CheckingLoadPlanner())
    faults = faults_of(transformers_views(model).views, disk)
    return faults + [
        f"{key} of shape {tuple(parameter.shape)}"
        for parameter, its in optimizer.state.items()
        for key in ("exp_avg", "exp_avg_sq")
        if not torch.equal(local_tensor(its[key]), 2 * local_tensor(parameter))
    ]


@pytest.mark.client(
    "transformers",
    way="`CheckpointState(transformers_views())`",
    ran="{name} with its optimizer, saved by 4 ranks under expert parallelism and FSDP2, loaded by 2 tensor "
    "parallel ones, by `torch.distributed.checkpoint`",
)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_checkpoint_of_one_plan_is_loaded_into_another(
    folders: dict[str, str], tmp_path: Path, name: str
) -> None:
    run_fresh(save_trained, 4, folders[name], str(tmp_path), Layout(2))
    faults = run_fresh(load_trained, 2, folders[name], str(tmp_path), Layout(1, 2))
    assert [fault for rank in faults for fault in rank] == []
    # And without any model, by the names on disk.
    disk = models.on_disk(folders[name])
    plain = {name: torch.empty_like(tensor) for name, tensor in disk.items()}
    dcp.load({"app": {"model": plain}}, checkpoint_id=tmp_path, no_dist=True)
    assert [name for name, tensor in disk.items() if not torch.equal(plain[name], tensor)] == []


def test_a_model_on_meta_says_what_it_would_hold(folders: dict[str, str]) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(models.CONFIGS["qwen3_moe"]())
    views = transformers_views(model).views
    shapes = {name: tensor.shape for name, tensor in models.on_disk(folders["qwen3_moe"]).items()}
    assert {view.name: view.tensor.shape for view in views} == shapes
    assert all(view.tensor.is_meta for view in views)


def test_what_is_no_plain_model_is_refused() -> None:
    models.quiet()
    model = AutoModelForCausalLM.from_config(models.VIEWED_CONFIGS["qwen3"]())
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(
        PlanError, match=r"^lm_head\.weight: is tied to model\.embed_tokens\.weight"
    ):
        transformers_views(model)
    model.tie_weights()
    assert "lm_head.weight" not in {view.name for view in transformers_views(model).views}
    model.hf_quantizer = object()
    with pytest.raises(PlanError, match=r"Qwen3ForCausalLM is quantized \(hf_quantizer\)"):
        transformers_views(model)


def test_views_follow_a_conversion_that_a_user_registers() -> None:
    """One that cuts heads into halves and turns them, and puts q, k and v into one tensor."""
    from transformers.core_model_loading import (
        Chunk,
        Interleave,
        PermuteForRope,
        Transpose,
        WeightConverter,
    )

    models.quiet()
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(models.VIEWED_CONFIGS["llama"]())
    model._weight_conversions = [
        WeightConverter(
            "self_attn.qkv",
            ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            [Chunk(0), PermuteForRope(permute_layer_names=["q_proj", "k_proj"])],
        ),
        WeightConverter("mlp.up", "mlp.up_proj", [Transpose(0, 1)]),
        WeightConverter("mlp.down", "mlp.down_proj", [Interleave(1)]),
    ]
    disk = revert_weight_conversion(model, model.state_dict())
    views = transformers_views(model).views
    assert any(".qkv" in view.name for view in views)
    assert faults_of(views, disk) == []


# ---------------------------------------------------------------------------------------------
# As `moe-comm reshard explain` describes them, in one process and without weights.


def metadata_of(
    context: RankContext, folder: str, layouts: list[Layout]
) -> list[list[tuple[Any, ...]]]:
    """Per layout, what this rank tells others of a model that it has loaded."""
    return [
        told(
            transformers_views(models.load(folder, "all_to_all", context, layout)).metadata(
                0, is_written=False
            )
        )
        for layout in layouts
    ]


def told(metas: Any) -> list[tuple[Any, ...]]:
    """By name and place in the whole: they come in another order where a model was loaded."""
    fields = [
        (meta.resolved_name, meta.view.dims, meta.shape, meta.dtype, meta.view) for meta in metas
    ]
    return sorted(fields, key=lambda each: each[:2])


@pytest.mark.client(
    "transformers",
    way="`moe-comm reshard explain`",
    ran="{name} on the meta device: what its ranks hold once they have loaded it",
)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "llama4"])
def test_a_model_is_explained_as_its_ranks_hold_it(folders: dict[str, str], name: str) -> None:
    layouts = [each for each in LAYOUTS[2] if name not in WITHOUT_EP or each.ep_size == 1]
    held = run_fresh(metadata_of, 2, folders[name], layouts)
    for number, layout in enumerate(layouts):
        side = ModelSide(folders[name], f"tp{layout.tp_size}.ep{layout.ep_size}", 2, torch.float32)
        for rank, part in enumerate(side.parts(0, None, is_written=False)):
            assert told(part.metadata.metadata()) == held[rank][number]


def test_two_layouts_of_a_model_are_explained(folders: dict[str, str]) -> None:
    folder = folders["qwen3_moe"]
    ranks = ["--source-ranks", "4", "--destination-ranks", "2", "--disjoint", "--json"]
    arguments = ["reshard", "explain", folder, folder, "--from", "ep4.tp2", "--to", "tp2", *ranks]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["missing"] == found["extra"] == []
    assert found["are_pairs_verified"]
    (gates,) = (each for each in found["tensors"] if each["name"].endswith("*.gate_proj.weight"))
    assert gates["num_tensors"] == 2 * 8
    assert gates["source"] == [
        {"name": "model.layers.*.mlp.experts.gate_up_proj", "ranks": [0, 1, 2, 3]}
    ]
    disk = models.on_disk(folder)
    # Every tensor once at least, and what both ranks have twice at most.
    num_bytes = sum(tensor.nbytes for tensor in disk.values())
    assert num_bytes <= found["total_bytes"] <= 2 * num_bytes


def test_the_class_that_is_named_is_explained(tmp_path: Path) -> None:
    """By itself, or by the configuration of a checkpoint; a configuration alone is a causal language model."""
    models.quiet()
    config = models.VIEWED_CONFIGS["qwen3"]()
    config.architectures = ["Qwen3ForTokenClassification"]
    config.save_pretrained(tmp_path)
    heads = {
        "Qwen3ForSequenceClassification": "score",
        "Qwen3Config": "lm_head",
        str(tmp_path): "score",
    }
    for text, head in heads.items():
        done = CliRunner().invoke(app, ["reshard", "explain", text, text, "--json"])
        assert done.exit_code == 0, done.output
        names = {each["name"].split(".")[0] for each in json.loads(done.stdout)["tensors"]}
        assert names == {"model", head}, text
    message = "no causal language model of T5Config; name the class of the model"
    assert message in output_of("reshard", "explain", "T5Config", "T5Config", exit_code=1)
    said = output_of("reshard", "explain", "Qwen3Confg", "Qwen3Config", exit_code=1)
    assert "(near it: Qwen3Config, " in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--from", "ep3"), "ep3 does not divide 2 ranks"),
        (("--from", "pp2"), "tpN, fsdpN and epN joined by dots, or single; got 'pp2'"),
        (("--from", "fsdp4"), "fsdp4 is for 4 ranks"),
    ],
)
def test_layouts_that_are_none_of_transformers(
    folders: dict[str, str], arguments: tuple[str, ...], message: str
) -> None:
    folder = folders["qwen3_moe"]
    options = ["--source-ranks", "2", *arguments]
    said = output_of("reshard", "explain", folder, folder, *options, exit_code=1)
    assert message in said
    said = output_of("reshard", "explain", folder, "Qwen3MoeConfig", exit_code=1)
    assert "missing: model.layers.10.input_layernorm.weight (2048,)" in said
    assert "differs: lm_head.weight ((128, 64), (151936, 2048))" in said
