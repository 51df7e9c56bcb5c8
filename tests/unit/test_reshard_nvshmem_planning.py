"""Segments, slots, iterations and addresses: everything the copy pipeline plans, without ranks that copy."""

from __future__ import annotations

import collections
import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_comm import Communicator
from moe_comm.resharding.nvshmem_copy_service import (
    CommunicationScheduler,
    FullDuplexScheduler,
    GPUExecutionPlanner,
    TaskSegmenter,
    TensorPointerExtractor,
    WorkloadPacker,
    agreement,
)
from moe_comm.resharding.nvshmem_copy_service.nvshmem_types import (
    MAX_SEGMENT_SIZE,
    MAX_TASKS_PER_BATCH,
    IterationSchedule,
    ReceiveRequest,
    ScheduledBatch,
    SendRequest,
    WorkloadGroup,
    WorkloadSummary,
)
from moe_comm.resharding.nvshmem_copy_service.planning.exchange import CommunicatorExchange
from moe_comm.resharding.nvshmem_copy_service.planning.task_segmenter import name_of_task
from moe_comm.resharding.plan.transfer_op import pack_task_id
from moe_comm.testing import RankContext, run_ranks

MIB = 1024 * 1024


def send(task_id: int, size: int, dest_pe: int = 1, pos: int = 0) -> SendRequest:
    return SendRequest(task_id, None, pos, size, dest_pe)


def receive(task_id: int, size: int, src_pe: int = 0, pos: int = 0) -> ReceiveRequest:
    return ReceiveRequest(task_id, None, pos, size, src_pe)


# ---------------------------------------------------------------------------------------------
# Segments.


def test_segments_of_small_ids_have_the_documented_keys() -> None:
    segments = TaskSegmenter().segment_send_request(send(42, 2 * MAX_SEGMENT_SIZE + 5, pos=100))
    assert [segment.task_id for segment in segments] == [
        1_000_042_000,
        1_000_042_001,
        1_000_042_002,
    ]
    assert [segment.src_pos for segment in segments] == [
        100,
        100 + MAX_SEGMENT_SIZE,
        100 + 2 * MAX_SEGMENT_SIZE,
    ]
    assert [segment.size for segment in segments] == [MAX_SEGMENT_SIZE, MAX_SEGMENT_SIZE, 5]
    assert {segment.dest_pe for segment in segments} == {1}


@pytest.mark.parametrize("size", [0, 1, MAX_SEGMENT_SIZE])
def test_a_request_that_fits_is_the_same_object(size: int) -> None:
    request, wanted = send(1_234_567_890_123, size), receive(1_234_567_890_123, size)
    segmenter = TaskSegmenter()
    assert segmenter.segment_send_request(request) == [request]
    assert segmenter.segment_send_request(request)[0] is request
    assert segmenter.segment_receive_request(wanted)[0] is wanted


@pytest.mark.parametrize("task_id", [999_999, 1_000_000, pack_task_id(1000, 17, 3), (1 << 63) - 1])
def test_large_ids_are_cut_like_small_ones(task_id: int) -> None:
    segmenter = TaskSegmenter(1000)
    sent = segmenter.segment_send_request(send(task_id, 2500))
    received = segmenter.segment_receive_request(receive(task_id, 2500))
    assert [s.task_id for s in sent] == [r.task_id for r in received]
    assert [s.size for s in sent] == [r.size for r in received] == [1000, 1000, 500]
    assert [r.dest_pos for r in received] == [0, 1000, 2000]


def test_keys_of_different_segments_differ() -> None:
    segmenter = TaskSegmenter(1)
    ids = [0, 1, 999_998, 999_999, 1_000_000, 1_000_001, 10**9, pack_task_id(3, 0, 0), 2**62]
    keys = [segmenter._encode_segment_id(i, s) for i in ids for s in (0, 1, 999, 1000, 10**6)]
    assert len(set(keys)) == len(keys)
    # A key with no place in the documented arithmetic equals no task id at all.
    assert all(10**9 <= key < 2 * 10**9 or key < 0 for key in keys)


