"""The tensors of a state dict: which boxes of each lie here, and what keeps it from being saved."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from moe_comm.checkpoints.boxes import HeldBox, is_within, part_of
from moe_comm.checkpoints.held_tensors import Cell, Described, HeldTensor, WholeTensor
from moe_comm.checkpoints.optimizer_state import Beside, StateKind
from moe_comm.peers.agree import name_ranks
from moe_comm.resharding.copy_services.changed_blocks import checksum
from moe_comm.resharding.describe import intervals
from moe_comm.resharding.describe.disagreement import PlanError
from moe_comm.resharding.describe.module_tensors import local_tensor
from moe_comm.resharding.describe.tensor_layout import Shape

Path = tuple[str, ...]
_ONE_ELEMENT = HeldBox((), 0, ())


class Place(NamedTuple):
    """A tensor of this rank, and what the optimizer has beside it."""

    held: HeldTensor
    beside: Beside | None


class Entry(NamedTuple):
    """A tensor of the state dict.

    Args:
        path: Keys that lead to it.
        shape: Shape of the whole tensor.
        dtypes: The different ones of all holders, each with a rank that has it.
        cells: Cells of all ranks.
        places: Tensors of this rank that hold some of it, and the boxes that they hold.
    """

    path: Path
    shape: Shape
    dtypes: Mapping[str, int]
    cells: list[Cell]
    places: list[tuple[torch.Tensor, Sequence[HeldBox]]]

    def own(self) -> Iterator[tuple[Cell, torch.Tensor]]:
        """Cells that this rank holds, and their memory; a cell in two places comes twice."""
        by_box = {cell.box: cell for cell in self.cells}
        for tensor, boxes in self.places:
            for held in boxes:
                exact = by_box.get(held.box)
                for cell in self.cells if exact is None else (exact,):
                    if exact is not None or is_within(cell.box, held.box):
                        yield cell, part_of(tensor, held, cell.box)

    def sums(self) -> list[list[int]]:
        """Checksums of what this rank holds more than once, or others do too: of each cell, of each place."""
        parts: dict[Cell, list[torch.Tensor]] = {}
        for cell, part in self.own():
            parts.setdefault(cell, []).append(part)
        return [
            [checksum(part.cpu()) for part in parts[cell]]
            if len(cell.ranks) > 1 or len(parts[cell]) > 1
            else []
            for cell in self.cells
            if cell in parts
        ]


def value_text(value: object) -> str:
    """Return a number, or whatever an option of an optimizer is, as text that is equal where it is."""
    return repr(value.tolist() if isinstance(value, torch.Tensor) else value)


def told_of(beside: Sequence[Beside | None]) -> tuple[list[Any], bytes]:
    """Report of a rank about its optimizer: different sorts of parameters, and the sort of each tensor.

    A sort is the kinds of a parameter's states and the options of its group as text; -1 stands for none.
    """
    sorts: dict[Any, int] = {}
    sort_of = array("i")
    for each in beside:
        if each is None:
            sort_of.append(-1)
            continue
        options = tuple(sorted((key, value_text(value)) for key, value in each.options.items()))
        sort = tuple(map(tuple, each.kinds)), options
        sort_of.append(sorts.setdefault(sort, len(sorts)))
    return list(sorts), sort_of.tobytes()


class States:
    """Ranks that hold each state of a parameter.

    Args:
        described: Description of the model on all ranks.
        told: Report of every rank, see `told_of`.

    Raises:
        PlanError: Ranks have different options for one parameter.
    """

    def __init__(self, described: Described, told: Sequence[tuple[Any, bytes]]) -> None:
        self._dtypes: dict[tuple[str, str], dict[int, str]] = {}
        options_of: dict[str, tuple[Any, int]] = {}
        for rank, (side, (sorts, sort_of)) in enumerate(zip(described.by_rank, told, strict=True)):
            for name, sort in zip(side.resolved_names, array("i", sort_of), strict=True):
                if sort < 0:
                    continue
                kinds, options = sorts[sort]
                theirs, first = options_of.setdefault(name, (options, rank))
                if theirs != options:
                    one, other = dict(theirs), dict(options)
                    key = next(k for k in sorted({*one, *other}) if one.get(k) != other.get(k))
                    raise PlanError(
                        f"{name}: {key} of the optimizer is {one.get(key)} on rank {first} and "
                        f"{other.get(key)} on rank {rank}"
                    )
                for key, _, dtype in kinds:
                    self._dtypes.setdefault((name, key), {}).setdefault(rank, dtype)

    def dtypes_of(self, name: str, kind: StateKind) -> dict[int, str]:
        """Return the ranks that hold a state of a parameter, each with its dtype there."""
        return self._dtypes[name, kind.key]


def entries_of(places: Mapping[str, list[Place]], states: States) -> Iterator[Entry]:
    """The tensors of this rank's state dict."""
    known: dict[tuple[int, frozenset[int] | None], list[Cell]] = {}

    def cells(whole: WholeTensor, ranks: frozenset[int] | None = None) -> list[Cell]:
        among = None if ranks is None or ranks.issuperset(whole.ranks) else ranks
        key = id(whole), among
        if key not in known:
            known[key] = whole.cells(among)
        return known[key]

    for name, mine in places.items():
        whole = mine[0].held.whole
        pairs = zip(map(str, whole.dtypes), whole.ranks, strict=True)
        parts: list[tuple[torch.Tensor, Sequence[HeldBox]]]
        parts = [(held.tensor, held.boxes) for held, _ in mine]
        yield Entry(("model", name), whole.shape, _first_ranks(pairs), cells(whole), parts)
        beside = [(held, its) for held, its in mine if its is not None]
        for kind in beside[0][1].kinds if beside else ():
            dtypes = states.dtypes_of(name, kind)
            first = _first_ranks((dtype, rank) for rank, dtype in dtypes.items())
            path = "optim", "state", name, kind.key
            if kind.role == "like":
                parts = [(its.view_like(kind.key, held.tensor), held.boxes) for held, its in beside]
                yield Entry(path, whole.shape, first, cells(whole, frozenset(dtypes)), parts)
            elif kind.role == "scalar":
                number = local_tensor(beside[0][1].state[kind.key]).reshape(()).clone()
                cell = Cell((), tuple(dtypes))
                yield Entry(path, (), first, [cell], [(number, [_ONE_ELEMENT])])


