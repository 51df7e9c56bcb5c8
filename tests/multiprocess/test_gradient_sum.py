"""`GradientSum`: sums of all ranks' vectors in the order of their parts, bit for bit."""

from __future__ import annotations

import pytest
import torch

from moe_comm import Communicator, GradientSum
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.failing_ranks import error_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _values(num_parts: int, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    draw = torch.Generator().manual_seed(num_elements)
    values = torch.randn(num_parts, num_elements, generator=draw, dtype=torch.float64)
    # Very different sizes, so that another order gives other bits.
    values *= 10.0 ** torch.randint(-3, 4, values.shape, generator=draw)
    return values.to(dtype)


def _expected(parts: torch.Tensor) -> torch.Tensor:
    """Added one after the other in float32 (float64), rounded once."""
    wide = torch.float64 if parts.dtype is torch.float64 else torch.float32
    total = torch.zeros(parts.shape[1], dtype=wide)
    for part in parts:
        total = total + part.to(wide)
    return total.to(parts.dtype)


def _sum_all(context: RankContext, backend: str) -> None:
    with Communicator(context.group, backend=backend) as comm:
        for dtype in DTYPES:
            for num_elements in (0, 1, 5, 1000, 40_001):
                values = _values(comm.num_ranks, num_elements, dtype)
                flat = values[comm.rank_idx].clone()
                cut = num_elements // 3
                # Any shapes, and one that is not contiguous.
                strided = torch.empty(2 * (num_elements - cut), dtype=dtype)[::2]
                strided.copy_(flat[cut:])
                tensors = [flat[:cut].clone().view(1, -1), strided]
                with GradientSum(comm, num_elements, dtype) as total:
                    for _ in range(2):
                        tensors[0].copy_(flat[:cut].view(1, -1))
                        tensors[1].copy_(flat[cut:])
                        total.sum_(tensors)
                        found = torch.cat([tensor.flatten() for tensor in tensors])
                        assert torch.equal(found, _expected(values)), (dtype, num_elements)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_sums_in_rank_order(num_ranks: int) -> None:
    run_ranks(_sum_all, num_ranks, "host", mode="threads")


def test_sums_on_another_backend() -> None:
    run_ranks(_sum_all, 2, "reference", mode="threads")


def _sum_parts(context: RankContext, part_ranks: list[int]) -> torch.Tensor:
    num_elements = 3000
    values = _values(len(part_ranks), num_elements, torch.float32)
    with (
        Communicator(context.group, backend="host") as comm,
        GradientSum(comm, num_elements, part_ranks=part_ranks) as total,
    ):
        assert [part_ranks[part] for part in total.part_idx] == [comm.rank_idx] * len(
            total.part_idx
        )
        out = torch.empty(num_elements)
        total.sum_parts([[values[part]] for part in total.part_idx], [out])
    assert torch.equal(out, _expected(values))
    return out


@pytest.mark.parametrize("part_ranks", [[0] * 6, [0, 0, 1, 1, 2, 2], [2, 1, 2, 0, 2, 2], [1] * 6])
def test_the_sum_depends_on_parts_and_not_on_ranks(part_ranks: list[int]) -> None:
    run_ranks(_sum_parts, 3, part_ranks, mode="threads")


def _mistakes(context: RankContext) -> list[str]:
    is_first = context.rank_idx == 0
    with Communicator(context.group, backend="host") as comm, GradientSum(comm, 8) as total:
        wrong = [
            torch.zeros(7) if is_first else torch.zeros(8),
            torch.zeros(8, dtype=torch.float64) if is_first else torch.zeros(8),
        ]
        found = []
        for tensor in wrong:
            error = error_of(lambda tensor=tensor: total.sum_([tensor]))  # type: ignore[misc]
            found.append(f"{type(error).__name__}: {error}")
        ones = torch.ones(8)
        total.sum_([ones])
        assert ones.tolist() == [2.0] * 8
    return found


def test_mistakes_are_raised_on_every_rank() -> None:
    for first, second in run_ranks(_mistakes, 2, mode="threads"):
        assert first.startswith(
            "ValueError: rank 0: the tensors must have 8 elements in all, got 7"
        )
        assert second.startswith("TypeError: rank 0: tensors must be of torch.float32")


def test_arguments_are_checked() -> None:
    with Communicator(backend="host") as comm:
        for arguments in ((-1,), (1, torch.int32)):
            with pytest.raises(ValueError, match="must be"):
                GradientSum(comm, *arguments)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="at least one part"):
            GradientSum(comm, 1, part_ranks=[])


def _differing_arguments(context: RankContext) -> list[str]:
    with Communicator(context.group, backend="host", arrival_timeout_s=30.0) as comm:
        is_first = context.rank_idx == 0
        found = []
        for make in (
            # Both have slices of 16 bytes a rank: no later step would see a difference.
            lambda: GradientSum(comm, 7 if is_first else 8),
            lambda: GradientSum(comm, 8, torch.float32 if is_first else torch.float64),
            lambda: GradientSum(comm, 8 if is_first else -1),
            lambda: GradientSum(comm, 8, part_ranks=[0, 9] if is_first else [0, 1]),
        ):
            error = error_of(make)
            found.append(f"{type(error).__name__}: {error}")
        return found


def test_arguments_that_differ_are_raised_on_every_rank() -> None:
    differ = "ValueError: ranks make a GradientSum differently: "
    for texts in run_ranks(_differing_arguments, 2, mode="threads"):
        assert texts == [
            f"{differ}num_elements is 7 on rank 0 and 8 on rank 1",
            f"{differ}dtype is torch.float32 on rank 0 and torch.float64 on rank 1",
            "ValueError: rank 1: num_elements must be >= 0, got -1",
            "ValueError: rank 0: part_ranks[1] = 9 is not a rank of a communicator of 2",
        ]
