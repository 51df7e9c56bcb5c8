"""Save a model to safetensors files: every rank writes its own parts, in parallel."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from moe_comm.arguments import as_int, shown
from moe_comm.checkpoints.block_files import blocks_name, write_block_file
from moe_comm.checkpoints.checkpoint_ranks import CheckpointRanks
from moe_comm.checkpoints.deltas import Base, changed_parts, check_builds_on, open_base
from moe_comm.checkpoints.file_plans import FilePart, plan_save, whole_tensors, written_parts
from moe_comm.checkpoints.packed_files import NewFile, owners_of, packed_files
from moe_comm.checkpoints.rectangles import Rectangle, write_all, write_rectangle
from moe_comm.checkpoints.stored_checkpoint import (
    INDEX,
    SAVE_KEY,
    SINGLE_FILE,
    CheckedPart,
    manifest_text,
)
from moe_comm.checkpoints.tensor_file import (
    crc32c,
    dtype_name,
)
from moe_comm.checkpoints.versions import (
    MANIFEST,
    NewVersion,
    check_version_name,
    create_file,
    failed,
)
from moe_comm.peers.bootstrap import Bootstrap
from moe_comm.resharding.describe.intervals import Box
from moe_comm.resharding.describe.module_tensors import RefitSide, get_refit_tensor_dict
from moe_comm.resharding.hold.refit_models import Model, unwrap_models
from moe_comm.resharding.move import stale
from moe_comm.resharding.move.sources import Sources, piece_of, reduce_partial_sources
from moe_comm.resharding.plan.planner import encoded_side
from moe_comm.resharding.plan.rank_metadata import decode_rank_metadata
from moe_comm.resharding.plan.reshard_plan import ReshardPlan, TensorSpec

DEFAULT_FILE_BYTES = 5_000_000_000


def save_checkpoint(
    model: Model,
    folder: str | os.PathLike[str],
    version: str,
    *,
    base: str | None = None,
    group: dist.ProcessGroup | Bootstrap | None = None,
    add_files: Callable[[Path], object] | None = None,
    max_file_bytes: int = DEFAULT_FILE_BYTES,
) -> Path:
    """Save a model that is spread over ranks to a folder of safetensors files. Collective, blocking.

    `from_pretrained` in one process can read `folder / version`, if `add_files` has put a configuration
    there. Every rank writes its own parts directly to their places in the files; no rank gathers a
    tensor. A part that several ranks hold is written by one.

    A version is whole or it is not there. It is written under another name, synced to the disk, renamed,
    and entered in `versions.json` last; a save that fails, or whose process is killed, leaves the versions
    before as they were, and what it has written is removed by the next save.

    With a `base`, the version is a delta: only 64 KiB blocks that differ from the base, by the checksums saved with
    it, are written. Blocks without a checksum in the base, as when parts are cut differently, are compared with its
    files. Ranks and layouts may differ from the base's, and so may the tensors, their shapes and their dtypes.
    `load_checkpoint` reads a delta like any version; `compact_checkpoint` makes a whole version of it, which
    `from_pretrained` can read.

    Args:
        model: Part of the model that this rank holds: a module with `pg_collection` or DTensors,
            `CheckpointViews`, such as `transformers_views(model)`, or None; as the source of a `Refit`. Tied
            tensors are written under their first name.
        folder: Folder of the versions, the same on every rank, on a shared file system. Created if missing.
        version: Name of the new version, the same on every rank.
        base: Name of the version in `folder` that a delta builds on, whole or a delta itself; None for a
            whole version.
        group: Ranks that save; None for the default group, or for this rank alone without one.
        add_files: Callable that rank 0 calls with the new folder, before tensors are written, to put further
            files there, such as `model.config.save_pretrained` and the tokenizer's. None for none.
        max_file_bytes: Most bytes of tensors in a file; a larger tensor gets its own file. Not with a base.

    Returns:
        `folder / version`.

    Raises:
        TypeError, ValueError, RuntimeError: An argument is wrong on some rank, ranks save different things,
            the model is stale, nobody holds some elements, or the format has no such dtype; on every rank.
        CheckpointError: The version is there already, the base is not or is damaged, another writer is at work
            in the folder, or the system refuses, as on a full disk; names file and tensor, on every rank.
        CommunicationError: A peer is gone.
    """
    ranks = CheckpointRanks("save", group)
    source: RefitSide | None = None
    encoded = b""
    with ranks.problem:
        check_version_name(version)
        if base is not None:
            check_version_name(base, "base")
            if max_file_bytes != DEFAULT_FILE_BYTES:
                raise ValueError(
                    f"max_file_bytes is of whole versions, a delta has one file a rank; got {max_file_bytes} "
                    f"with base {base}"
                )
        as_int("max_file_bytes", max_file_bytes, 1)
        if add_files is not None and not callable(add_files):
            raise TypeError(f"add_files must be callable, got {shown(add_files)}")
        models = unwrap_models(model, None)
        source = models.source
        if source is not None and (reason := stale.stale_reason(source)):
            raise ValueError(f"the model is stale and must not be saved: {reason}")
        encoded = encoded_side(source, models.num_experts, ranks.group, "source")
    path = Path(folder)
    gathered = ranks.agree_alike(
        encoded, folder=str(path), version=version, base=base, max_file_bytes=max_file_bytes
    )
    below: Base | None = None
    if base is not None:
        with ranks.problem:
            below = open_base(path, base)
        ranks.agree_alike(None, **{"digest of the base": below and below.checkpoint.digest()})
    with contextlib.ExitStack() as stack:
        new: NewVersion | None = None
        wholes: dict[str, TensorSpec] = {}
        plan = ReshardPlan([], [])
        parts: list[FilePart] = []
        with ranks.problem:
            by_rank = list(map(decode_rank_metadata, gathered))
            wholes = whole_tensors(by_rank)
            if not wholes:
                raise ValueError("no rank holds a tensor that could be saved")
            for name, spec in wholes.items():
                dtype_name(name, spec.dtype)
            if below is not None:
                check_builds_on(below, wholes)
            plan = plan_save(by_rank, ranks.rank_idx, wholes)
            parts = written_parts(plan, wholes)
            if ranks.rank_idx == 0:
                new = NewVersion(path, version)
                stack.callback(new.close)
                if add_files is not None:
                    with failed(new.path, "files could not be added"):
                        add_files(new.path)
                    if (new.path / SINGLE_FILE).exists():
                        raise ValueError(
                            f"add_files must leave weights to this save, got {SINGLE_FILE} in {new.path}, which "
                            "from_pretrained would read in their place"
                        )
        save = secrets.token_hex(8)
        place = "" if new is None else str(new.path)
        told = ranks.agree((place, save, _written_bytes(parts, wholes)))
        place, save, _ = told[0]
        files: list[NewFile] = []
        if below is None:
            owners = owners_of(wholes, [bytes_of_rank for _, _, bytes_of_rank in told])
            files = packed_files(wholes, owners, max_file_bytes, file_metadata(save))
        writer = FileWriter(Path(place), files, ranks.rank_idx)
        stack.callback(writer.close)
        with ranks.problem:
            writer.make_files()
        ranks.agree()
        checked: list[CheckedPart] = []
        blocks = blocks_name(ranks.rank_idx, ranks.num_ranks), (0, 0)
        with ranks.problem:
            pieces = _pieces(plan, source)
            if below is None:
                checked = _write_parts(writer, parts, pieces)
            # Before sync(): the disk writes meanwhile.
            changed = changed_parts(parts, wholes, pieces, below)
            writer.sync()
            blocks = blocks[0], write_block_file(Path(place) / blocks[0], save, changed)
        ended = ranks.agree((checked, blocks))
        with ranks.problem:
            if new is not None:
                finish_version(
                    new,
                    files,
                    save,
                    ranks.num_ranks,
                    [part for some, _ in ended for part in some],
                    dict(its for _, its in ended),
                    **({} if below is None else below.further(wholes)),
                )
        ranks.agree()
    return path / version


def _written_bytes(parts: Sequence[FilePart], wholes: Mapping[str, TensorSpec]) -> bytes:
    """Return how many bytes of each tensor a rank writes, as int64, in the order of `wholes`."""
    written = dict.fromkeys(wholes, 0)
    for part in parts:
        written[part.tensor] += Rectangle(0, part.shape, part.box, part.dtype).num_bytes
    return array("q", written.values()).tobytes()


def file_metadata(save: str) -> dict[str, str]:
    """Return the safetensors metadata of every file of a save."""
    return {"format": "pt", SAVE_KEY: save}


def _index_text(files: Sequence[NewFile]) -> bytes:
    """Return the text of `model.safetensors.index.json`, as `from_pretrained` reads it."""
    weight_map = {tensor: file.name for file in files for tensor in file.tensors}
    total = sum(file.num_bytes - len(file.header) for file in files)
    said = {
        "metadata": {"total_size": total},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return json.dumps(said, indent=2).encode()


class FileWriter:
    """Writer of one rank's parts of a version.

    Args:
        folder: Folder of the new version, under its temporary name.
        files: Files of all ranks.
        rank_idx: This rank.
    """

    def __init__(self, folder: Path, files: Sequence[NewFile], rank_idx: int) -> None:
        self._folder = folder
        self._files = files
        self._rank_idx = rank_idx
        self._open: dict[str, int] = {}
        # Ranks begin with their own files, in turn, so that they write different files at a time.
        own = [number for number, file in enumerate(files) if file.owner >= rank_idx]
        first = own[0] if own else 0
        turns = [*range(first, len(files)), *range(first)]
        self._place = {
            tensor: (turn, stored.start, files[number])
            for turn, number in enumerate(turns)
            for tensor, stored in files[number].tensors.items()
        }

    def make_files(self) -> None:
        """Create this rank's files, reserve their whole size, and write their headers.

        Raises:
            CheckpointError: The system refuses, as where the disk has no room for them.
        """
        from moe_comm import _host

        for file in self._files:
            if file.owner == self._rank_idx:
                path = self._folder / file.name
                with failed(path, "cannot be written"):
                    self._open[file.name] = create_file(path)
                    _host.files.reserve(self._open[file.name], file.num_bytes)
                    write_all(self._open[file.name], file.header, 0)

    def write(
        self, tensor: str, view: tuple[int, ...], box: Box, values: torch.Tensor
    ) -> CheckedPart:
        """Write a box of a tensor; return it with its checksum.

        Args:
            tensor: Name of the tensor.
            view: Shape that it is viewed as.
            box: Part of that view.
            values: Values of the box, in the dtype of the file.

        Raises:
            CheckpointError: The system refuses; names file and tensor.
        """
        _, start, file = self._place[tensor]
        rectangle = Rectangle(start, view, box, values.dtype)
        with failed(self._folder / file.name, f"{tensor} cannot be written"):
            crc = write_rectangle(self._descriptor(file.name), rectangle, values)
        return CheckedPart(tensor, view, box, crc)

    def place_of(self, tensor: str) -> tuple[int, int]:
        """Sort key: the order in which this rank writes tensors."""
        return self._place[tensor][:2]

    def sync(self) -> None:
        """Sync the files that this rank has written to.

        Raises:
            CheckpointError: The system refuses; names the file.
        """
        for name, descriptor in self._open.items():
            with failed(self._folder / name, "cannot be synced"):
                os.fsync(descriptor)

    def _descriptor(self, name: str) -> int:
        if name not in self._open:
            self._open[name] = os.open(self._folder / name, os.O_WRONLY | os.O_CLOEXEC)
        return self._open[name]

    def close(self) -> None:
        """Close the files."""
        while self._open:
            os.close(self._open.popitem()[1])


def _pieces(plan: ReshardPlan, source: RefitSide | None) -> Callable[[FilePart], torch.Tensor]:
    """Return a function from a part to its values. Collective over meshes of pending sums."""
    tensors = {} if source is None else get_refit_tensor_dict(source)
    sources = Sources(plan, tensors, reduce_partial_sources(plan, tensors, None), lambda _: False)
    return lambda part: piece_of(sources.get(part.op.param_name), part.op)


def _write_parts(
    writer: FileWriter,
    parts: Sequence[FilePart],
    pieces: Callable[[FilePart], torch.Tensor],
) -> list[CheckedPart]:
    """Write a rank's parts to its files."""
    return [
        writer.write(part.tensor, part.shape, part.box, pieces(part))
        for part in sorted(parts, key=lambda part: writer.place_of(part.tensor))
    ]


