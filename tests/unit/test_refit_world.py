"""Refits of trainers and engines that meet at an address, with threads in place of programs."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_comm.errors import CapacityError, PeerFailedError
from moe_comm.peers import role_rendezvous
from moe_comm.resharding import (
    CheckpointView,
    CheckpointViews,
    RefitWorld,
    is_stale,
    mark_stale,
)
from moe_comm.resharding.describe.disagreement import PlanError
from moe_comm.resharding.describe.intervals import Interval, Intervals
from moe_comm.resharding.hold import refit_world
from moe_comm.resharding.hold.heap_parameters import SharedWeights
from moe_comm.resharding.move.stale import clear_stale
from moe_comm.resharding.plan import batches
from tests.helpers.refit_worlds import make_net, run, threads

SIZES = {"num_trainers": 2, "num_engines": 2}
PLACES = [(role, rank) for role in ("trainer", "engine") for rank in range(2)]


@pytest.fixture
def info() -> Iterator[dict[str, Any]]:
    with RefitWorld.host("127.0.0.1:0", **SIZES) as host:
        yield dict(host.info)


def world(
    info: dict[str, Any], versions: list[Any], odd: dict[tuple[str, int], Any], **more: Any
) -> list[Any]:
    """Outcomes of trainers 0, 1 and engines 0, 1; `odd` has more arguments for some of them."""
    given = {"info": info, "versions": versions, **more}
    return threads(
        [
            functools.partial(
                run, {**given, "role": place[0], "rank": place[1], **odd.get(place, {})}
            )
            for place in PLACES
        ]
    )


def join(info: dict[str, Any], role: Any, rank: int, call: Callable[[RefitWorld], Any]) -> Any:
    """Result of a call of one rank."""
    with RefitWorld.join(info, role, rank, timeout_s=30.0, arrival_timeout_s=30.0) as joined:
        return call(joined)


def told(info: dict[str, Any], call: Callable[[RefitWorld], Any]) -> list[str]:
    """Error of each rank of a world in a call."""

    def one(joined: RefitWorld) -> str:
        try:
            call(joined)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return f"{type(error).__name__}: {error}"
        return ""

    return threads([functools.partial(join, info, *place, one) for place in PLACES])


@pytest.mark.parametrize("transport", ["symmetric", "gloo"])
def test_refits_bring_the_trainers_weights_and_versions(
    info: dict[str, Any], transport: str
) -> None:
    info["transport"] = transport
    assert world(info, [7, 8], {}) == [[[7, [], [7, 7]], [8, [], [8, 8]]]] * 4


def test_an_older_version_is_refused_by_name_on_every_rank(info: dict[str, Any]) -> None:
    for found in world(info, [8, 7], {}, holds=8):
        assert found[0] == [8, [], [8, 8]]
        assert found[1][0] == "ValueError"
        assert "version 7 is older than 8, which engine 0 holds" in found[1][1]
        assert found[1][2:] == [[], [8, 8]]


def test_an_older_version_comes_back_where_it_is_asked_for(info: dict[str, Any]) -> None:
    for found in world(info, [8, 7], {}, allow_older=True):
        assert found[1] == [7, [], [7, 7]]


def test_trainers_that_bring_different_versions_are_named(info: dict[str, Any]) -> None:
    for found in world(info, [7], {("trainer", 1): {"versions": [6]}}):
        assert found[0][0] == "ValueError"
        assert "trainer 0 for 7, trainer 1 for 6" in found[0][1]
        assert found[0][2:] == [[], [None, None]]


def test_ranks_tell_each_other_what_they_have_or_what_is_wrong(info: dict[str, Any]) -> None:
    def call(joined: RefitWorld) -> None:
        assert joined.gather([joined.role, joined.rank]) == [list(place) for place in PLACES]
        is_odd = (joined.role, joined.rank) == ("engine", 1)
        joined.gather(None, ValueError("q_proj") if is_odd else None)

    assert told(info, call) == ["ValueError: rank 3: q_proj"] * 4


def test_one_that_refuses_ends_the_wait_of_all_and_the_next_attempt_works(
    info: dict[str, Any],
) -> None:
    def wait(role: Any, rank: int) -> str:
        if (role, rank) == ("trainer", 0):
            RefitWorld.refuse(info, role, rank, "vLLM was not asked")
            return ""
        with pytest.raises(ValueError, match=r"^join: trainer 0 was refused: vLLM was not asked$"):
            RefitWorld.join(info, role, rank, timeout_s=30.0)
        return ""

    # Engines have not been asked, and come with the next attempt, before its trainers.
    threads([functools.partial(wait, *place) for place in PLACES[:2]])
    engines = [functools.partial(RefitWorld.join, info, "engine", rank) for rank in range(2)]

    def late(rank: int) -> RefitWorld:
        time.sleep(0.3)
        return RefitWorld.join(info, "trainer", rank)

    joined = threads([*engines, *(functools.partial(late, rank) for rank in range(2))])
    assert [each.generation for each in joined] == [1] * 4
    for each in joined:
        each.close()


def test_a_rank_whose_memory_stays_shared_has_left_all_the_same(
    info: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def close(_: SharedWeights) -> None:
        raise CapacityError("no memory")

    monkeypatch.setattr(SharedWeights, "close", close)
    worlds = []  # none leaves by being forgotten

    def one(role: Any, rank: int) -> str:
        joined = RefitWorld.join(info, role, rank, timeout_s=30.0)
        worlds.append(joined)
        joined.prepare(make_net(role, rank, 2, wide_rows=64), shares_memory=role == "engine")
        if (role, rank) == ("engine", 1):
            with pytest.raises(CapacityError, match="no memory"):
                joined.close()
            return ""
        with pytest.raises(PeerFailedError, match="engine 1") as failure:
            joined.refit(7 if role == "trainer" else None)
        return str(failure.value)

    told_of = threads([functools.partial(one, *place) for place in PLACES])
    assert all("left" in text for text in told_of[:3])


@pytest.mark.parametrize("phase", ["begin", "commit"])
def test_an_engine_that_fails_leaves_whole_old_versions(info: dict[str, Any], phase: str) -> None:
    for found in world(info, [7, 8], {("engine", 1): {"fails": phase}}):
        assert f"{phase} fails" in found[0][1]
        assert found[0][2:] == [[], [None, None]]
        assert found[1] == [8, [], [8, 8]]


def test_engines_that_cannot_go_back_are_named_with_what_they_hold(info: dict[str, Any]) -> None:
    odd = {("engine", 0): {"fails": "commit"}, ("engine", 1): {"in_place": True, "holds": 7}}
    for found in world(info, [7], odd):
        assert found[0][0] == "RefitError"
        assert "engine 0: commit fails" in found[0][1]
        assert "Held now: engine 0 None, engine 1 7" in found[0][1]
        assert found[0][2:] == [[], [None, 7]]
        assert found[-1] == {0: "it holds no version of this world"}


@pytest.mark.parametrize("in_list", [False, True])
def test_a_refit_that_fails_in_place_leaves_no_whole_version(
    info: dict[str, Any], in_list: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refit_world, "Refit", _marks_and_fails(refit_world.Refit))
    odd = {("engine", rank): {"in_place": True, "in_list": in_list, "holds": 7} for rank in (0, 1)}
    for found in world(info, [7], odd):
        assert found[0][0] == "RuntimeError"
        assert "the copy fails" in found[0][1]
        assert found[0][3] == [None, None]
        assert "the half of it is written" in found[-1][0]


def _marks_and_fails(refit: Any) -> Any:
    class Failing(refit):  # type: ignore[misc]
        def __init__(self, source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(source, target, *args, **kwargs)
            self._target = target[0] if isinstance(target, list) else target

        def run(self, **options: Any) -> None:
            super().run(**options)
            if self._target is not None:
                mark_stale(self._target, "the half of it is written")
            raise RuntimeError("the copy fails")

    return Failing


def whole_dim(size: int) -> Intervals:
    return (Interval(0, 0, size),)


class Staged:
    """An engine in load layout, whose weights are handed over as a whole, as vLLM's on CPUs."""

    def __init__(self, rows: int, cols: int) -> None:
        # Both weights in one tensor, transposed: as no checkpoint has them.
        self.staging = torch.zeros(cols, 2 * rows)
        self.served = self.staging.clone()
        self.version = ""
        self.log: list[str] = []
        self.views = [
            CheckpointView(
                name, (rows, cols), (whole_dim(rows), whole_dim(cols)), part.transpose(0, 1)
            )
            for name, part in zip(("a", "b"), self.staging.split(rows, 1), strict=True)
        ]

    def accept(self) -> None:
        self.log.append("accept")

    def hand_over(self, version: str) -> None:
        self.served, self.version = self.staging.clone(), version

    # The target of a world.
    def begin(self, version: int) -> None:
        self.accept()

    def commit(self, version: int) -> None:
        self.hand_over(str(version))

    def abort(self) -> None:
        self.log.append("abort")


