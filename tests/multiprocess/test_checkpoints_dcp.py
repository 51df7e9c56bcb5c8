"""Models and optimizers through `torch.distributed.checkpoint`, between layouts and numbers of ranks."""

from __future__ import annotations

import dataclasses
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from moe_comm import Placement
from moe_comm.checkpoints import (
    CheckingLoadPlanner,
    CheckpointState,
    ChunkedTensor,
    MappedFileReader,
    placed_views,
)
from moe_comm.cli.reshard.model_shapes import MoEShape, build_module, fill, find_differences
from moe_comm.resharding import (
    CheckpointView,
    CheckpointViews,
    MeshLayout,
    MeshPlacement,
    Parallelism,
)
from moe_comm.resharding.describe import intervals
from moe_comm.resharding.describe.intervals import Interval
from moe_comm.resharding.describe.mesh_layouts import mesh_intervals
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.checkpoint_layouts import DrawnSide, drawn_finer, drawn_shapes, drawn_wholes
from tests.helpers.fresh_python import run_python

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def _drawn(
    seed: int, num_ranks: int, dtype: torch.dtype
) -> tuple[DrawnSide, dict[str, torch.Tensor]]:
    """A side in a layout of its own for every number of ranks, and the whole tensors, which are the same."""
    rng = random.Random(seed)
    shapes = drawn_shapes(rng)
    layout = random.Random(f"{seed} on {num_ranks}")
    finer, _ = drawn_finer(layout, shapes) if layout.random() < 0.5 else (shapes, None)
    side = DrawnSide(layout, shapes, num_ranks, dtype, finer=finer)
    for views in side.views:
        views[:] = (dataclasses.replace(view, disk_shape=shapes[view.name]) for view in views)
    return side, drawn_wholes(shapes, dtype, seed)


def _save_drawn(context: RankContext, folder: str, seeds: list[int]) -> None:
    for seed in seeds:
        side, wholes = _drawn(seed, context.num_ranks, torch.float32)
        side.fill(context.rank_idx, wholes)
        state = CheckpointState(CheckpointViews(side.views[context.rank_idx]))
        dcp.save(state.state_dict(), checkpoint_id=f"{folder}/{seed}")


def _load_drawn(context: RankContext, folder: str, seeds: list[int]) -> list[str]:
    wrong = []
    for seed in seeds:
        side, wholes = _drawn(seed, context.num_ranks, torch.float32)
        state = CheckpointState(CheckpointViews(side.views[context.rank_idx]))
        reader = (dcp.FileSystemReader, MappedFileReader)[seed % 2](f"{folder}/{seed}")
        dcp.load(state.state_dict(), storage_reader=reader, planner=CheckingLoadPlanner())
        wrong += [f"{seed}: {name}" for name in side.wrong(context.rank_idx, wholes)]
    return wrong


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(4, 3), (3, 4), (2, 1)])
def test_drawn_layouts(tmp_path: Path, saved_on: int, loaded_on: int) -> None:
    seeds = list(range(100 * saved_on, 100 * saved_on + 6))
    run_ranks(_save_drawn, saved_on, str(tmp_path), seeds)
    wrong: Any = run_ranks(_load_drawn, loaded_on, str(tmp_path), seeds)
    assert wrong == [[]] * loaded_on


# ------------------------------------------------------------------------------------------------
# Models of parallel layouts, with an optimizer.

SHAPE = MoEShape(
    num_layers=2,
    hidden=16,
    num_heads=4,
    num_query_groups=4,
    num_experts=12,
    expert_ffn=8,
    ffn=24,
    num_dense_layers=1,
    vocab=48,
)
RATE = 0.125


def _trained(layout: str, context: RankContext) -> tuple[Any, torch.optim.AdamW]:
    """A model and its optimizer, whose state is not made."""
    parallelism = Parallelism.parse(layout, context.num_ranks)
    model = build_module(SHAPE, parallelism, context.rank_idx, dtype=torch.bfloat16)
    model.requires_grad_()
    return model, torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.5)


