"""Instructions that a warp executes for a piece of a row, in the loop of `combine` that adds what came by bulk copies.

Reads the machine code as cuobjdump prints it, of a built module or of a file of nvcc (-cubin); needs cuobjdump (of
CUDA, or the one that Triton brings) and no GPU.

    python -m benchmarks.combine_path moe_comm/_cuda*.so --architecture sm_90a

The loop is found by what it does: it awaits an mbarrier, loads a piece of 4 KiB (eight loads of 16 bytes by every
lane), adds every number of it and has a bulk copy fill the stage again. Counted is the shortest way round through all
of that: the token has further rows, and nothing is looked up.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.ptxas_report import short_names

LOADS_OF_A_PIECE = 8
LOAD = "LDS.128"
ADDS = ("FADD", "DADD")
# Numbers of a piece that a lane adds, by the type of rows.
ADDS_OF_A_PIECE = {"BFloat16": 64, "Float16": 64, "Float32": 32, "Float64": 16}
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ )?\s*([A-Z][\w.]*)([^;]*);")
TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
NAME = re.compile(r"combine<(\w+),")
INSTRUCTION_BYTES = 16
ENDS = ("EXIT", "RET", "KILL")
AWAITS = "SYNCS.PHASECHK"
IN_TRITON = "backends/nvidia/bin"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
    """One line of machine code.

    Args:
        address: In the function, in bytes.
        is_conditional: It has a predicate.
        operation: With its modifiers, as `LDS.128`.
        target: Address that a branch goes to.
    """

    address: int
    is_conditional: bool
    operation: str
    target: int | None


def find_cuobjdump() -> str | None:
    """Path of cuobjdump: in PATH, or beside this Python's Triton."""
    found = shutil.which("cuobjdump")
    triton = importlib.util.find_spec("triton")
    if found is None and triton is not None and triton.origin is not None:
        found = shutil.which("cuobjdump", path=str(Path(triton.origin).parent / IN_TRITON))
    return found


def parse(line: str) -> Instruction | None:
    """The instruction of a line, or None."""
    match = INSTRUCTION.match(line)
    if match is None:
        return None
    address, predicate, operation, operands = match.groups()
    is_branch = operation.split(".")[0] == "BRA"
    target = TARGET.search(operands) if is_branch else None
    return Instruction(
        address=int(address, 16),
        # Branches of diverged warps, and those that uniform registers decide, say so themselves.
        is_conditional=predicate is not None or (is_branch and operation != "BRA"),
        operation=operation,
        target=int(target.group(1), 16) if target else None,
    )


def read_functions(binary: Path, cuobjdump: str, architecture: str) -> dict[str, list[Instruction]]:
    """The instructions of every function in a binary, by its mangled name."""
    functions: dict[str, list[Instruction]] = {}
    command = [cuobjdump, "-arch", architecture, "-sass", str(binary)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as dump:
        assert dump.stdout is not None
        current: list[Instruction] = []
        for line in dump.stdout:
            if "Function : " in line:
                current = functions.setdefault(line.split("Function : ")[1].strip(), [])
            elif instruction := parse(line):
                current.append(instruction)
    return functions


@dataclasses.dataclass
class Block:
    """Instructions that are executed one after another.

    Args:
        length: Their number.
        num_loads: Of 16 bytes of shared memory.
        num_adds: Of numbers.
        has_copy: A bulk copy is issued.
        begins_with_await: The first one looks at an mbarrier; where another would, a block begins.
        next: Addresses of the blocks that may follow.
    """

    length: int = 0
    num_loads: int = 0
    num_adds: int = 0
    has_copy: bool = False
    begins_with_await: bool = False
    next: tuple[int, ...] = ()


def cut_blocks(function: list[Instruction]) -> dict[int, Block]:
    """The blocks of a function by their addresses."""
    targets = {one.target for one in function if one.target is not None}
    blocks: dict[int, Block] = {}
    block = None
    for one in function:
        is_await = one.operation.startswith(AWAITS)
        if block is None or one.address in targets or is_await:
            if block is not None:
                block.next = (one.address,)
            block = blocks[one.address] = Block(begins_with_await=is_await)
        block.length += 1
        block.num_loads += one.operation == LOAD
        block.num_adds += one.operation.split(".")[0] in ADDS
        block.has_copy |= one.operation.startswith("UBLKCP")
        if one.target is not None or one.operation in ENDS:
            # The next instruction is the first of another block, and may follow what has a condition.
            behind = one.address + INSTRUCTION_BYTES
            to = () if one.target is None else (one.target,)
            block.next = (*to, behind) if one.is_conditional else to
            block = None
    return blocks


def count_path(function: list[Instruction], num_adds: int) -> int | None:
    """Instructions of the shortest way from an await of an mbarrier back to it that adds a piece.

    Args:
        function: In the order of addresses.
        num_adds: Numbers of a piece that a lane adds.

    Returns:
        Their number, or None where the function has no such loop.
    """
    blocks = cut_blocks(function)
    lengths = []
    for start in (address for address, block in blocks.items() if block.begins_with_await):
        # Length up to a block, its address, and the loads, adds and copies before it.
        queue = [(0, start, 0, 0, False)]
        seen = set()
        while queue:
            length, address, loads, adds, has_copy = heapq.heappop(queue)
            if length and address == start:
                if loads >= LOADS_OF_A_PIECE and adds >= num_adds and has_copy:
                    lengths.append(length)
                    break
                continue
            if address not in blocks or (address, loads, adds, has_copy) in seen:
                continue
            seen.add((address, loads, adds, has_copy))
            block = blocks[address]
            for following in block.next:
                state = (
                    min(loads + block.num_loads, LOADS_OF_A_PIECE),
                    min(adds + block.num_adds, num_adds),
                    has_copy or block.has_copy,
                )
                heapq.heappush(queue, (length + block.length, following, *state))
    return min(lengths, default=None)


def count_paths(binary: Path, cuobjdump: str, architecture: str) -> dict[str, int]:
    """Instructions for a piece, by the short name of every kernel that has such a loop."""
    functions = read_functions(binary, cuobjdump, architecture)
    paths = {}
    for name, function in zip(short_names(list(functions)), functions.values(), strict=True):
        number = NAME.match(name)
        if number is not None:
            length = count_path(function, ADDS_OF_A_PIECE[number.group(1)])
            if length is not None:
                paths[name] = length
    return paths


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("binary", type=Path)
    parser.add_argument("--architecture", default="sm_90a")
    options = parser.parse_args()
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        print("there is no cuobjdump: install CUDA's or triton", file=sys.stderr)
        return 2
    paths = count_paths(options.binary, cuobjdump, options.architecture)
    for name, length in sorted(paths.items()):
        print(f"{name:32} {length:4}")
    if not paths:
        print(
            f"{options.binary} has no such loop for {options.architecture}: compiled for others?",
            file=sys.stderr,
        )
    return 0 if paths else 1


if __name__ == "__main__":
    sys.exit(main())
