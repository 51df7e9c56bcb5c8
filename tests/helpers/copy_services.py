"""The services of the conformance suite, and transfers whose every byte is known in advance."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import math
import random
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from moe_comm import Communicator
from moe_comm.resharding.copy_services.base import CopyService
from moe_comm.resharding.copy_services.distributed_copy_service import DistributedCopyService
from moe_comm.resharding.copy_services.gloo_copy_service import GlooCopyService
from moe_comm.resharding.copy_services.nccl_copy_service import NCCLCopyService
from moe_comm.resharding.copy_services.nvshmem_copy_service import NVSHMEMCopyService
from moe_comm.resharding.copy_services.symmetric_copy_service import SymmetricCopyService
from moe_comm.testing import RankContext

POISON = 0xA5

DTYPES = (
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


class NcclOverGloo(NCCLCopyService):
    """The NCCL service where there is no device: its messages go over a Gloo group."""

    device_types = ("cpu",)

    def __init__(self, group: dist.ProcessGroup | None = None, **limits: int) -> None:
        wire_group = group if group is not None else dist.group.WORLD
        assert wire_group is not None
        limits = {"max_messages": 7, "max_message_bytes": 4096, **limits}
        DistributedCopyService.__init__(
            self, group, wire_group, torch.device("cpu"), None, **limits
        )


@dataclasses.dataclass(frozen=True)
class ServiceCase:
    """A copy service and how its ranks are run.

    Args:
        mode: "threads" or "processes".
        make: Makes it for a rank.
        takes_no_task_ids: Whether transfers to other ranks may have task id None.
        takes_local_order: Whether transfers of a rank to itself may too.
    """

    mode: str
    make: Callable[[RankContext], CopyService]
    takes_no_task_ids: bool = True
    takes_local_order: bool = False


def _symmetric(context: RankContext) -> CopyService:
    return SymmetricCopyService(context.group)


class InHeap(SymmetricCopyService):
    """Destinations of its tests lie in the heap."""


def _symmetric_in_heap(context: RankContext) -> CopyService:
    return InHeap(context.group)


def _symmetric_small_slots(context: RankContext) -> CopyService:
    return SymmetricCopyService(context.group, slot_bytes=1024, num_slots=2)


def _nvshmem(context: RankContext) -> CopyService:
    return NVSHMEMCopyService(context.group, slot_bytes=4096)


SERVICES = {
    "nvshmem": ServiceCase("threads", _nvshmem, takes_no_task_ids=False),
    "symmetric": ServiceCase("threads", _symmetric, takes_local_order=True),
    "symmetric_in_heap": ServiceCase("threads", _symmetric_in_heap, takes_local_order=True),
    "symmetric_small_slots": ServiceCase("threads", _symmetric_small_slots, takes_local_order=True),
    "gloo": ServiceCase("processes", lambda context: GlooCopyService()),
    "nccl_over_gloo": ServiceCase("processes", lambda context: NcclOverGloo()),
}


@contextlib.contextmanager
def service_of(name: str, context: RankContext) -> Iterator[CopyService]:
    service = SERVICES[name].make(context)
    try:
        yield service
    finally:
        service.close()


@dataclasses.dataclass(frozen=True)
class Task:
    """One transfer, known to all ranks.

    Args:
        src_layout: Layout of the sender's tensor: "plain", "transposed", "strided" or "inside".
        dst_layout: Layout of the receiver's tensor, likewise.
        dst_shape: Shape at the receiver, of as many elements; None for the same.
    """

    task_id: int
    src: int
    dst: int
    shape: tuple[int, ...] = (4,)
    dtype: torch.dtype = torch.float32
    src_layout: str = "plain"
    dst_layout: str = "plain"
    dst_shape: tuple[int, ...] | None = None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def placed(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    layout: str,
    communicator: Communicator | None = None,
) -> tuple[torch.Tensor, ...]:
    """Poisoned memory, of the heap of `communicator` if given, and a tensor of this shape in it."""

    def memory(num_elements: int) -> torch.Tensor:
        size = num_elements * dtype.itemsize
        base = (
            torch.empty(size, dtype=torch.uint8)
            if communicator is None
            else communicator.empty(size, dtype=torch.uint8)
        )
        return base.fill_(POISON % 2 if dtype is torch.bool else POISON)

    numel = math.prod(shape)
    if layout == "plain" or not shape:
        base = memory(numel)
        return base, base.view(dtype).view(shape)
    if layout == "transposed":
        base = memory(numel)
        flipped = base.view(dtype).view(tuple(reversed(shape)))
        return base, flipped.permute(*reversed(range(len(shape))))
    if layout == "strided":
        base = memory(2 * numel)
        return base, base.view(dtype).view(*shape[:-1], 2 * shape[-1])[..., ::2]
    if layout == "inside":
        outer = tuple(size + 2 for size in shape)
        base = memory(math.prod(outer))
        return base, base.view(dtype).view(outer)[tuple(slice(1, 1 + size) for size in shape)]
    raise ValueError(layout)


def payload_of(task: Task, round_idx: int) -> torch.Tensor:
    """Sent data: any bytes, NaNs among them."""
    generator = torch.Generator().manual_seed(1000 * round_idx + task.task_id % 997)
    top = 2 if task.dtype is torch.bool else 256
    data = torch.randint(top, (task.num_bytes,), generator=generator)
    return data.to(torch.uint8).view(task.dtype).view(task.shape)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


class Endpoints:
    """This rank's ends of tasks, at fixed addresses."""

    def __init__(self, service: CopyService, tasks: Sequence[Task]) -> None:
        rank_idx = service.rank
        heap = service.communicator if isinstance(service, InHeap) else None
        self.sends = [
            (task, *placed(task.shape, task.dtype, task.src_layout))
            for task in tasks
            if task.src == rank_idx
        ]
        self.recvs = [
            (task, *placed(task.dst_shape or task.shape, task.dtype, task.dst_layout, heap))
            for task in tasks
            if task.dst == rank_idx
        ]

    def fill(self, round_idx: int) -> None:
        """New sources, poisoned destinations."""
        for task, _, tensor in self.sends:
            tensor.copy_(payload_of(task, round_idx))
        for task, base, _ in self.recvs:
            base.fill_(POISON % 2 if task.dtype is torch.bool else POISON)

    def submit(self, service: CopyService, order: random.Random | None = None) -> None:
        """Submit all in an order that nobody else has; or in that of the tasks and without ids."""
        calls: list[tuple[Callable[..., None], torch.Tensor, int, int]] = [
            *(
                (service.submit_send, tensor, task.dst, task.task_id)
                for task, _, tensor in self.sends
            ),
            *(
                (service.submit_recv, tensor, task.src, task.task_id)
                for task, _, tensor in self.recvs
            ),
        ]
        if order is not None:
            order.shuffle(calls)
        for call, tensor, peer, task_id in calls:
            call(tensor, peer, task_id if order is not None else None)

    def check(self, round_idx: int) -> None:
        """Every element landed, and nothing beside it was written."""
        for task, base, tensor in self.recvs:
            want_base, want = placed(task.dst_shape or task.shape, task.dtype, task.dst_layout)
            want.copy_(payload_of(task, round_idx).reshape(want.shape))
            assert torch.equal(as_bytes(tensor), as_bytes(want)), f"{task}, round {round_idx}"
            assert torch.equal(base, want_base), f"{task}, round {round_idx}: written beside it"
        for task, _, tensor in self.sends:
            want = payload_of(task, round_idx)
            assert torch.equal(as_bytes(tensor), as_bytes(want)), f"{task}: the source changed"


