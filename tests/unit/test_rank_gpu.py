"""Shares of a rank's GPU that a communicator and its buffers take, on a machine that pretends to have some."""

from __future__ import annotations

import types
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from moe_comm import Communicator
from moe_comm.peers import cuda_devices
from moe_comm.peers.bootstrap import Bootstrap, RankThreads
from moe_comm.peers.rank_gpu import RankGpu

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A `moe_comm._cuda` with one GPU of 100 SMs, which all ranks share."""
    native = types.SimpleNamespace(
        count_devices=lambda: (1, ""),
        can_reach=lambda device_idx, peer_idx: True,
        describe_device=lambda device_idx: {"uuid": b"gpu", "name": "GPU", "num_sms": 100},
        Heap=types.SimpleNamespace(create=lambda *arguments: ("heap", arguments)),
    )
    monkeypatch.setattr(cuda_devices, "load_cuda_module", lambda: native)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.empty", lambda *arguments, **options: None)
    return native


class Group:
    """A native group that can only be destroyed."""

    def __init__(self) -> None:
        self.is_destroyed = False

    def destroy(self) -> None:
        self.is_destroyed = True


def met(bootstrap: Bootstrap, num_sms: int | None = None, parent: RankGpu | None = None) -> RankGpu:
    gpu = RankGpu(DEVICE, num_sms, parent)
    gpu.learn_peers(bootstrap, range(bootstrap.num_ranks))
    return gpu


def on_every_rank(call: Any, num_ranks: int = 2) -> list[Any]:
    ranks = RankThreads(num_ranks)
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(lambda rank_idx: call(ranks[rank_idx]), range(num_ranks)))


@pytest.mark.usefixtures("native")
def test_a_device_without_number_gets_the_current_one() -> None:
    assert RankGpu(torch.device("cuda"), None, None).device == DEVICE


@pytest.mark.usefixtures("native")
def test_buffers_claim_sms_until_the_gpu_is_full() -> None:
    def be_rank(bootstrap: Bootstrap) -> None:
        gpu = met(bootstrap, num_sms=20)
        claims = [gpu.claim_sms() for _ in range(3)]
        assert [num_sms for num_sms, _ in claims] == [20, 20, 20]
        assert [problem for _, problem in claims[:2]] == ["", ""]
        assert "need 120 SMs; GPU has 100" in claims[2][1]
        for num_sms, _ in claims[1:]:
            gpu.return_sms(num_sms)
        assert gpu.claim_sms() == (20, "")

    on_every_rank(be_rank)


@pytest.mark.usefixtures("native")
def test_children_claim_from_their_parent() -> None:
    def be_rank(bootstrap: Bootstrap) -> None:
        parent = met(bootstrap, num_sms=20)
        child = met(bootstrap, parent=parent)
        own = met(bootstrap, num_sms=5, parent=child)
        assert child.claim_sms() == (20, "")
        assert own.claim_sms() == (5, "")
        num_sms, problem = met(bootstrap, num_sms=26, parent=own).claim_sms()
        assert num_sms == 26
        assert "with 51 SMs each, over all their buffers, need 102 SMs" in problem

    on_every_rank(be_rank)


@pytest.mark.usefixtures("native")
def test_a_child_has_its_parents_heap() -> None:
    def be_rank(bootstrap: Bootstrap) -> None:
        group: Any = Group()
        parent = met(bootstrap)
        parent.make_heap(group, bootstrap, 1 << 20, None)
        child = met(bootstrap, parent=parent)
        child.make_heap(group, bootstrap, None, None)
        assert child.heap is parent.heap
        assert not group.is_destroyed

    on_every_rank(be_rank)


def test_a_heap_that_one_rank_lacks_fails_on_all(native: types.SimpleNamespace) -> None:
    def create(group: Group, *_: object) -> object:
        if group is groups[1]:
            raise RuntimeError("no memory\nand more")
        return "heap"

    native.Heap.create = create
    groups = [Group(), Group()]

    def be_rank(bootstrap: Bootstrap) -> None:
        group: Any = groups[bootstrap.rank_idx]
        with pytest.raises(ValueError, match=r"^rank 1: RuntimeError: no memory$"):
            met(bootstrap).make_heap(group, bootstrap, None, None)
        assert group.is_destroyed

    on_every_rank(be_rank)


def test_gpus_that_do_not_reach_each_other_fail_on_all(native: types.SimpleNamespace) -> None:
    native.can_reach = lambda device_idx, peer_idx: False

    def be_rank(bootstrap: Bootstrap) -> None:
        with pytest.raises(ValueError, match=r"^rank 0: its GPU .* does not reach"):
            met(bootstrap)

    on_every_rank(be_rank)


def test_rows_of_gpus_that_do_not_reach_each_other_pass_through_the_host_unless_asked_not_to(
    native: types.SimpleNamespace,
) -> None:
    native.can_reach = lambda device_idx, peer_idx: False

    def be_rank(bootstrap: Bootstrap) -> str:
        with pytest.raises(ValueError, match=r'does not reach .*; backend="host" needs none'):
            Communicator(bootstrap, "cuda", backend="cuda")
        with Communicator(bootstrap, "cuda", num_sms=4) as communicator:
            assert (communicator.device, communicator.gpu) == (DEVICE, None)
            child = Communicator(bootstrap, "cuda", communicator)
            assert child.backend == "host"
            with pytest.raises(ValueError, match="backend must be \"host\", got 'cuda'"):
                Communicator(bootstrap, "cuda", communicator, backend="cuda")
            # Ranks that survive others go on as they are.
            again = communicator._successor(bootstrap, None)
            assert again.backend == "host"
            return communicator.backend

    with pytest.warns(
        UserWarning, match="the host backend is taken for .*cuda:0: rank 0: its"
    ) as found:
        assert on_every_rank(be_rank) == ["host", "host"]
    assert {each.filename for each in found} == {__file__}


def test_a_warning_that_is_an_error_is_one_on_every_rank(native: types.SimpleNamespace) -> None:
    native.can_reach = lambda device_idx, peer_idx: False

    def be_rank(bootstrap: Bootstrap) -> None:
        with pytest.raises(ValueError, match=r"^rank 0: UserWarning: the host backend is taken"):
            Communicator(bootstrap, "cuda")

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        on_every_rank(be_rank)