def test_more_than_a_thousand_small_segments() -> None:
    segments = TaskSegmenter(10).segment_send_request(send(5, 15_000))
    assert len({segment.task_id for segment in segments}) == 1500
    assert segments[999].task_id == 1_000_005_999
    assert segments[1000].task_id < 0


@pytest.mark.parametrize(
    ("segmenter", "task_id", "size"),
    [
        (TaskSegmenter(), 7, 1000 * MAX_SEGMENT_SIZE + 1),
        (TaskSegmenter(100, max_segments=3), 7, 301),
        (TaskSegmenter(), -7, MAX_SEGMENT_SIZE + 1),
    ],
)
def test_what_cannot_be_cut_is_refused(segmenter: TaskSegmenter, task_id: int, size: int) -> None:
    for cut, request in (
        (segmenter.segment_send_request, send(task_id, size)),
        (segmenter.segment_receive_request, receive(task_id, size)),
    ):
        with pytest.raises(ValueError, match=f"Task {task_id} validation failed: {size} bytes"):
            cut(request)  # type: ignore[operator]


def test_the_largest_task_is_a_thousand_default_segments() -> None:
    assert len(TaskSegmenter().segment_send_request(send(7, 1000 * MAX_SEGMENT_SIZE))) == 1000
    assert TaskSegmenter(MIB).max_segments == 256_000


def test_names_of_tasks() -> None:
    segmenter = TaskSegmenter()
    assert name_of_task(7) == "7"
    assert "segment 2 of task 42" in name_of_task(segmenter._encode_segment_id(42, 2))
    big = pack_task_id(9, 8, 7)
    assert name_of_task(segmenter._encode_segment_id(big, 3)) == f"segment 3 of task {big}"


# ---------------------------------------------------------------------------------------------
# Slots.


def assert_packed(
    workloads: list[WorkloadGroup], sizes: list[int], slot: int, alignment: int
) -> None:
    """Every task once, and none over another or the end of its slot."""
    assert sorted(task.size for w in workloads for task in w.tasks) == sorted(sizes)
    for workload in workloads:
        end = 0
        for task in workload.tasks:
            end = -(-end // alignment) * alignment + task.size
        assert workload.total_size == end
        assert end <= slot or len(workload.tasks) == 1


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 120), max_size=60),
    alignment=st.sampled_from([1, 16]),
    packing=st.sampled_from(["next_fit", "first_fit"]),
    max_tasks=st.sampled_from([3, 1000]),
)
def test_packing(sizes: list[int], alignment: int, packing: str, max_tasks: int) -> None:
    packer = WorkloadPacker(100, packing=packing, alignment=alignment, max_tasks=max_tasks)
    requests = [send(i, size) for i, size in enumerate(sizes)]
    given_order = list(requests)
    workloads = packer.pack_workloads(requests, n_pes=3)
    assert requests == given_order
    assert set(workloads) == {0, 1, 2}
    assert workloads[0] == workloads[2] == []
    assert_packed(workloads[1], sizes, 100, alignment)
    for workload in workloads[1]:
        assert len(workload.tasks) <= max_tasks
        in_order = [task.size for task in workload.tasks]
        assert in_order == sorted(in_order, reverse=True)
    if packing == "first_fit" and alignment == 1 and max_tasks == 1000:
        # No two slots could have been one.
        totals = sorted(workload.total_size for workload in workloads[1])
        assert all(a + b > 100 for a, b in itertools.pairwise(totals))


