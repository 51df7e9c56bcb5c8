"""Segments, slots, iterations and addresses: everything the copy pipeline plans, without ranks that copy."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_comm.resharding.nvshmem_copy_service import (
    CommunicationScheduler,
    GPUExecutionPlanner,
    TaskSegmenter,
    TensorPointerExtractor,
    WorkloadPacker,
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


@settings(max_examples=60)
@given(sizes=st.lists(st.integers(0, 120), max_size=60), max_tasks=st.sampled_from([3, 1000]))
def test_packing(sizes: list[int], max_tasks: int) -> None:
    """Every task comes once, in a slot with room for it; only the last slot is looked at."""
    packer = WorkloadPacker(100, max_tasks=max_tasks)
    requests = [send(i, size) for i, size in enumerate(sizes)]
    given_order = list(requests)
    workloads = packer.pack_workloads(requests, n_pes=3)
    assert requests == given_order
    assert set(workloads) == {0, 1, 2}
    assert workloads[0] == workloads[2] == []
    tasks = [task for workload in workloads[1] for task in workload.tasks]
    assert tasks == sorted(requests, key=lambda request: -request.size)
    for workload in workloads[1]:
        assert workload.total_size == sum(task.size for task in workload.tasks)
        assert workload.total_size <= 100 or len(workload.tasks) == 1
        assert len(workload.tasks) <= max_tasks
    for before, after in itertools.pairwise(workloads[1]):
        is_full = before.total_size + after.tasks[0].size > 100
        assert is_full or len(before.tasks) == max_tasks


def test_a_slot_holds_so_many_tasks() -> None:
    requests = [send(i, 1) for i in range(MAX_TASKS_PER_BATCH + 1)]
    workloads = WorkloadPacker().pack_workloads(requests, 2)
    assert [len(w.tasks) for w in workloads[1]] == [MAX_TASKS_PER_BATCH, 1]


@pytest.mark.parametrize("options", [{"max_tasks": 0}, {"slot_bytes": 0}])
def test_bad_packer_options(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
        WorkloadPacker(**options)


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


def assert_no_conflict(batches: list[ScheduledBatch], num_iterations: int) -> None:
    assert {batch.iteration for batch in batches} == set(range(num_iterations))
    for iteration in range(num_iterations):
        used = [pe for b in batches if b.iteration == iteration for pe in (b.src_pe, b.dest_pe)]
        assert len(used) == len(set(used))


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        (ring(8), 2),
        (all_to_all(2), 2),
        (all_to_all(4), 6),
        (all_to_all(8), 14),
        ([(0, i) for i in range(1, 8)], 7),
        ([(i, 7) for i in range(7)], 7),
        ([(0, 1)] * 5 + [(1, 0)] * 5, 10),
        ([], 0),
    ],
)
def test_number_of_iterations(pairs: Pairs, expected: int) -> None:
    scheduler, batches = CommunicationScheduler(), batches_of(pairs)
    scheduler._assign_iterations(batches)
    assert_no_conflict(batches, scheduler.num_iterations)
    assert scheduler.num_iterations == expected


@settings(max_examples=80)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(lambda p: p[0] != p[1]), max_size=60
    )
)
def test_any_batches(pairs: Pairs) -> None:
    scheduler, batches = CommunicationScheduler(), batches_of(pairs)
    scheduler._assign_iterations(batches)
    assert_no_conflict(batches, scheduler.num_iterations)


def test_most_conflicts_come_first() -> None:
    # In the order given, first-fit would put both outer batches first and need 3 iterations.
    batches = batches_of([(0, 1), (2, 3), (1, 2), (1, 4), (2, 5)])
    CommunicationScheduler()._assign_iterations(batches)
    assert batches[2].iteration == 0


def test_of_equal_conflicts_the_larger_comes_first() -> None:
    batches = batches_of([(0, 1), (0, 2), (0, 3)], sizes=[10, 1000, 100])
    CommunicationScheduler()._assign_iterations(batches)
    assert [batch.iteration for batch in batches] == [2, 0, 1]


def _build(context: RankContext) -> None:
    rank_idx, n = context.rank_idx, context.num_ranks
    workloads = {
        dest_pe: [
            WorkloadGroup(dest_pe, [send(100 * rank_idx + i, dest_pe) for i in range(20)], 5),
            WorkloadGroup(dest_pe, [send(-1 - (rank_idx << 70), 3)], 6),
        ]
        for dest_pe in range(n)
    }
    scheduler = CommunicationScheduler()
    schedule, summaries = scheduler.build_schedule(workloads, rank_idx, n, group=context.group)
    assert scheduler.num_iterations == 2 * n * (n - 1) // (n // 2)
    mine = [batch for batches in schedule.values() for batch in batches]
    assert len(mine) == 4 * (n - 1)
    assert {batch.total_size for batch in mine} == {5, 6}
    peers = set(range(n)) - {rank_idx}
    assert {(src, dst) for src, dst, _ in summaries} == {(rank_idx, p) for p in peers} | {
        (p, rank_idx) for p in peers
    }
    for peer in peers:
        long, short = (summaries[peer, rank_idx, idx] for idx in range(2))
        assert long.task_ids == [100 * peer + i for i in range(20)]
        assert set(long.task_sizes) == {rank_idx}
        assert short == WorkloadSummary(6, [-1 - (peer << 70)], [3])
    with pytest.raises(ValueError, match="n_pes must be 3, the ranks of the group, got 4"):
        scheduler.build_schedule(workloads, rank_idx, 4, group=context.group)


def test_ranks_agree_on_a_schedule() -> None:
    run_ranks(_build, 3, mode="threads")


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
    assert addresses(schedules[0]["recv"].gpu_plan) == [
        (base, 50_000, 100),
        (base + 200, 70_000, 100),
    ]


def test_both_ends_must_mean_the_same_size() -> None:
    wanted = [receive(5, 96)]
    wanted[0].dest_tensor = 1
    with pytest.raises(ValueError, match="PE 0 sends 100 bytes as task 5, 96 are to be received"):
        GPUExecutionPlanner().create_gpu_plans(incoming([5], [100]), SLOTS, SLOTS, wanted)


def test_places_in_a_slot() -> None:
    """Both ends and the packer compute the same places."""
    places = [0, 6, 11]
    tensors = [torch.zeros(size, dtype=torch.uint8) for size in (6, 5, 4)]
    sends = [SendRequest(i, t, 0, t.numel(), 1) for i, t in enumerate(tensors)]
    workload = WorkloadPacker(4096).pack_workloads(sends, 2)[1][0]
    batch = ScheduledBatch(0, 1, 0, 0, tasks=workload.tasks)
    planner = GPUExecutionPlanner()
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
