"""`RemoteCopyService`, and the parts of the pipeline end to end, on ranks that are threads."""

from __future__ import annotations

import dataclasses
import random
import re
from typing import Any

import numpy as np
import pytest
import torch

from moe_comm import Communicator, PeerTimeoutError
from moe_comm.resharding.nvshmem_copy_service import (
    CommunicationScheduler,
    DoubleBufferManager,
    GPUExecutionPlanner,
    GPUResourceManager,
    KernelLauncher,
    PipelineExecutor,
    RemoteCopyService,
    TaskSegmenter,
    WorkloadPacker,
    validation,
)
from moe_comm.resharding.nvshmem_copy_service.nvshmem_types import (
    IterationSchedule,
    ReceiveRequest,
    SendRequest,
)
from moe_comm.resharding.plan.transfer_op import pack_task_id
from tests.helpers.failing_ranks import SHORT_S, error_of
from tests.helpers.rank_threads import on_ranks

SLOT = 4096


@dataclasses.dataclass(frozen=True)
class Task:
    task_id: int
    src_pe: int
    dest_pe: int
    size: int


def service_on(communicator: Communicator, **options: Any) -> RemoteCopyService:
    service = RemoteCopyService(communicator=communicator, **{"slot_bytes": SLOT, **options})
    service.init()
    return service


def random_tasks(seed: int, num_pes: int, num_tasks: int) -> list[Task]:
    generator = random.Random(seed)
    sizes = [0, 1, 15, 16, 17, SLOT, SLOT + 1, 3 * SLOT - 1, 20 * SLOT]
    return [
        Task(
            generator.choice([i, 3 * 10**9 + i, pack_task_id(3, 5, i)]),
            generator.randrange(num_pes),
            generator.randrange(num_pes),
            generator.choice([*sizes, generator.randrange(2 * SLOT), generator.randrange(200)]),
        )
        for i in range(num_tasks)
    ]


def register(
    service: RemoteCopyService, tasks: list[Task]
) -> tuple[dict[Task, torch.Tensor], dict[Task, torch.Tensor]]:
    """Sources and destinations of this PE; a destination begins at byte 3 of its tensor."""
    sources = {
        t: torch.zeros(t.size, dtype=torch.uint8) for t in tasks if t.src_pe == service.my_pe
    }
    targets = {
        t: torch.zeros(t.size + 7, dtype=torch.uint8) for t in tasks if t.dest_pe == service.my_pe
    }
    for task, tensor in sources.items():
        service.register_send(task.task_id, tensor, 0, task.size, task.dest_pe)
    # Receivers need not name tasks in the order of their senders.
    for task, tensor in reversed(targets.items()):
        service.register_receive(task.task_id, tensor, 3, task.size, task.src_pe)
    return sources, targets


def check_run(
    service: RemoteCopyService,
    sources: dict[Task, torch.Tensor],
    targets: dict[Task, torch.Tensor],
    salt: int,
) -> None:
    for task, tensor in sources.items():
        tensor.copy_(validation.generate_mixed_data(task.task_id + salt, task.size, "cpu"))
    for tensor in targets.values():
        tensor.fill_(0xEE)
    service.run()
    for tensor in sources.values():
        tensor.fill_(0xDD)  # the caller may overwrite what it sent
    for task, tensor in targets.items():
        result = validation.validate_received_data(
            task.task_id + salt, tensor[3:], task.size, task.src_pe, pattern="mixed"
        )
        assert result.passed, (task, result)
        assert set(tensor[:3].tolist()) | set(tensor[3 + task.size :].tolist()) == {0xEE}


@pytest.mark.parametrize("num_pes", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    "options",
    [{}, {"slot_bytes": None}, {"slot_bytes": 64}],
    ids=["small slots", "default", "tiny slots"],
)
def test_random_tasks(num_pes: int, options: dict[str, Any]) -> None:
    tasks = random_tasks(num_pes, num_pes, 12 * num_pes)

    def body(communicator: Communicator) -> None:
        service = service_on(communicator, **options)
        sources, targets = register(service, tasks)
        service.schedule()
        for salt in range(3):
            check_run(service, sources, targets, salt)

    on_ranks(num_pes, body)


