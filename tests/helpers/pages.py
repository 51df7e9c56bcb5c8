"""Code that pages of docs/ show."""

from __future__ import annotations

import re
from pathlib import Path


def python_blocks(page: Path) -> list[str]:
    """Python code of a page, block by block."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
