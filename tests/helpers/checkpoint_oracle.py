"""Views of a checkpoint's tensors held against these tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from moe_comm.resharding.describe.checkpoint_views import CheckpointView
from moe_comm.resharding.describe.intervals import Intervals


def indices(dims: Iterable[Intervals]) -> tuple[torch.Tensor, ...]:
    """Index of the part of a tensor that a view holds."""
    held = [
        torch.tensor([start + k for start, _, length in each for k in range(length)])
        for each in dims
    ]
    return torch.meshgrid(*held, indexing="ij") if held else ()


def faults_of(views: Iterable[CheckpointView], disk: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of views that are not what is on disk."""
    faults = []
    for view in views:
        if view.name not in disk:
            faults.append(f"{view.name} is not on disk")
            continue
        expected = disk[view.name].reshape(view.shape)[indices(view.dims)]
        if view.tensor.dtype != expected.dtype or not torch.equal(view.tensor, expected):
            faults.append(f"{view.name} {view.dims} is off")
    return faults


def uncovered(
    held: Iterable[tuple[str, tuple[int, ...], tuple[Intervals, ...]]],
    disk: Mapping[str, torch.Tensor],
) -> list[str]:
    """Names of tensors on disk that nobody holds some elements of."""
    masks = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in disk.items()}
    for name, shape, dims in held:
        masks[name].reshape(shape)[indices(dims)] = True
    return [name for name, mask in masks.items() if not mask.all()]
