"""Refits in batches: what waits beside both models stays below a number of bytes."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_comm.resharding import (
    Refit,
    build_local_reshard_plan,
    is_stale,
    prepare_swap_model_weights,
    refit,
    swap_model_weights,
    verify_plans,
)
from moe_comm.resharding.copy_services.symmetric_copy_service import SymmetricCopyService
from moe_comm.resharding.describe import intervals
from moe_comm.resharding.describe.checkpoint_views import CheckpointView, CheckpointViews
from moe_comm.resharding.describe.intervals import Interval, Piece, whole
from moe_comm.resharding.move import execution
from moe_comm.resharding.move.scratch_pages import Staging
from moe_comm.resharding.plan import batches
from moe_comm.resharding.plan.batches import batch_cuts, cut_into_batches
from moe_comm.resharding.plan.reshard_plan import PartialReduction, ReshardPlan
from moe_comm.resharding.plan.transfer_op import TransferOp
from moe_comm.testing import RankContext
from tests.helpers.threaded_refits import count_plans, error_of, nets, threads

pytestmark = pytest.mark.usefixtures("no_refit_caches")


class Staged(TorchDispatchMode):
    """Counts the bytes of storages that this thread makes, for as long as a tensor refers to them."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: dict[int, list[int]] = {}
        """By storage: its bytes, and tensors that refer to it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {
            each.untyped_storage()._cdata
            for each in tree_leaves((args, kwargs))
            if isinstance(each, torch.Tensor)
        }
        for each in tree_leaves(made):
            if not isinstance(each, torch.Tensor):
                continue
            storage = each.untyped_storage()
            if storage._cdata in self._made or storage._cdata not in given:
                self._made.setdefault(storage._cdata, [storage.nbytes(), 0])[1] += 1
                weakref.finalize(each, self._gone, storage._cdata)
        self.peak = max(self.peak, sum(num_bytes for num_bytes, _ in self._made.values()))
        return made

    def _gone(self, storage: int) -> None:
        self._made[storage][1] -= 1
        if not self._made[storage][1]:
            del self._made[storage]


ROWS, COLUMNS = 24, 32


def halves(rank: int, dtype: torch.dtype, *, by_columns: bool) -> list[CheckpointView]:
    """Half of each of eight tensors, in one storage, and of one that is larger."""
    views = []
    sizes = (ROWS, COLUMNS // 2) if by_columns else (ROWS // 2, COLUMNS)
    stacked = iter(torch.zeros(8, *sizes, dtype=dtype))
    for name, num_rows in [*((f"w{i}", ROWS) for i in range(8)), ("table", 8 * ROWS)]:
        size = COLUMNS if by_columns else num_rows
        part = (Interval(rank * size // 2, 0, size // 2),)
        dims = (whole(num_rows), part) if by_columns else (part, whole(COLUMNS))
        shape = [intervals.total_length(held) for held in dims]
        tensor = torch.zeros(shape, dtype=dtype) if name == "table" else next(stacked)
        views.append(CheckpointView(name, (num_rows, COLUMNS), dims, tensor))
    return views


def fill(views: list[CheckpointView], value: int) -> None:
    for number, view in enumerate(views):
        view.tensor.fill_(value + number)


def is_filled(views: list[CheckpointView], value: int) -> bool:
    return all(bool((view.tensor == value + number).all()) for number, view in enumerate(views))


_given_out: dict[int, set[int]] = {}


@pytest.fixture
def given_out(monkeypatch: pytest.MonkeyPatch) -> dict[int, set[int]]:
    """By thread, addresses of the bytes that a `Staging` has given it out of pages of its own."""
    _given_out.clear()
    empty = Staging.empty

    def noted(staging: Staging, *args: Any) -> torch.Tensor:
        made = empty(staging, *args)
        if made.untyped_storage().data_ptr() == staging._memory.data_ptr():
            used = range(made.data_ptr(), made.data_ptr() + made.nbytes)
            _given_out.setdefault(threading.get_ident(), set()).update(used)
        return made

    monkeypatch.setattr(Staging, "empty", noted)
    return _given_out


def peaks_of(held: Refit, source: list[CheckpointView], target: list[CheckpointView]) -> list[int]:
    """Run a refit three times, look at what came, and return the bytes that each run took to stage."""
    peaks = []
    for round_idx in range(3):
        fill(source, round_idx)
        gc.collect()
        _given_out.pop(threading.get_ident(), None)
        with Staged() as staged:
            held.run()
        assert is_filled(target, round_idx)
        peaks.append(staged.peak + len(_given_out.get(threading.get_ident(), ())))
    return peaks


@pytest.mark.parametrize(
    ("src_dtype", "dst_dtype"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
def test_what_is_staged_stays_below_the_bound(
    src_dtype: torch.dtype, dst_dtype: torch.dtype, given_out: dict[int, set[int]]
) -> None:
    limit = 6000

    def rank(context: RankContext, execution_batch_bytes: int | None) -> list[int]:
        source = halves(context.rank_idx, src_dtype, by_columns=False)
        target = halves(context.rank_idx, dst_dtype, by_columns=True)
        held = Refit(
            CheckpointViews(source),
            CheckpointViews(target),
            "symmetric",
            context.group,
            # Ranks take the smallest.
            execution_batch_bytes=execution_batch_bytes if context.rank_idx else None,
        )
        return peaks_of(held, source, target)

    for peaks in threads(rank, 2, None):
        assert min(peaks) > 1.5 * limit
    assert not given_out
    # All batches together have no more than that of one.
    for peaks in threads(rank, 2, limit):
        assert 0 < max(peaks) <= limit
    assert len(given_out) == 2


@pytest.mark.usefixtures("given_out")
@pytest.mark.parametrize("service", ["symmetric", "strided"])
def test_pieces_in_place_are_repeated_in_batches(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if service == "strided":
        monkeypatch.setattr(SymmetricCopyService, "takes_strided_tensors", False)

    def rank(context: RankContext) -> list[int]:
        source = halves(context.rank_idx, torch.float32, by_columns=False)
        target = halves(context.rank_idx, torch.float32, by_columns=True)
        held = Refit(
            CheckpointViews(source),
            CheckpointViews(target),
            "symmetric",
            context.group,
            verify="checksum",
            execution_batch_bytes=6000,
        )
        return peaks_of(held, source, target)

    for peaks in threads(rank, 2):
        # The other service stages what is not contiguous.
        assert (max(peaks) == 0) == (service == "symmetric")
        assert max(peaks) <= 6000


def test_models_in_batches_and_the_plan_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    plans_made = count_plans(monkeypatch)

    def rank(context: RankContext) -> None:
        src, dst = nets(context, "tp2", "single")
        options: Any = {"group": context.group, "execution_batch_bytes": 500}
        prepare_swap_model_weights(src, dst, **options)
        for seed in range(3):
            src.fill(seed)
            swap_model_weights(src, dst, "symmetric", **options)
            assert dst.wrong(seed) == []
        src.fill(3)
        swap_model_weights(src, dst, "symmetric", group=context.group)
        assert dst.wrong(3) == []

    threads(rank, 2)
    assert len(plans_made) == 2 * 2  # one for each bound


def test_too_many_batches_are_refused_with_the_least_that_will_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rank(context: RankContext, limit: int) -> str:
        source = halves(context.rank_idx, torch.float32, by_columns=False)
        target = halves(context.rank_idx, torch.bfloat16, by_columns=True)
        sides = CheckpointViews(source), CheckpointViews(target)
        fill(source, 1)

        def run() -> None:
            # The smallest counts.
            own = limit if context.rank_idx else None
            Refit(*sides, "symmetric", context.group, execution_batch_bytes=own).run()

        text = error_of(run)
        assert is_filled(target, 1) != text.startswith("PlanError")
        return text

    monkeypatch.setattr(batches, "MAX_BATCHES", 64)
    num_elements = 2 * 8 * ROWS * COLUMNS // 2
    for text in threads(rank, 2, 1):
        assert (
            f"execution_batch_bytes=1 makes at least {num_elements} batches of what rank 0 rec"
            in text
        )
        assert "may be 64" in text
        least = int(text.split("execution_batch_bytes >= ")[1].split(" ")[0])
    assert least == 3 * -(-num_elements * 2 // 64)
    assert all("PlanError" in text for text in threads(rank, 2, least - 3))
    assert threads(rank, 2, least) == ["", ""]


def test_both_ends_find_the_same_batches() -> None:
    def rank(context: RankContext) -> ReshardPlan:
        src, dst = nets(context, "tp2", "single")
        return build_local_reshard_plan(
            src, dst, group=context.group, execution_batch_bytes=500 if context.rank_idx else 900
        )

    plans = dict(enumerate(threads(rank, 2)))
    verify_plans(plans)
    assert len(plans[0].batches) == len(plans[1].batches) > 3
    share = 500 // 3
    for batch in zip(*(plan.batches for plan in plans.values()), strict=True):
        sent = {(op.peer_rank, op.task_id) for part in batch for op in part.send_ops}
        received = {(part.rank, op.task_id) for part in batch for op in part.recv_ops}
        assert sent == received
        for part in batch:
            elements = [
                intervals.num_elements(each.stop - each.start for each in op.my_slice)
                for op in part.recv_ops
            ]
            assert sum(elements) * 2 <= share


def test_a_failure_between_batches_leaves_a_stale_target(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(context: RankContext) -> None:
        source = halves(context.rank_idx, torch.float32, by_columns=False)
        target = halves(context.rank_idx, torch.bfloat16, by_columns=True)
        pair = CheckpointViews(source), CheckpointViews(target)
        held = Refit(*pair, "symmetric", context.group, execution_batch_bytes=6000)
        fill(source, 1)
        held.run()
        submit, calls = SymmetricCopyService.submit_send, []

        def fail(self: Any, *args: Any, **options: Any) -> None:
            calls.append(args)
            if context.rank_idx == 1 and len(calls) == 5:
                raise MemoryError("no room")
            submit(self, *args, **options)

        fill(source, 5)
        service = held._passes[0].ranks() and refit.get_or_create_service(
            "symmetric", context.group
        )
        service.submit_send = fail.__get__(service)
        assert "no room" in error_of(held.run)
        assert is_stale(pair[1])
        del service.submit_send
        held.run()
        assert is_filled(target, 5)
        assert not is_stale(pair[1])

    threads(rank, 2)


def test_peers_hear_of_a_batch_that_was_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    copy, fails = execution._copy, threading.local()

    def fail_once(received: torch.Tensor, place: torch.Tensor) -> None:
        fails.left = getattr(fails, "left", 0) - 1
        if fails.left == 0:
            raise MemoryError("no room")
        copy(received, place)

    monkeypatch.setattr(execution, "_copy", fail_once)

    def rank(context: RankContext) -> list[str]:
        source = halves(context.rank_idx, torch.bfloat16, by_columns=False)
        target = halves(context.rank_idx, torch.float32, by_columns=True)
        pair = CheckpointViews(source), CheckpointViews(target)
        held = Refit(*pair, "symmetric", context.group, execution_batch_bytes=6000)
        texts = []
        for value in range(3):
            fill(source, value)
            fails.left = 3 * context.rank_idx if value == 1 else 0
            texts.append(error_of(held.run))
            assert is_stale(pair[1]) == (value == 1)
        assert is_filled(target, 2)
        return texts

    for texts in threads(rank, 2):
        assert (texts[0], texts[2]) == ("", "")
        assert "no room" in texts[1]


@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_bounds_that_are_none(value: Any) -> None:
    def rank(context: RankContext) -> str:
        src, dst = nets(context, "tp2", "single")
        bound = value if context.rank_idx else 1000
        return error_of(
            lambda: swap_model_weights(
                src, dst, "symmetric", group=context.group, execution_batch_bytes=bound
            )
        )

    for text in threads(rank, 2):
        assert "execution_batch_bytes must be" in text


def test_a_parameter_that_fits_is_received_in_one_batch() -> None:
    """Six pieces of 4 elements are 2 of each parameter; their bytes are 2 of each at the least."""

    def ops(name: str, first: int, dtype: torch.dtype) -> list[TransferOp]:
        part = (slice(0, 4),)
        return [
            TransferOp(name, 0, False, part, part, first + number, my_dtype=dtype, wire_dtype=dtype)
            for number in range(2)
        ]

    received = [
        *ops("a", 0, torch.uint8),
        *ops("b", 2, torch.bfloat16),
        *ops("c", 4, torch.float32),
    ]
    sum_of_c = PartialReduction("c", (0,), "sum")
    plan = ReshardPlan([], received, num_ranks=1, rank=0, reductions=[sum_of_c])
    for limit, cuts in [
        (64, []),
        (63, [4]),
        (32, [4]),
        (31, [2, 4, 5]),
        (16, [2, 4, 5]),
        (15, [1, 2, 3, 4, 5]),
    ]:
        assert batch_cuts(plan, limit) == cuts, limit
    batches = cut_into_batches(plan, [[2, 4]])
    assert [[op.task_id for op in batch.recv_ops] for batch in batches] == [[0, 1], [2, 3], [4, 5]]
    # They are reduced once, before the first.
    assert all(not batch.reductions for batch in batches)


def test_cut_pieces_are_the_piece() -> None:
    piece = Piece(((2, 3), (0, 5), (1, 4)), ((0, 1), (5, 10), (0, 3)))
    for most in range(1, 17):
        parts = list(intervals.cut_piece(piece, most))
        boxes = [
            tuple(
                (start - first, stop - first)
                for (start, stop), (first, _) in zip(*pair, strict=True)
            )
            for part in parts
            for pair in [(part.dst_box, piece.dst_box)]
        ]
        assert intervals.find_defect((1, 5, 3), boxes) is None
        assert all(
            intervals.num_elements(stop - start for start, stop in box) <= most for box in boxes
        )
        assert [part.dst_box for part in parts] == sorted(part.dst_box for part in parts)
        for part in parts:
            for (src, _), (dst, _), (src_first, _), (dst_first, _) in zip(
                part.src_box, part.dst_box, piece.src_box, piece.dst_box, strict=True
            ):
                assert src - src_first == dst - dst_first
