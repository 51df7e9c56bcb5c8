"""Chains of deltas over a whole version: opened as one checkpoint, and checked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moe_comm.checkpoints.block_files import (
    BlockFile,
    Changed,
    read_block_file,
    write_block_file,
)
from moe_comm.checkpoints.blocks import Elements, Segment, block_sums, boxes_of_run, cut_run
from moe_comm.checkpoints.overlays import Overlay, StoredRun
from moe_comm.checkpoints.stored_checkpoint import (
    Reader,
    StoredCheckpoint,
    open_whole,
    verify_parts,
    verify_small_files,
)
from moe_comm.checkpoints.tensor_file import DTYPES, StoredTensor, stored_bytes
from moe_comm.checkpoints.versions import MANIFEST, check_version_name, fitting, read_json
from moe_comm.errors import CheckpointError

MAX_DELTAS = 100
"""Limit of one chain: a load opens all of them."""


class _Told(NamedTuple):
    """Entry of a delta about a tensor.

    Args:
        dtype: Dtype of the tensor.
        shape: Shape of the tensor.
        is_whole: Whether the delta has all elements: what it builds on has none, or others.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    is_whole: bool


class _Link(NamedTuple):
    """A delta of a chain.

    Args:
        folder: Folder of its files.
        manifest: Manifest in the folder.
        base: Name of the version that it builds on.
        base_save: Identifier that tells the save of that version from others.
        tensors: Entries of all tensors of the version, by name.
        files: Files of ranks, by name.
        runs: Elements that it has, by the name of the tensor.
    """

    folder: Path
    manifest: dict[str, Any]
    base: str
    base_save: str
    tensors: dict[str, _Told]
    files: dict[str, BlockFile]
    runs: dict[str, list[StoredRun]]


def is_delta(checkpoint: StoredCheckpoint) -> bool:
    """Return whether a checkpoint builds on another version."""
    return len(checkpoint.chain) > 1


def open_checkpoint(folder: Path) -> StoredCheckpoint:
    """Read what a version has, and what those have that it builds on.

    Reads headers and which blocks there are, and no weights.

    Raises:
        CheckpointError: A file is missing, cut short, or of another save; a version that this one builds on is
            missing or has been replaced. Names the file, and the tensor where it is one.
    """
    links: list[_Link] = []
    here = folder
    while (manifest := _manifest(here)) is not None and "base" in manifest:
        link = _open_link(here, manifest)
        links.append(link)
        here = folder.resolve().parent / link.base
        over = f"{link.folder / MANIFEST}: is a delta over version {link.base} of save {link.base_save}"
        if any(link.base == each.folder.resolve().name for each in links):
            raise CheckpointError(f"{over}, which is a delta over it")
        if len(links) > MAX_DELTAS:
            raise CheckpointError(f"{over}: expected at most {MAX_DELTAS} deltas, got more")
        if not here.is_dir():
            raise CheckpointError(
                f"{over}, whose folder {here} is missing; {_needed(link)} is read from there"
            )
        found = (_manifest(here) or {}).get("save")
        if found != link.base_save:
            raise CheckpointError(
                f"{over}, but {here / MANIFEST} is of save {found}: it is another version of this name"
            )
    whole = open_whole(here)
    return _joined(links, whole) if links else whole


def _manifest(folder: Path) -> dict[str, Any] | None:
    path = folder / MANIFEST
    return read_json(path) if path.exists() else None


def _needed(link: _Link) -> str:
    """A tensor of which a delta has not all elements."""
    return min(
        (name for name, told in link.tensors.items() if not told.is_whole), default="nothing"
    )


def _open_link(folder: Path, manifest: dict[str, Any]) -> _Link:
    path = folder / MANIFEST
    with fitting(path, "what it says of a delta is damaged"):
        base, save = manifest["base"]["version"], manifest["base"]["save"]
        check_version_name(base)
        tensors = {
            str(name): _Told(DTYPES[code], tuple(map(int, shape)), bool(is_whole))
            for name, (code, shape, is_whole) in manifest["tensors"].items()
        }
    files = _open_block_files(folder, manifest)
    runs: dict[str, list[StoredRun]] = {}
    for file in files.values():
        for segment in file.segments:
            told = tensors.get(segment.tensor)
            if told is None or not _fits(segment, told.dtype, told.shape):
                raise CheckpointError(
                    f"{file.file.path}: {segment.tensor}: {segment} is no part of {told}, as {MANIFEST} has it"
                )
        for run in file.runs():
            runs.setdefault(run.segment.tensor, []).append(run)
    for name, told in tensors.items():
        mine = runs.get(name, [])
        mine.sort(key=lambda run: run.start)
        has = sum(run.stop - run.start for run in mine)
        if has > math.prod(told.shape) or (told.is_whole and has != math.prod(told.shape)):
            raise CheckpointError(
                f"{path}: {name}: expected {math.prod(told.shape)} elements in the files of blocks, got {has}"
            )
    return _Link(folder, manifest, base, save, tensors, files, runs)


