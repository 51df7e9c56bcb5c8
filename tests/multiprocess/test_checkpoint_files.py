"""Models saved to safetensors files by some ranks, and loaded by others."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import resource
import shutil
import signal
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from moe_comm import _host
from moe_comm.checkpoints import load_checkpoint, rectangles, save_checkpoint
from moe_comm.errors import CheckpointError, CommunicationError
from moe_comm.resharding import CheckpointView, CheckpointViews, Parallelism, is_stale
from moe_comm.resharding.describe.intervals import Interval, whole
from moe_comm.resharding.formats.number_formats import (
    dequantize_fp8_block,
    dequantize_mxfp8,
    quantize_fp8_block,
    quantize_mxfp8,
)
from moe_comm.tensors.quantization import ScaleFormat
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.checkpoint_layouts import (
    DrawnSide,
    drawn_finer,
    drawn_shapes,
    drawn_wholes,
)
from tests.helpers.checkpoint_sides import (
    folder_in_memory,
    halves,
    killed,
    load,
    numbers,
    refused,
    refused_by_the_system,
    refused_load,
    refused_save,
    save,
    save_with_a_killed_rank,
    saves_ended_anywhere,
    side_of,
)
from tests.helpers.plain_safetensors import DTYPES, header_of, plain_tensors, write_plain


@pytest.fixture
def folder() -> Iterator[Path]:
    yield from folder_in_memory()


def config(where: Path) -> None:
    (where / "config.json").write_text('{"a": 1}')


# ---------------------------------------------------------------------------------------------
# What is saved is what is loaded.


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < 8 else pytest.mark.full) for seed in range(40)]
)
def test_layouts_drawn_at_random(folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    shapes = drawn_shapes(rng)
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.int16, torch.uint8, torch.int64])
    wholes = drawn_wholes(shapes, dtype, seed)
    finer, grains = drawn_finer(rng, shapes)
    is_finer = rng.random() < 0.5
    source = DrawnSide(rng, shapes, rng.randint(1, 4), dtype, finer=finer if is_finer else None)
    target = DrawnSide(rng, shapes, rng.randint(1, 4), dtype, grains=grains if is_finer else None)
    for rank, views in enumerate(source.views):
        source.fill(rank, wholes)
        source.views[rank] = [
            dataclasses.replace(view, disk_shape=shapes[view.name]) for view in views
        ]
    # Parts of one rectangle, and rows with gaps between them, at every size.
    monkeypatch.setattr(rectangles, "_CHUNK_BYTES", rng.choice([1, 7, 64, 1 << 20]))
    monkeypatch.setattr(rectangles, "_CACHED_BYTES", rng.choice([1, 24, 512 << 10]))
    monkeypatch.setattr(rectangles, "_MAX_GAP_BYTES", rng.choice([0, 8, 4096]))
    save(source.views, folder, "v", max_file_bytes=rng.choice([1, 100, 10_000]))
    found = plain_tensors(folder / "v")
    assert found.keys() == wholes.keys()
    assert all(torch.equal(found[name], wholes[name]) for name in wholes)
    load(target.views, folder, checksums=True)
    assert [target.wrong(rank, wholes) for rank in range(len(target.views))] == [
        [] for _ in target.views
    ]


class Experts(nn.Module):
    """Part of one rank of 8 experts and their router; nothing but attributes says so."""

    def __init__(self, layout: str, rank: int, num_ranks: int) -> None:
        super().__init__()
        parallelism = Parallelism.parse(layout, num_ranks)
        self.pg_collection = parallelism.groups(rank)
        self.config = types.SimpleNamespace(num_moe_experts=8)
        num_local, inner = 8 // parallelism.ep, 32 // parallelism.etp
        self.router = nn.Parameter(torch.zeros(8, 16))
        self.register_buffer("load", torch.zeros(8, dtype=torch.bfloat16))
        self.up = nn.Parameter(torch.zeros(num_local, inner, 16))
        self.down = nn.Parameter(torch.zeros(num_local, 16, inner))
        for weight, sharded_dim in ((self.up, 1), (self.down, 2)):
            weight.allreduce = False  # type: ignore[attr-defined]
            weight.expert_dim = 0  # type: ignore[attr-defined]
            weight.tensor_model_parallel = True  # type: ignore[attr-defined]
            weight.partition_dim = sharded_dim  # type: ignore[attr-defined]


@pytest.mark.parametrize(("layout", "num_ranks"), [("ep4", 4), ("ep2.etp2", 4), ("etp2", 2)])
def test_modules_of_one_layout_become_those_of_another(
    folder: Path, layout: str, num_ranks: int
) -> None:
    wholes = numbers(up=(8, 32, 16), down=(8, 16, 32), router=(8, 16), load=(8,))
    write_plain(folder / "model.safetensors", wholes, {"format": "pt"})

    def pass_on(context: RankContext) -> None:
        model = Experts(layout, context.rank_idx, num_ranks)
        before = model.up.data_ptr(), model.up._version
        load_checkpoint(model, folder, group=context.group)
        assert before[0] == model.up.data_ptr()
        assert before[1] < model.up._version, "autograd has not heard that the weight is another"
        # A buffer takes over the dtype on disk.
        assert model.load.dtype == torch.float32
        save_checkpoint(model, folder / "again", "v", group=context.group)

    run_ranks(pass_on, num_ranks, mode="threads")
    found = plain_tensors(folder / "again" / "v")
    assert all(torch.equal(found[name], wholes[name]) for name in wholes)
    assert found.keys() == wholes.keys()


def test_each_rank_writes_and_reads_its_own_part_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more than what it holds, counted; and a tensor that two ranks hold is written by one."""
    moved: dict[tuple[str, int], int] = {}
    pwrite, read_rows = os.pwrite, _host.files.read_rows

    def counted_write(descriptor: int, data: Any, offset: int) -> int:
        key = "write", threading.get_ident()
        moved[key] = moved.get(key, 0) + len(data)
        return pwrite(descriptor, data, offset)

    def counted_read(*args: Any) -> int | None:
        key = "read", threading.get_ident()
        moved[key] = moved.get(key, 0) + len(args[5])
        return read_rows(*args)

    tensors = numbers(a=(64, 8192), b=(64, 8192))
    sides = halves(tensors)
    for side in sides:
        side += side_of(numbers(both=(1000,)))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", counted_write)
        patch.setattr(_host.files, "read_rows", counted_read)
        save(sides, folder, "v")
        load(sides, folder)
    half = 2 * 64 * 4096 * 4
    written = sorted(size for (what, _), size in moved.items() if what == "write")
    # One of them writes the other tensor; headers and the lock are small.
    assert half <= written[0] < half + 1000
    assert half + 4000 <= written[1] < half + 5000
    assert [size for (what, _), size in moved.items() if what == "read"] == [half + 4000] * 2


