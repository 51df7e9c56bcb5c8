"""Full tensors out of what ranks hold in parts, a bucket at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_comm.resharding import CheckpointView, CheckpointViews, PlanError
from moe_comm.resharding.clients.full_tensors import FullTensors
from moe_comm.resharding.describe import intervals
from moe_comm.resharding.describe.intervals import Interval
from moe_comm.testing import RankContext, run_ranks

NUM_EXPERTS, HIDDEN, INNER = 4, 6, 5


def fused(offset: float) -> torch.Tensor:
    """Gate and up of all experts, float32 `[NUM_EXPERTS, 2 * INNER, HIDDEN]`."""
    shape = (NUM_EXPERTS, 2 * INNER, HIDDEN)
    return torch.arange(torch.Size(shape).numel()).view(shape) + offset


def whole_tensors(offset: float) -> dict[str, torch.Tensor]:
    """Tensors as on disk; turned, and `norm` as finer dimensions on its ranks."""
    experts = {
        f"{number}.{half}": tensor.t()
        for number, both in enumerate(fused(offset))
        for half, tensor in zip(("gate", "up"), both.chunk(2), strict=True)
    }
    return experts | {"norm": (torch.arange(12.0) + offset).bfloat16()}


class Holder(torch.nn.Module):
    """Two experts of a rank, fused, and its half of `norm`."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.experts = torch.nn.Parameter(torch.empty(2, 2 * INNER, HIDDEN))
        self.norm = torch.nn.Parameter(torch.empty(3, 2, dtype=torch.bfloat16))

    def fill(self, offset: float) -> None:
        with torch.no_grad():
            self.experts.copy_(fused(offset)[2 * self.rank :][:2])
            self.norm.copy_(whole_tensors(offset)["norm"].view(3, 4)[:, 2 * self.rank :][:, :2])

    def views(self) -> list[CheckpointView]:
        dims = intervals.whole(HIDDEN), intervals.whole(INNER)
        found = [
            CheckpointView(f"{2 * self.rank + k}.{half}", (HIDDEN, INNER), dims, part.detach().t())
            for k, both in enumerate(self.experts)
            for half, part in zip(("gate", "up"), both.chunk(2), strict=True)
        ]
        held = intervals.whole(3), (Interval(2 * self.rank, 0, 2),)
        return [*found, CheckpointView("norm", (3, 4), held, self.norm.detach(), (12,))]


def gather(context: RankContext, bucket_bytes: int) -> list[str]:
    """Errors; the last two of three or four ranks want the tensors, one of which holds some."""
    rank = context.rank_idx
    holder = Holder(rank) if rank < 2 else None
    side = None if holder is None else CheckpointViews(holder.views, holder)
    is_wanted = rank > 0
    full = FullTensors(
        side, dist.group.WORLD, is_wanted=is_wanted, bucket_bytes=bucket_bytes, verify="checksum"
    )
    faults = []
    for offset in (0.0, 1000.0):
        if holder is not None:
            holder.fill(offset)
        found = {name: tensor.clone() for name, tensor in full}
        expected = whole_tensors(offset) if is_wanted else {}
        if found.keys() != expected.keys():
            faults.append(f"got {sorted(found)}")
        faults += [
            f"{name} is {found[name]}"
            for name in found.keys() & expected.keys()
            if found[name].dtype != expected[name].dtype or not found[name].equal(expected[name])
        ]
        sizes = {tensor.untyped_storage().nbytes() for _, tensor in full}
        limit = max(bucket_bytes, 128)  # that of the largest tensor
        faults += [f"{size} bytes for {bucket_bytes}" for size in sizes if size > limit]
    return faults


def test_ranks_that_want_full_tensors_get_them_a_bucket_at_a_time() -> None:
    for bucket_bytes in (1, 300, 1 << 20):
        assert run_ranks(gather, 3, bucket_bytes) == [[], [], []], bucket_bytes


def disagree(context: RankContext) -> str:
    kind = torch.float32 if context.rank_idx else torch.bfloat16
    view = CheckpointView("norm", (4,), (intervals.whole(4),), torch.ones(4, dtype=kind))
    try:
        FullTensors(CheckpointViews([view]), dist.group.WORLD)
    except PlanError as error:
        return str(error)
    return ""


def test_ranks_that_hold_other_tensors_of_a_name_are_told() -> None:
    met = "norm: is bfloat16 of shape (4,) on rank 0, and float32 of shape (4,) on rank 1"
    assert run_ranks(disagree, 2) == [met, met]


def mistake(context: RankContext) -> list[str]:
    rank = context.rank_idx
    side = CheckpointViews(Holder(rank).views())
    calls: list[tuple[Any, int]] = [(side, 1 - rank), (side, 64 << rank), ("a module", 64)]
    texts = []
    for some, bucket_bytes in calls:
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - its text is looked at
            FullTensors(some if rank else side, dist.group.WORLD, bucket_bytes=bucket_bytes)
        texts.append(str(caught.value))
    return texts


def test_a_mistake_of_one_rank_is_told_to_all() -> None:
    met = [
        "rank 1: bucket_bytes must be >= 1, got 0",
        "ranks make different buckets: bucket_bytes is 64 on rank 0 and 128 on rank 1",
        "rank 1: side must be CheckpointViews or None, got a str",
    ]
    assert run_ranks(mistake, 2) == [met, met]


def stop(context: RankContext) -> list[int]:
    """Numbers of tensors that came, of rank 0 the first alone in the first round."""
    holder = Holder(context.rank_idx)
    full = FullTensors(CheckpointViews(holder.views, holder), dist.group.WORLD, bucket_bytes=300)
    counts = []
    for offset in (0.0, 1000.0):
        holder.fill(offset)
        expected, count = whole_tensors(offset), 0
        for name, tensor in full:
            count += tensor.equal(expected[name])
            if not (context.rank_idx or offset):
                break
        counts.append(count)
    return counts


def test_one_who_stops_keeps_nobody_waiting() -> None:
    assert run_ranks(stop, 2) == [[1, 9], [9, 9]]
