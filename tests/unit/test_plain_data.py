"""Data that ranks, and those that join them, tell each other is parsed and never executed."""

from __future__ import annotations

import ast
import dataclasses
import enum
import pickle
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

import moe_comm
from moe_comm import CommunicationError, Communicator, RankThreads
from moe_comm.peers.gather_objects import decode_all, gather_objects
from moe_comm.peers.joining_ranks import Invitation, InvitingRank, JoiningRank, open_store
from moe_comm.peers.node_layout import Machine, RankPlace
from moe_comm.peers.plain_data import decode_plain, encode_plain
from moe_comm.resharding.describe.metadata import MeshLayout, MeshPlacement
from moe_comm.resharding.plan.rank_metadata import decode_rank_metadata

unpickled: list[str] = []


def _mark(text: str) -> None:
    unpickled.append(text)


class _Marker:
    """Marks that it was unpickled, and does nothing else."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return _mark, ("unpickled",)


PICKLED = pickle.dumps(_Marker())


@pytest.fixture(autouse=True)
def nothing_is_unpickled() -> Iterator[None]:
    """No test here executes what it sends."""
    unpickled.clear()
    yield
    assert not unpickled


class _Count(enum.IntEnum):
    TWO = 2


class _Pair(NamedTuple):
    first: int
    second: int


PLACE = RankPlace(
    machine=Machine("boot", "net"), declared=None, launched=2, parent_rank=-1, parent_node=-1
)
VALUES = [
    *(None, True, False, 0, -(1 << 80), 1.5, float("inf"), "", "é\ud800\n", b"", b"\x00\xff"),
    *([], (), {}, set(), [1, [2, (3, b"4")]], (1, ("a",)), {(0, 1): [2], "b": {3: None}}, {1, 2}),
    *(torch.bfloat16, torch.float8_e4m3fn, PLACE, [PLACE, PLACE]),
    MeshLayout((2,), (1, 0), (MeshPlacement("shard", 1),), (4, 6)),
    Invitation(
        prefix="p",
        position=0,
        rank_idx=1,
        former_ranks=(0, -1),
        timeout_s=2.0,
        options={
            "num_local_ranks": None,
            "backend": "host",
            "check_messages": True,
            "stall_timeout_s": 1.0,
            "arrival_timeout_s": float("inf"),
        },
    ),
]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_values_come_as_they_were(value: Any) -> None:
    found = decode_plain(encode_plain(value), "rank 0")
    assert found == value
    assert type(found) is type(value)


def test_numbers_and_texts_of_other_classes_come_as_plain_ones() -> None:
    found = decode_plain(encode_plain([_Count.TWO, np.int64(3), np.float32(0.5)]), "rank 0")
    assert found == [2, 3, 0.5]
    assert [type(each) for each in found] == [int, int, float]
    assert decode_plain(encode_plain(torch.Size([2, 3])), "rank 0") == (2, 3)


@pytest.mark.parametrize(
    ("error", "kind"),
    [(TypeError("a"), TypeError), (KeyError("a"), KeyError), (OSError("a"), ValueError)],
    ids=["TypeError", "KeyError", "OSError"],
)
def test_errors_come_as_kinds_that_every_rank_knows(
    error: Exception, kind: type[Exception]
) -> None:
    found = decode_plain(encode_plain((error, None)), "rank 0")[0]
    assert type(found) is kind
    assert "a" in str(found)


@pytest.mark.parametrize(
    "value", [object(), _Marker(), print, torch.zeros(1)], ids=lambda value: type(value).__name__
)
def test_nothing_else_is_told(value: object) -> None:
    with pytest.raises(TypeError, match="is nothing that ranks tell each other"):
        encode_plain([value])


def test_a_class_is_known_by_more_than_its_name() -> None:
    look_alike = dataclasses.make_dataclass("Machine", ["boot", "network_namespace"])
    with pytest.raises(TypeError, match="Machine is nothing"):
        encode_plain(look_alike("a", "b"))


DAMAGED = {
    "pickled": PICKLED,
    "empty": b"",
    "cut": encode_plain(PLACE)[:-3],
    "unknown class": b'{"class":["os.system","true"]}',
    "fields missing": b'{"class":["Machine","boot"]}',
    "fields too many": b'{"class":["Machine","a","b","c"]}',
    "no dtype": b'{"dtype":"load"}',
    "no such dtype": b'{"dtype":"__import__"}',
    "unknown tag": b'{"reduce":["print",[]]}',
    "two tags": b'{"tuple":[],"set":[]}',
    "no tag": b"{}",
    "unhashable": b'{"dict":[[[],1]]}',
    "no base64": b'{"bytes":"#"}',
    "too deep": b"[" * 200_000,
    "invitation": b'{"class":["Invitation","p",5,0,{"tuple":[-1]},1.0,{"dict":[]}]}',
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
def test_what_is_damaged_is_named(data: bytes) -> None:
    with pytest.raises(
        ValueError, match=rf"^rank 3: expected plain data \(JSON\), got {len(data)} "
    ):
        decode_plain(data, "rank 3")


@pytest.mark.parametrize("data", [PICKLED, b"", b"[1"], ids=["pickled", "empty", "cut"])
@pytest.mark.parametrize("piece_bytes", [None, 16])
def test_a_damaged_gather_names_the_rank(data: bytes, piece_bytes: int | None) -> None:
    exchanges = 0

    def all_gather(payload: bytes) -> list[bytes]:
        nonlocal exchanges
        # The first piece begins with the length.
        kept = payload[: 8 if piece_bytes and not exchanges else 0] + data
        exchanges += 1
        return [payload, kept.ljust(len(payload), b"\0")[: len(payload) or None]]

    if piece_bytes is None and not data:
        data = b"\0"
    with pytest.raises(CommunicationError, match=r"^rank 1: expected plain data") as caught:
        gather_objects(all_gather, ["mine", "of rank 0"], piece_bytes=piece_bytes)
    assert caught.value.ranks == (1,)


def test_a_damaged_length_names_the_rank() -> None:
    with pytest.raises(
        CommunicationError, match=r"^rank 1: expected .* at most \d+ bytes, got \d+"
    ):
        gather_objects(lambda payload: [payload, b"\xff" * len(payload)], "mine", piece_bytes=64)


def test_metadata_and_batches_of_other_ranks_are_parsed() -> None:
    with pytest.raises(ValueError, match="the metadata of a rank: expected plain data"):
        decode_rank_metadata(PICKLED)
    with pytest.raises(CommunicationError, match="rank 0: expected plain data"):
        decode_all([PICKLED])


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _listening(port: int) -> set[str]:
    """Addresses at which somebody listens, as the kernel writes them."""
    found = set()
    for name in ("tcp", "tcp6"):
        path = Path("/proc/net", name)
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            _, local, _, state, *_ = line.split()
            address, _, local_port = local.partition(":")
            if state == "0A" and int(local_port, 16) == port:
                found.add(address)
    return found


def test_a_rendezvous_listens_at_the_named_address_alone() -> None:
    port = _free_port()
    store = open_store(f"127.0.0.1:{port}", True, 10.0)
    assert _listening(port) == {"0100007F"}
    store.set("key", "value")
    assert open_store(f"127.0.0.1:{port}", False, 10.0).get("key") == b"value"


def test_an_address_of_another_machine_is_refused() -> None:
    port = _free_port()
    # Address of a block that is kept for documentation.
    with pytest.raises(OSError, match=rf"rank 0 cannot listen at 192\.0\.2\.1:{port}: "):
        open_store(f"192.0.2.1:{port}", True, 10.0)
    with Communicator(RankThreads(1)[0], backend="host") as communicator:
        with pytest.raises(ValueError, match=rf"cannot listen at 192\.0\.2\.1:{port}"):
            communicator.grow(f"192.0.2.1:{port}")


LEFT = {
    "pickled": PICKLED,
    "text": encode_plain("0"),
    "bool": encode_plain(True),
    "empty": b"",
}


@pytest.mark.parametrize("left", LEFT.values(), ids=LEFT)
def test_what_was_left_in_the_store_is_refused_by_those_that_grow(left: bytes) -> None:
    store = dist.HashStore()
    inside = dist.PrefixStore("moe_comm", store)
    inside.add("tickets", 1)
    inside.set("ticket/0", left)
    with Communicator(RankThreads(1)[0], backend="host") as communicator:
        with pytest.raises(RuntimeError, match="key 'ticket/0' of the rendezvous: expected"):
            communicator.grow(store, timeout_s=20.0)
        # Its ticket is used up, and the communicator goes on.
        assert InvitingRank(open_store(store, True, 20.0), 1).wishes() is None
        assert communicator.all_gather(b"a") == [b"a"]


@pytest.mark.parametrize("left", LEFT.values(), ids=LEFT)
def test_what_was_left_in_the_store_is_refused_by_one_that_joins(left: bytes) -> None:
    if left == LEFT["text"]:
        return  # a text says why the living refuse it
    store = dist.HashStore()
    dist.PrefixStore("moe_comm", store).set("call/0", left)
    with pytest.raises(ValueError, match="key 'call/0' of the rendezvous: exp"):
        JoiningRank(open_store(store, False, 20.0), None, 20.0)


def test_options_of_an_invitation_are_those_of_the_living() -> None:
    options = VALUES[-1].options
    with pytest.raises(ValueError, match="is no invitation"):
        dataclasses.replace(VALUES[-1], options={**options, "group": "b"})


def test_no_module_reads_pickles_of_others() -> None:
    """Pickles are read where a process has made them for its own children alone."""
    root = Path(moe_comm.__file__).parent
    readers = set()
    found = {("pickle", "loads"), ("pickle", "load"), ("marshal", "loads"), ("torch", "load")}
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and (node.value.id, node.attr) in found
            ):
                readers.add(path.relative_to(root).as_posix())
    own = {"cli/bench/peers/mpi_worker.py", "testing/compat_ranks.py", "testing/pool.py"}
    assert readers - own == set()
