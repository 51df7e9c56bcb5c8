"""Registers, shared memory and spills of every kernel, as the compiler reports them.

Compiles csrc/kernels with the flags of the modules `_cuda` and, for kernels across nodes, `_nvshmem`, once for
every architecture, and prints a table for csrc/kernels/README.md; needs nvcc, NVSHMEM's headers (of the wheel
nvidia-nvshmem-cu13, or under --nvshmem) and no GPU.

    python benchmarks/ptxas_report.py --write csrc/kernels/README.md
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURES = ("80", "90a", "100")
FLAGS = (
    *("-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Icsrc"),
    "-Xcompiler=-Wall,-Wextra,-ffp-contract=off",
)
TO_MACHINE_CODE = ("-Xptxas=-v", "-cubin")
ACROSS_NODES = "internode_"
BEGIN = "<!-- ptxas: begin -->"
END = "<!-- ptxas: end -->"
ENTRY = re.compile(r"Compiling entry function '(\w+)'")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
# What nvcc puts before names of a file that is linked as device code.
FILE_PREFIX = re.compile(r"^__nv_static_\w*?_(?=_ZN)")
NOT_OF_AN_OPERATION = "name_module"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """What the compiler says of one kernel on one architecture.

    Args:
        file: Of its source.
        name: With template arguments.
        registers: Of a thread.
        shared_bytes: Static; the rest is given at launch.
        stack_bytes: Of a thread.
        spill_bytes: Stores and loads.
    """

    file: str
    name: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int


def find_nvshmem() -> Path | None:
    """Where the wheel of NVSHMEM lies beside this Python."""
    package = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.nvshmem")
    places = package.submodule_search_locations if package else None
    return Path(next(iter(places))) if places else None


def vocabulary_flags(source: Path, nvshmem: Path | None) -> list[str]:
    """Flags that name the file which provides the kernels' vocabulary."""
    if not source.name.startswith(ACROSS_NODES):
        return ['-DMOE_DEVICE_PRIMITIVES="device/ptx.cuh"']
    vocabulary = '-DMOE_DEVICE_PRIMITIVES="device/nvshmem.cuh"'
    return [vocabulary, "-rdc=true", "-isystem", f"{nvshmem}/include"]