def _states(layout: str, context: RankContext) -> dict[str, Any]:
    """By key of the optimizer's state, a model that holds what it is to be."""
    twins = {"exp_avg": _trained(layout, context)[0], "exp_avg_sq": _trained(layout, context)[0]}
    for seed, twin in enumerate(twins.values(), 7):
        fill(twin, seed)
    return twins


def _save_trained(context: RankContext, folder: str, layout: str) -> None:
    model, optimizer = _trained(layout, context)
    fill(model, 1)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()
    fill(model, 1)
    optimizer.param_groups[0]["lr"] = 0.25
    for key, twin in _states(layout, context).items():
        for param, value in zip(model.parameters(), twin.parameters(), strict=True):
            optimizer.state[param][key].copy_(value.detach())
    for param in model.parameters():
        optimizer.state[param]["step"].fill_(17)
    dcp.save({"app": CheckpointState(model, optimizer)}, checkpoint_id=folder)


def _load_trained(context: RankContext, folder: str, layout: str) -> list[str]:
    model, optimizer = _trained(layout, context)
    addresses = [param.data_ptr() for param in model.parameters()]
    planner = CheckingLoadPlanner()
    dcp.load({"app": CheckpointState(model, optimizer)}, checkpoint_id=folder, planner=planner)
    wrong = find_differences(model, 1)
    for key, twin in _states(layout, context).items():
        wrong += [
            f"{key} of {name}"
            for (name, value), param in zip(
                twin.named_parameters(), model.parameters(), strict=True
            )
            if not torch.equal(optimizer.state[param][key], value)
        ]
    wrong += [
        f"step {state['step']}" for state in optimizer.state.values() if float(state["step"]) != 17
    ]
    (group,) = optimizer.param_groups
    if (group["lr"], group["betas"], group["weight_decay"]) != (0.25, (0.9, 0.999), 0.5):
        wrong.append(f"options {group}")
    if addresses != [param.data_ptr() for param in model.parameters()]:
        wrong.append("parameters have moved")
    return wrong


@pytest.mark.parametrize(
    ("saved", "saved_on", "loaded", "loaded_on"),
    [
        ("ep4", 4, "ep2.etp2", 4),
        ("ep4", 4, "ep3", 3),
        ("tp2.pp2", 4, "single", 1),
        ("single", 2, "tp2.ep2.etp1", 2),
    ],
)
def test_model_and_optimizer(
    tmp_path: Path, saved: str, saved_on: int, loaded: str, loaded_on: int
) -> None:
    run_ranks(_save_trained, saved_on, str(tmp_path), saved)
    wrong: Any = run_ranks(_load_trained, loaded_on, str(tmp_path), loaded)
    assert wrong == [[]] * loaded_on
    # Replicas are written once: what is stored has as many elements as the model and its state.
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    for name, tensor in metadata.state_dict_metadata.items():
        if isinstance(tensor, TensorStorageMetadata):
            assert sum(chunk.sizes.numel() for chunk in tensor.chunks) == tensor.size.numel(), name


def test_names_are_those_of_torch(tmp_path: Path) -> None:
    run_ranks(_save_trained, 1, str(tmp_path), "single")
    model, optimizer = _trained("single", RankContext(0, 1, None))
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    theirs = get_state_dict(model, optimizer, options=options)
    expected = {f"app.model.{name}" for name in theirs[0]} | {
        f"app.optim.{name}" for name in theirs[1]
    }
    found = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert set(found) == expected
    # So torch loads it into a model and an optimizer of its own.
    state = {"app": {"model": theirs[0], "optim": theirs[1]}}
    dcp.load(state, checkpoint_id=tmp_path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=theirs[0],
        optim_state_dict=theirs[1],
        options=options,
    )
    assert find_differences(model, 1) == []
    assert {float(state["step"]) for state in optimizer.state.values()} == {17}


