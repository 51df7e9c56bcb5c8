"""Providing other packages' modules under their own names, and taking them back."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import moe_comm.compat.deep_ep
from moe_comm import compat
from moe_comm.resharding import planner
from tests.helpers import fresh_python

ROOT = Path(__file__).resolve().parents[2]

Run = Callable[..., subprocess.CompletedProcess[str]]

IMPORTED_BY_PROGRAMS = [
    "deep_ep",
    "deep_ep.buffer",
    "deep_ep.buffers.allocator",
    "deep_ep.buffers.bucket",
    "deep_ep.buffers.engram",
    "deep_ep.buffers.legacy",
    "deep_ep.buffers.pp",
    "deep_ep.comm",
    "deep_ep.hybrid_ep_buffer",
    "deep_ep.utils",
    "deep_ep.utils.event",
    "deep_ep.utils.math",
    "deep_ep_cpp",
]
PROGRAM = """
import sys
import deep_ep
from deep_ep.utils import EventHandle, EventOverlap
print(deep_ep.Buffer.__module__, sys.argv[1:])
"""


def deep_ep_modules() -> dict[str, types.ModuleType]:
    return {
        name: module
        for name, module in sys.modules.items()
        if name in ("deep_ep", "deep_ep_cpp") or name.startswith("deep_ep.")
    }


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    before = deep_ep_modules()
    yield
    compat.uninstall("deep_ep")
    assert deep_ep_modules() == before


@pytest.mark.parametrize("name", IMPORTED_BY_PROGRAMS)
def test_modules_resolve_to_those_here(name: str) -> None:
    compat.install("deep_ep")
    assert compat.installed() == ("deep_ep",)
    module = importlib.import_module(name)
    assert module is importlib.import_module(f"moe_comm.compat.{name}")
    found: object = sys.modules[name.partition(".")[0]]
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    assert found is module


def test_no_module_is_imported_twice() -> None:
    compat.install("deep_ep")
    for name, module in deep_ep_modules().items():
        assert module.__name__ == f"moe_comm.compat.{name}"
    with pytest.raises(ModuleNotFoundError, match=r"deep_ep\.unheard_of"):
        importlib.import_module("deep_ep.unheard_of")


def test_uninstall_takes_everything_back() -> None:
    compat.install("deep_ep")
    compat.install("deep_ep")
    compat.uninstall("deep_ep")
    compat.uninstall("deep_ep")
    assert deep_ep_modules() == {}
    assert compat.installed() == ()


def test_a_real_package_is_not_replaced_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    real = types.ModuleType("deep_ep")
    real.__file__ = "/somewhere/deep_ep/__init__.py"
    part = types.ModuleType("deep_ep.only_there")
    monkeypatch.setitem(sys.modules, "deep_ep", real)
    monkeypatch.setitem(sys.modules, "deep_ep.only_there", part)
    with pytest.raises(ValueError, match=r"imported already, from /somewhere/deep_ep/__init__.py"):
        compat.install("deep_ep")
    assert sys.modules["deep_ep"] is real

    compat.install("deep_ep", replace=True)
    assert sys.modules["deep_ep"] is moe_comm.compat.deep_ep
    assert "deep_ep.only_there" not in sys.modules
    compat.uninstall("deep_ep")
    assert deep_ep_modules() == {"deep_ep": real, "deep_ep.only_there": part}
    monkeypatch.undo()


def test_a_compiled_module_of_the_real_package_is_not_replaced_unasked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = types.ModuleType("deep_ep_cpp")
    real.__file__ = "/somewhere/deep_ep_cpp.so"
    monkeypatch.setitem(sys.modules, "deep_ep_cpp", real)
    with pytest.raises(ValueError, match=r"another deep_ep_cpp .* from /somewhere/deep_ep_cpp.so"):
        compat.install("deep_ep")
    compat.install("deep_ep", replace=True)
    assert sys.modules["deep_ep_cpp"].EventHandle is moe_comm.compat.deep_ep.EventHandle
    compat.uninstall("deep_ep")
    assert deep_ep_modules() == {"deep_ep_cpp": real}
    monkeypatch.undo()


# Modules under each name, and a name of each that programs import.
DOTTED = [
    ("megatron.core.transformer.moe.fused_a2a", "moe_comm.fused_a2a", "", "fused_dispatch"),
    ("megatron.core.resharding", "moe_comm.resharding", ".refit", "swap_model_weights"),
    ("etha.comm.ir", "moe_comm.resharding.ir", ".units", "Bucket"),
]


@pytest.mark.parametrize(("name", "here", "part", "wanted"), DOTTED)
@pytest.mark.parametrize("has_parent", [False, True])
def test_names_inside_other_packages(
    name: str, here: str, part: str, wanted: str, has_parent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent_name, _, last = name.rpartition(".")
    parent = types.ModuleType(parent_name)
    for module in list(sys.modules):
        if f"{module}.".startswith(f"{name}."):
            monkeypatch.delitem(sys.modules, module)  # another test needs the real one
    if has_parent:
        monkeypatch.setitem(sys.modules, parent_name, parent)
    compat.install(name)
    try:
        found: dict[str, object] = {}
        exec(f"from {name}{part} import {wanted} as found", found)
        assert found["found"] is getattr(importlib.import_module(here + part), wanted)
        assert sys.modules[name] is importlib.import_module(here)
        assert getattr(parent, last, None) is (sys.modules[name] if has_parent else None)
    finally:
        compat.uninstall(name)
    assert not [module for module in sys.modules if module.startswith(name)]
    assert not hasattr(parent, last)


def test_what_a_parent_had_it_has_again(monkeypatch: pytest.MonkeyPatch) -> None:
    parent, theirs = types.ModuleType("etha.comm"), types.ModuleType("etha.comm.ir")
    parent.ir = theirs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "etha.comm", parent)
    monkeypatch.setitem(sys.modules, "etha.comm.ir", theirs)
    compat.install("etha.comm.ir", replace=True)
    assert parent.ir is importlib.import_module("moe_comm.resharding.ir")
    compat.uninstall("etha.comm.ir")
    assert parent.ir is theirs
    assert sys.modules["etha.comm.ir"] is theirs


def test_only_known_names() -> None:
    for call in (compat.install, compat.uninstall):
        with pytest.raises(ValueError, match=r"name must be one of deep_ep, .*, got 'shallow_ep'"):
            call("shallow_ep")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs Python in `tmp_path`, with or without `MOE_COMM_COMPAT`."""

    def run_python(*command: str, names: str | None = None) -> subprocess.CompletedProcess[str]:
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.delenv("MOE_COMM_COMPAT", raising=False)
        if names is not None:
            monkeypatch.setenv("MOE_COMM_COMPAT", names)
        return fresh_python.run_python(*command, cwd=tmp_path)

    return run_python


