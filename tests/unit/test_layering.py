"""Holds the arrows of docs/design.md against every C++ include and Python import."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.source_tree import captured
from tools.drawings.folders import known_folders, read_arrows

ROOT = Path(__file__).resolve().parents[2]

# ---------------------------------------------------------------------------------------------
# C++: which folders of csrc a folder may include from, besides itself, is said by its README.

CXX_ARROWS = read_arrows()

SYSTEM_FOLDERS = {"sys", "linux", "net", "netinet", "arpa", "bits"}
# Boost.Context, and what the compiler's sanitizers are told.
FIBER_FOLDERS = {"boost", "sanitizer"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


def cxx_violations(path: str, text: str) -> Iterator[str]:
    """Mistakes in the includes of the file at `path`, relative to csrc."""
    layer = path.split("/")[0]
    allowed = CXX_ARROWS[layer] | {layer}
    for bracket, header in INCLUDE.findall(text):
        folder = header.split("/")[0] if "/" in header else ""
        if bracket == '"' and folder not in allowed:
            yield f"{path} includes {header}: {layer} may include {sorted(allowed)}"
        elif bracket == "<" and folder == "pybind11" and layer != "bindings":
            yield f"{path} includes {header}: pybind11 belongs in bindings"
        elif bracket == "<" and folder in FIBER_FOLDERS and path != "simt/fiber.cpp":
            yield f"{path} includes {header}: that is for switching fibers only"
        elif bracket == "<" and folder not in SYSTEM_FOLDERS | FIBER_FOLDERS | {"", "pybind11"}:
            yield f"{path} includes {header}: neither standard library nor operating system"


CXX_FILES = sorted(
    path.relative_to(ROOT / "csrc").as_posix()
    for pattern in ("*.h", "*.cpp", "*.cu", "*.cuh")
    for path in (ROOT / "csrc").rglob(pattern)
)
CXX_TEXTS = {path: (ROOT / "csrc" / path).read_text() for path in CXX_FILES}


def test_cxx_includes_follow_the_arrows() -> None:
    assert len(CXX_FILES) > 100
    assert [found for path in CXX_FILES for found in cxx_violations(path, CXX_TEXTS[path])] == []


def knowing_each_other(arrows: dict[str, set[str]]) -> set[str]:
    """Those that are in a circle, above one, or above what is not there; empty where all is well."""
    rest = set(arrows)
    while ground := {
        each for each in rest if not arrows[each] & rest and arrows[each] <= set(arrows)
    }:
        rest -= ground
    return rest


def test_folders_of_csrc_know_each_other_one_way() -> None:
    assert len(CXX_ARROWS) > 8
    assert knowing_each_other(CXX_ARROWS) == set()


# Circles of files that are left, by folder: of how many files each is. These numbers may only fall.
CIRCLES_OF_FILES = {
    "cpu": [3],
    "heap": [3],
    "kernels": [6, 5, 3, 2],
    "ops": [5, 3, 2, 2],
}


def circles_of_files(texts: dict[str, str]) -> set[frozenset[str]]:
    """Largest sets of files of csrc that all lead to each other by includes; a header and its source are one.

    Args:
        texts: Of every file, by its path relative to csrc.
    """
    arrows: dict[str, set[str]] = {}
    for path, text in texts.items():
        file = path.rpartition(".")[0]
        included = {header.rpartition(".")[0] for _, header in INCLUDE.findall(text)} - {file}
        arrows.setdefault(file, set()).update(included)

    def below(file: str) -> set[str]:
        found: set[str] = set()
        pending = [file]
        while pending:
            more = arrows.get(pending.pop(), set()) - found
            found |= more
            pending += more
        return found

    reached = {file: below(file) for file in arrows}
    return {
        frozenset(other for other in reached[file] if file in reached.get(other, ()))
        for file in arrows
        if file in reached[file]
    }


def test_files_of_a_folder_know_each_other_one_way() -> None:
    left: dict[str, list[int]] = {}
    for circle in sorted(circles_of_files(CXX_TEXTS), key=len, reverse=True):
        left.setdefault(min(circle).split("/")[0], []).append(len(circle))
    assert left == CIRCLES_OF_FILES


@pytest.mark.parametrize(
    ("path", "header"),
    [
        ("group/membership.cpp", "group/aborts.h"),
        ("group/mail.cpp", "group/peers.h"),
        ("group/shrink_ballots.cpp", "group/group_shrink.h"),
    ],
)
def test_a_circle_of_files_is_found(path: str, header: str) -> None:
    broken = CXX_TEXTS | {path: f'{CXX_TEXTS[path]}#include "{header}"\n'}
    (circle,) = circles_of_files(broken) - circles_of_files(CXX_TEXTS)
    assert {path.removesuffix(".cpp"), header.removesuffix(".h")} <= circle


def test_cxx_quoted_includes_exist() -> None:
    quoted = [
        (path, header)
        for path in CXX_FILES
        for bracket, header in INCLUDE.findall(CXX_TEXTS[path])
        if bracket == '"'
    ]
    assert len(quoted) > 100
    assert [
        f"{path} includes {header}, which is not there"
        for path, header in quoted
        if not (ROOT / "csrc" / header).is_file()
    ] == []


NAMESPACE = re.compile(r"^namespace (moe[\w:]*) \{", re.MULTILINE)
# The emulator's meaning of the words of csrc/device; an error of CUDA is caught as any other of `moe`.
FOREIGN_NAMESPACES = {("simt/primitives.h", "moe::device"), ("device/cuda_check.h", "moe")}


def foreign_namespaces(path: str, text: str) -> Iterator[str]:
    """Namespaces of the file at `path`, relative to csrc, that are not its folder's; that of core is `moe`."""
    folder = path.split("/")[0]
    own = "moe" if folder == "core" else f"moe::{folder}"
    for name in NAMESPACE.findall(text):
        if not f"{name}::".startswith(f"{own}::") and (path, name) not in FOREIGN_NAMESPACES:
            yield f"{path} has namespace {name}: {folder} has {own}"