def test_another_schedule_on_the_same_slots() -> None:
    def body(communicator: Communicator) -> None:
        service = service_on(communicator)
        for seed in range(4):
            sources, targets = register(service, random_tasks(seed, 3, 20))
            service.schedule()
            service.schedule()  # nothing is lost by planning once more
            check_run(service, sources, targets, seed)
            service.clear_requests()
        service.schedule()
        service.run()

    on_ranks(3, body)


def test_any_dtype_and_shape() -> None:
    """Sizes and positions count bytes, whatever the tensors are made of."""

    def body(communicator: Communicator) -> None:
        service = service_on(communicator)
        scalar = torch.tensor(3.5, dtype=torch.float64)
        matrix = torch.randn(
            33, 65, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1)
        )
        to_scalar, to_matrix = torch.zeros((), dtype=torch.float64), torch.zeros_like(matrix)
        if service.my_pe == 0:
            service.register_send(1, scalar, 0, 8, 1)
            service.register_send(2, matrix, 65 * 2, 32 * 65 * 2, 1)
            service.register_send(3, torch.empty(0), 0, 0, 1)
        else:
            service.register_receive(1, to_scalar, 0, 8, 0)
            service.register_receive(2, to_matrix.data_ptr(), 0, 32 * 65 * 2, 0)
            service.register_receive(3, torch.empty(0), 0, 0, 0)
        service.schedule()
        service.run()
        if service.my_pe == 1:
            assert to_scalar.item() == 3.5
            assert torch.equal(to_matrix[:32], matrix[1:])
            assert not to_matrix[32].any()

    on_ranks(2, body)


def test_the_heap_is_given_back() -> None:
    def body(communicator: Communicator) -> None:
        before = communicator.heap_stats().live_bytes
        service = service_on(communicator)
        data = torch.zeros(500 * SLOT, dtype=torch.uint8)
        peer = 1 - service.my_pe
        service.register_send(service.my_pe, data, 0, data.numel(), peer)
        service.register_receive(peer, torch.zeros_like(data), 0, data.numel(), peer)
        service.schedule()
        service.run()
        # Tensors outside the heap go through a few slots of it.
        assert communicator.heap_stats().peak_live_bytes - before <= 20 * SLOT
        service.finalize()
        service.finalize()
        assert not service.initialized
        communicator.bootstrap.all_gather(None)
        # Slots and a table may wait until peers have ended, too; they do not add up.
        for _ in range(5):
            service.init()
            service.register_send(service.my_pe, data, 0, data.numel(), peer)
            service.register_receive(peer, torch.zeros_like(data), 0, data.numel(), peer)
            service.schedule()
            service.run()
            service.finalize()
        assert communicator.heap_stats().live_bytes - before <= 20 * SLOT

    on_ranks(2, body)


def test_bytes_of_arrays_and_addresses() -> None:
    def body(communicator: Communicator) -> None:
        service = service_on(communicator)
        source, target = np.arange(40, dtype=np.uint8), np.zeros(40, dtype=np.uint8)
        if service.my_pe == 0:
            service.register_send(1, source, 8, 30, 1)
            with pytest.raises(
                TypeError, match="expected a tensor, an array or an address, got str"
            ):
                service.register_send(1, "no tensor", 0, 1, 1)
        else:
            service.register_receive(1, target.ctypes.data, 4, 30, 0)
        service.schedule()
        service.run()
        if service.my_pe == 1:
            assert target.tolist() == [0] * 4 + list(range(8, 38)) + [0] * 6

    on_ranks(2, body)


