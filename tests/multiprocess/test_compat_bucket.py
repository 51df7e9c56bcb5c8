"""`deep_ep.BucketBuffer`: its collectives beside sums that are worked out here, bit for bit."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_comm import RankThreads
from moe_comm.compat import deep_ep
from moe_comm.compat.deep_ep import BucketBuffer, BufferAllocator
from moe_comm.testing import RankContext, run_ranks
from tests.helpers import deep_ep_oracle as oracle

GUARD = 12345.0
SIZE = "allocation_plan_or_num_bytes"
ROW = 2048  # float32 elements of the longest row that travels
# Elements of a rank's part: less than a row, no multiple of 16 bytes, exactly rows, and more.
PARTS = (1, 13, ROW, 4 * ROW, 3 * ROW + 8)

# By name: the parameters in the order in which callers without names pass them.
ORDERS = {
    "__init__": "group allocation_plan_or_num_bytes sl_idx num_gpu_timeout_secs explicitly_destroy",
    "all_gather": "srcs dsts group num_sms",
    "reduce_scatter": "srcs comm_precision scale group num_sms",
    "all_reduce": "srcs scale group num_sms",
    "barrier": "wait_comm_stream with_cpu_sync sequential group",
    "get_theoretical_num_sms": "op group",
}


@pytest.mark.parametrize("name", ORDERS)
def test_parameters_are_in_the_order_of_callers(name: str) -> None:
    parameters = list(inspect.signature(getattr(BucketBuffer, name)).parameters)
    assert parameters == ["self", *ORDERS[name].split()]


def given(rank_idx: int, size: int, round_idx: int = 0) -> torch.Tensor:
    """Values of a rank: float32 whose sums depend on their order."""
    generator = torch.Generator().manual_seed(100 * round_idx + rank_idx)
    return torch.randn(size, generator=generator, dtype=torch.float32) * 10.0**rank_idx


def summed(parts: list[torch.Tensor], scale: float = 1.0) -> torch.Tensor:
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total = total + part.float()
    return total * scale


class Arena:
    """Tensors of a storage with guards around them."""

    def __init__(self, group: Any, sizes: list[int]) -> None:
        plan = BufferAllocator()
        self.places = [plan.allocate((size + 24,), torch.float32) for size in sizes]
        self.buffer = BucketBuffer(group, plan)
        for place in self.places:
            place.fill_(GUARD)
        self.tensors = [place[8:-16] for place in self.places]

    def check_guards(self) -> None:
        for place in self.places:
            assert (place[:8] == GUARD).all()
            assert (place[-16:] == GUARD).all()


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Given:
    """One tensor or several of an arena, and what every rank has in them."""

    def __init__(self, context: RankContext, arena: Arena, tensors: Any, round_idx: int) -> None:
        self.context = context
        self.arena = arena
        self.given = tensors
        self.tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        # By tensor, what every rank has.
        self.inputs = [
            [given(rank, len(tensor), 10 * round_idx + idx) for rank in range(context.num_ranks)]
            for idx, tensor in enumerate(self.tensors)
        ]

    def filled(self) -> Any:
        for tensor, inputs in zip(self.tensors, self.inputs, strict=True):
            tensor.copy_(inputs[self.context.rank_idx])
        return self.given

    def like(self, tensors: list[torch.Tensor]) -> Any:
        """As many as were given."""
        return tensors[0] if isinstance(self.given, torch.Tensor) else tensors

    def check(self, results: Any, right: list[torch.Tensor], begin: int = 0) -> None:
        """Bits and places; `begin` is a part of every tensor."""
        assert isinstance(results, torch.Tensor) == isinstance(self.given, torch.Tensor)
        listed = [results] if isinstance(results, torch.Tensor) else results
        for tensor, result, expected in zip(self.tensors, listed, right, strict=True):
            assert result.shape == expected.shape
            assert torch.equal(result.view(torch.int32), expected.view(torch.int32))
            assert result.data_ptr() == tensor.data_ptr() + begin * result.nbytes
        self.arena.check_guards()


def check_reductions(its: Given, buffer: BucketBuffer) -> None:
    num_ranks, rank = its.context.num_ranks, its.context.rank_idx
    for precision, scale in (("fp32", 1.0), ("fp32", -0.3), ("bf16", 0.25)):
        event = buffer.reduce_scatter(its.filled(), precision, scale)
        assert event.num_sms == 6
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        sums = [summed([each.to(dtype) for each in inputs], scale) for inputs in its.inputs]
        its.check(event.wait(), [each.view(num_ranks, -1)[rank] for each in sums], rank)
        assert event.wait() is None
    for scale in (1.0, 0.25):
        event = buffer.all_reduce(its.filled(), scale, num_sms=8)
        assert event.num_sms == 8
        its.check(event.wait(), [summed(inputs, scale) for inputs in its.inputs])


def check_gathers(its: Given, buffer: BucketBuffer) -> None:
    num_ranks, rank = its.context.num_ranks, its.context.rank_idx
    right = [
        torch.cat([each.view(num_ranks, -1)[idx] for idx, each in enumerate(inputs)])
        for inputs in its.inputs
    ]
    its.filled()
    srcs = [tensor.view(num_ranks, -1)[rank] for tensor in its.tensors]
    its.check(buffer.all_gather(its.like(srcs)).wait(), right)
    # Sources that lie elsewhere and are gone before the wait, of another dtype.
    elsewhere = its.like([src.clone().view(torch.int32) for src in srcs])
    for tensor in its.tensors:
        tensor.fill_(GUARD)
    event = buffer.all_gather(elsewhere, its.given)
    del elsewhere
    its.check(event.wait(), [each.view(torch.int32) for each in right])


def check_order(its: Given, buffer: BucketBuffer) -> None:
    """Calls find what the calls before them write, and nobody has waited for."""
    right = [summed(inputs, 0.5) for inputs in its.inputs]
    num_ranks, rank = its.context.num_ranks, its.context.rank_idx
    parts = its.like([tensor.view(num_ranks, -1)[rank] for tensor in its.tensors])
    first = buffer.reduce_scatter(its.filled(), scale=0.5)
    second = buffer.all_gather(parts)
    its.check(first.wait(), [each.view(num_ranks, -1)[rank] for each in right], rank)
    its.check(second.wait(), right)
    buffer.all_reduce(its.filled(), 0.5)
    buffer.barrier()
    its.check(its.given, right)


def check_all(context: RankContext, backend: str) -> None:
    # DeepEP's own programs run with this default.
    with oracle.backend_of_group(context, backend), default_dtype(torch.bfloat16):
        arena = Arena(context.group, [context.num_ranks * part for part in PARTS])
        for round_idx, tensors in enumerate([*arena.tensors, arena.tensors, arena.tensors[1:2]]):
            its = Given(context, arena, tensors, round_idx)
            check_reductions(its, arena.buffer)
            check_gathers(its, arena.buffer)
            check_order(its, arena.buffer)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("backend", ["reference", "collective", "host"])
def test_collectives_give_the_sums_in_rank_order(num_ranks: int, backend: str) -> None:
    run_ranks(check_all, num_ranks, backend)


def check_groups(context: RankContext) -> None:
    """Calls of several groups on one storage, some of them in flight together."""
    rank = context.rank_idx
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[rank // 2]
    buffer = BucketBuffer([dist.group.WORLD, pair], 2 << 20, explicitly_destroy=True)
    assert [each.get_physical_domain_size() for each in buffer.contexts or ()] == [(1, 4), (1, 2)]
    ours, theirs = buffer.storage.view(torch.float32)[:16].view(2, 8)
    ours.fill_(1 + rank)
    theirs.fill_(1 + rank)
    with pytest.raises(ValueError, match="group must be one of the 2"):
        buffer.all_reduce(ours)
    first = buffer.all_reduce(ours, group=dist.group.WORLD)
    second = buffer.all_reduce(theirs, group=pair)
    assert (second.wait() == (3 if rank < 2 else 7)).all()
    assert (first.wait() == 10).all()
    buffer.barrier(group=pair)
    deep_ep.comm.barrier(buffer, context_idx=1)
    text = "context_idx must be None or in .0, 2."
    with pytest.raises(ValueError, match=text):
        deep_ep.comm.barrier(buffer, context_idx=2 if rank == 3 else 0)
    with buffer.session() as session:
        session.allocate((4,), group=pair)
        with pytest.raises(ValueError, match=r"one group: this one is for groups\[1\]"):
            buffer.all_reduce(ours, group=dist.group.WORLD)
    buffer.destroy()
    buffer.destroy()
    assert (buffer.storage, buffer.contexts, buffer.main_context) == (None, None, None)
    with pytest.raises(ValueError, match="destroyed"):
        buffer.all_reduce(ours, group=pair)
    assert (theirs == (3 if rank < 2 else 7)).all()  # tensors stay


def test_several_groups_share_a_storage() -> None:
    run_ranks(check_groups, 4)


def check_session(context: RankContext, backend: str) -> None:
    num_ranks, rank = context.num_ranks, context.rank_idx
    part = 3 * ROW + 8
    inputs = [given(each, num_ranks * part).view(-1, 4) for each in range(num_ranks)]
    mine, total = inputs[rank], summed(inputs).view(-1)
    own = slice(rank * part, (rank + 1) * part)
    gathered = torch.cat([its.view(-1)[:part] for its in inputs])
    with oracle.backend_of_group(context, backend):
        buffer = BucketBuffer(context.group, 2 << 20)
        begin, end = buffer.storage.data_ptr(), buffer.storage.data_ptr() + buffer.num_bytes
        with buffer.session():
            source = mine.clone()
            src = source.view(-1)[:part]
            dst = torch.full((num_ranks, part), GUARD)
            event = buffer.all_gather(src, dst)
            assert event.wait() is dst
            results = [
                (dst, gathered),
                (buffer.all_gather(src).wait(), gathered),
                (buffer.reduce_scatter(source).wait(), total[own]),
                (buffer.all_reduce([source]).wait()[0], total),
            ]
            for result, right in results:
                assert torch.equal(result.view(-1), right)
                assert result is dst or begin <= result.data_ptr() < end
            assert torch.equal(source, mine)  # it is not written
            with pytest.raises(ValueError, match="one session at a time"), buffer.session():
                pass
        # The storage begins again; what is allocated there is taken in place.
        with buffer.session() as session:
            whole, other = session.allocate([(num_ranks, part), (num_ranks * part // 4, 4)])
            assert whole.data_ptr() == begin
            assert other.data_ptr() == begin + -(-whole.nbytes // 64) * 64
            whole[rank].copy_(src)
            other.copy_(mine)
            assert torch.equal(buffer.all_gather(whole[rank]).wait(), gathered)
            assert torch.equal(whole.view(-1), gathered)
            assert torch.equal(buffer.all_reduce(other).wait(), total)
            assert torch.equal(other.view(-1), total)
            used = session.num_allocated_bytes
            # On one rank it is full, which every rank hears of and goes on.
            if rank == 1:
                session.allocate((buffer.num_bytes - used,), torch.uint8)
            with pytest.raises(RuntimeError, match=f"rank 1: a session.* storage has {2 << 20}"):
                buffer.all_reduce(source)
            with pytest.raises(RuntimeError, match="storage has"):
                session.allocate((buffer.num_bytes,), torch.uint8)
            if rank != 1:
                assert session.num_allocated_bytes == used
            assert torch.equal(buffer.all_gather(src, dst).wait().view(-1), gathered)
        for _ in range(2):
            with session:
                first = session.allocate((4,))
                assert isinstance(first, torch.Tensor)
                assert first.data_ptr() == begin
        with pytest.raises(ValueError, match="within its `with` block"):
            session.allocate((4,))
        with pytest.raises(ValueError, match=r"srcs\[0\] must lie in the storage"):
            buffer.all_reduce(source)


@pytest.mark.parametrize("backend", ["reference", "host"])
def test_a_session_takes_what_lies_elsewhere(backend: str) -> None:
    run_ranks(check_session, 2, backend)


Call = Callable[[BucketBuffer, torch.Tensor], object]
# Name: (what the others call, what one rank does, type, a piece of the message).
MISTAKES: dict[str, tuple[Call, Call, type[Exception], str]] = {
    "no tensor": (reduce := lambda b, t: b.reduce_scatter(t), lambda b, t: b.reduce_scatter([t, 3]), TypeError, r"srcs\[1\] must be a tensor, got int"),
    "none": (reduce, lambda b, t: b.reduce_scatter([]), ValueError, "srcs must be a tensor or several, got none"),
    "dtype": (reduce, lambda b, t: b.reduce_scatter(t.view(torch.int32)), TypeError, "must be torch.float32, got torch.int32"),
    "strides": (reduce, lambda b, t: b.reduce_scatter(t[::2]), ValueError, r"contiguous, got strides \(2,\)"),
    "empty": (reduce, lambda b, t: b.reduce_scatter(t[:0]), ValueError, r"must have elements, got shape \(0,\)"),
    "odd": (reduce, lambda b, t: b.reduce_scatter(t[:3]), ValueError, "must divide by 2 ranks, got 3"),
    "elsewhere": (reduce, lambda b, t: b.reduce_scatter(t.clone()), ValueError, "must lie in the storage"),
    "device": (reduce, lambda b, t: b.reduce_scatter(t.to("meta")), ValueError, "must be on cpu, got meta"),
    "precision": (reduce, lambda b, t: b.reduce_scatter(t, "fp16"), ValueError, "fp32 or bf16, got 'fp16'"),
    "scale": (reduce, lambda b, t: b.reduce_scatter(t, scale="1"), TypeError, "scale must be a float"),
    "sms": (reduce, lambda b, t: b.reduce_scatter(t, num_sms=-1), ValueError, "num_sms must be >= 0, got -1"),
    "twice": (reduce, lambda b, t: b.reduce_scatter([t, t]), ValueError, "tensors 0 and 1 of a call share bytes"),
    "keyword": (reduce, lambda b, t: b.reduce_scatter(t, precision="fp32"), TypeError, "unexpected keyword argument 'precision'"),
    "sums": (lambda b, t: b.all_reduce(t), lambda b, t: b.all_reduce(t.double()), ValueError, "must lie in the storage"),
    "gather sms": (gather := lambda b, t: b.all_gather(t[:8], t[:16]), lambda b, t: b.all_gather(t[:8], t[:16], num_sms=2), ValueError, "must be None or 0, got 2"),
    "dsts": (gather, lambda b, t: b.all_gather(t[:8], [t[:16], t[16:32]]), ValueError, "dsts must be as many as srcs, 1, got 2"),
    "size": (gather, lambda b, t: b.all_gather(t[:8], t[:24]), ValueError, "2 times the 32 bytes of its source, got 96"),
    "target": (gather, lambda b, t: b.all_gather(t[:8], torch.zeros(16)), ValueError, r"dsts\[0\] must lie in the storage"),
    "source": (lambda b, t: b.all_gather(t[:8]), lambda b, t: b.all_gather(t.clone()), ValueError, "or come with dsts"),
    "flag": (lambda b, t: b.barrier(), lambda b, t: b.barrier(2), TypeError, "wait_comm_stream must be a bool, got 2"),
    "barrier": (lambda b, t: b.barrier(), lambda b, t: b.barrier(meet=1), TypeError, "unexpected keyword argument 'meet'"),
}  # fmt: skip
# Arguments that are right by themselves and not the same on all ranks.
DIFFERENCES: dict[str, tuple[Call, Call, str]] = {
    "sizes": (reduce, lambda b, t: b.reduce_scatter(t[:8]), r"srcs is \['64 x torch.float32'\] on rank"),
    "number": (reduce, lambda b, t: b.reduce_scatter([t[:8], t[8:16]]), "reduce_scatter differently: srcs is"),
    "precisions": (reduce, lambda b, t: b.reduce_scatter(t, "bf16"), "precision is 'fp32' on rank"),
    "scales": (reduce, lambda b, t: b.reduce_scatter(t, scale=0.5), "scale is 1.0 on rank"),
    "calls": (reduce, lambda b, t: b.all_reduce(t), "different calls: rank . in BucketBuffer"),
}  # fmt: skip


def check_mistakes(context: RankContext) -> None:
    """One rank errs, the other calls what it should; then both do it right."""
    with oracle.backend_of_group(context, "host"):
        buffer = BucketBuffer(context.group, 2 << 20)
        tensor = buffer.storage.view(torch.float32)[:64]
        for culprit in range(2):
            for name, (right, wrong, kind, text) in MISTAKES.items():
                with pytest.raises(
                    (TypeError, ValueError), match=f"rank {culprit}: .*{text}"
                ) as caught:
                    (wrong if context.rank_idx == culprit else right)(buffer, tensor)
                assert caught.type is kind, (name, caught.value)
            for right, other, text in DIFFERENCES.values():
                with pytest.raises(
                    ValueError,
                    match=text.replace("'fp32' on rank", "'(fp32|bf16)' on rank")
                    .replace("1.0 on", "(1.0|0.5) on")
                    .replace("'64 x", "'(64|8) x"),
                ):
                    (other if context.rank_idx == culprit else right)(buffer, tensor)
            tensor.fill_(1)
            assert (buffer.all_reduce(tensor).wait() == 2).all()


def test_a_mistake_of_one_rank_is_raised_on_all() -> None:
    run_ranks(check_mistakes, 2)


def check_making(context: RankContext) -> None:
    rank = context.rank_idx

    def plan(*shape: int) -> BufferAllocator:
        made = BufferAllocator()
        made.allocate(shape, torch.float32)
        return made

    used = plan(4)
    BucketBuffer(context.group, used)
    wrong: list[tuple[Any, type[Exception], str]] = [
        (0, ValueError, "must be >= 1, got 0"),
        (2.5, TypeError, "must be an int, got 2.5"),
        (BufferAllocator(), ValueError, "plan tensors with elements, got 0 bytes"),
        (used, ValueError, "a BufferAllocator belongs to one buffer"),
    ]
    for value, kind, text in wrong:
        with pytest.raises(kind, match=f"rank 1: .*{text}"):
            BucketBuffer(context.group, value if rank == 1 else 2 << 20)
    with pytest.raises(
        ValueError, match=r"BucketBuffer on cpu of \[\(\(3, 5\), 'torch.float32'\)\] on rank 0"
    ):
        BucketBuffer(context.group, plan(5, 3) if rank else plan(3, 5))
    # The next call tells what Python cannot bind.
    with pytest.raises(TypeError, match="num_bytes" if rank else "rank 1: .*num_bytes"):
        BucketBuffer(context.group, **({"num_bytes": 5} if rank else {SIZE: 2 << 20}))
    BucketBuffer(context.group, plan(3, 5))


def test_ranks_make_the_same_buffer_or_none() -> None:
    run_ranks(check_making, 2)


def test_what_a_buffer_says_of_itself(capsys: pytest.CaptureFixture[str]) -> None:
    group = RankThreads(1)[0]
    with pytest.raises(ValueError, match="got an empty one"):
        BucketBuffer([], 5)
    buffer = BucketBuffer(group, 100)
    assert isinstance(buffer, deep_ep.BufferBase)
    assert buffer.get_context_idx() == buffer.get_context_idx(group) == 0
    ops = ("all_gather", "reduce_scatter", "all_reduce")
    assert [buffer.get_theoretical_num_sms(op) for op in ops] == [0, 6, 4]
    with pytest.raises(ValueError, match=r"op must be one of all_gather.*got 'gather'"):
        buffer.get_theoretical_num_sms("gather")
    buffer.print_memory_usage()
    assert capsys.readouterr().out == "rank 0: BucketBuffer of 100 bytes\n"
    assert deep_ep.get_physical_domain_size(buffer) == (1, 1)
    assert deep_ep.comm.get_logical_domain_size(buffer, 0) == (1, 1)
    with pytest.raises(TypeError, match="allow_hybrid_mode must be a bool, got 2"):
        deep_ep.get_logical_domain_size(group, 2)
