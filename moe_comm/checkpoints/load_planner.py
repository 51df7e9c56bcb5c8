"""A plan of `torch.distributed.checkpoint.load` that says what does not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list

from moe_comm.resharding.describe import intervals
from moe_comm.resharding.describe.conversions import cannot_become
from moe_comm.resharding.describe.intervals import Box

# Different problems that a message lists.
_MAX_PROBLEMS = 8


class CheckingLoadPlanner(DefaultLoadPlanner):
    """A plan of `torch.distributed.checkpoint.load` that refuses, before anything is read, what would not be whole.

    The plan that is used without it names a missing tensor and another shape. This one names all of these at
    once, on every rank, and what the other does without a word: values of a dtype that do not become those of
    the tensor, elements that the checkpoint does not hold, and tensors of the checkpoint that nobody reads.

    Args:
        allow_unread: Leave tensors of the checkpoint that no rank asks for.
    """

    def __init__(self, *, allow_unread: bool = False) -> None:
        super().__init__()
        self.allow_unread = allow_unread

    def create_local_plan(self) -> LoadPlan:
        """Plan what this rank reads.

        Raises:
            ValueError: See the class.
        """
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        problems = []
        for name, wanted in self.state_dict.items():
            found = saved.get(name)
            if found is None:
                problems.append(f"{name}: the checkpoint has no such name")
            elif isinstance(wanted, torch.Tensor) != isinstance(found, TensorStorageMetadata):
                kind = "a tensor" if isinstance(wanted, torch.Tensor) else "no tensor"
                problems.append(
                    f"{name}: expected {kind}, the checkpoint has a {type(found).__name__}"
                )
            elif isinstance(found, TensorStorageMetadata):
                problems += _misfits(name, found, wanted)
        _raise_problems(problems)
        plan = super().create_local_plan()
        _raise_problems(self._holes(plan))
        return dataclasses.replace(plan, planner_data=list(self.state_dict))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Check on one rank what all of them read.

        Raises:
            ValueError: Nobody reads a tensor of the checkpoint.
        """
        assert self.metadata is not None
        if not self.allow_unread:
            read = {name for plan in global_plan for name in plan.planner_data}
            unread = sorted(self.metadata.state_dict_metadata.keys() - read)
            _raise_problems(
                [f"{name}: no rank reads it" for name in unread],
                "CheckingLoadPlanner(allow_unread=True) leaves what no rank reads",
            )
        return super().create_global_plan(global_plan)

    def _holes(self, plan: LoadPlan) -> list[str]:
        """Parts of the boxes to be read that the plan would leave as they are."""
        assert self.metadata is not None
        boxes: dict[tuple[str, int | None, torch.Size | None], list[Box]] = {}
        for item in plan.items:
            starts, sizes = item.dest_offsets, item.lengths
            box = tuple((start, start + size) for start, size in zip(starts, sizes, strict=True))
            place = item.dest_index.fqn, item.dest_index.index, item.dest_index.offset
            boxes.setdefault(place, []).append(box)
        holes = []
        for name, wanted in self.state_dict.items():
            if not isinstance(wanted, torch.Tensor):
                continue
            for number, chunk in enumerate(_create_chunk_list(wanted)):
                found = boxes.get((name, number, chunk.offsets), [])
                defect = intervals.find_defect(chunk.sizes, found)
                if defect is not None:
                    missing = [
                        [start + first, start + last]
                        for start, (first, last) in zip(chunk.offsets, defect.box, strict=True)
                    ]
                    holes.append(
                        f"{name}: elements {missing} of the whole tensor of shape {tuple(wanted.shape)} are "
                        f"in the checkpoint {'not at all' if defect.kind == 'hole' else 'twice'}"
                    )
        return holes


def _misfits(name: str, found: TensorStorageMetadata, wanted: torch.Tensor) -> list[str]:
    if found.size != wanted.shape:
        return [f"{name}: expected shape {tuple(wanted.shape)}, got {tuple(found.size)}"]
    reason = cannot_become(found.properties.dtype, wanted.dtype)
    if not reason:
        return []
    return [f"{name}: expected {wanted.dtype}, got {found.properties.dtype}: {reason}"]


def _raise_problems(problems: Sequence[str], *hints: str) -> None:
    if problems:
        more = len(problems) - _MAX_PROBLEMS
        lines = [*problems[:_MAX_PROBLEMS], *([f"and {more} more"] if more > 0 else [])]
        raise ValueError("the checkpoint does not fit: " + "; ".join((*lines, *hints)))
