"""The heap's bookkeeping against a list of ranges: any order of calls, no byte given out twice."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests import _host_testing

PAGE = 4096
SMALL = 64
SEGMENT_BYTES = 64 * PAGE
OFFSET = 1 << 40

SIZES = st.one_of(
    st.integers(1, 300),
    st.integers(PAGE - 70, PAGE + 70),
    st.integers(1, 3 * SEGMENT_BYTES // 2),
    st.integers(1, 12).map(lambda pages: pages * PAGE),
)


@dataclasses.dataclass
class Held:
    """A live block as the test remembers it."""

    place: tuple[int, int, int]
    quarantine_round: int = -1


def alignment(num_bytes: int) -> int:
    return SMALL if num_bytes < PAGE else PAGE


class AllocatorMachine(RuleBasedStateMachine):
    """Drives the allocator and a model of it: who holds what, and what is kept aside."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = _host_testing.WindowAllocator()
        self.bounds: list[tuple[int, int]] = []
        self.held: dict[int, Held] = {}
        self.aside: list[tuple[int, int, int]] = []
        self.round = 0
        self.num_allocations = 0
        self.add_segment()

    @precondition(lambda self: len(self.bounds) < 4)
    @rule()
    def add_segment(self) -> None:
        self.allocator.add_segment(len(self.bounds), SEGMENT_BYTES, OFFSET)
        self.bounds.append((OFFSET, OFFSET + SEGMENT_BYTES))

    @rule(data=st.data(), num_bytes=SIZES, is_upper=st.booleans())
    def extend(self, data: st.DataObject, num_bytes: int, is_upper: bool) -> None:
        """By what is missing at one end, to whole pages: then a window fits there, and by a page less it did not."""
        segment_idx = data.draw(st.sampled_from(range(len(self.bounds))))
        missing = self.allocator.missing_bytes(segment_idx, num_bytes, is_upper)
        rounded = self.allocator.rounded_bytes(num_bytes)
        lower, upper = self.bounds[segment_idx]
        added = -(-missing // PAGE) * PAGE
        if added == 0:
            assert self.could_hold(rounded)
            return
        self.allocator.extend(segment_idx, added, is_upper)
        self.bounds[segment_idx] = (lower, upper + added) if is_upper else (lower - added, upper)
        lower, upper = self.bounds[segment_idx]
        end = max((p[1] + p[2] for p in self.taken() if p[0] == segment_idx), default=lower)
        start = min((p[1] for p in self.taken() if p[0] == segment_idx), default=upper)
        room = upper - -(-end // alignment(rounded)) * alignment(rounded)
        if not is_upper:
            room = start - lower
        assert rounded <= room < rounded + PAGE
        assert self.allocator.missing_bytes(segment_idx, num_bytes, is_upper) == 0

    def taken(self) -> list[tuple[int, int, int]]:
        return [held.place for held in self.held.values()] + self.aside

    def free_ranges(self) -> list[tuple[int, int]]:
        """(offset, bytes) of what neither a window nor the quarantine holds, computed from the model."""
        ranges = []
        taken = self.taken()
        for segment_idx, (position, end) in enumerate(self.bounds):
            for _, offset, num_bytes in sorted(place for place in taken if place[0] == segment_idx):
                ranges.append((position, offset - position))
                position = offset + num_bytes
            ranges.append((position, end - position))
        return [(offset, num_bytes) for offset, num_bytes in ranges if num_bytes > 0]

    def could_hold(self, rounded: int) -> bool:
        step = alignment(rounded)
        return any(
            -(-offset // step) * step + rounded <= offset + num_bytes
            for offset, num_bytes in self.free_ranges()
        )

    def take(self, block_idx: int, num_bytes: int) -> None:
        place = self.allocator.place(block_idx)
        assert place[2] == num_bytes
        assert place[1] % alignment(num_bytes) == 0
        self.held[block_idx] = Held(place)
        self.num_allocations += 1

    @rule(num_bytes=SIZES)
    def allocate(self, num_bytes: int) -> None:
        rounded = self.allocator.rounded_bytes(num_bytes)
        assert rounded >= num_bytes
        possible = self.could_hold(rounded)
        block_idx = self.allocator.allocate(num_bytes)
        assert (block_idx is not None) == possible
        if block_idx is not None:
            self.take(block_idx, rounded)

    @rule(most_bytes=SIZES)
    def allocate_largest(self, most_bytes: int) -> None:
        rounded = self.allocator.rounded_bytes(most_bytes)
        largest = self.allocator.largest_free_bytes()
        block_idx = self.allocator.allocate_largest(most_bytes)
        if block_idx is None:
            assert not self.free_ranges()
            return
        num_bytes = self.allocator.place(block_idx)[2]
        assert num_bytes == min(rounded, largest)
        self.take(block_idx, num_bytes)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        block_idx = data.draw(st.sampled_from(sorted(self.held)))
        held = self.held.pop(block_idx)
        self.allocator.free(block_idx)
        if held.quarantine_round == self.round:
            self.aside.append(held.place)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def shrink(self, data: st.DataObject) -> None:
        block_idx = data.draw(st.sampled_from(sorted(self.held)))
        held = self.held[block_idx]
        segment_idx, offset, num_bytes = held.place
        wanted = data.draw(st.integers(0, num_bytes))
        kept = max(SMALL, self.allocator.rounded_bytes(wanted))
        self.allocator.shrink(block_idx, wanted)
        if kept < num_bytes:
            held.place = (segment_idx, offset, kept)
            if held.quarantine_round == self.round:
                self.aside.append((segment_idx, offset + kept, num_bytes - kept))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        block_idx = data.draw(st.sampled_from(sorted(self.held)))
        self.held[block_idx].quarantine_round = self.round
        self.allocator.quarantine(block_idx)

    @rule()
    def end_quarantine(self) -> None:
        self.allocator.end_quarantine()
        self.round += 1
        self.aside.clear()

    @rule()
    def free_all(self) -> None:
        for block_idx in self.held:
            self.allocator.free(block_idx)
        self.held.clear()
        self.end_quarantine()
        for segment_idx, (start, end) in enumerate(self.bounds):
            assert self.allocator.blocks(segment_idx) == [(start, end - start, True)]

    @invariant()
    def places_are_kept(self) -> None:
        for block_idx, held in self.held.items():
            assert self.allocator.place(block_idx) == held.place

    @invariant()
    def blocks_match_the_model(self) -> None:
        found = []
        for segment_idx, (position, end) in enumerate(self.bounds):
            was_free = False
            for offset, num_bytes, is_free in self.allocator.blocks(segment_idx):
                assert offset == position, "blocks cover the segment without gap or overlap"
                assert not (was_free and is_free), "free neighbors are one block"
                position += num_bytes
                was_free = is_free
                if is_free:
                    found.append((offset, num_bytes))
            assert position == end
        assert sorted(found) == sorted(self.free_ranges())

    @invariant()
    def counters_match_the_model(self) -> None:
        live = sum(held.place[2] for held in self.held.values())
        aside = sum(place[2] for place in self.aside)
        counters = self.allocator.counters()
        assert counters["live_bytes"] == live
        assert counters["quarantined_bytes"] == aside
        assert counters["free_bytes"] == sum(b - a for a, b in self.bounds) - live - aside
        assert counters["num_live"] == len(self.held)
        assert counters["num_allocations"] == self.num_allocations
        assert counters["peak_live_bytes"] >= live


AllocatorMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=60)
TestAllocator = AllocatorMachine.TestCase


def test_recently_freed_memory_comes_first() -> None:
    allocator = _host_testing.WindowAllocator()
    allocator.add_segment(0, SEGMENT_BYTES)
    # Separators keep the freed blocks from merging.
    blocks = [(allocator.allocate(2 * PAGE), allocator.allocate(PAGE)) for _ in range(8)]
    for idx in (5, 1, 6):
        allocator.free(blocks[idx][0])
    places = [allocator.place(allocator.allocate(2 * PAGE)) for _ in range(3)]
    assert places == [(0, 3 * PAGE * idx, 2 * PAGE) for idx in (6, 1, 5)]


@pytest.mark.parametrize(
    ("num_bytes", "rounded"),
    [(1, 64), (64, 64), (65, 128), (4032, 4032), (4033, 4096), (4096, 4096), (4097, 8192)],
)
def test_granularity(num_bytes: int, rounded: int) -> None:
    assert _host_testing.WindowAllocator.rounded_bytes(num_bytes) == rounded


def test_small_windows_do_not_scatter() -> None:
    allocator = _host_testing.WindowAllocator()
    allocator.add_segment(0, SEGMENT_BYTES)
    small = []
    for _ in range(40):
        small.append(allocator.allocate(64))
        allocator.free(allocator.allocate(8 * PAGE))
    assert {allocator.place(block_idx)[1] // PAGE for block_idx in small} == {0}