def test_a_rank_has_files_of_what_it_writes_most_of(folder: Path) -> None:
    """So that ranks do not wait for each other at one file."""
    save([side_of(numbers(b=(3, 2))), side_of(numbers(a=(3, 2)))], folder, "v")
    name = "model-0000{}-of-00002.safetensors"
    assert file_of(folder / "v", "b").name == name.format(1)
    assert file_of(folder / "v", "a").name == name.format(2)


@pytest.mark.parametrize("name", [*DTYPES, "F4"])
def test_every_dtype_goes_there_and_back(folder: Path, name: str) -> None:
    dtype = DTYPES.get(name) or torch.float4_e2m1fn_x2
    raw = torch.randint(0, 2 if name == "BOOL" else 256, (16 * 8,), dtype=torch.uint8)
    tensor = (raw.bool() if name == "BOOL" else raw.view(dtype)).reshape(-1, 2)
    sides = halves({"weight": tensor})
    save(sides, folder, "v")
    header, data = header_of(folder / "v" / "model-00001-of-00001.safetensors")
    assert header["weight"]["dtype"] == name
    # The header counts elements, of which a byte of F4 has two.
    assert header["weight"]["shape"] == [len(tensor), 4 if name == "F4" else 2]
    assert data == raw.numpy().tobytes()
    target = torch.empty_like(tensor)
    load([side_of({"weight": target})], folder, checksums=True)
    assert torch.equal(target.view(torch.uint8), tensor.view(torch.uint8))


def test_a_dtype_that_the_format_lacks_is_refused(folder: Path) -> None:
    wrong = {"fine": torch.zeros(2), "complex": torch.zeros(2, dtype=torch.complex128)}
    with pytest.raises(
        Exception, match=r"complex: safetensors has no torch\.complex128, only bool"
    ):
        save([side_of(wrong)], folder, "v")
    assert not (folder / "v").exists()


