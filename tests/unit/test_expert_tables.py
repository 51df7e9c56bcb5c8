"""Tables of physical experts as SGLang and vLLM make them, recorded, and what contradicts itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moe_comm import ExpertTables, Placement

# Tables that the builders of two releases made of two layers with loads
# [[0, 4, 0, 1, 6, 0, 77, 66], [0, 92, 4, 80, 13, 4, 10, 5]], of 10 physical experts on 2 ranks: SGLang 0.5.23's
# `eplb_algorithms.rebalance_experts` by "deepseek" and "deepseek_vec", with which "vec" gives int32 and no
# ascending order; vLLM 0.32.0's `DefaultEplbPolicy.rebalance_experts` with `compute_logical_maps`.
RECORDED = {
    "SGLang, deepseek": (
        [[6, 7, 4, 3, 5, 6, 7, 2, 0, 1], [1, 3, 0, 4, 6, 1, 3, 7, 2, 5]],
        [
            [[8, -1], [9, -1], [7, -1], [3, -1], [2, -1], [4, -1], [0, 5], [1, 6]],
            [[2, -1], [0, 5], [8, -1], [1, 6], [3, -1], [9, -1], [4, -1], [7, -1]],
        ],
        [[1, 1, 1, 1, 1, 1, 2, 2], [1, 2, 1, 2, 1, 1, 1, 1]],
    ),
    "SGLang, deepseek_vec": (
        [[6, 7, 4, 1, 3, 6, 7, 2, 0, 5], [1, 3, 0, 5, 4, 1, 3, 7, 2, 6]],
        [
            [[8, -1, -1], [3, -1, -1], [7, -1, -1], [4, -1, -1], [2, -1, -1], [9, -1, -1], [0, 5, -1], [6, 1, -1]],
            [[2, -1, -1], [0, 5, -1], [8, -1, -1], [6, 1, -1], [4, -1, -1], [3, -1, -1], [9, -1, -1], [7, -1, -1]],
        ],
        [[1, 1, 1, 1, 1, 1, 2, 2], [1, 2, 1, 2, 1, 1, 1, 1]],
    ),
    "vLLM": (
        [[6, 7, 4, 5, 0, 6, 7, 2, 3, 1], [1, 3, 0, 6, 4, 1, 3, 7, 2, 5]],
        [
            [[4, -1], [9, -1], [7, -1], [8, -1], [2, -1], [3, -1], [0, 5], [1, 6]],
            [[2, -1], [0, 5], [8, -1], [1, 6], [4, -1], [9, -1], [3, -1], [7, -1]],
        ],
        [[1, 1, 1, 1, 1, 1, 2, 2], [1, 2, 1, 2, 1, 1, 1, 1]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("builder", RECORDED)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tables_of_the_builders_are_taken_as_they_are(builder: str, dtype: torch.dtype) -> None:
    physical, listed, counts = (torch.tensor(each, dtype=dtype) for each in RECORDED[builder])
    tables = ExpertTables(physical, listed, counts)
    placements = tables.placements(2)
    for placement, of_layer in zip(placements, physical.tolist(), strict=True):
        assert placement == Placement([of_layer[:5], of_layer[5:]], 8)
    back = ExpertTables.of_placements(placements, num_max_replicas=listed.shape[2])
    assert torch.equal(back.physical_to_logical_map, physical.long())
    assert torch.equal(
        back.logical_to_all_physical_map.sort(-1).values, listed.long().sort(-1).values
    )
    assert torch.equal(back.logical_replica_count, counts.long())
    assert back.logical_to_all_physical_map.shape == listed.shape
    # The first map says it all.
    assert ExpertTables(RECORDED[builder][0]).placements(2) == placements
    assert ExpertTables(np.array(RECORDED[builder][0])).placements(2) == placements  # type: ignore[arg-type]


def test_a_map_may_have_the_nearest_replicas_alone() -> None:
    nearest = [[[0], [1], [3]]]
    tables = ExpertTables([[0, 1, 0, 2]], nearest, [[1, 1, 1]])
    assert tables.placements(2) == [Placement([[0, 1], [0, 2]], 3)]
    assert tables.logical_to_all_physical_map.tolist() == nearest


def test_empty_slots_are_filled_for_engines_that_have_none() -> None:
    placements = [Placement([[0, -1, 1], [2, -1, -1]], 3), Placement([[2, 0, -1], [1, 0, -1]], 3)]
    tables = ExpertTables.of_placements(placements)
    assert tables.physical_to_logical_map.tolist() == [[0, -1, 1, 2, -1, -1], [2, 0, -1, 1, 0, -1]]
    assert tables.logical_replica_count.tolist() == [[1, 1, 1], [2, 1, 1]]
    assert tables.placements(2) == placements
    filled = ExpertTables.of_placements(placements, num_max_replicas=6, fills_empty_slots=True)
    assert filled.physical_to_logical_map.tolist() == [[0, 0, 1, 2, 2, 2], [2, 0, 2, 1, 0, 1]]
    assert filled.logical_replica_count.tolist() == [[2, 1, 3], [2, 2, 2]]
    assert filled.logical_to_all_physical_map.shape == (2, 3, 6)
    assert filled.logical_to_all_physical_map[0].tolist()[2] == [3, 4, 5, -1, -1, -1]
    assert filled.placements(2) == placements
    with pytest.raises(ValueError, match="layer 0: rank 1 has no expert to fill its slots with"):
        ExpertTables.of_placements([Placement([[0], [-1]], 1)], fills_empty_slots=True)


def test_what_does_not_fit_is_refused() -> None:
    good = [[0, 1, 0, 2]]
    for wrong, given in (
        (r"logical_to_all_physical_map has physical expert 3 for expert 1, .* has expert 2", (good, [[[0, 2], [3, -1], [3, -1]]])),
        (r"layer 0: the physical experts of expert 2 .* one or more, then -1, got \[-1, 3\]", (good, [[[0, 2], [1, -1], [-1, 3]]])),
        (r"expert 2 .* got \[-1, -1\]", (good, [[[0, 2], [1, -1], [-1, -1]]])),
        (r"map\[0, 1, 0\] must be in \[-1, 4\), got 4", (good, [[[0, 2], [4, -1], [3, -1]]])),
        (r"must have the shape \(1, 3, X\), got \(2, 3, 2\)", (good, [[[0, 2], [1, -1], [3, -1]]] * 2)),
        (r"expert 0 has 2 physical experts, logical_replica_count says 1", (good, None, [[1, 1, 1]])),
        (r"logical_replica_count must have the shape \(1, 3\), got \(1, 2\)", (good, None, [[2, 1]])),
        (r"layer 1: expert 1 has no physical expert", ([[0, 1, 0, 2], [0, 2, 0, 2]],)),
        (r"layer 0: expert 1 has no physical expert", ([[0, 10**12]],)),
        (r"map\[0, 2\] must be in \[-1, 3\), got 3", ([[0, 1, 3]], [[[0], [1], [2]]])),
        (r"must have 2 dimensions and no empty one, got shape \(4,\)", ([0, 1, 0, 2],)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=wrong):
            ExpertTables(*given)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"physical_to_logical_map must hold integers, got torch.float32"
    ):
        ExpertTables(torch.zeros(1, 2))
    with pytest.raises(
        ValueError, match="num_max_replicas must be >= 2, what an expert has, got 1"
    ):
        ExpertTables.of_placements(ExpertTables(good).placements(2), num_max_replicas=1)
    with pytest.raises(
        ValueError, match=r"layer 0 has \(2, \[1, 1\]\), layer 1 has \(1, \[1, 1\]\)"
    ):
        ExpertTables.of_placements([Placement([[0], [1]], 2), Placement([[0], [0]], 1)])
    with pytest.raises(ValueError, match="placements must hold one for every layer, got none"):
        ExpertTables.of_placements([])
    with pytest.raises(ValueError, match="a multiple of num_ranks=3, got"):
        ExpertTables(good).placements(3)