@pytest.mark.parametrize("num_pes", [1, 2, 3])
def test_the_parts_of_the_pipeline_together(num_pes: int) -> None:
    """Requests, segments, slots, iterations, addresses and the executor, as Megatron joins them."""
    tasks = [
        dataclasses.replace(task, task_id=i)
        for i, task in enumerate(random_tasks(num_pes, num_pes, 12 * num_pes))
    ]

    def body(communicator: Communicator) -> None:
        my_pe = communicator.rank_idx
        sources = {
            t.task_id: validation.generate_deterministic_data(t.task_id, t.size, "cpu")
            for t in tasks
            if t.src_pe == my_pe
        }
        targets = {
            t.task_id: torch.zeros(t.size + 3, dtype=torch.uint8)
            for t in tasks
            if t.dest_pe == my_pe
        }
        sends = [
            SendRequest(t.task_id, sources[t.task_id], 0, t.size, t.dest_pe)
            for t in tasks
            if t.src_pe == my_pe
        ]
        recvs = [
            ReceiveRequest(t.task_id, targets[t.task_id], 3, t.size, t.src_pe)
            for t in tasks
            if t.dest_pe == my_pe
        ]
        segmenter = TaskSegmenter(SLOT)
        cut_sends = [s for r in sends for s in segmenter.segment_send_request(r)]
        cut_recvs = [s for r in recvs for s in segmenter.segment_receive_request(r)]
        workloads = WorkloadPacker(SLOT).pack_workloads(
            [s for s in cut_sends if s.dest_pe != my_pe], num_pes
        )
        scheduler = CommunicationScheduler()
        batches, summaries = scheduler.build_schedule(
            workloads, my_pe, num_pes, communicator.bootstrap
        )
        schedules = [
            IterationSchedule(send=None, recv=None) for _ in range(scheduler.num_iterations)
        ]
        for iteration, of_iteration in batches.items():
            for batch in of_iteration:
                if batch.src_pe == my_pe:
                    batch.tasks = workloads[batch.dest_pe][batch.batch_index].tasks
                    schedules[iteration]["send"] = batch
                else:
                    batch.tasks_summary = summaries[batch.src_pe, my_pe, batch.batch_index]
                    schedules[iteration]["recv"] = batch
        slots = DoubleBufferManager(SLOT, communicator)
        slots.allocate()
        GPUExecutionPlanner().create_gpu_plans(
            schedules,
            [slots.get_send_slot(i) for i in range(2)],
            [slots.get_recv_slot(i) for i in range(2)],
            cut_recvs,
        )
        resources = GPUResourceManager(communicator=communicator)
        resources.init()
        launcher = KernelLauncher()
        launcher.load_kernels()
        executor = PipelineExecutor(launcher, slots, my_pe)
        streams = [resources.get_stream(name) for name in ("pack", "unpack", "send", "copy")]
        executor.set_streams(*streams, *streams)
        executor.set_events(*resources.create_events())
        for _ in range(2):
            for target in targets.values():
                target.zero_()
            executor.execute_pipeline(schedules, scheduler.num_iterations)
            executor.process_self_moves(sends, recvs)
            for t in tasks:
                if t.dest_pe == my_pe:
                    target = targets[t.task_id]
                    assert not target[:3].any()
                    assert validation.validate_received_data(t.task_id, target[3:], t.size).passed
        slots.free()

    on_ranks(num_pes, body)


def test_its_own_communicator() -> None:
    """Without one it makes its own and destroys it."""

    def body(communicator: Communicator) -> None:
        service = RemoteCopyService(communicator.bootstrap, slot_bytes=SLOT)
        assert (service.my_pe, service.n_pes, service.initialized) == (-1, -1, False)
        service.init("WARNING")
        assert (service.my_pe, service.n_pes) == (communicator.rank_idx, 2)
        assert service.device == torch.device("cpu")
        own = service.gpu_resources.communicator
        assert own is not None
        assert own is not communicator
        service.schedule()
        service.run()
        service.finalize()
        with pytest.raises(ValueError, match="has been destroyed"):
            own.require_native()

    on_ranks(2, body)