def test_empty_and_scalar_tensors(folder: Path) -> None:
    tensors = {"none": torch.zeros(0, 3), "one": torch.tensor(5.0), "few": torch.ones(3)}
    save([side_of(tensors), side_of(tensors)], folder, "v")
    found = plain_tensors(folder / "v")
    target = {name: torch.full_like(tensor, 7) for name, tensor in tensors.items()}
    load([side_of(target)], folder, checksums=True)
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor)
        assert torch.equal(target[name], tensor)


def test_memory_of_several_names_is_saved_once_and_filled_by_any_of_them(folder: Path) -> None:
    weight = torch.arange(12.0).reshape(3, 4)
    views = side_of({"first": weight, "second": weight, "wide": torch.ones(1, 2).expand(3, 2)})
    save([views, side_of({"second": weight})], folder, "both")
    assert plain_tensors(folder / "both").keys() == {"first", "second", "wide"}
    save([views, views], folder, "one")
    found = plain_tensors(folder / "one")
    assert found.keys() == {"first", "wide"}
    assert torch.equal(found["first"], weight)
    assert torch.equal(found["wide"], torch.ones(3, 2))
    # Another order of names, of which the checkpoint has the second.
    target = torch.zeros(3, 4)
    load([side_of({"zeroth": target, "first": target})], folder, strict=False)
    assert torch.equal(target, weight)


def test_versions_stand_beside_each_other(folder: Path) -> None:
    for number in (1, 2):
        save(halves(numbers(number, a=(4, 4))), folder, f"step-{number}", add_files=config)
    target = numbers(-1, a=(4, 4))
    assert load([side_of(target)], folder) == [folder / "step-2"]
    assert torch.equal(target["a"], numbers(2, a=(4, 4))["a"])
    assert load([side_of(target)], folder, "step-1") == [folder / "step-1"]
    assert torch.equal(target["a"], numbers(1, a=(4, 4))["a"])
    assert (folder / "step-1" / "config.json").exists()
    # A version's own folder is a checkpoint by itself, as for `from_pretrained`.
    assert load([side_of(target)], folder / "step-2", checksums=True) == [folder / "step-2"]
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock",
        "step-1",
        "step-2",
        "versions.json",
    ]


def test_a_version_that_was_never_entered_is_saved_again(folder: Path) -> None:
    """Its save was killed between the renaming and the entry."""
    for version in ("before", "after"):
        save([side_of(numbers(1, a=(4, 8)))], folder, version)
    said = {"format": 1, "latest": "before", "versions": ["before"]}
    (folder / "versions.json").write_text(json.dumps(said))
    (folder / ".lock").write_text("version after by process 1 on here\nunfinished")
    target = numbers(-1, a=(4, 8))
    with pytest.raises(Exception, match="version after is none of those whose saves have ended"):
        load([side_of(target)], folder, "after")
    save([side_of(numbers(2, a=(4, 8)))], folder, "after")
    assert load([side_of(target)], folder) == [folder / "after"]
    assert torch.equal(target["a"], numbers(2, a=(4, 8))["a"])
    assert sorted(path.name for path in folder.glob(".*")) == [".lock"]


def test_a_version_that_is_no_longer_listed_is_not_replaced(folder: Path) -> None:
    """`versions.json` is lost, and then made anew by the save of another version."""
    saved(folder)
    (folder / "versions.json").unlink()
    sides = halves(numbers(2, a=(4, 8), b=(4, 8)))
    text = refused_save(CheckpointError, sides, folder, "v")
    assert f"{folder / 'v'} is there already, and {folder / 'versions.json'} is missing" in text
    save(sides, folder, "w")
    text = refused_save(CheckpointError, sides, folder, "v")
    assert f"{folder / 'versions.json'} lists ['w']: give the new version another name" in text


def test_a_name_that_is_no_text_is_told_to_all(folder: Path) -> None:
    sides = halves(numbers(a=(4, 8)))
    sides[1] += side_of({"b\udc80": torch.zeros(2)})
    text = refused_save(Exception, sides, folder, "v")
    assert "rank 1: 'b\\udc80' is no name of a parameter" in text


