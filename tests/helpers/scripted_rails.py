"""Rails whose messages a test sees, withholds or breaks; for ranks that are threads of the test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from moe_comm import _host
from moe_comm.ep.backends import host

# (source rank, destination rank, how many of that pair came before).
Message = tuple[int, int, int]


class ScriptedRails:
    """Carries every message between ranks of one rail, and keeps its size, unless told otherwise.

    Args:
        monkeypatch: Puts these rails into buffers that are made from now on, one of each rank.
        withhold: Messages that never arrive; none of that pair does after them.
        break_at: Messages at which the engine fails, with the text it gives.
        rewrite: Changes what arrives of a message, in its bytes.
        delay_s: Every message waits so long.
        hold: Called before a message is there for its "target", and before it counts as sent for its
            "source", which comes later; the message waits for its return.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        withhold: Callable[[Message], bool] = lambda _: False,
        break_at: Callable[[Message], str | None] = lambda _: None,
        rewrite: Callable[[Message, memoryview], None] = lambda _, __: None,
        delay_s: float = 0.0,
        hold: Callable[[Message, str], None] = lambda _, __: None,
    ) -> None:
        self.sizes: dict[tuple[int, int], list[int]] = {}
        self._withhold = withhold
        self._break_at = break_at
        self._rewrite = rewrite
        self._delay_s = delay_s
        self._hold = hold
        self._rails: dict[int, _host.QueuedRail] = {}
        self._kept: list[Any] = []
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        monkeypatch.setattr(host, "make_rail", self._make_rail)

    def _make_rail(self, communicator: Any) -> Any:
        if communicator.num_nodes == 1:
            return None
        rail = _host.QueuedRail("scripted", communicator.num_nodes, communicator.node_idx)
        own_rank, step = communicator.rank_idx, communicator.num_local_ranks
        with self._changed:
            self._rails[own_rank] = rail
            self._changed.notify_all()
        for peer_rank in range(own_rank % step, communicator.num_ranks, step):
            if peer_rank == own_rank:
                continue
            thread = threading.Thread(
                target=self._carry, args=(own_rank, peer_rank, step), daemon=True
            )
            thread.start()
            self._threads.append(thread)

        class Engine:
            def __init__(self) -> None:
                self.rail = rail

            def close(self) -> None:
                self.rail.give_up("closed")

        return Engine()

    def _carry(self, src_rank: int, dst_rank: int, num_local_ranks: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: src_rank in self._rails and dst_rank in self._rails)
            source, target = self._rails[src_rank], self._rails[dst_rank]
        sizes = self.sizes.setdefault((src_rank, dst_rank), [])
        while (sent := source.next_send(dst_rank // num_local_ranks)) is not None:
            message = (src_rank, dst_rank, len(sizes))
            if self._withhold(message):
                self._kept.append(sent)
                return
            received = target.next_receive(src_rank // num_local_ranks)
            if received is None:
                return
            text = self._break_at(message)
            if text is not None:
                received.fail(text)
                sent.fail(text)
                return
            assert sent.num_bytes == received.num_bytes, message
            time.sleep(self._delay_s)
            memoryview(received)[:] = memoryview(sent)
            self._rewrite(message, memoryview(received))
            sizes.append(sent.num_bytes)
            self._hold(message, "target")
            received.complete()
            self._hold(message, "source")
            sent.complete()
