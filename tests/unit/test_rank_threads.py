"""Ranks as threads: nobody waits for ever for one that does not come."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from moe_comm import (
    Communicator,
    EpBuffer,
    EpConfig,
    PeerFailedError,
    PeerTimeoutError,
    RankThreads,
)
from moe_comm.peers import bootstrap

NUM_RANKS = 3
LONG_S = 60.0


def _outcomes(*calls: Callable[[], Any]) -> list[Any]:
    """Result or error of each call, in a thread of its own."""

    def run(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except BaseException as error:  # noqa: BLE001 - compared by the test
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return [*pool.map(run, calls)]


def test_every_thread_hears_every_item() -> None:
    ranks = RankThreads(NUM_RANKS)
    for round_idx in range(20):
        heard = _outcomes(
            *(
                functools.partial(ranks.exchange, rank, (round_idx, rank), LONG_S)
                for rank in range(NUM_RANKS)
            )
        )
        assert heard == [[(round_idx, rank) for rank in range(NUM_RANKS)]] * NUM_RANKS


def test_a_member_that_never_comes_is_named_on_every_rank() -> None:
    ranks = RankThreads(NUM_RANKS)

    def second() -> Any:
        while not ranks._num_rounds[2]:
            time.sleep(0.001)
        return ranks.exchange(0, "a", 0.1)

    # The limit of one is told to those who would wait longer.
    for error in _outcomes(lambda: ranks.exchange(2, "c", LONG_S), second):
        assert isinstance(error, PeerTimeoutError)
        assert error.ranks == (1,)
        assert error.operation == "exchange"
        assert str(error) == "rank 1 did not come to an exchange of threads within 0.1 s of rank 0"


def test_a_member_that_is_late_hears_it_and_all_meet_again() -> None:
    ranks = RankThreads(2)
    with pytest.raises(PeerTimeoutError, match="rank 1 did not come"):
        ranks.exchange(0, "a", 0.01)
    with pytest.raises(PeerTimeoutError, match="rank 1 did not come"):
        ranks.exchange(1, "b", LONG_S)
    assert (
        _outcomes(lambda: ranks.exchange(0, "c", LONG_S), lambda: ranks.exchange(1, "d", LONG_S))
        == [["c", "d"]] * 2
    )


@pytest.mark.parametrize("backend", ["host", "reference"])
def test_the_limit_of_a_communicator_holds_while_it_is_made(backend: str) -> None:
    with pytest.raises(PeerTimeoutError, match="ranks 1, 2 did not come") as caught:
        Communicator(RankThreads(NUM_RANKS)[0], backend=backend, arrival_timeout_s=0.05)
    assert caught.value.ranks == (1, 2)


def test_the_limit_of_a_communicator_holds_in_its_operations() -> None:
    ranks = RankThreads(2)
    config = EpConfig(num_experts=2, num_topk=1, hidden=64, num_max_tokens_per_rank=4)

    def be_rank(rank_idx: int) -> Any:
        with Communicator(ranks[rank_idx], backend="reference", arrival_timeout_s=2.0) as made:
            buffer = EpBuffer(made, config)
            if rank_idx == 1:
                return None
            return buffer.dispatch(
                torch.zeros(1, 64, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.int64)
            )

    error, _ = _outcomes(*(functools.partial(be_rank, rank) for rank in range(2)))
    assert isinstance(error, PeerTimeoutError)
    assert error.ranks == (1,)


def test_whom_a_thread_waits_for_is_named_in_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bootstrap, "WARN_EVERY_S", 0.02)
    with caplog.at_level(logging.WARNING, "moe_comm"), pytest.raises(PeerTimeoutError):
        RankThreads(NUM_RANKS).exchange(1, "b", 0.2)
    assert "for ranks 0, 2 to come to an exchange of threads" in caplog.text


def test_no_warning_before_its_time(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "moe_comm"), pytest.raises(PeerTimeoutError):
        RankThreads(2).exchange(1, "b", 0.05)
    assert not caplog.records


def test_a_thread_that_gives_up_frees_the_others() -> None:
    ranks = RankThreads(2)
    error, _ = _outcomes(lambda: ranks.exchange(0, "a", LONG_S), ranks.abort)
    assert isinstance(error, PeerFailedError)
    assert isinstance(error, threading.BrokenBarrierError)
    with pytest.raises(PeerFailedError, match="another thread of these ranks has given up"):
        ranks.exchange(1, "b", LONG_S)


def test_a_thread_that_is_interrupted_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = RankThreads(2)

    def interrupt(timeout: float | None = None) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ranks._changed, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ranks.exchange(0, "a", LONG_S)
    with pytest.raises(PeerFailedError, match=r"rank 0 gave up .*: KeyboardInterrupt") as caught:
        ranks.exchange(1, "b", LONG_S)
    assert caught.value.ranks == (0,)