def test_floats_take_the_dtype_of_the_target(folder: Path) -> None:
    save(halves(numbers(0.3, a=(4, 4))), folder, "v")
    target = torch.zeros(4, 4, dtype=torch.bfloat16).t()
    load([side_of({"a": target})], folder)
    assert torch.equal(target, numbers(0.3, a=(4, 4))["a"].bfloat16())


# ---------------------------------------------------------------------------------------------
# Bad input: an error on every rank, and what was there is whole.


def saved(folder: Path) -> Path:
    save(halves(numbers(a=(4, 8), b=(4, 8))), folder, "v", max_file_bytes=128)
    return folder / "v"


def file_of(folder: Path, tensor: str) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / index["weight_map"][tensor]


def test_files_that_are_cut_or_gone(folder: Path) -> None:
    version = saved(folder)
    path = file_of(version, "b")
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    text = refused_load(CheckpointError, folder)
    assert re.search(rf"{path}: b ends at byte {len(data)}, but the file has {len(data) - 1}", text)
    path.write_bytes(data[:5])
    assert f"{path}: expected a header of safetensors" in refused_load(CheckpointError, folder)
    path.write_bytes(data + b"x")
    assert f"but the file has {len(data) + 1}" in refused_load(CheckpointError, folder)
    path.unlink()
    text = refused_load(CheckpointError, folder)
    assert f"b is to be in {path.name}, which is missing" in text
    shutil.rmtree(version)
    assert "its folder is gone" in refused_load(CheckpointError, folder)
    assert "there is no such folder" in refused_load(CheckpointError, folder / "no")
    assert "version w is none of those" in refused_load(CheckpointError, folder, version="w")


def test_every_flipped_byte_is_found_by_checksums(folder: Path) -> None:
    version = saved(folder)

    save(halves(numbers(a=(4, 8), b=(4, 8))), folder, "w", max_file_bytes=128, add_files=config)
    version = folder / "w"
    target = [side_of(numbers(-5, a=(4, 8), b=(4, 8)))]
    paths = [*version.glob("*.safetensors"), version / "config.json"]
    rng = random.Random(3)
    for path in paths:
        data = path.read_bytes()
        for place in sorted(rng.sample(range(len(data)), min(12, len(data)))):
            path.write_bytes(data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :])
            with pytest.raises(Exception, match="CheckpointError") as found:
                load(target, version, checksums=True)
            assert path.name in str(found.value), f"byte {place}"
        path.write_bytes(data)
    load(target, version, checksums=True)
    # In the data, and found by each of several ranks.
    path = file_of(version, "b")
    data = path.read_bytes()
    path.write_bytes(data[:-1] + b"\1")
    text = refused_load(CheckpointError, folder, checksums=True)
    assert re.search(rf"{path}: b \[\(0, 4\), \(\d, \d\)\]: expected checksum 0x", text)


def test_files_of_two_saves_are_no_checkpoint(folder: Path) -> None:
    version = saved(folder)
    save(halves(numbers(100, a=(4, 8), b=(4, 8))), folder, "w", max_file_bytes=128)
    path = file_of(version, "b")
    data = path.read_bytes()
    shutil.copy(folder / "w" / path.name, path)
    text = refused_load(CheckpointError, folder, version="v")
    assert f"{path}: is of save" in text
    assert "files of two saves are mixed" in text
    path.write_bytes(data)
    stale = version / "model-00003-of-00003.safetensors"
    stale.write_bytes(data)
    text = refused_load(CheckpointError, folder, version="v")
    assert f"{stale}: is named by no tensor of model.safetensors.index.json" in text


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("model.safetensors.index.json", ["weight_map", "a"], 3),
        ("model.safetensors.index.json", ["weight_map", "a"], ["x"]),
        ("moe_comm.json", ["files"], []),
        ("moe_comm.json", ["files", "model-00001-of-00002.safetensors"], None),
        ("moe_comm.json", ["other_files"], 1),
        ("moe_comm.json", ["other_files", "config.json"], "x"),
        ("moe_comm.json", ["block_files"], [1]),
        ("moe_comm.json", ["parts", 0], None),
        ("../versions.json", ["versions", 0], {}),
    ],
)
def test_json_of_other_kinds_is_named(folder: Path, name: str, path: list[Any], value: Any) -> None:
    save(halves(numbers(a=(4, 8), b=(4, 8))), folder, "v", max_file_bytes=128, add_files=config)
    file = (folder / "v" / name).resolve()
    said = json.loads(file.read_text())
    inner = said
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    file.write_text(json.dumps(said))
    assert f"{file}: " in refused_load(CheckpointError, folder, checksums=True)


