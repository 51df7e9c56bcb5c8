"""Models and their optimizers, as `torch.distributed.checkpoint` saves and loads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from moe_comm.checkpoints.chunked_tensor import ChunkedTensor
from moe_comm.checkpoints.entries import (
    Entry,
    Path,
    Place,
    States,
    entries_of,
    problem_of,
    told_of,
    value_text,
)
from moe_comm.checkpoints.held_tensors import Described, describe_side
from moe_comm.checkpoints.optimizer_state import Beside, states_beside
from moe_comm.peers.agree import FirstError, agree
from moe_comm.peers.bootstrap import Bootstrap, bootstrap_for
from moe_comm.resharding.describe import intervals
from moe_comm.resharding.describe.module_tensors import local_tensor
from moe_comm.resharding.hold.refit_models import Model, unwrap_models
from moe_comm.resharding.move.execution import _refresh_module_caches
from moe_comm.tensors.memory import bytes_of


class CheckpointState:
    """A model, and its optimizer if wanted, for `save`, `async_save` and `load` of `torch.distributed.checkpoint`.

    Has the methods that these call, so that it is a value of a state dict itself:
    `dcp.save({"app": CheckpointState(model, optimizer)}, checkpoint_id=...)`. What was saved loads into another
    layout on another number of ranks, in place.

    Args:
        side: Side as of a `Refit`: a module that says how it is divided, `CheckpointViews`, or
            `transformers_views(model)`; None on a rank that holds nothing.
        optimizer: Optimizer of parameters of the model; its state is saved beside each of them. Given on all
            ranks or on none.
        group: Ranks that save or load together, a process group or `Bootstrap`; None for the default group.
        check_replicas: Whether to compare what several ranks hold of one tensor, by checksums, so that a save
            in which they differ is refused: one read of what is replicated. Without it one of the ranks is
            believed.

    Raises:
        TypeError: `optimizer` is none.
    """

    def __init__(
        self,
        side: Model,
        optimizer: torch.optim.Optimizer | None = None,
        group: dist.ProcessGroup | Bootstrap | None = None,
        *,
        check_replicas: bool = True,
    ) -> None:
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
            )
        self._side = side
        self._optimizer = optimizer
        self._group = group
        self._check_replicas = check_replicas
        self._places: dict[str, list[Place]] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors and numbers by name, over the memory in which they are now. Collective.

        Returns:
            Under "model" a `ChunkedTensor` for each name. With an optimizer, under "optim" also
            `"state"`, `{name -> {key -> tensor}}`, and `"param_groups"`, `{name -> {key -> value}}`, with the
            names of torch's `get_optimizer_state_dict` with `flatten_optimizer_state_dict`. Single numbers, such as
            `step`, are copies, which `load_state_dict` puts back. State that the optimizer lacks is made.

        Raises:
            PlanError: Ranks contradict each other, or do not say which part of a tensor they hold; on every
                rank. What only keeps a tensor from being saved is raised by its save: nobody holds some
                elements, replicas differ, or dtypes do.
        """
        bootstrap = bootstrap_for(self._group)
        first = FirstError()
        mine: Any = None
        tensors: list[torch.Tensor] = []
        with first:
            encoded, tensors = describe_side(self._side, self._group)
            mine = encoded, self._check_replicas
        gathered = agree(bootstrap.all_gather, first.take(), mine)
        described: Described | None = None
        beside: list[Beside | None] = [None] * len(tensors)
        with first:
            described = Described([its for its, _ in gathered], bootstrap.rank_idx, tensors)
            if self._optimizer is not None:
                beside = states_beside(self._optimizer, described.own)
        told = agree(bootstrap.all_gather, first.take(), told_of(beside))
        assert described is not None
        self._places = {}
        for held, its in zip(described.own, beside, strict=True):
            self._places.setdefault(held.name, []).append(Place(held, its))
        entries: list[Entry] = []
        sums: dict[Path, list[list[int]]] = {}
        is_checked = any(checks for _, checks in gathered)
        with first, torch.no_grad():
            entries = list(entries_of(self._places, States(described, told)))
            for entry in entries if is_checked else ():
                if any(values := entry.sums()):
                    sums[entry.path] = values
        all_sums = agree(bootstrap.all_gather, first.take(), sums)
        state: dict[str, Any] = {"model": {}}
        if self._optimizer is not None:
            state["optim"] = {"state": {}, "param_groups": {}}
        for entry in entries:
            _put(state, entry.path, _chunked(entry, all_sums))
        for name, (place, *_) in self._places.items():
            for key, value in _numbers(place.beside).items():
                _put(state, ("optim", "state", name, key), value)
            for key, value in _options(place.beside).items():
                _put(state, ("optim", "param_groups", name, key), value)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the numbers of a state dict that was loaded; tensors are in their places already.

        Args:
            state_dict: State dict that `state_dict()` returned last, after `load`.

        Raises:
            ValueError: Names that are one parameter here have different numbers, or those of one group.
        """
        targets: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}

        def take(into: dict[str, Any], key: str, name: str, value: Any) -> None:
            known = targets.setdefault((id(into), key), (into, name, value))
            if value_text(known[2]) != value_text(value):
                raise ValueError(
                    f"{key} of the optimizer is {value_text(known[2])} for {known[1]} and {value_text(value)} for "
                    f"{name}, which are one parameter or of one group here"
                )

        for name, places in self._places.items():
            for _, beside in places:
                if beside is None:
                    continue
                its = state_dict["optim"]["state"].get(name, {})
                for kind in beside.kinds:
                    if kind.role == "scalar":
                        ((_, number),) = its[kind.key].chunks
                        take(beside.state, kind.key, name, number)
                    elif kind.role == "value":
                        take(beside.state, kind.key, name, its[kind.key])
                for key in beside.options:
                    take(beside.group, key, name, state_dict["optim"]["param_groups"][name][key])
        for (_, key), (into, _, value) in targets.items():
            if isinstance(into[key], torch.Tensor):
                local_tensor(into[key]).copy_(value)
            else:
                into[key] = value
        _refresh_module_caches(unwrap_models(self._side, None).source)


def _options(beside: Beside | None) -> dict[str, Any]:
    return {} if beside is None else beside.options


def _numbers(beside: Beside | None) -> dict[str, Any]:
    """States of a parameter that are numbers of Python."""
    if beside is None:
        return {}
    return {kind.key: beside.state[kind.key] for kind in beside.kinds if kind.role == "value"}


def _put(state: dict[str, Any], path: Path, value: object) -> None:
    for key in path[:-1]:
        state = state.setdefault(key, {})
    state[path[-1]] = value


def _chunked(entry: Entry, all_sums: Sequence[Mapping[Path, list[list[int]]]]) -> ChunkedTensor:
    """Return a tensor of the state dict."""
    own = list(entry.own())
    offsets = [tuple(start for start, _ in cell.box) for cell, _ in own]
    shards = [_alone(part) for _, part in own]
    tensor = entry.places[0][0]
    if not intervals.num_elements(entry.shape):
        offsets, shards = [(0,) * len(entry.shape)], [tensor.new_empty(entry.shape)]
    problem = problem_of(entry, all_sums)
    return ChunkedTensor(entry.shape, tensor.dtype, offsets, shards, problem)


def _alone(part: torch.Tensor) -> torch.Tensor:
    """The same memory as a storage of its own: torch copies parts of larger ones, all before it ends a file."""
    is_alone = part.untyped_storage().nbytes() == part.nbytes
    if is_alone or part.device.type != "cpu" or not part.is_contiguous() or part.is_conj():
        return part
    return torch.from_numpy(bytes_of(part).numpy()).view(part.dtype).view(part.shape)