def test_views_are_sides_and_an_engine_is_handed_whole_versions(info: dict[str, Any]) -> None:
    rows, cols = 4, 6
    whole = {name: torch.randn(rows, cols) for name in "ab"}
    expected = torch.cat([whole["a"], whole["b"]]).transpose(0, 1)

    def trainer(rank: int) -> str:
        half = rows // 2
        held = {name: whole[name][rank * half :][:half].clone() for name in "ab"}
        views = CheckpointViews(
            [
                CheckpointView(
                    name,
                    (rows, cols),
                    ((Interval(rank * half, 0, half),), whole_dim(cols)),
                    held[name],
                )
                for name in "ab"
            ]
        )
        with RefitWorld.join(info, "trainer", rank, timeout_s=30.0) as joined:
            joined.prepare(views, verify="checksum", strict=True)
            joined.refit(3)
            for tensor in held.values():
                tensor.neg_()
            joined.refit(4)
        return ""

    def engine(rank: int) -> str:
        engine = Staged(rows, cols)
        with RefitWorld.join(info, "engine", rank, timeout_s=30.0) as joined:
            joined.prepare(
                CheckpointViews(engine.views, engine), engine, verify="checksum", strict=True
            )
            assert joined.refit() == 3
            assert torch.equal(engine.served, expected)
            first = engine.served
            assert joined.refit() == 4
        assert torch.equal(engine.served, -expected)
        assert torch.equal(first, expected)
        assert engine.log == ["accept", "accept"]
        return engine.version

    calls = [functools.partial(each, rank) for each in (trainer, engine) for rank in range(2)]
    assert threads(calls) == ["", "", "4", "4"]


