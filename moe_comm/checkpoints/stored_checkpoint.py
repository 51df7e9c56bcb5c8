"""A checkpoint that is there: which tensors it has, in which files, and whether it is whole."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from moe_comm.checkpoints.overlays import Overlay
from moe_comm.checkpoints.rectangles import Rectangle, read_rectangle, rectangle_checksum
from moe_comm.checkpoints.scaled_weights import BlockScales
from moe_comm.checkpoints.tensor_file import StoredTensor, TensorFile, crc32c, read_header
from moe_comm.checkpoints.versions import (
    MANIFEST,
    VERSIONS,
    failed,
    fitting,
    read_json,
    read_versions,
)
from moe_comm.errors import CheckpointError
from moe_comm.peers.plain_data import travels
from moe_comm.resharding.describe.intervals import Box, find_defect

INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
SAVE_KEY = "moe_comm_save"
"""Key of what tells the files of one save from those of another."""

_FORMAT = 1
_NUMBERED = re.compile(r"model-([0-9]{5})-of-([0-9]{5})\.safetensors")


def file_name(number: int, num_files: int) -> str:
    """Return the name of a file of tensors, as `from_pretrained` knows them; counted from 0."""
    return f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"


def is_tensor_file(name: str) -> bool:
    """Return whether a file has tensors or blocks of them, or says where they are."""
    return name.endswith((".safetensors", ".blocks")) or name in (INDEX, MANIFEST)


class StoredCheckpoint(NamedTuple):
    """A folder of safetensors files.

    Args:
        folder: Folder of the files.
        files: Files by name.
        file_of: Name of the file of each tensor, by the name of the tensor.
        manifest: Manifest that `save_checkpoint` wrote; None if others have written the folder.
        overlays: Runs that deltas have of a tensor, by its name.
        chain: Folders of a delta and of what it builds on, the whole one first; just the folder of a whole one.
    """

    folder: Path
    files: dict[str, TensorFile]
    file_of: dict[str, str]
    manifest: dict[str, Any] | None
    chain: tuple[Path, ...]
    overlays: Mapping[str, Overlay] = MappingProxyType({})

    def stored(self, name: str) -> StoredTensor:
        """Place of a tensor in its file."""
        return self.files[self.file_of[name]].tensors[name]

    def path_of(self, name: str) -> Path:
        """The file of a tensor."""
        return self.files[self.file_of[name]].path

    def digest(self) -> str:
        """Equal on ranks that see the same files, of the same sizes, with the same tensors."""
        hashed = hashlib.blake2b(digest_size=8)
        for name, file in sorted(self.files.items()):
            hashed.update(f"{name} {file.num_bytes} ".encode() + file.header)
        return hashed.hexdigest()


def has_all_tensors(folder: Path) -> bool:
    """Return whether a folder has files of a whole model, as transformers reads them, and no delta's."""
    return (folder / INDEX).exists() or (folder / SINGLE_FILE).exists()