def _first_ranks(pairs: Iterator[tuple[str, int]]) -> dict[str, int]:
    first: dict[str, int] = {}
    for dtype, rank in pairs:
        first.setdefault(dtype, rank)
    return first


def problem_of(entry: Entry, all_sums: Sequence[Mapping[Path, list[list[int]]]]) -> str | None:
    """Why a tensor cannot be saved; None where nothing is wrong."""
    name = ".".join(entry.path)
    if len(entry.dtypes) > 1:
        held = " and ".join(f"{dtype} on rank {rank}" for dtype, rank in entry.dtypes.items())
        return f"{name}: ranks hold one tensor with different dtypes: {held}"
    num_held = sum(intervals.num_elements(b - a for a, b in cell.box) for cell in entry.cells)
    if num_held != intervals.num_elements(entry.shape):
        defect = intervals.find_defect(entry.shape, [cell.box for cell in entry.cells])
        missing = None if defect is None else [list(bounds) for bounds in defect.box]
        return (
            f"{name}: no rank holds elements {missing} of the whole tensor of shape {entry.shape}"
        )
    for cell, ranks_of in _ranks_by_value(entry, all_sums).items():
        if len(ranks_of) > 1:
            one, other, *_ = map(name_ranks, ranks_of.values())
            box = [list(bounds) for bounds in cell.box]
            return (
                f"{name}: one name stands for one tensor, but {other} has other values than {one} in elements "
                f"{box} of the whole tensor of shape {entry.shape}"
            )
    return None


def _ranks_by_value(
    entry: Entry, all_sums: Sequence[Mapping[Path, list[list[int]]]]
) -> dict[Cell, dict[int, list[int]]]:
    """By checksum, the ranks that hold a cell with it."""
    ranks_of: dict[Cell, dict[int, list[int]]] = {}
    for rank, its in enumerate(all_sums):
        held = [cell for cell in entry.cells if rank in cell.ranks]
        for cell, values in zip(held, its.get(entry.path, ()), strict=False):
            for value in dict.fromkeys(values):
                ranks_of.setdefault(cell, {}).setdefault(value, []).append(rank)
    return ranks_of