def test_first_fit_needs_fewer_slots() -> None:
    generator = random.Random(0)
    sizes = [generator.randint(1, 200) * MIB for _ in range(300)]
    requests = [send(i, size) for i, size in enumerate(sizes)]
    num_slots = {
        packing: len(WorkloadPacker(packing=packing).pack_workloads(requests, 2)[1])
        for packing in ("next_fit", "first_fit")
    }
    lower_bound = -(-sum(sizes) // MAX_SEGMENT_SIZE)
    assert num_slots["next_fit"] > 1.3 * lower_bound
    assert num_slots["first_fit"] <= 1.05 * lower_bound


def test_a_slot_holds_so_many_tasks() -> None:
    requests = [send(i, 1) for i in range(MAX_TASKS_PER_BATCH + 1)]
    workloads = WorkloadPacker().pack_workloads(requests, 2)
    assert [len(w.tasks) for w in workloads[1]] == [MAX_TASKS_PER_BATCH, 1]


def test_the_first_slot_with_room_is_taken() -> None:
    requests = [send(i, size) for i, size in enumerate([60, 50, 40, 30, 10])]
    workloads = WorkloadPacker(100, packing="first_fit").pack_workloads(requests, 2)[1]
    assert [[task.size for task in w.tasks] for w in workloads] == [[60, 40], [50, 30, 10]]


def test_a_slot_with_its_most_tasks_is_full() -> None:
    requests = [send(i, 1) for i in range(10)]
    packer = WorkloadPacker(100, packing="first_fit", max_tasks=3)
    assert [len(w.tasks) for w in packer.pack_workloads(requests, 2)[1]] == [3, 3, 3, 1]


@pytest.mark.parametrize(
    "options", [{"packing": "worst_fit"}, {"alignment": 0}, {"max_tasks": 0}, {"slot_bytes": 0}]
)
def test_bad_packer_options(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
        WorkloadPacker(**options)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------
# Iterations.

Pairs = list[tuple[int, int]]


def batches_of(pairs: Pairs, sizes: list[int] | None = None) -> list[ScheduledBatch]:
    return [
        ScheduledBatch(src, dst, idx, -1, total_size=1000 if sizes is None else sizes[idx])
        for idx, (src, dst) in enumerate(pairs)
    ]


def all_to_all(n: int) -> Pairs:
    return [(src, dst) for src in range(n) for dst in range(n) if src != dst]


def ring(n: int) -> Pairs:
    return [(i, (i + 1) % n) for i in range(n)]


def assert_no_conflict(batches: list[ScheduledBatch], num_iterations: int, duplex: str) -> None:
    assert {batch.iteration for batch in batches} == set(range(num_iterations))
    for _, group in itertools.groupby(
        sorted(batches, key=lambda b: b.iteration), key=lambda b: b.iteration
    ):
        ends = [((b.src_pe, "out"), (b.dest_pe, "in")) for b in group]
        used = [end if duplex == "full" else end[0] for pair in ends for end in pair]
        assert len(used) == len(set(used))


@pytest.mark.parametrize(
    ("pairs", "half", "full"),
    [
        (ring(8), 2, 1),
        (all_to_all(2), 2, 1),
        (all_to_all(4), 6, 3),
        (all_to_all(8), 14, 7),
        ([(0, i) for i in range(1, 8)], 7, 7),
        ([(i, 7) for i in range(7)], 7, 7),
        ([(0, 1)] * 5 + [(1, 0)] * 5, 10, 5),
        # In this order the last batch finds no iteration free at both ends.
        ([(0, 2), (2, 0), (1, 2), (2, 1), (1, 0), (0, 1)], 6, 2),
        ([], 0, 0),
    ],
)
def test_number_of_iterations(pairs: Pairs, half: int, full: int) -> None:
    for scheduler, expected, duplex in (
        (CommunicationScheduler(), half, "half"),
        (FullDuplexScheduler(), full, "full"),
    ):
        batches = batches_of(pairs)
        scheduler._assign_iterations(batches)
        assert_no_conflict(batches, scheduler.num_iterations, duplex)
        assert scheduler.num_iterations == expected


@settings(max_examples=80)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(lambda p: p[0] != p[1]), max_size=60
    )
)
def test_any_batches(pairs: Pairs) -> None:
    half, full = batches_of(pairs), batches_of(pairs)
    half_duplex, full_duplex = CommunicationScheduler(), FullDuplexScheduler()
    half_duplex._assign_iterations(half)
    full_duplex._assign_iterations(full)
    assert_no_conflict(half, half_duplex.num_iterations, "half")
    assert_no_conflict(full, full_duplex.num_iterations, "full")
    sent = collections.Counter(src for src, _ in pairs)
    received = collections.Counter(dst for _, dst in pairs)
    assert full_duplex.num_iterations == max([*sent.values(), *received.values()], default=0)


