"""Checkpoints of torch's writer through mapped files: the same values, and nothing read that need not be."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from moe_comm.checkpoints import MappedFileReader
from moe_comm.checkpoints.mapped_reader import _saved_tensor

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _tensors() -> dict[str, torch.Tensor]:
    values = torch.arange(60.0).view(3, 4, 5)
    return {
        "float32": values,
        "odd": torch.arange(7, dtype=torch.int8),  # what follows lies at any byte
        "transposed": values.permute(2, 0, 1),
        "part": values[1:, :, 2:4],
        "bfloat16": values.bfloat16(),
        "float8": values.to(torch.float8_e4m3fn),
        "uint16": torch.arange(9).to(torch.uint16),
        "bool": values > 7,
        "number": torch.tensor(3.5, dtype=torch.float64),
        "complex": torch.complex(values, -values),
    }


def _empty_like(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}


def test_plain_tensors_are_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = _tensors()
    dcp.save(dict(tensors), checkpoint_id=tmp_path, no_dist=True)
    loaded: dict[str, Any] = _empty_like(tensors)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("torch.load was called")

    monkeypatch.setattr(torch, "load", refuse)
    dcp.load(loaded, storage_reader=MappedFileReader(tmp_path), no_dist=True)
    for name, tensor in tensors.items():
        assert torch.equal(
            loaded[name].contiguous().view(torch.uint8) if tensor.dim() else loaded[name],
            tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor,
        ), name


def test_others_are_read_as_torch_does(tmp_path: Path) -> None:
    conjugate = torch.complex(torch.ones(3), torch.ones(3)).conj()
    saved = {"conjugate": conjugate, "object": {"epoch": 3}, "empty": torch.empty(0, 4)}
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    loaded: dict[str, Any] = {
        "conjugate": torch.zeros(3, dtype=torch.complex64),
        "object": {"epoch": 0},
        "empty": torch.empty(0, 4),
    }
    dcp.load(loaded, storage_reader=MappedFileReader(tmp_path), no_dist=True)
    assert loaded["conjugate"].tolist() == [1 - 1j] * 3
    assert loaded["object"] == {"epoch": 3}


def test_files_stay_as_they_are(tmp_path: Path) -> None:
    tensors = _tensors()
    dcp.save(dict(tensors), checkpoint_id=tmp_path, no_dist=True)
    (file,) = tmp_path.glob("*.distcp")
    before = file.read_bytes()
    reader = MappedFileReader(tmp_path)
    dcp.load(_empty_like(tensors), storage_reader=reader, no_dist=True)
    for info in reader.storage_data.values():
        with file.open("rb") as opened:
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        tensor = _saved_tensor(mapped, info.offset, info.length)
        tensor.zero_()
    assert file.read_bytes() == before


@pytest.mark.parametrize("keep", [0, 100, 1500])
def test_a_file_that_was_cut_is_an_error(tmp_path: Path, keep: int) -> None:
    """As with torch's reader, and no part of the process's memory that is not there is touched."""
    dcp.save({"a": torch.ones(512)}, checkpoint_id=tmp_path, no_dist=True)
    (file,) = tmp_path.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointException):
        dcp.load({"a": torch.zeros(512)}, storage_reader=MappedFileReader(tmp_path), no_dist=True)
