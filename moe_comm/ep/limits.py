"""Numbers that experts, tokens and rows of a buffer are held to."""

from __future__ import annotations

from moe_comm.arguments import as_int

ROW_BYTES_MULTIPLE = 16
"""A divisor of the bytes of every row."""
NUM_MAX_EXPERTS = 1 << 16
"""Most experts of a buffer. Ranks compare placements and exchange a count per expert in each dispatch."""
NUM_MAX_DECODED_TOKENS = 1024
"""Most tokens of a rank for which a buffer has low-latency windows without being asked for them."""


def check_num_experts(num_experts: int) -> None:
    """Experts over all ranks are so many that a buffer can serve them.

    Raises:
        ValueError: There are none, or more than `NUM_MAX_EXPERTS`.
        TypeError: It is not an int.
    """
    if as_int("num_experts", num_experts, 1) > NUM_MAX_EXPERTS:
        raise ValueError(f"num_experts must be <= {NUM_MAX_EXPERTS}, got {num_experts}")
