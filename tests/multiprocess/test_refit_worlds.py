"""Trainers and engines that are processes of different programs: default groups, deaths, restarts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_comm.resharding import RefitWorld
from tests.helpers.refit_worlds import Program

SIZES = {"num_trainers": 2, "num_engines": 2}
PLACES = [(role, rank) for role in ("trainer", "engine") for rank in range(2)]


@pytest.fixture
def info() -> Iterator[dict[str, Any]]:
    with RefitWorld.host("127.0.0.1:0", **SIZES) as host:
        yield dict(host.info)


@contextlib.contextmanager
def programs(
    odd: dict[tuple[str, int], dict[str, Any]], **more: Any
) -> Iterator[dict[tuple[str, int], Program]]:
    """Trainers 0, 1 and engines 0, 1; `odd` has more arguments for some of them. None is left."""
    started: dict[tuple[str, int], Program] = {}
    try:
        for place in PLACES:
            given = {"role": place[0], "rank": place[1], **more, **odd.get(place, {})}
            if "victim" in given:
                given["victim"] = started[given["victim"]].pid
            started[place] = Program(**given)
        yield started
    finally:
        for program in started.values():
            program.end()


@pytest.mark.parametrize("transport", ["symmetric", pytest.param("gloo", marks=pytest.mark.full)])
def test_two_programs_refit_with_and_without_default_groups(
    info: dict[str, Any], transport: str, tmp_path: Path
) -> None:
    info["transport"] = transport
    more = {"store": str(tmp_path / "s")}
    odd = {("trainer", 0): more, ("trainer", 1): more}
    with programs(odd, info=info, versions=[7, 8]) as started:
        for program in started.values():
            assert program.outcome() == [[7, [], [7, 7]], [8, [], [8, 8]]]


@pytest.mark.parametrize(
    ("phase", "shares_memory"),
    [pytest.param("begin", False, marks=pytest.mark.full), ("commit", False), ("commit", True)],
)
def test_an_engine_that_was_killed_comes_back_and_gets_the_whole(
    info: dict[str, Any], phase: str, shares_memory: bool
) -> None:
    odd = {("engine", 1): {"dies": phase, "rejoins": 0}}
    with programs(
        odd, info=info, versions=[7, 8], rejoins=1, shares_memory=shares_memory
    ) as started:
        assert started["engine", 1].outcome() is None
        again = Program(
            info=info, role="engine", rank=1, versions=[7, 8], shares_memory=shares_memory
        )
        try:
            whole = [[7, [], [7, 7]], [8, [], [8, 8]]]
            for place in PLACES[:3]:
                (kind, text, _), *found = started[place].outcome()
                assert kind == "PeerFailedError", text
                assert "rank 3 is engine 1" in text
                assert found == whole
            assert again.outcome() == whole
        finally:
            again.end()


@pytest.mark.parametrize(
    ("transport", "shares_memory", "deltas"),
    [("symmetric", True, "blocks"), ("symmetric", False, "checked"), ("gloo", False, "checked")],
)
def test_refits_after_the_first_one_bring_what_changed(
    info: dict[str, Any], transport: str, shares_memory: bool, deltas: str
) -> None:
    info["transport"] = transport
    more = {"shares_memory": shares_memory, "deltas": deltas}
    with programs({}, info=info, versions=[7, 7, 8], **more) as started:
        for program in started.values():
            whole = [7, [], [7, 7], [2, 3]]
            assert program.outcome() == [whole, [7, [], [7, 7], []], [8, [], [8, 8], []]]


@pytest.mark.parametrize("gone", [("engine", 1), ("trainer", 1)])
def test_who_comes_again_gets_or_brings_the_whole_and_others_what_changed(
    info: dict[str, Any], gone: Any
) -> None:
    """Trainer 1 sends to engine 1, which is rank 3, alone."""
    odd = {gone: {"dies_at": 8}}
    with programs(odd, info=info, versions=[7, 8, 9], rejoins=1, deltas="blocks") as started:
        assert started[gone].outcome() is None
        again = Program(info=info, role=gone[0], rank=1, versions=[8, 9], deltas="blocks")
        later = [[8, [], [8, 8], [3]], [9, [], [9, 9], []]]
        try:
            for place in (each for each in PLACES if each != gone):
                first, (kind, text, _), *found = started[place].outcome()
                assert first == [7, [], [7, 7], [2, 3]]
                assert kind == "PeerFailedError", text
                assert found == later
            assert again.outcome() == later
        finally:
            again.end()


@pytest.mark.parametrize(
    "gone", [("engine", 1), pytest.param(("trainer", 1), marks=pytest.mark.full)]
)
def test_who_is_killed_while_changed_blocks_arrive_comes_again_and_all_get_the_whole(
    info: dict[str, Any], gone: Any
) -> None:
    """Also engine 0, which has taken back what it got of that refit."""
    more = {"info": info, "deltas": "blocks", "wide_rows": 2048, "says_why": True}
    is_other = gone != ("engine", 1)
    odd = {("engine", 1): {"kills_at": 8, **({"victim": gone} if is_other else {})}}
    with programs(odd, versions=[7, 8, 9], rejoins=1, holds=7, **more) as started:
        assert started[gone].outcome() is None
        again = Program(role=gone[0], rank=1, versions=[8, 9], **more)
        try:
            outcomes = [started[place].outcome() for place in PLACES if place != gone]
            for first, (kind, text, wrong), *_ in outcomes:
                assert first == [7, [], [7, 7], [2, 3], ["it holds nothing of an earlier refit"]]
                assert kind == "PeerFailedError", text
                assert wrong == [], "an engine holds some of both"
            (whole, after), *others = [later for _, _, *later in outcomes] + [again.outcome()]
            assert others == [[whole, after]] * 3
            *refit, reasons = whole
            assert refit == [8, [], [8, 8], [2, 3]]
            assert after == [9, [], [9, 9], [], []]
            # Whether it had all of its own blocks before it took them back.
            assert set(reasons) <= {
                "it holds nothing of an earlier refit",
                "something else has written its target since",
            }
        finally:
            again.end()


def test_an_engine_that_took_a_failed_refit_back_gets_the_whole(info: dict[str, Any]) -> None:
    odd = {("engine", 0): {"fails": "commit", "holds": 50}}
    with programs(odd, info=info, versions=[7, 8, 8], deltas="blocks") as started:
        for program in started.values():
            (kind, *_), *found = program.outcome()
            assert kind == "RefitError"
            assert found == [[8, [], [8, 8], [2, 3]], [8, [], [8, 8], []]]


def test_a_commit_that_fails_beside_a_death_is_taken_back(info: dict[str, Any]) -> None:
    odd = {("engine", 0): {"fails": "commit"}, ("engine", 1): {"dies": "commit"}}
    with programs(odd, info=info, versions=[7]) as started:
        kind, text, wrong = started["engine", 0].outcome()[0]
        assert kind == "PeerFailedError", text
        assert wrong == []


def test_a_trainer_that_dies_is_named(info: dict[str, Any]) -> None:
    odd = {("trainer", 1): {"dies_at": 8}}
    with programs(odd, info=info, versions=[7, 8]) as started:
        for place, program in started.items():
            found = program.outcome()
            if place == ("trainer", 1):
                assert found is None
                continue
            assert found[0] == [7, [], [7, 7]]
            assert found[1][0] == "PeerFailedError"
            assert "rank 1 is trainer 1" in found[1][1]


@pytest.mark.clock(usual_s=0.3, limit_s=5.0)
def test_an_engine_that_stops_is_named(info: dict[str, Any]) -> None:
    odd = {("engine", 1): {"stops_at": 8}}
    with programs(odd, info=info, versions=[7, 8], arrival_timeout_s=5.0) as started:
        for place in PLACES[:3]:
            kind, text, _ = started[place].outcome()[1]
            assert kind == "PeerTimeoutError", text
            assert "rank 3 is engine 1" in text


@pytest.mark.full
def test_a_death_over_gloo_ends_the_refit_of_all(info: dict[str, Any]) -> None:
    info["transport"] = "gloo"
    odd = {("engine", 1): {"dies": "begin"}}
    with programs(odd, info=info, versions=[7], arrival_timeout_s=5.0) as started:
        for place in PLACES[:3]:
            kind, text, _ = started[place].outcome()[0]
            assert kind in ("PeerFailedError", "PeerTimeoutError"), text