def move(
    service: CopyService,
    tasks: Sequence[Task],
    *,
    seed: int = 0,
    num_rounds: int = 2,
    has_ids: bool = True,
) -> None:
    """Run tasks and compare every byte."""
    ends = Endpoints(service, tasks)
    for round_idx in range(num_rounds):
        ends.fill(round_idx)
        order = random.Random(f"{seed} {round_idx} {service.rank}") if has_ids else None
        ends.submit(service, order)
        service.run()
        ends.check(round_idx)


def random_tasks(num_ranks: int, num_tasks: int, seed: int) -> list[Task]:
    chance = random.Random(seed)
    layouts = ("plain", "transposed", "strided", "inside")
    shapes = ((), (0,), (1,), (5,), (3, 7), (2, 3, 5), (4, 0, 2), (33, 17), (1, 1, 1, 9), (600,))
    ids = chance.sample(range(1 << 62), num_tasks)
    return [
        Task(
            task_id,
            chance.randrange(num_ranks),
            chance.randrange(num_ranks),
            chance.choice(shapes),
            chance.choice(DTYPES),
            chance.choice(layouts),
            chance.choice(layouts),
        )
        for task_id in ids
    ]


def pattern(name: str, num_ranks: int) -> list[Task]:
    """Tasks of a shape that has a name."""
    ranks = range(num_ranks)
    pairs = [(src, dst) for src in ranks for dst in ranks]
    if name == "nothing":
        return []
    if name == "all_to_all":
        return [Task(i, src, dst, (64, 3)) for i, (src, dst) in enumerate(pairs)]
    if name == "ring":
        return [Task(i, i, (i + 1) % num_ranks, (1000,), torch.bfloat16) for i in ranks]
    if name == "one_to_all":
        return [Task(i, 0, i, (257,), torch.int8) for i in ranks]
    if name == "all_to_one":
        return [Task(i, i, 1, (257,), torch.float64) for i in ranks]
    if name == "self":
        return [Task(i, i, i, (31, 3), src_layout="transposed", dst_layout="inside") for i in ranks]
    if name == "some_ranks_idle":
        return [Task(7, 0, 1, (50,)), Task(3, 0, 1, (20,)), Task(5, 1, 0, (1,))]
    if name == "one_pair_much_one_little":
        return [Task(i, 0, 1, (500,)) for i in range(60)] + [
            Task(99, 1, 0),
            Task(98, 1, 2 % num_ranks),
        ]
    if name == "many_tiny":
        return [Task(i, *pairs[i % len(pairs)], (1 + i % 3,)) for i in range(600)]
    if name == "large":
        return [
            Task(0, 0, 1, (3 << 20,), torch.int8),
            Task(1, 1, 0, (1024, 700), torch.bfloat16, "transposed", "strided"),
            Task(2, 0, 1, (3,)),
        ]
    if name == "strided":
        layouts = ("plain", "transposed", "strided", "inside")
        return [
            Task(10 * i + j, 0, 1, (6, 5, 4), torch.bfloat16, src_layout, dst_layout)
            for i, src_layout in enumerate(layouts)
            for j, dst_layout in enumerate(layouts)
        ]
    if name == "scalars_and_empty":
        return [
            Task(0, 0, 1, ()),
            Task(1, 1, 0, (0,)),
            Task(2, 0, 0, ()),
            Task(3, 1, 1, (0, 5)),
            Task(4, 0, 1, (3, 0), torch.int8),
            Task(5, 1, 0, (), torch.bool),
        ]
    if name == "reshaped":
        return [
            Task(0, 0, 1, (6, 4), dst_shape=(24,)),
            Task(1, 1, 0, (12,), src_layout="strided", dst_shape=(3, 4), dst_layout="transposed"),
            Task(2, 0, 0, (8,), dst_shape=(2, 4), dst_layout="inside"),
            Task(3, 1, 0, (), dst_shape=(1, 1)),
        ]
    if name == "dtypes":
        return [
            Task(i, i % num_ranks, (i + 1) % num_ranks, (5, 3), dtype, "plain", "transposed")
            for i, dtype in enumerate(DTYPES)
        ]
    raise ValueError(name)


PATTERNS = (
    "nothing",
    "all_to_all",
    "ring",
    "one_to_all",
    "all_to_one",
    "self",
    "some_ranks_idle",
    "one_pair_much_one_little",
    "many_tiny",
    "large",
    "strided",
    "scalars_and_empty",
    "reshaped",
    "dtypes",
)


def unregistered_group(context: RankContext, rank_idx: int, store_path: str) -> dist.ProcessGroup:
    """A Gloo group that the default group knows nothing of; ranks are counted as the caller likes."""
    store = dist.PrefixStore("unregistered", dist.FileStore(store_path, context.num_ranks))
    group = dist.ProcessGroup(store, rank_idx, context.num_ranks)
    backend = dist.ProcessGroupGloo(
        store, rank_idx, context.num_ranks, timeout=dt.timedelta(seconds=60)
    )
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group
