"""Sockets and shared memory between ranks that are threads of this process."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moe_comm import _host
from moe_comm.errors import CapacityError, PeerFailedError
from tests import _host_testing
from tests.helpers.failing_ranks import num_threads

PAGE = 4096
MIB = 1 << 20
WAIT_S = 20.0


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Poll until it holds; fail by name after WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {WAIT_S} s"
        time.sleep(0.001)


def connect_all(meshes: list[_host.PeerMesh], addresses: list[bytes], timeout_s: float) -> list:
    """Every rank's connect() in a thread; returns what each raised, or None."""
    raised: list[BaseException | None] = [None] * len(meshes)

    def connect(rank_idx: int) -> None:
        try:
            meshes[rank_idx].connect(rank_idx, addresses, timeout_s)
        except (ValueError, OSError) as error:
            raised[rank_idx] = error

    threads = [threading.Thread(target=connect, args=(idx,)) for idx in range(len(meshes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


@dataclasses.dataclass
class Ranks:
    meshes: list[_host.PeerMesh]
    heaps: list[_host.ShmHeap]

    def resolve(self, reader: int, owner: int, window: _host_testing.Window) -> memoryview:
        """The window's bytes as another rank addresses them."""
        wait_for(
            lambda: self.heaps[reader].resolve(owner, window.offer) is not None, "the announcement"
        )
        return self.heaps[reader].resolve(owner, window.offer)


@contextlib.contextmanager
def ranks(num_ranks: int, **options: int | bool) -> Iterator[Ranks]:
    meshes = [_host.PeerMesh.create() for _ in range(num_ranks)]
    raised = connect_all(meshes, [mesh.address() for mesh in meshes], WAIT_S)
    assert raised == [None] * num_ranks
    heaps = [_host.ShmHeap.create(mesh, **options) for mesh in meshes]
    yield Ranks(meshes, heaps)
    for mesh in meshes:
        mesh.leave()


def mapped_segments() -> list[str]:
    """Inode of the segment that each mapping of this process is of; some may be of earlier tests."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split()[4] for line in lines if "memfd:moe_comm" in line]


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def num_service_threads() -> int:
    return num_threads("moe-mesh")


# ------------------------------------------------------------------------------------- mesh


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_messages_arrive_in_order_between_all_pairs(num_ranks: int) -> None:
    with ranks(num_ranks) as group:
        for src, mesh in enumerate(group.meshes):
            for dst in range(num_ranks):
                for number in range(20):
                    mesh.post(dst, src, 7, b"%d>%d %d" % (src, dst, number))
        for dst, mesh in enumerate(group.meshes):
            for src in range(num_ranks):
                for number in range(20):
                    received: list[bytes] = []

                    def take(
                        mesh: _host.PeerMesh = mesh,
                        src: int = src,
                        received: list[bytes] = received,
                    ) -> bool:
                        payload = mesh.take(src, src, 7)
                        received.extend([] if payload is None else [payload])
                        return bool(received)

                    wait_for(take, f"message {number} of rank {src}")
                    assert received == [b"%d>%d %d" % (src, dst, number)]
                assert mesh.take(src, src, 7) is None


def test_channels_and_sequences_are_apart() -> None:
    with ranks(2) as group:
        waiter = _host_testing.ChangeWaiter(group.meshes[1])
        for channel, sequence in ((1, 1), (1, 2), (2, 1), (2**64 - 1, 2**64 - 1)):
            group.meshes[0].post(1, channel, sequence, b"%d.%d" % (channel, sequence))
        last = (2**64 - 1, 2**64 - 1)
        taken: list[bytes] = []
        while not taken:
            seen = waiter.num_changes
            payload = group.meshes[1].take(0, *last)
            if payload is not None:
                taken.append(payload)
            else:
                assert waiter.wait_beyond(seen, WAIT_S)
        assert group.meshes[1].take(0, 1, 2) == b"1.2"
        assert group.meshes[1].take(0, 2, 1) == b"2.1"
        assert group.meshes[1].take(0, 1, 1) == b"1.1"
        assert group.meshes[1].take(0, 2, 2) is None


@pytest.mark.parametrize("num_bytes", [0, 1, 100_000, MIB])
def test_message_sizes(num_bytes: int) -> None:
    payload = os.urandom(num_bytes)
    with ranks(2) as group:
        for _ in range(3):
            group.meshes[0].post(1, 0, 0, payload)
        for _ in range(3):
            received: list[bytes] = []

            def take(received: list[bytes] = received) -> bool:
                message = group.meshes[1].take(0, 0, 0)
                received.extend([] if message is None else [message])
                return bool(received)

            wait_for(take, "the message")
            assert received == [payload]


def test_too_large_a_message_names_both_sizes() -> None:
    most = MIB + 4096  # with the name of a call
    with ranks(2) as group, pytest.raises(ValueError, match=rf"{most} bytes, got {most + 1}"):
        group.meshes[0].post(1, 0, 0, bytes(most + 1))


def test_leaving_is_not_dying_and_does_not_overtake_messages() -> None:
    with ranks(3) as group:
        for number in range(50):
            group.meshes[0].post(1, 3, number, bytes(50_000))
        group.meshes[0].leave()
        group.meshes[0].leave()
        for peer in (1, 2):
            wait_for(
                lambda peer=peer: group.meshes[peer].state(0) != _host_testing.PeerState.ALIVE,
                "the goodbye",
            )
            assert group.meshes[peer].state(0) == _host_testing.PeerState.LEFT
        assert all(group.meshes[1].take(0, 3, number) == bytes(50_000) for number in range(50))
        assert group.meshes[1].state(2) == _host_testing.PeerState.ALIVE
        group.meshes[1].post(0, 0, 0, b"to nobody")


def test_removed_listener_is_not_called() -> None:
    with ranks(2) as group:
        removed = _host_testing.ChangeWaiter(group.meshes[1])
        kept = _host_testing.ChangeWaiter(group.meshes[1])
        group.meshes[0].post(1, 0, 0, b"x")
        assert removed.wait_beyond(0, WAIT_S)
        del removed
        seen = kept.num_changes
        group.meshes[0].post(1, 0, 1, b"x")
        assert kept.wait_beyond(seen, WAIT_S)


def test_connect_names_missing_ranks() -> None:
    meshes = [_host.PeerMesh.create() for _ in range(4)]
    addresses = [mesh.address() for mesh in meshes]
    raised = connect_all(meshes[:2], addresses, 1.5)
    for error in raised:
        assert isinstance(error, TimeoutError)
        assert "did not connect: rank 2, 3" in str(error)


def test_connect_says_when_a_rank_has_ended() -> None:
    meshes = [_host.PeerMesh.create() for _ in range(2)]
    addresses = [mesh.address() for mesh in meshes]
    meshes[0].leave()
    with pytest.raises(PeerFailedError, match=r"rank 0 cannot be reached from rank 1"):
        meshes[1].connect(1, addresses, WAIT_S)


def patched(address: bytes, offset: int, value: bytes) -> bytes:
    return address[:offset] + value + address[offset + len(value) :]


# Byte map of an address: csrc/heap/wire.h.
@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        pytest.param(
            48,
            b"other-machine\0" + bytes(50),
            r"one machine: .*ranks 0, 2: boot id .*rank 1: boot id other-machine"
            r"|one machine: rank 1: boot id other-machine; ranks 0, 2: boot id ",
            id="boot-id",
        ),
        pytest.param(
            40, (4026531).to_bytes(8, "little"), r"one network namespace: .*4026531", id="netns"
        ),
        pytest.param(
            4, (77).to_bytes(4, "little"), r"wire formats: .*rank 1: version 77", id="version"
        ),
        pytest.param(0, b"\0\0\0\0", r"address of rank 1 is not one of PeerMesh", id="magic"),
    ],
)
def test_ranks_that_cannot_share_memory_raise_everywhere(
    offset: int, value: bytes, message: str
) -> None:
    meshes = [_host.PeerMesh.create() for _ in range(3)]
    addresses = [mesh.address() for mesh in meshes]
    addresses[1] = patched(addresses[1], offset, value)
    for error in connect_all(meshes, addresses, WAIT_S):
        assert isinstance(error, ValueError)
        with pytest.raises(ValueError, match=message):
            raise error


def test_wrong_arguments_of_connect() -> None:
    meshes = [_host.PeerMesh.create() for _ in range(2)]
    addresses = [mesh.address() for mesh in meshes]
    with pytest.raises(ValueError, match=r"rank 2 is not in \[0, 2\)"):
        meshes[0].connect(2, addresses, 1.0)
    with pytest.raises(ValueError, match=r"rank 1 has another address"):
        meshes[0].connect(1, addresses, 1.0)
    with pytest.raises(ValueError, match=r"ranks 0 and 1 have the same address"):
        meshes[0].connect(0, [addresses[0], addresses[0]], 1.0)
    with pytest.raises(ValueError, match=r"rank 3 is not in \[0, 0\)"):
        meshes[0].state(3)


def test_a_stranger_is_not_a_rank() -> None:
    meshes = [_host.PeerMesh.create() for _ in range(2)]
    addresses = [mesh.address() for mesh in meshes]
    name = "\0moe_comm-" + addresses[0][24:40].hex()
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as liar:
        silent.connect(name)
        liar.connect(name)
        liar.sendall(patched(bytes(48), 0, addresses[0][:4] + (1).to_bytes(4, "little")))
        assert connect_all(meshes, addresses, WAIT_S) == [None, None]
        meshes[0].post(1, 0, 0, b"for the rank")
        wait_for(lambda: meshes[1].take(0, 0, 0) == b"for the rank", "the message")


# ------------------------------------------------------------------------------------- heap


def test_every_rank_sees_the_same_bytes() -> None:
    with ranks(3) as group:
        window = group.heaps[0].allocate(100_000)
        own = memoryview(window)
        for reader in range(3):
            view = group.resolve(reader, 0, window)
            assert len(view) == 100_000
            view[reader] = 100 + reader
            view[99_999] = reader
            assert own[reader] == 100 + reader
            assert own[99_999] == reader


def test_threads_share_one_mapping() -> None:
    gc.collect()
    earlier = mapped_segments()
    with ranks(3) as group:
        windows = [heap.allocate(1000) for heap in group.heaps]
        for reader in range(3):
            for owner in range(3):
                group.resolve(reader, owner, windows[owner])
        mapped = [segment for segment in mapped_segments() if segment not in earlier]
        assert len(mapped) == len(set(mapped)) == 3


def test_offers_are_checked_against_the_segment() -> None:
    with ranks(2) as group:
        window = group.heaps[0].allocate(PAGE)
        group.resolve(1, 0, window)
        segment_bytes = group.heaps[0].stats().segment_bytes
        for reader in range(2):
            assert group.heaps[reader].resolve(0, (0, segment_bytes - PAGE, PAGE)) is not None
            with pytest.raises(
                ValueError, match=rf"rank 0 offers {PAGE} bytes .* {segment_bytes} bytes"
            ):
                group.heaps[reader].resolve(0, (0, segment_bytes - PAGE + 64, PAGE))
            with pytest.raises(ValueError, match="offers"):
                group.heaps[reader].resolve(0, (0, 2**64 - 64, PAGE))
            assert group.heaps[reader].resolve(0, (1, 0, PAGE)) is None
            assert group.heaps[reader].resolve(0, (2**32 - 1, 0, PAGE)) is None


def test_find_knows_own_memory_only() -> None:
    with ranks(2) as group:
        first = group.heaps[0].allocate(3 * MIB)
        second = group.heaps[0].allocate(5 * MIB)
        foreign = group.heaps[1].allocate(MIB)
        for window in (first, second):
            segment_idx, offset, _ = window.offer
            assert group.heaps[0].find(window.address, window.bytes) == window.offer
            assert group.heaps[0].find(window.address + 17, 100) == (segment_idx, offset + 17, 100)
        # 4 MiB of segment behind its first window.
        assert group.heaps[0].find(first.address + 4 * MIB - 10, 10) == (0, 4 * MIB - 10, 10)
        assert group.heaps[0].find(first.address + 4 * MIB - 10, 11) is None
        assert group.heaps[0].find(first.address - 1, 10) is None
        assert group.heaps[0].find(second.address, 64 * MIB) is None
        assert group.heaps[0].find(foreign.address, 10) is None
        assert group.heaps[0].find(id(group), 8) is None


@pytest.mark.parametrize("num_bytes", [1, 63, 64, 4095, 4096, 4097, 3 * MIB])
def test_alignment_and_poison(num_bytes: int) -> None:
    with ranks(1, poison=True) as group:
        group.heaps[0].allocate(65)
        window = group.heaps[0].allocate(num_bytes)
        assert window.bytes == num_bytes
        assert window.address % (4096 if num_bytes >= 4096 else 64) == 0
        assert bytes(window) == b"\xff" * num_bytes
        memoryview(window)[:] = bytes(num_bytes)
        place = window.offer
        del window
        again = group.heaps[0].allocate(num_bytes)
        assert again.offer == place, "what was freed last is used first"
        assert bytes(again) == b"\xff" * num_bytes


def test_a_window_without_memory() -> None:
    with ranks(2) as group:
        window = group.heaps[0].allocate(0)
        assert window.offer == (0, 0, 0)
        assert group.heaps[0].stats().segment_bytes == 0
        assert len(group.heaps[1].resolve(0, window.offer)) == 0
        window.shrink(0)
        window.quarantine()


def test_growth_has_headroom_and_respects_the_limit() -> None:
    with ranks(1, limit_bytes=20 * MIB) as group:
        (heap,) = group.heaps
        small = heap.allocate(10)
        assert heap.stats().segment_bytes == 2 * MIB
        large = heap.allocate(8 * MIB)
        assert heap.stats().segment_bytes == 2 * MIB + 10 * MIB  # 8 and headroom, in 2 MiB steps
        assert heap.stats().resident_bytes == 2 * MIB + 10 * MIB
        rest = heap.allocate(8 * MIB)  # growth returns the pages of free memory first
        assert heap.stats().segment_bytes == 22 * MIB
        assert heap.stats().resident_bytes == 20 * MIB
        assert heap.stats().num_growths == 3
        with pytest.raises(CapacityError, match=r"limit is 20971520 bytes") as caught:
            heap.allocate(3 * MIB)
        assert caught.value.needed_bytes == 3 * MIB
        assert caught.value.available_bytes == 2 * MIB
        assert heap.available_bytes() == 20 * MIB - 16 * MIB - 64
        del large, rest
        assert heap.allocate(10 * MIB).bytes == 10 * MIB
        del small
    with ranks(1, limit_bytes=100_000) as group:
        assert group.heaps[0].allocate(90_000).bytes == 90_000
        with pytest.raises(CapacityError):
            group.heaps[0].allocate(98_305)


def test_more_than_the_machine_has_is_an_error_not_a_kill() -> None:
    with ranks(1) as group:
        (heap,) = group.heaps
        for num_bytes in (1 << 42, 1 << 60, (1 << 64) - 1):
            with pytest.raises(CapacityError) as caught:
                heap.allocate(num_bytes)
            assert caught.value.needed_bytes >= min(num_bytes, 1 << 42)
            assert 0 < caught.value.available_bytes < 1 << 42
        with pytest.raises(CapacityError):
            heap.reserve(1 << 42)
        assert heap.stats().segment_bytes == 0
        assert heap.allocate(100).bytes == 100


def test_reserve_makes_room_ahead() -> None:
    with ranks(1) as group:
        (heap,) = group.heaps
        heap.reserve(5 * MIB)
        assert heap.stats().segment_bytes == 6 * MIB
        heap.reserve(5 * MIB)
        assert heap.stats().segment_bytes == 6 * MIB
        window = heap.allocate(5 * MIB)
        assert heap.stats().num_growths == 0
        heap.reserve(5 * MIB)
        assert heap.stats().num_segments == 2
        del window


def test_allocate_free_never_grows() -> None:
    with ranks(1) as group:
        (heap,) = group.heaps
        assert heap.allocate_free(10 * MIB) is None
        heap.reserve(4 * MIB)
        first = heap.allocate_free(MIB + 1)
        assert first.bytes == MIB + 1
        rest = heap.allocate_free(100 * MIB)
        assert rest.bytes == 3 * MIB - 4096
        assert heap.allocate_free(1) is None
        assert heap.stats().segment_bytes == 4 * MIB
        del first
        assert heap.allocate_free(100 * MIB).bytes == MIB + 4096


def test_shrink_gives_the_tail_back() -> None:
    with ranks(1) as group:
        (heap,) = group.heaps
        window = heap.allocate(2 * MIB)
        memoryview(window)[:3] = b"abc"
        address = window.address
        window.shrink(5000)
        assert (window.bytes, window.address, bytes(window)[:3]) == (5000, address, b"abc")
        stats = heap.stats()
        assert (stats.live_bytes, stats.num_windows, stats.peak_live_bytes) == (8192, 1, 2 * MIB)
        with pytest.raises(ValueError, match=r"5001 bytes of a window of 5000"):
            window.shrink(5001)
        tail = heap.allocate_free(2 * MIB)
        assert tail.offer[1] == window.offer[1] + 8192


def test_quarantined_bytes_stay_aside() -> None:
    with ranks(1) as group:
        (heap,) = group.heaps
        heap.reserve(2 * MIB)
        window = heap.allocate(MIB)
        place = window.offer
        window.quarantine()
        assert heap.stats().quarantined_bytes == 0
        del window
        assert heap.stats().quarantined_bytes == MIB
        assert heap.stats().live_bytes == 0
        other = heap.allocate_free(2 * MIB)
        assert other.bytes == MIB
        assert other.offer != place
        heap.end_quarantine()
        assert heap.stats().quarantined_bytes == 0
        assert heap.allocate(MIB).offer == place


def test_end_of_quarantine_covers_windows_still_held() -> None:
    with ranks(1) as group:
        (heap,) = group.heaps
        window = heap.allocate(MIB)
        window.quarantine()
        heap.end_quarantine()
        del window
        assert heap.stats().quarantined_bytes == 0
        assert heap.stats().live_bytes == 0


def resident_shared_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[2]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("with_huge_pages", [False, True])
def test_trim_returns_pages_and_reuse_faults_them_in(with_huge_pages: bool) -> None:
    with ranks(1, with_huge_pages=with_huge_pages) as group:
        (heap,) = group.heaps
        kept = heap.allocate(3 * MIB)
        memoryview(kept)[:] = b"k" * len(memoryview(kept))
        window = heap.allocate(64 * MIB)
        memoryview(window)[-1] = 9
        resident_bytes = heap.stats().resident_bytes
        assert 67 * MIB <= resident_bytes <= heap.stats().segment_bytes
        before = resident_shared_bytes()
        del window
        returned = heap.trim()
        assert returned >= 64 * MIB
        assert heap.stats().resident_bytes == resident_bytes - returned
        trimmed = resident_shared_bytes()
        assert before - trimmed >= 60 * MIB
        assert heap.trim() == 0
        assert bytes(kept) == b"k" * (3 * MIB)
        again = heap.allocate(64 * MIB)
        assert resident_shared_bytes() - trimmed >= 60 * MIB, "not left to whoever touches it first"
        cold_bytes = heap.stats().segment_bytes - heap.stats().resident_bytes
        assert 0 <= cold_bytes <= returned - 64 * MIB + 4 * MIB
        assert memoryview(again)[-1] == 0


def test_windows_outlive_the_heap_and_its_mesh() -> None:
    gc.collect()
    fds_before, earlier = num_fds(), mapped_segments()
    with ranks(2) as group:
        window = group.heaps[0].allocate(MIB)
        view = group.resolve(1, 0, window)
    view.release()
    del group, view
    gc.collect()
    assert num_fds() == fds_before
    (mapped,) = [segment for segment in mapped_segments() if segment not in earlier]
    memoryview(window)[:] = b"z" * MIB
    freeing = threading.Thread(target=lambda held: held.pop(), args=([window],))
    del window
    freeing.start()
    freeing.join()
    assert mapped not in mapped_segments()


def test_a_mesh_serves_one_heap() -> None:
    with ranks(2) as group:
        group.heaps[0].allocate(10)
        second = _host.ShmHeap.create(group.meshes[0])
        with pytest.raises(ValueError, match="a mesh serves one heap"):
            second.allocate(10)


def test_steady_state_costs_no_memory_descriptors_or_threads() -> None:
    gc.collect()  # or what earlier tests left ends in between
    with ranks(2) as group:
        (heap, _) = group.heaps

        def round_of_windows() -> None:
            held = [heap.allocate(num_bytes) for num_bytes in (100, 70_000, MIB, 5000)]
            held[1].shrink(100)

        for _ in range(10):
            round_of_windows()
        before = (heap.stats().segment_bytes, num_fds(), num_service_threads())
        for _ in range(10_000):
            round_of_windows()
        stats = heap.stats()
        assert (stats.segment_bytes, num_fds(), num_service_threads()) == before
        assert (stats.live_bytes, stats.num_windows) == (0, 0)
        assert stats.num_allocations == 4 * 10_010


def test_descriptors_and_threads_per_rank() -> None:
    for num_ranks in (1, 4, 8):
        gc.collect()
        threads_before, fds_before = num_service_threads(), num_fds()
        with ranks(num_ranks) as group:
            for heap in group.heaps:
                heap.allocate(10)
            # A socket per peer, one epoll and one wake descriptor; threads need no pidfd.
            assert num_fds() - fds_before == num_ranks * (num_ranks - 1 + 2)
            assert num_service_threads() - threads_before == num_ranks
        del group, heap
        assert num_fds() == fds_before
        assert num_service_threads() == threads_before


def test_many_threads_allocate_free_and_trim() -> None:
    with ranks(2, poison=False) as group:
        (heap, _) = group.heaps
        errors: list[str] = []

        def work(seed: int) -> None:
            for number in range(300):
                num_bytes = 1 + (seed * 7919 + number * 104_729) % 300_000
                window = heap.allocate(num_bytes)
                view = memoryview(window)
                view[0] = view[-1] = seed
                if number % 3 == 0:
                    window.shrink(num_bytes // 2 + 1)
                    view = memoryview(window)
                    view[-1] = seed
                if number % 50 == 49:
                    heap.trim()
                if (view[0], view[-1]) != (seed, seed):
                    errors.append(f"thread {seed} lost a byte in round {number}")
                view.release()

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert heap.stats().live_bytes == 0
        assert heap.trim() >= 0