def test_namespaces_are_called_as_their_folders() -> None:
    assert [
        found for path in CXX_FILES for found in foreign_namespaces(path, CXX_TEXTS[path])
    ] == []
    assert list(foreign_namespaces("ops/dispatch.h", "namespace moe::group {\n"))


@pytest.mark.parametrize(
    ("path", "include"),
    [
        ("core/error.h", '#include "ops/dispatch.h"'),
        ("layout/row.h", '#include "heap/shm_heap.h"'),
        ("heap/shm_heap.cpp", '#include "layout/row.h"'),
        ("group/wait.cpp", '#include "heap/group.h"'),
        ("group/wait.cpp", '  #  include "../heap/group.h"'),
        ("group/wait.cpp", "#include <pybind11/pybind11.h>"),
        ("core/dtype.h", "#include <c10/util/BFloat16.h>"),
        ("core/sync.h", '#include "schedules/fault.h"'),
        ("simt/grid.cpp", "#include <boost/context/fiber.hpp>"),
        ("simt/grid.cpp", "#include <sanitizer/tsan_interface.h>"),
        ("bindings/host_module.cpp", "#include <torch/extension.h>"),
    ],
)
def test_a_broken_cxx_arrow_is_found(path: str, include: str) -> None:
    assert len(list(cxx_violations(path, f"#pragma once\n{include}\n#include <vector>\n"))) == 1


# ---------------------------------------------------------------------------------------------
# Python: layers from top to bottom; a module imports from its own layer and those below it.
# A module belongs to the longest prefix that names it. "moe_comm" is the package's own __init__. What the
# folders of resharding may know of each other they say themselves, see below.

