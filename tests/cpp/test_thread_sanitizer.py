"""ThreadSanitizer watches both sides of every exchange, because ranks can be threads of one process.

It sees the loads and stores of the native modules alone, not those of torch or Python: of the CPU backend,
and of emulated kernels whose callers are streams.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.helpers.source_tree import captured, copy_source_tree, run

RACE = re.compile(r"^SUMMARY: ThreadSanitizer: (.*)$", re.MULTILINE)
EXIT_STATUS_OF_A_RACE = "66"
# Thread-local storage of a thread that has ended and that nobody joins is freed by whichever thread gets
# its stack; the C library orders the two by a lock that ThreadSanitizer does not see.
SUPPRESSIONS = "race:dl_deallocate_tls\n"

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


def libtsan() -> str:
    compiler = shutil.which("g++")
    if compiler is None or shutil.which("setarch") is None:
        pytest.skip("needs g++ and setarch")
    path = run(compiler, "-print-file-name=libtsan.so").strip()
    if not Path(path).is_absolute():
        pytest.skip("g++ has no libtsan")
    return path


def build(tree: Path, modules: str) -> None:
    wanted = {"MOE_COMM_SANITIZE": "thread", "MOE_COMM_MODULES": modules}
    environment = {**os.environ, **wanted}  # noqa: TID251
    run(
        *(sys.executable, "setup.py", "--quiet", "build", "--build-lib", "build/tsan"),
        cwd=tree,
        env=environment,
    )


def races(tree: Path) -> list[str]:
    """Report of ThreadSanitizer on the module built in `tree`; every rank must come to its end."""
    suppressions = tree / "build" / "tsan-suppressions"
    suppressions.write_text(SUPPRESSIONS)
    environment = {
        **os.environ,  # noqa: TID251
        "PYTHONPATH": str(tree / "build" / "tsan"),
        "LD_PRELOAD": libtsan(),
        "TSAN_OPTIONS": f"exitcode={EXIT_STATUS_OF_A_RACE} suppressions={suppressions}",
    }
    # ThreadSanitizer of GCC 12 knows the usual layout of addresses only, not a randomized one.
    program = [sys.executable, str(tree / "tests" / "helpers" / "threaded_ranks.py")]
    done = captured(["setarch", platform.machine(), "-R", *program], cwd=tree, env=environment)
    found = RACE.findall(done.stderr)
    assert str(done.returncode) == (EXIT_STATUS_OF_A_RACE if found else "0"), done.stderr[-4000:]
    return found


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    libtsan()
    path = tmp_path_factory.mktemp("tsan")
    copy_source_tree(path)
    build(path, "host,simt")
    return path


def test_no_race(tree: Path) -> None:
    assert races(tree) == []


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        pytest.param(
            "store(value, std::memory_order_release)",
            "store(value, std::memory_order_relaxed)",
            id="a flag without release",
        ),
        pytest.param(
            "load(std::memory_order_acquire)",
            "load(std::memory_order_relaxed)",
            id="a wait without acquire",
        ),
    ],
)
def test_a_missing_order_is_seen(tree: Path, right: str, wrong: str) -> None:
    header = tree / "csrc" / "core" / "sync_words.h"
    text = header.read_text()
    assert right in text
    header.write_text(text.replace(right, wrong))
    try:
        build(tree, "host")  # emulated kernels need not be wrong as well
        assert races(tree) != []
    finally:
        header.write_text(text)