def test_json_and_headers_too_deep_to_be_read_are_named(folder: Path) -> None:
    version = saved(folder)
    deep = b"[" * 100_000
    for path in (file_of(version, "b"), version / "moe_comm.json", folder / "versions.json"):
        is_json = path.suffix == ".json"
        path.write_bytes(deep if is_json else len(deep).to_bytes(8, "little") + deep)
        assert f"{path}: " in refused_load(CheckpointError, folder)


def test_one_file_beside_an_index_is_of_another_checkpoint(folder: Path) -> None:
    """As left by a smaller model; `from_pretrained` reads it and not the files of the index."""
    version = saved(folder)
    write_plain(version / "model.safetensors", numbers(9, a=(4, 8), b=(4, 8)), {"format": "pt"})
    text = refused_load(CheckpointError, folder)
    assert f"{version / 'model.safetensors'}: is of another checkpoint than" in text

    def weights(where: Path) -> None:
        write_plain(where / "model.safetensors", numbers(a=(4, 8)), {"format": "pt"})

    text = refused_save(ValueError, halves(numbers(a=(4, 8))), folder, "w", add_files=weights)
    assert "add_files must leave weights to this save, got model.safetensors" in text
    text = refused_save(TypeError, halves(numbers(a=(4, 8))), folder, "w", add_files="config.json")
    assert "add_files must be callable, got 'config.json'" in text
    assert not (folder / "w").exists()


def test_files_of_others_that_do_not_fit_each_other(folder: Path) -> None:
    """Nothing but the names in the index and in the headers tells them apart."""
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    tensors = numbers(a=(4, 8), b=(4, 8))
    for name, tensor in zip(names, "ab", strict=True):
        write_plain(folder / name, {tensor: tensors[tensor]}, {"format": "pt"})
    index = folder / "model.safetensors.index.json"

    def load_with(weight_map: Any) -> str:
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return refused_load(CheckpointError, folder)

    right = dict(zip("ab", names, strict=True))
    assert f"{names[0]}: has no b, which" in load_with({"a": names[0], "b": names[0]})
    write_plain(folder / names[1], {"b": tensors["b"], "c": tensors["b"]}, {"format": "pt"})
    assert f"{names[1]}: has c, which" in load_with(right)
    write_plain(folder / names[1], {"b": tensors["b"]}, {"format": "pt"})
    assert f"{index}: a: expected the name of a file beside it" in load_with({"a": "../x"})
    assert "expected a weight_map" in load_with([])
    index.write_text("{")
    assert f"{index}: expected JSON" in refused_load(CheckpointError, folder)
    index.write_text(json.dumps({"weight_map": right}))
    text = refused_load(CheckpointError, folder, checksums=True)
    assert "has no checksums" in text
    sides = halves(numbers(-5, a=(4, 8), b=(4, 8)))
    load(sides, folder)
    assert torch.equal(sides[1][1].tensor, tensors["b"][:, 4:])


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({"a": torch.zeros(4, 8)}, r"b is not in the checkpoint, rank 0 needs it"),
        (
            {"a": torch.zeros(4, 8), "b": torch.zeros(8, 8)},
            r"b: shapes do not add up: .* \(8, 8\)",
        ),
        (
            {"a": torch.zeros(4, 8), "b": torch.zeros(8, 4)},
            r"b: shapes do not add up: .* \(8, 4\)",
        ),
        (
            {"a": torch.zeros(4, 8), "b": torch.zeros(4, 8, dtype=torch.int32)},
            r"model\.safetensors: b: expected torch\.float32 or what becomes it, got torch\.int32",
        ),
        (
            {"a": torch.zeros(4, 8), "b": torch.zeros(4, 8, dtype=torch.float8_e4m3fn)},
            r"b: expected torch\.float32 .* with its scale factors under",
        ),
        (
            {"a": torch.zeros(4, 8), "b": torch.zeros(4, 8), "more": torch.zeros(1)},
            r"parameter 'more' on the checkpoint has no destination; strict=False takes the others",
        ),
    ],
)
def test_another_model_is_refused(
    folder: Path, tensors: dict[str, torch.Tensor], text: str
) -> None:
    write_plain(folder / "model.safetensors", tensors, {"format": "pt"})
    assert re.search(text, refused_load(ValueError, folder))