# ---------------------------------------------------------------------------------------------
# Mistakes.


BYTES = torch.zeros(10 * SLOT, dtype=torch.uint8)

# Of a PE: whether it sends, task id, first byte, bytes, the other PE.
Request = tuple[bool, int, int, int, int]
MISTAKES: dict[str, dict[int, list[Request]]] = {
    "rank 0 sends task 6 (100 bytes of torch.uint8) to rank 1, which does not receive it": {
        0: [(True, task_id, 0, 100, 1) for task_id in (5, 6, 7)],
        1: [(False, task_id, 100 * task_id, 100, 0) for task_id in (5, 7)],
    },
    "rank 2 receives task 8 (12288 bytes of torch.uint8) from rank 1, which does not send it": {
        2: [(False, 8, 0, 3 * SLOT, 1)]
    },
    "task 5: rank 0 sends 12288 bytes of torch.uint8, rank 1 receives 8192 bytes of torch.uint8": {
        0: [(True, 5, 0, 3 * SLOT, 1)],
        1: [(False, 5, 0, 2 * SLOT, 0)],
    },
    "rank 2: sends to rank 1: task_id 5 comes twice": {
        2: [(True, 5, 0, 10, 1), (True, 5, 0, 20, 1)]
    },
    "rank 1: SymmetricCopyService copy service, rank 1: unmatched local ops": {
        1: [(True, 5, 0, 10, 1)]
    },
    "rank 1: SymmetricCopyService copy service, rank 1: task 5 sends (10,) of torch.uint8 "
    "and receives (11,)": {1: [(True, 5, 0, 10, 1), (False, 5, 0, 11, 1)]},
    "rank 1: the destinations of tasks 3 (from rank 0) and 4 (from rank 2) share": {
        1: [(False, 3, 0, 10, 0), (False, 4, 9, 10, 2)]
    },
    "rank 0: task_id must be in [0, 2^63), got 9223372036854775808": {
        0: [(True, 1 << 63, 0, 10, 1)]
    },
}


@pytest.mark.parametrize("message", MISTAKES)
def test_every_pe_hears_of_a_mistake(message: str) -> None:
    """`schedule` raises the same on all of them, and the service works afterwards."""

    def body(communicator: Communicator) -> None:
        service = service_on(communicator)
        target = BYTES.clone()
        for is_sent, task_id, *place, pe in MISTAKES[message].get(service.my_pe, []):
            tensor, call = BYTES, service.register_send
            if not is_sent:
                tensor, call = target, service.register_receive
            call(task_id, tensor, *place, pe)  # type: ignore[call-arg]
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            service.schedule()
        with pytest.raises(RuntimeError, match=r"Must call schedule\(\) before run\(\)"):
            service.run()
        service.clear_requests()
        sources, targets = register(service, random_tasks(7, 3, 10))
        service.schedule()
        check_run(service, sources, targets, 1)

    on_ranks(3, body)