def _load_apart(context: RankContext, folder: str) -> str:
    """Parameters that are of one group here had different rates."""
    model, optimizer = _trained("single", context)
    state = CheckpointState(model, optimizer)
    loaded = state.state_dict()
    dcp.load({"app": loaded}, checkpoint_id=folder)
    loaded["optim"]["param_groups"]["embedding.word_embeddings.weight"]["lr"] = 0.5
    try:
        state.load_state_dict(loaded)
    except ValueError as error:
        return str(error)
    return "loaded"


def test_different_options_of_one_group_are_refused(tmp_path: Path) -> None:
    run_ranks(_save_trained, 1, str(tmp_path), "single")
    (text,) = run_ranks(_load_apart, 1, str(tmp_path))
    assert "lr of the optimizer is 0.5 for embedding.word_embeddings.weight and 0.25 for " in text


# ------------------------------------------------------------------------------------------------
# DTensors.


def _placed(context: RankContext, kind: str) -> DTensor:
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(14.0 * 6).view(14, 6)
    if kind == "uneven":
        return distribute_tensor(whole, mesh, [Shard(1), Shard(0)])
    if kind == "replicated":
        return distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
    # Rows 0-6 and 7-13 are cut by themselves, as of two matrices in one.
    layout = MeshLayout(
        (2, 2),
        (0, 1, 2, 3),
        (MeshPlacement("replicate"), MeshPlacement("strided_shard", 0, 2)),
        (14, 6),
    )
    rows, columns = mesh_intervals(layout, context.rank_idx) or ()
    local = whole[[i for start, _, n in rows for i in range(start, start + n)]]
    assert columns == intervals.whole(6)
    placements = [Replicate(), _StridedShard(0, split_factor=2)]
    return DTensor.from_local(local, mesh, placements, shape=whole.shape, stride=whole.stride())


class _Holder(torch.nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)


def _save_dtensor(context: RankContext, folder: str, kind: str, is_ours: bool) -> None:
    model = _Holder(_placed(context, kind))
    state = CheckpointState(model).state_dict() if is_ours else {"model": model.state_dict()}
    dcp.save(state, checkpoint_id=folder)


