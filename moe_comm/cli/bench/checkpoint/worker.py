"""One rank of the benchmark of checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import struct
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from moe_comm.checkpoints import (
    CheckpointState,
    MappedFileReader,
    load_checkpoint,
    save_checkpoint,
)
from moe_comm.cli.bench.checkpoint.case import (
    CheckpointCase,
    build_model,
    differences,
    fill_model,
    known_values,
)
from moe_comm.cli.bench.rank import RankWorker
from moe_comm.cli.bench.statistics import Interval
from moe_comm.resharding.describe.module_tensors import local_tensor

PLAIN, FILES, STATE, TORCH = "plain", "files", "dcp-state", "dcp"
"""Plain files; `save_checkpoint`; torch with `CheckpointState` and `MappedFileReader`; torch with DTensors."""

_PLAIN_BYTES = 16 << 20


class CheckpointWorker(RankWorker):
    """One rank that saves and loads.

    Args:
        case: The case.
        folder: Files for rendezvous and barrier.
        rank_idx: This rank.
    """

    def __init__(self, case: CheckpointCase, folder: Path, rank_idx: int) -> None:
        super().__init__(case.num_ranks, folder, rank_idx)
        # Warnings about a state dict of DTensors alone, and about a mesh that is made of ranks.
        warnings.filterwarnings("ignore", category=UserWarning, module="torch")
        self.case = case
        self.source = build_model(case, case.source)
        fill_model(self.source)
        self.target = build_model(case, case.target)
        # Random bits, as weights are, in pages that are there.
        share = case.num_bytes // case.num_ranks
        self.plain = torch.randint(-(1 << 15), 1 << 15, (share // 2,), dtype=torch.int16)

    def save(self, way: str) -> Interval:
        """Save once, into a folder that is not there, and time it."""
        place = self.case.folder / way
        if self.rank_idx == 0:
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
        calls: dict[str, Callable[[], object]] = {
            PLAIN: self._write_plain,
            FILES: lambda: save_checkpoint(self.source, place, "1"),
            STATE: lambda: state_dict_saver.save(
                {"app": CheckpointState(self.source)}, checkpoint_id=place
            ),
            TORCH: lambda: state_dict_saver.save(
                dict(self.source.named_parameters()), checkpoint_id=place
            ),
        }
        return self._timed(calls[way])

    def load(self, way: str, is_cold: bool) -> Interval:
        """Load once what was saved, and time it.

        Args:
            way: Way in which it was saved.
            is_cold: Whether nothing of the files is in memory.
        """
        place = self.case.folder / way
        if is_cold and self.rank_idx == 0:
            forget_cached(place)
        calls: dict[str, Callable[[], object]] = {
            PLAIN: self._read_plain,
            FILES: lambda: load_checkpoint(self.target, place),
            STATE: lambda: state_dict_loader.load(
                {"app": CheckpointState(self.target, check_replicas=False)},
                checkpoint_id=place,
                storage_reader=MappedFileReader(place),
            ),
            TORCH: lambda: state_dict_loader.load(
                dict(self.target.named_parameters()), checkpoint_id=place
            ),
        }
        return self._timed(calls[way])

    def check(self, way: str) -> str | None:
        """Save and load, and compare; of `FILES` also what is in the files, by the letter of the format.

        Returns:
            None, or what is wrong.
        """
        self.save(way)
        for parameter in self.target.parameters():
            local_tensor(parameter.detach()).view(torch.uint8).fill_(0xFF)
        self.load(way, is_cold=False)
        found = differences(self.target)
        if way == FILES:
            found += self._file_differences()
        return f"rank {self.rank_idx}: {found[0]}" if found else None

    def _file_differences(self) -> Iterator[str] | list[str]:
        """Compare this rank's share of the files with what belongs there."""
        folder = self.case.folder / FILES / "1"
        known = self.case.tensors()
        names = sorted(folder.glob("*.safetensors"))
        index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        found = [] if index.keys() == known.keys() else [f"the index names {sorted(index)}"]
        for path in names[self.rank_idx :: self.case.num_ranks]:
            data = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
            (length,) = struct.unpack("<Q", data[:8].numpy().tobytes())
            header: dict[str, Any] = json.loads(data[8 : 8 + length].numpy().tobytes())
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                whole = known[name][0]
                start, stop = (8 + length + offset for offset in entry["data_offsets"])
                bits = data[start:stop].view(torch.int16)
                if (entry["dtype"], tuple(entry["shape"]), index.get(name)) != (
                    "BF16",
                    whole,
                    path.name,
                ):
                    found.append(f"{path.name}: {name} is {entry}")
                elif not torch.equal(
                    bits.view(whole), known_values(name, whole, (0,) * len(whole), whole)
                ):
                    found.append(f"{path.name}: {name} is not what was saved")
        return found

    def _write_plain(self) -> None:
        with self._plain_path.open("wb", buffering=0) as file:
            self._move_plain(file.write)
            os.fsync(file.fileno())

    def _read_plain(self) -> None:
        with self._plain_path.open("rb", buffering=0) as file:
            self._move_plain(file.readinto)

    @property
    def _plain_path(self) -> Path:
        return self.case.folder / PLAIN / str(self.rank_idx)

    def _move_plain(self, move: Callable[[memoryview], int]) -> None:
        for part in torch.split(self.plain, _PLAIN_BYTES // 2):
            values: Any = part.numpy()
            data = memoryview(values).cast("B")
            while data:
                data = data[move(data) :]


def forget_cached(folder: Path) -> None:
    """Have the system drop what it holds of files in memory; what is not on the disk stays."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