def finish_version(
    new: NewVersion,
    files: Sequence[NewFile],
    save: str,
    num_ranks: int,
    parts: list[CheckedPart],
    block_files: Mapping[str, tuple[int, int]],
    **further: object,
) -> None:
    """Write the index and the manifest of a version, then commit it.

    Args:
        new: The version, whose tensors are on the disk.
        files: Files of tensors; none for a delta.
        save: Random id of this save.
        num_ranks: Ranks that wrote it.
        parts: Every part that was written, with its checksum.
        block_files: Ranks' files of blocks, by name: size, and CRC-32C of the header.
        further: Further fields of the manifest, for a delta.

    Raises:
        CheckpointError: The system refuses; then the version is not there.
    """
    names = {*(file.name for file in files), *block_files}
    small_files = {}
    for path in sorted(new.path.rglob("*")):
        name = str(path.relative_to(new.path))
        if path.is_file() and name not in names:
            with failed(path, "cannot be read"):
                data = path.read_bytes()
            small_files[name] = len(data), crc32c(data)
    sizes = {file.name: (file.num_bytes, crc32c(file.header)) for file in files}
    if not further:
        new.write(INDEX, _index_text(files))
    text = manifest_text(
        new.version, save, num_ranks, sizes, small_files, parts, block_files, **further
    )
    new.write(MANIFEST, text)
    new.commit([*names, INDEX, MANIFEST])
