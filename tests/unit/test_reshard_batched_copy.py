"""Batched copies between ranks that are threads of this process."""

from __future__ import annotations

import functools
import itertools
import math
import struct
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moe_comm
from moe_comm.resharding.copy_services.batched_copy import BatchedCopy, CopyItem
from moe_comm.resharding.copy_services.changed_blocks import (
    PieceChecksums,
    block_checksums,
    checksum,
)
from tests.helpers.rank_threads import on_ranks

SLOT_BYTES = 1 << 10
"""Small, so that pieces of a few kilobytes need many slots."""


@dataclass(frozen=True)
class Piece:
    """One copy: its ends, and how each end lies in memory."""

    sender: int
    receiver: int
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    sent_as: str = "plain"
    received_as: str = "plain"
    in_heap: bool = False


def in_process(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def lay_out(values: torch.Tensor, form: str, memory: Any = in_process) -> torch.Tensor:
    """A tensor equal to `values` that lies in memory in one of several ways."""
    if form == "expanded":
        one = memory(1, dtype=values.dtype)
        one[0] = values.flatten()[0] if values.numel() else 0
        return one.expand(values.shape) if values.dim() else one[0]
    shape = values.shape
    if form == "plain" or values.dim() == 0:
        target = memory(*shape, dtype=values.dtype)
    elif form == "transposed":
        target = memory(*reversed(shape), dtype=values.dtype).permute(*reversed(range(len(shape))))
    elif form == "columns":
        target = memory(*shape[:-1], shape[-1] + 3, dtype=values.dtype)[..., 2 : shape[-1] + 2]
    elif form == "spread":
        target = memory(*(2 * size for size in shape), dtype=values.dtype)
        target = target[tuple(slice(1, None, 2) for _ in shape)]
    else:
        raise AssertionError(form)
    target.copy_(values)
    return target


def values_of(piece: Piece, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    num_bytes = math.prod(piece.shape) * piece.dtype.itemsize
    if piece.sent_as == "expanded":
        return torch.full(piece.shape, seed % 7).to(piece.dtype)
    flat = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)
    return flat.view(piece.dtype).view(piece.shape)


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    left, right = (
        torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1)).view(torch.uint8)
        for tensor in (left, right)
    )
    return torch.equal(left, right)


def run_pieces(
    pieces: list[Piece], num_ranks: int, num_runs: int = 2, num_threads: int = 1, **options: Any
) -> list[Any]:
    """Copies every piece `num_runs` times with other values and checks every byte; the last stats."""

    def body(comm: moe_comm.Communicator) -> Any:
        engine = BatchedCopy(comm, **{"slot_bytes": SLOT_BYTES, "num_slots": 3, **options})
        sends: list[CopyItem] = []
        recvs: list[CopyItem] = []
        received = {}
        for idx, piece in enumerate(pieces):
            task_id = (idx * 2_654_435_761) % (1 << 62)  # in no order
            if piece.sender == comm.rank_idx:
                sends.append(
                    (task_id, lay_out(values_of(piece, idx), piece.sent_as), piece.receiver)
                )
            if piece.receiver == comm.rank_idx:
                blank = torch.zeros(piece.shape, dtype=piece.dtype)
                memory = comm.empty if piece.in_heap else in_process
                received[idx] = lay_out(blank, piece.received_as, memory)
                recvs.append((task_id, received[idx], piece.sender))
        prepared = engine.prepare(sends, recvs)
        assert prepared.problem is None
        read, hashed = PieceChecksums(sends), PieceChecksums(sends)
        for round_idx in range(num_runs):
            for task_id, tensor, _ in sends:
                idx = next(
                    i for i in range(len(pieces)) if i * 2_654_435_761 % (1 << 62) == task_id
                )
                values = values_of(pieces[idx], idx + 1000 * round_idx)
                if pieces[idx].sent_as == "expanded" and tensor.dim():
                    tensor.as_strided((min(1, tensor.numel()),), (1,)).copy_(values.flatten()[:1])
                else:
                    tensor.copy_(values)
            stats = engine.run(prepared, with_checksums=round_idx % 2 == 0)
            sums = [checksum(tensor) for _, tensor, _ in sends]
            assert read.compute([], num_threads or 1).tolist() == sums
            assert hashed.compute([prepared], num_threads or 1).tolist() == sums
            for idx, tensor in received.items():
                assert same_bytes(tensor, values_of(pieces[idx], idx + 1000 * round_idx)), (
                    round_idx,
                    pieces[idx],
                )
        return stats

    return on_ranks(num_ranks, body, num_threads=num_threads)


