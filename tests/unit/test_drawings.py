"""Drawings of the docs are those that are made of the code as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_comm.cli.bench.svg import DARK, LIGHT, Palette
from tools.drawings.__main__ import DRAWINGS

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=lambda palette: palette.name)
@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_is_up_to_date(name: str, palette: Palette) -> None:
    path = PICTURES / f"{name}-{palette.name}.svg"
    assert path.read_text() == DRAWINGS[name](palette), f"make pictures writes {path.name} anew"
