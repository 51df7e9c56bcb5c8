"""What `make gpu` runs: stages of less than nine minutes each, whose results are written as they come.

Called again on the same commit, it goes on behind the stages that have passed. Needs nothing but the environment of
`make build`, or any Python that has torch, NumPy, Typer, Rich, pytest, setuptools, pybind11, CMake and
ninja, and, for a stage that uses it, MPS or compute-sanitizer.

    python tests/gpu/run_stages.py [--fresh] [--stages build,captured] [--list]

The exit status is 0 when every stage passed, 1 when one failed, 3 when one could not run, 2 without a
GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/gpu.json"
STATE = ROOT / "build/gpu-stages.json"
LIMIT_S = 530.0
LOW_LATENCY = ("--layout", "low-latency", "--operations", "dispatch+combine")
OUTPUT_TAIL = 4000
QUERY = (
    "name,driver_version,compute_cap,clocks.sm,clocks.mem,clocks.max.sm,power.limit,memory.total"
)
MPS_PIPE = "CUDA_MPS_PIPE_DIRECTORY"
# CMake and ninja of a virtual environment lie beside its Python, which need not be activated.
IN_PATH = ["sh", "-c", 'PATH="$1:$PATH"; shift; exec "$@"', "sh"]


class NotRunError(Exception):
    """Why a stage could not run."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage.

    Args:
        name: For the state and the results.
        run: Returns what to record; raises NotRunError, or CalledProcessError when it failed.
    """

    name: str
    run: Callable[[], dict[str, Any]]


def gpu_facts() -> dict[str, str] | None:
    """What nvidia-smi says of the first GPU, or None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode or not done.stdout.strip():
        return None
    values = [value.strip() for value in done.stdout.splitlines()[0].split(",")]
    return dict(zip(QUERY.split(","), values, strict=True))


def with_environment(words: Sequence[str], environment: dict[str, str]) -> list[str]:
    """The command with some variables set for it."""
    return ["env", *(f"{name}={value}" for name, value in environment.items()), *words]