def _fits(segment: Segment, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    """Return whether a segment is a part of a tensor."""
    if segment.itemsize != dtype.itemsize or not 0 <= segment.start < segment.stop:
        return False
    if not segment.view:
        return not segment.box and segment.stop <= math.prod(shape)
    return (
        math.prod(segment.view) == math.prod(shape)
        and len(segment.box) == len(segment.view)
        and all(
            0 <= start < stop <= size
            for (start, stop), size in zip(segment.box, segment.view, strict=True)
        )
        and segment.stop <= math.prod(segment.sizes)
    )


def _open_block_files(folder: Path, manifest: Mapping[str, Any]) -> dict[str, BlockFile]:
    files = {}
    with fitting(folder / MANIFEST, "what it says of files of blocks is damaged"):
        save = manifest.get("save", "")
        stated = {
            str(name): (said["bytes"], said["header_crc"])
            for name, said in manifest.get("block_files", {}).items()
        }
    for name, (num_bytes, header_crc) in stated.items():
        if Path(name).name != name or not (folder / name).exists():
            raise CheckpointError(
                f"{folder / name}: is named by {MANIFEST}, and missing from {folder}"
            )
        found = read_block_file(folder / name, save, header_crc)
        if found.file.num_bytes != num_bytes:
            raise CheckpointError(
                f"{folder / name}: has {found.file.num_bytes} bytes, {MANIFEST} says {num_bytes}"
            )
        files[name] = found
    return files


def block_files_of(checkpoint: StoredCheckpoint) -> dict[str, BlockFile]:
    """Read the headers of the files of blocks of a version itself, by name; of no others, if it has none.

    Raises:
        CheckpointError: One is missing, cut short, changed, or of another save; names it.
    """
    return _open_block_files(checkpoint.folder, checkpoint.manifest or {})


def _joined(links: list[_Link], whole: StoredCheckpoint) -> StoredCheckpoint:
    """Return what the first of some deltas is, over the others and a whole version."""
    newest = links[0]
    files = {f"{whole.folder.name}/{name}": file for name, file in whole.files.items()}
    for link in links:
        prefix = "" if link is newest else f"{link.folder.name}/"
        for name, block_file in link.files.items():
            # Tensors that no whole version has are found by the first delta that has them.
            files[prefix + name] = block_file.file._replace(tensors={})
    overlays: dict[str, Overlay] = {}
    file_of: dict[str, str] = {}
    for name, told in newest.tensors.items():
        layers: list[list[StoredRun]] = []
        is_whole = False
        for link in links:
            its = link.tensors.get(name)
            if its is None or its[:2] != told[:2]:
                _raise_other(name, newest, link.folder, told, its)
            layers.insert(0, link.runs.get(name, []))
            if its is not None and its.is_whole:
                is_whole = True
                first = next(iter(link.files))
                file_of[name] = first if link is newest else f"{link.folder.name}/{first}"
                num_bytes = stored_bytes(told.dtype, told.shape)
                files[file_of[name]].tensors[name] = StoredTensor(
                    told.dtype, told.shape, 0, num_bytes
                )
                break
        else:
            stored = whole.stored(name) if name in whole.file_of else None
            if stored is None or (stored.dtype, stored.shape) != told[:2]:
                _raise_other(name, newest, whole.folder, told, stored)
            file_of[name] = f"{whole.folder.name}/{whole.file_of[name]}"
        if any(layers) or is_whole:
            overlays[name] = Overlay(told.shape, told.dtype, layers, is_whole=is_whole)
    chain = (whole.folder, *(link.folder for link in reversed(links)))
    return StoredCheckpoint(newest.folder, files, file_of, newest.manifest, chain, overlays)


def _raise_other(
    name: str, newest: _Link, folder: Path, told: _Told, found: _Told | StoredTensor | None
) -> None:
    has = "no such tensor" if found is None else f"{found.dtype} of shape {found.shape}"
    raise CheckpointError(
        f"{newest.folder / MANIFEST}: {name}: expected {told.dtype} of shape {told.shape} in {folder}, "
        f"which it builds on, got {has}"
    )


# ------------------------------------------------------------------------------------------------
# Checksums.


def take_over_sums(source: StoredCheckpoint, path: Path, save: str) -> tuple[int, int]:
    """Write a file of the checksums of blocks that a version has, for another of the same tensors.

    Args:
        source: The version.
        path: Path of the new file.
        save: Identifier of the save of the other version.

    Returns:
        Bytes of the file, and the CRC-32C of its header.
    """
    parts = [
        Changed(segment, source.stored(segment.tensor).dtype, sums, (), Elements(_nothing))
        for file in block_files_of(source).values()
        if file.is_comparable
        for segment, sums in file.sums()
    ]
    return write_block_file(path, save, parts)


def _nothing(start: int, stop: int) -> torch.Tensor:
    raise AssertionError(f"elements {start} to {stop} of a file without runs")


def elements_stored(reader: Reader, checkpoint: StoredCheckpoint, segment: Segment) -> Elements:
    """Return what reads elements of a segment as bytes.

    Args:
        reader: Reader of the checkpoint.
        checkpoint: Checkpoint that has the tensor.
        segment: Segment whose elements are asked for.
    """
    stored = checkpoint.stored(segment.tensor)
    view, sizes = segment.view or stored.shape, segment.sizes if segment.view else stored.shape
    corner = [start for start, _ in segment.box] or [0] * len(view)

    def fetch(start: int, stop: int) -> torch.Tensor:
        found = torch.empty((stop - start) * segment.itemsize, dtype=torch.uint8, device="cpu")
        end = 0
        for inner in boxes_of_run(sizes, start, stop):
            shape = [b - a for a, b in inner]
            begin, end = end, end + math.prod(shape) * segment.itemsize
            box = tuple((a + by, b + by) for (a, b), by in zip(inner, corner, strict=True))
            reader.read(segment.tensor, view, box, found[begin:end].view(stored.dtype).view(shape))
        return found

    return Elements(fetch)


def verify_checkpoint(
    checkpoint: StoredCheckpoint, rank_idx: int = 0, num_ranks: int = 1
) -> Iterator[int]:
    """Read a rank's share of a checkpoint, and compare checksums; yield the bytes of each part read.

    Of a delta, blocks are compared as a load gives them, through the whole chain.

    Raises:
        CheckpointError: Something differs, or cannot be read; names the file and the tensor.
    """
    files = block_files_of(checkpoint)
    if rank_idx == 0:
        verify_small_files(checkpoint)
    if not is_delta(checkpoint):
        for number, file in enumerate(files.values()):
            if number % num_ranks == rank_idx:
                file.sums()
        yield from verify_parts(checkpoint, rank_idx, num_ranks)
        return
    counted = dict.fromkeys(checkpoint.file_of, 0)
    number = 0
    with Reader(checkpoint) as reader:
        for file in files.values():
            if not file.is_comparable:
                raise CheckpointError(f"{file.file.path}: has checksums of another release")
            for segment, sums in file.sums():
                counted[segment.tensor] += segment.stop - segment.start
                elements = elements_stored(reader, checkpoint, segment)
                for run in cut_run(segment, segment.start, segment.stop):
                    number += 1
                    if number % num_ranks == rank_idx:
                        first = run[0] // segment.per_block - segment.first_block
                        found = block_sums(segment, elements, run)
                        _compare_blocks(
                            checkpoint, segment, run, sums[first : first + len(found)], found
                        )
                        yield (run[1] - run[0]) * segment.itemsize
    for name, count in counted.items():
        expected = math.prod(checkpoint.stored(name).shape)
        if count != expected:
            raise CheckpointError(
                f"{checkpoint.folder / MANIFEST}: {name}: expected checksums of {expected} elements, got "
                f"those of {count}"
            )


def _compare_blocks(
    checkpoint: StoredCheckpoint,
    segment: Segment,
    run: tuple[int, int],
    expected: torch.Tensor,
    found: torch.Tensor,
) -> None:
    differing = torch.nonzero(expected != found).view(-1).tolist()
    if not differing:
        return
    name, number = segment.tensor, differing[0]
    block = run[0] // segment.per_block + number
    start = max(segment.start, block * segment.per_block)
    stop = min(segment.stop, start + segment.per_block)
    path = checkpoint.path_of(name)
    overlay = checkpoint.overlays.get(name)
    for each in () if overlay is None else overlay.runs():
        if each.segment.key == segment.key and each.start < stop and start < each.stop:
            path = each.path
    wanted, got = (int(sums[number]) & (2**64 - 1) for sums in (expected, found))
    raise CheckpointError(
        f"{path}: {name} elements {start} to {stop}{f' of {list(segment.box)}' if segment.box else ''}: "
        f"expected checksum {wanted:#018x}, got {got:#018x}: the file has changed"
    )