def test_what_no_rank_takes_is_left_when_asked(folder: Path) -> None:
    tensors = numbers(a=(4, 8), b=(4, 8), more=(2,))
    write_plain(folder / "model.safetensors", tensors, {"format": "pt"})
    sides = halves(numbers(-5, a=(4, 8), b=(4, 8)))
    load(sides, folder, strict=False)
    assert torch.equal(sides[0][0].tensor, tensors["a"][:, :4])


def test_saves_that_cannot_be(folder: Path) -> None:
    saved(folder)
    sides = halves(numbers(9, a=(4, 8), b=(4, 8)))
    text = refused_save(CheckpointError, sides, folder, "v")
    assert f"{folder}: version v is there already, of ['v']" in text
    (folder / "other").mkdir()
    assert "it is no version of this folder" in refused_save(
        CheckpointError, sides, folder, "other"
    )
    assert "got '../v'" in refused_save(ValueError, sides, folder, "../v")
    assert "max_file_bytes must be >= 1, got 0" in refused_save(
        ValueError, sides, folder, "w", max_file_bytes=0
    )
    text = refused_save(ValueError, [sides[0], side_of({})], folder, "w")
    assert "no source rank holds elements [[0, 4], [4, 8]] of the whole tensor" in text
    assert "which the checkpoint needs" in text

    def collides(where: Path) -> None:
        (where / "model-00001-of-00002.safetensors").write_text("")

    text = refused_save(CheckpointError, sides, folder, "w", add_files=collides, max_file_bytes=128)
    assert "model-00001-of-00002.safetensors: cannot be written: File exists" in text
    (folder / "file").write_text("")
    text = refused(
        CheckpointError,
        sides,
        lambda side, group: save_checkpoint(side, folder / "file" / "x", "w", group=group),
    )
    assert "cannot be made: Not a directory" in text


def test_ranks_that_save_different_things(folder: Path) -> None:
    def run(context: RankContext) -> str:
        with pytest.raises(ValueError, match="ranks save different things") as found:
            save_checkpoint(
                CheckpointViews(side_of(numbers(a=(2, 2)))),
                folder,
                f"v{context.rank_idx}",
                group=context.group,
            )
        return str(found.value)

    (text,) = set(run_ranks(run, 2, mode="threads"))
    assert "version is v0 on rank 0 and v1 on rank 1" in text


def test_a_second_writer_is_refused(folder: Path) -> None:
    sides = halves(numbers(9, a=(4, 8), b=(4, 8)))
    texts = []

    def second(_: Path) -> None:
        texts.append(
            refused(
                CheckpointError,
                sides,
                lambda side, group: save_checkpoint(side, folder, "second", group=group),
            )
        )

    save(sides, folder, "first", add_files=second)
    assert (
        "cannot save version second while another writer saves version first by process" in texts[0]
    )
    assert load(sides, folder) == [folder / "first"] * 2
    save(sides, folder, "second")


def test_a_process_forked_during_a_save_does_not_keep_others_from_the_next(folder: Path) -> None:
    children = []

    def fork(where: Path) -> None:
        child = os.fork()
        if not child:
            signal.pause()
            os._exit(0)
        children.append(child)

    try:
        save([side_of(numbers(a=(4, 8)))], folder, "v", add_files=fork)
        save([side_of(numbers(a=(4, 8)))], folder, "w")
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_a_link_with_the_name_of_the_new_version_stays(folder: Path) -> None:
    version = saved(folder)
    for target in (version, folder / "nowhere"):
        (folder / "w").symlink_to(target)
        text = refused_save(CheckpointError, halves(numbers(a=(4, 8))), folder, "w")
        assert f"{folder / 'w'} is there already" in text
        assert (folder / "w").readlink() == target
        (folder / "w").unlink()


