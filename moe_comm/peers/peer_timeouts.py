"""Default limits on the time that a rank waits for others."""

from __future__ import annotations

ARRIVAL_TIMEOUT_S = 1800.0
"""For a living rank that does not enter what others are in."""

STALL_TIMEOUT_S = 30.0
"""For a rank that entered it and stopped, and for a machine of another node that does not answer."""

CONNECT_TIMEOUT_S = 300.0
"""For ranks that come to make a group, or to change one."""
