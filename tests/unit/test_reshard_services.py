"""Decisions of copy services before anything moves."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import random
import re
import threading
import warnings
from collections.abc import Iterator, Sequence

import pytest
import torch

from moe_comm import RankThreads
from moe_comm.resharding.copy_services import (
    CopyService,
    NCCLCopyService,
    NVSHMEMCopyService,
    RecvOp,
    SendOp,
    distributed_copy_service,
    match_local_ops_by_task_id,
)
from moe_comm.resharding.copy_services.distributed_copy_service import DistributedCopyService
from moe_comm.resharding.copy_services.matched_transfers import Transfer, agree
from moe_comm.resharding.copy_services.queued_copy_service import (
    Batch,
    QueuedCopyService,
    copy_pair,
)
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.failing_ranks import HANG_S
from tests.helpers.fresh_python import run_python

# ---------------------------------------------------------------------------------------------
# Copies within a rank.


def send(task_id: int | None) -> SendOp:
    return SendOp(task_id, torch.zeros(1), 0)


def recv(task_id: int | None) -> RecvOp:
    return RecvOp(task_id, torch.zeros(1), 0)


def test_local_ops_are_paired_by_id() -> None:
    sends, recvs = [send(3), send(1), send(2)], [recv(1), recv(2), recv(3)]
    pairs = match_local_ops_by_task_id(sends, recvs, "Any", 0)
    assert [(a.task_id, b is c) for (a, b), c in zip(pairs, recvs, strict=True)] == [
        (1, True),
        (2, True),
        (3, True),
    ]
    assert match_local_ops_by_task_id([], [], "Any", 0) == []


@pytest.mark.parametrize(
    ("sends", "recvs", "text"),
    [
        ([None], [1], "requires a task_id"),
        ([1], [None], "requires a task_id"),
        ([1, 2], [1], "unmatched local ops"),
        ([1], [1, 2], "unmatched local ops"),
        ([1, 1], [1, 2], "unmatched local ops"),
        ([1, 2], [1, 1], "unmatched local ops"),
        ([1], [2], "missing local send"),
    ],
)
def test_local_ops_without_partner(sends: list[int], recvs: list[int], text: str) -> None:
    with pytest.raises(RuntimeError, match=text) as raised:
        match_local_ops_by_task_id([send(i) for i in sends], [recv(i) for i in recvs], "Any", 7)
    assert "Any copy service, rank 7" in str(raised.value)


# ---------------------------------------------------------------------------------------------
# Both ends compared.


def agreement_of(
    num_ranks: int,
    sends: dict[tuple[int, int], list[Transfer]],
    recvs: dict[tuple[int, int], list[Transfer]],
    problems: dict[int, str] | None = None,
    excluded: Sequence[int] = (),
) -> list[str]:
    """Error of every rank, "" for nothing; transfers are given by (source, destination)."""
    ranks = RankThreads(num_ranks)
    said = [""] * num_ranks
    lengths: list[int] = []

    def gather(rank_idx: int, payload: bytes) -> list[bytes]:
        items = ranks[rank_idx].all_gather(payload)
        lengths.extend(len(item) for item in items)
        assert len({len(item) for item in items}) == 1
        return [b"" if rank in excluded else item for rank, item in enumerate(items)]

    def main(rank_idx: int) -> None:
        try:
            agree(
                rank_idx,
                [sends.get((rank_idx, dst), []) for dst in range(num_ranks)],
                [recvs.get((src, rank_idx), []) for src in range(num_ranks)],
                (problems or {}).get(rank_idx),
                lambda payload: gather(rank_idx, payload),
            )
        except ValueError as error:
            said[rank_idx] = str(error)

    threads = [threading.Thread(target=main, args=(i,), daemon=True) for i in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive()
    assert max(lengths) <= 1 << 20
    assert len(set(said)) == 1, said
    return said


def test_agreement() -> None:
    transfers = [(4, 16, "torch.float32"), (9, 2, "torch.bfloat16")]
    assert agreement_of(1, {}, {})[0] == ""
    assert agreement_of(3, {}, {})[0] == ""
    assert agreement_of(3, {(0, 2): transfers}, {(0, 2): list(transfers)})[0] == ""


def test_disagreement_says_both_values() -> None:
    sent = [(1, 16, "torch.float32"), (2, 8, "torch.float32"), (5, 1, "torch.int8")]
    received = [(1, 16, "torch.int32"), (3, 8, "torch.float32"), (5, 1, "torch.int8")]
    text = agreement_of(3, {(2, 1): list(sent)}, {(2, 1): list(received)})[0]
    assert text == (
        "task 1: rank 2 sends 16 bytes of torch.float32, rank 1 receives 16 bytes of torch.int32; "
        "rank 2 sends task 2 (8 bytes of torch.float32) to rank 1, which does not receive it; "
        "rank 1 receives task 3 (8 bytes of torch.float32) from rank 2, which does not send it"
    )


def test_one_side_only() -> None:
    text = agreement_of(2, {(0, 1): [(0, 0, "torch.int8")]}, {})[0]
    assert (
        text == "rank 0 sends task 0 (0 bytes of torch.int8) to rank 1, which does not receive it"
    )


def test_disagreement_in_order() -> None:
    sent: list[Transfer] = [(None, 4, "torch.int8"), (None, 8, "torch.int8")]
    text = agreement_of(2, {(0, 1): sent}, {(0, 1): sent[::-1]})[0]
    assert text.startswith("transfer 0 from rank 0 to rank 1: sends 4 bytes")
    text = agreement_of(2, {(0, 1): sent}, {(0, 1): sent[:1]})[0]
    assert text == "rank 0 sends 2 tensors to rank 1, which receives 1"
    with_ids = [(0, 4, "torch.int8"), (1, 8, "torch.int8")]
    text = agreement_of(2, {(0, 1): sent}, {(0, 1): list(with_ids)})[0]
    assert "rank 1 gives task ids, rank 0 gives none" in text


def test_long_lists_are_told_in_short() -> None:
    """Lists of some MiB, in pieces; few of their differences are shown."""
    sent: list[Transfer] = [(i, 4, "torch.float32") for i in range(150_000)]
    received: list[Transfer] = [(i, 4 + (i % 1000 == 999), "torch.float32") for i in range(150_000)]
    text = agreement_of(2, {(1, 0): sent}, {(1, 0): received})[0]
    assert "task 999: rank 1 sends 4 bytes" in text
    assert text.endswith("; and 144 more")


def test_problems_come_first() -> None:
    text = agreement_of(4, {(0, 1): [(1, 1, "x")]}, {}, {1: "é is bad", 3: "so is this"})[0]
    assert text == "rank 1: é is bad; rank 3: so is this"


def test_excluded_ranks_take_part_in_nothing() -> None:
    assert agreement_of(3, {}, {}, excluded=[2])[0] == ""
    text = agreement_of(3, {(0, 2): [(1, 1, "x")]}, {}, excluded=[2])[0]
    assert "rank 0 sends task 1 (1 bytes of x) to rank 2, which does not" in text


# ---------------------------------------------------------------------------------------------
# What is submitted.


class Group:
    """All that a service asks of a process group before it moves something."""

    def __init__(self, rank_idx: int, num_ranks: int) -> None:
        self.rank_idx = rank_idx
        self.num_ranks = num_ranks

    def rank(self) -> int:
        return self.rank_idx

    def size(self) -> int:
        return self.num_ranks


class Queue(QueuedCopyService):
    """Runs nothing."""

    device_types = ("cpu",)

    def __init__(self) -> None:
        super().__init__(Group(1, 3))  # type: ignore[arg-type]

    def run(self) -> None:
        raise NotImplementedError

    def take(self) -> Batch:
        return self._take()


def ids(ops: Sequence[SendOp | RecvOp]) -> list[int | None]:
    return [op.task_id for op in ops]


def test_a_batch_is_sorted_by_pair_and_id() -> None:
    queue = Queue()
    tensor = torch.zeros(2)
    for task_id in (5, 2, 9):
        queue.submit_send(tensor, 2, task_id)
        queue.submit_recv(torch.zeros(2), 0, 10 - task_id)
        queue.submit_recv(torch.zeros(task_id), 1)
    batch = queue.take()
    assert batch.problem is None
    assert [ids(ops) for ops in batch.sends] == [[], [], [2, 5, 9]]
    assert [ids(ops) for ops in batch.recvs] == [[1, 5, 8], [None] * 3, []]
    assert [op.tensor.numel() for op in batch.recvs[1]] == [5, 2, 9]
    empty = queue.take()
    assert (empty.sends, empty.recvs) == ([[], [], []], [[], [], []])


@pytest.mark.parametrize(
    ("destination", "text"),
    [
        (
            torch.zeros(3),
            r"task 1 sends \(4,\) of torch.float32 and receives \(3,\) of torch.float32",
        ),
        (
            torch.zeros(4, dtype=torch.int32),
            r"sends \(4,\) of torch.float32 and receives \(4,\) of",
        ),
        (torch.zeros(2, 2), None),
    ],
)
def test_both_ends_of_a_copy_within_a_rank(destination: torch.Tensor, text: str | None) -> None:
    queue = Queue()
    queue.submit_send(torch.zeros(4), 1, 1)
    queue.submit_recv(destination, 1, 1)
    batch = queue.take()
    pairs = queue._pairs_within(batch)
    if text is None:
        assert batch.problem is None
        assert len(pairs) == 1
    else:
        assert re.search(f"Queue copy service, rank 1: .*{text}", str(batch.problem))


class _Index:
    def __index__(self) -> int:
        return 6


def test_ids_are_integers_of_any_kind() -> None:
    queue = Queue()
    queue.submit_send(torch.zeros(2), 2, _Index())  # type: ignore[arg-type]
    queue.submit_send(torch.zeros(2), 2, (1 << 63) - 1)
    assert ids(queue.take().sends[2]) == [6, (1 << 63) - 1]


def test_a_parameter_is_taken_for_its_values() -> None:
    queue = Queue()
    parameter = torch.nn.Parameter(torch.zeros(2))
    queue.submit_recv(parameter, 0, 1)
    (op,) = queue.take().recvs[0]
    copy_pair(torch.ones(1, 2), op.tensor)
    assert torch.equal(parameter.data, torch.ones(2))


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8)


@pytest.mark.parametrize(
    ("tensor", "rank", "task_id", "error", "text"),
    [
        ([1.0], 0, 1, TypeError, "list"),
        (torch.zeros(2), 3, 1, ValueError, r"\[0, 3\), got 3"),
        (torch.zeros(2), -1, 1, ValueError, "got -1"),
        (torch.zeros(2), True, 1, TypeError, "got True"),
        (torch.zeros(2), 0, "a", TypeError, "'a'"),
        (torch.zeros(2), 0, -1, ValueError, "got -1"),
        (torch.zeros(2), 0, 1 << 63, ValueError, str(1 << 63)),
        (torch.eye(2).to_sparse(), 0, 1, ValueError, "sparse"),
        (torch.zeros(2, device="meta"), 0, 1, ValueError, "meta"),
        (torch.zeros(2, dtype=torch.complex64).conj(), 0, 1, ValueError, "resolve_conj"),
        (quantized(), 0, 1, ValueError, "quantized"),
    ],
)
def test_what_is_refused_at_once_spoils_the_batch(
    tensor: torch.Tensor, rank: int, task_id: int, error: type[Exception], text: str
) -> None:
    queue = Queue()
    for submit in (queue.submit_send, queue.submit_recv):
        with pytest.raises(error, match=text) as raised:
            submit(tensor, rank, task_id)
        batch = queue.take()
        assert batch.problem == str(raised.value)
        assert queue.take().problem is None


def test_what_is_wrong_with_a_batch() -> None:
    queue = Queue()
    tensor = torch.zeros(2)
    queue.submit_send(tensor, 0, 3)
    queue.submit_send(tensor, 0, 3)
    assert queue.take().problem == "sends to rank 0: task_id 3 comes twice"
    queue.submit_recv(torch.zeros(2), 2, 3)
    queue.submit_recv(torch.zeros(2), 2)
    text = "receives from rank 2: 1 have a task_id, such as 3, and 1 have none"
    assert queue.take().problem == text
    # The same id from another rank is another transfer.
    queue.submit_recv(torch.zeros(2), 2, 3)
    queue.submit_recv(torch.zeros(2), 0, 3)
    assert queue.take().problem is None


@pytest.mark.parametrize(
    ("shape", "strides", "is_refused"),
    [
        ((4,), (0,), True),
        ((1, 4), (0, 3), False),
        ((2, 3), (2, 1), True),
        ((3, 2), (2, 3), False),
        ((3, 3), (2, 4), True),
        ((2, 3, 4), (1, 2, 6), False),
        ((5, 2), (10, 3), False),
        ((0, 2), (0, 0), False),
    ],
)
def test_destinations_with_an_element_twice(
    shape: tuple[int, ...], strides: tuple[int, ...], is_refused: bool
) -> None:
    tensor = torch.zeros(100).as_strided(shape, strides)
    places = torch.arange(100).as_strided(shape, strides)
    assert is_refused == (places.unique().numel() < places.numel())
    queue = Queue()
    if is_refused:
        with pytest.raises(ValueError, match="two elements in one place"):
            queue.submit_recv(tensor, 0, 1)
    else:
        queue.submit_recv(tensor, 0, 1)


def test_destinations_that_share_memory() -> None:
    queue = Queue()
    base = torch.zeros(100)
    for task_id, (begin, end) in enumerate([(50, 60), (0, 10), (10, 50), (59, 60), (5, 5)]):
        queue.submit_recv(base[begin:end], task_id % 2, task_id)
    problem = queue.take().problem
    text = "the destinations of tasks 0 (from rank 0) and 3 (from rank 1) share bytes"
    assert problem == text
    for task_id, (begin, end) in enumerate([(50, 60), (0, 10), (10, 50), (5, 5)]):
        queue.submit_recv(base[begin:end], task_id % 2, task_id)
    assert queue.take().problem is None
    queue.submit_recv(base[:3], 1, 4)
    queue.submit_recv(base.view(10, 10)[:, 3], 0, 20)
    assert queue.take().problem is None
    queue.submit_recv(base[:4], 1, 4)
    queue.submit_recv(base.view(10, 10)[:, 3], 0, 20)
    text = "the destinations of tasks 4 (from rank 1) and 20 (from rank 0) share bytes"
    assert queue.take().problem == text


# ---------------------------------------------------------------------------------------------
# Rounds of messages.


def test_both_ends_cut_their_lists_alike() -> None:
    """Every round of a pair has the same transfers at both ends, within the limits."""
    num_ranks = 4
    chance = random.Random(11)
    sizes = {
        (src, dst): [chance.choice([0, 1, 7, 100, 5000]) for _ in range(chance.randrange(60))]
        for src in range(num_ranks)
        for dst in range(num_ranks)
    }
    rounds = []
    for rank_idx in range(num_ranks):
        service = OneRank(None, rank_idx, num_ranks, max_messages=5, max_message_bytes=800)
        batch = Batch(
            [
                [
                    SendOp(i, torch.empty(size, dtype=torch.int8), dst)
                    for i, size in enumerate(sizes[rank_idx, dst])
                ]
                for dst in range(num_ranks)
            ],
            [
                [
                    RecvOp(i, torch.empty(size, dtype=torch.int8), src)
                    for i, size in enumerate(sizes[src, rank_idx])
                ]
                for src in range(num_ranks)
            ],
            set(),
            None,
        )
        rounds.append(list(service._rounds(batch)))
    for src, dst in itertools.permutations(range(num_ranks), 2):
        sent = [[op for op in sends if op.dest_rank == dst] for sends, _ in rounds[src]]
        received = [[op for op in recvs if op.src_rank == src] for _, recvs in rounds[dst]]
        for there, here in itertools.zip_longest(sent, received, fillvalue=()):
            assert ids(there) == ids(here)
            num_bytes = [op.tensor.numel() for op in there]
            assert len(num_bytes) <= 5
            assert len(num_bytes) <= 1 or sum(num_bytes) <= 800
        moved = [op.task_id for ops in sent for op in ops]
        assert moved == [i for i, size in enumerate(sizes[src, dst]) if size > 0]


# ---------------------------------------------------------------------------------------------
# Streams, without a device: who waits for whom.


class FakeStream:
    device = torch.device("cpu")

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


class OneRank(DistributedCopyService):
    """Copies within one rank, and how it would cut messages to others."""

    def __init__(
        self, stream: FakeStream | None, rank_idx: int = 0, num_ranks: int = 1, **limits: int
    ) -> None:
        group = Group(rank_idx, num_ranks)
        limits = {"max_messages": 1, "max_message_bytes": 1, **limits}
        super().__init__(group, group, torch.device("cpu"), stream, **limits)  # type: ignore[arg-type]

    def _gather(self, payload: bytes) -> list[bytes]:
        return [payload]

    def _start(self, sends: object, recvs: object) -> list[torch.distributed.Work]:
        raise NotImplementedError


def test_copies_wait_for_producers(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    side, producer, current = (FakeStream(name, log) for name in ("side", "producer", "current"))

    @contextlib.contextmanager
    def on_stream(stream: FakeStream) -> Iterator[None]:
        log.append(f"enter {stream.name}")
        yield
        log.append(f"leave {stream.name}")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(
        distributed_copy_service,
        "copy_pair",
        lambda src, dst: (log.append("copy"), copy_pair(src, dst)),
    )
    service = OneRank(side)
    target = torch.zeros(3)
    service.submit_send(torch.ones(3), 0, 1)
    service.submit_recv(target, 0, 1)
    service._streams = {producer}  # type: ignore[arg-type]
    service.run()
    assert torch.equal(target, torch.ones(3))
    assert sorted(log[:2]) == ["side waits for current", "side waits for producer"]
    assert log[2:] == ["enter side", "copy", "leave side", "current waits for side"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_nccl_needs_cuda() -> None:
    with pytest.raises(RuntimeError, match="needs a CUDA device"):
        NCCLCopyService()


def test_nvshmem_needs_ranks() -> None:
    with pytest.raises(RuntimeError, match="must be initialized"):
        NVSHMEMCopyService()


def test_nvshmem_connects_in_the_first_run() -> None:
    def rank(context: RankContext) -> None:
        if context.rank_idx == 0:
            NVSHMEMCopyService(context.group).close()  # alone: peers are not asked
        service = NVSHMEMCopyService(context.group, slot_bytes=4096)
        assert service.communicator is None
        service.run()
        assert service.communicator is not None
        service.close()
        service.close()
        assert service.communicator is None
        with pytest.raises(ValueError, match="the service has been closed"):
            service.run()

    run_ranks(rank, 2, mode="threads")


def test_the_base_class_asks_for_little() -> None:
    class Minimal(CopyService):
        def __init__(self) -> None:  # no group
            self.ran = False

        def submit_send(self, src_tensor: object, dest_rank: int, task_id: object = None) -> None:
            raise NotImplementedError

        def submit_recv(self, dest_tensor: object, src_rank: int, task_id: object = None) -> None:
            raise NotImplementedError

        def run(self) -> None:
            self.ran = True

    service = Minimal()
    assert service.requires_process_group_barrier is True
    service.abandon("no reason")
    service.close()
    service.close()
    with pytest.raises(TypeError):
        CopyService()  # type: ignore[abstract]


def test_not_a_member_of_the_group() -> None:
    class Service(Queue):
        def __init__(self) -> None:
            QueuedCopyService.__init__(self, -100)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="got -100"):
        Service()


def test_import_needs_nothing_optional() -> None:
    # Torch's CUDA builds import `cuda` themselves.
    code = (
        "import sys, torch\n"
        "of_torch = set(sys.modules)\n"
        "import moe_comm.resharding.copy_services\n"
        "print([name for name in set(sys.modules) - of_torch if name.split('.')[0] in "
        "('cupy', 'nvshmem', 'cuda', 'megatron', 'nixl')])"
    )
    done = run_python("-c", code)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_nixl_service_says_what_there_is_instead() -> None:
    module = importlib.import_module("moe_comm.resharding.copy_services.nixl_copy_service")
    with pytest.raises(ImportError, match=r"'nixl' needs a library .*: take SymmetricCopyService"):
        module.NixlCopyService(group=None)
