"""Case of a checkpoint: a model of DTensors between two layouts, every element of which is known."""

from __future__ import annotations

import dataclasses
import itertools
import math
import zlib
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from moe_comm.cli.reshard.model_shapes import MoEShape
from moe_comm.resharding.describe.parallelism import Parallelism

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointCase:
    """One configuration; every process holds an equal copy.

    Args:
        shape: Sizes of the model.
        source: Layout that is saved.
        target: Layout that is loaded, on the same ranks.
        folder: Folder that files are written to; exists, and is empty.

    Raises:
        ValueError: A layout is not tensor parallel times expert parallel on all ranks.
    """

    shape: MoEShape
    source: Parallelism
    target: Parallelism
    folder: Path

    def __post_init__(self) -> None:
        for layout in (self.source, self.target):
            if (
                layout.tp * layout.ep != layout.num_ranks
                or layout.pp > 1
                or layout.etp != layout.tp
            ):
                raise ValueError(
                    f"layouts must be tpN.epM with N * M = {layout.num_ranks} ranks, got {layout}"
                )
            for name, (whole, _, _) in self.tensors().items():
                size = math.gcd(*whole)
                if size % layout.tp or (len(whole) == 3 and whole[0] % layout.ep):
                    raise ValueError(f"{layout} does not divide {name} of shape {whole}")

    @property
    def num_ranks(self) -> int:
        """Processes."""
        return self.source.num_ranks

    def tensors(self) -> dict[str, tuple[Shape, Placement, Placement]]:
        """Whole shape by name, and how ranks with other experts, and tensor parallel ones, cut it."""
        sizes = self.shape
        hidden, ffn, experts = sizes.hidden, sizes.expert_ffn, sizes.num_experts
        same, rows, columns = Replicate(), Shard(0), Shard(1)
        found: dict[str, tuple[Shape, Placement, Placement]] = {
            "embedding": ((sizes.vocab, hidden), same, rows)
        }
        for number in range(sizes.num_layers):
            layer = f"layers_{number}_"
            found[layer + "qkv"] = (3 * hidden, hidden), same, rows
            found[layer + "out"] = (hidden, hidden), same, columns
            found[layer + "experts_up"] = (experts, 2 * ffn, hidden), Shard(0), Shard(1)
            found[layer + "experts_down"] = (experts, hidden, ffn), Shard(0), Shard(2)
        return found

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole model."""
        elements = sum(math.prod(whole) for whole, _, _ in self.tensors().values())
        return elements * torch.bfloat16.itemsize

    def to_dict(self) -> dict[str, Any]:
        """Return the case as JSON writes it."""
        return {
            "ranks": self.num_ranks,
            "from": str(self.source),
            "to": str(self.target),
            "dtype": "bfloat16",
            "shape": dataclasses.asdict(self.shape),
            "model_bytes": self.num_bytes,
        }


def build_model(case: CheckpointCase, layout: Parallelism) -> torch.nn.Module:
    """One rank's part, of NaN. Collective: makes a mesh over all ranks."""
    ranks = torch.arange(case.num_ranks).view(layout.ep, layout.tp)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("ep", "tp"))
    module = torch.nn.Module()
    for name, (whole, *cuts) in case.tensors().items():
        sizes, _ = compute_local_shape_and_global_offset(whole, mesh, cuts)
        local = torch.empty(sizes, dtype=torch.bfloat16)
        local.view(torch.uint8).fill_(0xFF)
        tensor = DTensor.from_local(local, mesh, cuts, run_check=False)
        module.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    return module


def known_values(name: str, whole: Shape, start: Shape, sizes: Shape) -> torch.Tensor:
    """Bits of a box of a tensor, int16 of `sizes`; of a matrix or a stack of matrices, up to 2**31 elements.

    Args:
        name: Name of the tensor.
        whole: Shape of the tensor.
        start: Start of the box.
        sizes: Sizes of the box.
    """
    found = torch.empty(sizes, dtype=torch.int16)
    rows, columns = (
        torch.arange(first, first + size, dtype=torch.int32)
        for first, size in zip(start[-2:], sizes[-2:], strict=True)
    )
    # Wraps around: neighbors in every dimension differ, and so do tensors.
    plane = (rows[:, None] * whole[-1] + columns[None, :]) * 0x9E3B
    for lead in itertools.product(*map(range, sizes[:-2])):
        number = sum(first + index for first, index in zip(start, lead, strict=False))
        base = (zlib.crc32(f"{name}/{number}".encode()) & 0x7FFF) + number
        found[lead] = ((plane + base) >> 3).to(torch.int16)
    return found


def _parts(module: torch.nn.Module) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    parts = []
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor)
        sizes, start = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        values = known_values(name, tuple(parameter.shape), tuple(start), tuple(sizes))
        parts.append((name, parameter.to_local().detach().view(torch.int16), values))
    return parts


def fill_model(module: torch.nn.Module) -> None:
    """Give every element the value that its place in the whole model has."""
    for _, bits, values in _parts(module):
        bits.copy_(values)


def differences(module: torch.nn.Module) -> list[str]:
    """Return a line for every tensor that differs from `fill_model`."""
    return [
        f"{name}: {int((bits != values).sum())} elements are not what was saved"
        for name, bits, values in _parts(module)
        if not torch.equal(bits, values)
    ]
