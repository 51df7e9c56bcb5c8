"""The buffers that whoever works on one process group shares."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from moe_comm import Communicator, PeerFailedError, RankThreads
from moe_comm.dispatcher import TokenDispatcher
from moe_comm.dispatcher.megatron import MegatronManager, MegatronTokenDispatcher
from moe_comm.dispatcher.sglang import SglangDispatcher
from moe_comm.dispatcher.torchtitan import TorchtitanTokenDispatcher
from moe_comm.dispatcher.transformers import TransformersExperts, register
from moe_comm.dispatcher.vllm_manager import VllmAll2AllManager
from moe_comm.ep.group_buffers import group_buffers, release_all
from moe_comm.fused_a2a import hybrid_ep_dispatch
from moe_comm.peers import missed_calls
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.routed import make_batches


def test_those_of_a_bootstrap_live_as_long_as_somebody_holds_them() -> None:
    group = RankThreads(1)[0]
    held = group_buffers(group)
    assert group_buffers(group) is held
    former = weakref.ref(held)
    del held
    assert former() is None
    group_buffers(group).destroy()


def use(group: dist.ProcessGroup) -> TokenDispatcher:
    dispatcher = TokenDispatcher(4, group=group)
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
    """A buffer that a layer has destroyed is not handed to the next one."""
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
    release_all()
    *_, last = hybrid_ep_dispatch(mine.x, mine.routing_map, None, context.group, 3)
    assert last.buffer is not other.buffer
    assert last.buffer.communicator is group_buffers(context.group).communicator


def test_what_fused_a2a_keeps_from_call_to_call_is_of_the_call() -> None:
    run_ranks(keep_from_call_to_call, 2)


def work_over_a_given_one(context: RankContext, in_processes: bool) -> None:
    """An object that knows its group alone works over the communicator that was given for it."""
    with Communicator(context.group, backend="reference") as communicator:
        held = group_buffers(communicator)
        assert group_buffers(context.group) is group_buffers(communicator) is held
        with pytest.raises(ValueError, match="num_experts must be >= 1"):
            TokenDispatcher(0, group=context.group)
        assert group_buffers(context.group) is held
        dispatcher = TokenDispatcher(6, group=context.group)
        assert dispatcher.buffer.communicator is communicator
        mine = make_batches([4, 4], 6, 2)[context.rank_idx]
        *_, handle = hybrid_ep_dispatch(mine.x, mine.routing_map, None, context.group, 3)
        assert handle.buffer.communicator is communicator
        held.destroy()
        assert dispatcher.buffer.is_destroyed
        assert not communicator.is_destroyed
        assert group_buffers(communicator) is not held
    if in_processes:  # there None is the default group
        with Communicator(backend="collective") as communicator:
            group_buffers(communicator)
            assert TokenDispatcher(6).buffer.communicator is communicator
    assert TokenDispatcher(6, group=context.group).buffer.backend == "host"


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_a_communicator_that_is_given_is_that_of_its_group(mode: str) -> None:
    run_ranks(work_over_a_given_one, 2, mode == "processes", mode=mode, timeout_s=60.0)


def text_of(context: RankContext, call: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the texts are compared
        call()
    with Communicator(context.group) as other:  # ranks find each other afterwards
        assert other.all_gather(b"x") == [b"x"] * context.num_ranks
    return str(caught.value)


def give_differently(context: RankContext) -> list[str]:
    is_first = context.rank_idx == 0
    one = Communicator(context.group, backend="reference")
    gone = Communicator(context.group)
    if not is_first:
        gone.destroy()
    found = [
        text_of(context, lambda: group_buffers(one if is_first else context.group)),
        text_of(context, lambda: group_buffers(one if is_first else gone)),
    ]
    held = group_buffers(context.group)
    held.get(6)
    found += [
        text_of(
            context, lambda: group_buffers(one if is_first else context.group).get_together("x", 6)
        ),
        text_of(context, lambda: group_buffers(one)),
        text_of(context, lambda: group_buffers(held.communicator, device="cuda")),
    ]
    held.destroy()
    one.destroy()
    return found


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_ranks_that_give_different_communicators_are_told(mode: str) -> None:
    other = (
        "a group has buffers over one communicator for a kind of device: these are over another one, of "
        "backend 'host', the one given is of 'reference'"
    )
    device = "device is 'cuda', the communicator's is cpu"
    for found in run_ranks(give_differently, 2, mode=mode, timeout_s=60.0):
        assert found == [
            "ranks make different things: buffers of a group on cpu over a communicator of backend "
            "'reference' on rank 0 met buffers of a group on cpu on rank 1",
            "rank 1: the communicator has been destroyed",
            f"rank 0: {other}",
            f"rank 0: {other}; rank 1: {other}",
            f"rank 0: {device}; rank 1: {device}",
        ]


def make_apart(context: RankContext) -> str:
    def make() -> object:
        if context.rank_idx:
            return TokenDispatcher(6, group=context.group)
        return Communicator(context.group)

    return text_of(context, make)


def test_ranks_of_which_one_makes_a_communicator_itself_are_told() -> None:
    want = "ranks make different things: a communicator on rank 0 met buffers of a group on cpu on rank 1"
    assert run_ranks(make_apart, 2, timeout_s=60.0) == [want, want]


SURFACES: dict[str, Callable[..., object]] = {
    "group_buffers": group_buffers,
    "TokenDispatcher": lambda **given: TokenDispatcher(4, **given),
    "MegatronManager": lambda **given: MegatronManager(None, 4, **given),
    "from_config": lambda **given: MegatronManager.from_config(None, 4, 2, None, **given),
    "MegatronTokenDispatcher": lambda **given: MegatronTokenDispatcher(4, [0], None, **given),
    "SglangDispatcher": lambda **given: SglangDispatcher(None, 2, **given),
    "VllmAll2AllManager": lambda **given: VllmAll2AllManager(None, **given),
    "Config": lambda **given: TorchtitanTokenDispatcher.Config(num_experts=4, top_k=2, **given),
    "TransformersExperts": lambda **given: TransformersExperts(lambda x: x, 4, **given),
    "register": register,
}


@pytest.mark.parametrize("surface", SURFACES)
def test_where_a_backend_is_chosen_is_said(surface: str) -> None:
    with pytest.raises(
        TypeError, match=r"Communicator\(group, backend=\.\.\.\), which is given to"
    ):
        SURFACES[surface](backend="simt")
    (missed,) = missed_calls.take()
    assert "'backend'" in missed.text