def run_nvcc(source: Path, target: Path, architecture: str, *flags: str) -> str:
    """What nvcc and ptxas print for a file of kernels or of PTX."""
    done = subprocess.run(
        ["nvcc", *flags, f"-arch={architecture}", "-o", str(target), str(source)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    if done.returncode:
        raise SystemExit(f"{source.name} does not compile for {architecture}:\n{done.stderr}")
    return done.stderr


def compile_report(source: Path, architecture: str, nvshmem: Path | None) -> str:
    """What ptxas prints for a file of kernels."""
    flags = (*FLAGS, *TO_MACHINE_CODE, *vocabulary_flags(source, nvshmem))
    with tempfile.TemporaryDirectory() as folder:
        return run_nvcc(source, Path(folder, "kernels"), f"sm_{architecture}", *flags)


def compile_as_drivers(
    virtual: str, architectures: tuple[str, ...], jobs: int = 2
) -> dict[str, list[Kernel]]:
    """What becomes of the PTX that `_cuda` carries on GPUs that it has no machine code for.

    A driver compiles it there when the first communicator is made; here nvcc's ptxas does.

    Args:
        virtual: Compute capability that the PTX is of, as `100`.
        architectures: Those of the GPUs.
        jobs: How many are compiled for at a time.

    Returns:
        The kernels on every architecture.

    Raises:
        SystemExit: Something does not compile; says what.
    """
    sources = [
        source
        for source in sorted((ROOT / "csrc/kernels").glob("*.cu"))
        if not source.name.startswith(ACROSS_NODES)
    ]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        kernels, ptx = Path(folder, "kernels.cu"), Path(folder, "kernels.ptx")
        kernels.write_text("".join(f'#include "kernels/{source.name}"\n' for source in sources))
        flags = (*FLAGS, *vocabulary_flags(kernels, None))
        run_nvcc(kernels, ptx, f"compute_{virtual}", *flags, "-ptx")
        reports = pool.map(
            lambda one: run_nvcc(ptx, Path(folder, one), f"sm_{one}", *TO_MACHINE_CODE),
            architectures,
        )
        return {
            one: parse(report, kernels.name)
            for one, report in zip(architectures, reports, strict=True)
        }


def parse(report: str, file: str) -> list[Kernel]:
    """The kernels of a report, in its order."""
    kernels = []
    pieces = ENTRY.split(report)
    for name, text in zip(short_names(pieces[1::2]), pieces[2::2], strict=True):
        spills, used = SPILLS.search(text), USED.search(text)
        if spills is None or used is None or NOT_OF_AN_OPERATION in name:
            continue
        shared = SHARED.search(text)
        stack, stores, loads = (int(value) for value in spills.groups())
        kernels.append(
            Kernel(
                file=file,
                name=name,
                registers=int(used.group(1)),
                shared_bytes=int(shared.group(1)) if shared else 0,
                stack_bytes=stack,
                spill_bytes=stores + loads,
            )
        )
    return kernels


def short_names(mangled: list[str]) -> list[str]:
    """`dispatch<BFloat16, true>` for `void moe::kernels::...::dispatch<...>(DispatchParams)`."""
    done = subprocess.run(
        ["c++filt"],
        input="\n".join(FILE_PREFIX.sub("", name) for name in mangled),
        capture_output=True,
        text=True,
        check=True,
    )
    names = []
    for full in done.stdout.splitlines():
        name = full.split("(moe::", 1)[0].removeprefix("void ")
        names.append(re.sub(r"(?:\w+::|\(anonymous namespace\)::)+", "", name))
    return names


def find_spills(reports: dict[str, list[Kernel]]) -> list[str]:
    """Kernels whose registers do not suffice, in words."""
    return [
        f"{kernel.file}: {kernel.name} on sm_{architecture}: {kernel.spill_bytes} bytes"
        for architecture, kernels in reports.items()
        for kernel in kernels
        if kernel.spill_bytes
    ]


def table(reports: dict[str, list[Kernel]]) -> str:
    """Markdown: one row a kernel, registers on every architecture."""
    architectures = list(reports)
    rows: dict[tuple[str, str], dict[str, Kernel]] = {}
    for architecture, kernels in reports.items():
        for kernel in kernels:
            rows.setdefault((kernel.file, kernel.name), {})[architecture] = kernel
    lines = [
        "| file | kernel | "
        + " | ".join(f"sm_{architecture}" for architecture in architectures)
        + " | static shared | stack | spills |",
        "|---|---|" + "---:|" * (len(architectures) + 3),
    ]
    for (file, name), by_architecture in sorted(rows.items()):
        found = [by_architecture.get(architecture) for architecture in architectures]
        registers = [str(kernel.registers) if kernel else "-" for kernel in found]
        present = [kernel for kernel in found if kernel]
        lines.append(
            f"| `{file}` | `{name}` | {' | '.join(registers)} | "
            f"{max(kernel.shared_bytes for kernel in present)} | "
            f"{max(kernel.stack_bytes for kernel in present)} | "
            f"{max(kernel.spill_bytes for kernel in present)} |"
        )
    return "\n".join(lines)


def write_into(page: Path, text: str) -> None:
    """Replaces what stands between the two marks of a page."""
    content = page.read_text(encoding="utf-8")
    before, _, rest = content.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--architectures", default=",".join(ARCHITECTURES))
    parser.add_argument("--write", type=Path, help="a page with the marks of the table")
    parser.add_argument("--check", action="store_true", help="fail where a kernel spills")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--nvshmem", type=Path, default=find_nvshmem(), help="folder with NVSHMEM's include"
    )
    parser.add_argument("--files", default="*.cu", help="of csrc/kernels, a pattern")
    options = parser.parse_args()
    if shutil.which("nvcc") is None:
        print("nvcc is not installed: nothing to report", file=sys.stderr)
        return 2
    sources = sorted((ROOT / "csrc/kernels").glob(options.files))
    if options.nvshmem is None:
        print("NVSHMEM was not found: kernels across nodes are left out", file=sys.stderr)
        sources = [source for source in sources if not source.name.startswith(ACROSS_NODES)]
    reports: dict[str, list[Kernel]] = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        for architecture in options.architectures.split(","):
            texts = pool.map(
                lambda source: compile_report(source, architecture, options.nvshmem),  # noqa: B023
                sources,
            )
            reports[architecture] = [
                kernel
                for source, text in zip(sources, texts, strict=True)
                for kernel in parse(text, source.name)
            ]
    text = table(reports)
    print(text)
    if options.write:
        write_into(options.write, text)
    spilling = find_spills(reports)
    if options.check and (spilling or not all(reports.values())):
        print("kernels that spill:", *spilling, sep="\n", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