def _load_dtensor(context: RankContext, folder: str, kind: str, is_ours: bool) -> bool:
    expected = _placed(context, kind)
    model = _Holder(_placed(context, kind))
    with torch.no_grad():
        model.weight.to_local().fill_(-1)
    state = CheckpointState(model).state_dict() if is_ours else {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    return torch.equal(model.weight.to_local(), expected.to_local())


@pytest.mark.parametrize(
    ("saved", "is_ours", "loaded"),
    [
        ("uneven", False, "strided"),  # torch's writer, our reader
        ("strided", True, "uneven"),  # ours, and torch's reader
        ("strided", True, "strided"),
        ("replicated", False, "uneven"),
    ],
)
def test_dtensors(tmp_path: Path, saved: str, is_ours: bool, loaded: str) -> None:
    run_ranks(_save_dtensor, 4, str(tmp_path), saved, is_ours)
    are_read_by_us = not is_ours or loaded == "strided"
    assert run_ranks(_load_dtensor, 4, str(tmp_path), loaded, are_read_by_us) == [True] * 4
    # One process without any of this.
    plain = torch.empty(14, 6)
    dcp.load({"model": {"weight": plain}}, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(plain, torch.arange(14.0 * 6).view(14, 6))


# ------------------------------------------------------------------------------------------------
# Replicas.

PLACEMENTS = {
    "replicas": Placement([[0, 3, -1, 1], [1, -1, 2, 0], [4, 0]], 5),
    "other": Placement([[4, 2], [3, 1, 2], [1, 0, 4]], 5),
}


def _slots(context: RankContext, placement: str, name: str) -> tuple[torch.Tensor, CheckpointViews]:
    placed = PLACEMENTS[placement]
    slots = torch.full((4, 3, 2), -1.0 - context.rank_idx)  # replicas differ until they are loaded
    return slots, CheckpointViews(placed_views(name, slots, placed, context.rank_idx))


def _save_slots(context: RankContext, folder: str, placement: str, name: str) -> None:
    slots, views = _slots(context, placement, name)
    for slot, expert in enumerate(PLACEMENTS[placement].slots[context.rank_idx]):
        if expert >= 0:
            slots[slot] = torch.arange(6.0).view(3, 2) + 10 * expert
    dcp.save(CheckpointState(views).state_dict(), checkpoint_id=folder)


def _load_slots(context: RankContext, folder: str, placement: str, name: str) -> list[list[float]]:
    slots, views = _slots(context, placement, name)
    dcp.load(
        CheckpointState(views).state_dict(), checkpoint_id=folder, planner=CheckingLoadPlanner()
    )
    return slots[:, :, 0].tolist()


@pytest.mark.parametrize("name", ["experts.w1", "experts.{expert}.w1"])
def test_experts_of_any_placement(tmp_path: Path, name: str) -> None:
    run_ranks(_save_slots, 3, str(tmp_path), "replicas", name)
    found = run_ranks(_load_slots, 3, str(tmp_path), "other", name)
    for rank, slots in enumerate(found):
        held = PLACEMENTS["other"].slots[rank]
        for slot, values in enumerate(slots):
            expert = held[slot] if slot < len(held) else -1
            assert values == (
                [-1.0 - rank] * 3 if expert < 0 else [10.0 * expert + i for i in (0, 2, 4)]
            )
    saved = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert len(saved) == (1 if name == "experts.w1" else 5)


def _save_wrong(context: RankContext, folder: str, fault: str, is_checked: bool) -> str:
    """Save what must not be saved; return what is raised."""
    rank = context.rank_idx
    dtype = torch.float16 if fault == "dtype" and rank == 2 else torch.float32
    weight = torch.arange(12.0).view(4, 3).to(dtype)
    held = (Interval(0, 0, 4),)
    if fault == "values" and rank == 1:
        weight[0, 0] = -0.0  # equal to what the others have, but for its bits
    if fault == "hole":
        held, weight = (Interval(rank, 0, 1),), weight[rank : rank + 1]
    views = [CheckpointView("fine", (2,), (intervals.whole(2),), torch.ones(2))]
    views.append(CheckpointView("layers.0.weight", (4, 3), (held, intervals.whole(3)), weight))
    if fault == "places" and rank == 1:
        other = (Interval(1, 0, 1),)
        views.append(
            CheckpointView("layers.0.weight", (4, 3), (other, intervals.whole(3)), torch.ones(1, 3))
        )
    state = CheckpointState(CheckpointViews(views), check_replicas=is_checked).state_dict()
    try:
        dcp.save(state, checkpoint_id=folder)
    except CheckpointException as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (
            "values",
            r"model\.layers\.0\.weight: .*rank 1 has other values than ranks 0, 2 in elements",
        ),
        ("places", r"model\.layers\.0\.weight: .*rank 1 has other values than ranks 0, 1, 2"),
        (
            "dtype",
            r"model\.layers\.0\.weight: .*torch\.float32 on rank 0 and torch\.float16 on rank 2",
        ),
        ("hole", r"model\.layers\.0\.weight: no rank holds elements \[\[3, 4\], \[0, 3\]\]"),
    ],
)
def test_what_cannot_be_saved_is_named_on_every_rank(tmp_path: Path, fault: str, says: str) -> None:
    texts: Any = run_ranks(_save_wrong, 3, str(tmp_path), fault, True)
    for text in texts:
        assert re.search(says, text), text
    assert list(tmp_path.glob("*distcp")) == []


def test_unchecked_replicas_are_believed(tmp_path: Path) -> None:
    assert run_ranks(_save_wrong, 3, str(tmp_path), "values", False) == ["saved"] * 3


# ------------------------------------------------------------------------------------------------
# What does not fit.


def _row(name: str, shape: tuple[int, ...], rows: int, dtype: torch.dtype) -> CheckpointView:
    dims = ((Interval(0, 0, rows),), *map(intervals.whole, shape[1:]))
    return CheckpointView(name, shape, dims, torch.zeros(rows, *shape[1:], dtype=dtype))


