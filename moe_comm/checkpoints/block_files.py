"""Files of one rank's blocks: checksums of all that it wrote, and the elements of those that changed.

A file is a safetensors container. Its metadata have `segments`, the JSON of a list of `Segment`. Its tensors are
`moe_comm.checksums` (U64, of the blocks of every segment in order); and in a delta `moe_comm.runs` (I64
`[num_runs, 3]`: number of a segment, first element, the one behind the last), and under the name of each tensor that
changed the elements of its runs, one behind the other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moe_comm.checkpoints.blocks import (
    BLOCK_BYTES,
    CHECKSUM,
    Elements,
    Run,
    Segment,
    cut_run,
)
from moe_comm.checkpoints.overlays import StoredRun
from moe_comm.checkpoints.rectangles import write_all
from moe_comm.checkpoints.stored_checkpoint import SAVE_KEY
from moe_comm.checkpoints.tensor_file import (
    TensorFile,
    crc32c,
    encode_header,
    read_header,
)
from moe_comm.checkpoints.versions import create_file, failed, fitting
from moe_comm.errors import CheckpointError
from moe_comm.resharding.describe.no_collection import no_collection
from moe_comm.tensors.memory import bytes_of

_RUNS = "moe_comm.runs"
_SUMS = "moe_comm.checksums"


class Changed(NamedTuple):
    """A segment that a rank writes.

    Args:
        segment: The segment.
        dtype: Dtype of its tensor.
        sums: Checksums of its blocks, int64 `[num_blocks]`.
        runs: Elements that a delta has of it.
        elements: Elements of the whole segment.
    """

    segment: Segment
    dtype: torch.dtype
    sums: torch.Tensor
    runs: Sequence[Run]
    elements: Elements


def blocks_name(rank_idx: int, num_ranks: int) -> str:
    """Return the name of a rank's file."""
    return f"moe_comm-{rank_idx + 1:05d}-of-{num_ranks:05d}.blocks"


def write_block_file(path: Path, save: str, parts: Sequence[Changed]) -> tuple[int, int]:
    """Write a rank's file, and wait until it is on the disk.

    Args:
        path: Path of the file, which is not there yet.
        save: Identifier that tells the save from others.
        parts: Parts that the rank writes, all of them.

    Returns:
        Bytes of the file, and the CRC-32C of its header.

    Raises:
        ValueError: A tensor has the name of one of the tables.
        CheckpointError: The system refuses; names file and tensor.
    """
    runs = torch.tensor(
        [(number, *run) for number, part in enumerate(parts) for run in part.runs],
        dtype=torch.int64,
    ).view(-1, 3)
    none = torch.empty(0, dtype=torch.int64)
    tables = {_RUNS: runs, _SUMS: torch.cat([none, *(part.sums for part in parts)])}
    counted: dict[str, tuple[torch.dtype, int]] = {}
    for part in parts:
        name = part.segment.tensor
        if name in tables:
            raise ValueError(f"{name}: a tensor of a delta cannot have the name of a table of it")
        if part.runs:
            before = counted.get(name, (part.dtype, 0))[1]
            counted[name] = part.dtype, before + sum(stop - start for start, stop in part.runs)
    metadata = {
        "format": "moe_comm.blocks",
        SAVE_KEY: save,
        "block_bytes": str(BLOCK_BYTES),
        "checksum": CHECKSUM,
        "segments": json.dumps([part.segment for part in parts], separators=(",", ":")),
        **{f"crc {name}": str(crc32c(_raw(table))) for name, table in tables.items()},
    }
    header, places = encode_header(
        {
            _RUNS: (torch.int64, tuple(runs.shape)),
            _SUMS: (torch.uint64, tuple(tables[_SUMS].shape)),
            **{name: (dtype, (count,)) for name, (dtype, count) in counted.items()},
        },
        metadata,
    )
    with failed(path, "cannot be written"):
        descriptor = create_file(path)
    try:
        with failed(path, "cannot be written"):
            write_all(descriptor, header, 0)
            for name, table in tables.items():
                write_all(descriptor, _raw(table), places[name].start)
        ends = {name: stored.start for name, stored in places.items()}
        for part in parts:
            name, itemsize = part.segment.tensor, part.segment.itemsize
            for run in part.runs:
                for start, stop in cut_run(part.segment, *run):
                    with failed(path, f"{name} cannot be written"):
                        write_all(descriptor, _raw(part.elements.fetch(start, stop)), ends[name])
                    ends[name] += (stop - start) * itemsize
        with failed(path, "cannot be synced"):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return max((stored.stop for stored in places.values()), default=len(header)), crc32c(header)


