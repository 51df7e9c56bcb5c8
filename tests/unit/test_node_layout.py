"""Nodes that ranks share: declared, launched, by machine, by the parent's nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

import moe_comm
from moe_comm import env
from moe_comm.peers import node_layout
from moe_comm.peers.node_layout import Machine, RankPlace, agree_on_nodes

T = TypeVar("T")

LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    *("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def places(machines: str, **same: Any) -> list[RankPlace]:
    """One rank per letter, each letter a machine."""
    fields: dict[str, Any] = {"declared": None, "launched": None, **same}
    return [RankPlace(machine=Machine(f"boot {name}", "net:[1]"), **fields) for name in machines]


def agree(ranks: list[RankPlace], with_launcher: bool = True, must_fit: bool = True) -> int | None:
    return agree_on_nodes(ranks, with_launcher=with_launcher, must_fit=must_fit)


@pytest.mark.parametrize(
    ("machines", "num_local_ranks"),
    [("aaaa", 4), ("aabb", 2), ("abcd", 1), ("aaabbb", 3), ("aabbcc", 2), ("a", 1)],
)
def test_machines_are_nodes(machines: str, num_local_ranks: int) -> None:
    assert agree(places(machines)) == num_local_ranks


@pytest.mark.parametrize(
    ("machines", "counts"),
    [
        ("aaab", "3 on boot a net:[1], 1 on boot b net:[1]"),
        ("abab", "1 on boot a net:[1], 1 on boot b net:[1], 1 on boot a net:[1], 1 on boot b"),
        ("abba", "1 on boot a net:[1], 2 on boot b net:[1], 1 on boot a"),
    ],
)
def test_uneven_machines_are_named(machines: str, counts: str) -> None:
    with pytest.raises(ValueError, match="equally many consecutive ranks") as raised:
        agree(places(machines))
    assert counts in str(raised.value)
    assert "such as 1" in str(raised.value)
    assert agree(places(machines), must_fit=False) is None
    assert agree(places(machines, declared=1)) == 1


def test_uneven_machines_are_told_what_fits() -> None:
    with pytest.raises(ValueError, match="such as 2"):
        agree(places("aaaabb"))
    assert agree(places("aaaabb", declared=2)) == 2


@pytest.mark.parametrize("num_local_ranks", [1, 2, 4])
def test_declared_nodes_may_divide_a_machine(num_local_ranks: int) -> None:
    assert agree(places("aaaa", declared=num_local_ranks)) == num_local_ranks


def test_a_declared_node_on_two_machines_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"num_local_ranks 3 puts ranks 0 and 2 on one node, but rank 0 is on boot a net:\[1\], "
        r"rank 2 on boot b net:\[1\]",
    ):
        agree(places("aabbcc", declared=3))


def test_network_namespaces_part_machines() -> None:
    ranks = places("aa")
    ranks[1] = dataclasses.replace(ranks[1], machine=Machine("boot a", "net:[2]"))
    assert agree(ranks) == 1


@pytest.mark.parametrize("other", [4, None])
def test_layouts_that_differ_are_named(other: int | None) -> None:
    ranks = places("aaaa", declared=2)
    ranks[3] = dataclasses.replace(ranks[3], declared=other)
    with pytest.raises(ValueError, match=f"num_local_ranks is 2 on rank 0 and {other} on rank 3"):
        agree(ranks)


@pytest.mark.parametrize("value", [0, -2, 3, 8, 2.0, "2"])
def test_a_number_that_does_not_divide_is_refused(value: Any) -> None:
    problem = node_layout.problem_with_declared(value, 4)
    assert problem == f"num_local_ranks must divide the number of ranks, 4, got {value!r}"


def test_the_launcher_parts_one_machine() -> None:
    assert agree(places("aaaa", launched=2)) == 2
    # Backends of one node do not ask it.
    assert agree(places("aaaa", launched=2), with_launcher=False) == 4


@pytest.mark.parametrize("wrong", [None, 1, 3])
def test_a_launcher_that_ranks_do_not_agree_on_says_nothing(wrong: int | None) -> None:
    ranks = places("aaaa", launched=2)
    ranks[2] = dataclasses.replace(ranks[2], launched=wrong)
    assert agree(ranks) == 4


def test_a_launcher_that_machines_contradict_says_nothing() -> None:
    assert agree(places("aabb", launched=4)) == 2
    assert agree(places("abab", launched=2), must_fit=False) is None  # ranks dealt in turn


def test_a_child_has_the_nodes_of_its_parent() -> None:
    def child(nodes: list[int], declared: int | None = None) -> int | None:
        ranks = places("a" * len(nodes), declared=declared, launched=4)
        return agree(
            [
                dataclasses.replace(place, parent_rank=i, parent_node=node)
                for i, (place, node) in enumerate(zip(ranks, nodes, strict=True))
            ]
        )

    assert child([0, 0, 1, 1]) == 2
    assert child([0, 1]) == 1
    assert child([1, 1]) == 2
    with pytest.raises(ValueError, match="by node of the parent: 2 on node 0, 1 on node 1"):
        child([0, 0, 1])
    with pytest.raises(ValueError, match="rank 0 is on node 0, rank 1 on node 1"):
        child([0, 1], declared=2)


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"},
        {
            "OMPI_COMM_WORLD_RANK": "5",
            "OMPI_COMM_WORLD_SIZE": "8",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        },
        {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALNRANKS": "4"},
        {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"},
    ],
)
def test_launchers_are_read(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert node_layout.launched_num_local_ranks(5, 8) == 4
    assert node_layout.launched_num_local_ranks(5, 7) is None  # another group
    assert node_layout.launched_num_local_ranks(1, 8) is None  # numbered otherwise


def test_what_is_no_number_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert node_layout.launched_num_local_ranks(0, 1) is None
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "7")
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "4,3")
    assert node_layout.launched_num_local_ranks(0, 7) is None


def test_interface_comes_from_the_own_variable_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOE_COMM_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert env.socket_interface() is None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    assert env.socket_interface() == "eth1"
    monkeypatch.setenv("MOE_COMM_SOCKET_IFNAME", "ib0")
    assert env.socket_interface() == "ib0"


# ------------------------------------------------------------------------- through a communicator


def run_rank_threads(
    num_ranks: int, body: Callable[[int, moe_comm.peers.bootstrap.Bootstrap], T]
) -> list[T]:
    """Results of `body` on each rank."""
    ranks = moe_comm.RankThreads(num_ranks)
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(lambda rank_idx: body(rank_idx, ranks[rank_idx]), range(num_ranks)))


def errors_of_ranks(num_ranks: int, **arguments: Any) -> list[str]:
    """Errors of making a communicator on each rank, "" for nothing; a list gives one per rank."""

    def make(rank_idx: int, group: moe_comm.peers.bootstrap.Bootstrap) -> str:
        own = {
            name: value[rank_idx] if isinstance(value, list) else value
            for name, value in arguments.items()
        }
        try:
            moe_comm.Communicator(group, **own).destroy()
        except ValueError as error:
            return str(error)
        return ""

    return run_rank_threads(num_ranks, make)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"num_local_ranks": [3, 2, 3, 2]},
            "rank 0: num_local_ranks must divide the number of ranks, 4, got 3; "
            "rank 2: num_local_ranks must divide the number of ranks, 4, got 3",
        ),
        (
            {"num_local_ranks": [2, 2, 0, 2]},
            "rank 2: num_local_ranks must divide the number of ranks, 4, got 0",
        ),
        (
            {"num_local_ranks": [2, 2, 2, 4]},
            "ranks declare different node layouts: num_local_ranks is 2 on rank 0 and 4 on rank 3",
        ),
        (
            {"num_local_ranks": [2, None, 2, 2]},
            "ranks declare different node layouts: num_local_ranks is 2 on rank 0 and None on rank 1",
        ),
        (
            {"rail": ["tin cans", "auto", "auto", "auto"]},
            "rank 0: rail must be one of auto, gloo, mpi, sockets, got 'tin cans'",
        ),
        (
            {"rail": ["auto", "auto", "sockets", "auto"]},
            "ranks ask for different communicators: rail is auto on rank 0 and sockets on rank 2",
        ),
        (
            {"rail": ["auto", "gloo", "auto", "auto"], "backend": "reference"},
            "rank 1: rail is for the host backend, got 'gloo' with 'reference' on cpu",
        ),
        (
            {"check_messages": [False, False, True, False], "num_local_ranks": 2},
            "ranks ask for different communicators: check_messages is False on rank 0 and True on rank 2",
        ),
        (
            {"check_messages": True, "backend": ["simt", "host", "host", "simt"]},
            "rank 0: check_messages is for the host backend, got True with 'simt' on cpu; "
            "rank 3: check_messages is for the host backend, got True with 'simt' on cpu",
        ),
        (
            {"rail": "gloo", "device": ["cuda", "cpu", "cpu", "cpu"]},
            "rank 0: rail is for the host backend, got 'gloo' with 'auto' on cuda",
        ),
    ],
)
def test_mistakes_are_raised_on_every_rank(arguments: dict[str, Any], message: str) -> None:
    assert errors_of_ranks(4, **arguments) == [message] * 4


@pytest.mark.parametrize("backend", ["host", "reference"])
def test_nodes_are_attributes(backend: str) -> None:
    def look(rank_idx: int, group: moe_comm.peers.bootstrap.Bootstrap) -> tuple[int, ...]:
        with moe_comm.Communicator(group, num_local_ranks=2, backend=backend) as comm:
            return (comm.num_nodes, comm.num_local_ranks, comm.node_idx, comm.local_rank_idx)

    assert run_rank_threads(6, look) == [(3, 2, rank // 2, rank % 2) for rank in range(6)]


def test_an_interface_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_COMM_SOCKET_IFNAME", "no_such0")
    (first, second) = errors_of_ranks(2, num_local_ranks=1)
    assert first == second
    assert 'no network interface "no_such0" with an address; got ' in first
    assert "lo" in first
    assert errors_of_ranks(2) == ["", ""]  # one node asks for none
