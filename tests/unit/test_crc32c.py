"""CRC-32C against the examples of RFC 3720, and every way to compute it against its definition."""

from __future__ import annotations

import random

import pytest

_host = pytest.importorskip("moe_comm._host")

ISAS = _host.kernels.checksum_instruction_sets()
POLYNOMIAL = 0x82F63B78


def crc_by_bits(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (POLYNOMIAL if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize("isa", [None, *ISAS])
@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
    ids=["nothing", "digits", "zeros", "ones", "rising", "falling"],
)
def test_known_checksums(isa: str | None, data: bytes, crc: int) -> None:
    assert _host.kernels.crc32c(data, isa) == crc


@pytest.mark.parametrize("isa", ISAS)
def test_every_length_start_and_cut(isa: str) -> None:
    """Long ones go through several streams, which are joined; parts go on where others ended."""
    dice = random.Random(3)
    data = dice.randbytes(10_000)
    for num_bytes in [*range(40), 3071, 3072, 3073, 6143, 6144, 9_990]:
        start = dice.randrange(9)
        part = memoryview(data)[start : start + num_bytes]
        expected = crc_by_bits(part.tobytes())
        assert _host.kernels.crc32c(part, isa) == expected, (num_bytes, start)
        cut = dice.randrange(num_bytes + 1)
        begun = _host.kernels.crc32c(part[:cut], isa)
        assert _host.kernels.crc32c(part[cut:], isa, begun) == expected, (num_bytes, cut)


def test_an_instruction_set_that_is_not_here_is_refused() -> None:
    assert "portable" in ISAS
    with pytest.raises(ValueError, match="no crc32c named 'mmx'"):
        _host.kernels.crc32c(b"", "mmx")
