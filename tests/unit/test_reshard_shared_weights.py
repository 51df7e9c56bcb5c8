"""Ordinary memory that peers write in place: same addresses, right bytes up to the edges, private again."""

from __future__ import annotations

import gc
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import moe_comm
from moe_comm.resharding.copy_services.batched_copy import BatchedCopy, CopyStats
from moe_comm.resharding.hold.heap_parameters import place_in_heap, share_in_place
from tests.helpers.rank_threads import on_ranks

NUM_ELEMENTS = (3 << 14) + 77
"""Of a tensor that neither begins nor ends with a page."""


class Weights(nn.Module):
    """Parameters over one storage, which begins and ends in the middle of a page."""

    def __init__(self, num_elements: int = NUM_ELEMENTS) -> None:
        super().__init__()
        self.storage = torch.full((num_elements,), -1, dtype=torch.int32)
        self.lower = nn.Parameter(self.storage[: num_elements // 3], requires_grad=False)
        self.upper = nn.Parameter(self.storage[num_elements // 3 :], requires_grad=False)


def shared_lines(tensor: torch.Tensor) -> list[str]:
    """Name the mappings of a storage that other processes may write to."""
    first = tensor.untyped_storage().data_ptr()
    last = first + tensor.untyped_storage().nbytes()
    lines = Path("/proc/self/maps").read_text().splitlines()
    bounds = [[int(bound, 16) for bound in line.split()[0].split("-")] for line in lines]
    return [
        line
        for line, (start, end) in zip(lines, bounds, strict=True)
        if start < last and end > first and line.split()[1].endswith("s")
    ]


class Exchange:
    """Rank 0 sends `values` and itself a part of them; rank 1 receives them into `target`."""

    def __init__(self, comm: moe_comm.Communicator) -> None:
        self.engine = BatchedCopy(comm, slot_bytes=1 << 12)
        self.rank = comm.rank_idx
        self.values = torch.zeros(NUM_ELEMENTS, dtype=torch.int32)
        self.weights = Weights()
        self.target = self.weights.storage
        # Every second element of the upper half stays what it is, the very last one too.
        half = NUM_ELEMENTS // 2
        receives = [(1, self.target[50:half], 0), (2, self.target[half:-1:2], 0)]
        sends = [(1, self.values[50:half], 1), (2, self.values[half:-1:2], 1)]
        if self.rank == 0:
            receives = []
        else:
            # Within the rank: the first bytes, before the first page.
            sends = [(3, self.values[:50], 1)]
            receives = [*receives, (3, self.target[:50], 1)]
        self.prepared = self.engine.prepare(sends, receives)

    def run(self, seed: int) -> CopyStats:
        self.values.copy_(torch.arange(NUM_ELEMENTS, dtype=torch.int32) * 8 + seed)
        kept = self.target.clone()
        stats = self.engine.run(self.prepared)
        if self.rank == 1:
            half = NUM_ELEMENTS // 2
            expected = self.values.clone()
            expected[half + 1 :: 2] = kept[half + 1 :: 2]
            expected[-1] = kept[-1]
            assert torch.equal(self.target, expected)
        return stats


def _refits(comm: moe_comm.Communicator) -> None:
    exchange = Exchange(comm)
    address = exchange.target.data_ptr()
    through_slots = exchange.run(0)
    before = exchange.target.clone()
    # Prepared before the memory was shared.
    with share_in_place(exchange.weights, comm) as shared:
        assert shared.num_bytes == 4 * NUM_ELEMENTS
        assert torch.equal(exchange.target, before)
        assert shared_lines(exchange.target)
        for seed in (1, 2):
            # Written by this rank alone between two refits, before the first page and behind the last.
            exchange.target[-1] = seed
            exchange.target[-2 - NUM_ELEMENTS % 2] = seed
            in_place = exchange.run(seed)
    assert exchange.target.data_ptr() == address
    assert not shared_lines(exchange.target)
    again = exchange.run(3)
    if comm.rank_idx == 0:
        num_bytes = through_slots.slot_bytes
        assert num_bytes > 2 * NUM_ELEMENTS
        assert (through_slots.direct_bytes, again.direct_bytes) == (0, 0)
        assert (in_place.direct_bytes, in_place.slot_bytes) == (num_bytes, 0)
        assert again.slot_bytes == num_bytes
    else:
        assert comm.heap_stats().live_bytes < 4 * NUM_ELEMENTS


def test_memory_is_written_in_place_up_to_its_edges_and_private_again() -> None:
    on_ranks(2, _refits)


def _two_engines(comm: moe_comm.Communicator) -> None:
    exchange = Exchange(comm)
    # Of the last element, and of memory that is not shared: a table tells that the run has begun.
    other = BatchedCopy(comm, slot_bytes=1 << 12)
    apart = torch.zeros(64, dtype=torch.int32)
    ends = [(1, exchange.values[-1:], 1), (2, apart, 1)]
    receives = [(1, exchange.target[-1:], 0), (2, apart, 0)]
    if comm.rank_idx == 0:
        prepared = other.prepare(ends, [])
        exchange.run(1)
        comm.bootstrap.all_gather(None)  # rank 1 has compared
        other.run(prepared)
        return
    prepared = other.prepare([], receives)
    shared = share_in_place(exchange.weights, comm)
    num_allocations = comm.heap_stats().num_allocations
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(other.run, prepared)
        deadline = time.monotonic() + 30
        while comm.heap_stats().num_allocations < num_allocations + 1:
            assert time.monotonic() < deadline
            assert not waits.done()
            time.sleep(0.001)
        with pytest.raises(ValueError, match="cannot be unshared while peers write to them"):
            shared.close()
        # Compares up to the edges, which the other run still holds.
        exchange.run(1)
        comm.bootstrap.all_gather(None)
        waits.result()
    assert int(exchange.target[-1]) == int(exchange.values[-1])
    shared.close()
    assert not shared_lines(exchange.target)


def test_engines_share_edges_and_close_waits_for_the_last_of_them() -> None:
    on_ranks(2, _two_engines)


def test_pages_that_cannot_be_private_again_are_given_to_nobody(
    communicator: moe_comm.Communicator,
) -> None:
    # So large that the allocator gives its memory back to the system.
    net = Weights(10 << 20)
    native = communicator.require_native()
    storage = net.storage.untyped_storage()
    live_bytes = communicator.heap_stats().live_bytes
    pages = native.share([(storage.data_ptr(), storage.nbytes())])
    del pages
    assert shared_lines(net.storage)
    assert communicator.heap_stats().live_bytes >= live_bytes + storage.nbytes()


@pytest.mark.parametrize("is_reversed", [False, True])
def test_the_largest_storage_at_an_address_is_shared(
    communicator: moe_comm.Communicator, is_reversed: bool
) -> None:
    memory = np.zeros(1 << 16, dtype=np.int32)
    parts = [torch.from_numpy(memory[: 3 << 12]), torch.from_numpy(memory)]
    net = nn.Module()
    for idx, part in enumerate(reversed(parts) if is_reversed else parts):
        net.register_buffer(f"part{idx}", part)
    with share_in_place(net, communicator) as shared:
        assert shared.num_bytes == memory.nbytes


@torch.inference_mode()
def test_weights_of_inference_mode_are_shared_where_they_are(
    communicator: moe_comm.Communicator,
) -> None:
    net = Weights()
    assert net.storage.is_inference()
    with share_in_place(net, communicator) as shared:
        assert shared.num_bytes == net.storage.nbytes
        assert shared_lines(net.storage)
    with pytest.raises(ValueError, match="lower cannot be moved into the heap: it was made in inf"):
        place_in_heap(net, communicator)


def test_what_no_page_lies_in_stays_private(communicator: moe_comm.Communicator) -> None:
    net = nn.Linear(8, 8)
    with share_in_place(net, communicator) as shared:
        assert shared.num_bytes == 0


def test_what_lies_in_the_heap_stays_there(communicator: moe_comm.Communicator) -> None:
    net = nn.Module()
    net.weight = nn.Parameter(communicator.empty(1 << 16, dtype=torch.float32), requires_grad=False)
    with share_in_place(net, communicator) as shared:
        assert shared.num_bytes == 0


def test_memory_is_private_when_its_holder_is_gone(communicator: moe_comm.Communicator) -> None:
    net = Weights()
    shared = share_in_place(net, communicator)
    assert shared_lines(net.storage)
    del shared
    gc.collect()
    assert not shared_lines(net.storage)
    assert torch.equal(net.storage, torch.full_like(net.storage, -1))


def test_a_storage_that_has_moved_takes_its_pages_with_it(
    communicator: moe_comm.Communicator,
) -> None:
    # So large that the allocator gives its memory back to the system, whatever it has learned.
    num_elements = 10 << 20
    net = Weights(num_elements)
    shared = share_in_place(net, communicator)
    live_bytes = communicator.heap_stats().live_bytes
    net.storage.untyped_storage().resize_(8 * num_elements)
    net.storage.fill_(5)
    shared.close()
    # Nobody knows who has the old memory: its pages are not given to anybody else.
    assert communicator.heap_stats().live_bytes == live_bytes
    assert bool((net.storage == 5).all())


def test_no_child_has_the_memory_while_it_is_shared(communicator: moe_comm.Communicator) -> None:
    net = Weights()
    with share_in_place(net, communicator) as shared:
        pid = os.fork()
        if pid == 0:
            shared.close()
            os._exit(0 if not shared_lines(net.storage) else 1)
        assert os.waitpid(pid, 0)[1] == 0
    assert bool((net.storage == -1).all())


def test_a_file_and_memory_that_is_shared_are_refused(
    communicator: moe_comm.Communicator, tmp_path: Path
) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(1 << 16))
    net = nn.Module()
    weight = torch.from_file(str(path), shared=False, size=1 << 16, dtype=torch.uint8)
    net.weight = nn.Parameter(weight, requires_grad=False)
    held = Weights()
    net.other = held.lower
    with pytest.raises(
        ValueError, match=r"65536 bytes are not private, writable memory.*weights\.bin"
    ):
        share_in_place(net, communicator)
    assert not shared_lines(held.storage)
    with (
        share_in_place(held, communicator),
        pytest.raises(ValueError, match=r"bytes are not private, writable memory of this process"),
    ):
        share_in_place(held, communicator)
    with pytest.raises(
        TypeError, match=r"side must be a torch.nn.Module or CheckpointViews, got 3"
    ):
        share_in_place(3, communicator)  # type: ignore[arg-type]


def test_a_heap_that_is_too_small_takes_none() -> None:
    ranks = moe_comm.RankThreads(1)
    with moe_comm.Communicator(ranks[0], backend="host", max_heap_bytes=4 << 20) as communicator:
        net = nn.Module()
        net.small = nn.Parameter(torch.ones(1 << 18))
        net.large = nn.Parameter(torch.ones(1 << 21))
        with pytest.raises(moe_comm.errors.CapacityError, match="cannot hold a window"):
            share_in_place(net, communicator)
        for weight in (net.small, net.large):
            assert not shared_lines(weight)
            assert bool((weight == 1).all())
