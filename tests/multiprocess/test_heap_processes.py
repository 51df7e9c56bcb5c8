"""Shared memory between processes: who dies, who leaves, and what is left behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_comm import _host
from tests.helpers import fresh_python
from tests.helpers import heap_ranks as steps
from tests.helpers.heap_ranks import MIB, WAIT_S, RankProcess, rank_processes
from tests.helpers.source_tree import captured


@contextlib.contextmanager
def ended_after(pid: int) -> Iterator[None]:
    """End a process that a rank forked."""
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# ------------------------------------------------------------------------------------ memory


def test_peers_write_into_each_others_windows() -> None:
    with rank_processes(3) as workers:
        offers = [worker.call(steps.allocate, 5 * MIB, b"-") for worker in workers]
        for src, worker in enumerate(workers):
            for dst in range(3):
                worker.call(steps.write_peer, dst, offers[dst], src * MIB + 17, b"from %d" % src)
        for dst, worker in enumerate(workers):
            for src in range(3):
                assert worker.call(steps.read_own, 0, src * MIB + 16, 7) == b"-from %d" % src
                assert workers[src].call(steps.read_peer, dst, offers[dst], 0, 3) == b"---"


def test_growth_is_announced_and_mapped_once() -> None:
    with rank_processes(2) as (owner, reader):
        for num_bytes in (100, 3 * MIB, 9 * MIB):
            offer = owner.call(steps.allocate, num_bytes, b"x")
            assert reader.call(steps.read_peer, 0, offer, num_bytes - 1, 1) == b"x"
        own = owner.call(steps.stats)
        assert own["num_segments"] == 3
        assert reader.call(steps.stats)["peer_segment_bytes"] == own["segment_bytes"]
        assert reader.call(steps.footprint)["num_mappings"] == 3
        assert owner.call(steps.footprint)["num_mappings"] == 3


def test_trimmed_memory_is_usable_again_by_peers() -> None:
    with rank_processes(2) as (owner, reader):
        offer = owner.call(steps.allocate, 32 * MIB, b"a")
        assert reader.call(steps.read_peer, 0, offer, 31 * MIB, 1) == b"a"
        owner.call(steps.drop_windows)
        assert owner.call(steps.trim) >= 32 * MIB
        again = owner.call(steps.allocate, 32 * MIB)
        assert again == offer
        reader.call(steps.write_peer, 0, again, 31 * MIB, b"new")
        assert owner.call(steps.read_own, 0, 31 * MIB - 1, 5) == b"\0new\0"


@pytest.mark.full
def test_nothing_grows_over_ten_thousand_windows() -> None:
    with rank_processes(2) as workers:
        for worker in workers:
            worker.call(steps.churn, 1000)
        grown = [worker.call(steps.stats)["segment_bytes"] for worker in workers]
        for worker, of_peer in zip(workers, reversed(grown), strict=True):
            worker.call(steps.wait_for_peer_segments, of_peer)
        before = [(worker.call(steps.footprint), worker.call(steps.stats)) for worker in workers]
        for worker in workers:
            worker.call(steps.churn, 10_000)
        for worker, (footprint, stats) in zip(workers, before, strict=True):
            now = worker.call(steps.footprint)
            for name in ("num_fds", "num_threads", "num_mappings"):
                assert now[name] == footprint[name], name
            assert now["shared_bytes"] - footprint["shared_bytes"] < MIB
            assert worker.call(steps.stats)["segment_bytes"] == stats["segment_bytes"]


def test_destroy_leaves_nothing() -> None:
    workers = [RankProcess() for _ in range(2)]
    try:
        before = [worker.call(steps.footprint) for worker in workers]
        addresses = [worker.call(steps.open_mesh) for worker in workers]
        for rank_idx, worker in enumerate(workers):
            worker.start(steps.connect, rank_idx, addresses, {})
        for worker in workers:
            worker.finish()
        offers = [worker.call(steps.allocate, 4 * MIB) for worker in workers]
        for rank_idx, worker in enumerate(workers):
            worker.call(steps.read_peer, 1 - rank_idx, offers[1 - rank_idx], 0, 1)
        for worker in workers:
            worker.call(steps.destroy)
            worker.call(steps.wait_for_no_thread)
        for worker, footprint in zip(workers, before, strict=True):
            now = worker.call(steps.footprint)
            for name in ("num_fds", "num_threads", "num_mappings"):
                assert now[name] == footprint[name], name
    finally:
        for worker in workers:
            worker.close()


def test_descriptors_per_rank_are_linear_in_ranks() -> None:
    workers = [RankProcess() for _ in range(4)]
    try:
        before = workers[0].call(steps.footprint)
        addresses = [worker.call(steps.open_mesh) for worker in workers]
        for rank_idx, worker in enumerate(workers):
            worker.start(steps.connect, rank_idx, addresses, {})
        for worker in workers:
            worker.finish()
        workers[0].call(steps.allocate, MIB)
        now = workers[0].call(steps.footprint)
        # A socket and a pidfd per peer, one epoll and one wake descriptor.
        assert now["num_fds"] - before["num_fds"] <= 3 * 2 + 2
        assert now["num_threads"] - before["num_threads"] == 1
    finally:
        for worker in workers:
            worker.close()


def test_huge_pages_are_mapped_by_owner_and_peer() -> None:
    with rank_processes(2) as (owner, reader):
        offer = owner.call(steps.allocate, 30 * MIB, b"h")
        reported = owner.call(steps.stats)
        if reported["huge_page_bytes"] < 32 * MIB:  # none at all, or too few are free just now
            got = f"{reported['huge_page_bytes']} bytes in 2 MiB pages"
            pytest.skip(f"this machine gives shared memory {got} of {32 * MIB} (MADV_COLLAPSE)")
        verified = owner.call(steps.stats, True)
        assert verified["huge_page_bytes"] == reported["huge_page_bytes"] == 32 * MIB
        assert reader.call(steps.wait_for_huge_mapping, 32 * MIB) == 32 * MIB, "before any access"
        assert reader.call(steps.read_peer, 0, offer, 5 * MIB, 1) == b"h"


def test_limits_of_the_process_are_errors_not_signals() -> None:
    """RLIMIT_FSIZE would kill by SIGXFSZ, RLIMIT_AS fails mmap; both are a CapacityError."""
    script = """
        import resource, signal, sys
        from moe_comm import _host
        from moe_comm.errors import CapacityError
        mesh = _host.PeerMesh.create()
        mesh.connect(0, [mesh.address()], 10.0)
        heap = _host.ShmHeap.create(mesh)
        which, extra = getattr(resource, sys.argv[1]), int(sys.argv[2])
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        limit = extra + (used if sys.argv[1] == "RLIMIT_AS" else 0)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it, other programs do not
        resource.setrlimit(which, (limit, limit))
        try:
            heap.allocate(512 << 20)
        except CapacityError as error:
            print("refused", error.needed_bytes, error)
        print("small", heap.allocate(1 << 20).bytes)
        """
    for limit in ("RLIMIT_FSIZE", "RLIMIT_AS"):
        ended = run_python(script, limit, str(256 * MIB))
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.startswith(f"refused {512 * MIB} "), ended.stdout
        assert f"{limit} is " in ended.stdout
        assert f"small {MIB}" in ended.stdout


@pytest.mark.parametrize("what", ["hears of peers", "copies and adds rows", "in flight"])
def test_a_thread_that_the_system_refuses_is_named(what: str) -> None:
    """A thread's stack does not fit what RLIMIT_AS leaves; afterwards signals come as before."""
    script = """
        import resource, signal, sys, torch, moe_comm
        from moe_comm import _host
        torch.set_num_threads(1)
        def limit(extra):
            used = int(open("/proc/self/statm").read().split()[0]) * 4096
            resource.setrlimit(resource.RLIMIT_AS, (used + extra, resource.RLIM_INFINITY))
        def make():
            return moe_comm.Communicator(backend="host", num_threads=3)
        config = moe_comm.EpConfig(
            num_experts=2, num_topk=1, hidden=1024, num_max_tokens_per_rank=4096
        )
        x = torch.zeros(4096, 1024, dtype=torch.bfloat16)
        choices = torch.zeros(4096, 1, dtype=torch.int64)
        try:
            if sys.argv[1] == "hears of peers":
                limit(4 << 20)
                make()
            else:
                communicator = make()
                buffer = moe_comm.EpBuffer(communicator, config)
                communicator.reserve(64 << 20)
                limit(4 << 20)
                buffer.dispatch(x, choices, async_op=sys.argv[1] == "in flight")
        except OSError as error:
            print("refused", error)
        limit(1 << 40)
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
        with make() as communicator:
            print("then", communicator.num_ranks)
        """
    ended = fresh_python.run_python("-c", textwrap.dedent(script), what, timeout=2 * WAIT_S)
    assert ended.returncode == 0, ended.stderr
    text = r"refused \[Errno 12\] cannot start the thread that .*" + re.escape(what)
    assert re.match(
        text + r".*, with a stack of \d+ bytes: Resource temporarily unavailable; "
        r"RLIMIT_AS is \d+ bytes, of which \d+ are left.*\nthen 1\n$",
        ended.stdout,
    ), ended.stdout


