"""Deltas of safetensors checkpoints: chains of them by some ranks, loaded by others and compacted."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_comm import _host
from moe_comm.checkpoints import compact_checkpoint, save_checkpoint
from moe_comm.checkpoints.blocks import BLOCK_BYTES, boxes_of_run, num_neighbors, place_of
from moe_comm.errors import CheckpointError
from moe_comm.resharding import CheckpointView, CheckpointViews
from moe_comm.resharding.describe.intervals import whole
from moe_comm.resharding.formats.number_formats import quantize_fp8_block
from moe_comm.testing import RankContext, run_ranks
from tests.helpers import checkpoint_sides
from tests.helpers.checkpoint_layouts import DrawnSide, drawn_finer, drawn_shapes
from tests.helpers.checkpoint_sides import (
    ended_anywhere,
    folder_in_memory,
    halves,
    killed,
    load,
    numbers,
    refused_by_the_system,
    save,
    save_with_a_killed_rank,
    saves_ended_anywhere,
    side_of,
)
from tests.helpers.plain_safetensors import DTYPES, header_of, plain_tensors


@pytest.fixture
def folder() -> Iterator[Path]:
    yield from folder_in_memory()


def delta_bytes(version: Path) -> int:
    """Bytes of tensors in the files of a delta, by the letter of the format."""
    total = 0
    for path in version.glob("*.blocks"):
        header, _ = header_of(path)
        assert header.pop("__metadata__")["format"] == "moe_comm.blocks"
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            total += 0 if name.startswith("moe_comm.") else stop - start
    return total


def equal_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].shape == other[name].shape
        and one[name].dtype == other[name].dtype
        and torch.equal(
            one[name].contiguous().view(-1).view(torch.uint8),
            other[name].contiguous().view(-1).view(torch.uint8),
        )
        for name in one
    )


def test_boxes_of_a_run_are_its_elements_in_order() -> None:
    rng = random.Random(1)
    for _ in range(300):
        sizes = [rng.randint(1, 4) for _ in range(rng.randint(0, 4))]
        array = torch.arange(torch.Size(sizes).numel()).reshape(sizes)
        stop = rng.randint(0, array.numel())
        start = rng.randint(0, stop)
        boxes = list(boxes_of_run(sizes, start, stop))
        parts = [array[tuple(slice(*bounds) for bounds in box)].reshape(-1) for box in boxes]
        assert torch.cat([array.new_empty(0), *parts]).tolist() == [*range(start, stop)]
        assert len(boxes) <= max(1, 2 * len(sizes) - 1)


def test_elements_of_a_box_are_found_in_the_whole_view() -> None:
    rng = random.Random(2)
    for _ in range(500):
        view = tuple(rng.randint(1, 4) for _ in range(rng.randint(0, 4)))
        box = tuple((low, rng.randint(low + 1, size)) for size in view for low in [size // 2])
        whole_view = torch.arange(torch.Size(view).numel()).reshape(view)
        inner = whole_view[tuple(slice(*bounds) for bounds in box)].reshape(-1)
        places = inner.tolist()
        assert [place_of(view, box, element) for element in range(len(places))] == places
        count = num_neighbors(view, box)
        steps = inner.view(-1, count) - inner.view(-1, count)[:, :1]
        assert torch.equal(steps, torch.arange(count).expand_as(steps))
        is_one = places == [*range(places[0], places[0] + len(places))]
        assert (count == len(places)) == is_one


# ---------------------------------------------------------------------------------------------
# What is loaded is what was saved.


def changed_somewhere(rng: random.Random, wholes: dict[str, torch.Tensor]) -> int:
    """Change a few elements of some tensors; return of how many blocks these can be."""
    count = 0
    for tensor in wholes.values():
        if rng.random() < 0.5:
            continue
        flat = tensor.view(-1)
        for _ in range(rng.choice([1, 1, 5])):
            start = rng.randrange(len(flat))
            flat[start : start + rng.choice([1, 1, 40_000])] += 1
            count += 1 + 40_000 * flat.element_size() // BLOCK_BYTES + 1
    return count


def drawn_side(
    rng: random.Random, wholes: dict[str, torch.Tensor], dtype: torch.dtype
) -> DrawnSide:
    """Ranks that hold the tensors, cut at random."""
    shapes = {name: tuple(tensor.shape) for name, tensor in wholes.items()}
    finer, _ = drawn_finer(rng, shapes)
    is_finer = rng.random() < 0.3
    side = DrawnSide(rng, shapes, rng.randint(1, 4), dtype, finer=finer if is_finer else None)
    for rank, views in enumerate(side.views):
        side.fill(rank, wholes)
        side.views[rank] = [
            dataclasses.replace(view, disk_shape=shapes[view.name]) for view in views
        ]
    return side


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < 8 else pytest.mark.full) for seed in range(30)]
)
def test_chains_of_layouts_drawn_at_random(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.int64, torch.uint8])
    scale = rng.choice([50, 100])
    shapes = {
        name: tuple(size * scale for size in shape) for name, shape in drawn_shapes(rng).items()
    }
    generator = torch.Generator().manual_seed(seed)
    wholes = {
        name: torch.randint(0, 100, shape, generator=generator).to(dtype)
        for name, shape in shapes.items()
    }
    saved: list[dict[str, torch.Tensor]] = []
    side = drawn_side(rng, wholes, dtype)
    for number in range(5):
        most = changed_somewhere(rng, wholes)
        if rng.random() < 0.5:
            side = drawn_side(rng, wholes, dtype)
        for rank in range(len(side.views)):
            side.fill(rank, wholes)
        save(side.views, folder, f"v{number}", base=f"v{number - 1}" if number else None)
        saved.append({name: tensor.clone() for name, tensor in wholes.items()})
        if number:
            # A block that ranks share may be written by each of them, a part of it.
            assert delta_bytes(folder / f"v{number}") <= most * BLOCK_BYTES
    for number in rng.sample(range(5), 3):
        target = drawn_side(rng, wholes, dtype)
        for views in target.views:
            for view in views:
                view.tensor.fill_(-1 if dtype.is_signed else 255)
        load(target.views, folder, f"v{number}", checksums=True)
        wrong = [target.wrong(rank, saved[number]) for rank in range(len(target.views))]
        assert wrong == [[] for _ in target.views]
    assert compact_checkpoint(folder) == folder / "v4-whole"
    assert equal_bits(plain_tensors(folder / "v4-whole"), saved[4])
    said = json.loads((folder / "versions.json").read_text())
    assert said == {
        "format": 1,
        "latest": "v4-whole",
        "versions": ["v0", "v1", "v2", "v3", "v4", "v4-whole"],
    }


def finer_halves(tensors: dict[str, torch.Tensor]) -> list[list[CheckpointView]]:
    """Two ranks that hold half of the columns each, of matrices whose rows are seen as two dimensions."""
    return [
        [
            CheckpointView(
                view.name,
                (2, view.shape[0] // 2, view.shape[1]),
                (whole(2), whole(view.shape[0] // 2), view.dims[1]),
                view.tensor.view(2, -1, view.tensor.shape[1]),
                view.shape,
            )
            for view in side
        ]
        for side in halves(tensors)
    ]


def test_nothing_is_written_of_what_is_as_it_was_whatever_the_layout(folder: Path) -> None:
    """By the checksums of whoever wrote it; by the files where parts are cut otherwise."""
    wholes = numbers(a=(512, 300), b=(90, 2000))
    layouts = halves(wholes), [side_of(wholes)], finer_halves(wholes), halves(wholes)
    for number, sides in enumerate(layouts):
        save(sides, folder, f"v{number}", base=f"v{number - 1}" if number else None)
    assert [delta_bytes(folder / f"v{number}") for number in range(4)] == [0] * 4
    target = numbers(-1, a=(512, 300), b=(90, 2000))
    load([side_of(target)], folder, checksums=True)
    assert equal_bits(target, wholes)


def test_columns_that_changed_are_loaded_as_whatever_shape(folder: Path) -> None:
    """Each layout changes all that the next one sees otherwise."""
    shapes = {"a": (512, 300), "b": (90, 2000)}
    save(halves(numbers(**shapes)), folder, "v0")
    for number, cut in enumerate((finer_halves, halves, finer_halves), 1):
        wholes = numbers(1000.0 * number, **shapes)
        for tensor in wholes.values():  # the rest is of versions before
            tensor[number * 20 :] -= 1000
        save(cut(wholes), folder, f"v{number}", base=f"v{number - 1}")
        for again in (finer_halves, halves):
            target = again(numbers(-1, **shapes))
            load(target, folder, checksums=True)
            for mine, expected in zip(target, again(wholes), strict=True):
                for view, other in zip(mine, expected, strict=True):
                    assert torch.equal(view.tensor, other.tensor)
        assert equal_bits(plain_tensors(compact_checkpoint(folder, f"v{number}")), wholes)


def test_one_element_is_one_block_of_the_rank_that_has_it(folder: Path) -> None:
    wholes = numbers(a=(512, 512), b=(512, 512))
    sides = halves(wholes)
    save(sides, folder, "v0")
    sides[1][0].tensor[300, 200] = -1
    save(sides, folder, "v1", base="v0")
    assert delta_bytes(folder / "v1") == BLOCK_BYTES
    sides[1][0].tensor[301, 200] = -2
    save(sides, folder, "v2", base="v1")
    target = numbers(-1, a=(512, 512), b=(512, 512))
    load([side_of(target)], folder)
    wholes["a"][300, 456], wholes["a"][301, 456] = -1, -2
    assert equal_bits(target, wholes)


def test_a_base_without_checksums_of_blocks_is_read(folder: Path) -> None:
    """As one that was converted."""
    wholes = numbers(a=(512, 512), b=(512, 512))
    save(halves(wholes), folder, "v0")
    manifest = folder / "v0" / "moe_comm.json"
    said = json.loads(manifest.read_text())
    del said["block_files"]
    manifest.write_text(json.dumps(said))
    wholes["b"][5, 5] = -1
    save(halves(wholes), folder, "v1", base="v0")
    assert delta_bytes(folder / "v1") == BLOCK_BYTES
    target = numbers(-1, a=(512, 512), b=(512, 512))
    load(halves(target), folder, checksums=True)


def test_weights_are_read_once_and_bases_not_at_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = halves(numbers(a=(512, 512), b=(512, 512)))
    save(sides, folder, "v0")
    read: list[int] = []
    read_rows = _host.files.read_rows

    def counted(*args: Any) -> int | None:
        read.append(len(args[5]))
        return read_rows(*args)

    monkeypatch.setattr(_host.files, "read_rows", counted)
    save(sides, folder, "v1", base="v0")
    assert read == []
    # Parts that are cut otherwise are compared with the files.
    save([side_of(numbers(a=(512, 512), b=(512, 512)))], folder, "v2", base="v0")
    assert sum(read) == 2 * 512 * 512 * 4
    assert delta_bytes(folder / "v2") == 0


def test_tensors_come_go_and_change_their_shapes(folder: Path) -> None:
    save(halves(numbers(a=(400, 100), b=(400, 100), same=(9, 8), gone=(4, 4))), folder, "v0")
    second = {
        **numbers(7, a=(400, 200), new=(300, 100), none=(0, 4)),
        **numbers(same=(9, 8)),
        "b": numbers(b=(400, 100))["b"].bfloat16(),
    }
    save(halves(second), folder, "v1", base="v0")
    third = {**{name: tensor.clone() for name, tensor in second.items()}, "one": torch.ones(2, 2)}
    third["a"][0, 0] = -3
    save(halves(third), folder, "v2", base="v1")
    for version, wholes in (("v1", second), ("v2", third)):
        target = {name: torch.full_like(tensor, 77) for name, tensor in wholes.items()}
        load([side_of(target)], folder, version, checksums=True)
        assert equal_bits(target, wholes)
    path = compact_checkpoint(folder, "v1", "old")
    assert equal_bits(plain_tensors(path), second)
    # The compacted version is not the latest, as what it was made of.
    assert load([side_of(target)], folder) == [folder / "v2"]
    # A name that went and comes back is another tensor.
    fourth = {**third, "gone": torch.ones(4, 4)}
    save(halves(fourth), folder, "v3", base="v2")
    target = {name: torch.full_like(tensor, 77) for name, tensor in fourth.items()}
    load([side_of(target)], folder, checksums=True)
    assert equal_bits(target, fourth)


@pytest.mark.parametrize("name", ["BOOL", "U16", "C64", "F8_E8M0", "F4"])
def test_every_dtype_changes(folder: Path, name: str) -> None:
    dtype = DTYPES.get(name) or torch.float4_e2m1fn_x2
    raw = torch.randint(0, 2 if name == "BOOL" else 256, (1 << 18,), dtype=torch.uint8)
    for version in range(3):
        tensor = (raw.bool() if name == "BOOL" else raw.clone().view(dtype)).reshape(-1, 2)
        base = f"v{version - 1}" if version else None
        save(halves({"weight": tensor}), folder, f"v{version}", base=base)
        if version:
            # Of each half.
            assert delta_bytes(folder / f"v{version}") == 2 * BLOCK_BYTES
        target = torch.empty_like(tensor)
        load([side_of({"weight": target})], folder, checksums=True)
        assert torch.equal(target.view(torch.uint8), tensor.view(torch.uint8))
        raw[70_000 * (version + 1) // 16 * 16 - 16 :][:16] ^= 1


def test_fp8_weights_of_a_delta_become_numbers(folder: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(640, 384, generator=generator).bfloat16()
    for number in range(2):
        data, scale = quantize_fp8_block(values, (128, 128))
        sides = [[*side, *side_of({"w_scale_inv": scale})] for side in halves({"w": data})]
        save(sides, folder, f"v{number}", base="v0" if number else None)
        values[200:205, 300] *= 100
    halved = halves({"w": torch.zeros(640, 384)})
    load(halved, folder)
    found = torch.zeros(640, 384)
    load([side_of({"w": found})], compact_checkpoint(folder))
    assert torch.equal(torch.cat([side[0].tensor for side in halved], 1), found)
    assert found[:, 300].abs().max() > 20


# ---------------------------------------------------------------------------------------------
# Bad input: an error on every rank, and what was there is whole.


def chain(folder: Path) -> list[dict[str, torch.Tensor]]:
    """Three versions: all of `a` is of the second, one block of `b` of the third."""
    wholes = numbers(a=(256, 256), b=(256, 256))
    saved = []
    for number in range(3):
        if number == 1:
            wholes["a"] += 1000
        elif number == 2:
            wholes["b"][200, 7] = -1
        save(halves(wholes), folder, f"v{number}", base=f"v{number - 1}" if number else None)
        saved.append({name: tensor.clone() for name, tensor in wholes.items()})
    return saved


SHAPES = {"a": (256, 256), "b": (256, 256)}
refused_load = functools.partial(checkpoint_sides.refused_load, CheckpointError, shape=SHAPES["a"])


def refused_save(
    error: type[Exception], folder: Path, base: Any, shapes: dict[str, tuple[int, ...]] = SHAPES
) -> str:
    sides = halves(numbers(**shapes))
    return checkpoint_sides.refused_save(error, sides, folder, "new", base=base)


def edit(path: Path, **said: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | said))


def test_bases_that_are_none(folder: Path) -> None:
    chain(folder)
    text = refused_save(CheckpointError, folder, "v9")
    assert "version v9 is none of those whose saves have ended: ['v0', 'v1', 'v2']" in text
    assert "base must be a str, got int" in refused_save(TypeError, folder, 7)
    assert "base must be up to 100 letters" in refused_save(ValueError, folder, "../v1")
    text = refused_save(ValueError, folder, "v1", {"a": (256, 260), "c": (256, 256)})
    assert re.search(r"v1 has no tensor of this model .* expected a .*\(256, 260\)", text)
    with pytest.raises(Exception, match="a delta has one file a rank; got 7 with base v1"):
        save(halves(numbers(a=(4, 8))), folder, "new", base="v1", max_file_bytes=7)

    def run(context: RankContext) -> str:
        side = CheckpointViews(halves(numbers(a=(4, 8)))[context.rank_idx])
        base = ("v1", None)[context.rank_idx]
        with pytest.raises(ValueError, match="ranks save different things") as found:
            save_checkpoint(side, folder, "new", base=base, group=context.group)
        return str(found.value)

    (text,) = set(run_ranks(run, 2, mode="threads"))
    assert "base is v1 on rank 0 and None on rank 1" in text


def test_a_base_that_is_gone_or_another_one(folder: Path) -> None:
    saved = chain(folder)
    (folder / "v1").rename(folder / "kept")
    for text in (refused_load(folder, "v2"), refused_save(CheckpointError, folder, "v2")):
        assert f"{folder / 'v2' / 'moe_comm.json'}: is a delta over version v1 of save" in text
        assert f"whose folder {folder / 'v1'} is missing; a is read from there" in text
    # Another save of the same name.
    save(halves(saved[1]), folder, "v1")
    for text in (refused_load(folder, "v2"), refused_save(CheckpointError, folder, "v2")):
        assert re.search(
            r"over version v1 of save [0-9a-f]{16}, but .*v1/moe_comm.json is of save [0-9a-f]{16}: it is "
            "another version of this name",
            text,
        )
    shutil.rmtree(folder / "v1")
    (folder / "kept").rename(folder / "v1")
    target = numbers(-1, a=(256, 256), b=(256, 256))
    load([side_of(target)], folder, "v2", checksums=True)
    assert equal_bits(target, saved[2])


def test_chains_that_are_no_chains(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain(folder)
    monkeypatch.setattr("moe_comm.checkpoints.deltas.MAX_DELTAS", 2)
    text = refused_save(CheckpointError, folder, "v2")
    assert "v2: is the last of 2 deltas, expected fewer than 2 below another: compact it" in text
    monkeypatch.setattr("moe_comm.checkpoints.chains.MAX_DELTAS", 1)
    text = refused_load(folder, "v2")
    assert "v1/moe_comm.json: is a delta over version v0" in text
    assert "expected at most 1 deltas, got more" in text
    monkeypatch.undo()
    save_of = json.loads((folder / "v2" / "moe_comm.json").read_text())["save"]
    edit(folder / "v1" / "moe_comm.json", base={"version": "v2", "save": save_of})
    text = refused_load(folder, "v2")
    assert "v1/moe_comm.json: is a delta over version v2" in text
    assert "which is a delta over it" in text
    edit(folder / "v1" / "moe_comm.json", base={"version": "../v0", "save": save_of})
    assert "what it says of a delta is damaged" in refused_load(folder, "v2")


def test_every_flipped_byte_of_a_middle_delta_is_found(folder: Path) -> None:
    saved = chain(folder)
    rng = random.Random(3)
    for path in sorted((folder / "v1").glob("*.blocks")):
        data = path.read_bytes()
        header, _ = header_of(path)
        sums = header["moe_comm.checksums"]["data_offsets"]
        begin = len(data) - max(entry["data_offsets"][1] for entry in list(header.values())[1:])
        places = [*rng.sample(range(begin), 30), *rng.sample(range(begin, len(data)), 30)]
        for place in places:
            path.write_bytes(data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :])
            if sums[0] <= place - begin < sums[1]:
                # A later delta has checksums of its own.
                assert path.name in refused_load(folder, "v1", checksums=True)
                continue
            text = refused_load(folder, "v2", checksums=True)
            assert str(path) in text, f"byte {place}"
            if place >= begin and "moe_comm.runs" not in text:
                assert re.search(r"a elements \d+ to \d+.*: expected checksum 0x.*, got 0x", text)
        path.write_bytes(data[:-1])
        assert f"{path}: a ends at byte {len(data)}" in refused_load(folder, "v2")
        path.unlink()
        text = refused_load(folder, "v2")
        assert f"{path}: is named by moe_comm.json, and missing" in text
        path.write_bytes(data)
    target = numbers(-1, a=(256, 256), b=(256, 256))
    load([side_of(target)], folder, checksums=True)
    assert equal_bits(target, saved[2])


def test_files_of_two_saves_are_no_delta(folder: Path) -> None:
    chain(folder)
    name = "moe_comm-00001-of-00002.blocks"
    shutil.copy(folder / "v2" / name, folder / "v1" / name)
    text = refused_load(folder, "v2")
    assert f"{folder / 'v1' / name}: is of save" in text
    assert "files of two saves are mixed" in text


def test_checksums_of_a_base_that_have_changed_are_not_believed(folder: Path) -> None:
    chain(folder)
    path = folder / "v0" / "moe_comm-00002-of-00002.blocks"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    text = refused_save(CheckpointError, folder, "v0")
    assert f"{path}: moe_comm.checksums: expected checksum" in text


def test_what_cannot_be_compacted(folder: Path) -> None:
    chain(folder)
    with pytest.raises(ValueError, match="v0 is a whole version, and no delta"):
        compact_checkpoint(folder, "v0")
    with pytest.raises(CheckpointError, match="version v1 is there already"):
        compact_checkpoint(folder, "v2", "v1")
    with pytest.raises(ValueError, match="name must be up to 100 letters"):
        compact_checkpoint(folder, "v2", "")
    assert sorted(path.name for path in folder.glob("v*")) == ["v0", "v1", "v2", "versions.json"]


# ---------------------------------------------------------------------------------------------
# Saves that end on the way.


@pytest.mark.parametrize("end", [killed, refused_by_the_system])
def test_a_delta_that_ends_anywhere_leaves_the_version_before_or_the_new_one(
    folder: Path, end: Callable[[], object]
) -> None:
    before = numbers(1, a=(4, 8), b=(4, 8))
    after, later = ({**before, "b": before["b"] + add} for add in (1, 2))
    save([side_of(before)], folder / "first", "whole")
    save([side_of(before)], folder / "first", "before", base="whole")
    wholes = (before, after, later)
    assert 15 < saves_ended_anywhere(folder, wholes, lambda base: {"base": base}, end) < 99


@pytest.mark.parametrize("end", [killed, refused_by_the_system])
def test_a_compaction_that_ends_anywhere_leaves_the_delta_or_the_whole(
    folder: Path, end: Callable[[], object]
) -> None:
    saved = chain(folder / "first")
    found = []
    for versions in ended_anywhere(folder, compact_checkpoint, end):
        target = numbers(-1, a=(256, 256), b=(256, 256))
        (path,) = load([side_of(target)], versions, checksums=True)
        assert equal_bits(target, saved[2])
        found.append(path.name)
        # And the next one finds its place.
        if path.name == "v2":
            compact_checkpoint(versions)
        else:
            save(halves(saved[1]), versions, "v3", base=path.name)
        assert load([side_of(target)], versions)[0].name in ("v2-whole", "v3")
    assert found[0] == "v2" if end is killed else "v2" in found
    assert found[-1] == "v2-whole"
    assert 15 < len(found) < 99


@pytest.mark.parametrize("kill", [(1, "pwrite", 4), (1, "fsync", 1), (0, "rename", 1)])
def test_a_rank_that_is_killed_leaves_the_version_before(
    folder: Path, kill: tuple[int, str, int]
) -> None:
    saved = chain(folder)
    save_with_a_killed_rank(folder, kill, base="v2")
    target = numbers(-1, a=(256, 256), b=(256, 256))
    assert load([side_of(target)], folder, checksums=True) == [folder / "v2"]
    assert equal_bits(target, saved[2])
