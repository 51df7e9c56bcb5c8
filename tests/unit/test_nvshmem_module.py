"""The module for GPUs of several nodes: where it was built it loads anywhere, and says what is missing."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from moe_comm import Communicator
from moe_comm.cli import doctor_gpu
from moe_comm.peers import nvshmem
from moe_comm.peers.bootstrap import Bootstrap, RankThreads
from tests.helpers.fresh_python import run_python
from tests.helpers.source_tree import ROOT, captured, run

IS_BUILT = importlib.util.find_spec(nvshmem.NVSHMEM_MODULE) is not None
needs_module = pytest.mark.skipif(not IS_BUILT, reason="moe_comm._nvshmem was not built")
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
needs_readelf = pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf")
SYSTEM_LIBRARIES = {"libc", "libm", "libdl", "librt", "libpthread", "ld-linux-x86-64", "libgcc_s"}


def module_file() -> str:
    spec = importlib.util.find_spec(nvshmem.NVSHMEM_MODULE)
    assert spec.origin is not None
    return spec.origin


def in_process(code: str, **environment: str) -> str:
    """Standard output of `code` in a Python of its own: a process loads NVSHMEM once."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        done = run_python("-c", code, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_module
def test_it_is_imported_without_a_driver_and_without_nvshmem() -> None:
    code = (
        "import moe_comm._host, moe_comm._nvshmem as m;"
        "count, reason = m.count_devices();"
        "print(m.ARCHITECTURES != '', m.NVSHMEM_VERSION.count('.'), m.is_initialized(),"
        " (count > 0) == (reason == ''))"
    )
    assert in_process(code, NVSHMEM_HOME="/nowhere").split() == ["True", "2", "False", "True"]


@needs_module
@needs_readelf
def test_it_links_neither_the_driver_nor_nvshmem() -> None:
    dynamic = run("readelf", "-d", module_file())
    needed = {
        line.split("[")[1].split(".so")[0] for line in dynamic.splitlines() if "NEEDED" in line
    }
    assert needed <= SYSTEM_LIBRARIES
    symbols = run("readelf", "--wide", "--dyn-syms", module_file()).splitlines()
    undefined = [line.split()[-1] for line in symbols if " UND " in line]
    assert len(undefined) > 50
    foreign = re.compile(r"nvshmem|cuda|moe|^cu[A-Z]", re.IGNORECASE)
    assert [name for name in undefined if foreign.search(name)] == []
    defined = [line.split()[-1] for line in symbols if " GLOBAL " in line and " UND " not in line]
    assert defined == ["PyInit__nvshmem"]


@needs_module
@pytest.mark.skipif(shutil.which("cuobjdump") is None, reason="cuobjdump is not installed")
def test_kernels_are_there_for_what_was_asked_alone() -> None:
    from moe_comm import _nvshmem

    listed = run("cuobjdump", "--list-elf", module_file())
    asked = {f"sm_{name}" for name in re.split(r"[ ,]+", _nvshmem.ARCHITECTURES)}
    assert set(re.findall(r"\.(sm_\w+)\.cubin", listed)) == asked


