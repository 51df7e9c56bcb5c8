"""The format of safetensors: a header that says where each tensor lies, and their bytes."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moe_comm.arguments import shortened
from moe_comm.checkpoints.versions import fitting
from moe_comm.errors import CheckpointError

_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
# The limit of the format's own reader.
_MAX_HEADER_BYTES = 100_000_000

DTYPES = {
    name: found
    for name, torch_name in {
        "BOOL": "bool",
        "U8": "uint8",
        "I8": "int8",
        "U16": "uint16",
        "I16": "int16",
        "U32": "uint32",
        "I32": "int32",
        "U64": "uint64",
        "I64": "int64",
        "F16": "float16",
        "BF16": "bfloat16",
        "F32": "float32",
        "F64": "float64",
        "C64": "complex64",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F8_E8M0": "float8_e8m0fnu",
        "F4": "float4_e2m1fn_x2",
    }.items()
    # A torch may be older than a dtype.
    if (found := getattr(torch, torch_name, None)) is not None
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PACKED = "F4"
"""Two elements a byte: the header counts elements, a tensor bytes, along the last dimension."""


class StoredTensor(NamedTuple):
    """Place of a tensor in a file.

    Args:
        dtype: Dtype as torch has it.
        shape: Shape as torch has it.
        start: Offset of its first byte in the file.
        stop: Offset behind its last byte.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class TensorFile(NamedTuple):
    """Header of a file.

    Args:
        path: Path of the file.
        tensors: Tensors by name, in the order of the header.
        metadata: Further text, by key.
        num_bytes: Bytes of the whole file.
        header: Header as it is in the file, with its length before it.
    """

    path: Path
    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]
    num_bytes: int
    header: bytes


def crc32c(data: Any, crc: int = 0) -> int:
    """Return the checksum of bytes, going on from that of those before."""
    from moe_comm import _host

    return _host.kernels.crc32c(data, crc=crc)


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """Return what the format calls a dtype.

    Args:
        name: Name of the tensor, for the message.
        dtype: Dtype of the tensor.

    Raises:
        ValueError: The format has no such dtype.
    """
    found = _NAMES.get(dtype)
    if found is None:
        known = ", ".join(str(each).removeprefix("torch.") for each in _NAMES)
        raise ValueError(f"{name}: safetensors has no {dtype}, only {known}")
    return found


def stored_bytes(dtype: torch.dtype, shape: Iterable[int]) -> int:
    """Return the bytes of a tensor in a file."""
    return math.prod(shape) * dtype.itemsize


def encode_header(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, StoredTensor]]:
    """Lay out a file, so that each tensor begins at a multiple of its element's size.

    Args:
        tensors: Dtype and shape by name.
        metadata: Further text, by key.

    Returns:
        The beginning of the file, a multiple of 8 bytes; and where each tensor lies.

    Raises:
        ValueError: The format does not have a tensor's dtype or name.
    """
    entries: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    places: dict[str, tuple[int, int]] = {}
    offset = 0
    for name, (dtype, shape) in sorted(
        tensors.items(), key=lambda item: item[1][0].itemsize, reverse=True
    ):
        if name == _METADATA:
            raise ValueError(f"a tensor of a safetensors file cannot be called {name}")
        stop = offset + stored_bytes(dtype, shape)
        stated = list(shape)
        code = dtype_name(name, dtype)
        if code == _PACKED:
            if not stated:
                raise ValueError(f"{name}: a tensor of {dtype} needs a dimension, got shape ()")
            stated[-1] *= 2
        entries[name] = {"dtype": code, "shape": stated, "data_offsets": [offset, stop]}
        places[name] = offset, stop
        offset = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    header = _LENGTH.pack(len(text)) + text
    return header, {
        name: StoredTensor(*tensors[name], len(header) + start, len(header) + stop)
        for name, (start, stop) in places.items()
    }


def read_header(path: Path) -> TensorFile:
    """Read where the tensors of a file lie, and check that they are all of it.

    Raises:
        CheckpointError: The file cannot be read, is cut short, or is no safetensors file; names it, and
            the tensor where it is one.
    """
    try:
        with path.open("rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            prefix = file.read(_LENGTH.size)
            length = _LENGTH.unpack(prefix)[0] if len(prefix) == _LENGTH.size else 0
            limit = min(_MAX_HEADER_BYTES, num_bytes - _LENGTH.size)
            text = file.read(length) if 0 < length <= limit else b""
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if not text:
        raise CheckpointError(
            f"{path}: expected a header of safetensors of 1 to {max(0, limit)} bytes in a file of "
            f"{num_bytes}, got one of {length}"
        )
    with fitting(path, "the header is damaged"):
        entries = json.loads(text)
        metadata = entries.pop(_METADATA, {})
        if not isinstance(metadata, dict):
            raise TypeError(f"{_METADATA} is {type(metadata).__name__}")
    start = _LENGTH.size + length
    tensors = {name: _stored(path, name, entry, start) for name, entry in entries.items()}
    _check_tiles(path, tensors, start, num_bytes)
    return TensorFile(path, tensors, metadata, num_bytes, prefix + text)


def _stored(path: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    with fitting(path, f"{name}: the header is damaged"):
        code, stated, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*stated, start, stop]
        if any(type(number) is not int or number < 0 for number in numbers):
            raise TypeError(f"sizes and offsets {numbers}")
        dtype = DTYPES.get(code)
    if dtype is None:
        raise CheckpointError(
            f"{path}: {name}: dtype must be one of {', '.join(DTYPES)}, got {shortened(repr(code))}"
        )
    shape = list(stated)
    if code == _PACKED:
        if not shape or shape[-1] % 2:
            raise CheckpointError(
                f"{path}: {name}: the last dimension of {code} must be a multiple of 2, got shape "
                f"{stated}"
            )
        shape[-1] //= 2
    if stop - start != stored_bytes(dtype, shape):
        raise CheckpointError(
            f"{path}: {name}: {code} of shape {stated} has {stored_bytes(dtype, shape)} bytes, the "
            f"header gives it {stop - start}"
        )
    return StoredTensor(dtype, tuple(shape), data_start + start, data_start + stop)


def _check_tiles(
    path: Path, tensors: Mapping[str, StoredTensor], data_start: int, num_bytes: int
) -> None:
    """Return whether tensors follow one another without a gap up to the end of the file."""
    stop, last = data_start, "the header"
    ordered: Sequence[tuple[str, StoredTensor]] = sorted(
        tensors.items(), key=lambda item: (item[1].start, item[1].stop)
    )
    for name, stored in ordered:
        if stored.start != stop:
            raise CheckpointError(
                f"{path}: {name} begins at byte {stored.start}, {last} ends at {stop}"
            )
        if stored.stop > num_bytes:
            raise CheckpointError(
                f"{path}: {name} ends at byte {stored.stop}, but the file has {num_bytes}: it is cut "
                "short"
            )
        stop, last = stored.stop, name
    if stop != num_bytes:
        raise CheckpointError(f"{path}: {last} ends at byte {stop}, but the file has {num_bytes}")