def test_long_paths_are_swapped() -> None:
    """Many batches with random sizes come in an order that first-fit alone cannot do."""
    generator = random.Random(1)
    for _ in range(40):
        pairs = generator.choices(all_to_all(9), k=150)
        batches = batches_of(pairs, sizes=[generator.randrange(5) for _ in pairs])
        scheduler = FullDuplexScheduler()
        scheduler._assign_iterations(batches)
        assert_no_conflict(batches, scheduler.num_iterations, "full")
        ends = [(src, "out") for src, _ in pairs] + [(dst, "in") for _, dst in pairs]
        assert scheduler.num_iterations == max(collections.Counter(ends).values())


def test_most_conflicts_come_first() -> None:
    # In the order given, first-fit would put both outer batches first and need 3 iterations.
    batches = batches_of([(0, 1), (2, 3), (1, 2), (1, 4), (2, 5)])
    CommunicationScheduler()._assign_iterations(batches)
    assert batches[2].iteration == 0


def test_of_equal_conflicts_the_larger_comes_first() -> None:
    for scheduler in (CommunicationScheduler(), FullDuplexScheduler()):
        batches = batches_of([(0, 1), (0, 2), (0, 3)], sizes=[10, 1000, 100])
        scheduler._assign_iterations(batches)
        assert [batch.iteration for batch in batches] == [2, 0, 1]


def test_a_large_schedule_is_quick_to_make() -> None:
    """64 PEs, 20 slots for each pair: the order is not quadratic in the batches."""
    batches = batches_of(all_to_all(64) * 20)
    scheduler = FullDuplexScheduler()
    scheduler._assign_iterations(batches)
    assert scheduler.num_iterations == 63 * 20
    CommunicationScheduler()._assign_iterations(batches)


def _build(context: RankContext, over_communicator: bool) -> None:
    rank_idx, n = context.rank_idx, context.num_ranks
    group: object = context.group
    if over_communicator:
        communicator = Communicator(context.group, backend="host")
        group = CommunicatorExchange(communicator)
    # Enough tasks that a message over the sockets would be too long.
    workloads = {
        dest_pe: [
            WorkloadGroup(
                dest_pe, [send(100_000 * rank_idx + i, dest_pe) for i in range(20_000)], 5
            ),
            WorkloadGroup(dest_pe, [send(-1 - (rank_idx << 70), 3)], 6),
        ]
        for dest_pe in range(n)
    }
    scheduler = FullDuplexScheduler()
    schedule, summaries = scheduler.build_schedule(workloads, rank_idx, n, group=group)  # type: ignore[arg-type]
    assert scheduler.num_iterations == 2 * (n - 1)
    mine = [batch for batches in schedule.values() for batch in batches]
    assert len(mine) == 4 * (n - 1)
    assert {batch.total_size for batch in mine} == {5, 6}
    peers = set(range(n)) - {rank_idx}
    assert {(src, dst) for src, dst, _ in summaries} == {(rank_idx, p) for p in peers} | {
        (p, rank_idx) for p in peers
    }
    for peer in peers:
        long, short = (summaries[peer, rank_idx, idx] for idx in range(2))
        assert long.task_ids == [100_000 * peer + i for i in range(20_000)]
        assert set(long.task_sizes) == {rank_idx}
        assert short == WorkloadSummary(6, [-1 - (peer << 70)], [3])


@pytest.mark.parametrize("over_communicator", [False, True])
def test_ranks_agree_on_a_schedule(over_communicator: bool) -> None:
    run_ranks(_build, 3, over_communicator, mode="threads")


