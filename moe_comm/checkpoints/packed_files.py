"""Which rank makes which file of a checkpoint, and what lies in it."""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from moe_comm.checkpoints.stored_checkpoint import file_name
from moe_comm.checkpoints.tensor_file import StoredTensor, encode_header, stored_bytes
from moe_comm.resharding.plan.reshard_plan import TensorSpec

_NUMBER = re.compile(r"([0-9]+)")


class NewFile(NamedTuple):
    """A file that is to be written.

    Args:
        name: Name in its folder.
        owner: The rank that makes it.
        header: Beginning of the file.
        tensors: Place of each tensor, by name.
        num_bytes: Bytes of the whole file.
    """

    name: str
    owner: int
    header: bytes
    tensors: dict[str, StoredTensor]
    num_bytes: int


def owners_of(wholes: Mapping[str, TensorSpec], said: Sequence[bytes]) -> dict[str, int]:
    """Rank that writes most of each tensor."""
    by_rank = [array("q", each) for each in said]
    return {
        name: max(range(len(by_rank)), key=lambda rank: (by_rank[rank][number], -rank))
        for number, name in enumerate(wholes)
    }


def _natural(name: str) -> tuple[object, ...]:
    """Sorts layer 2 before layer 10."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in _NUMBER.split(name))


def packed_files(
    wholes: Mapping[str, TensorSpec],
    owners: Mapping[str, int],
    max_file_bytes: int,
    metadata: Mapping[str, str],
) -> list[NewFile]:
    """Lay out files: those of one rank beside each other, as it writes most of what is in them.

    Args:
        wholes: The tensors.
        owners: Rank in whose files each tensor is to be, by the tensor's name.
        max_file_bytes: Most bytes of tensors in a file.
        metadata: Metadata of each file.
    """
    packed: list[tuple[int, list[str]]] = []
    room = 0
    for name in sorted(wholes, key=lambda name: (owners[name], _natural(name))):
        num_bytes = stored_bytes(wholes[name].dtype, wholes[name].shape)
        if not packed or packed[-1][0] != owners[name] or num_bytes > room:
            packed.append((owners[name], []))
            room = max_file_bytes
        packed[-1][1].append(name)
        room -= num_bytes
    files = []
    for number, (owner, names) in enumerate(packed):
        header, tensors = encode_header(
            {name: (wholes[name].dtype, wholes[name].shape) for name in names}, metadata
        )
        num_bytes = max((stored.stop for stored in tensors.values()), default=len(header))
        files.append(NewFile(file_name(number, len(packed)), owner, header, tensors, num_bytes))
    return files
