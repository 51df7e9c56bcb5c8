from __future__ import annotations

import gc
import re
import threading
import time
import weakref

import numpy as np
import pytest
import torch

from moe_comm import _host
from moe_comm.testing import run_ranks
from tests.helpers import rail_ranks
from tests.helpers.failing_ranks import HANG_S
from tests.helpers.rail_ranks import Shape

SHAPES = [
    pytest.param(Shape(2, 1, "gloo"), marks=pytest.mark.full),
    Shape(4, 2, "gloo"),
    Shape(3, 1, "gloo"),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_messages_arrive_whole_and_in_order(shape: Shape) -> None:
    run_ranks(rail_ranks.run_exchange, shape.num_ranks, shape)


def test_groups_are_used_again_unless_something_is_under_way() -> None:
    # The second rail of rank 0 is closed in the middle of a receive.
    for reused in run_ranks(rail_ranks.run_reuse, 4, 2, fresh=True)[::2]:
        assert reused == [True, False, True]


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_closing_ends_a_wait_in_the_engine(shape: Shape) -> None:
    run_ranks(rail_ranks.run_given_up, shape.num_ranks, shape, fresh=True)


def test_a_peer_that_dies_fails_transfers() -> None:
    _, error = run_ranks(
        rail_ranks.run_peer_dies, 2, Shape(2, 1, "gloo"), fresh=True, expect_dead=[0]
    )
    assert error.startswith("gloo: ")


@pytest.mark.full
def test_the_engine_does_not_judge_who_is_late() -> None:
    # The limit is that of connecting, too, which takes a busy machine a while.
    run_ranks(rail_ranks.run_late, 2, 5.0, fresh=True)


def test_a_process_may_leave_in_the_middle_of_a_receive() -> None:
    run_ranks(rail_ranks.run_leave, 2, fresh=True)


@pytest.mark.parametrize(
    ("mode", "num_local_ranks", "name"),
    [("processes", 1, "gloo"), ("processes", 2, "none"), ("threads", 1, "none")],
)
def test_auto_takes_gloo_where_the_group_has_it(mode: str, num_local_ranks: int, name: str) -> None:
    assert run_ranks(rail_ranks.run_auto, 2, num_local_ranks, mode=mode) == [name, name]


@pytest.mark.parametrize(
    ("rail", "mode", "what"),
    [
        ("gloo", "threads", "torch.distributed group"),
        # Every process is a job of its own to MPI.
        ("mpi", "processes", "start the ranks with the mpiexec|needs mpi4py"),
    ],
)
def test_an_engine_that_cannot_be_used_is_named_on_every_rank(
    rail: str, mode: str, what: str
) -> None:
    messages = run_ranks(rail_ranks.run_unusable, 2, rail, mode=mode, fresh=True)
    assert messages[0] == messages[1]
    assert re.search(what, messages[0]), messages[0]


def test_an_engine_that_one_rail_cannot_set_up_is_named_on_every_rank() -> None:
    for messages in run_ranks(rail_ranks.run_setup_fails, 4, fresh=True):
        assert messages == [
            "rank 1: RuntimeError: no more sockets; rank 3: RuntimeError: no more sockets"
        ]


class TestQueue:
    @staticmethod
    def make(num_nodes: int = 3) -> _host.QueuedRail:
        return _host.QueuedRail("test", num_nodes, 0)

    @staticmethod
    def sizes_of_all(rail: _host.QueuedRail) -> list[int]:
        return [request.num_bytes for request in iter(lambda: rail.next(False), None)]

    def test_each_stream_keeps_its_order(self) -> None:
        rail = self.make()
        for size in (1, 2, 3):
            rail.send(1, bytearray(size))
            rail.receive(1, bytearray(10 * size))
            rail.send(2, bytearray(100 * size))
        for take, sizes in ((rail.next_send, [1, 2, 3]), (rail.next_receive, [10, 20, 30])):
            taken = [take(1, False) for _ in range(4)]
            assert [request and request.num_bytes for request in taken] == [*sizes, None]
        assert self.sizes_of_all(rail) == [100, 200, 300]

    def test_the_oldest_of_all_streams_comes_first(self) -> None:
        rail = self.make()
        rail.send(2, bytearray(1))
        rail.receive(1, bytearray(2))
        rail.send(1, bytearray(3))
        rail.receive(2, bytearray(4))
        taken = [request for _ in range(4) if (request := rail.next())]
        assert [request.num_bytes for request in taken] == [1, 2, 3, 4]
        assert [request.node_idx for request in taken] == [2, 1, 1, 2]
        assert [request.is_send for request in taken] == [True, False, True, False]

    def test_a_request_is_the_memory_of_its_message(self) -> None:
        rail = self.make()
        memory = np.zeros(4, dtype=np.uint8)
        transfer = rail.receive(1, memory)
        request = rail.next()
        assert request is not None
        torch.frombuffer(request, dtype=torch.uint8)[:] = 9
        assert memory.tolist() == [9, 9, 9, 9]
        assert transfer.state == "moving"
        request.complete()
        assert (transfer.state, rail.received_bytes, rail.sent_bytes) == ("moved", 4, 0)
        request.fail("too late")
        assert (transfer.state, transfer.error) == ("moved", "")

    def test_memory_lives_as_long_as_somebody_may_touch_it(self) -> None:
        rail = self.make()
        memory = np.zeros(4, dtype=np.uint8)
        alive = weakref.ref(memory)
        rail.receive(1, memory)
        del memory
        view = torch.frombuffer(rail.next(), dtype=torch.uint8)
        rail.give_up("over")
        del rail
        gc.collect()
        view[:] = 1
        assert alive() is not None
        del view
        gc.collect()
        assert alive() is None

    def test_failing_ends_one_request(self) -> None:
        rail = self.make()
        transfers = [rail.send(1, bytearray(1)) for _ in range(2)]
        request = rail.next()
        request.fail("broken")
        assert [(transfer.state, transfer.error) for transfer in transfers] == [
            ("failed", "broken"),
            ("moving", ""),
        ]
        assert rail.sent_bytes == 0

    def test_giving_up_wakes_whoever_waits_and_fails_the_rest(self) -> None:
        rail = self.make()
        taken: list[object] = []
        waits = [lambda: rail.next(), lambda: rail.next_send(1), lambda: rail.next_receive(2)]
        threads = [
            threading.Thread(target=lambda wait=wait: taken.append(wait()), daemon=True)
            for wait in waits
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        assert all(thread.is_alive() for thread in threads)
        rail.give_up("over")
        for thread in threads:
            thread.join(HANG_S)
        assert taken == [None, None, None]
        transfer = rail.receive(1, bytearray(1))
        assert (transfer.state, transfer.error) == ("failed", "over")
        rail.give_up("again")
        assert rail.send(1, bytearray(1)).error == "over"

    @pytest.mark.parametrize("node_idx", [0, 3, -1])
    def test_a_node_that_is_no_peer_is_refused(self, node_idx: int) -> None:
        with pytest.raises(ValueError, match=f"got node {node_idx}$"):
            self.make().send(node_idx, bytearray(1))

    def test_an_empty_message_is_refused(self) -> None:
        with pytest.raises(ValueError, match="> 0 bytes, got 0"):
            self.make().send(1, bytearray())