def _gather_much(context: RankContext) -> None:
    exchange = CommunicatorExchange(Communicator(context.group, backend="host"))
    item = bytes([context.rank_idx]) * (300_000 if context.rank_idx == 1 else 10)
    assert [len(part) for part in exchange.all_gather(item)] == [10, 300_000, 10]
    parts = exchange.all_to_all([b"%d>%d" % (context.rank_idx, i) * i for i in range(3)])
    assert parts == [b"%d>%d" % (i, context.rank_idx) * context.rank_idx for i in range(3)]


def test_long_messages() -> None:
    run_ranks(_gather_much, 3, mode="threads")


# ---------------------------------------------------------------------------------------------
# Addresses.


def addresses(plan: object) -> list[tuple[int, int, int]]:
    assert isinstance(plan, tuple)
    src, dst, sizes, num_chunks = plan
    assert num_chunks == len(sizes)
    return list(zip(src.tolist(), dst.tolist(), sizes.tolist(), strict=True))


def incoming(task_ids: list[int], sizes: list[int]) -> list[IterationSchedule]:
    batch = ScheduledBatch(0, 1, 0, 0, total_size=sum(sizes))
    batch.tasks_summary = WorkloadSummary(sum(sizes), task_ids, sizes)
    return [IterationSchedule(send=None, recv=batch)]


SLOTS = [torch.zeros(4096, dtype=torch.uint8) for _ in range(2)]


def test_a_task_that_nobody_receives_is_named() -> None:
    wanted = [receive(5, 100), receive(7, 100), receive(6, 100, src_pe=2)]
    for request in wanted:
        request.dest_tensor = 10_000 * request.task_id
    with pytest.raises(ValueError, match="no receive request for 1 tasks from PE 0: 6"):
        GPUExecutionPlanner().create_gpu_plans(incoming([5, 6, 7], [100] * 3), SLOTS, SLOTS, wanted)


def test_what_follows_a_skipped_task_keeps_its_place() -> None:
    wanted = [receive(5, 100), receive(7, 100)]
    for request in wanted:
        request.dest_tensor = 10_000 * request.task_id
    schedules = incoming([5, 6, 7], [100, 100, 100])
    planner = GPUExecutionPlanner(on_unmatched="skip")
    planner.create_gpu_plans(schedules, SLOTS, SLOTS, wanted)
    base = SLOTS[0].data_ptr()
    assert schedules[0]["recv"] is not None
    assert addresses(schedules[0]["recv"].gpu_plan) == [
        (base, 50_000, 100),
        (base + 200, 70_000, 100),
    ]


def test_both_ends_must_mean_the_same_size() -> None:
    wanted = [receive(5, 96)]
    wanted[0].dest_tensor = 1
    with pytest.raises(ValueError, match="PE 0 sends 100 bytes as task 5, 96 are to be received"):
        GPUExecutionPlanner().create_gpu_plans(incoming([5], [100]), SLOTS, SLOTS, wanted)


@pytest.mark.parametrize(("alignment", "places"), [(1, [0, 6, 11]), (16, [0, 16, 32])])
def test_places_in_a_slot(alignment: int, places: list[int]) -> None:
    """Both ends and the packer compute the same places."""
    tensors = [torch.zeros(size, dtype=torch.uint8) for size in (6, 5, 4)]
    sends = [SendRequest(i, t, 0, t.numel(), 1) for i, t in enumerate(tensors)]
    workload = WorkloadPacker(4096, alignment=alignment).pack_workloads(sends, 2)[1][0]
    batch = ScheduledBatch(0, 1, 0, 0, tasks=workload.tasks)
    planner = GPUExecutionPlanner(alignment=alignment)
    # The second iteration uses the second slot.
    schedules = [
        IterationSchedule(send=None, recv=None),
        IterationSchedule(send=batch, recv=None),
    ]
    planner.create_gpu_plans(schedules, SLOTS, SLOTS, [])
    base = SLOTS[1].data_ptr()
    assert addresses(batch.gpu_plan) == [
        (t.data_ptr(), base + place, t.numel()) for t, place in zip(tensors, places, strict=True)
    ]
    assert workload.total_size == places[-1] + 4
    receives = [ReceiveRequest(i, t, 0, t.numel(), 0) for i, t in enumerate(tensors)]
    back = incoming([0, 1, 2], [6, 5, 4])
    planner.create_gpu_plans(back, SLOTS, SLOTS, receives)
    assert back[0]["recv"] is not None
    slot = SLOTS[0].data_ptr()
    assert addresses(back[0]["recv"].gpu_plan) == [
        (slot + place, t.data_ptr(), t.numel()) for t, place in zip(tensors, places, strict=True)
    ]