def make_library(folder: Path, version: tuple[int, int, int]) -> Path:
    """An NVSHMEM home whose host library knows nothing but its version."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    source = folder / "host.cpp"
    major, minor, patch = version
    source.write_text(
        'extern "C" void nvshmemx_vendor_get_version_info(int* a, int* b, int* c) {\n'
        f"  *a = {major}; *b = {minor}; *c = {patch};\n}}\n"
    )
    (folder / "lib").mkdir()
    run("c++", "-shared", "-fPIC", "-o", folder / "lib" / nvshmem.HOST_LIBRARY, source)
    return folder


REASON = "from moe_comm.peers import nvshmem; print(nvshmem.unusable_reason())"


@needs_module
def test_another_version_is_refused_with_both(tmp_path: Path) -> None:
    from moe_comm import _nvshmem

    home = make_library(tmp_path, (2, 11, 7))
    reason = in_process(REASON, NVSHMEM_HOME=str(home))
    assert str(home / "lib" / nvshmem.HOST_LIBRARY) in reason
    assert "is version 2.11.7" in reason
    assert f"linked with version {_nvshmem.NVSHMEM_VERSION}" in reason


@needs_module
def test_a_library_that_lacks_a_function_is_refused(tmp_path: Path) -> None:
    from moe_comm import _nvshmem

    major, minor, patch = map(int, _nvshmem.NVSHMEM_VERSION.split("."))
    home = make_library(tmp_path, (major, minor, patch + 1))  # patches may differ
    reason = in_process(REASON, NVSHMEM_HOME=str(home))
    assert reason.endswith("has no nvshmemx_get_uniqueid")


@needs_module
def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / nvshmem.HOST_LIBRARY).write_text("no library")
    reason = in_process(REASON, NVSHMEM_HOME=str(tmp_path))
    assert "cannot be loaded" in reason
    assert nvshmem.HOST_LIBRARY in reason


@needs_module
@needs_no_gpu
def test_ranks_would_meet_by_an_id_that_no_launcher_made() -> None:
    try:
        nvshmem.find_host_library()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    code = (
        "from moe_comm.peers import nvshmem; assert nvshmem.unusable_reason() is None;"
        "m = nvshmem.load_nvshmem_module(); a, b = m.make_unique_id(), m.make_unique_id();"
        "print(len(a), a != b, m.is_initialized())"
    )
    assert in_process(code).split() == ["128", "True", "False"]


class TestFinding:
    """Places where the host library is looked for."""

    def test_a_home_without_it_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NVSHMEM_HOME", "/nowhere")
        with pytest.raises(FileNotFoundError, match=r"NVSHMEM_HOME is /nowhere.*no /nowhere/lib"):
            nvshmem.find_host_library()

    def test_the_wheel_is_found(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        library = tmp_path / "nvidia" / "nvshmem" / "lib" / nvshmem.HOST_LIBRARY
        library.parent.mkdir(parents=True)
        library.touch()
        for name in ("nvidia", "nvidia.nvshmem"):
            # Set first: what is imported here is taken away again where there was none before.
            monkeypatch.setitem(sys.modules, name, None)
            del sys.modules[name]
        monkeypatch.delenv("NVSHMEM_HOME", raising=False)
        monkeypatch.syspath_prepend(str(tmp_path))
        assert nvshmem.find_host_library() == library

    def test_a_missing_wheel_is_explained(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("NVSHMEM_HOME", raising=False)
        monkeypatch.setattr(nvshmem, "PACKAGE", "no_such_package.nvshmem")
        with pytest.raises(FileNotFoundError, match="pip install nvidia-nvshmem"):
            nvshmem.find_host_library()


class TestDoctor:
    def test_a_missing_module_is_explained(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, nvshmem.NVSHMEM_MODULE, None)
        (finding,) = doctor_gpu.examine_internode()
        assert not finding.is_present
        assert "MOE_COMM_NVSHMEM=on" in finding.remedy

    def test_a_missing_library_is_explained(self, monkeypatch: pytest.MonkeyPatch) -> None:
        native = types.SimpleNamespace(ARCHITECTURES="90a", NVSHMEM_VERSION="3.8.0")
        monkeypatch.setattr(doctor_gpu, "load_nvshmem_module", lambda: native)
        monkeypatch.setenv("NVSHMEM_HOME", "/nowhere")
        module, library = doctor_gpu.examine_internode()
        assert module.is_present
        assert "NVSHMEM 3.8.0" in module.detail
        assert not library.is_present
        assert "/nowhere" in library.detail
        assert "3.8.0" in library.remedy


def on_threads(num_ranks: int, body: Callable[[Bootstrap], bytes]) -> list[str]:
    """The text of the ValueError that `body` raises on every rank."""
    ranks = RankThreads(num_ranks)

    def be_rank(rank_idx: int) -> str:
        with pytest.raises(ValueError, match=r"\w") as caught:
            body(ranks[rank_idx])
        return str(caught.value)

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(be_rank, range(num_ranks)))


class TestAgreement:
    """Ranks about to initialize NVSHMEM, with a module that pretends to have it."""

    @pytest.fixture
    def native(self, monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
        native = types.SimpleNamespace(
            is_initialized=lambda: False, make_unique_id=lambda: b"a unique id"
        )
        monkeypatch.setattr(nvshmem, "unusable_reason", lambda: None)
        monkeypatch.setattr(nvshmem, "load_nvshmem_module", lambda: native)
        return native

    def test_threads_of_one_process_are_refused(self, native: types.SimpleNamespace) -> None:
        first, second = on_threads(2, nvshmem.agree)
        assert first == second
        assert "ranks 0 and 1 are threads of one process" in first

    def test_every_rank_is_told_the_id_of_rank_0(
        self, native: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pids = iter([7, 8])
        # Not of the module `os` itself, which everything in this process asks.
        monkeypatch.setattr(nvshmem, "os", types.SimpleNamespace(getpid=lambda: next(pids)))
        ranks = RankThreads(2)
        with ThreadPoolExecutor(2) as pool:
            told = list(pool.map(lambda rank_idx: nvshmem.agree(ranks[rank_idx]), range(2)))
        assert told == [b"a unique id"] * 2

    def test_a_rank_that_met_others_is_named(
        self, native: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pids, initialized = iter([7, 8]), iter([True, False])
        monkeypatch.setattr(nvshmem, "os", types.SimpleNamespace(getpid=lambda: next(pids)))
        native.is_initialized = lambda: next(initialized)
        first, second = on_threads(2, nvshmem.agree)
        assert first == second
        assert re.search(r"initialized once in a process: ranks \[[01]\] of 2", first)

    def test_what_one_rank_lacks_is_said_on_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        reasons = iter([None, "there is no library"])
        native = types.SimpleNamespace(is_initialized=lambda: True)
        monkeypatch.setattr(nvshmem, "unusable_reason", lambda: next(reasons))
        monkeypatch.setattr(nvshmem, "load_nvshmem_module", lambda: native)
        first, second = on_threads(2, nvshmem.agree)
        assert first == second
        assert re.fullmatch(r"rank [01]: there is no library", first)


@pytest.mark.parametrize("options", [{"backend": "nvshmem"}, {"num_local_ranks": 1}])
@needs_no_gpu
def test_a_machine_without_gpu_is_explained_on_every_rank(options: dict) -> None:
    first, second = on_threads(2, lambda ranks: Communicator(ranks, device="cuda", **options))
    assert first == second
    assert re.match(r"rank 0: (there is no usable GPU|moe_comm\._cuda cannot be imported)", first)


def test_the_backend_is_for_gpus() -> None:
    with pytest.raises(ValueError, match="the nvshmem backend does not move tensors on cpu"):
        Communicator(backend="nvshmem")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_kernels_across_nodes_compile_and_link(tmp_path: Path) -> None:
    """The device link, for an architecture that the build at hand need not have."""
    try:
        home = nvshmem.find_host_library().parents[1]
    except FileNotFoundError as error:
        pytest.skip(str(error))
    pybind11 = pytest.importorskip("pybind11")
    options = {
        "pybind11_DIR": pybind11.get_cmake_dir(),
        "Python_EXECUTABLE": sys.executable,
        "MOE_COMM_CUDA_ARCHS": "100",
        "MOE_COMM_NVSHMEM": "on",
        "MOE_COMM_WERROR": "ON",
        "NVSHMEM_HOME": str(home),
    }
    definitions = [f"-D{name}={value}" for name, value in options.items()]
    run("cmake", "-S", ROOT, "-B", tmp_path, "-G", "Ninja", *definitions)
    built = run("cmake", "--build", tmp_path, "--target", "moe_comm_nvshmem_kernels")
    assert "Linking" in built
    archive = tmp_path / "libmoe_comm_nvshmem_kernels.a"
    members = captured(["ar", "t", archive], check=True)
    assert "cmake_device_link.o" in members.stdout
