"""Weights of a trainer rank, out of what vLLM's trainers are given: a sharded model, or full tensors by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch

from moe_comm.arguments import shown
from moe_comm.peers.agree import FirstError
from moe_comm.resharding.describe import intervals
from moe_comm.resharding.describe.checkpoint_views import CheckpointView, CheckpointViews
from moe_comm.resharding.describe.loader_views import TensorSpec
from moe_comm.resharding.describe.transformers_views import transformers_views

__all__ = ["TrainerWeights", "trainer_weights"]


class TrainerWeights(Protocol):
    """Part of a checkpoint that a trainer rank holds."""

    side: CheckpointViews
    """Views of the memory that holds the part, as of the last `tensors`."""

    def tensors(self) -> dict[str, TensorSpec]:
        """Return name, whole shape and dtype of every tensor of which this rank may hold a part. Local."""

    def refresh(self) -> None:
        """Bring the values of now to where `side` has them. Collective where the caller's source is."""


def trainer_weights(source: Any, rank: int, num_ranks: int) -> TrainerWeights:
    """Return what a rank holds of a source.

    Args:
        source: A model of transformers, `CheckpointViews`, or a `WeightSource` of vLLM: one that has
            `metadata` (a method or a property) and is iterated by `iter_full()` or by itself. Of vLLM's
            `ModuleSource` over a model of transformers the model is taken, in the parts that ranks hold.
        rank: This rank among the trainers.
        num_ranks: Trainers; each keeps its share of the full tensors of a `WeightSource`, of those that
            have `owners` in its metadata only its own.

    Raises:
        NotImplementedError: `source` yields its shards alone (`iter_local()`).
        TypeError: `source` is nothing of this.
        Exception: As `transformers_views`, or what the source raises.
    """
    if isinstance(source, CheckpointViews):
        return _Parts(source)
    if isinstance(source, torch.nn.Module) and hasattr(source, "save_pretrained"):
        return _Parts(transformers_views(source))
    if type(source).__name__ == "ModuleSource":
        module = getattr(source, "_module", None)
        if isinstance(module, torch.nn.Module) and hasattr(module, "save_pretrained"):
            return _Parts(transformers_views(module))
    if hasattr(source, "metadata"):
        if _yields_full(source):
            return _FullTensors(source, rank, num_ranks)
        if hasattr(source, "iter_local"):
            raise NotImplementedError(
                f"{type(source).__name__} yields shards alone (iter_local()); a source must yield full "
                "tensors (iter_full()), or be the sharded model itself, or CheckpointViews of it"
            )
    raise TypeError(
        "source must be a WeightSource that yields full tensors, a model of transformers or "
        f"CheckpointViews, got {shown(source)}"
    )


def _yields_full(source: Any) -> bool:
    # A source of vLLM 0.33 has iter_full() in any case, which need not be implemented.
    if hasattr(source, "implements_iter_full"):
        return bool(source.implements_iter_full())
    return hasattr(source, "iter_full") or callable(getattr(source, "__iter__", None))


class _Parts:
    """Views of the trainer's own storage: nothing is copied."""

    def __init__(self, side: CheckpointViews) -> None:
        self.side = side
        self._state: object = None
        self._tensors: dict[str, TensorSpec] = {}

    def tensors(self) -> dict[str, TensorSpec]:
        state = self.side.state()
        if state is not self._state:
            self._state = state
            self._tensors = {
                view.name: TensorSpec(view.whole_shape, view.tensor.dtype)
                for view in self.side.views
            }
        return self._tensors

    def refresh(self) -> None:
        """Do nothing: a refit reads the weights where they are."""


class _FullTensors:
    """Full tensors that a source yields, of which each rank keeps a share until they are sent."""

    def __init__(self, source: Any, rank: int, num_ranks: int) -> None:
        self._source = source
        self._rank, self._num_ranks = rank, num_ranks
        self._tensors: dict[str, TensorSpec] = {}
        self._owners: dict[str, tuple[int, ...] | None] = {}
        self._kept: dict[str, torch.Tensor] = {}
        self.side = CheckpointViews([])

    def tensors(self) -> dict[str, TensorSpec]:
        metadata = self._source.metadata
        listed: Iterable[Any] = metadata() if callable(metadata) else metadata
        tensors: dict[str, TensorSpec] = {}
        owners: dict[str, tuple[int, ...] | None] = {}
        for each in listed:
            if each.name in tensors:
                raise ValueError(f"{each.name}: comes twice in the metadata of the source")
            tensors[each.name] = TensorSpec.of(each)
            its = owners[each.name] = getattr(each, "owners", None)
            if its is not None and max(its) >= self._num_ranks:
                raise ValueError(
                    f"{each.name}: trainers {its} own it by the metadata of the source, there are "
                    f"{self._num_ranks}"
                )
        if list(tensors.items()) != list(self._tensors.items()) or owners != self._owners:
            held = getattr(self._source, "held_names", lambda: None)()
            mine = frozenset(self._share(owners) if held is None else held)
            self._kept = {
                name: torch.empty(spec.shape, dtype=spec.dtype)
                for name, spec in tensors.items()
                if name in mine
            }
            views = [
                CheckpointView(
                    name, tuple(each.shape), tuple(map(intervals.whole, each.shape)), each
                )
                for name, each in self._kept.items()
            ]
            self.side, self._tensors, self._owners = CheckpointViews(views), tensors, owners
        return self._tensors

    def _share(self, owners: dict[str, tuple[int, ...] | None]) -> Iterator[str]:
        """Names that this rank keeps, of all owners in turn."""
        for idx, (name, its) in enumerate(owners.items()):
            ranks = range(self._num_ranks) if its is None else its
            if ranks[idx % len(ranks)] == self._rank:
                yield name

    def refresh(self) -> None:
        """Take all that the source yields, also after a mistake: other ranks wait in making it.

        Raises:
            ValueError: It yields another tensor than its metadata says; the tensor is named.
        """
        problem = FirstError()
        expected = (
            (name, spec)
            for name, spec in self._tensors.items()
            if (its := self._owners[name]) is None or self._rank in its
        )
        for name, tensor in self._iterate():
            with problem:
                self._take(name, tensor, next(expected, None))
        with problem:
            for name, _ in expected:
                raise ValueError(
                    f"{name}: is in the metadata of the source, which did not yield it"
                )
        problem.raise_own()

    def _iterate(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        iter_full = getattr(self._source, "iter_full", None)
        return iter(self._source if iter_full is None else iter_full())

    def _take(
        self, name: str, tensor: torch.Tensor | None, expected: tuple[str, TensorSpec] | None
    ) -> None:
        if expected is None or name != expected[0]:
            what = "nothing more" if expected is None else expected[0]
            raise ValueError(f"{name}: the source yields it where its metadata has {what}")
        kept = self._kept.get(name)
        if kept is None:
            return
        spec = expected[1]
        if tensor is None:
            raise ValueError(f"{name}: the source holds it by its own words, and yields None")
        if (found := TensorSpec.of(tensor)) != spec:
            raise ValueError(f"{name}: {found} came, the metadata of the source has {spec}")
        kept.copy_(tensor.detach())
