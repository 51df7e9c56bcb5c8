"""Work of a driver on GPUs that the modules have no machine code for: compile the PTX that they carry.

Nvcc's own ptxas stands for it. A kernel whose registers do not suffice there keeps them in local memory, and a
user would see no more of it than the time.
"""

from __future__ import annotations

import shutil

import pytest

from benchmarks.ptxas_report import compile_as_drivers, find_spills

NEEDED = {
    "combine<BFloat16, true>",
    "dispatch<Bytes, true>",
    "exchange_offers",
    "exchange_rows<false>",
    "exchange_rows<true>",
    "receive_copies<true>",
    "strided_copies<true>",
}


@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed: no PTX to compile")
@pytest.mark.parametrize(
    ("virtual", "architectures"),
    [
        pytest.param("100", ("100", "103", "120", "121"), id="blackwell"),
        pytest.param("80", ("80", "86", "89"), id="ampere-ada", marks=pytest.mark.full),
        pytest.param("90a", ("90a",), id="hopper", marks=pytest.mark.full),
    ],
)
def test_no_kernel_spills_where_a_driver_compiles_it(
    virtual: str, architectures: tuple[str, ...]
) -> None:
    reports = compile_as_drivers(virtual, architectures)
    assert reports.keys() == set(architectures)
    for kernels in reports.values():
        assert {kernel.name for kernel in kernels} >= NEEDED
    assert find_spills(reports) == []
