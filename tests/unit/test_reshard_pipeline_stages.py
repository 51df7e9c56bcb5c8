"""Refits of pipeline stages whose names do not say which layers of the whole model they hold."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from moe_comm.resharding.describe.disagreement import PlanError
from moe_comm.resharding.describe.metadata_extraction import extract_module_metadata
from moe_comm.resharding.describe.parallelism import Parallelism
from moe_comm.resharding.planner import build_plan_from_rosters, index_metadata_rosters
from moe_comm.testing import RankContext
from tests.helpers.threaded_refits import error_of, swap, threads

pytestmark = pytest.mark.usefixtures("no_refit_caches")


class _Stage(nn.Module):
    """Layers of one rank, numbered from 0, each filled with one value.

    Args:
        values: Of the layers.
        num_stages: Of the model.
        rank: Among the model's ranks.
        first_rank: Where the model's ranks begin.
        first_layer: Layers on the stages before; None: layers do not say it.
    """

    def __init__(
        self,
        values: Sequence[float],
        num_stages: int,
        rank: int,
        first_rank: int = 0,
        first_layer: int | None = None,
    ) -> None:
        super().__init__()
        self.pg_collection = Parallelism(num_stages, pp=num_stages).groups(rank, first_rank)
        self.layers = nn.ModuleList()
        for i, value in enumerate(values):
            layer = nn.Module()
            layer.weight = nn.Parameter(torch.full((2,), float(value)))
            if first_layer is not None:
                layer.layer_number = first_layer + i + 1  # type: ignore[assignment]
            self.layers.append(layer)

    def values(self) -> list[float]:
        return [layer.weight[0].item() for layer in self.layers]


def _trained(rank: int, *, is_numbered: bool = False) -> _Stage:
    """Layers 1, 2 of rank 0 and 3, 4 of rank 1."""
    return _Stage(
        [2 * rank + 1, 2 * rank + 2], 2, rank, first_layer=2 * rank if is_numbered else None
    )


def test_stages_of_other_ranks_are_matched_by_their_number() -> None:
    def rank(context: RankContext) -> list[float]:
        if context.rank_idx < 2:
            swap(context, _trained(context.rank_idx), None, verify="checksum")
            return []
        served = _Stage([0, 0], 2, context.rank_idx - 2, 2)
        swap(context, None, served, verify="checksum")
        return served.values()

    assert threads(rank, 4)[2:] == [[1, 2], [3, 4]]


def test_rosters_of_stages_are_matched_by_their_number() -> None:
    pairs = [(extract_module_metadata(_trained(rank), rank), []) for rank in range(2)]
    pairs += [
        ([], extract_module_metadata(_Stage([0, 0], 2, rank, 2), rank + 2)) for rank in range(2)
    ]
    rosters = index_metadata_rosters(pairs)
    for rank in range(4):
        plan = build_plan_from_rosters(*rosters, rank)
        peers = {op.peer_rank for op in (*plan.send_ops, *plan.recv_ops)}
        assert peers == {(rank + 2) % 4}


@pytest.mark.parametrize(
    ("layers", "seen"),
    [
        (
            [[0, 0, 0], [0]],
            r"layers\.1\.weight is on stages \[0, 1\] of the source and stages \[0\]",
        ),
        ([[0, 0], [0, 0], [0]], "ranks 0 and 1"),
        ([[0, 0, 0, 0]], "ranks 0 and 1 hold a source parameter"),
    ],
    ids=["uneven", "more", "one"],
)
def test_stages_that_do_not_match_are_refused_with_both_ranks(
    layers: list[list[float]], seen: str
) -> None:
    pairs = [(extract_module_metadata(_trained(rank), rank), []) for rank in range(2)]
    pairs += [
        ([], extract_module_metadata(_Stage(values, len(layers), rank, 2), rank + 2))
        for rank, values in enumerate(layers)
    ]
    with pytest.raises(PlanError, match=seen) as info:
        index_metadata_rosters(pairs)
    assert "ranks 0 and 1" in str(info.value)
    assert "layer_number" in str(info.value)


def test_a_whole_source_of_stages_is_refused_on_every_rank_before_anything_moves() -> None:
    def rank(context: RankContext) -> tuple[str, list[float]]:
        whole = _Stage([1, 2, 3, 4], 1, 0) if context.rank_idx == 0 else None
        served = _Stage([0, 0], 2, context.rank_idx)
        return error_of(lambda: swap(context, whole, served)), served.values()

    for text, values in threads(rank, 2):
        assert text.startswith("PlanError: layers.0.weight: ranks 0 and 1 hold a destination")
        assert values == [0, 0]


@pytest.mark.parametrize("num_stages", [1, 2])
def test_layer_numbers_tell_layers_apart(num_stages: int) -> None:
    def rank(context: RankContext) -> list[float]:
        trained = _trained(context.rank_idx, is_numbered=True)
        served = None
        if context.rank_idx < num_stages:
            count = [4] if num_stages == 1 else [3, 1]
            first = 3 * context.rank_idx
            served = _Stage([0] * count[context.rank_idx], num_stages, context.rank_idx, 0, first)
        swap(context, trained, served)
        return [] if served is None else served.values()

    expected = [[1, 2, 3, 4], []] if num_stages == 1 else [[1, 2, 3], [4]]
    assert threads(rank, 2) == expected


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_parameter_that_stages_share_must_say_so(is_shared: bool) -> None:
    def rank(context: RankContext) -> tuple[str, float]:
        trained = _trained(context.rank_idx, is_numbered=True)
        trained.scale = nn.Parameter(torch.full((2,), 5.0))
        if is_shared:
            trained.scale.shared_embedding = True  # type: ignore[attr-defined]
        served = None
        if context.rank_idx == 1:
            served = _Stage([0] * 4, 1, 0, 1, 0)
            served.scale = nn.Parameter(torch.zeros(2))
        text = error_of(lambda: swap(context, trained, served))
        return text, 5.0 if served is None else served.scale[0].item()

    for text, value in threads(rank, 2):
        if is_shared:
            assert (text, value) == ("", 5.0)
        else:
            assert "scale: ranks 0 and 1 hold a source parameter" in text
            assert "shared_embedding = True" in text
