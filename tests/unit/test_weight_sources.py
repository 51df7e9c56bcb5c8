"""Weight sources of vLLM's trainers, as sides of a refit."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moe_comm.resharding import CheckpointView, CheckpointViews
from moe_comm.resharding.clients.weight_sources import trainer_weights
from moe_comm.resharding.describe import intervals


class Source:
    """Source of vLLM 0.32; `yields` is what comes, `held` what this rank holds."""

    def __init__(self, tensors: dict[str, torch.Tensor], held: set[str] | None = None) -> None:
        self.tensors, self.held = tensors, held
        self.yields: list[tuple[str, torch.Tensor | None]] = list(tensors.items())
        self.num_yielded = 0

    def metadata(self) -> list[Any]:
        return [
            types.SimpleNamespace(name=name, dtype=each.dtype, shape=list(each.shape))
            for name, each in self.tensors.items()
        ]

    def held_names(self) -> set[str] | None:
        return self.held

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        for each in self.yields:
            self.num_yielded += 1
            yield each


class NewSource:
    """Source of vLLM 0.33."""

    def __init__(self, source: Source) -> None:
        self.metadata = source.metadata()
        self._source = source

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        return iter(self._source)


def tensors() -> dict[str, torch.Tensor]:
    return {name: torch.full((2, 3), float(idx)) for idx, name in enumerate("abcd")}


def found(weights: Any) -> dict[str, list[Any]]:
    return {view.name: view.tensor.tolist() for view in weights.side.views}


@pytest.mark.parametrize("is_new", [False, True])
def test_ranks_keep_their_shares_of_full_tensors(is_new: bool) -> None:
    whole = tensors()
    source = Source(whole)
    given: Any = NewSource(source) if is_new else source
    ranks = [trainer_weights(given, rank, 2) for rank in range(2)]
    for weights in ranks:
        assert {name: spec.shape for name, spec in weights.tensors().items()} == dict.fromkeys(
            whole, (2, 3)
        )
        weights.refresh()
    assert found(ranks[0]) == {name: whole[name].tolist() for name in "ac"}
    assert found(ranks[1]) == {name: whole[name].tolist() for name in "bd"}
    places = [view.tensor.data_ptr() for view in ranks[0].side.views]
    whole["a"].fill_(9)
    ranks[0].tensors()
    ranks[0].refresh()
    assert found(ranks[0])["a"] == whole["a"].tolist()
    assert [view.tensor.data_ptr() for view in ranks[0].side.views] == places


def test_a_rank_keeps_what_it_holds_by_the_words_of_its_source() -> None:
    source = Source(tensors(), {"b"})
    source.yields = [(name, each if name == "b" else None) for name, each in source.yields]
    weights = trainer_weights(source, 0, 2)
    weights.tensors()
    weights.refresh()
    assert found(weights) == {"b": tensors()["b"].tolist()}


OWNERS = {"a": (1,), "b": None, "c": (0, 2), "d": (1, 2)}


class OwnedSource:
    """Source of vLLM 0.33, of a base that has both ways; a rank yields what it owns."""

    def __init__(self, rank: int) -> None:
        self.rank, self.tensors, self.is_full = rank, tensors(), True
        self.owners: dict[str, tuple[int, ...] | None] = dict(OWNERS)

    @property
    def metadata(self) -> list[Any]:
        return [
            types.SimpleNamespace(
                name=name, dtype=each.dtype, shape=tuple(each.shape), owners=self.owners[name]
            )
            for name, each in self.tensors.items()
        ]

    def implements_iter_full(self) -> bool:
        return self.is_full

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, each in self.tensors.items():
            its = self.owners[name]
            if its is None or self.rank in its:
                yield name, each

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError("of shards nothing is taken")


def test_owners_yield_and_keep_what_they_own() -> None:
    kept: list[str] = []
    for rank in range(3):
        weights = trainer_weights(OwnedSource(rank), rank, 3)
        assert list(weights.tensors()) == list("abcd")
        weights.refresh()
        for name, values in found(weights).items():
            assert values == tensors()[name].tolist()
            assert rank in (OWNERS[name] or range(3))
            kept.append(name)
    assert sorted(kept) == list("abcd")


def test_owners_that_change_change_what_is_kept() -> None:
    source = OwnedSource(1)
    weights = trainer_weights(source, 1, 3)
    weights.tensors()
    source.owners = {**source.owners, "a": (0,)}
    weights.tensors()
    weights.refresh()
    assert "a" not in found(weights)


def test_an_owner_that_is_no_trainer_is_refused() -> None:
    weights = trainer_weights(OwnedSource(0), 0, 2)
    with pytest.raises(ValueError, match=r"^c: trainers \(0, 2\) own it .* there are 2$"):
        weights.tensors()


def test_a_source_of_shards_alone_is_refused() -> None:
    source = OwnedSource(0)
    source.is_full = False
    with pytest.raises(NotImplementedError, match=r"^OwnedSource yields shards alone \(iter_lo"):
        trainer_weights(source, 0, 3)


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        (lambda all_: [all_[1], all_[0], *all_[2:]], "^b: the source yields it where .* has a$"),
        (lambda all_: all_[:-1], "^d: is in the metadata of the source, which did not yield it$"),
        (lambda all_: [*all_, ("e", torch.zeros(1))], "^e: the source yields it .* nothing more$"),
        (
            lambda all_: [("a", all_[0][1].t()), *all_[1:]],
            r"^a: .* of shape \(3, 2\) came, .*\(2, 3\)",
        ),
        (lambda all_: [("a", all_[0][1].half()), *all_[1:]], "^a: torch.float16 .* torch.float32"),
        (lambda all_: [("a", None), *all_[1:]], "^a: the source holds it by its own words"),
    ],
)
def test_a_source_that_yields_something_else_than_it_says_is_refused(odd: Any, says: str) -> None:
    source = Source(tensors())
    source.yields = odd(source.yields)
    weights = trainer_weights(source, 0, 1)
    weights.tensors()
    with pytest.raises(ValueError, match=says):
        weights.refresh()
    # Other ranks wait in making what comes after.
    assert source.num_yielded == len(source.yields)


def test_views_are_taken_as_they_are() -> None:
    tensor = torch.zeros(2, 3)
    dims = tuple(map(intervals.whole, tensor.shape))
    side = CheckpointViews([CheckpointView("a", (2, 3), dims, tensor)])
    weights = trainer_weights(side, 0, 1)
    assert weights.side is side
    assert {name: tuple(spec) for name, spec in weights.tensors().items()} == {
        "a": ((2, 3), torch.float32)
    }


@pytest.mark.parametrize("source", [None, torch.nn.Linear(2, 2), [("a", torch.zeros(2))]])
def test_anything_else_is_refused(source: Any) -> None:
    with pytest.raises(TypeError, match="source must be a WeightSource"):
        trainer_weights(source, 0, 1)
