"""Headers of safetensors files: what is written, and what is refused when read."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_comm.checkpoints.tensor_file import encode_header, read_header
from moe_comm.errors import CheckpointError


def write(path: Path, header: Any, data: bytes = bytes(16), length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(*shape: int, dtype: str = "F32", start: int = 0, stop: int = 16) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def test_wider_elements_come_first_so_that_all_are_aligned(tmp_path: Path) -> None:
    tensors = {
        "byte": (torch.uint8, (3,)),
        "wide": (torch.float64, (2,)),
        "none": (torch.float32, (0, 7)),
        "half": (torch.bfloat16, (5,)),
    }
    header, places = encode_header(tensors, {"format": "pt"})
    assert len(header) % 8 == 0
    assert list(places) == ["wide", "none", "half", "byte"]
    assert all(place.start % place.dtype.itemsize == 0 for place in places.values())
    path = tmp_path / "file"
    path.write_bytes(header + bytes(29))
    read = read_header(path)
    assert read.tensors == places
    assert read.metadata == {"format": "pt"}
    assert read.header == header
    with pytest.raises(ValueError, match="cannot be called __metadata__"):
        encode_header({"__metadata__": (torch.uint8, (1,))}, {})


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ({"a": entry(4, dtype="F128")}, r"a: dtype must be one of BOOL, .*, got 'F128'"),
        ({"a": entry(5)}, r"a: F32 of shape \[5\] has 20 bytes, the header gives it 16"),
        ({"a": entry(4), "b": entry(4)}, r"b begins at byte \d+, a ends at"),
        ({"a": entry(2, start=8)}, r"a begins at byte \d+, the header ends at"),
        ({"a": entry(8, stop=32)}, r"a ends at byte \d+, but the file has \d+: it is cut short"),
        ({"a": entry(2, stop=8)}, r"a ends at byte \d+, but the file has"),
        ({"a": entry(-4, -1)}, r"a: the header is damaged"),
        ({"a": entry(True, 4)}, r"a: the header is damaged"),
        ({"a": {"dtype": "F32", "shape": [4]}}, r"a: the header is damaged"),
        ({"a": entry(31, dtype="F4")}, r"a: the last dimension of F4 must be a multiple of 2"),
        ({"a": [1]}, r"a: the header is damaged"),
        (
            {"__metadata__": 3, "a": entry(4)},
            r"the header is damaged: TypeError: __metadata__ is int",
        ),
        ([1], r"the header is damaged"),
        (b"{", r"the header is damaged"),
        (b"\xff\xfe", r"the header is damaged"),
    ],
)
def test_a_wrong_header_is_named_with_its_tensor(tmp_path: Path, header: Any, text: str) -> None:
    path = write(tmp_path / "file", header)
    with pytest.raises(CheckpointError, match=text) as found:
        read_header(path)
    assert str(found.value).startswith(f"{path}: ")


@pytest.mark.parametrize("length", [0, 10**6, 2**63])
def test_a_header_that_is_longer_than_its_file(tmp_path: Path, length: int) -> None:
    path = write(tmp_path / "file", {"a": entry(4)}, length=length)
    with pytest.raises(
        CheckpointError, match=f"in a file of {path.stat().st_size}, got one of {length}"
    ):
        read_header(path)


def test_a_file_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
        read_header(tmp_path)
    (tmp_path / "short").write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="in a file of 3, got one of 0"):
        read_header(tmp_path / "short")
