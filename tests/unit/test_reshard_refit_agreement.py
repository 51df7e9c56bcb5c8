"""Agreement of the ranks of a refit before it: whatever one of them is given, all hear of it."""

from __future__ import annotations

from typing import Any

import pytest

import moe_comm
from moe_comm.resharding import refit
from moe_comm.resharding.copy_services.symmetric_copy_service import SymmetricCopyService
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.failing_ranks import HANG_S
from tests.helpers.threaded_refits import error_of, nets, swap, threads


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"verify": "sha"}, ["ValueError", "verify must be one of", "'sha'"]),
        ({"verify": None}, ["different refits: verify='plan' on rank 0, verify=None on rank 1"]),
        ({"strict": True}, ["different refits", "strict=True"]),
        ({"num_dst_pools": 0}, ["num_dst_pools must be >= 1, got 0"]),
        ({"dst_pool_index": 1}, [r"dst_pool_index must be in [0, 1), got 1"]),
        ({"refit_method": 7}, ["TypeError", "got int"]),
        ({"refit_method": "nixl"}, ["ValueError", "'nixl'"]),
        ({"refit_method": "nvshmem"}, ["different refits", "nvshmem", "symmetric"]),
        ({"transform": object()}, ["TypeError", "should_transform"]),
    ],
)
def test_one_rank_with_bad_arguments(options: dict[str, Any], texts: list[str]) -> None:
    def rank(context: RankContext) -> str:
        src, dst = nets(context, "tp2", "single")
        asked = {"refit_method": "symmetric", "group": context.group}
        if context.rank_idx == 1:
            asked |= options
        text = error_of(lambda: refit.swap_model_weights(src, dst, **asked))
        swap(context, src.fill(1), dst)
        assert dst.wrong(1) == []
        return text

    for text in threads(rank, 2):
        for expected in texts:
            assert expected in text


@pytest.mark.parametrize("is_known", [False, True])
def test_a_name_on_one_rank_and_a_service_on_the_other(is_known: bool) -> None:
    """They would wait in two places: whatever they were given, they ask over the same channel."""

    def rank(context: RankContext) -> str:
        src, dst = nets(context, "tp2", "single")
        communicator = moe_comm.Communicator(context.group)
        service = SymmetricCopyService(communicator=communicator)
        if is_known:  # the ranks have agreed over this service before
            refit.swap_model_weights(src.fill(2), dst, service)
            assert dst.wrong(2) == []
        given = service if context.rank_idx == 1 else "symmetric"
        group = None if context.rank_idx == 1 else context.group
        text = error_of(lambda: refit.swap_model_weights(src, dst, given, group=group))
        refit.swap_model_weights(src.fill(1), dst, service)
        assert dst.wrong(1) == []
        service.close()
        communicator.destroy()
        return text

    for text in run_ranks(rank, 2, mode="threads", timeout_s=HANG_S):
        assert "ValueError: ranks ask for different refits" in text
        assert "refit_method='symmetric' on rank 0" in text
        assert "refit_method='a SymmetricCopyService' on rank 1" in text


@pytest.mark.parametrize("group", [5, "default", object()], ids=["int", "str", "object"])
def test_a_group_that_is_none(group: Any) -> None:
    """It tells over what it used before, which is where its peers wait."""

    def rank(context: RankContext) -> str:
        src, dst = nets(context, "tp2", "single")
        swap(context, src.fill(1), dst)
        asked = group if context.rank_idx == 1 else context.group
        text = error_of(lambda: refit.swap_model_weights(src, dst, "symmetric", group=asked))
        swap(context, src.fill(2), dst)
        assert dst.wrong(2) == []
        return text

    for rank_idx, text in enumerate(run_ranks(rank, 2, mode="threads", timeout_s=HANG_S)):
        assert text.startswith("TypeError")
        assert "group must be" in text
        assert type(group).__name__ in text
        assert rank_idx == 1 or "rank 1" in text


def test_a_refit_is_no_preparation() -> None:
    def rank(context: RankContext) -> str:
        src, dst = nets(context, "tp2", "single")
        if context.rank_idx == 0:
            return error_of(lambda: swap(context, src, dst))
        return error_of(lambda: refit.prepare_swap_model_weights(src, dst, group=context.group))

    for text in threads(rank, 2):
        assert "different refits: function='swap_model_weights' on rank 0, function='prep" in text
        assert "verify" not in text


def test_a_service_of_other_ranks() -> None:
    def rank(context: RankContext) -> str:
        src, dst = nets(context, "tp2", "single")
        service = SymmetricCopyService(moe_comm.RankThreads(1)[0])
        text = error_of(lambda: refit.swap_model_weights(src, dst, service, group=context.group))
        service.close()
        return text

    for rank_idx, text in enumerate(threads(rank, 2)):
        assert f"rank 0 of 1, the group of rank {rank_idx} of 2" in text
