"""Machine code of the kernels, as the modules carry it: how much there is, and what it may not hold.

A GPU has room for about 128 KiB of instructions beside its cores (16 bytes each), and a kernel that is
launched once fetches what it runs through the first time. What is in local memory was in registers.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.combine_path import count_paths, find_cuobjdump
from benchmarks.ptxas_report import short_names
from tests.helpers.source_tree import captured

# A module may have code for one of them, and for others as well.
ARCHITECTURES = ("sm_90a", "sm_100")
MOST_INSTRUCTIONS = 8_000
# Limits of kernels that also share rows out to replicas, and count what these get by rank: in RANK_MAJOR alone.
MOST_INSTRUCTIONS_OF = {"exchange_rows<true>": 9_200, "internode_exchange<true>": 11_200}
COMBINES = ("combine<BFloat16, false>", "combine<BFloat16, true>")
# Executed by a warp for a piece of 4 KiB of a row that it adds, of which 64 adds and as many conversions
# are left in any case, and with weights 64 multiplications.
MOST_FOR_A_PIECE = {
    "sm_90a": dict(zip(COMBINES, (200, 270), strict=True)),
    "sm_100": dict(zip(COMBINES, (204, 270), strict=True)),
}
HAVE_BULK_COPIES = (
    *(
        "dispatch<Bytes, true>",
        "dispatch<BFloat16, true>",
        "receive_copies<true>",
        "strided_copies<true>",
    ),
    *COMBINES,
)
# Kernels that are launched behind an exchange, or behind one that is; see device::Launch::is_dependent.
DEPENDENT = ("add_rank_sums<", "combine<", "dispatch<", "receive")
# Registers of a thread, by the beginning of the kernel's name. A kernel that takes more leaves experts that run
# beside it fewer; one that waits alone takes few.
MOST_REGISTERS = {
    "add_rank_sums<": 128,
    "combine<": 128,
    "dispatch<Bytes, ": 100,
    "dispatch<": 96,
    "exchange_offers": 56,
    "exchange_rows": 80,
    "exchange_rows<true>": 84,
    "receive": 48,
    "receive_copies<": 56,
    "strided_copies<": 114,
    "weighted_gradient<": 56,
    "write_rank_requests": 32,
}

# Taking a module apart takes some ten seconds.
pytestmark = [pytest.mark.full, pytest.mark.parametrize("architecture", ARCHITECTURES)]


@dataclasses.dataclass
class Kernel:
    """Content of the code of one kernel."""

    num_instructions: int = 0
    num_local: int = 0  # loads and stores of local memory
    num_bulk_copies: int = 0
    num_wide_shared_loads: int = 0  # of 16 bytes, known to be of shared memory
    registers: int = 0  # of a thread
    # In the order of the code: W waits for the kernel ahead, S lets the one behind start, L loads from
    # global memory, C is a bulk copy.
    order: str = ""


def find_code(module: str) -> tuple[Path, str]:
    """The file of a built module, and what takes it apart."""
    built = importlib.util.find_spec(f"moe_comm.{module}")
    if built is None or built.origin is None:
        pytest.skip(f"moe_comm.{module} was built without nvcc")
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        pytest.skip("there is no cuobjdump: neither CUDA's nor Triton's is installed")
    return Path(built.origin), cuobjdump


@functools.cache
def kernels_of(module: str, architecture: str) -> dict[str, Kernel]:
    """By name, the kernels in a built module."""
    built, cuobjdump = find_code(module)
    command = (cuobjdump, "-arch", architecture)
    found: dict[str, Kernel] = {}
    with subprocess.Popen([*command, "-sass", built], stdout=subprocess.PIPE, text=True) as dump:
        for line in dump.stdout:
            if "Function : " in line:
                kernel = found[line.split("Function : ")[1].strip()] = Kernel()
            elif re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+\S", line):
                kernel.num_instructions += 1
                kernel.num_local += bool(re.search(r"\b(LDL|STL)\b", line))
                kernel.num_bulk_copies += "UBLKCP" in line
                kernel.num_wide_shared_loads += "LDS.128" in line
                if step := re.search(r"\b(ACQBULK|PREEXIT|LDG?\.|UBLKCP)", line):
                    kernel.order += {"A": "W", "P": "S", "L": "L", "U": "C"}[step[0][0]]
    if not found:
        pytest.skip(f"moe_comm.{module} was built for other GPUs than {architecture}")
    usage = captured([*command, "-res-usage", built], check=True)
    for symbol, registers in re.findall(r"Function (\S+):\s+REG:(\d+)", usage.stdout):
        if symbol in found:
            found[symbol].registers = int(registers)
    # Functions that kernels call take no parameters of an operation.
    kernels = {symbol: kernel for symbol, kernel in found.items() if symbol.endswith("ParamsE")}
    return dict(zip(short_names(list(kernels)), kernels.values(), strict=True))


def test_every_kernel_fits(architecture: str) -> None:
    kernels = kernels_of("_cuda", architecture)
    assert {"exchange_rows<false>", "exchange_rows<true>", *HAVE_BULK_COPIES} <= set(kernels)
    too_long = {
        name: kernel.num_instructions
        for name, kernel in kernels.items()
        if kernel.num_instructions > MOST_INSTRUCTIONS_OF.get(name, MOST_INSTRUCTIONS)
    }
    assert not too_long


def test_nothing_lies_in_local_memory(architecture: str) -> None:
    assert not {
        name for name, kernel in kernels_of("_cuda", architecture).items() if kernel.num_local
    }


def test_registers_are_within_their_budget(architecture: str) -> None:
    kernels = kernels_of("_cuda", architecture)
    assert all(kernel.registers > 0 for kernel in kernels.values())
    of_kernel = {
        name: max(
            (known for known in MOST_REGISTERS if name.startswith(known)), key=len, default=""
        )
        for name in kernels
    }
    assert "" not in of_kernel.values(), of_kernel
    assert not {
        name: (kernels[name].registers, MOST_REGISTERS[known])
        for name, known in of_kernel.items()
        if kernels[name].registers > MOST_REGISTERS[known]
    }


def test_staged_rows_are_loaded_as_shared_memory(architecture: str) -> None:
    kernels = kernels_of("_cuda", architecture)
    # A piece is 256 units of 16 bytes: eight of every lane.
    assert all(kernels[name].num_wide_shared_loads >= 8 for name in COMBINES)


def test_a_piece_is_added_in_few_instructions(architecture: str) -> None:
    paths = count_paths(*find_code("_cuda"), architecture)
    if not paths:
        pytest.skip(f"moe_comm._cuda was built for other GPUs than {architecture}")
    most = MOST_FOR_A_PIECE[architecture]
    assert most.keys() <= paths.keys()
    assert {name: paths[name] for name in most if paths[name] > most[name]} == {}


def test_rows_are_moved_by_bulk_copies(architecture: str) -> None:
    kernels = kernels_of("_cuda", architecture)
    assert all(kernels[name].num_bulk_copies >= 2 for name in HAVE_BULK_COPIES)


def test_nothing_is_read_before_the_kernel_ahead_has_ended(architecture: str) -> None:
    # A compiler may take what is read as constant for what was there when the kernel began.
    kernels = kernels_of("_cuda", architecture)
    waiting = {name for name, kernel in kernels.items() if "W" in kernel.order}
    assert waiting == {name for name in kernels if name.startswith(DEPENDENT)}
    assert {name for name in waiting if kernels[name].order[0] != "W"} == set()


def test_rows_have_been_sent_when_a_receive_may_start(architecture: str) -> None:
    # It takes SMs of its own, for as long as it waits.
    kernels = kernels_of("_cuda", architecture)
    orders = {name: kernels[name].order for name in kernels if name.startswith("dispatch<")}
    assert {name: order for name, order in orders.items() if "C" in order.partition("S")[2]} == {}
    assert all("S" in order for order in orders.values())


def test_every_kernel_across_nodes_fits(architecture: str) -> None:
    kernels = kernels_of("_nvshmem", architecture)
    assert any(name.startswith("internode_combine<") for name in kernels)
    too_long = {
        name: kernel.num_instructions
        for name, kernel in kernels.items()
        if kernel.num_instructions > MOST_INSTRUCTIONS_OF.get(name, MOST_INSTRUCTIONS)
    }
    assert not too_long
