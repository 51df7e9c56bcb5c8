"""Ranks as threads that send, broadcast and reduce; a call waits until all its ranks have made it.

Stands in for `torch.distributed` in `moe_comm.resharding.ir`. Nothing is delivered before its partner
asks for it, so that ranks that would wait in circles do, and are told after `TIMEOUT_S`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_comm.resharding.copy_services import process_group
from moe_comm.resharding.ir import groups, transfer

TIMEOUT_S = 60.0


class Group:
    """Some ranks."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks

    def size(self) -> int:
        return len(self.ranks)


class _Work:
    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait

    def is_completed(self) -> bool:
        raise AssertionError("CPU transfers cannot be asked")


class ThreadTransport:
    """Functions of `torch.distributed` that `transfer` calls."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.local = threading.local()
        # By meeting: what every rank has brought; and how often each rank has been to it.
        self.brought: dict[Any, dict[int, torch.Tensor]] = {}
        self.visits: dict[Any, int] = {}
        self.done: set[Any] = set()
        self.num_reductions = 0

    def _meet(
        self,
        meeting: tuple[Any, ...],
        ranks: tuple[int, ...],
        tensor: torch.Tensor,
        act: Callable[[dict[int, torch.Tensor]], None],
    ) -> _Work:
        rank = self.local.rank
        with self.changed:
            visit = self.visits.get((meeting, rank), 0)
            self.visits[meeting, rank] = visit + 1
            place = (*meeting, visit)
            brought = self.brought.setdefault(place, {})
            brought[rank] = tensor
            if len(brought) == len(ranks):
                sizes = {r: t.numel() * t.itemsize for r, t in brought.items()}
                assert len(set(sizes.values())) == 1, (place, sizes)
                act(brought)
                self.done.add(place)
                self.changed.notify_all()
        return _Work(functools.partial(self._wait, place))

    def _wait(self, place: Any) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: place in self.done, TIMEOUT_S):
                raise RuntimeError(f"Timed out waiting at {place}")

    def isend(self, tensor: torch.Tensor, *, group: object, group_dst: int) -> _Work:
        rank = self.local.rank
        return self._pair(rank, group_dst, tensor)

    def irecv(self, tensor: torch.Tensor, *, group: object, group_src: int) -> _Work:
        return self._pair(group_src, self.local.rank, tensor)

    def _pair(self, src: int, dst: int, tensor: torch.Tensor) -> _Work:
        assert src != dst
        assert tensor.is_contiguous()
        return self._meet(
            ("pair", src, dst), (src, dst), tensor, lambda got: got[dst].copy_(got[src])
        )

    def broadcast(
        self, tensor: torch.Tensor, *, group: Group, group_src: int, async_op: bool
    ) -> _Work:
        assert async_op
        assert tensor.is_contiguous()
        src = group.ranks[group_src]

        def copy(brought: dict[int, torch.Tensor]) -> None:
            for rank, place in brought.items():
                if rank != src:
                    place.copy_(brought[src])

        return self._meet(("broadcast", group.ranks), group.ranks, tensor, copy)

    def partial_groups(self, mesh: torch.Tensor, reductions: list[tuple[int, str]]) -> Any:
        """This rank's groups along mesh dimensions, with operations; None outside the mesh."""
        place = (mesh == self.local.rank).nonzero()
        if not len(place):
            return None
        coordinate = place[0].tolist()
        return [
            (
                Group(
                    tuple(
                        mesh.movedim(dim, -1)[(*coordinate[:dim], *coordinate[dim + 1 :])].tolist()
                    )
                ),
                op,
            )
            for dim, op in reductions
        ]

    def all_reduce(self, tensor: torch.Tensor, *, op: Any, group: Group) -> None:
        assert tensor.is_contiguous()

        def reduce(brought: dict[int, torch.Tensor]) -> None:
            self.num_reductions += 1
            stacked = torch.stack([brought[rank] for rank in group.ranks])
            total = {
                dist.ReduceOp.SUM: lambda: stacked.sum(0),
                dist.ReduceOp.MIN: lambda: stacked.amin(0),
                dist.ReduceOp.MAX: lambda: stacked.amax(0),
                dist.ReduceOp.PRODUCT: lambda: stacked.prod(0),
            }[op]()
            for place in brought.values():
                place.copy_(total)

        self._meet(("reduce", group.ranks), group.ranks, tensor, reduce).wait()

    def run(self, num_ranks: int, fn: Callable[[int], None]) -> None:
        """Call `fn(rank)` in a thread per rank; raise the first error."""
        errors: list[BaseException] = []

        def main(rank: int) -> None:
            self.local.rank = rank
            try:
                fn(rank)
            except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
                errors.append(error)

        threads = [threading.Thread(target=main, args=(rank,)) for rank in range(num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


def use_thread_transport(
    monkeypatch: pytest.MonkeyPatch, has_subgroups: bool = True
) -> ThreadTransport:
    """Let everything in `moe_comm.resharding.ir` go through threads.

    Args:
        monkeypatch: Undoes it.
        has_subgroups: Whether broadcasts have groups.
    """
    transport = ThreadTransport()

    def find_subgroup(group: object, ranks: tuple[int, ...]) -> Group | None:
        return Group(ranks) if has_subgroups else None

    monkeypatch.setattr(transfer, "dist", transport)
    monkeypatch.setattr(process_group, "dist", transport)
    monkeypatch.setattr(groups, "find_subgroup", find_subgroup)
    return transport
