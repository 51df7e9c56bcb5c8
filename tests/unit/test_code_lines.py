"""The scale of the repository counts code, and tells who is above a ceiling."""

import json
from pathlib import Path

import pytest

from tools import code_lines

PYTHON = '''"""A module.

It has two lines of code that are text.
"""

# A comment.
import os  # with a remark


class Thing:
    """A class."""

    text = """two
    lines"""

    def call(self) -> None:
        """A function."""
'''
CXX = """/* A file
of C++. */
#include <string>  // with a remark

/// A function.
const char* slashes() {
  return "// no comment /*";  /* one */
}
"""


@pytest.mark.parametrize(
    ("name", "source", "number"),
    [
        ("a.py", PYTHON, 5),
        ("a.pyi", PYTHON, 5),
        ("a.cu", CXX, 4),
        ("a.h", CXX, 4),
        ("a.md", CXX, 0),
    ],
)
def test_code_lines_of_a_file(tmp_path: Path, name: str, source: str, number: int) -> None:
    (tmp_path / name).write_text(source)
    assert code_lines.count(tmp_path / name) == number


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("one/a.py", "one/inner/b.py", "one/inner/c.h", "other/d.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(CXX if name.endswith(".h") else PYTHON)
    return tmp_path


def test_a_file_counts_in_the_innermost_folder(tree: Path) -> None:
    assert code_lines.count_folders(tree, ["one", "one/inner"]) == {"one": 5, "one/inner": 9}


@pytest.mark.parametrize(
    ("ceilings", "code", "said"),
    [
        ({"one": 14, "other": 5}, 0, ""),
        ({"one": 13, "other": 5}, 1, "one has 14 code lines, its ceiling is 13: take 1 away"),
        ({"one": 14, "gone": 5}, 1, "gone has no code"),
    ],
)
def test_a_ceiling_holds(
    tree: Path,
    capsys: pytest.CaptureFixture[str],
    ceilings: dict[str, int],
    code: int,
    said: str,
) -> None:
    path = tree / "ceilings.json"
    path.write_text(json.dumps(ceilings))
    assert code_lines.main(tree, path) == code
    printed = capsys.readouterr()
    assert said in printed.err
    assert ("above its ceiling" in printed.out) == ("ceiling is" in said)


def test_every_folder_of_sources_has_a_ceiling() -> None:
    ceilings = json.loads(code_lines.CEILINGS.read_text())
    folders = {
        path.relative_to(code_lines.ROOT).parts[:2]
        for top in ("csrc", "moe_comm", "tests")
        for path in (code_lines.ROOT / top).iterdir()
        if path.is_dir() and any(code_lines.count(each) for each in path.rglob("*.*"))
    }
    assert {"/".join(parts) for parts in folders} <= ceilings.keys()
