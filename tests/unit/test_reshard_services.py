"""What copy services decide before anything moves."""

from __future__ import annotations

import contextlib
import subprocess
import sys
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
from moe_comm.resharding.copy_services.agreement import Transfer, agree
from moe_comm.resharding.copy_services.distributed_copy_service import DistributedCopyService
from moe_comm.resharding.copy_services.queued_copy_service import (
    Batch,
    QueuedCopyService,
    copy_pair,
)

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
    """What every rank raises, "" for nothing; transfers are given by (source, destination)."""
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
        thread.join(30)
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


class Queue(QueuedCopyService):
    """Runs nothing."""

    device_types = ("cpu",)

    def __init__(self) -> None:
        class Group:
            def rank(self) -> int:
                return 1

            def size(self) -> int:
                return 3

        super().__init__(Group())  # type: ignore[arg-type]

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
        queue.submit_recv(tensor, 0, 10 - task_id)
        queue.submit_recv(torch.zeros(task_id), 1)
    batch = queue.take()
    assert batch.problem is None
    assert [ids(ops) for ops in batch.sends] == [[], [], [2, 5, 9]]
    assert [ids(ops) for ops in batch.recvs] == [[1, 5, 8], [None] * 3, []]
    assert [op.tensor.numel() for op in batch.recvs[1]] == [5, 2, 9]
    empty = queue.take()
    assert (empty.sends, empty.recvs) == ([[], [], []], [[], [], []])


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


def quantised() -> torch.Tensor:
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
        (quantised(), 0, 1, ValueError, "quantised"),
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
    queue.submit_recv(tensor, 2, 3)
    queue.submit_recv(tensor, 2)
    text = "receives from rank 2: 1 have a task_id, such as 3, and 1 have none"
    assert queue.take().problem == text
    # The same id from another rank is another transfer.
    queue.submit_recv(tensor, 2, 3)
    queue.submit_recv(tensor, 0, 3)
    assert queue.take().problem is None


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
    """Copies within one rank, on a stream."""

    def __init__(self, stream: FakeStream) -> None:
        class Group:
            def rank(self) -> int:
                return 0

            def size(self) -> int:
                return 1

        group = Group()
        super().__init__(
            group,  # type: ignore[arg-type]
            group,  # type: ignore[arg-type]
            stream,  # type: ignore[arg-type]
            max_messages=1,
            max_message_bytes=1,
        )

    def _all_gather(self, payload: bytes) -> list[bytes]:
        return [payload]

    def _start(self, sends: object, recvs: object) -> list[torch.distributed.Work]:
        raise NotImplementedError

    def _is_on_wire_device(self, tensor: torch.Tensor) -> bool:
        raise NotImplementedError

    def _empty_on_wire_device(self, num_bytes: int) -> torch.Tensor:
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

    with pytest.raises(ValueError, match="not a member"):
        Service()


def test_import_needs_nothing_optional() -> None:
    code = (
        "import sys, moe_comm.resharding.copy_services\n"
        "print([name for name in sys.modules if name.split('.')[0] in "
        "('cupy', 'nvshmem', 'cuda', 'megatron', 'nixl')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
