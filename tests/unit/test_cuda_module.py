"""The module for GPUs on a machine that has none, or has one: it loads, and says what is the matter."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import re
import shutil
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from moe_comm import Communicator
from moe_comm.cli import doctor_gpu
from moe_comm.cli.bench import rank, worker
from moe_comm.cli.bench.options import BenchOptions
from moe_comm.peers import cuda_devices
from moe_comm.peers.bootstrap import RankThreads
from moe_comm.peers.cuda_devices import DeviceIdentity
from moe_comm.peers.sms_per_rank import default_num_sms, problem_with_sms
from moe_comm.testing import launch as ranks_launch
from moe_comm.testing import run_ranks
from tests.helpers.fresh_python import run_python
from tests.helpers.on_device import NUM_SMS
from tests.helpers.source_tree import ROOT, captured, run

IS_BUILT = importlib.util.find_spec(cuda_devices.CUDA_MODULE) is not None
needs_module = pytest.mark.skipif(not IS_BUILT, reason="moe_comm._cuda was built without nvcc")
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def device(uuid: bytes, num_sms: int = 132, process_id: int = 1) -> DeviceIdentity:
    return DeviceIdentity(
        uuid=uuid, name="GPU", num_sms=num_sms, device_idx=0, process_id=process_id
    )


@needs_module
def test_it_is_imported_without_a_driver() -> None:
    # A process of its own: nothing but the module, which links neither the driver nor the runtime.
    code = (
        "import moe_comm._host, moe_comm._cuda as m;"
        "count, reason = m.count_devices();"
        "print(m.ARCHITECTURES != '', m.CUDA_VERSION >= 12080, (count > 0) == (reason == ''))"
    )
    done = run_python("-c", code, cwd=ROOT)
    assert done.stdout.split() == ["True", "True", "True"], done.stderr


@needs_module
@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf is not installed")
def test_it_links_neither_the_driver_nor_torch() -> None:
    spec = importlib.util.find_spec(cuda_devices.CUDA_MODULE)
    assert spec.origin is not None
    dynamic = run("readelf", "-d", spec.origin)
    needed = {
        line.split("[")[1].split(".so")[0] for line in dynamic.splitlines() if "NEEDED" in line
    }
    system = {"libc", "libm", "libdl", "librt", "libpthread", "ld-linux-x86-64", "libgcc_s"}
    assert needed <= system


def test_shared_memory_is_dynamic() -> None:
    # device::launch() lets every kernel have all that a block can have, beside which nothing fits.
    lines = [
        line.strip()
        for pattern in ("*.h", "*.cuh", "*.cu")
        for path in (ROOT / "csrc").rglob(pattern)
        for line in path.read_text(encoding="utf-8").splitlines()
        if "__shared__" in line
    ]
    assert lines == ["extern __shared__ __align__(128) std::byte dynamic_shared_memory[];"]


@pytest.mark.full
def test_importing_it_all_asks_for_no_gpu() -> None:
    # Ranks are forked from a process that has imported this, and CUDA does not survive a fork.
    code = (
        "import torch, torch.cuda as cuda\n"
        "def refuse(*arguments): raise AssertionError('asked for a GPU')\n"
        "cuda.is_available = cuda.device_count = cuda.current_device = cuda._lazy_init = refuse\n"
        "import moe_comm, moe_comm.ep.backends.cuda, moe_comm.ep.backends.nvshmem\n"
        "import moe_comm.cli.bench.worker, moe_comm.resharding, moe_comm.testing.conformance\n"
    )
    run(sys.executable, "-c", code, cwd=ROOT)


@needs_module
@needs_no_gpu
def test_a_machine_without_gpu_is_explained_on_every_rank() -> None:
    ranks = RankThreads(2)

    def be_rank(rank_idx: int) -> str:
        with pytest.raises(ValueError, match="there is no usable GPU") as caught:
            Communicator(ranks[rank_idx], device="cuda")
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        messages = list(pool.map(be_rank, range(2)))
    assert messages[0] == messages[1]
    assert messages[0].startswith("rank 0: ")


def test_a_missing_module_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, cuda_devices.CUDA_MODULE, None)
    with pytest.raises(ValueError, match=r"moe_comm\._cuda cannot be imported .*MOE_COMM_CUDA"):
        Communicator(device="cuda")
    (finding,) = doctor_gpu.examine_gpus()
    assert not finding.is_present
    assert "nvcc" in finding.remedy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "meta"}, "device must be cpu or cuda, or the backend .host., got meta"),
        ({"device": "cpu", "backend": "cuda"}, "the cuda backend does not move tensors on cpu"),
        ({"device": "cuda", "backend": "simt"}, "the simt backend does not move tensors on cuda"),
        ({"num_sms": 3}, "num_sms is for a GPU, got 3"),
        ({"device": "cuda", "num_sms": 0}, "num_sms must be >= 1, got 0"),
    ],
)
def test_devices_that_do_not_fit_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Communicator(**options)


@needs_module
@needs_no_gpu
def test_doctor_says_that_there_is_no_gpu() -> None:
    found = {finding.name: finding for finding in doctor_gpu.examine_gpus()}
    assert found["CUDA module"].is_present
    assert not found["CUDA driver"].is_present
    assert "driver" in found["CUDA driver"].remedy


class TestDoctorOnGpus:
    """The findings on a machine with two H100, of which the module pretends."""

    @pytest.fixture
    def native(self, monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
        native = types.SimpleNamespace(
            ARCHITECTURES="80, 90a",
            CUDA_VERSION=13000,
            count_devices=lambda: (2, ""),
            driver_version=lambda: 13010,
            can_reach=lambda device_idx, peer_idx: device_idx == 0,
            describe_device=lambda device_idx: {
                "name": "H100",
                "compute_capability": (9, 0),
                "num_sms": 132,
                "memory_bytes": 80 * 10**9,
                "uuid": bytes([device_idx]) * 16,
                "pci_bus": "0000:1B:00.0",
            },
        )
        monkeypatch.setattr(doctor_gpu, "load_cuda_module", lambda: native)
        return native

    def test_devices_are_described(self, native: types.SimpleNamespace) -> None:
        found = {finding.name: finding for finding in doctor_gpu.examine_gpus()}
        assert found["CUDA driver"].detail == "for CUDA 13.1, shows 2 devices"
        assert "compute capability 9.0, 132 SMs, 80 GB" in found["cuda:0"].detail
        assert found["cuda:0"].detail.endswith("reaches cuda:1")
        assert found["cuda:1"].detail.endswith(
            'reaches no other device by P2P: backend="host" needs none and moves rows through the host\'s memory'
        )

    @pytest.mark.parametrize(
        ("architectures", "runs", "compiles"),
        [
            ("90a", True, False),
            ("100a", False, False),
            ("80", True, True),
            ("100", False, False),
            ("80, 100", True, True),
            ("80, 90", True, False),
            ("100, 120", False, False),
            ("80-real, 100", False, False),
            ("80-virtual", True, True),
            ("90-virtual", True, True),
            ("90-real", True, False),
            ("100f, 90f", True, False),
            ("100f", False, False),
            ("all-major", True, False),
        ],
    )
    def test_missing_kernels_are_named(
        self, native: types.SimpleNamespace, architectures: str, runs: bool, compiles: bool
    ) -> None:
        native.ARCHITECTURES = architectures
        found = {finding.name: finding for finding in doctor_gpu.examine_gpus()}
        assert found["cuda:0"].is_present is runs
        assert ("the driver compiles the kernels" in found["cuda:0"].detail) is compiles
        assert "MOE_COMM_CUDA_ARCHS=90" in found["cuda:0"].remedy

    @pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")
    @pytest.mark.parametrize(("major", "runs"), [(7, False), (8, True), (9, True), (12, True)])
    def test_the_list_of_wheels_is_read(
        self, native: types.SimpleNamespace, tmp_path: Path, major: int, runs: bool
    ) -> None:
        # The lines of the project that make it.
        source = (ROOT / "cmake/MoeCommCuda.cmake").read_text(encoding="utf-8")
        lines = [
            line.strip()
            for line in source.splitlines()
            if line.startswith("set(MOE_COMM_CUDA_ARCHS") or "string(REPLACE" in line
        ]
        script = tmp_path / "list.cmake"
        script.write_text("\n".join([*lines, 'message("${archs_text}")']), encoding="utf-8")
        done = captured(["cmake", "-P", str(script)], check=True)
        native.ARCHITECTURES = done.stderr.strip()
        assert re.findall(r"\d+", native.ARCHITECTURES) == ["80", "90", "100"]
        described = {**native.describe_device(0), "compute_capability": (major, 0)}
        native.describe_device = lambda _: described
        found = {finding.name: finding for finding in doctor_gpu.examine_gpus()}
        assert found["cuda:0"].is_present is runs


@pytest.mark.parametrize(("num_ranks", "num_buffers"), [(8, 2), (3, 3)])
def test_what_checks_on_one_gpu_have_at_a_time_fits_it(num_ranks: int, num_buffers: int) -> None:
    # Two buffers in a case, three in flight.
    devices = [device(b"a" * 16)] * num_ranks
    assert problem_with_sms(devices, NUM_SMS, NUM_SMS * (num_buffers - 1)) == ""


def test_ranks_share_the_sms_of_a_gpu() -> None:
    alone, four = [device(b"a")], [device(b"a")] * 4
    assert default_num_sms(alone) == 24
    assert default_num_sms(four) == 16  # a quarter of half of 132
    assert default_num_sms([device(b"a", num_sms=3)] * 4) == 1
    # Two on one device and one on another: the fuller device decides for all.
    assert default_num_sms([device(b"a", num_sms=40)] * 2 + [device(b"b")]) == 10


def test_kernels_that_wait_for_each_other_must_fit_at_once() -> None:
    four = [device(b"a")] * 4
    assert problem_with_sms(four, 33, 0) == ""
    problem = problem_with_sms(four, 24, 12)
    assert "need 144 SMs" in problem
    assert "has 132" in problem
    assert problem_with_sms([device(b"a"), device(b"b")], 66, 66) == ""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("architecture", ["80", "90a", "100"])
def test_kernels_compile_without_spills(architecture: str) -> None:
    done = captured(
        [sys.executable, "benchmarks/ptxas_report.py", "--architectures", architecture, "--check"],
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr


class Gpus:
    """Two GPUs as torch tells of them: which each thread has made current, and its stream there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._of_thread = threading.local()
        self._numbers = itertools.count()
        for name, function in (
            ("is_available", lambda: True),
            ("device_count", lambda: 2),
            ("set_device", self._set_device),
            ("Stream", self._numbers.__next__),
            ("set_stream", self._set_stream),
        ):
            monkeypatch.setattr(torch.cuda, name, function)

    def _set_device(self, device_idx: int) -> None:
        self._of_thread.device_idx = device_idx

    def _set_stream(self, stream: int) -> None:
        self._of_thread.stream = stream

    def current(self) -> int:
        """Number of the device that is current, 0 where nobody chose one."""
        return getattr(self._of_thread, "device_idx", 0)

    def stream(self) -> int:
        """The current stream, -1 for the default one."""
        return getattr(self._of_thread, "stream", -1)


