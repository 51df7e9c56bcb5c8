from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _poisoned_windows() -> Iterator[None]:
    """Windows are filled with 0xFF when they are handed out, in this process and its workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_COMM_POISON", "1")
        yield