def command(*words: str, **environment: str) -> dict[str, Any]:
    """Run one within the limit of a stage; its output goes to this terminal too."""
    start = time.monotonic()
    process = subprocess.Popen(
        [*IN_PATH, str(Path(sys.executable).parent), *with_environment(words, environment)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its own session: this command and its children
        output, _ = process.communicate()
        raise subprocess.CalledProcessError(
            124, words, f"{output}\nended after {LIMIT_S:.0f} s"
        ) from None
    sys.stdout.write(output)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words, output)
    return {
        "command": " ".join(words),
        "seconds": round(time.monotonic() - start, 1),
        "output": output[-OUTPUT_TAIL:],
    }


def pytest(*words: str, **environment: str) -> dict[str, Any]:
    """Run tests; none selected, or all skipped, counts as not run."""
    found = command(sys.executable, "-m", "pytest", "-q", "-x", *words, **environment)
    if " passed" not in found["output"]:
        raise NotRunError(f"no test ran: {found['output'][-300:]}")
    return found


@contextlib.contextmanager
def mps() -> Iterator[dict[str, str]]:
    """An MPS daemon of this program's own, with the card's settings as they are."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        raise NotRunError("nvidia-cuda-mps-control is not installed")
    with tempfile.TemporaryDirectory(prefix="moe-comm-mps-") as folder:
        environment = {MPS_PIPE: f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for path in environment.values():
            Path(path).mkdir()
        started = subprocess.run(
            with_environment(["nvidia-cuda-mps-control", "-d"], environment),
            capture_output=True,
            text=True,
            check=False,
        )
        if started.returncode:
            raise NotRunError(f"the MPS daemon does not start: {started.stdout}{started.stderr}")
        try:
            yield environment
        finally:
            subprocess.run(
                with_environment(["nvidia-cuda-mps-control"], environment),
                input="quit\n",
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
            )


def build() -> dict[str, Any]:
    facts = gpu_facts()
    assert facts is not None
    capability = facts["compute_cap"].replace(".", "")
    architecture = "90a" if capability == "90" else capability
    return command(
        *(sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"),
        MOE_COMM_CUDA="on",
        MOE_COMM_CUDA_ARCHS=architecture,
    )


def conformance(num_ranks: tuple[int, ...], mode: str) -> Callable[[], dict[str, Any]]:
    """Cases of these numbers of ranks on the one GPU."""
    selected = " or ".join(f"ranks{number}-" for number in num_ranks)
    words = ("tests/gpu/test_conformance.py::test_case", "-k")
    connections = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}

    def run() -> dict[str, Any]:
        if mode == "mps":
            with mps() as environment:
                return pytest(*words, f"({selected}) and processes", **environment, **connections)
        return pytest(*words, f"({selected}) and {mode}", **connections)

    return run


def checks(mode: str) -> Callable[[], dict[str, Any]]:
    return lambda: pytest(
        *("tests/gpu/test_conformance.py::test_check", "-k", mode),
        CUDA_DEVICE_MAX_CONNECTIONS="32",
    )


def build_nvshmem() -> dict[str, Any]:
    """The module across nodes; `build` has made the kernels that it shares."""
    found = command(
        *(sys.executable, "-c"),
        "from moe_comm import nvshmem\n"
        "try: print(nvshmem.find_host_library())\n"
        "except FileNotFoundError as error: print(f'missing: {error}')",
    )
    if "missing: " in found["output"]:
        raise NotRunError(found["output"].split("missing: ", 1)[1].strip())
    facts = gpu_facts()
    assert facts is not None
    capability = facts["compute_cap"].replace(".", "")
    return command(
        *(sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"),
        MOE_COMM_CUDA="on",
        MOE_COMM_NVSHMEM="on",
        MOE_COMM_CUDA_ARCHS="90a" if capability == "90" else capability,
    )


def nodes(layout: str, *, with_mps: bool = False) -> Callable[[], dict[str, Any]]:
    """Ranks on several nodes, PEs of NVSHMEM that share the one GPU."""
    environment = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        # PEs of one machine need no network card.
        "NVSHMEM_REMOTE_TRANSPORT": "none",
        "NVSHMEM_DISABLE_NCCL": "1",
        # SMs are shared out by num_sms.
        "NVSHMEM_IGNORE_CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "1",
    }

    def run() -> dict[str, Any]:
        if not with_mps:
            return pytest("tests/gpu/test_nodes.py", "-k", layout, **environment)
        with mps() as daemon:
            return pytest("tests/gpu/test_nodes.py", "-k", layout, **daemon, **environment)

    return run


def captured() -> dict[str, Any]:
    return pytest("tests/gpu/test_captured.py", CUDA_DEVICE_MAX_CONNECTIONS="32")


def bench(num_tokens: int, *options: str) -> Callable[[], dict[str, Any]]:
    """Dispatch and combine of rows of 7168 elements between 4 ranks on the GPU."""

    def run() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "bench.json"
            found = command(
                *(sys.executable, "-c", "from moe_comm.cli import main; main()"),
                *("bench", "dispatch-combine", "--backend", "cuda"),
                *("--ranks", "4", "--tokens", str(num_tokens), "--hidden", "7168"),
                *("--topk", "8", "--experts", "64", "--json", str(path)),
                *options,
            )
            return {**found, "bench": json.loads(path.read_text(encoding="utf-8"))}

    return run


def sanitizer(tool: str, num_ranks: int) -> Callable[[], dict[str, Any]]:
    def run() -> dict[str, Any]:
        if shutil.which("compute-sanitizer") is None:
            raise NotRunError("compute-sanitizer is not installed")
        return command(
            *("compute-sanitizer", "--tool", tool, "--target-processes", "all"),
            *("--error-exitcode", "9", sys.executable, "tests/gpu/one_round.py"),
            *("--ranks", str(num_ranks)),
        )

    return run


STAGES = [
    Stage("build", build),
    Stage("conformance-2-threads", conformance((1, 2), "threads")),
    Stage("conformance-2-processes", conformance((1, 2), "processes")),
    Stage("conformance-2-mps", conformance((1, 2), "mps")),
    Stage("conformance-4-threads", conformance((3, 4), "threads")),
    Stage("conformance-4-processes", conformance((4,), "processes")),
    Stage("conformance-8-threads", conformance((6, 8), "threads")),
    Stage("conformance-8-processes", conformance((8,), "processes")),
    Stage("conformance-8-mps", conformance((8,), "mps")),
    Stage("checks-threads", checks("threads")),
    Stage("checks-processes", checks("processes")),
    Stage("captured", captured),
    Stage("build-nvshmem", build_nvshmem),
    Stage("nodes-2x1", nodes("2x1")),
    Stage("nodes-3x1", nodes("3x1")),
    Stage("nodes-2x2", nodes("2x2")),
    Stage("nodes-2x2-mps", nodes("2x2", with_mps=True)),
    Stage("bench-bf16", bench(4096)),
    Stage("bench-fp8", bench(4096, "--quantization", "fp8_block128")),
    # Decoding: dispatch + combine of 128 tokens is to take 60 us at most (p50).
    Stage("bench-low-latency", bench(128, *LOW_LATENCY)),
    Stage("bench-low-latency-fp8", bench(128, *LOW_LATENCY, "--quantization", "fp8_block128")),
    *(
        Stage(f"{tool}-{num_ranks}", sanitizer(tool, num_ranks))
        for num_ranks in (1, 2)
        for tool in ("memcheck", "racecheck", "synccheck")
    ),
]


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_json(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def commit(*, with_changes: bool) -> str:
    """The commit that is checked out, `-dirty` where files differ from it if that is asked for."""
    options = ["--dirty"] if with_changes else []
    done = subprocess.run(
        ["git", "describe", "--always", "--abbrev=12", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def run_stage(stage: Stage) -> dict[str, Any]:
    """The record of a stage: its outcome, the card as it was, and what it found."""
    record: dict[str, Any] = {"gpu_before": gpu_facts(), "commit": commit(with_changes=True)}
    try:
        record.update(stage.run(), outcome="passed")
    except NotRunError as reason:
        record.update(outcome="not run", reason=str(reason))
    except subprocess.CalledProcessError as error:
        sys.stdout.write(str(error.output)[-OUTPUT_TAIL:])
        record.update(
            outcome="failed",
            exit_status=error.returncode,
            command=" ".join(error.cmd),
            output=str(error.output)[-OUTPUT_TAIL:],
        )
    record["gpu_after"] = gpu_facts()
    return record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--fresh", action="store_true", help="run again what has passed")
    parser.add_argument("--stages", default="", help="names with commas; all by default")
    parser.add_argument("--list", action="store_true", help="print the names of the stages")
    options = parser.parse_args()
    names = [stage.name for stage in STAGES]
    if options.list:
        print(*names, sep="\n")  # noqa: T201
        return 0
    wanted = [name for name in options.stages.split(",") if name] or names
    unknown = sorted(set(wanted) - set(names))
    if unknown:
        parser.error(f"no such stage: {', '.join(unknown)}; --list names them")
    if gpu_facts() is None:
        print(  # noqa: T201
            "make gpu: there is no GPU on this machine (nvidia-smi shows none); nothing was run"
        )
        return 2
    # Results are files of the checkout, so only the commit tells whether the code is the same.
    state: dict[str, Any] = {"commit": commit(with_changes=False), "outcomes": {}}
    former = read_json(STATE)
    if not options.fresh and former.get("commit") == state["commit"]:
        state = former
    outcome_of: dict[str, str] = state["outcomes"]
    results = read_json(RESULTS)
    for stage in STAGES:
        if stage.name not in wanted or outcome_of.get(stage.name) == "passed":
            continue
        print(f"=== {stage.name}", flush=True)  # noqa: T201
        record = run_stage(stage)
        outcome_of[stage.name] = record["outcome"]
        results[stage.name] = record
        write_json(STATE, state)
        write_json(RESULTS, results)
        reason = record.get("reason", "")
        print(f"=== {stage.name}: {record['outcome']} {reason}", flush=True)  # noqa: T201
    outcomes = {name: outcome_of.get(name, "not run") for name in wanted}
    for name, outcome in outcomes.items():
        print(f"{name:26} {outcome}")  # noqa: T201
    if "failed" in outcomes.values():
        return 1
    return 3 if "not run" in outcomes.values() else 0


if __name__ == "__main__":
    sys.exit(main())