def test_a_stale_model_is_not_saved_and_a_failed_load_makes_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(folder)
    model = nn.Module()
    model.a, model.b = (nn.Parameter(torch.zeros(4, 8)) for _ in "ab")
    model.pg_collection = Parallelism(1).groups(0)  # type: ignore[assignment]

    def fails(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(_host.files, "read_rows", fails)
        with pytest.raises(CheckpointError, match=r"safetensors: a cannot be read: Input/output"):
            load_checkpoint(model, folder)
    assert is_stale(model)
    with pytest.raises(ValueError, match="the model is stale and must not be saved: a load failed"):
        save_checkpoint(model, folder, "w")
    load_checkpoint(model, folder)
    assert not is_stale(model)
    save_checkpoint(model, folder, "w")


def dying_in_a_load(context: RankContext, folder: str) -> tuple[str, bool]:
    """The second rank is killed as it reads; the first, which has read all of its own, must hear of it."""
    model = nn.Module()
    model.a, model.b = (nn.Parameter(torch.zeros(4, 8)) for _ in "ab")
    model.pg_collection = Parallelism(2).groups(context.rank_idx)  # type: ignore[assignment]
    if context.rank_idx == 1:
        _host.files.read_rows = lambda *_: killed()
    with pytest.raises(CommunicationError) as found:
        load_checkpoint(model, folder)
    return str(found.value), is_stale(model)


def test_a_rank_that_is_killed_in_a_load_leaves_stale_models(folder: Path) -> None:
    saved(folder)
    outcomes = run_ranks(dying_in_a_load, 2, str(folder), fresh=True, expect_dead=[1])
    assert outcomes[1] is None
    assert "a load of a checkpoint ended" in outcomes[0][0]
    assert outcomes[0][1]


# ---------------------------------------------------------------------------------------------
# Saves that end on the way.


@pytest.mark.parametrize("end", [killed, refused_by_the_system])
def test_a_save_that_ends_anywhere_leaves_the_version_before_or_the_new_one(
    folder: Path, end: Callable[[], object]
) -> None:
    wholes = tuple(numbers(first, a=(4, 8), b=(4, 8)) for first in (1, 2, 3))
    options = {"max_file_bytes": 128}
    save([side_of(wholes[0])], folder / "first", "before", **options)
    assert 20 < saves_ended_anywhere(folder, wholes, lambda _: options, end) < 99


def full_disk(context: RankContext, folder: str) -> str:
    """The second rank may write no more than a part of its tensors."""
    sides = halves(numbers(2, a=(64, 1024), b=(64, 1024)))
    if context.rank_idx == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    try:
        with pytest.raises(CheckpointError) as found:
            save_checkpoint(CheckpointViews(sides[context.rank_idx]), folder, "after")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return str(found.value)


def test_a_full_disk_on_one_rank_is_an_error_on_all(folder: Path) -> None:
    save(halves(numbers(1, a=(4, 8), b=(4, 8))), folder, "before")
    (text,) = set(run_ranks(full_disk, 2, str(folder), fresh=True))
    assert re.search(r"rank 1: .*\.safetensors: (a|b) cannot be written: File too large", text)
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "before", "versions.json"]


@pytest.mark.parametrize(
    "kill",
    [(1, "pwrite", 3), (1, "fsync", 1), (0, "fsync", 2), (0, "rename", 1), (0, "replace", 1)],
)
def test_a_rank_that_is_killed_leaves_the_version_before(
    folder: Path, kill: tuple[int, str, int]
) -> None:
    before = numbers(1, a=(4, 8), b=(4, 8))
    save(halves(before), folder, "before")
    save_with_a_killed_rank(folder, kill)
    target = numbers(-1, a=(4, 8), b=(4, 8))
    assert load([side_of(target)], folder, checksums=True) == [folder / "before"]
    assert all(torch.equal(target[name], before[name]) for name in before)
    # And the next save finds its place.
    save(halves(numbers(3, a=(4, 8), b=(4, 8))), folder, "after")
    assert load([side_of(target)], folder, checksums=True) == [folder / "after"]
    assert torch.equal(target["a"], numbers(3, a=(4, 8))["a"])


# ---------------------------------------------------------------------------------------------
# FP8 with its scale factors.