def test_a_tensor_that_trainers_lack_is_named_on_every_rank(info: dict[str, Any]) -> None:
    def prepare(joined: RefitWorld) -> None:
        names = "ab" if joined.role == "engine" else "a"
        joined.prepare(
            CheckpointViews(
                [CheckpointView(name, (4,), (whole_dim(4),), torch.zeros(4)) for name in names]
            )
        )

    for text in told(info, prepare):
        assert text.startswith("PlanError: Destination parameter 'b' on rank 2 not found in source")


def test_one_rank_bounds_what_waits_on_all(
    info: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "MAX_BATCHES", 64)

    def refit(joined: RefitWorld) -> None:
        net = make_net(joined.role, joined.rank, 2).to(
            torch.float64 if joined.role == "engine" else torch.float32
        )
        is_odd = (joined.role, joined.rank) == ("engine", 1)
        with pytest.raises(PlanError, match="execution_batch_bytes=1 makes at least"):
            joined.prepare(net, **({"execution_batch_bytes": 1} if is_odd else {}))
        joined.prepare(net, **({"execution_batch_bytes": 2048} if is_odd else {}))
        joined.refit(5 if joined.role == "trainer" else None)
        if joined.role == "engine":
            assert net.to(torch.float32).wrong(0) == []

    assert told(info, refit) == [""] * 4


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"versions": 1}, "deltas, execution_batch_bytes of Refit, got ['versions']"),
        ({"target": object()}, "target must have begin()"),
    ],
)
def test_a_wrong_argument_of_one_rank_is_an_error_on_all(
    info: dict[str, Any], arguments: dict[str, Any], text: str
) -> None:
    def prepare(joined: RefitWorld) -> None:
        is_odd = (joined.role, joined.rank) == ("engine", 1)
        joined.prepare(make_net(joined.role, joined.rank, 2), **(arguments if is_odd else {}))

    for said in told(info, prepare):
        assert said.startswith("TypeError: rank 3: ")
        assert text in said


