"""Fixtures that tests of several ranks share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moe_comm import fused_a2a


@pytest.fixture
def forget_groups() -> Iterator[None]:
    """Ranks that were threads have ended; a process group would say when it is destroyed."""
    yield
    fused_a2a._buffers.clear()
    fused_a2a._hybrid_ep_buffers.clear()
    fused_a2a._buffer = fused_a2a._hybrid_ep_buffer = None