def quantized(values: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Data and scale factors of `values`, as a format has them."""
    if kind.startswith("mxfp8"):
        data, scale = quantize_mxfp8(values)
        return data, scale.view(torch.uint8) if kind == "mxfp8_u8" else scale
    if kind == "128x128_e8m0":  # as transformers' FineGrainedFP8Config(scale_fmt="ue8m0")
        data, scale = quantize_fp8_block(values, (128, 128), ScaleFormat.FLOAT32_POWER_OF_2)
        return data, scale.to(torch.float8_e8m0fnu)
    return quantize_fp8_block(values, (128, 128) if kind == "128x128" else (1, 128))


@pytest.mark.parametrize("kind", ["128x128", "128x128_e8m0", "1x128", "mxfp8", "mxfp8_u8"])
def test_fp8_weights_and_their_scales_go_through_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """As data and scales again, and as the numbers that they stand for, cut anywhere."""
    monkeypatch.setattr(rectangles, "_CHUNK_BYTES", 10_000)
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(3, 160, 192, generator=generator).bfloat16()
    data, scale = quantized(values, kind)
    tensors = {"w": data, "w_scale_inv": scale}
    save([side_of(tensors)], folder, "v")
    stored = plain_tensors(folder / "v")
    same = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    load([side_of(same)], folder, checksums=True)
    for name, tensor in tensors.items():
        assert torch.equal(stored[name].view(torch.uint8), tensor.view(torch.uint8))
        assert torch.equal(same[name].view(torch.uint8), tensor.view(torch.uint8))
    expected = (
        dequantize_mxfp8(data, scale, torch.float32)
        if kind.startswith("mxfp8")
        else dequantize_fp8_block(
            data, scale.float(), (128, 128) if "128x128" in kind else (1, 128), torch.float32
        )
    )
    # Rows of heads at no border of a block, and the columns of the other rank.
    for dtype in (torch.float32, torch.bfloat16):
        parts = [torch.zeros(3, 4, 30, 70, dtype=dtype), torch.zeros(3, 4, 30, 122, dtype=dtype)]
        held = [(Interval(0, 0, 70),), (Interval(70, 0, 122),)]
        load(
            [
                [
                    CheckpointView(
                        "w",
                        (3, 4, 40, 192),
                        (whole(3), whole(4), (Interval(7, 0, 30),), columns),
                        part,
                        (3, 160, 192),
                    )
                ]
                for part, columns in zip(parts, held, strict=True)
            ],
            folder,
        )
        rows = expected.view(3, 4, 40, 192)[:, :, 7:37].to(dtype)
        assert torch.equal(torch.cat(parts, dim=-1), rows)


def test_scales_of_no_known_blocks_are_refused(folder: Path) -> None:
    data = torch.zeros(160, 192, dtype=torch.float8_e4m3fn)
    target = side_of({"w": torch.zeros(160, 192)})
    for scale in (torch.ones(3, 2), torch.ones(2, 2, dtype=torch.bfloat16)):
        write_plain(folder / "model.safetensors", {"w": data, "w_scale_inv": scale}, {})
        with pytest.raises(Exception, match=r"w: FP8 of shape \(160, 192\) needs scale factors"):
            load([target], folder)


@pytest.mark.parametrize("other", ["w.weight_scale", "w.scale", "qscale_w"])
@pytest.mark.parametrize("strict", [True, False])
def test_fp8_with_scales_under_other_names_is_refused(
    folder: Path, other: str, strict: bool
) -> None:
    tensors = {"w": torch.ones(128, 128, dtype=torch.float8_e4m3fn), other: torch.ones(1, 1)}
    write_plain(folder / "model.safetensors", tensors, {})
    target = side_of({"w": torch.zeros(128, 128)})
    with pytest.raises(Exception, match="with its scale factors under the name w_scale_inv"):
        load([target], folder, strict=strict)
    assert not target[0].tensor.any()


def test_fp8_without_the_scales_that_the_files_have_is_refused(folder: Path) -> None:
    weight = torch.ones(128, 128, dtype=torch.float8_e4m3fn)
    write_plain(folder / "model.safetensors", {"w": weight, "w_scale_inv": torch.ones(1, 1)}, {})
    with pytest.raises(Exception, match=r"model.safetensors, times w_scale_inv, which no rank hol"):
        load([side_of({"w": torch.zeros_like(weight)})], folder)


def test_a_checkpoint_of_torch_is_told(folder: Path) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=folder, no_dist=True)
    with pytest.raises(
        Exception, match=f"{folder} is a checkpoint of torch.distributed.checkpoint"
    ):
        load([side_of({"w": torch.zeros(2)})], folder)
