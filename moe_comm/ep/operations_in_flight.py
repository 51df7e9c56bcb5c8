"""Default limit on the operations of one buffer that are under way at a time."""

from __future__ import annotations

NUM_MAX_IN_FLIGHT = 4
"""Entries of a buffer's ring: an operation begins when the one so many before it has ended on every rank."""