PYTHON_LAYERS: list[set[str]] = [
    {"moe_comm.cli"},
    {"moe_comm.testing"},
    {"moe_comm"},
    {"moe_comm.names"},
    {"moe_comm.nn"},
    {"moe_comm.dispatcher", "moe_comm.fused_a2a", "moe_comm.compat"},
    {"moe_comm.checkpoints"},
    {"moe_comm.replicas"},
    {"moe_comm.ep.autograd"},
    {"moe_comm.ep.gradient_sum", "moe_comm.ep.group_buffers"},
    {"moe_comm.ep.buffer_manager"},
    {"moe_comm.ep.buffer"},
    {"moe_comm.ep.backends", "moe_comm.ep.routing_map"},
    {"moe_comm.resharding"},
    {"moe_comm.peers.communicator"},
    {"moe_comm.peers.elastic"},
    {"moe_comm.peers.native_group", "moe_comm.peers.rank_gpu"},
    {"moe_comm.ep.validation"},
    {"moe_comm.peers.survivors"},
    {"moe_comm.peers.role_rendezvous"},
    {"moe_comm.peers.joining_ranks"},
    {
        "moe_comm.peers.backend_choice",
        "moe_comm.peers.cuda_devices",
        "moe_comm.peers.nvshmem",
        "moe_comm.peers.sms_per_rank",
    },
    {"moe_comm.ep.expert_loads", "moe_comm.ep.handles"},
    {"moe_comm.ep.backends.base"},
    {"moe_comm.triton"},
    {
        "moe_comm._version",
        "moe_comm.tensors",
        "moe_comm.ep",
        "moe_comm.peers",
        "moe_comm.peers.agree",
        "moe_comm.arguments",
        "moe_comm.tensors.arithmetic",
        "moe_comm.peers.bootstrap",
        "moe_comm.peers.communicator_options",
        "moe_comm.ep.gradient_word",
        "moe_comm.ep.config",
        "moe_comm.ep.call_options",
        "moe_comm.env",
        "moe_comm.errors",
        "moe_comm.peers.exclusive_use",
        "moe_comm.peers.gather_objects",
        "moe_comm.peers.heap_stats",
        "moe_comm.tensors.memory",
        "moe_comm.tensors.torch_hooks",
        "moe_comm.tensors.memory_overlap",
        "moe_comm.peers.missed_calls",
        "moe_comm.peers.node_layout",
        "moe_comm.tensors.quantization",
        "moe_comm.tensors.quantized",
        "moe_comm.ep.routing_trace",
        "moe_comm.ep.spec",
        "moe_comm.ep.tracing",
    },
    {
        "moe_comm.ep.budget",
        "moe_comm.ep.operations_in_flight",
        "moe_comm.gone",
        "moe_comm.output_files",
    },
    {"moe_comm._nvshmem"},
    {"moe_comm._cuda", "moe_comm._host", "moe_comm._simt"},
]
LAYER_OF_PREFIX = {prefix: idx for idx, layer in enumerate(PYTHON_LAYERS) for prefix in layer}

# A native module is used where its objects are owned, nowhere else.
USERS_OF_NATIVE = {
    "moe_comm._host": (
        "moe_comm.ep.budget",
        "moe_comm.ep.planner",
        "moe_comm.peers.communicator",
        "moe_comm.peers.elastic",
        "moe_comm.peers.native_group",
        "moe_comm.peers.rank_gpu",
        "moe_comm.peers.joining_ranks",
        "moe_comm.peers.survivors",
        "moe_comm.ep.backends.collective_capacity",
        "moe_comm.ep.backends.collective",
        "moe_comm.ep.backends.host",
        "moe_comm.ep.backends.native",
        "moe_comm.ep.backends.rails",
        "moe_comm.ep.backends.expert_ranks",
        "moe_comm.dispatcher.routing_map",
        "moe_comm.checkpoints",
        "moe_comm.resharding.copy_services.batched_copy",
        "moe_comm.resharding.copy_services.changed_blocks",
        "moe_comm.resharding.describe.tensor_table",
        "moe_comm.tensors.memory",
        "moe_comm.tensors.quantization",
        "moe_comm.cli",
    ),
    "moe_comm._simt": ("moe_comm.ep.backends.simt",),
    "moe_comm._cuda": (
        "moe_comm.ep.backends.cuda",
        "moe_comm.ep.backends.nvshmem",
        "moe_comm.peers.rank_gpu",
    ),
    "moe_comm._nvshmem": ("moe_comm.ep.backends.nvshmem",),
}