def _load_misfits(context: RankContext, folder: str) -> tuple[str, list[str]]:
    """Load what does not fit on rank 1, and what is left out everywhere."""
    views = [_row("a", (4, 3), 4, torch.float32)]
    if context.rank_idx == 1:
        views += [
            _row("shape", (5, 3), 2, torch.float32),
            _row("dtype", (4,), 4, torch.int32),
            _row("missing", (4,), 4, torch.float32),
            _row("hole", (4, 2), 4, torch.float32),
        ]
    state = CheckpointState(CheckpointViews(views)).state_dict()["model"]
    texts = []
    for names in ({"a", "shape", "dtype", "missing"}, {"a", "hole"}, {"a"}):
        some = {name: tensor for name, tensor in state.items() if name in names}
        try:
            dcp.load(some, checkpoint_id=folder, planner=CheckingLoadPlanner())
        except CheckpointException as error:
            texts.append(str(error))
    untouched = all(not view.tensor.any() for view in views)
    dcp.load(
        {"a": state["a"]}, checkpoint_id=folder, planner=CheckingLoadPlanner(allow_unread=True)
    )
    return ("untouched" if untouched else "written"), [*texts, str(views[0].tensor.sum().item())]


def test_what_does_not_fit_is_named_on_every_rank_before_anything_is_read(tmp_path: Path) -> None:
    saved: dict[str, Any] = {
        "a": torch.ones(4, 3),
        "shape": torch.ones(4, 3),
        "dtype": torch.ones(4),
    }
    held = torch.ones(2, 2)
    saved["hole"] = ChunkedTensor(
        (4, 2), torch.float32, [(0, 0)], [held]
    )  # one rank is not checked
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    for state, (misfits, hole, unread, total) in run_ranks(_load_misfits, 2, str(tmp_path)):
        assert state == "untouched"
        assert "shape: expected shape (5, 3), got (4, 3)" in misfits
        assert "dtype: expected torch.int32, got torch.float32" in misfits
        assert "missing: the checkpoint has no such name" in misfits
        assert "hole: elements [[2, 4], [0, 2]] of the whole tensor of shape (4, 2)" in hole
        assert re.search(
            "dtype: no rank reads it; hole: .*; shape: no rank reads it; .*allow_unread", unread
        )
        assert total == "12.0"


# ------------------------------------------------------------------------------------------------
# Saved beside other work.


def _save_beside(context: RankContext, folder: str) -> list[str]:
    model, optimizer = _trained("ep2", context)
    fill(model, 1)
    ways: dict[str, dict[str, Any]] = {
        "stager": {"checkpoint_id": f"{folder}/stager"},
        "writer": {"storage_writer": dcp.FileSystemWriter(f"{folder}/writer")},
    }
    wrong = []
    for way, options in ways.items():
        saving: Any = dcp.async_save({"app": CheckpointState(model, optimizer)}, **options)
        fill(model, 2)  # the next step
        saving.result()
        dcp.load({"app": CheckpointState(model, optimizer)}, checkpoint_id=f"{folder}/{way}")
        wrong += [f"{way}: {text}" for text in find_differences(model, 1)]
    return wrong


def test_saved_beside_the_next_step(tmp_path: Path) -> None:
    assert run_ranks(_save_beside, 2, str(tmp_path)) == [[], []]


BY_PROCESS = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from moe_comm.checkpoints import CheckpointState
from moe_comm.resharding import Parallelism

if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.Linear(3, 4)
    model.pg_collection = Parallelism(1).groups(0)
    expected = model.weight.detach().clone()
    saving = dcp.async_save(
        {"app": CheckpointState(model)},
        checkpoint_id=sys.argv[1],
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    model.weight.data.fill_(-1)
    saving.result()
    dcp.load({"app": CheckpointState(model)}, checkpoint_id=sys.argv[1])
    assert torch.equal(model.weight, expected), model.weight
    dist.destroy_process_group()
"""


def test_saved_by_a_process_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "saves.py"
    script.write_text(BY_PROCESS)
    ran = run_python(str(script), str(tmp_path / "checkpoint"))
    assert ran.returncode == 0, ran.stderr[-4000:]
