"""Kernels and the CPU backend's protocol under thousands of schedules, with every access checked.

tests/schedules/README.md says what is modeled, and how to replay what a failure prints.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.native_programs import build_program
from tests.helpers.source_tree import captured
from tests.schedules.fault_catalogue import Fault, read_catalogue

NUM_PROCESSES = 2

# The first test builds the program, where nobody has.
pytestmark = pytest.mark.timeout(1200)

# Numbers of schedules of each scenario: small cases are cheap, those of many epochs are not.
NUM_SCHEDULES = 200
NUM_SCHEDULES_OF = {
    "expert_major": 400,
    "strided_copies": 400,
    "weighted_gradient": 600,
}
NUM_LITMUS_SCHEDULES = 300
# Several nodes of several ranks: long schedules.
NUM_INTERNODE_SCHEDULES = 50
# All faults but those below show in one schedule of 400: what moves a few accesses must not hide it.
NUM_MOST_UNTIL_FOUND = 6000
NUM_MOST_UNTIL_FOUND_OF = {
    # A word of a dying rank has to come between two looks of one step: 1 schedule of 15,000 to
    # 25,000, which take 0.1 ms each.
    "failed_rank_commits": 100_000,
}


@pytest.fixture(scope="session")
def program() -> Path:
    return build_program("schedules")


def run_command(*command: str) -> str:
    done = captured(command)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@dataclass(frozen=True)
class Explored:
    """Report of the program on one scenario."""

    name: str
    num_schedules: int
    num_failed: int
    num_steps: int
    findings: tuple[tuple[str, str], ...]


def explore(
    program: Path, scenario: str, num_schedules: int, *, fault: str = "none", first: int = 0
) -> Explored:
    done = captured(
        [
            str(program),
            *("--scenario", scenario, "--seeds", f"{first}:{first + num_schedules}"),
            *("--fault", fault, "--json"),
        ],
        timeout=600,
    )
    where = f"schedules --scenario {scenario} --fault {fault}"
    assert done.returncode in (0, 1), f"{where}: {done.returncode}\n{done.stderr[-2000:]}"
    (outcome,) = json.loads(done.stdout)["scenarios"]
    found = tuple((finding["kind"], finding["text"]) for finding in outcome["findings"])
    assert (done.returncode == 1) == (outcome["failed"] > 0) == bool(found), where
    return Explored(
        outcome["name"], outcome["schedules"], outcome["failed"], outcome["steps"], found
    )


@pytest.fixture(scope="session")
def scenarios(program: Path) -> dict[str, bool]:
    """Every scenario, and whether it is wrong on purpose."""
    lines = run_command(str(program), "--list").splitlines()
    heads = [line.split(":")[0] for line in lines]
    return {head.split()[0]: head.endswith("(wrong on purpose)") for head in heads}


@pytest.mark.parametrize(
    ("first", "end", "num_least"),
    [
        pytest.param(0.0, 0.02, 200, id="first fiftieth"),
        pytest.param(0.02, 1.0, 9_800, id="rest", marks=pytest.mark.full),
    ],
)
def test_no_schedule_finds_anything(
    program: Path, scenarios: dict[str, bool], first: float, end: float, num_least: int
) -> None:
    """At least 10,000 schedules of small cases, of which `make test` runs a fiftieth."""
    num_of = {
        name: NUM_LITMUS_SCHEDULES
        if name.startswith("litmus_")
        else NUM_INTERNODE_SCHEDULES
        if name.startswith("internode_")
        else NUM_SCHEDULES_OF.get(name, NUM_SCHEDULES)
        for name, is_wrong in scenarios.items()
        if not is_wrong
    }

    def explore_part(name: str) -> Explored:
        begin = round(first * num_of[name])
        return explore(program, name, round(end * num_of[name]) - begin, first=begin)

    with ThreadPoolExecutor(max_workers=NUM_PROCESSES) as pool:
        explored = list(pool.map(explore_part, num_of))
    assert {outcome.name: outcome.findings for outcome in explored if outcome.findings} == {}
    assert sum(outcome.num_schedules for outcome in explored) >= num_least


def test_what_is_wrong_on_purpose_is_found(program: Path, scenarios: dict[str, bool]) -> None:
    wrong = [name for name, is_wrong in scenarios.items() if is_wrong]
    assert len(wrong) >= 20
    for name in wrong:
        assert explore(program, name, NUM_MOST_UNTIL_FOUND).findings, name


def test_a_seed_replays_its_schedule(program: Path) -> None:
    for scenario in ("expert_major", "host_layer"):
        explored = explore(program, scenario, 3, first=7)
        assert explored.num_steps > 1000
        assert explore(program, scenario, 3, first=7) == explored


def test_a_signal_is_a_finding(program: Path) -> None:
    """Code of the host that reads what it likes ends a schedule, not the program."""
    command = [str(program), "--scenario", "litmus_signal,host_layer", "--seeds", "7:9"]
    done = captured(command)
    assert done.returncode == 1, done.stderr
    assert "crash: signal 11 " in done.stdout
    assert "ended the schedule of seed 7\n" in done.stdout
    assert "replay: schedules --scenario litmus_signal --seeds 7\n" in done.stdout
    assert "host_layer: 2 schedules" in done.stdout


def test_a_failure_says_how_to_replay_it(program: Path) -> None:
    command = [str(program), "--scenario", "litmus_message_released_at_device", "--seeds", "5:9"]
    done = captured(command)
    assert done.returncode == 1
    assert "replay: schedules --scenario litmus_message_released_at_device --seeds 5\n" in (
        done.stdout
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("--scenario", "no_such_scenario"),
        ("--scenario", "expert_major", "--seeds", "9:9"),
        ("--scenario", "expert_major", "--seeds", "x"),
        ("--unknown",),
        (),
    ],
)
def test_wrong_arguments_are_refused(program: Path, arguments: tuple[str, ...]) -> None:
    done = captured([str(program), *arguments])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr


def test_a_fault_that_nothing_comes_across_is_refused(program: Path) -> None:
    for scenario, fault in (
        ("host_layer", "no_such_fault"),
        ("host_layer", "done_before_rows_were_read"),
    ):
        command = [str(program), "--scenario", scenario, "--seeds", "3", "--fault", fault]
        done = captured(command)
        assert done.returncode == 2, done.stdout
        assert f"no code that ran has a fault '{fault}'" in done.stderr


FAULTS = [fault for fault in read_catalogue()[0] if fault.scenarios]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found(program: Path, fault: Fault) -> None:
    num_most = NUM_MOST_UNTIL_FOUND_OF.get(fault.name, NUM_MOST_UNTIL_FOUND)
    for scenario in fault.scenarios:
        outcome = explore(program, scenario, num_most, fault=fault.name)
        kinds = {kind for kind, _ in outcome.findings}
        assert kinds & set(fault.kinds), (fault.rule, scenario, outcome.findings)