@pytest.mark.full
def test_by_environment(tmp_path: Path, run: Run) -> None:
    """By a call, which the import of the package is not."""
    call = "from moe_comm import compat; compat.install_from_environment()\n"
    (tmp_path / "program.py").write_text(call + PROGRAM)
    ran = run("program.py", "--x", names="deep_ep")
    assert ran.stdout == "moe_comm.compat.deep_ep.buffer ['--x']\n", ran.stderr
    ran = run("-c", "import moe_comm, sys; print('deep_ep' in sys.modules)", names="deep_ep")
    assert ran.stdout == "False\n", ran.stderr
    ran = run("-c", call, names="deep_ep,shallow_ep")
    assert "name must be one of deep_ep, " in ran.stderr
    assert "got 'shallow_ep'" in ran.stderr
    ran = run("program.py")
    assert "No module named 'deep_ep'" in ran.stderr


def test_run_programs_that_cannot_be_edited(tmp_path: Path, run: Run) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "neighbor.py").write_text("")
    (tmp_path / "folder" / "program.py").write_text("import neighbor\n" + PROGRAM)
    ran = run("-m", "moe_comm.compat", "run", "folder/program.py", "-m", "3")
    assert ran.stdout == "moe_comm.compat.deep_ep.buffer ['-m', '3']\n", ran.stderr
    (tmp_path / "module.py").write_text(PROGRAM)
    ran = run("-m", "moe_comm.compat", "run", "-m", "module", "--x")
    assert ran.stdout == "moe_comm.compat.deep_ep.buffer ['--x']\n", ran.stderr