def test_a_bad_request_is_refused_at_once() -> None:
    def body(communicator: Communicator) -> None:
        service = RemoteCopyService(communicator=communicator, slot_bytes=SLOT)
        with pytest.raises(RuntimeError, match="RemoteCopyService not initialized"):
            service.register_send(1, BYTES, 0, 1, 0)
        for call in (service.schedule, service.run, lambda: service.abandon("")):
            with pytest.raises(RuntimeError, match="RemoteCopyService not initialized"):
                call()
        service.init()
        strided = torch.zeros(4, 6).t()
        for args, message in (
            ((1, BYTES, 0, 1, 2), r"task 1: destination PE must be in \[0, 2\), got 2"),
            ((1, BYTES, 0, 1, -1), r"destination PE must be in \[0, 2\), got -1"),
            ((-1, BYTES, 0, 1, 0), "task_id must be >= 0, got -1"),
            ((1, BYTES, -2, 1, 0), "position and size must be >= 0, got -2 and 1"),
            ((1, BYTES, 5, 10 * SLOT, 0), r"bytes \[5, 40965\) of a tensor of 40960"),
            ((1, strided, 0, 8, 0), r"must be contiguous, got shape \(6, 4\) with strides"),
            ((1, torch.zeros(3, device="meta"), 0, 1, 0), "tensors are on cpu, got one on meta"),
        ):
            with pytest.raises(ValueError, match=message):
                service.register_send(*args)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"source PE must be in \[0, 2\), got 9"):
            service.register_receive(1, BYTES, 0, 1, 9)
        assert service.send_requests == []
        assert service.receive_requests == []

    on_ranks(2, body)


def test_tensors_that_lose_their_memory_or_move() -> None:
    def body(communicator: Communicator) -> None:
        service = service_on(communicator)
        memory = torch.ones(8)
        source, target = memory[4:], torch.zeros(4)
        peer = 1 - service.my_pe
        service.register_send(3, source, 0, 16, peer)
        service.register_receive(3, target, 0, 16, peer)
        service.schedule()
        service.run()
        assert target.eq(1).all()
        assert target._version == 1
        if service.my_pe == 1:
            memory.untyped_storage().resize_(0)
            with pytest.raises(
                ValueError, match=r"task 4: the tensor has elements in bytes \[16, 32\)"
            ):
                service.register_send(4, source, 0, 16, peer)
        text = r"rank 1: task 3: the tensor has .* which was freed or cut"
        with pytest.raises(ValueError, match=text):
            service.run()
        assert target._version == 1, "nothing was written"
        if service.my_pe == 1:
            source.data = torch.full((4,), 5.0)
        with pytest.raises(
            ValueError, match=r"rank 1: task 3: .* scheduled at 0x\w+, it is at 0x\w+"
        ):
            service.run()
        service.schedule()
        service.run()
        assert target.eq(5 if service.my_pe == 0 else 1).all()

    on_ranks(2, body)


def test_a_pe_that_gives_up_is_named() -> None:
    def body(communicator: Communicator) -> None:
        service = service_on(communicator)
        for call in (service.schedule, service.run):
            if service.my_pe == 1:
                service.abandon("no weights")
                assert service.send_requests == []
            else:
                with pytest.raises(ValueError, match="rank 1: gave up: no weights"):
                    call()
            # The second round: a schedule that exists is abandoned before it runs.
            service.schedule()

    on_ranks(3, body)


def test_pes_must_ask_for_the_same() -> None:
    def body(communicator: Communicator) -> None:
        slot_bytes = SLOT * (1 + communicator.rank_idx)
        service = RemoteCopyService(communicator=communicator, slot_bytes=slot_bytes)
        with pytest.raises(ValueError, match=r"4096 .* rank 0 .*8192 .* rank 1"):
            service.init()
        assert not service.initialized

    on_ranks(2, body)


def test_different_calls_meet() -> None:
    def body(communicator: Communicator) -> None:
        service = service_on(communicator)
        service.schedule()
        call = service.run if service.my_pe else service.schedule
        with pytest.raises(ValueError, match="calls: schedule on rank 0 met run 1 on rank 1"):
            call()

    on_ranks(2, body)


# ---------------------------------------------------------------------------------------------
# Failure.


@pytest.mark.clock(usual_s=0.2, limit_s=SHORT_S)
def test_a_pe_that_does_not_call() -> None:
    def body(communicator: Communicator) -> None:
        service = service_on(communicator)
        service.schedule()
        if service.my_pe == 0:
            error = error_of(service.run)
            assert isinstance(error, PeerTimeoutError), repr(error)
            assert error.ranks == (1,)

    on_ranks(2, body, arrival_timeout_s=SHORT_S)