# ---------------------------------------------------------------------------------------------
# What is copied.

FORMS = ["plain", "transposed", "columns", "spread"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("in_heap", [False, True], ids=["slots", "heap"])
@pytest.mark.parametrize("received_as", FORMS)
@pytest.mark.parametrize("sent_as", [*FORMS, "expanded"])
def test_any_strides(sent_as: str, received_as: str, in_heap: bool) -> None:
    shapes = [(7, 5, 3), (129,), (), (0, 3), (40, 33), (2, 3, 4, 5, 2), (1, 1)]
    dtypes = [torch.bfloat16, torch.float64, torch.uint8, torch.complex64]
    pieces = [
        Piece(
            sender=idx % 2,
            receiver=(idx // 2) % 2,
            shape=shape,
            dtype=dtypes[idx % len(dtypes)],
            sent_as=sent_as,
            received_as=received_as,
            in_heap=in_heap,
        )
        for idx, shape in enumerate(shapes * 4)
    ]
    run_pieces(pieces, 2)


@pytest.mark.parametrize("in_heap", [False, True], ids=["slots", "heap"])
@pytest.mark.parametrize("num_elements", [31, 32, 511, 512, 513, 1536, 1537, 100_001])
def test_pieces_larger_and_smaller_than_slots(num_elements: int, in_heap: bool) -> None:
    pieces = [Piece(0, 1, (num_elements,), in_heap=in_heap), Piece(1, 0, (5,), in_heap=in_heap)]
    run_pieces(pieces, 2)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_many_tiny_pieces(num_threads: int) -> None:
    pieces = [
        Piece(i % 3, (i + i // 3) % 3, (i % 90,), torch.uint8, in_heap=i % 5 == 0)
        for i in range(600)
    ]
    run_pieces(pieces, 3, num_threads=num_threads)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_large_pieces_with_ordinary_slots(num_threads: int) -> None:
    pieces = [
        Piece(i % 4, (i * 3 + 1) % 4, (1 << 18, 3), in_heap=i % 2 == 0, received_as=FORMS[i % 3])
        for i in range(8)
    ]
    run_pieces(pieces, 4, num_threads=num_threads, slot_bytes=None, num_slots=None)


def test_one_slot_and_one_rank() -> None:
    run_pieces([Piece(0, 1, (5000,)), Piece(1, 0, (5000,))], 2, slot_bytes=64, num_slots=1)
    run_pieces([Piece(0, 0, (5000,)), Piece(0, 0, (3, 4), received_as="transposed")], 1)


def test_nothing_to_do() -> None:
    run_pieces([], 3)
    run_pieces([Piece(0, 1, (0,)), Piece(2, 1, (3, 0))], 3)


def test_stats_and_memory() -> None:
    through_slots = [Piece(0, 1, (40_000,)), Piece(1, 2, (30_000,))]
    in_place = [Piece(0, 2, (20_000,), in_heap=True)]
    local = [Piece(0, 0, (10_000,))]
    stats = run_pieces(through_slots + in_place + local, 3)
    assert [one.slot_bytes for one in stats] == [80_000, 60_000, 0]
    assert [one.direct_bytes for one in stats] == [40_000, 0, 0]
    assert [one.local_bytes for one in stats] == [20_000, 0, 0]
    assert all(0 < one.copy_ns <= one.total_ns for one in stats)

    def body(comm: moe_comm.Communicator) -> int:
        with BatchedCopy(comm, slot_bytes=4096, num_slots=2) as engine:
            before = comm.heap_stats().live_bytes
            peer = 1 - comm.rank_idx
            data, target = torch.ones(300_000), torch.zeros(300_000)
            prepared = engine.prepare([(1, data, peer)], [(1, target, peer)])
            engine.run(prepared)
            assert bool(target.all())
            return comm.heap_stats().live_bytes - before

    for extra_bytes in on_ranks(2, body):
        assert 2 * 4096 <= extra_bytes <= 4 * 4096  # and what is in front of them and beside


def test_what_several_receive_goes_through_the_same_slots() -> None:
    # More sets of receivers than a sender can offer slots to.
    sets = [each for size in (2, 3, 4) for each in itertools.combinations(range(1, 5), size)]

    def body(comm: moe_comm.Communicator) -> None:
        with BatchedCopy(comm, slot_bytes=4096, num_slots=2) as engine:
            sources = [torch.arange(3000 + 100 * idx) for idx in range(len(sets))]
            sources[-1] = torch.arange(40_000).view(200, 200).T
            sends: list[CopyItem] = []
            received: dict[int, torch.Tensor] = {}
            for idx in range(len(sets)):
                if comm.rank_idx == 0:
                    sends += [(idx, sources[idx], peer) for peer in sets[idx]]
                    sends.append((100 + idx, sources[idx], sets[idx][0]))
                elif comm.rank_idx in sets[idx]:
                    received[idx] = torch.zeros_like(sources[idx])
                    if comm.rank_idx == sets[idx][0]:
                        received[100 + idx] = torch.zeros(sources[idx].shape, dtype=torch.int64)
            prepared = engine.prepare(sends, [(idx, each, 0) for idx, each in received.items()])
            for number in range(3):
                for source in sources:
                    source.add_(number)
                stats = engine.run(prepared, with_checksums=True)
                assert stats.slot_bytes == sum(tensor.nbytes for _, tensor, _ in sends)
                for idx, each in received.items():
                    assert torch.equal(each, sources[idx % 100]), (number, idx)
                sums = PieceChecksums(sends).compute([prepared], 1).tolist()
                assert sums == [checksum(tensor) for _, tensor, _ in sends]

    on_ranks(5, body)


def test_slots_are_as_large_as_what_goes_through_them() -> None:
    def body(comm: moe_comm.Communicator) -> int:
        with BatchedCopy(comm, slot_bytes=1 << 16, num_slots=4) as engine:
            before = comm.heap_stats().live_bytes
            for num_elements in (64, 1 << 16, 128):
                data, peers = torch.ones(num_elements, dtype=torch.uint8), range(comm.num_ranks)
                targets = [torch.zeros_like(data) for _ in peers]
                engine.run(
                    engine.prepare(
                        [(comm.rank_idx, data, peer) for peer in peers],
                        [(peer, targets[peer], peer) for peer in peers],
                    )
                )
                assert all(map(torch.all, targets))
            return comm.heap_stats().live_bytes - before

    # Those of three peers are one, of which the largest run needed a quarter.
    assert all(1 << 16 <= extra_bytes < 2 << 16 for extra_bytes in on_ranks(4, body))


piece_strategy = st.builds(
    Piece,
    sender=st.integers(0, 2),
    receiver=st.integers(0, 2),
    shape=st.lists(st.integers(0, 9), max_size=4).map(tuple),
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]),
    sent_as=st.sampled_from([*FORMS, "expanded"]),
    received_as=st.sampled_from(FORMS),
    in_heap=st.booleans(),
)


@settings(max_examples=60)
@given(
    pieces=st.lists(piece_strategy, max_size=25),
    slot_bytes=st.sampled_from([64, 128, 448, 4096]),
    num_slots=st.integers(1, 4),
    num_threads=st.integers(1, 2),
)
def test_random_pieces(
    pieces: list[Piece], slot_bytes: int, num_slots: int, num_threads: int
) -> None:
    run_pieces(pieces, 3, num_threads=num_threads, slot_bytes=slot_bytes, num_slots=num_slots)


def test_prepared_copies_take_turns() -> None:
    """Each rank may run another of its prepared copies; orders of earlier runs mean nothing."""

    def body(comm: moe_comm.Communicator) -> None:
        engine = BatchedCopy(comm, slot_bytes=256)
        peer = 1 - comm.rank_idx
        block = torch.arange(4 * 500).view(4, 500)
        target = torch.zeros(4, 500, dtype=torch.int64)
        recvs = [(i, target[i], peer) for i in range(4)]
        own = engine.prepare([(i, block[i], peer) for i in range(4)], recvs)
        # The same tasks from memory in another order.
        turned = block.flip(0).contiguous()
        other = engine.prepare([(i, turned[3 - i], peer) for i in range(4)], recvs)
        for choice in range(12):
            target.zero_()
            engine.run((own, other)[choice % 2 if comm.rank_idx == 0 else choice // 3 % 2])
            assert torch.equal(target, block), choice

    on_ranks(2, body)


def test_a_child_shares_the_heap_and_other_operations_go_on() -> None:
    config = moe_comm.EpConfig(num_experts=4, num_topk=1, hidden=32, num_max_tokens_per_rank=16)

    def body(comm: moe_comm.Communicator) -> None:
        child = moe_comm.Communicator(comm.bootstrap, parent=comm)
        with moe_comm.EpBuffer(child, config) as buffer, BatchedCopy(comm) as engine:
            for round_idx in range(5):
                x = torch.full((8, 32), float(round_idx), dtype=torch.bfloat16)
                topk_idx = torch.arange(8).view(8, 1) % 4
                pending = buffer.dispatch(x, topk_idx, async_op=True)
                peer = 1 - comm.rank_idx
                data = torch.full((3000,), round_idx + comm.rank_idx)
                target = child.empty(3000, dtype=torch.int64)
                engine.run(engine.prepare([(0, data, peer)], [(0, target, peer)]))
                assert (target == round_idx + peer).all()
                pending.event.wait()
                combined = buffer.combine(pending.x, pending.handle)
                assert torch.equal(combined, x)
            child.bootstrap.all_gather(None)

    on_ranks(2, body)


# ---------------------------------------------------------------------------------------------
# What is refused: on every rank, with the same words, and the next run works.


def errors_of(
    sends: dict[int, list[CopyItem]], recvs: dict[int, list[CopyItem]], num_ranks: int = 3
) -> str:
    """The one message that all ranks get. Nothing may have been written."""
    targets = [tensor for items in recvs.values() for _, tensor, _ in items]
    before = [tensor.clone() for tensor in targets]

    def body(comm: moe_comm.Communicator) -> str:
        engine = BatchedCopy(comm, slot_bytes=64)
        rank_idx, peer = comm.rank_idx, (comm.rank_idx + 1) % num_ranks
        prepared = engine.prepare(sends.get(rank_idx, []), recvs.get(rank_idx, []))
        with pytest.raises(ValueError, match="rank") as caught:
            engine.run(prepared)
        with pytest.raises(ValueError, match="rank") as again:
            engine.run(prepared)
        assert str(caught.value) == str(again.value)
        target = torch.zeros(100)
        good = engine.prepare(
            [(3, torch.full((100,), 1.0 + rank_idx), peer)],
            [(3, target, (rank_idx - 1) % num_ranks)],
        )
        engine.run(good)
        assert bool((target == 1 + (rank_idx - 1) % num_ranks).all())
        return str(caught.value)

    messages = on_ranks(num_ranks, body)
    assert len(set(messages)) == 1, messages
    for tensor, values in zip(targets, before, strict=True):
        assert same_bytes(tensor, values)
    return messages[0]


def numbers(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(count).to(dtype)


INTEGERS = torch.zeros(4, dtype=torch.int32)
MEMORY = torch.zeros(20)
# By a name what ranks send and receive, and what all are told.
WRONG: dict[str, tuple[dict[int, list[CopyItem]], dict[int, list[CopyItem]], str]] = {
    "a send without receive": (
        {0: [(4, numbers(8), 1), (5, numbers(3), 1)]},
        {1: [(4, torch.zeros(8), 0)]},
        "rank 0: task 5: rank 0 sends 12 bytes of float32 to rank 1, which does not receive it",
    ),
    "a receive without send": (
        {0: [(4, numbers(8), 1)]},
        {1: [(4, torch.zeros(8), 0), (9, torch.zeros(2, dtype=torch.int64), 2)]},
        "rank 2: task 9: rank 1 receives 16 bytes of int64 from rank 2, which does not send it",
    ),
    "local ends that do not meet": (
        {2: [(1, numbers(4), 2)]},
        {2: [(1, torch.zeros(5), 2)]},
        "rank 2: task 1: rank 2 sends 16 bytes, rank 2 receives 20",
    ),
    "sizes and dtypes": (
        {0: [(4, numbers(8), 1), (5, numbers(4), 2)], 1: [(6, numbers(2), 0)]},
        {0: [(6, INTEGERS[:2], 1)], 1: [(4, torch.zeros(9), 0)], 2: [(5, INTEGERS, 0)]},
        "rank 0: task 4: rank 0 sends 32 bytes, rank 1 receives 36 (and 1 more); "
        "rank 1: task 6: rank 1 sends float32, rank 0 receives int32",
    ),
    "shared bytes": (
        {},
        {0: [(4, MEMORY[:12], 1), (5, MEMORY[10:], 2)]},
        "rank 0: the destinations of task 4 from rank 1 and task 5 from rank 2 share 8 bytes",
    ),
    "rank": (
        {},
        {1: [(4, torch.zeros(8), 3)]},
        "rank 1: task 4: the receive names rank 3, ranks are 0 to 2",
    ),
    "negative rank": (
        {},
        {1: [(4, torch.zeros(8), -1)]},
        "rank 1: task 4: the receive names rank -1, ranks are 0 to 2",
    ),
    "twice": (
        {},
        {1: [(4, torch.zeros(8), 0), (4, torch.zeros(8), 0)]},
        "rank 1: task 4 is in the receives of rank 1 twice for rank 0",
    ),
    "expanded": (
        {},
        {1: [(4, torch.zeros(1).expand(8), 0)]},
        "rank 1: task 4: the destination shares bytes with itself (32 bytes lie in 4)",
    ),
    "dimensions": (
        {},
        {1: [(4, torch.zeros((4,) * 9)[(slice(0, 4, 2),) * 9], 0)]},
        "rank 1: task 4 of the receives: a tensor has 9 dimensions that cannot be merged, "
        "at most 8 can be copied; make it contiguous",
    ),
    "conjugate": (
        {},
        {1: [(4, torch.zeros(8, dtype=torch.complex64).conj(), 0)]},
        "rank 1: task 4 of the receives: a tensor's conjugate or negative is not in its memory; "
        "resolve it first",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_copies_that_are_wrong(wrong: str) -> None:
    sends, recvs, told = WRONG[wrong]
    assert errors_of(sends, recvs) == told


@pytest.mark.parametrize("side", ["source", "destination"])
def test_copies_of_tensors_that_were_freed_or_moved_since(side: str) -> None:
    def body(comm: moe_comm.Communicator) -> None:
        engine = BatchedCopy(comm)
        memory = torch.full((2, 24), 7.0)
        source, destination = memory[:, 8:].unbind()
        changed = source if side == "source" else destination
        if comm.rank_idx == 1:
            changed.data = torch.full((24,), 7.0)[8:]
        copies = engine.prepare([(4, source, comm.rank_idx)], [(4, destination, comm.rank_idx)])
        engine.run(copies)
        storage = changed.untyped_storage()
        if comm.rank_idx == 1:
            storage.resize_(0)
        text = r"task 4: the tensor of shape \(16,\) has elements in bytes \[32, 96\) of a storage of 0"
        with pytest.raises(ValueError, match=f"rank 1: {text}"):
            engine.run(copies)
        if comm.rank_idx == 1:
            with pytest.raises(ValueError, match="a storage of 0 bytes, which was freed or cut"):
                checksum(changed)
            storage.resize_(96)
            elsewhere = torch.zeros(24)
            changed.data = elsewhere[8:]
        with pytest.raises(ValueError, match=r"rank 1: .*has moved since its copies were prepared"):
            engine.run(copies)
        engine.run(engine.prepare([(4, source, comm.rank_idx)], [(4, destination, comm.rank_idx)]))

    on_ranks(2, body)


@pytest.mark.parametrize(
    ("error", "is_counted"),
    [
        (moe_comm.PeerFailedError("rank 1 died"), True),
        (KeyboardInterrupt(), True),
        (ValueError("rank 1: no receiver"), False),
        (moe_comm.CapacityError("the heap is full"), False),
    ],
)
def test_writes_of_a_run_that_fails(error: BaseException, is_counted: bool) -> None:
    class _Failing:
        def run(self, prepared: object, with_checksums: bool) -> None:
            raise error

    def body(comm: moe_comm.Communicator) -> None:
        engine = BatchedCopy(comm)
        saved = torch.ones(4)
        copies = engine.prepare([(4, torch.zeros(4), 0)], [(4, saved, 0)])
        native, engine._native = engine._native, _Failing()  # type: ignore[assignment]
        with pytest.raises(type(error)):
            engine.run(copies)
        engine._native = native
        assert saved._version == is_counted
        with torch.inference_mode():
            uncounted = torch.ones(4)
        engine.run(engine.prepare([(4, torch.zeros(4), 0)], [(4, uncounted, 0)]))
        assert uncounted.eq(0).all()

    on_ranks(1, body)


def test_items_that_are_no_items() -> None:
    def body(comm: moe_comm.Communicator) -> None:
        engine = BatchedCopy(comm)
        item = torch.zeros(1)
        wrong: list[Any] = [
            [(1, 2)],
            [("one", item, 0)],
            [(1 << 70, item.to_sparse(), 0)],
            [(4, item.to("meta"), 0)],
            "x",
        ]
        for items in wrong:
            given = items if comm.rank_idx == 1 else []
            with pytest.raises(
                ValueError, match=r"rank 1: .*\(task_id, tensor, peer_rank\)|sparse|device meta"
            ):
                engine.run(engine.prepare(given, []))
        with pytest.raises(ValueError, match="rank 1: prepared must be PreparedCopies, got 'x'"):
            engine.run("x" if comm.rank_idx == 1 else engine.prepare([], []))  # type: ignore[arg-type]
        engine.run(engine.prepare([], []))

    on_ranks(2, body)


@pytest.mark.parametrize("options", [{"slot_bytes": "x"}, {"num_slots": 1 << 70}, {"no_such": 1}])
def test_making_one_wrongly_is_told(options: dict[str, Any]) -> None:
    def body(comm: moe_comm.Communicator) -> None:
        with pytest.raises((TypeError, ValueError), match=next(iter(options))):
            BatchedCopy(comm, **(options if comm.rank_idx == 1 else {}))
        BatchedCopy(comm).destroy()

    on_ranks(2, body)


def test_reject_is_heard_by_all() -> None:
    def body(comm: moe_comm.Communicator) -> None:
        engine, other = BatchedCopy(comm), BatchedCopy(comm)
        data, target = torch.ones(10), torch.zeros(10)
        peer = 1 - comm.rank_idx
        prepared = engine.prepare([(0, data, peer)], [(0, target, peer)])
        for _ in range(3):
            with pytest.raises(ValueError, match=r"^rank 1: the plan is torn$"):
                if comm.rank_idx == 1:
                    engine.reject("the plan is torn")
                engine.run(prepared)
            assert not target.any()
        with pytest.raises(ValueError, match=r"^rank 0: this is; rank 1: that is$"):
            engine.reject("this is" if comm.rank_idx == 0 else "that is")
        with pytest.raises(
            ValueError, match=r"^rank 0: gave up, without a reason; rank 1: gave up"
        ):
            engine.reject("")
        with pytest.raises(ValueError, match=r"^rank 0: no \\udcff; rank 1: no"):
            engine.reject("no \udcff")
        for length in range(3000, 3004):
            # Cut, but not within a character.
            with pytest.raises(ValueError, match=r"^rank 0: x*(\U0001f600)+; rank 1: "):
                engine.reject("x" * (length - 3000) + "\U0001f600" * length)
        with pytest.raises(ValueError, match=r"^rank 0: .*prepared by another BatchedCopy$"):
            engine.run(other.prepare([], []) if comm.rank_idx == 0 else prepared)
        engine.run(prepared)
        assert bool(target.all())

    on_ranks(2, body)


def test_slots_that_do_not_fit() -> None:
    def body(comm: moe_comm.Communicator) -> None:
        engine = BatchedCopy(comm, slot_bytes=1 << 20, num_slots=8)
        data, target = torch.ones(2 << 20), torch.zeros(2 << 20)
        peer = 1 - comm.rank_idx
        through_slots = engine.prepare([(0, data, peer)], [(0, target, peer)])
        with pytest.raises(moe_comm.CapacityError, match=r"rank 0: .*; rank 1: ") as caught:
            engine.run(through_slots)
        assert caught.value.ranks == (0, 1)
        assert not target.any()
        in_heap = comm.empty(10, dtype=torch.float32)
        engine.run(engine.prepare([(0, data[:10], peer)], [(0, in_heap, peer)]))
        assert bool(in_heap.all())

    on_ranks(2, body, max_heap_bytes=4 << 20)


def test_a_heap_that_is_full() -> None:
    def body(comm: moe_comm.Communicator) -> None:
        held: list[torch.Tensor] = []
        if comm.rank_idx == 1:
            for num_bytes in (1 << 20, 1 << 12, 64):
                with pytest.raises(moe_comm.CapacityError):
                    while True:
                        held.append(comm.empty(num_bytes, dtype=torch.uint8))
        with pytest.raises(moe_comm.CapacityError, match=r"^rank 1: the heap of rank 1") as caught:
            BatchedCopy(comm)
        assert caught.value.ranks == (1,)
        held.clear()
        engine = BatchedCopy(comm)
        engine.run(engine.prepare([], []))

    on_ranks(3, body, max_heap_bytes=4 << 20)


def test_arguments() -> None:
    def body(comm: moe_comm.Communicator) -> None:
        for slot_bytes in (0, -64, 63):
            with pytest.raises(ValueError, match="slot_bytes must be a positive multiple of 64"):
                BatchedCopy(comm, slot_bytes=slot_bytes)
        with pytest.raises(ValueError, match="num_slots must be >= 1"):
            BatchedCopy(comm, num_slots=0)
        with pytest.raises(ValueError, match="num_slots is 2 on rank 0 and 3 on rank 1"):
            BatchedCopy(comm, num_slots=2 + comm.rank_idx)
        with pytest.raises(ValueError, match=f"4 slots of {1 << 62} bytes are beyond any machine"):
            BatchedCopy(comm, slot_bytes=1 << 62)

    on_ranks(2, body)


def test_destroyed() -> None:
    def body(comm: moe_comm.Communicator) -> None:
        engine = BatchedCopy(comm)
        prepared = engine.prepare([], [])
        engine.run(prepared)
        if comm.rank_idx == 0:
            engine.destroy()
            engine.destroy()
        with pytest.raises(ValueError, match="destroyed"):
            engine.run(prepared)

    on_ranks(2, body)


# ---------------------------------------------------------------------------------------------
# Checksums.


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "shape", [(), (0,), (1,), (63,), (17, 9), (5000, 3), (3, 5, 7, 2), (2, 3, 1001)], ids=str
)
def test_checksum_is_of_the_logical_bytes(shape: tuple[int, ...], form: str) -> None:
    values = values_of(Piece(0, 0, shape, torch.float32), 1)
    assert checksum(lay_out(values, form)) == checksum(values)
    if values.numel():
        assert checksum(values.reshape(-1).view(torch.uint8)) == checksum(values)


def test_checksum_depends_on_every_byte_and_its_place() -> None:
    data = torch.randint(0, 256, (700,), dtype=torch.uint8)
    sums = {checksum(data)}
    for position in range(700):
        changed = data.clone()
        changed[position] ^= 1 << position % 8
        sums.add(checksum(changed))
    assert len(sums) == 701
    for count in range(700):
        sums.add(checksum(data[:count]))
    assert len(sums) == 1401
    zeros = {checksum(torch.zeros(count, dtype=torch.uint8)) for count in range(200)}
    assert len(zeros) == 200
    blocks = torch.randint(0, 256, (6, 64), dtype=torch.uint8)
    orders = {checksum(blocks[torch.randperm(6)]) for _ in range(50)}
    assert len(orders) > 40


ODD = 0x9E3779B97F4A7C15
BLOCK_BYTES = 16384


def absorb(lane: int, word: int) -> int:
    lane = ((lane ^ word) * ODD) % (1 << 64)
    return lane ^ lane >> 29


def hash_of_block(data: bytes, block_idx: int) -> int:
    data += bytes(-len(data) % 256)
    lanes = [absorb(ODD, idx) for idx in range(32)]
    for idx, (word,) in enumerate(struct.iter_unpack("<Q", data)):
        lanes[idx % 32] = absorb(lanes[idx % 32], word)
    for idx in range(8, 32):
        lanes[idx] = absorb(absorb(lanes[idx - 8], 0), lanes[idx])
    return functools.reduce(absorb, [block_idx, *lanes[24:], 0], ODD)


def documented_checksum(data: bytes) -> int:
    starts = range(0, len(data), BLOCK_BYTES)
    hashes = [
        hash_of_block(data[start : start + BLOCK_BYTES], block_idx)
        for block_idx, start in enumerate(starts)
    ]
    return functools.reduce(absorb, [len(data), 0], sum(hashes) % (1 << 64))


@pytest.mark.parametrize("num_bytes", [0, 2, 2002, BLOCK_BYTES, 3 * BLOCK_BYTES + 1002])
def test_checksum_is_as_documented(num_bytes: int) -> None:
    tensor = torch.arange(num_bytes // 2, dtype=torch.int16)
    data = tensor.view(torch.uint8).numpy().tobytes()
    assert checksum(tensor) == documented_checksum(data)


@pytest.mark.parametrize("form", ["plain", "columns", "transposed"])
@pytest.mark.parametrize(("num_rows", "block_bytes"), [(0, 65536), (700, 65536), (9000, 32768)])
def test_checksums_of_blocks_are_those_of_the_changed_bytes(
    num_rows: int, block_bytes: int, form: str
) -> None:
    values = torch.randint(0, 256, (num_rows, 700), dtype=torch.uint8)
    tensor = lay_out(values, form)
    data = values.numpy().tobytes()
    sums = block_checksums(tensor, block_bytes, num_threads=3)
    hashes = [
        hash_of_block(data[start : start + BLOCK_BYTES], block_idx)
        for block_idx, start in enumerate(range(0, len(data), BLOCK_BYTES))
    ]
    at_a_time = block_bytes // BLOCK_BYTES
    assert sums.tolist() == [
        sum(hashes[first : first + at_a_time]) % (1 << 64)
        for first in range(0, len(hashes), at_a_time)
    ]
    for _ in range(20 if num_rows else 0):
        at = int(torch.randint(values.numel(), ()))
        tensor[at // 700, at % 700] ^= 1 << int(torch.randint(8, ()))
        changed = block_checksums(tensor, block_bytes)
        assert (changed != sums).nonzero()[0].tolist() == [at // block_bytes]
        sums = changed


def test_checksums_of_wanted_blocks_leave_the_others() -> None:
    first, second = torch.zeros(5 << 14), torch.ones(7 << 13, dtype=torch.int16).view(7, -1).T
    pieces = PieceChecksums([(0, first, 0), (1, second, 0)])
    sums = pieces.compute_blocks(2)
    assert sums.tolist() == [*block_checksums(first), *block_checksums(second)]
    wanted = torch.rand(len(sums)) < 0.5
    found = pieces.compute_blocks(
        2, sums=torch.full((len(sums),), 7).numpy().view("uint64"), wanted=wanted.numpy()
    )
    assert found.tolist() == [
        int(its) if wants else 7 for its, wants in zip(sums, wanted, strict=True)
    ]


def test_checksums_of_blocks_that_cannot_be() -> None:
    for block_bytes in (0, 100, 65537):
        with pytest.raises(ValueError, match=f"block_bytes must be .*, got {block_bytes}"):
            block_checksums(torch.zeros(3), block_bytes)
    pieces = PieceChecksums([(0, torch.zeros(3), 0)])
    with pytest.raises(ValueError, match="sums must have 8 bytes, got 16"):
        pieces.compute_blocks(1, sums=torch.zeros(2, dtype=torch.int64).numpy().view("uint64"))
    for function in (checksum, block_checksums):
        with pytest.raises(ValueError, match="must be in CPU memory, got device meta"):
            function(torch.zeros(3, device="meta"))


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize(("sent_as", "received_as"), [("plain", "columns"), ("columns", "plain")])
def test_sources_cut_into_parts_are_hashed_whole(
    sent_as: str, received_as: str, num_threads: int
) -> None:
    """Parts of a megabyte, and slots, end within blocks and within runs, of which some are long."""
    shapes = [(700, 2100), (3 << 20,), (41, 77), (5000, 130)]
    pieces = [
        Piece(0, 1, shape, torch.uint8, sent_as, received_as, in_heap)
        for shape in shapes
        for in_heap in (False, True)
    ]
    run_pieces(pieces, 2, num_threads=num_threads, slot_bytes=24 << 10)


def test_checksums_of_sent_bytes_are_those_of_the_last_run() -> None:
    def body(comm: moe_comm.Communicator) -> None:
        engine = BatchedCopy(comm)
        peer = 1 - comm.rank_idx
        source, target = torch.zeros(5000), torch.empty(5000)
        prepared = engine.prepare([(7, source, peer)], [(7, target, peer)])
        pieces = PieceChecksums([(7, source, peer)])
        elsewhere = [
            PieceChecksums([(7, source[:4999], peer)]),
            PieceChecksums([(7, source[1:], peer)]),
            PieceChecksums([(8, source, peer)]),
            PieceChecksums([(7, source, comm.rank_idx)]),
            PieceChecksums([(7, source, 5)]),
        ]
        before = checksum(source)
        engine.run(prepared, with_checksums=True)
        source += 1
        after = checksum(source)
        assert pieces.compute([prepared], 1).tolist() == [before], "what was sent, not read again"
        assert pieces.compute([], 1).tolist() == [after]
        reread = [int(each.compute([prepared], 1)[0]) for each in elsewhere]
        assert reread == [checksum(source[:4999]), checksum(source[1:]), after, after, after]
        engine.run(prepared)
        assert pieces.compute([prepared], 1).tolist() == [after], "the last run hashed nothing"
        engine.run(prepared, with_checksums=True)
        source += 1
        with pytest.raises(ValueError, match="given up"):
            if comm.rank_idx == 0:
                engine.reject("given up")
            engine.run(prepared, with_checksums=True)
        failed = comm.rank_idx == 1  # the other has not begun another run of its own
        assert (pieces.compute([prepared], 1).tolist() == [checksum(source)]) == failed
        engine.destroy()

    on_ranks(2, body)
