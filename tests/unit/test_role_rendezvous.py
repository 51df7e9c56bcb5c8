"""Rendezvous of processes of several programs as ranks of one group, with threads in their place."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from moe_comm.errors import PeerFailedError, PeerTimeoutError
from moe_comm.peers import role_rendezvous
from moe_comm.peers.role_rendezvous import RoleHost, RoleRank
from tests.helpers.failing_ranks import SHORT_S

ROLES = {"trainer": 2, "engine": 1}
LONG_S = 60.0
PLACES = [("trainer", 0), ("trainer", 1), ("engine", 0)]
Outcome = tuple[int, int, list[str]]


@dataclasses.dataclass
class Meeting:
    """A host, and threads that come to it."""

    host: RoleHost
    pool: ThreadPoolExecutor

    def come(
        self,
        role: str,
        rank: int,
        timeout_s: float = LONG_S,
        then: Callable[[RoleRank], Any] = lambda ranks: ranks.all_gather(f"{ranks.rank_idx}!"),
        **other: Any,
    ) -> Future[Outcome]:
        given = {"key": self.host.key, "roles": ROLES, "version": "1", **other}

        def run() -> Outcome:
            with RoleRank(
                self.host.address,
                given["key"],
                given["roles"],
                (role, rank),
                timeout_s,
                given["version"],
            ) as ranks:
                return ranks.rank_idx, ranks.generation, then(ranks)

        return self.pool.submit(run)

    def await_tickets(self, count: int) -> None:
        """Return once the host has heard of so many."""
        deadline = time.monotonic() + LONG_S
        while self.host._num_seen < count or self.host._unwritten:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    host = RoleHost("127.0.0.1:0", ROLES, "1")
    with ThreadPoolExecutor(8) as pool, contextlib.closing(host):
        yield Meeting(host, pool)


def said(outcome: Future[Outcome]) -> str:
    error = outcome.exception(LONG_S)
    return f"{type(error).__name__}: {error}"


def test_ranks_follow_roles_and_meet_again(meeting: Meeting) -> None:
    for generation in (1, 2):
        # In another order than that of their ranks.
        outcomes = [meeting.come(*place) for place in reversed(PLACES)]
        found = [outcome.result(LONG_S) for outcome in reversed(outcomes)]
        assert found == [(rank, generation, ["0!", "1!", "2!"]) for rank in range(3)]


def test_who_does_not_come_is_named_to_all_that_wait(meeting: Meeting) -> None:
    patient = meeting.come("trainer", 0)
    meeting.await_tickets(1)
    hasty = meeting.come("engine", 0, timeout_s=SHORT_S)
    for outcome in (patient, hasty):
        assert said(outcome).startswith("PeerTimeoutError")
        assert f"trainer 1 did not come within {SHORT_S} s of engine 0" in said(outcome)


def test_a_host_that_refuses_is_heard_by_all_in_whatever_order_they_come(meeting: Meeting) -> None:
    early = meeting.come("trainer", 0)
    meeting.await_tickets(1)
    meeting.host.refuse("the server is full")
    assert said(early) == "ValueError: join: the server is full"
    for outcome in [meeting.come(*place) for place in reversed(PLACES)]:
        assert said(outcome) == "ValueError: join: the server is full"


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"roles": {"trainer": 2, "engine": 3}}, "it expects ranks {'trainer': 2, 'engine': 3}"),
        ({"version": "2"}, "it has moe_comm 2, the host has 1"),
        ({"rank": 7}, "there is no such place"),
        ({"role": "judge"}, "there is no such place"),
    ],
)
def test_one_that_does_not_fit_is_named_to_all_and_they_may_come_again(
    meeting: Meeting, other: dict[str, Any], text: str
) -> None:
    early = meeting.come("trainer", 0)
    meeting.await_tickets(1)
    wrong = meeting.come(**{"role": "engine", "rank": 0, **other})
    assert text in said(wrong)
    # Those that are late hear of it as they come.
    late = [meeting.come("trainer", 1), meeting.come("engine", 0)][: 2 if "ra" in str(other) else 1]
    for outcome in (early, *late):
        assert said(outcome).startswith("ValueError")
        assert text in said(outcome)
    again = [meeting.come(*place) for place in PLACES]
    assert [outcome.result(LONG_S)[0] for outcome in again] == [0, 1, 2]


def test_two_that_live_in_one_place_are_refused_and_all_hear_of_it(meeting: Meeting) -> None:
    outcomes = [meeting.come(*place) for place in (PLACES[0], PLACES[2], PLACES[2])]
    for outcome in outcomes:
        assert "two processes that live are engine 0" in said(outcome)
    assert "two processes that live are engine 0" in said(meeting.come("trainer", 1))


def test_a_stranger_is_refused_and_stops_nobody(meeting: Meeting) -> None:
    early = meeting.come("trainer", 0)
    stranger = meeting.come("engine", 0, key="guessed")
    assert said(stranger).startswith("ValueError")
    assert "another key" in said(stranger)
    others = [meeting.come(*place) for place in PLACES[1:]]
    assert [outcome.result(LONG_S)[0] for outcome in (early, *others)] == [0, 1, 2]


@pytest.mark.clock(usual_s=0.2, limit_s=SHORT_S)
def test_one_that_comes_anew_takes_the_place_of_a_dead_one(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(role_rendezvous, "_LIVENESS_S", SHORT_S)
    silent_ticket(meeting, "engine", 0)
    meeting.await_tickets(1)
    outcomes = [meeting.come(*place) for place in PLACES]
    assert [outcome.result(LONG_S)[0] for outcome in outcomes] == [0, 1, 2]


def silent_ticket(meeting: Meeting, role: str, rank: int) -> None:
    """Leave a ticket of a process that died after it had written it."""
    signed = meeting.host._signed
    number = int(signed.store.add("tickets", 1)) - 1
    place = {"role": role, "rank": rank, "machine": "m", "timeout_s": LONG_S}
    signed.set(f"ticket/{number}", {"version": "1", "roles": ROLES, **place})


@pytest.mark.clock(usual_s=0.2, limit_s=SHORT_S)
def test_one_that_dies_while_the_group_is_made_is_named(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(role_rendezvous, "_LIVENESS_S", SHORT_S)
    outcomes = [meeting.come(*place) for place in PLACES[:2]]
    meeting.await_tickets(2)
    silent_ticket(meeting, "engine", 0)
    for outcome in outcomes:
        error = outcome.exception(LONG_S)
        assert isinstance(error, PeerFailedError)
        assert error.ranks == (2,)
        assert "engine 0, while the group was made: died or stopped" in str(error)


def test_why_one_gives_up_is_told_to_all(meeting: Meeting) -> None:
    def fail(ranks: RoleRank) -> None:
        raise ArithmeticError("no memory")

    outcomes = [meeting.come(*place) for place in PLACES[:2]]
    assert "no memory" in said(meeting.come("engine", 0, then=fail))
    for outcome in outcomes:
        assert "engine 0, while the group was made: ArithmeticError: no memory" in said(outcome)


@pytest.mark.clock(usual_s=0.2, limit_s=SHORT_S)
def test_one_that_does_not_go_on_is_named(meeting: Meeting) -> None:
    waits = threading.Event()
    outcomes = [meeting.come(*place, timeout_s=SHORT_S) for place in PLACES[:2]]
    slow = meeting.come("engine", 0, then=lambda ranks: waits.wait(LONG_S))
    try:
        for outcome in outcomes:
            assert said(outcome).startswith("PeerTimeoutError")
            assert f"engine 0 did not go on within {SHORT_S} s" in said(outcome)
    finally:
        waits.set()
    assert slow.result(LONG_S)[0] == 2


def test_a_host_that_closes_tells_those_that_wait(meeting: Meeting) -> None:
    outcome = meeting.come("trainer", 0)
    meeting.await_tickets(1)
    meeting.host.close()
    assert "the process that hosts has closed" in said(outcome)


def test_a_host_that_is_not_there_is_an_error_that_names_the_address() -> None:
    with pytest.raises(PeerTimeoutError, match=r"nobody listens at 127\.0\.0\.1:9 .* of the world"):
        RoleRank("127.0.0.1:9", "k", ROLES, ("engine", 0), 0.5, "1")


@pytest.mark.parametrize("address", ["", "localhost", ":80", "0.0.0.0:0", "127.0.0.1:70000"])
def test_an_address_that_others_cannot_be_told_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r"address must be \"host:port\""):
        RoleHost(address, ROLES, "1")