def _raw(tensor: torch.Tensor) -> memoryview:
    data: Any = bytes_of(tensor).numpy()
    return memoryview(data)


class BlockFile(NamedTuple):
    """A rank's file that is there.

    Args:
        file: Header of the file.
        segments: Segments that the rank wrote, all of them.
        is_comparable: Whether checksums are those of this release.
    """

    file: TensorFile
    segments: list[Segment]
    is_comparable: bool

    def runs(self) -> list[StoredRun]:
        """Read which elements the file has.

        Raises:
            CheckpointError: They are none of its segments, or the file has changed.
        """
        ends = {name: stored.start for name, stored in self.file.tensors.items()}
        found = []
        for number, start, stop in self._table(_RUNS, torch.int64).view(-1, 3).tolist():
            if not 0 <= number < len(self.segments):
                raise CheckpointError(
                    f"{self.file.path}: expected a segment below {len(self.segments)}, got {number}"
                )
            segment = self.segments[number]
            stored = self.file.tensors.get(segment.tensor)
            if stored is None or not segment.start <= start < stop <= segment.stop:
                raise CheckpointError(
                    f"{self.file.path}: {segment.tensor}: elements {start} to {stop} are none of "
                    f"{segment.start} to {segment.stop}"
                )
            found.append(StoredRun(segment, start, stop, self.file.path, ends[segment.tensor]))
            ends[segment.tensor] += (stop - start) * stored.dtype.itemsize
        for name, stored in self.file.tensors.items():
            if name not in (_RUNS, _SUMS) and ends[name] != stored.stop:
                raise CheckpointError(
                    f"{self.file.path}: {name}: runs end at byte {ends[name]}, the tensor at {stored.stop}"
                )
        return found

    def sums(self) -> list[tuple[Segment, torch.Tensor]]:
        """Read the checksums: int64 `[num_blocks]` of every segment.

        Raises:
            CheckpointError: The file has changed.
        """
        table = self._table(_SUMS, torch.uint64).view(torch.int64)
        counts = [segment.num_blocks for segment in self.segments]
        if sum(counts) != len(table):
            raise CheckpointError(
                f"{self.file.path}: expected {sum(counts)} checksums, got {len(table)}"
            )
        return list(zip(self.segments, torch.split(table, counts) if counts else (), strict=True))

    def _table(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        path, stored = self.file.path, self.file.tensors.get(name)
        if stored is None or stored.dtype != dtype:
            raise CheckpointError(f"{path}: expected a table {name} of {dtype}, got {stored}")
        with failed(path, f"{name} cannot be read"), path.open("rb") as file:
            file.seek(stored.start)
            data = bytearray(file.read(stored.stop - stored.start))
        expected, got = self.file.metadata.get(f"crc {name}"), str(crc32c(data))
        if expected != got:
            raise CheckpointError(
                f"{path}: {name}: expected checksum {expected}, got {got}: the file has changed"
            )
        return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)


def read_block_file(path: Path, save: str, header_crc: int) -> BlockFile:
    """Read the header of a rank's file.

    Args:
        path: Path of the file.
        save: Identifier of the save that it must belong to.
        header_crc: Checksum of its header, as the manifest has it.

    Raises:
        CheckpointError: It is missing, cut short, changed, or of another save; names it.
    """
    file = read_header(path)
    if file.metadata.get(SAVE_KEY) != save:
        raise CheckpointError(
            f"{path}: is of save {file.metadata.get(SAVE_KEY)}, its version of save {save}: files of two "
            "saves are mixed"
        )
    if crc32c(file.header) != header_crc:
        raise CheckpointError(
            f"{path}: header: expected checksum {header_crc}, got {crc32c(file.header)}: the file has changed"
        )
    with fitting(path, "the list of segments is damaged"), no_collection():
        segments = [
            Segment(name, tuple(view), tuple((a, b) for a, b in box), start, stop, itemsize)
            for name, view, box, start, stop, itemsize in json.loads(file.metadata["segments"])
        ]
    told = file.metadata.get("checksum"), file.metadata.get("block_bytes")
    return BlockFile(file, segments, told == (CHECKSUM, str(BLOCK_BYTES)))
