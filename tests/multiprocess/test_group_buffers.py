"""The buffers that whoever works on one process group shares."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from moe_comm import PeerFailedError, RankThreads
from moe_comm.dispatcher import TokenDispatcher
from moe_comm.ep.group_buffers import group_buffers, let_go
from moe_comm.fused_a2a import hybrid_ep_dispatch
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.routed import make_batches


def test_those_of_a_bootstrap_live_as_long_as_somebody_holds_them() -> None:
    group = RankThreads(1)[0]
    held = group_buffers(group, backend="host")
    assert group_buffers(group) is held
    former = weakref.ref(held)
    del held
    assert former() is None
    group_buffers(group, backend="host").destroy()


def use(group: dist.ProcessGroup) -> TokenDispatcher:
    dispatcher = TokenDispatcher(4, group=group, backend="host")
    x = torch.ones(3, 16)
    routed = dispatcher.dispatch(x, topk_idx=torch.arange(6).view(3, 2) % 4)
    assert torch.equal(dispatcher.combine(routed.tokens, routed), 2 * x)
    return dispatcher


def drop_and_make_again(context: RankContext) -> None:
    """Rank 0 lets go of a layer at once; on rank 1 it waits in a cycle for the garbage collector."""
    gc.disable()
    group = dist.new_group(range(context.num_ranks))
    layers: list[object] = [use(group)]
    former = weakref.ref(group_buffers(group))
    if context.rank_idx:
        layers.append(layers)
    del layers
    use(group)
    assert group_buffers(group) is former()
    dist.destroy_process_group(group)
    assert former() is not None
    use(dist.new_group(range(context.num_ranks)))
    gc.enable()
    gc.collect()
    assert former() is None


def test_those_of_a_process_group_are_found_on_every_rank_until_it_is_destroyed() -> None:
    run_ranks(drop_and_make_again, 2, fresh=True, timeout_s=60.0)


def destroy_and_make_again(context: RankContext) -> None:
    """What a layer has destroyed is not handed to the next one."""
    group = dist.new_group(range(context.num_ranks))
    former = use(group)
    former.buffer.destroy()
    dist.barrier()
    again = use(group)
    assert again.buffer.communicator is former.buffer.communicator
    again.buffer.communicator.destroy()
    dist.barrier()
    assert use(group).buffer.communicator is not former.buffer.communicator


def test_what_is_destroyed_is_made_again() -> None:
    run_ranks(destroy_and_make_again, 2)


def lose_rank_0_and_make_another(context: RankContext) -> None:
    former = TokenDispatcher(6, group=context.group)
    communicator = former.buffer.communicator
    communicator.all_gather(b"")
    if context.rank_idx == 0:
        communicator.destroy()
        return
    with pytest.raises(PeerFailedError):
        communicator.all_gather(b"")
    communicator.recover()
    again = TokenDispatcher(6, group=context.group)
    assert again.buffer is former.buffer
    routed = again.dispatch(torch.ones(1, 16), topk_idx=torch.tensor([[5]]))
    assert torch.equal(again.combine(routed.tokens, routed), torch.ones(1, 16))


def test_survivors_of_the_first_rank_make_dispatchers() -> None:
    run_ranks(lose_rank_0_and_make_another, 3, mode="threads", timeout_s=60.0)


def keep_the_error(context: RankContext) -> None:
    """An error that one rank keeps, of a group that nobody holds otherwise, keeps no buffers for it."""
    kept = []
    try:
        TokenDispatcher(0 if context.rank_idx == 1 else 4, group=context.group)
    except ValueError as error:
        kept = [error] * (1 - context.rank_idx)
    TokenDispatcher(4, group=context.group)
    assert len(kept) == 1 - context.rank_idx


def test_an_error_that_is_kept_keeps_no_buffers() -> None:
    run_ranks(keep_the_error, 2, mode="threads", timeout_s=30.0)


def keep_from_call_to_call(context: RankContext) -> None:
    mine = make_batches([4, 4], 6, 2)[context.rank_idx]
    wider = torch.nn.functional.pad(mine.routing_map, (0, 2))
    first, *_, handle = hybrid_ep_dispatch(mine.x, mine.routing_map, None, context.group, 3)
    *_, wide = hybrid_ep_dispatch(mine.x, wider, None, context.group, 4)
    assert (handle.buffer.config.num_experts, wide.buffer.config.num_experts) == (6, 8)
    again, *_, same = hybrid_ep_dispatch(mine.x, mine.routing_map, None, context.group, 3)
    assert same.buffer is handle.buffer
    assert torch.equal(again, first)
    group_buffers(context.group).destroy()
    anew, *_, other = hybrid_ep_dispatch(mine.x, mine.routing_map, None, context.group, 3)
    assert other.buffer is not handle.buffer
    assert torch.equal(anew, first)
    let_go()
    *_, last = hybrid_ep_dispatch(mine.x, mine.routing_map, None, context.group, 3)
    assert last.buffer is not other.buffer
    assert last.buffer.communicator is group_buffers(context.group).communicator


def test_what_fused_a2a_keeps_from_call_to_call_is_of_the_call() -> None:
    run_ranks(keep_from_call_to_call, 2)
