"""Saves of what changed: which blocks of a rank's parts differ from those of a version before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from moe_comm.checkpoints.block_files import Changed
from moe_comm.checkpoints.blocks import (
    KnownSums,
    Run,
    block_sums,
    elements_of,
    segment_of,
)
from moe_comm.checkpoints.chains import (
    MAX_DELTAS,
    block_files_of,
    elements_stored,
    open_checkpoint,
)
from moe_comm.checkpoints.file_plans import FilePart
from moe_comm.checkpoints.stored_checkpoint import Reader, StoredCheckpoint, find_checkpoint
from moe_comm.checkpoints.tensor_file import dtype_name
from moe_comm.checkpoints.versions import MANIFEST
from moe_comm.errors import CheckpointError
from moe_comm.resharding.describe.no_collection import no_collection
from moe_comm.resharding.plan.reshard_plan import TensorSpec


class Base(NamedTuple):
    """A version that a delta builds on.

    Args:
        checkpoint: The version.
        sums: Checksums of its blocks; of some or none if it was not saved with them.
    """

    checkpoint: StoredCheckpoint
    sums: KnownSums

    def has(self, name: str, spec: TensorSpec) -> bool:
        """Return whether it has a tensor of this shape and dtype."""
        if name not in self.checkpoint.file_of:
            return False
        stored = self.checkpoint.stored(name)
        return (stored.shape, stored.dtype) == (tuple(spec.shape), spec.dtype)

    def further(self, wholes: Mapping[str, TensorSpec]) -> dict[str, object]:
        """Return what the manifest of a delta over it says.

        Args:
            wholes: The tensors of the delta.
        """
        manifest = self.checkpoint.manifest
        assert manifest is not None
        return {
            "base": {"version": self.checkpoint.folder.name, "save": manifest["save"]},
            "tensors": {
                name: (dtype_name(name, spec.dtype), spec.shape, not self.has(name, spec))
                for name, spec in wholes.items()
            },
        }


def open_base(folder: Path, version: str) -> Base:
    """Open a version that a delta is to build on.

    Args:
        folder: Folder of the versions.
        version: Name.

    Raises:
        CheckpointError: It is not there, is not whole, was not written by `save_checkpoint`, or is the last of
            too many deltas.
    """
    checkpoint = open_checkpoint(find_checkpoint(folder, version))
    if checkpoint.manifest is None:
        raise CheckpointError(
            f"{checkpoint.folder}: a delta needs a version that save_checkpoint wrote ({MANIFEST} is missing)"
        )
    if len(checkpoint.chain) > MAX_DELTAS:
        raise CheckpointError(
            f"{checkpoint.folder}: is the last of {len(checkpoint.chain) - 1} deltas, expected fewer than "
            f"{MAX_DELTAS} below another: compact it, and build on that"
        )
    files = block_files_of(checkpoint).values()
    sums = [each for file in files if file.is_comparable for each in file.sums()]
    return Base(checkpoint, KnownSums(sums))


def check_builds_on(base: Base, wholes: Mapping[str, TensorSpec]) -> None:
    """Check that a version has anything of what is saved.

    Raises:
        ValueError: It is of another model.
    """
    if not any(base.has(name, spec) for name, spec in wholes.items()):
        name, spec = next(iter(wholes.items()))
        its = next(iter(base.checkpoint.file_of), "no tensor")
        raise ValueError(
            f"base {base.checkpoint.folder} has no tensor of this model by name, shape and dtype: expected "
            f"{name} of {spec.dtype} and shape {tuple(spec.shape)} or another, got {its} and others"
        )


def changed_parts(
    parts: Sequence[FilePart],
    wholes: Mapping[str, TensorSpec],
    piece_of_part: Callable[[FilePart], torch.Tensor],
    base: Base | None,
) -> list[Changed]:
    """Read a rank's parts once, and find which of their blocks differ from those of a base.

    Blocks that the base has no checksums of are read from its files.

    Args:
        parts: Parts that the rank writes.
        wholes: The tensors.
        piece_of_part: Callable that gives the tensor of a part.
        base: The version that they are compared with; None to have their checksums alone.

    Raises:
        CheckpointError: The base cannot be read; names file and tensor.
    """
    found = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_collection())
        reader = None if base is None else stack.enter_context(Reader(base.checkpoint))
        for part in parts:
            segment = segment_of(part.tensor, part.shape, part.box, part.dtype.itemsize)
            if segment is None:
                continue
            elements = elements_of(segment, piece_of_part(part))
            sums = block_sums(segment, elements)
            runs: list[Run] = []
            if base is not None and reader is not None:
                runs = [(segment.start, segment.stop)]
                if base.has(part.tensor, wholes[part.tensor]):
                    known, is_known = base.sums.at(segment)
                    is_changed = is_known & (sums != known)
                    unknown = segment.runs_where(~is_known)
                    if unknown:
                        stored = elements_stored(reader, base.checkpoint, segment)
                        is_changed[~is_known] = torch.cat(
                            [
                                block_sums(segment, elements, run)
                                != block_sums(segment, stored, run)
                                for run in unknown
                            ]
                        )
                    runs = segment.runs_where(is_changed)
            found.append(Changed(segment, part.dtype, sums, runs, elements))
    return found
