from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist

from moe_comm import (
    CommunicationError,
    Communicator,
    EpBuffer,
    EpConfig,
    PeerFailedError,
    PeerTimeoutError,
)
from moe_comm.ep.backends.collective import CollectiveBackend
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.configs import ep_config

CONFIG = ep_config(4, 2, 8, 16, dtype=torch.float32)


def tokens_of(rank_idx: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank_idx)
    x = torch.randn(num_tokens, 8, generator=generator)
    return x, torch.randint(0, 4, (num_tokens, 2), generator=generator)


def use_subgroup(context: RankContext) -> bool:
    """Two groups of two ranks, interleaved, each with its own buffers."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    with Communicator(groups[context.rank_idx % 2], backend="collective") as communicator:
        buffer = EpBuffer(communicator, CONFIG)
        x, topk_idx = tokens_of(context.rank_idx, 5)
        result = buffer.dispatch(x, topk_idx)
        is_right = torch.equal(buffer.combine(result.x, result.handle), x + x)
        buffer.destroy()
    return is_right and communicator.num_ranks == 2


def test_ranks_of_a_subgroup() -> None:
    assert run_ranks(use_subgroup, 4) == [True] * 4


def make_buffers(context: RankContext) -> tuple[bool, int]:
    """One buffer after the other, of communicators one after the other, then two at once."""
    for _ in range(3):
        with Communicator(context.group, backend="collective") as communicator:
            backend = CollectiveBackend(communicator, CONFIG)
            first = backend._transport._group
            backend.destroy()
    with Communicator(context.group, backend="collective") as communicator:
        backends = [CollectiveBackend(communicator, CONFIG) for _ in range(2)]
        groups = [backend._transport._group for backend in backends]
        for backend in backends:
            backend.destroy()
    return groups[0] is first, len(set(map(id, groups)))


def test_groups_are_reused_and_not_shared_by_living_buffers() -> None:
    assert run_ranks(make_buffers, 2) == [(True, 2)] * 2


def count_staging_places(context: RankContext) -> list[int]:
    with Communicator(context.group, backend="collective") as communicator:
        buffer = EpBuffer(communicator, CONFIG)
        backend = buffer._backend
        assert isinstance(backend, CollectiveBackend)
        places: dict[str, set[int]] = {}
        for num_tokens in (16, 3, 0, 16, 9):
            x, topk_idx = tokens_of(0, num_tokens)
            result = buffer.dispatch(x, topk_idx)
            buffer.combine(result.x, result.handle)
            for name, memory in backend._rows.staging.items():
                places.setdefault(name, set()).add(memory.data_ptr())
        buffer.destroy()
    return sorted(len(kept) for kept in places.values())


def test_staging_memory_is_kept() -> None:
    for counts in run_ranks(count_staging_places, 2):
        assert counts
        # A combine may need a little more than the dispatch before it, once.
        assert max(counts) <= 2


def lose_a_peer(context: RankContext, with_pending: bool) -> list[str]:
    communicator = Communicator(context.group, backend="collective", arrival_timeout_s=20.0)
    buffer = EpBuffer(communicator, CONFIG)
    x, topk_idx = tokens_of(context.rank_idx, 4)
    if context.rank_idx == 1:
        buffer.dispatch(x, topk_idx)
        os.kill(os.getpid(), signal.SIGKILL)
    raised = []
    # The dispatch that rank 1 took part in may end for others or not.
    for num_dispatches in (2, 1):
        with pytest.raises(CommunicationError) as info:
            for _ in range(num_dispatches):
                buffer.dispatch(x, topk_idx, async_op=with_pending).event.wait()
        raised.append(f"{info.typename} {info.value.operation} {info.value.phase}")
    return raised


@pytest.mark.parametrize("with_pending", [False, True])
def test_a_dead_peer_ends_the_operation_and_every_later_one(with_pending: bool) -> None:
    survivors = run_ranks(lose_a_peer, 3, with_pending, fresh=True, expect_dead=[1])
    for raised in (survivors[0], survivors[2]):
        assert len(raised) == 2
        assert all(
            text.startswith((PeerFailedError.__name__, PeerTimeoutError.__name__))
            for text in raised
        )
        assert all(text.endswith(("dispatch rows", "dispatch data")) for text in raised)


def refuse_asynchronously(context: RankContext) -> list[str]:
    with Communicator(context.group, backend="collective") as communicator:
        buffer = EpBuffer(communicator, CONFIG)
        x, topk_idx = tokens_of(context.rank_idx, 4)
        bad = topk_idx + 4 if context.rank_idx == 1 else topk_idx
        good = [buffer.dispatch(x, topk_idx, async_op=True)]
        wrong = buffer.dispatch(x, bad, async_op=True)
        good.append(buffer.dispatch(x, topk_idx, async_op=True))
        messages = []
        for _ in range(2):
            with pytest.raises(ValueError, match="expert id") as info:
                wrong.event.wait()
            messages.append(str(info.value))
        first, second = good
        assert torch.equal(first.x, second.x)
        buffer.destroy()
    return messages


def test_a_refusal_is_raised_by_every_wait_and_spares_its_neighbours() -> None:
    for messages in run_ranks(refuse_asynchronously, 2):
        assert len(messages) == 2
        assert messages[0] == messages[1]
        assert messages[0].startswith("rank 1: topk_idx[0, 0] = ")


def make_without_a_group(context: RankContext) -> str:
    communicator = Communicator(context.group, backend="collective")
    with pytest.raises(ValueError, match="group of 2 ranks") as info:
        EpBuffer(communicator, CONFIG)
    return str(info.value)


def test_threads_have_no_process_group() -> None:
    assert len(set(run_ranks(make_without_a_group, 2, mode="threads"))) == 1


def test_one_rank_needs_no_process_group() -> None:
    with Communicator(backend="collective") as communicator:
        buffer = EpBuffer(communicator, CONFIG)
        x, topk_idx = tokens_of(0, 6)
        result = buffer.dispatch(x, topk_idx, expert_alignment=4)
        assert torch.equal(buffer.combine(result.x, result.handle), x + x)
        buffer.destroy()


def buffer_of_a_subgroup(context: RankContext) -> list[int]:
    # Rank 0 is in one group more than rank 1.
    dist.new_group([0])
    pair = dist.new_group([0, 1])
    if context.rank_idx == 2:
        return []
    config = EpConfig(num_experts=2, num_topk=1, hidden=8, num_max_tokens_per_rank=2)
    with Communicator(pair, backend="collective") as comm, EpBuffer(comm, config) as buffer:
        x = torch.full((2, 8), float(context.rank_idx), dtype=torch.bfloat16)
        return buffer.dispatch(x, torch.tensor([[0], [1]])).x[:, 0].tolist()


def test_members_of_a_group_may_be_in_any_number_of_others() -> None:
    assert run_ranks(buffer_of_a_subgroup, 3, fresh=True)[:2] == [[0.0, 1.0]] * 2