def test_ranks_of_a_benchmark_take_the_gpus_in_turn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpus = Gpus(monkeypatch)
    found = []

    class FoundError(Exception):
        """The communicator would be made now."""

    def make_communicator(*_: object, num_sms: int, **__: object) -> None:
        found.append((gpus.current(), num_sms))
        raise FoundError

    monkeypatch.setattr(rank.dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(rank, "SpinBarrier", lambda *_: None)
    monkeypatch.setattr(worker, "Communicator", make_communicator)
    case = types.SimpleNamespace(num_ranks=4, api="moe_comm", check_messages=False)
    options = BenchOptions(backend="cuda", num_sms=7)
    for rank_idx in range(4):
        with ThreadPoolExecutor(1) as process, pytest.raises(FoundError):
            process.submit(worker.Worker, case, options, tmp_path, rank_idx).result()
    assert found == [(0, 7), (1, 7), (0, 7), (1, 7)]


def test_ranks_that_are_processes_take_the_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus(monkeypatch)
    found = []
    for rank_idx in range(4):
        with ThreadPoolExecutor(1) as process:
            current = process.submit(ranks_launch._call, rank_idx, 4, lambda _: gpus.current(), ())
            found.append(current.result())
    assert found == [0, 1, 0, 1]


def test_ranks_that_are_threads_have_streams_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus(monkeypatch)
    found = run_ranks(lambda _: (gpus.current(), gpus.stream()), 3, mode="threads")
    assert [device_idx for device_idx, _ in found] == [0, 1, 0]
    assert sorted(stream for _, stream in found) == [0, 1, 2]


def test_gpus_without_p2p_are_told_by_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    reaches = {(0, 0): True, (0, 1): True, (0, 2): False}
    native = types.SimpleNamespace(
        count_devices=lambda: (3, ""),
        describe_device=lambda idx: {"uuid": bytes([idx])},
        can_reach=lambda device_idx, peer_idx: reaches[device_idx, peer_idx],
    )
    monkeypatch.setattr(cuda_devices, "load_cuda_module", lambda: native)
    devices = [
        dataclasses.replace(device(bytes([idx])), name=f"GPU {idx}", device_idx=idx)
        for idx in range(3)
    ]
    assert cuda_devices.problem_with_devices(0, devices, [0, 1]) is None
    problem = cuda_devices.problem_with_devices(0, devices, [0, 1, 2])
    assert problem.startswith("its GPU (GPU 0, cuda:0) does not reach that of rank 2 (GPU 2): ")
    assert "no peer-to-peer access (P2P)" in problem


@pytest.mark.parametrize(
    ("others", "limit"),
    [
        ([device(b"a", process_id=2), device(b"b")], 0),  # another process; another GPU
        ([device(b"a")], 1),
    ],
)
def test_streams_are_limited_where_ranks_of_a_process_share_a_gpu(
    others: list[DeviceIdentity], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    own = device(b"a")
    assert cuda_devices.max_connections(own, [own, *others]) == limit
