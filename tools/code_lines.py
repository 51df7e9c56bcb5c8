"""The scale of the repository: code lines by folder, beside the ceilings that `make lint` holds them to.

A code line is no blank line, no comment and no docstring. A commit that raises a ceiling in
tools/code_lines.json says why in its body; one that brings a folder far below lowers it.

python tools/code_lines.py                        # the table; exit code 1 above a ceiling
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CEILINGS = ROOT / "tools/code_lines.json"
PYTHON = frozenset({".py", ".pyi"})
CXX = frozenset({".h", ".cpp", ".cu", ".cuh"})
# One of: a comment, or text in which no comment begins.
_COMMENT_OR_TEXT = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", re.DOTALL
)
_NO_CODE = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    }
)


def count_python(source: str) -> int:
    """Code lines of a module."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            docstrings.update(range(first.lineno, (first.end_lineno or 0) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def count_cxx(source: str) -> int:
    """Code lines of a file of C++ or CUDA."""

    def without_comment(match: re.Match[str]) -> str:
        text = match.group()
        return re.sub(r"[^\n]", "", text) if text.startswith("/") else text

    return sum(
        bool(line.strip()) for line in _COMMENT_OR_TEXT.sub(without_comment, source).split("\n")
    )


def count(path: Path) -> int:
    """Code lines of a file; 0 for what is no source."""
    if path.suffix in PYTHON:
        return count_python(path.read_text())
    return count_cxx(path.read_text()) if path.suffix in CXX else 0


def count_folders(root: Path, folders: list[str]) -> dict[str, int]:
    """Code lines by folder; a file belongs to the longest of `folders` that it lies in."""
    lines = dict.fromkeys(folders, 0)
    for top in {folder.split("/")[0] for folder in folders}:
        for path in sorted((root / top).rglob("*")):
            if path.suffix not in PYTHON | CXX or not path.is_file():
                continue
            name = path.relative_to(root).as_posix()
            owners = [folder for folder in folders if name.startswith(folder + "/")]
            if owners:
                lines[max(owners, key=len)] += count(path)
    return lines


def table(lines: dict[str, int], ceilings: dict[str, int]) -> list[str]:
    """Lines of text: a folder, its code lines, its ceiling; then those of all."""
    rows = [(folder, lines[folder], ceilings[folder]) for folder in ceilings]
    rows.append(("all", sum(lines.values()), sum(ceilings.values())))
    return [
        f"{folder:<26}{number:>8}{ceiling:>8}{'  above its ceiling' if number > ceiling else ''}"
        for folder, number, ceiling in rows
    ]


def main(root: Path = ROOT, ceilings_path: Path = CEILINGS) -> int:
    """Print the table; 1 where a folder is above its ceiling, or is gone."""
    ceilings: dict[str, int] = json.loads(ceilings_path.read_text())
    lines = count_folders(root, list(ceilings))
    print(f"{'code lines':<26}{'now':>8}{'ceiling':>8}")
    print("\n".join(table(lines, ceilings)))
    above = [folder for folder in ceilings if lines[folder] > ceilings[folder]]
    gone = [folder for folder in ceilings if lines[folder] == 0]
    for folder in above:
        print(
            f"{folder} has {lines[folder]} code lines, its ceiling is {ceilings[folder]}: take "
            f"{lines[folder] - ceilings[folder]} away, or raise it in {ceilings_path.name} and say why in "
            "the body of the commit",
            file=sys.stderr,
        )
    for folder in gone:
        print(f"{folder} has no code: drop it from {ceilings_path.name}", file=sys.stderr)
    return 1 if above or gone else 0


if __name__ == "__main__":
    sys.exit(main())
