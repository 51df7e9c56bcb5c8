"""Memory of known alignment, poisoned and guarded, for tests of code that gets addresses."""

from __future__ import annotations

import numpy as np

MARGIN = 128
POISON = 0xFF


def place(codes: np.ndarray, offset: int) -> np.ndarray:
    """The codes as bytes at an address of `offset` past a multiple of 64."""
    buffer = aligned(codes.nbytes + offset)
    buffer[offset:] = codes.view(np.uint8)
    return buffer[offset:]


def aligned(num_bytes: int) -> np.ndarray:
    raw = np.full(num_bytes + 64, POISON, np.uint8)
    skip = -raw.ctypes.data % 64
    return raw[skip : skip + num_bytes]


class Guarded:
    """`num_bytes` of poison, `offset` past a multiple of 64, between margins that must survive."""

    def __init__(self, num_bytes: int, offset: int = 0) -> None:
        self._all = aligned(num_bytes + offset + 2 * MARGIN)
        self.bytes = self._all[MARGIN + offset : MARGIN + offset + num_bytes]
        self._begin = MARGIN + offset

    def check_margins(self) -> None:
        assert (self._all[: self._begin] == POISON).all(), "wrote before the beginning"
        assert (self._all[self._begin + len(self.bytes) :] == POISON).all(), "wrote past the end"