def test_large_tasks_are_copied_in_chunks() -> None:
    plan = GPUExecutionPlanner(chunk_bytes=100)._plan_kernel_args(
        [1000, 5000], [7, 0], [250, 0], is_pack=True, buffer_base=9000
    )
    assert addresses(plan) == [(1007, 9000, 100), (1107, 9100, 100), (1207, 9200, 50)]
    assert GPUExecutionPlanner().CHUNK_SIZE == 128 * 1024
    nothing = GPUExecutionPlanner()._plan_kernel_args([1], [0], [0], is_pack=True, buffer_base=0)
    assert nothing is None


def test_pointers() -> None:
    pointer = TensorPointerExtractor.get_pointer
    tensor = torch.arange(4)
    assert pointer(tensor[1:]) == tensor.data_ptr() + 8
    assert pointer(tensor.numpy()) == tensor.data_ptr()
    assert pointer(123) == 123
    with pytest.raises(TypeError, match="got str"):
        pointer("123")


# ---------------------------------------------------------------------------------------------
# Agreement.


@pytest.mark.parametrize(
    ("receives", "expected"),
    [
        ([receive(5, 10), receive(42, 2500)], None),
        (
            [receive(5, 10)],
            r"PE 0 sends tasks that PE 1 does not receive: 1000042000 \(or segment 0",
        ),
        ([receive(42, 2500)], "PE 0 sends tasks that PE 1 does not receive: 5$"),
        (
            [receive(5, 10), receive(42, 2500), receive(6, 1), receive(8, 1)],
            "PE 1 receives tasks that PE 0 does not send: 6, 8$",
        ),
        ([receive(5, 11), receive(42, 2500)], "task 5: PE 0 sends 10 bytes, PE 1 receives 11"),
        ([receive(5, 10), receive(42, 900)], "task 42: PE 0 sends 2500 bytes, PE 1 receives 900"),
        ([receive(5, 10), receive(42, 3500)], "task 42: PE 0 sends 2500 bytes, PE 1 receives 3500"),
        ([receive(5, 10, src_pe=2), receive(42, 2500)], "tasks that PE 2 does not send: 5$"),
    ],
)
def test_unmatched_tasks(receives: list[ReceiveRequest], expected: str | None) -> None:
    segmenter = TaskSegmenter(1000)
    segments = segmenter.segment_send_request(send(42, 2500))
    summaries = {
        (0, 1, 0): WorkloadSummary(2000, [s.task_id for s in segments[:2]], [1000, 1000]),
        (0, 1, 1): WorkloadSummary(510, [segments[2].task_id, 5], [500, 10]),
        (1, 0, 0): WorkloadSummary(1, [99], [1]),
    }
    found = agreement.unmatched_tasks(1, [send(99, 1, dest_pe=0)], receives, summaries, segmenter)
    if expected is None:
        assert found is None
    else:
        assert found is not None
        with pytest.raises(ValueError, match=expected):
            raise ValueError(found)


def test_a_task_within_one_pe_needs_a_partner() -> None:
    sends = [send(5, 10, dest_pe=1)]
    segmenter = TaskSegmenter()
    assert agreement.unmatched_tasks(1, sends, [receive(5, 10, src_pe=1)], {}, segmenter) is None
    found = agreement.unmatched_tasks(1, sends, [], {}, segmenter)
    assert found == "PE 1 sends tasks that PE 1 does not receive: 5"
