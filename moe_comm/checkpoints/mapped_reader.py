"""Checkpoints of torch's file writer, read by mapping files: of a chunk what is asked for, and no copy of it."""

from __future__ import annotations

import dataclasses
import io
import mmap
import os
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

# Header of a file in a zip archive, before its name: see APPNOTE 4.3.7 of the format.
_LOCAL_HEADER = struct.Struct("<26xHH")


class _Storage(NamedTuple):
    """Elements of a pickled tensor: their dtype, the record that has them, how many."""

    dtype: torch.dtype | None
    key: str
    num_elements: int


class _Elements(NamedTuple):
    """A tensor in its record."""

    storage: _Storage
    dtype: torch.dtype
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def _elements(
    storage: _Storage, offset: int, sizes: Any, strides: Any, *rest: Any
) -> _Elements | None:
    dtype = storage.dtype or next((each for each in rest if isinstance(each, torch.dtype)), None)
    # Values that stand for their conjugates or opposites say so in a dict.
    if dtype is None or any(isinstance(each, dict) and each for each in rest):
        return None
    return _Elements(storage, dtype, offset, tuple(sizes), tuple(strides))


class _TensorUnpickler(pickle.Unpickler):
    """Reads where the elements of a plain tensor lie, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a name in the pickle of a plain tensor."""
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return _elements
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        found = getattr(torch, name, None)
        if module == "torch" and (name.endswith("Storage") or isinstance(found, torch.dtype)):
            return found
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return torch.UntypedStorage
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a plain tensor")

    def persistent_load(self, pid: Any) -> _Storage:
        """Return what stands for the elements."""
        _, kind, key, _, num_elements = pid
        # One without a type has its dtype beside it, and is counted in bytes.
        return _Storage(getattr(kind, "_dtype", None), str(key), int(num_elements))


def _saved_tensor(mapped: mmap.mmap, start: int, num_bytes: int) -> torch.Tensor | None:
    """A tensor that `torch.save` has written, over the mapped file; None for one that is not plain.

    Args:
        mapped: The file.
        start: Offset of what `torch.save` wrote, in bytes.
        num_bytes: Bytes of that.
    """
    try:
        with zipfile.ZipFile(_Part(mapped, start, num_bytes)) as archive:
            infos = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            order = archive.read(infos["byteorder"]).decode()
            found = _TensorUnpickler(io.BytesIO(archive.read(infos["data.pkl"]))).load()
            if order != sys.byteorder or not isinstance(found, _Elements):
                return None
            record = infos[f"data/{found.storage.key}"]
    except (KeyError, ValueError, pickle.UnpicklingError, zipfile.BadZipFile):
        return None
    if record.compress_type != zipfile.ZIP_STORED or not record.file_size:
        return None
    name_bytes, extra_bytes = _LOCAL_HEADER.unpack_from(mapped, start + record.header_offset)
    first = start + record.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
    if first + record.file_size > start + num_bytes:
        return None
    values = torch.frombuffer(
        mapped, dtype=found.dtype, count=record.file_size // found.dtype.itemsize, offset=first
    )
    return values.as_strided(found.sizes, found.strides, found.offset)


class _Part(io.RawIOBase):
    """A part of a mapped file, as a file."""

    def __init__(self, mapped: mmap.mmap, start: int, num_bytes: int) -> None:
        self._mapped = mapped
        self._start = start
        self._num_bytes = num_bytes
        self._place = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place and return it."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._num_bytes}[whence]
        self._place = max(0, base + offset)
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Read from here on and return the number of bytes."""
        stop = min(self._num_bytes, self._place + len(buffer))
        data = self._mapped[self._start + self._place : self._start + max(stop, self._place)]
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)


class MappedFileReader(FileSystemReader):
    """Reads what `torch.distributed.checkpoint.save` wrote to files, without copies of whole chunks.

    torch's reader reads every chunk whole for each box of it that is asked for. This one maps the files and
    copies the boxes from there. What is no plain tensor in a plain file (objects, compression, files that are
    not of a local file system) is read as torch does. The files must not change meanwhile.
    """

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a plan says."""
        by_file: dict[str, list[ReadItem]] = {}
        rest = []
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            if item.type is LoadItemType.TENSOR and not info.transform_descriptors:
                by_file.setdefault(info.relative_path, []).append(item)
            else:
                rest.append(item)
        for name, items in by_file.items():
            rest += self._read_mapped(str(self.fs.concat_path(self.path, name)), items, planner)
        return super().read_data(dataclasses.replace(plan, items=rest), planner)

    def _read_mapped(
        self, path: str, items: list[ReadItem], planner: LoadPlanner
    ) -> list[ReadItem]:
        """Read from one file and return what could not be."""
        if not os.path.isfile(path) or not os.path.getsize(path):
            return items
        with open(path, "rb") as file:
            # A private map may be written, which torch asks of memory, and the file stays as it is.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        saved: dict[int, torch.Tensor | None] = {}
        rest = []
        for item in items:
            info = self.storage_data[item.storage_index]
            if info.offset not in saved:
                saved[info.offset] = _saved_tensor(mapped, info.offset, info.length)
            tensor = saved[info.offset]
            if tensor is None:
                rest.append(item)
                continue
            target = planner.resolve_tensor(item).detach()
            target.copy_(narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)
        return rest