# The definition stands on torch alone and knows no backend, so that it can be read and trusted on its
# own; the reference backend is that definition and no other backend.
SPEC = "moe_comm.ep.spec"
REPLICA_SPEC = "moe_comm.ep.replica_spec"
SPEC_STANDS_ON = {
    "moe_comm.arguments",
    "moe_comm.tensors.arithmetic",
    "moe_comm.ep.budget",
    "moe_comm.ep.config",
    "moe_comm.ep.limits",
    "moe_comm.ep.operations_in_flight",
    "moe_comm.ep.placement",
    "moe_comm.errors",
    "moe_comm.tensors.quantization",
}
REFERENCE = "moe_comm.ep.backends.reference"
REFERENCE_MUST_NOT_REACH = {
    "moe_comm",
    "moe_comm._host",
    "moe_comm._simt",
    "moe_comm.ep.backends.collective",
    "moe_comm.ep.backends.host",
    "moe_comm.ep.backends.native",
    "moe_comm.ep.backends.simt",
    "moe_comm.ep.buffer",
    "moe_comm.peers.communicator",
}


def python_layer(module: str) -> int | None:
    """Index into `PYTHON_LAYERS`; None for a module that no layer names."""
    while module not in LAYER_OF_PREFIX:
        module = module.rpartition(".")[0]
        if module in ("", "moe_comm"):
            return None
    return LAYER_OF_PREFIX[module]


@functools.cache
def import_statements(text: str) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """All of a source, in functions too."""
    nodes = ast.walk(ast.parse(text))
    return tuple(node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)))


def imported_modules(text: str, modules: set[str]) -> Iterator[str]:
    """Modules of the package that the source imports, in functions and for type checkers too.

    Args:
        text: Python source.
        modules: All modules of the package; tells `from package import module` from a name.
    """
    for node in import_statements(text):
        if isinstance(node, ast.Import):
            yield from (
                alias.name for alias in node.names if alias.name.split(".")[0] == "moe_comm"
            )
        elif node.level:
            yield "." * node.level + (node.module or "")
        elif (node.module or "").split(".")[0] == "moe_comm":
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in modules else str(node.module)


def python_violations(module: str, text: str, modules: set[str]) -> Iterator[str]:
    """Mistakes in the imports of `module`."""
    layer = python_layer(module)
    if layer is None:
        yield f"{module} is in no layer of PYTHON_LAYERS"
        return
    for imported in imported_modules(text, modules):
        imported_layer = python_layer(imported)
        if imported_layer is None:
            yield f"{module} imports {imported}, which is in no layer"
        elif imported_layer < layer:
            yield f"{module} imports {imported}, which is above it"
        users = USERS_OF_NATIVE.get(imported)
        if users is not None and not module.startswith(users):
            yield f"{module} imports {imported}: only {users} may"


def package_modules() -> dict[str, Path]:
    """Every module of the package and its file; the native module has none."""
    found = {}
    for path in sorted((ROOT / "moe_comm").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = package_modules()
MODULE_NAMES = set(MODULES) | set(USERS_OF_NATIVE)


def test_python_imports_follow_the_arrows() -> None:
    assert len(MODULES) > 50
    assert [
        found
        for module in sorted(MODULES)
        for found in python_violations(module, SOURCES[module], MODULE_NAMES)
    ] == []


def reachable_modules(module: str, sources: dict[str, str]) -> set[str]:
    """Every module that importing `module` reaches, itself included."""
    found: set[str] = set()
    pending = [module]
    while pending:
        module = pending.pop()
        if module not in found:
            found.add(module)
            pending += imported_modules(sources.get(module, ""), MODULE_NAMES)
    return found


def import_arrows(sources: dict[str, str]) -> dict[str, set[str]]:
    """Imports of every module of the package, in functions and for type checkers too."""
    native: dict[str, set[str]] = {module: set() for module in USERS_OF_NATIVE}
    return native | {
        module: set(imported_modules(text, MODULE_NAMES)) for module, text in sources.items()
    }


def test_modules_know_each_other_one_way() -> None:
    assert knowing_each_other(import_arrows(SOURCES)) == set()


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("moe_comm.arguments", "moe_comm.ep.config"),
        ("moe_comm.dispatcher.phases", "moe_comm.dispatcher.vllm"),
        ("moe_comm.cli.command_rules", "moe_comm.cli.app"),
    ],
)
def test_a_circle_of_modules_is_found(module: str, imported: str) -> None:
    package, _, name = imported.rpartition(".")
    broken = SOURCES[module] + f"\n\ndef f():\n    from {package} import {name}\n"
    found = knowing_each_other(import_arrows(SOURCES | {module: broken}))
    assert {module, imported} <= found


