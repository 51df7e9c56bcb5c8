"""The rendered site: `make docs` writes it to build/docs.

Its pages are those of the repository as they stand, and the reference is made of docstrings.
"""

from __future__ import annotations

import ast
import re
import shutil
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

project = "moe_comm"
root_doc = "docs/index"
include_patterns = ["*.md", "docs/*.md", "docs/reference/*.rst", "benchmarks/*.md", "tests/*.md"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 6
autodoc_member_order = "bysource"
autodoc_typehints = "description"
napoleon_use_ivar = True
default_role = "code"  # of docstrings, which are written for readers of the source
html_theme = "furo"
html_title = "moe_comm"
html_show_copyright = False

# Pages that the index does not link to, by caption.
OTHER_PAGES = {
    "Reference": ["reference/*"],
    "The repository": ["../README", "../CHANGELOG", "../tests/README"],
}


def setup(app: Any) -> None:
    """Connect what follows. Called by Sphinx."""
    app.connect("source-read", _add_contents)
    app.connect("autodoc-process-docstring", _mark_code, priority=1)
    app.connect("build-finished", _copy_pictures)


def _add_contents(app: Any, docname: str, source: list[str]) -> None:
    """Give the index the tables of contents of a sidebar, one for each of its parts."""
    if docname != root_doc:
        return
    parts = {}
    for part in source[0].split("\n## ")[1:]:
        caption, _, text = part.partition("\n")
        parts[caption] = list(dict.fromkeys(re.findall(r"\]\(([\w./]+)\.md", text)))
    for caption, pages in (parts | OTHER_PAGES).items():
        lines = ["```{toctree}", ":hidden:", ":glob:", f":caption: {caption}", "", *pages, "```"]
        source[0] += "\n" + "\n".join(lines) + "\n"


def _mark_code(app: Any, kind: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Make a literal block of an example that is Python; others are words."""
    text = "\n".join(lines)
    found = re.search(r"^Example:\n((?:    .*\n?|\n)+)", text, re.MULTILINE)
    if found is None:
        return
    try:
        ast.parse(textwrap.dedent(found[1]))
    except SyntaxError:
        return
    block = "Example:\n    ::\n\n" + textwrap.indent(found[1], "    ")
    lines[:] = text.replace(found[0], block).split("\n")


def _copy_pictures(app: Any, error: Exception | None) -> None:
    """Put pictures beside the pages that show them by HTML, which Sphinx does not follow."""
    if error is None:
        pictures = "docs/pictures"
        shutil.copytree(ROOT / pictures, Path(app.outdir) / pictures, dirs_exist_ok=True)