def find_checkpoint(folder: Path, version: str | None) -> Path:
    """Return the folder of a version.

    Args:
        folder: Folder of versions, or of one checkpoint.
        version: Name; None for the latest, or for the folder itself where it has no versions.

    Raises:
        CheckpointError: There is none, or it was never finished.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder")
    known = read_versions(folder)
    if known is None:
        if version is None and has_all_tensors(folder):
            return folder
        manifest = folder / MANIFEST
        if version is None and manifest.exists() and "base" in read_json(manifest):
            raise CheckpointError(
                f"{folder} is a delta, which is read by way of the folder of its versions: expected folder "
                f"{folder.resolve().parent} and version {folder.resolve().name}"
            )
        if (folder / ".metadata").exists():
            raise CheckpointError(
                f"{folder} is a checkpoint of torch.distributed.checkpoint, which its load() reads: expected "
                f"a folder with {VERSIONS}, {INDEX} or {SINGLE_FILE}"
            )
        wanted = "a version" if version is None else f"version {version}"
        raise CheckpointError(
            f"{folder}: expected {wanted} of a checkpoint, but there is no {VERSIONS}, as of a save "
            f"that has ended, nor {INDEX} or {SINGLE_FILE}"
        )
    name = known.latest if version is None else version
    if name not in known.names:
        raise CheckpointError(
            f"{folder}: version {name} is none of those whose saves have ended: {known.names}"
        )
    if not (folder / name).is_dir():
        raise CheckpointError(f"{folder}: version {name} is in {VERSIONS}, but its folder is gone")
    return folder / name


def open_whole(folder: Path) -> StoredCheckpoint:
    """Read what a folder of safetensors files has, and check that it is one checkpoint, and no delta.

    Reads headers, and no weights.

    Raises:
        CheckpointError: A file is missing, cut short, or of another save; names the file, and the tensor
            where it is one.
    """
    manifest = read_json(folder / MANIFEST) if (folder / MANIFEST).exists() else None
    if (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(
                f"{folder / INDEX}: expected a weight_map of names, got {weight_map}"
            )
    elif (folder / SINGLE_FILE).exists():
        weight_map = None
    else:
        raise CheckpointError(f"{folder}: has neither {INDEX} nor {SINGLE_FILE}")
    for tensor, name in (weight_map or {}).items():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(
                f"{folder / INDEX}: {tensor}: expected the name of a file beside it, got {name!r}"
            )
    names = [SINGLE_FILE] if weight_map is None else sorted(set(weight_map.values()))
    for name in names:
        if not (folder / name).exists():
            lost = min(key for key, value in (weight_map or {}).items() if value == name)
            raise CheckpointError(
                f"{folder / INDEX}: {lost} is to be in {name}, which is missing from {folder}"
            )
    files = {name: read_header(folder / name) for name in names}
    file_of = {tensor: name for name, file in files.items() for tensor in file.tensors}
    if weight_map is not None:
        _check_index(folder, files, weight_map)
    _check_strays(folder, files)
    if manifest is not None:
        _check_manifest(folder, files, manifest)
    return StoredCheckpoint(folder, files, file_of, manifest, (folder,))


def _check_index(
    folder: Path, files: Mapping[str, TensorFile], weight_map: Mapping[str, str]
) -> None:
    for tensor, name in weight_map.items():
        if tensor not in files[name].tensors:
            raise CheckpointError(f"{folder / name}: has no {tensor}, which {INDEX} says it has")
    for name, file in files.items():
        for tensor in file.tensors:
            if weight_map.get(tensor) != name:
                raise CheckpointError(
                    f"{file.path}: has {tensor}, which {INDEX} says is in "
                    f"{weight_map.get(tensor, 'no file')}"
                )


def _check_strays(folder: Path, files: Mapping[str, TensorFile]) -> None:
    """Return whether numbered files are all of one count, and all of them named."""
    if SINGLE_FILE not in files and (folder / SINGLE_FILE).exists():
        raise CheckpointError(
            f"{folder / SINGLE_FILE}: is of another checkpoint than {INDEX}, which does not name it: "
            "from_pretrained would read this one"
        )
    counts = {match[2]: name for name in files if (match := _NUMBERED.fullmatch(name))}
    if len(counts) > 1:
        first, second = sorted(counts.values())[:2]
        raise CheckpointError(f"{folder}: {first} and {second} are of two checkpoints")
    for path in sorted(folder.glob("model-*.safetensors")):
        if counts and path.name not in files and _NUMBERED.fullmatch(path.name):
            raise CheckpointError(
                f"{path}: is named by no tensor of {INDEX}: it is of another checkpoint"
            )


def _check_manifest(
    folder: Path, files: Mapping[str, TensorFile], manifest: Mapping[str, Any]
) -> None:
    path = folder / MANIFEST
    stated = {}
    with fitting(path, "the list of files is damaged"):
        stated = {name: its["bytes"] for name, its in manifest["files"].items()}
    if manifest.get("format") != _FORMAT:
        raise CheckpointError(f"{path}: expected format {_FORMAT}, got {manifest.get('format')}")
    odd = set(stated) ^ set(files)
    if odd:
        name = min(odd)
        has, lacks = (MANIFEST, INDEX) if name in stated else (INDEX, MANIFEST)
        raise CheckpointError(f"{folder / name}: is named by {has} and not by {lacks}")
    for name, file in files.items():
        if file.metadata.get(SAVE_KEY) != manifest.get("save"):
            raise CheckpointError(
                f"{file.path}: is of save {file.metadata.get(SAVE_KEY)}, {MANIFEST} of save "
                f"{manifest.get('save')}: files of two saves are mixed"
            )
        if file.num_bytes != stated[name]:
            raise CheckpointError(
                f"{file.path}: has {file.num_bytes} bytes, {MANIFEST} says {stated[name]}"
            )


class Reader:
    """Reads boxes of the tensors of a checkpoint; keeps one file open, as a context manager."""

    def __init__(self, checkpoint: StoredCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._open: tuple[Path, int] | None = None

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self._open is not None:
            os.close(self._open[1])
            self._open = None

    def _descriptor(self, path: Path) -> int:
        if self._open is None or self._open[0] != path:
            self.close()
            with failed(path, "cannot be read"):
                self._open = path, os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._open[1]

    def place_of(self, name: str) -> tuple[str, int]:
        """Sorts tensors in the order in which they lie on the disk."""
        return self._checkpoint.file_of[name], self._checkpoint.stored(name).start

    def _rectangle(self, name: str, view: tuple[int, ...], box: Box) -> Rectangle:
        stored = self._checkpoint.stored(name)
        return Rectangle(stored.start, view, box, stored.dtype)

    def read(
        self,
        name: str,
        view: tuple[int, ...],
        box: Box,
        target: torch.Tensor,
        scales: BlockScales | None = None,
    ) -> None:
        """Read a box of a tensor.

        Args:
            name: Name of the tensor.
            view: Shape that it is viewed as.
            box: Box of the view.
            target: Tensor of the box's sizes. Written.
            scales: Scale factors of the tensor, which its values are multiplied by; None for none.

        Raises:
            CheckpointError: It cannot be read; names file and tensor.
        """
        overlay = self._checkpoint.overlays.get(name)
        if overlay is None or not overlay.is_whole:
            path = self._checkpoint.path_of(name)
            descriptor = self._descriptor(path)
            factors = None if scales is None else scales.at
            with failed(path, f"{name} cannot be read"):
                read_rectangle(descriptor, self._rectangle(name, view, box), target, factors)
        if overlay is None or not target.numel():
            return
        for part in overlay.boxes(view, box):
            descriptor = self._descriptor(part.path)
            place, its = target[part.within(box)], part.rectangle
            with failed(part.path, f"{name} cannot be read"):
                read_rectangle(
                    descriptor,
                    its,
                    place,
                    None if scales is None else part.factors(view, scales.at),
                )

    def whole(self, name: str) -> torch.Tensor:
        """Read a whole tensor, for small ones."""
        stored = self._checkpoint.stored(name)
        found = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        self.read(name, stored.shape, tuple((0, size) for size in stored.shape), found)
        return found

    def scales(self, name: str, scale: str) -> BlockScales:
        """Read the scale factors of a weight."""
        return BlockScales(name, self._checkpoint.stored(name).shape, self.whole(scale))

    def checksum(self, name: str, view: tuple[int, ...], box: Box) -> int:
        """Return the CRC-32C of a box of a tensor, row by row.

        Raises:
            CheckpointError: It cannot be read; names file and tensor.
        """
        path = self._checkpoint.path_of(name)
        descriptor = self._descriptor(path)
        with failed(path, f"{name} cannot be read"):
            return rectangle_checksum(descriptor, self._rectangle(name, view, box))


# ------------------------------------------------------------------------------------------------
# Checksums.


@travels
class CheckedPart(NamedTuple):
    """A rectangle of a tensor and its checksum.

    Args:
        tensor: Name.
        shape: Shape that the tensor is viewed as.
        box: Box of that view.
        crc: CRC-32C, row by row.
    """

    tensor: str
    shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]
    crc: int


def manifest_text(
    version: str,
    save: str,
    num_ranks: int,
    files: Mapping[str, tuple[int, int]],
    small_files: Mapping[str, tuple[int, int]],
    parts: list[CheckedPart],
    block_files: Mapping[str, tuple[int, int]],
    **further: object,
) -> bytes:
    """Return what the manifest of a save holds.

    Args:
        version: Name of the version.
        save: Identifier that tells it from other saves.
        num_ranks: Number of ranks that wrote it.
        files: Files of tensors, by name: bytes, and the CRC-32C of the header.
        small_files: Others, by name: bytes and CRC-32C.
        parts: Parts of all tensors.
        block_files: Files of ranks' blocks, by name: bytes, and the CRC-32C of the header.
        further: Further entries.
    """
    said = {
        "format": _FORMAT,
        "version": version,
        "save": save,
        "num_ranks": num_ranks,
        "files": {name: {"bytes": size, "header_crc": crc} for name, (size, crc) in files.items()},
        "other_files": {
            name: {"bytes": size, "crc": crc} for name, (size, crc) in small_files.items()
        },
        "parts": sorted(parts),
        "block_files": {
            name: {"bytes": size, "header_crc": crc} for name, (size, crc) in block_files.items()
        },
        **further,
    }
    return json.dumps(said, separators=(",", ":")).encode()


def checked_parts(checkpoint: StoredCheckpoint) -> Iterator[CheckedPart]:
    """Yield the parts of a checkpoint that have checksums: together, all of every tensor.

    Raises:
        CheckpointError: It has no checksums, or not of every element; names the tensor.
    """
    path = checkpoint.folder / MANIFEST
    if checkpoint.manifest is None:
        raise CheckpointError(
            f"{checkpoint.folder}: has no checksums: it was not written by save_checkpoint ({MANIFEST} "
            "is missing)"
        )
    with fitting(path, "the list of parts is damaged"):
        parts = [
            CheckedPart(name, tuple(shape), tuple((start, stop) for start, stop in box), crc)
            for name, shape, box, crc in checkpoint.manifest["parts"]
        ]
    seen = set()
    for tensor, some in itertools.groupby(parts, key=lambda part: part.tensor):
        mine = list(some)
        seen.add(tensor)
        defect: object = "no such tensor"
        if tensor in checkpoint.file_of:
            shape = mine[0].shape
            stored = checkpoint.stored(tensor)
            sizes = {len(shape), *(len(part.box) for part in mine)}
            if len(sizes) == 1 and Rectangle(
                0, shape, tuple((0, size) for size in shape), stored.dtype
            ).num_bytes == (stored.stop - stored.start):
                defect = find_defect(shape, [part.box for part in mine])
        if defect is not None:
            raise CheckpointError(f"{path}: {tensor}: checksums do not fit the tensor: {defect}")
        yield from mine
    for tensor in checkpoint.file_of:
        stored = checkpoint.stored(tensor)
        if tensor not in seen and stored.stop > stored.start:
            raise CheckpointError(f"{path}: {tensor}: has no checksum")


def verify_parts(
    checkpoint: StoredCheckpoint, rank_idx: int = 0, num_ranks: int = 1
) -> Iterator[int]:
    """Read a rank's share of a checkpoint, and compare checksums; yield the bytes of each part read.

    Raises:
        CheckpointError: Something differs, or cannot be read; names the file and the tensor.
    """
    for number, (name, file) in enumerate(sorted(checkpoint.files.items())):
        if number % num_ranks == rank_idx and checkpoint.manifest is not None:
            expected = checkpoint.manifest["files"][name].get("header_crc")
            _compare(file.path, "header", expected, crc32c(file.header))
    with Reader(checkpoint) as reader:
        parts = sorted(
            checked_parts(checkpoint), key=lambda part: (reader.place_of(part.tensor), part.box)
        )
        for part in parts[rank_idx::num_ranks]:
            found = reader.checksum(part.tensor, part.shape, part.box)
            path = checkpoint.path_of(part.tensor)
            _compare(path, f"{part.tensor} {list(part.box)}", part.crc, found)
            yield Rectangle(0, part.shape, part.box, checkpoint.stored(part.tensor).dtype).num_bytes


def verify_small_files(checkpoint: StoredCheckpoint) -> None:
    """Compare the files beside those of tensors with what was written.

    Raises:
        CheckpointError: One is missing or differs; names it.
    """
    if checkpoint.manifest is None:
        return
    stated = {}
    with fitting(checkpoint.folder / MANIFEST, "the list of other files is damaged"):
        stated = {
            name: its["crc"] for name, its in checkpoint.manifest.get("other_files", {}).items()
        }
    for name, crc in stated.items():
        path = checkpoint.folder / name
        with failed(path, "cannot be read"):
            data = path.read_bytes()
        _compare(path, "the file", crc, crc32c(data))


def _compare(path: Path, what: str, expected: Any, found: int) -> None:
    if expected != found:
        shown = f"{expected:#010x}" if isinstance(expected, int) else expected
        raise CheckpointError(
            f"{path}: {what}: expected checksum {shown}, got {found:#010x}: the file has changed"
        )