# Resharding and dispatch stand side by side on the communicator.
RESHARDING = "moe_comm.resharding"
RESHARDING_MUST_NOT_REACH = {
    name for name in MODULE_NAMES if name == "moe_comm" or f"{name}.".startswith("moe_comm.ep.")
}

SOURCES = {module: path.read_text() for module, path in MODULES.items()}


def test_ranks_that_know_one_another_know_no_experts() -> None:
    peers = {name for name in MODULES if name.startswith("moe_comm.peers.")}
    assert len(peers) > 10
    for module in peers:
        above = {
            name for name in reachable_modules(module, SOURCES) if python_folder(name) != "peers"
        }
        assert {python_folder(name) for name in above} <= BELOW_PEERS, (module, sorted(above))


BELOW_PEERS = {"_cuda", "_host", "arguments", "env", "errors"}


def python_folder(module: str) -> str:
    """Place of a module, "peers" of `moe_comm.peers.agree`: the folder of the package, or the file, that has the module."""
    return module.split(".")[1] if "." in module else module


def test_resharding_and_buffers_do_not_know_each_other() -> None:
    resharding = {name for name in MODULES if f"{name}.".startswith(f"{RESHARDING}.")}
    assert len(resharding) > 1
    for module in resharding:
        assert reachable_modules(module, SOURCES) & RESHARDING_MUST_NOT_REACH == set(), module
    for module in sorted(MODULE_NAMES & RESHARDING_MUST_NOT_REACH - {"moe_comm"}):
        assert reachable_modules(module, SOURCES) & resharding == set(), module


# The docstring of a folder of resharding says from which others it may import. Modules beside the
# folders have the names of Megatron's and know all folders; no folder knows them.
RESHARDING_ARROWS = {
    module.removeprefix(f"{RESHARDING}."): known_folders(str(ast.get_docstring(ast.parse(text))))
    for module, text in SOURCES.items()
    if module.rpartition(".")[0] == RESHARDING and MODULES[module].name == "__init__.py"
}


def resharding_violations(module: str, text: str) -> Iterator[str]:
    """Mistakes in what `module`, in a folder of resharding, imports from the others."""
    folder = module.split(".")[2]
    allowed = RESHARDING_ARROWS[folder] | {folder}
    for imported in imported_modules(text, MODULE_NAMES):
        if f"{imported}.".startswith(f"{RESHARDING}."):
            other = imported.removeprefix(RESHARDING).removeprefix(".").split(".")[0]
            if other not in allowed:
                yield f"{module} imports {imported}: {folder} may import {sorted(allowed)}"


def test_imports_of_resharding_follow_the_arrows() -> None:
    in_folders = [
        module
        for module in sorted(MODULES)
        if module.startswith(f"{RESHARDING}.") and module.split(".")[2] in RESHARDING_ARROWS
    ]
    assert len(in_folders) > 60
    assert [
        found for module in in_folders for found in resharding_violations(module, SOURCES[module])
    ] == []


def test_folders_of_resharding_know_each_other_one_way() -> None:
    assert len(RESHARDING_ARROWS) == 10
    assert knowing_each_other(RESHARDING_ARROWS) == set()


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("describe.metadata", "plan.planner"),
        ("plan.planner", "formats.transforms"),
        ("plan.planner", "planner"),
        ("formats.transforms", "move.execution"),
        ("copy_services.base", "plan.reshard_plan"),
        ("copy_services.base", "nvshmem_copy_service.service"),
        ("move.execution", "hold.refit"),
        ("ir.units", "plan.reshard_plan"),
    ],
)
def test_a_broken_arrow_of_resharding_is_found(module: str, imported: str) -> None:
    module, imported = f"{RESHARDING}.{module}", f"{RESHARDING}.{imported}"
    for text in (f"import {imported}", f"def f():\n    from {imported} import x"):
        assert len(list(resharding_violations(module, text))) == 1
    assert {module} <= knowing_each_other({module: {imported}, imported: {module}})


