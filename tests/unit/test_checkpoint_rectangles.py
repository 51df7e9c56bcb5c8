"""Rectangles of tensors, to files and from them, against the same of the whole tensor."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moe_comm.checkpoints import rectangles
from moe_comm.checkpoints.rectangles import (
    Rectangle,
    read_rectangle,
    rectangle_checksum,
    write_rectangle,
)
from moe_comm.checkpoints.tensor_file import crc32c

_host = pytest.importorskip("moe_comm._host")


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    found = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield found
    os.close(found)


def columns(whole: torch.Tensor, start: int, first: int, stop: int) -> Rectangle:
    shape = tuple(whole.shape)
    return Rectangle(start, shape, ((0, shape[0]), (first, stop)), whole.dtype)


# Between runs: less than is read with them, just as much, more; and rows too long to be read whole.
@pytest.mark.parametrize(
    ("num_rows", "width", "first", "stop"),
    [
        (2500, 2560, 100, 1500),
        (1, 2560, 100, 1500),
        (30, 5000, 8, 904),
        (30, 5000, 7, 904),
        (30, 5001, 8, 904),
        (5, 300_000, 1, 299_000),
        (70_000, 64, 3, 20),
        (8193, 64, 3, 11),
    ],
    ids=["large", "one", "gap", "less", "more", "long", "many", "one left"],
)
def test_columns_of_a_file(
    descriptor: int, num_rows: int, width: int, first: int, stop: int
) -> None:
    """Of several times what is read at a time, and streamed; none before, behind or between is kept."""
    whole = torch.randint(0, 256, (num_rows, width), dtype=torch.uint8)
    os.pwrite(descriptor, b"\0" * 5 + whole.numpy().tobytes(), 0)
    rectangle = columns(whole, 5, first, stop)
    memory = torch.full((num_rows + 2, stop - first), 77, dtype=torch.uint8)
    read_rectangle(descriptor, rectangle, memory[1:-1])
    expected = whole[:, first:stop].contiguous()
    assert torch.equal(memory[1:-1], expected)
    assert memory[0].eq(77).all()
    assert memory[-1].eq(77).all()
    assert rectangle_checksum(descriptor, rectangle) == crc32c(expected.numpy().tobytes())


@pytest.mark.parametrize("gap", [0, 4, 400], ids=["adjoining", "with gaps", "run by run"])
def test_a_file_that_ends_anywhere_in_the_rows_is_an_error(
    descriptor: int, monkeypatch: pytest.MonkeyPatch, gap: int
) -> None:
    monkeypatch.setattr(rectangles, "_MAX_GAP_BYTES", 100)
    monkeypatch.setattr(rectangles, "_CACHED_BYTES", 3 * (20 + gap))
    whole = torch.randint(0, 256, (10, 20 + gap), dtype=torch.uint8)
    os.pwrite(descriptor, whole.numpy().tobytes(), 0)
    rectangle = columns(whole, 0, 0, 20)
    stop = 9 * (20 + gap) + 20
    os.ftruncate(descriptor, stop)
    target = torch.zeros(10, 20, dtype=torch.uint8)
    read_rectangle(descriptor, rectangle, target)
    assert torch.equal(target, whole[:, :20])
    # In the last run, at its beginning, in a run between, and nothing at all.
    for length in (stop - 1, stop - 20, 5 * (20 + gap) + 3, 0):
        os.ftruncate(descriptor, length)
        with pytest.raises(EOFError, match=f"the file ends at byte {length}, {stop - length} byte"):
            read_rectangle(descriptor, rectangle, target)


def test_what_the_system_says_of_rows_is_an_error_of_python() -> None:
    with pytest.raises(OSError, match="Bad file descriptor") as found:
        _host.files.read_rows(-1, 0, 2, 4, 8, bytearray(8), 4096, 4096)
    assert found.value.strerror == "Bad file descriptor"
    with pytest.raises(ValueError, match="expected 8 bytes, got 7"):
        _host.files.read_rows(-1, 0, 2, 4, 8, bytearray(7), 4096, 4096)


def test_writes_end_where_large_pages_do(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a tensor begins with; the disk is told of each that is complete."""
    monkeypatch.setattr(rectangles, "_WRITTEN_BYTES", 1000)
    ends: list[int] = []
    begun: list[tuple[int, int]] = []
    pwrite = os.pwrite

    def counted(descriptor: int, data: memoryview, offset: int) -> int:
        ends.append(offset + len(data))
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", counted)
    monkeypatch.setattr(
        _host.files, "begin_writeback", lambda _, offset, length: begun.append((offset, length))
    )
    whole = torch.randint(0, 256, (2600,), dtype=torch.uint8)
    rectangle = Rectangle(700, (2600,), ((0, 2600),), torch.uint8)
    crc = write_rectangle(descriptor, rectangle, whole)
    assert ends == [1000, 2000, 3000, 3300]
    assert begun == [(0, 1000), (1000, 1000), (2000, 1000)]
    assert os.pread(descriptor, 2600, 700) == whole.numpy().tobytes()
    assert crc == crc32c(whole.numpy().tobytes())


def test_files_have_their_whole_size_and_place(descriptor: int, tmp_path: Path) -> None:
    for num_bytes in (0, 1, 100_000):
        _host.files.reserve(descriptor, num_bytes)
        found = os.fstat(descriptor)
        assert found.st_size == num_bytes
    assert found.st_blocks * 512 >= 100_000, "the disk has no place for it"
    with pytest.raises(OSError, match="Bad file descriptor"):
        _host.files.reserve(-1, 1)
    _host.files.begin_writeback(-1, 0, 1)  # nothing that could fail


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no file system in memory")
def test_a_disk_without_room_says_so_before_anything_is_written() -> None:
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        with pytest.raises(OSError, match="No space left on device"):
            _host.files.reserve(file.fileno(), 1 << 50)
        assert os.fstat(file.fileno()).st_size == 0


def test_strides_and_dtypes_drawn_at_random(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(4)
    for _ in range(60):
        for name, choices in (("_CACHED_BYTES", (1, 64, 500)), ("_MAX_GAP_BYTES", (0, 8, 4096))):
            monkeypatch.setattr(rectangles, name, rng.choice(choices))
        shape = tuple(rng.randint(1, 7) for _ in range(rng.randint(1, 4)))
        box = tuple(sorted(rng.sample(range(size + 1), 2)) for size in shape)
        dtype = rng.choice([torch.uint8, torch.bfloat16, torch.float64])
        whole = torch.randint(0, 100, shape).to(dtype)
        os.pwrite(descriptor, whole.view(torch.uint8).numpy().tobytes(), 24)
        rectangle = Rectangle(24, shape, tuple((start, stop) for start, stop in box), dtype)
        part = whole[tuple(slice(*bounds) for bounds in box)]
        kind = rng.choice([dtype, torch.float64])
        memory = torch.empty([2 * size for size in reversed(rectangle.sizes)], dtype=kind)
        target = memory[tuple(slice(None, None, 2) for _ in shape)].permute(
            *reversed(range(len(shape)))
        )
        read_rectangle(descriptor, rectangle, target)
        assert torch.equal(target, part.to(kind)), (shape, box, dtype, kind)