def test_a_dispatch_names_the_limit_that_keeps_its_rows_out() -> None:
    script = """
        import resource, torch, moe_comm
        config = moe_comm.EpConfig(
            num_experts=2, num_topk=1, hidden=1024, num_max_tokens_per_rank=40000
        )
        buffer = moe_comm.EpBuffer(moe_comm.Communicator(backend="host"), config)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))
        x = torch.zeros(40000, 1024, dtype=torch.bfloat16)
        try:
            buffer.dispatch(x, torch.zeros(40000, 1, dtype=torch.int64))
        except moe_comm.CapacityError as error:
            print("refused", error.available_bytes, error)
        """
    # The whole package: run_python() has its native module alone.
    ended = fresh_python.run_python("-c", textwrap.dedent(script), timeout=2 * WAIT_S)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("refused 100000 rank 0 needs "), ended.stdout
    assert "RLIMIT_FSIZE is 100000 bytes" in ended.stdout


def test_a_small_dev_shm_does_not_matter(tmp_path: Path) -> None:
    script = f"""
        import os
        from moe_comm import _host
        assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 1 << 20
        mesh = _host.PeerMesh.create()
        mesh.connect(0, [mesh.address()], 10.0)
        window = _host.ShmHeap.create(mesh).allocate({48 * MIB})
        memoryview(window)[-1] = 5
        assert os.listdir("/dev/shm") == []
        print("allocated")
        """
    program = tmp_path / "program.py"
    program.write_text(as_program(script))
    shell = f'mount -t tmpfs -o size=1M tmpfs /dev/shm && exec "{sys.executable}" "{program}"'
    probe = ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=1M tmpfs /dev/shm"]
    with contextlib.suppress(FileNotFoundError):
        if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
            ended = captured(
                ["unshare", "-m", "sh", "-c", shell],
                timeout=2 * WAIT_S,
                cwd=Path.cwd(),
                env=python_environment(),
            )
            assert ended.stdout.strip() == "allocated", ended.stderr
            return
    pytest.skip("a mount namespace of its own is not permitted here")


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A memory cgroup of 800 MiB for a process to move into."""
    made = Path(
        "/sys/fs/cgroup/memory" if Path("/sys/fs/cgroup/memory").exists() else "/sys/fs/cgroup"
    )
    limit_name = "memory.limit_in_bytes" if made.name == "memory" else "memory.max"
    made = made / f"moe_comm_test_{os.getpid()}"
    try:
        made.mkdir()
        (made / limit_name).write_text(str(800 * MIB))
    except OSError as error:
        with contextlib.suppress(OSError):
            made.rmdir()
        pytest.skip(f"cannot make a memory cgroup: {error}")
    yield made
    deadline = time.monotonic() + WAIT_S
    while made.exists() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # busy until its processes are reaped
            made.rmdir()
        time.sleep(0.01)


def test_ranks_that_fill_their_container_get_errors_not_kills(memory_group: Path) -> None:
    script = """
        import os, sys
        from pathlib import Path
        Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
        from moe_comm import _host
        from moe_comm.errors import CapacityError
        mesh = _host.PeerMesh.create()
        mesh.connect(0, [mesh.address()], 10.0)
        heap = _host.ShmHeap.create(mesh)
        print("ready", flush=True)
        sys.stdin.readline()
        held = []
        try:
            while len(held) < 20:
                held.append(heap.allocate(50 << 20))
        except CapacityError:
            print("refused")
        """
    with (
        start_python(script, str(memory_group)) as one,
        start_python(script, str(memory_group)) as two,
    ):
        for program in (one, two):
            assert program.stdout.readline() == "ready\n"
        for program in (one, two):
            program.stdin.write("go\n")
            program.stdin.flush()
        for program in (one, two):
            assert program.communicate(timeout=2 * WAIT_S)[0] == "refused\n"
            assert program.returncode == 0


# ------------------------------------------------------------------------------------ ends


def test_a_killed_rank_is_dead_to_all_and_its_memory_stays_readable() -> None:
    with rank_processes(3) as workers:
        offer = workers[0].call(steps.allocate, MIB, b"d")
        workers[1].call(steps.allocate, MIB)
        assert workers[1].call(steps.read_peer, 0, offer, 0, 1) == b"d"
        for peer in (1, 2):
            workers[peer].start(steps.wait_gone, 0)
        workers[0].kill()
        for peer in (1, 2):
            assert workers[peer].finish()[0] == "DEAD"
            assert workers[peer].call(steps.read_peer, 0, offer, MIB - 1, 1) == b"d"
            workers[peer].call(steps.post, 0, 1, b"to nobody")
        assert workers[1].call(steps.peer_state, 2) == "ALIVE"
        grown = workers[1].call(steps.allocate, 8 * MIB, b"g")
        assert workers[2].call(steps.read_peer, 1, grown, 8 * MIB - 1, 1) == b"g"


def test_a_killed_rank_is_dead_though_its_forked_child_lives() -> None:
    with rank_processes(2) as workers:
        child, num_shared = workers[0].call(steps.fork_and_wait_for_end)
        with ended_after(child):
            assert num_shared <= 1, "the child has the sockets of the mesh"  # 1: the test's own
            workers[1].start(steps.wait_gone, 0)
            workers[0].kill()
            assert workers[1].finish()[0] == "DEAD"


def test_a_killed_rank_is_dead_though_a_child_holds_its_sockets() -> None:
    with rank_processes(2) as workers:
        child = workers[0].call(steps.leak_sockets_to_a_child)
        with ended_after(child):
            workers[1].start(steps.wait_gone, 0)
            workers[0].kill()
            assert workers[1].finish()[0] == "DEAD"


def test_the_end_of_the_socket_is_enough() -> None:
    with rank_processes(2) as workers:
        workers[1].start(steps.wait_gone, 0)
        workers[0].call(steps.close_sockets_behind_the_library)
        assert workers[1].finish()[0] == "DEAD"


def test_leaving_is_announced_after_every_message() -> None:
    with rank_processes(2) as workers:
        workers[0].call(steps.post, 1, 5, bytes(100_000), 40)
        workers[0].call(steps.leave)
        assert workers[1].call(steps.wait_gone, 0)[0] == "LEFT"
        workers[0].kill()
        assert workers[1].call(steps.take, 0, 5, 40) == [bytes(100_000)] * 40
        assert workers[1].call(steps.peer_state, 0) == "LEFT"


@pytest.mark.parametrize(
    "ending", ["end of the script", "leaked mesh", "exception", "sys.exit", "os._exit", "kill"]
)
def test_how_an_interpreter_ends(ending: str) -> None:
    """An orderly end says goodbye without destroy(); a hard one is a death."""
    script = """
        import os, signal, sys
        from moe_comm import _host
        mesh = _host.PeerMesh.create()
        print(mesh.address().hex(), flush=True)
        peer = bytes.fromhex(sys.stdin.readline())
        mesh.connect(0, [mesh.address(), peer], 30.0)
        heap = _host.ShmHeap.create(mesh)
        window = heap.allocate(1 << 20)
        mesh.post(1, 9, 0, b"last words")
        ending = sys.argv[1]
        if ending == "leaked mesh":
            import ctypes
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(mesh))
        if ending == "exception":
            raise RuntimeError("as planned")
        if ending == "sys.exit":
            sys.exit(3)
        if ending == "os._exit":
            os._exit(0)
        if ending == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        """
    worker = RankProcess()
    try:
        with start_python(script, ending) as program:
            assert program.stdin is not None
            address = worker.call(steps.open_mesh)
            peer = bytes.fromhex(program.stdout.readline())
            program.stdin.write(address.hex() + "\n")
            program.stdin.flush()
            worker.call(steps.connect, 1, [peer, address], {})
            expected = "DEAD" if ending in ("os._exit", "kill") else "LEFT"
            assert worker.call(steps.wait_gone, 0)[0] == expected
            assert worker.call(steps.take, 0, 9) == [b"last words"]
    finally:
        worker.close()


def test_killing_at_any_moment_leaves_nothing_behind() -> None:
    script = """
        from moe_comm import _host
        mesh = _host.PeerMesh.create()
        print(mesh.address().hex(), flush=True)
        mesh.connect(0, [mesh.address()], 30.0)
        heap = _host.ShmHeap.create(mesh)
        held = [heap.allocate(4 << 20) for _ in range(40)]
        """
    for delay_s in (0.0, 0.003, 0.01, 0.03, 0.1):
        with start_python(script) as program:
            token = bytes.fromhex(program.stdout.readline())[24:40].hex()
            time.sleep(delay_s)
            program.kill()
        # Byte map of an address: csrc/heap/wire.h.
        assert token not in Path("/proc/net/unix").read_text()
        assert not [name for name in os.listdir("/dev/shm") if "moe_comm" in name]


# ------------------------------------------------------------------------------------ peers that stop


def test_posting_to_a_stopped_peer_does_not_block() -> None:
    with rank_processes(3) as workers:
        workers[1].stop()
        workers[0].call(steps.post, 1, 2, bytes(MIB), 20)
        offer = workers[0].call(steps.allocate, MIB, b"s")
        workers[0].call(steps.post, 2, 2, b"others are served")
        assert workers[2].call(steps.take, 0, 2) == [b"others are served"]
        os.kill(workers[1].pid, signal.SIGCONT)
        assert workers[1].call(steps.take, 0, 2, 20) == [bytes(MIB)] * 20
        assert workers[1].call(steps.read_peer, 0, offer, 0, 1) == b"s"
        workers[0].call(steps.leave)
        assert workers[1].call(steps.wait_gone, 0)[0] == "LEFT"


def test_leaving_does_not_wait_for_a_stopped_peer() -> None:
    with rank_processes(2) as workers:
        workers[1].stop()
        workers[0].call(steps.post, 1, 2, bytes(MIB), 20)
        workers[0].call(steps.leave)
        os.kill(workers[1].pid, signal.SIGCONT)
        assert workers[1].call(steps.wait_gone, 0)[0] == "DEAD", "its goodbye could not be sent"


def test_signals_go_to_the_threads_of_the_program() -> None:
    with rank_processes(1) as (worker,):
        worker.call(steps.hear_from_service_thread)
        for task in Path(f"/proc/{worker.pid}/task").iterdir():
            if (task / "comm").read_text().strip() == "moe-mesh":
                status = (task / "status").read_text()
                blocked = int(status.split("SigBlk:")[1].split()[0], 16)
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM):
                    assert blocked >> (number - 1) & 1, signal.Signals(number).name
                return
        pytest.fail("no thread is named moe-mesh")


def test_a_forked_child_gets_clear_errors_and_can_start_anew() -> None:
    with rank_processes(2) as workers:
        results = workers[0].call(steps.use_in_child)
        assert results.pop("exit") == "0"
        assert results.pop("mappings") == "0"
        assert results.pop("fresh") == "works"
        for name in ("mesh.leave", "window.quarantine"):
            assert results.pop(name) == "nothing"
        for name, raised in results.items():
            assert raised.startswith("ValueError: "), name
            assert "forked" in raised, name
        # The child's end and all it did are nothing to the peers.
        offer = workers[0].call(steps.allocate, MIB, b"p")
        assert workers[1].call(steps.read_peer, 0, offer, 0, 1) == b"p"
        assert workers[1].call(steps.peer_state, 0) == "ALIVE"


# ------------------------------------------------------------------------------------ programs


def python_environment() -> dict[str, str]:
    return {"PATH": os.defpath, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def as_program(script: str) -> str:
    """The script; of the package it has `_host` and the errors: the rest would load torch first."""
    folder = str(Path(_host.__file__).parent)
    head = f"""
        import sys, types
        sys.modules["moe_comm"] = types.ModuleType("moe_comm")
        sys.modules["moe_comm"].__path__ = [{folder!r}]
        from tests import _host_testing
        """
    return textwrap.dedent(head) + textwrap.dedent(script)


def start_python(script: str, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", as_program(script), *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=python_environment(),
    )


def run_python(script: str, *args: str) -> Any:
    return captured(
        [sys.executable, "-c", as_program(script), *args],
        timeout=2 * WAIT_S,
        env=python_environment(),
    )