@pytest.mark.parametrize("call", ["no version", "unbound", "unprepared"])
def test_a_wrong_refit_of_one_rank_is_an_error_on_all(info: dict[str, Any], call: str) -> None:
    def refit(joined: RefitWorld) -> None:
        is_odd = (joined.role, joined.rank) == ("trainer", 1)
        if call != "unprepared":
            joined.prepare(make_net(joined.role, joined.rank, 2))
        if is_odd and call == "unbound":
            joined.refit(5, verify="checksum")  # type: ignore[call-arg]
        joined.refit(None if is_odd else 5)

    expected = {
        "no version": "version must be an int or a text, got None",
        "unbound": "unexpected keyword argument 'verify'",
        "unprepared": "call prepare() first",
    }[call]
    for said in told(info, refit):
        assert expected in said
        assert "rank " in said


def test_a_world_over_gloo_is_made_anew_instead_of_rejoined(info: dict[str, Any]) -> None:
    info["transport"] = "gloo"
    for said in told(info, lambda joined: joined.rejoin()):
        assert said.startswith("NotImplementedError")
        assert "over gloo" in said
    assert world(info, [7], {}) == [[[7, [], [7, 7]]]] * 4


def test_ranks_that_live_go_on_in_a_new_generation(info: dict[str, Any]) -> None:
    def twice(joined: RefitWorld) -> None:
        net = make_net(joined.role, joined.rank, 2)
        joined.prepare(net)
        for version in (1, 2):
            if joined.role == "trainer":
                net.fill(version)
            assert joined.refit(version if joined.role == "trainer" else None) == version
            assert net.wrong(version) == []
            assert joined.generation == version
            if version == 1:
                joined.rejoin()

    assert told(info, twice) == [""] * 4