@pytest.mark.full
def test_enable_for_an_environment(tmp_path: Path, run: Run) -> None:
    """The line in site-packages, run as `site` runs it."""
    where = ["--site-packages", str(tmp_path)]
    ran = run("-m", "moe_comm.compat", "enable", *where)
    path = tmp_path / "moe_comm_compat.pth"
    assert ran.stdout == f"{path} written\n", ran.stderr
    program = f"import site; site.addsitedir({str(tmp_path)!r})\n{PROGRAM}"
    ran = run("-c", program, names="deep_ep")
    assert ran.stdout == "moe_comm.compat.deep_ep.buffer []\n", ran.stderr
    check = (
        f"import site, sys; site.addsitedir({str(tmp_path)!r}); print('moe_comm' in sys.modules)"
    )
    ran = run("-c", check, names="")
    assert ran.stdout == "False\n", ran.stderr
    run("-m", "moe_comm.compat", "disable", *where)
    assert not path.exists()


# Names that Megatron's programs and tests import of its modules.
OF_MEGATRON = {
    "copy_services.base": "CopyService RecvOp SendOp match_local_ops_by_task_id",
    "copy_services.gloo_copy_service": "GlooCopyService",
    "copy_services.nccl_copy_service": "NCCLCopyService",
    "copy_services.nixl_copy_service": "NixlCopyService",
    "copy_services.nvshmem_copy_service": "NVSHMEMCopyService",
    "execution": "execute_reshard_plan _get_mxfp8_accumulator _refresh_module_caches dist",
    "nvshmem_copy_service": "RemoteCopyService GPUExecutionPlanner PipelineExecutor",
    "planner": "build_local_reshard_plan build_plan_from_rosters index_metadata_rosters "
    "_build_descriptors_for_param _finalize_dp_transfers _iter_global_transfer_ops _plan_tp",
    "refit": "swap_model_weights reshard_model_weights prepare_swap_model_weights "
    "clear_all_caches clear_plan_cache clear_service_cache get_or_create_service _PlanCacheKey "
    "_harmonize_buffer_dtypes _needs_mxfp8_conversion _setup_mxfp8_transform_on_plan",
    "transforms": "MXFP8ReshardTransform ReshardTransform _ensure_sendable "
    "_scale_slice_from_data_slice",
    "utils": "ParameterMetadata ReshardPlan ShardingDescriptor TransferOp get_refit_tensor_dict "
    "extract_param_metadata select_src_metadata_balanced _get_rank_in_group",
}


@pytest.mark.parametrize("module", OF_MEGATRON)
def test_names_of_megatron_are_where_it_has_them(module: str) -> None:
    found = importlib.import_module(f"moe_comm.resharding.{module}")
    assert [name for name in OF_MEGATRON[module].split() if not hasattr(found, name)] == []
    assert [name for name in found.__all__ if not hasattr(found, name)] == []


def test_the_deprecated_planner_calls_what_programs_put_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planner, "build_local_reshard_plan", lambda *args, **options: options)
    with pytest.warns(DeprecationWarning, match="call build_local_reshard_plan"):
        assert planner.build_centralized_reshard_plan(None, None, num_experts=4) == {
            "num_experts": 4,
            "group": None,
            "src_rank_offset": 0,
            "dst_rank_offset": 0,
        }
