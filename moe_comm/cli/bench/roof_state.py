"""Conditions under which a measured roof counts: when the machine was slow, fast or unstable."""

from __future__ import annotations

FAST_ROOF_GBS = 40.0
"""Bandwidth between the two states in which the machines this was calibrated on are found."""
ROOF_DISAGREEMENT = 0.20


def roof_state(roof_gbs: float) -> str:
    """Return the state of the machine, one of two, judged by its roof."""
    return "fast" if roof_gbs >= FAST_ROOF_GBS else "slow"


def roofs_agree(before_us: float, after_us: float) -> bool:
    """Return whether the machine held still between two roofs."""
    low, high = sorted((before_us, after_us))
    return high <= low * (1.0 + ROOF_DISAGREEMENT)