@pytest.mark.parametrize("at", ["prepare", "refit", "run"])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_rank_that_ends_a_call_by_itself_is_named_and_comes_again(
    info: dict[str, Any], at: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise error

    def go_on(joined: RefitWorld) -> list[str]:
        is_odd = (joined.role, joined.rank) == ("trainer", 1)
        is_trainer = joined.role == "trainer"
        net = make_net(joined.role, joined.rank, 2)
        said: list[str] = []

        def call(version: int) -> None:
            joined.prepare(net)
            assert joined._refit is not None
            net.fill(version if is_trainer else 50)
            if is_odd and not said and at != "prepare":
                name = {"refit": "_agree_on_version", "run": "_refit"}[at]
                broken = fail if at == "refit" else SimpleNamespace(run=fail)
                monkeypatch.setattr(joined, name, broken)
            joined.refit(version if is_trainer else None)

        if is_odd and at == "prepare":
            monkeypatch.setattr(joined, "_plan", fail)
        try:
            call(1)
        except BaseException as raised:  # noqa: BLE001 - the test looks at it
            said.append(f"{type(raised).__name__}: {raised}")
        if is_odd:
            monkeypatch.undo()
        joined.rejoin(60.0)
        call(2)
        assert net.wrong(2) == []
        return said

    found = [
        said
        for [said] in threads([functools.partial(join, info, *place, go_on) for place in PLACES])
    ]
    own = found.pop(1)
    assert error.__name__ in own
    assert error is KeyboardInterrupt or own.startswith("PeerFailedError: trainer 1 ended ")
    for text in found:
        assert text.startswith("PeerFailedError: ")
        assert "rank 1 is trainer 1" in text


@pytest.mark.parametrize("is_written", [False, True])
def test_an_engine_in_place_is_whole_only_where_nothing_was_written(
    info: dict[str, Any], is_written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def go_on(joined: RefitWorld) -> str:
        is_trainer = joined.role == "trainer"
        net = make_net(joined.role, joined.rank, 2)
        joined.prepare(net)
        refit = joined._refit
        assert refit is not None

        def run_and_fail(**options: Any) -> None:
            refit.run(**options)
            raise ArithmeticError("too late")

        for version in (1, 2, 3):
            if is_trainer:
                net.fill(version)
            if (version, joined.role, joined.rank) == (2, "trainer", 1):
                if is_written:
                    monkeypatch.setattr(joined, "_refit", SimpleNamespace(run=run_and_fail))
                else:
                    mark_stale(net, "not to be read")
            if version == 2:
                with pytest.raises((ArithmeticError, ValueError), match=r"too late|not to be read"):
                    joined.refit(2 if is_trainer else None)
                holds = None if is_written else 1
                assert joined.versions() == {0: holds, 1: holds}
                assert is_trainer or net.wrong(2 if is_written else 1) == []
                assert is_trainer or is_stale(net) == is_written
                monkeypatch.undo()
                clear_stale(net)
            else:
                joined.refit(version if is_trainer else None)
                assert joined.versions() == {0: version, 1: version}
                assert not is_stale(net)
        return "; ".join(joined.stale_engines().values())

    assert threads([functools.partial(join, info, *place, go_on) for place in PLACES]) == [""] * 4


def test_an_error_without_a_text_is_told_by_its_name(info: dict[str, Any]) -> None:
    class Target:
        abort = staticmethod(lambda: None)

        def begin(self, version: Any) -> None:
            raise MemoryError

        commit = begin

    def refit(joined: RefitWorld) -> None:
        is_trainer = joined.role == "trainer"
        is_odd = (joined.role, joined.rank) == ("engine", 0)
        joined.prepare(make_net(joined.role, joined.rank, 2), Target() if is_odd else None)
        joined.refit(3 if is_trainer else None)

    for said in told(info, refit):
        assert said.endswith("rank 2: MemoryError")


def test_several_machines_have_no_heap(
    info: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(role_rendezvous, "own_machine", threading.get_ident)
    for found in world({**info, "transport": "symmetric"}, [7], {}):
        assert found[0] == "ValueError"
        assert "transport symmetric needs all ranks on one machine" in found[1]
    assert world(info, [7], {}) == [[[7, [], [7, 7]]]] * 4
    transports: list[str] = []
    told(info, lambda joined: transports.append(joined.transport))
    assert transports == ["gloo"] * 4


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"address": None}, "info must be the dictionary of RefitWorld.host"),
        ({"num_trainers": 0}, "num_trainers must be >= 1, got 0"),
        ({"transport": "smoke"}, "transport must be one of"),
    ],
)
def test_a_dictionary_that_is_none_is_refused_before_anything_is_asked(
    info: dict[str, Any], change: dict[str, Any], text: str
) -> None:
    wrong = {name: each for name, each in {**info, **change}.items() if each is not None}
    with pytest.raises(ValueError, match=text):
        RefitWorld.join(wrong, "trainer", 0)
    for arguments in ({"timeout_s": 0.0}, {"stall_timeout_s": True}):
        with pytest.raises(ValueError, match=r"timeout_s must be > 0"):
            RefitWorld.join(info, "trainer", 0, **arguments)
    with pytest.raises(ValueError, match="role must be"):
        RefitWorld.join(info, "judge", 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="version is what an engine holds"):
        RefitWorld.join(info, "trainer", 0, version=3)