def test_the_definition_stands_on_torch_alone() -> None:
    # The memory that is taken is no part of it: a configuration says it by asking the budget. Nor is which
    # formats there are, a table of csrc.
    sources = SOURCES | {"moe_comm.ep.budget": "", "moe_comm.tensors.quantization": "import torch"}
    assert reachable_modules(SPEC, sources) == {SPEC} | SPEC_STANDS_ON
    assert reachable_modules(REPLICA_SPEC, sources) == {
        REPLICA_SPEC,
        "moe_comm.ep.placement",
        "moe_comm.arguments",
    }
    reached = reachable_modules(REFERENCE, sources)
    asking = {
        m for m in reached if "moe_comm.ep.budget" in imported_modules(SOURCES[m], MODULE_NAMES)
    }
    assert asking == {"moe_comm.ep.config"}
    assert SPEC in reached
    assert reached & REFERENCE_MUST_NOT_REACH == set()
    third_party = {
        name.split(".")[0]
        for module in reached
        for node in ast.walk(ast.parse(SOURCES[module]))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [str(node.module)]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    } - set(sys.stdlib_module_names)
    assert third_party == {"moe_comm", "torch"}


def test_local_tensor_work_knows_no_peers() -> None:
    """`moe_comm.triton` could be used without the rest of the package."""
    own = {module for module in MODULES if module.startswith("moe_comm.triton")}
    assert len(own) > 5
    reached = {found for module in own for found in reachable_modules(module, SOURCES)}
    assert reached - own <= {"moe_comm.tensors.quantization", "moe_comm._host"}


def test_a_reference_that_reaches_the_native_module_is_found() -> None:
    broken = SOURCES | {"moe_comm.ep.backends.base": "def f():\n    from moe_comm import _host\n"}
    assert "moe_comm._host" in reachable_modules(REFERENCE, broken)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("moe_comm.ep.config", "from moe_comm.ep.buffer import EpBuffer"),
        ("moe_comm.ep.backends.host", "from moe_comm import buffer"),
        ("moe_comm.ep.backends.base", "import moe_comm.ep.handles"),
        ("moe_comm.ep.buffer", "def f():\n    from moe_comm.ep.autograd import dispatch"),
        ("moe_comm.ep.buffer", "from moe_comm import EpConfig"),
        ("moe_comm.ep.buffer", "import moe_comm._host"),
        ("moe_comm.ep.backends.host", "from moe_comm import _simt"),
        ("moe_comm.ep.autograd.operators", "if TYPE_CHECKING:\n    import moe_comm.cli"),
        ("moe_comm.testing.conformance", "from moe_comm.cli.bench import case"),
        ("moe_comm.ep.handles", "from . import config"),
        ("moe_comm.unheard_of", "import torch"),
    ],
)
def test_a_broken_python_arrow_is_found(module: str, source: str) -> None:
    names = MODULE_NAMES | {"moe_comm.ep.autograd", "moe_comm.cli.bench.case"}
    assert len(list(python_violations(module, source, names))) == 1


# ---------------------------------------------------------------------------------------------


def test_no_cxx_source_reads_the_environment() -> None:
    calls = [path for path in CXX_FILES if "getenv" in (ROOT / "csrc" / path).read_text()]
    assert calls == [], "environment variables are read in moe_comm/env.py"


def test_ruff_enforces_what_this_file_leaves_to_it(tmp_path: Path) -> None:
    """Relative imports, `global` and os.environ outside env.py are errors of `make lint`."""
    if importlib.util.find_spec("ruff") is None:
        pytest.skip("ruff is not installed")
    bad = tmp_path / "bad.py"
    bad.write_text("import os\nfrom . import x\n\n\ndef f():\n    global y\n    y = os.environ\n")
    options = ["--config", str(ROOT / "pyproject.toml"), "--output-format=concise"]
    run = captured([sys.executable, "-m", "ruff", "check", *options, str(bad)])
    assert {"TID251", "TID252", "PLW0603"} <= set(re.findall(r"\b[A-Z]+\d+\b", run.stdout))
