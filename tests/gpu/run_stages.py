"""Stages of `make gpu`: programs of less than nine minutes each, whose results are written as they come.

Called again with the same sources, it goes on behind the stages that have passed, as the results say: on another
machine too. Modules that were built are kept beside the results, and taken up on a machine of the same kind with
such results; any other builds again. Needs nothing but the environment of `make build`, or any Python that
has torch, NumPy, Typer, Rich, pytest, setuptools, pybind11, CMake and ninja, and, for a stage that uses
it, MPS, compute-sanitizer, DeepEP or further GPUs. Stages come in the order of what they tell: a machine that
is there for ten minutes is used well. A stage sees as many GPUs as it is for, and one that needs more than
there are is recorded as not run.

    python tests/gpu/run_stages.py [--fresh] [--stages build,captured] [--time-limit 560]
                                   [--results gpu.json] [--state earlier.json] [--list]

The exit status is 0 when every stage passed, 1 when one failed, 3 when one could not run or its time
was over, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/gpu.json"
LIMIT_S = 530.0
WARM_UP_S = 180.0
SMOKE_S = 60.0  # of which loading torch and its kernels is a third
LEAST_S = 20.0  # a stage that has less is not begun
LAST_WORDS_S = 5.0  # that a command which is ended has to say where it was
ANSWER_S = 15.0  # that a program of the driver may take to answer
# Files that decide what stages find.
SOURCES = ("CMakeLists.txt", "setup.py", "cmake", "csrc", "moe_comm", "tests/gpu", "tests/helpers")
SOURCE_SUFFIXES = {".py", ".txt", ".cmake", ".map", ".h", ".cuh", ".cu", ".cpp"}
MODULE_SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]
FP8 = ("--quantization", "fp8_block128")
LOW_LATENCY = ("--layout", "low-latency", "--operations", "dispatch+combine")
OUTPUT_TAIL = 8000
QUERY = (
    "name,driver_version,compute_cap,clocks.sm,clocks.mem,clocks.max.sm,power.limit,memory.total"
)
CUDA_PROGRAMS = Path("/usr/local/cuda/bin")  # where a PATH does without them
VISIBLE = "CUDA_VISIBLE_DEVICES"
SANITIZERS = ("memcheck", "racecheck", "synccheck")
NO_DEEP_EP = 4  # exit status of deep_ep_times.py
PROGRAMS = ("nvcc", "compute-sanitizer", "nvidia-cuda-mps-control", "cmake", "ninja")
MODULES = ("torch", "numpy", "typer", "rich", "pytest", "setuptools", "pybind11", "deep_ep")
MPS_PIPE = "CUDA_MPS_PIPE_DIRECTORY"
CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
# Ranks that are threads share a context: a kernel of torch's that is loaded by its first launch may wait
# there for that of another rank, which waits for this one.
EAGER = {"CUDA_MODULE_LOADING": "EAGER"}
# CMake and ninja of a virtual environment lie beside its Python, which need not be activated.
IN_PATH = ["sh", "-c", f'ulimit -c 0; PATH="$1:$PATH:{CUDA_PROGRAMS}"; shift; exec "$@"', "sh"]
# Python that is ended says where each of its threads was; what it had printed has come by then.
PYTHON = {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}


class NotRunError(Exception):
    """Why a stage could not run, or not to its end.

    Args:
        reason: A sentence.
        output: What it had printed by then.
    """

    def __init__(self, reason: str, output: str = "") -> None:
        super().__init__(reason)
        self.output = output


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage.

    Args:
        name: For the results.
        run: Returns what to record; raises NotRunError, or CalledProcessError when it failed.
        makes: Modules that it builds: where one is missing, it is run again.
        num_gpus: That it sees.
    """

    name: str
    run: Callable[[], dict[str, Any]]
    makes: tuple[str, ...] = ()
    num_gpus: int = 1

    def files(self) -> list[Path]:
        """Paths of the modules in this checkout."""
        return [ROOT / f"moe_comm/{name}{MODULE_SUFFIX}" for name in self.makes]

    def keep(self, folder: Path) -> dict[str, Any]:
        """Copy the modules beside the results. Returns what tells later whether they may be taken up."""
        if not self.makes:
            return {}
        digests = {}
        for file in self.files():
            digests[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
            with replaced(folder / file.name) as part:
                shutil.copyfile(file, part)
        return {"architecture": architecture(), "modules": digests}

    def has_modules(self, record: dict[str, Any], folders: Sequence[Path]) -> bool:
        """Return whether its modules lie in this checkout for this GPU, or do now, as some folder has what was kept.

        Args:
            record: Of the run that built them.
            folders: With results.
        """
        if not self.makes:
            return True
        if record.get("architecture") != architecture():
            return False
        missing = [file for file in self.files() if not file.exists()]
        for file in missing:
            kept = [folder / file.name for folder in folders if (folder / file.name).exists()]
            whole = [
                copy
                for copy in kept
                if hashlib.sha256(copy.read_bytes()).hexdigest() == record["modules"].get(file.name)
            ]
            if not whole:
                return False
            with replaced(file) as part:
                shutil.copyfile(whole[0], part)
        imports = "; ".join(f"import moe_comm.{file.name.split('.')[0]}" for file in missing)
        done = subprocess.run([sys.executable, "-c", imports], cwd=ROOT, check=False)
        return done.returncode == 0


def nvidia_smi(*options: str) -> list[str]:
    """Lines of its answer; none where it fails, or hangs beside a GPU that has failed."""
    if shutil.which("nvidia-smi") is None:
        return []
    with tempfile.TemporaryFile("w+") as answer:
        process = subprocess.Popen(
            ["nvidia-smi", *options], stdout=answer, stderr=subprocess.DEVNULL
        )
        try:
            status = process.wait(ANSWER_S)
        except subprocess.TimeoutExpired:
            process.kill()  # and not waited for: who hangs in the driver may not even end
            return []
        answer.seek(0)
        return [] if status else answer.read().splitlines()


def gpu_facts() -> dict[str, str] | None:
    """Answer of nvidia-smi about the first GPU, or None without one."""
    lines = nvidia_smi(f"--query-gpu={QUERY}", "--format=csv,noheader")
    if not lines:
        return None
    return dict(
        zip(QUERY.split(","), (value.strip() for value in lines[0].split(",")), strict=True)
    )


def gpu_names() -> list[str]:
    """Names for CUDA_VISIBLE_DEVICES: every GPU that this program was given."""
    given = os.environ.get(VISIBLE)  # noqa: TID251
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    # A line for each, and below it one for each of its MIG instances.
    num_gpus = sum(line.startswith("GPU ") for line in nvidia_smi("--list-gpus"))
    return [str(gpu_idx) for gpu_idx in range(num_gpus)]


def what_is_missing() -> str | None:
    """Why nothing can run, and what else stages would miss; None with a GPU."""
    if shutil.which("nvidia-smi") is None:
        problem = "nvidia-smi, of NVIDIA's driver, is not in PATH"
    elif gpu_facts() is None:
        problem = "nvidia-smi shows no GPU"
    elif not gpu_names():
        problem = f"{VISIBLE} names no GPU"
    else:
        return None
    path = os.pathsep.join(
        (str(Path(sys.executable).parent), os.environ.get("PATH", ""), str(CUDA_PROGRAMS))  # noqa: TID251
    )
    absent = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    absent += [name for name in MODULES if importlib.util.find_spec(name) is None]
    also = f"; also missing: {', '.join(absent)}" if absent else ""
    return f"there is no GPU on this machine ({problem}); nothing was run{also}"


def with_environment(words: Sequence[str], environment: dict[str, str]) -> list[str]:
    """The command with some variables set for it."""
    return ["env", *(f"{name}={value}" for name, value in environment.items()), *words]


class Clock:
    """When this program has to have ended."""

    deadline = float("inf")

    @classmethod
    def left_s(cls) -> float:
        """Seconds for the next command."""
        return min(LIMIT_S, cls.deadline - time.monotonic())


class Shown:
    """The GPUs that the stage which runs may use, as CUDA_VISIBLE_DEVICES names them."""

    names: tuple[str, ...] = ()


def command(*words: str, stage_limit_s: float = LIMIT_S, **environment: str) -> dict[str, Any]:
    """Run one within the limit of a stage; its output goes to this terminal as it comes.

    One that is late ends by SIGABRT, in which Python says where it was, or else by SIGKILL. One that hangs in the
    driver even so, or has left a child that keeps the output open, is not waited for.
    """
    start = time.monotonic()
    limit_s = min(stage_limit_s, Clock.left_s())
    environment = {VISIBLE: ",".join(Shown.names), **PYTHON, **environment}
    process = subprocess.Popen(
        [*IN_PATH, str(Path(sys.executable).parent), *with_environment(words, environment)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    lines: list[str] = []

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            sys.stdout.write(line)
            sys.stdout.flush()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    is_late = threading.Event()
    has_ended = threading.Event()

    def end() -> None:
        is_late.set()
        for how in (signal.SIGABRT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(process.pid, how)  # its own session: this command and its children
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LAST_WORDS_S)
        has_ended.set()

    timer = threading.Timer(max(limit_s, 0.0), end)
    timer.start()
    while not has_ended.wait(0.05):
        if process.poll() is not None and not is_late.is_set():
            break
    timer.cancel()
    reader.join(LAST_WORDS_S)
    output = "".join(lines)
    if is_late.is_set():
        if limit_s < stage_limit_s:
            raise NotRunError(f"the time was over after {limit_s:.0f} s of it", output)
        raise subprocess.CalledProcessError(124, words, f"{output}\nended after {limit_s:.0f} s")
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words, output)
    return {
        "command": " ".join(words),
        "seconds": round(time.monotonic() - start, 1),
        "output": output,
    }


def pytest(
    words: Sequence[str], environment: dict[str, str], max_failed: int = 3
) -> dict[str, Any]:
    """Run tests until a few have failed; none selected, or all skipped, counts as not run."""
    options = ("-q", "-rs", "--tb=short", "--no-showlocals", "--maxfail", str(max_failed))
    found = command(sys.executable, "-m", "pytest", *options, *words, **environment)
    if " passed" not in found["output"]:
        raise NotRunError("no test ran", found["output"])
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
        # It serves all GPUs: those that it was given alone, its clients would number anew.
        # The daemon may keep its output open.
        with Path(folder, "said").open("w+", encoding="utf-8") as said:
            started = subprocess.run(
                [
                    "env",
                    "-u",
                    VISIBLE,
                    *with_environment(["nvidia-cuda-mps-control", "-d"], environment),
                ],
                stdout=said,
                stderr=subprocess.STDOUT,
                check=False,
            )
            said.seek(0)
            if started.returncode:
                raise NotRunError(f"the MPS daemon does not start: {said.read()}")
        try:
            yield environment
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    with_environment(["nvidia-cuda-mps-control"], environment),
                    input="quit -t 5\n",
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=60,
                )


def architecture() -> str:
    """Architecture of the GPU, as nvcc names it; with what only Hopper has."""
    facts = gpu_facts()
    capability = facts["compute_cap"].replace(".", "")
    return "90a" if capability == "90" else capability


def build_modules(modules: str) -> dict[str, Any]:
    return command(
        *(sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"),
        MOE_COMM_MODULES=modules,
        MOE_COMM_CUDA="on",
        MOE_COMM_CUDA_ARCHS=architecture(),
        MOE_COMM_NVSHMEM="on" if "nvshmem" in modules else "off",
        # A compiler that this has never met may warn of more.
        MOE_COMM_WERROR="0",
    )


def build() -> dict[str, Any]:
    """Build the modules that move rows on one GPU, and those they are compared with: no emulator, nothing across nodes."""
    return build_modules("host,cuda")


def probe() -> dict[str, Any]:
    """Calls that wait for a kernel that runs, and offers of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/probe"
        source = "tests/gpu/probe.cu"
        command("nvcc", "-std=c++20", f"-arch=sm_{architecture()}", "-o", program, source)
        return command(program, stage_limit_s=90.0, **CONNECTIONS)


def warm_up() -> dict[str, Any]:
    """Read torch and its kernels from a cold disk, for which stages behind it have no time."""
    program = "import torch; print(torch.ones(1, device='cuda').sum().item())"
    return command(sys.executable, "-c", program, stage_limit_s=WARM_UP_S, **EAGER)


def smoke(*words: str, **environment: str) -> Callable[[], dict[str, Any]]:
    """A few calls of each operation: whether it runs at all."""
    return lambda: command(
        sys.executable, *words, stage_limit_s=SMOKE_S, **CONNECTIONS, **environment
    )


def one_round(num_ranks: int, mode: str, *options: str) -> tuple[str, ...]:
    return ("tests/gpu/one_round.py", "--ranks", str(num_ranks), "--mode", mode, *options)


def kernel_times(num_ranks: int, num_tokens: int, *options: str) -> Callable[[], dict[str, Any]]:
    """Times of a dispatch and combine: the time of every kernel, eager and captured, beside a copy."""
    sizes = ("--ranks", str(num_ranks), "--tokens", str(num_tokens))

    def run() -> dict[str, Any]:
        program = (sys.executable, "tests/gpu/kernel_times.py", *sizes, *options)
        found = command(*program, stage_limit_s=180.0, **CONNECTIONS, **EAGER)
        times = last_document(found)
        check_spread(times["devices"])
        return {**found, "times": times}

    return run


def last_document(found: dict[str, Any]) -> dict[str, Any]:
    """The JSON document that a program has printed last."""
    return json.loads(found["output"].strip().splitlines()[-1])


def check_spread(devices: Sequence[object]) -> None:
    """Check that ranks were on as many GPUs as the stage is for.

    Args:
        devices: Of every rank, as it names its GPU.

    Raises:
        CalledProcessError: They were not: what was measured is something else.
    """
    expected = min(len(devices), len(Shown.names))
    if len(set(devices)) != expected:
        text = f"{len(devices)} ranks on {expected} GPUs were on {list(devices)}"
        raise subprocess.CalledProcessError(1, ["check_spread"], text)


def deep_ep(num_ranks: int, num_tokens: int, *options: str) -> Callable[[], dict[str, Any]]:
    """DeepEP and this package in turns in the same processes, where it is installed."""

    def run() -> dict[str, Any]:
        sizes = ("--ranks", str(num_ranks), "--tokens", str(num_tokens))
        with contextlib.ExitStack() as stack:
            daemon = stack.enter_context(mps()) if num_ranks > len(Shown.names) else {}
            try:
                found = command(
                    *(sys.executable, "tests/gpu/deep_ep_times.py", *sizes, *options),
                    stage_limit_s=240.0,
                    **daemon,
                    **CONNECTIONS,
                )
            except subprocess.CalledProcessError as error:
                if error.returncode != NO_DEEP_EP:
                    raise
                raise NotRunError(str(error.output).strip().splitlines()[-1]) from error
        return {**found, "times": last_document(found)}

    return run


def doctor() -> dict[str, Any]:
    """Equipment of this machine, for whoever reads the rest."""
    return command(sys.executable, "-c", "from moe_comm.cli import main; main()", "doctor")


def in_mode(words: Sequence[str], mode: str, environment: dict[str, str]) -> dict[str, Any]:
    """Tests whose ranks are of one mode."""
    if mode != "threads":
        return pytest(words, environment)
    # Threads of a test that failed may hang on in its process and hold the GPU.
    return pytest(words, {**environment, **EAGER}, max_failed=1)


def conformance(num_ranks: tuple[int, ...], mode: str) -> Callable[[], dict[str, Any]]:
    """Cases of these numbers of ranks, on the GPUs of the stage in turn."""
    selected = " or ".join(f"ranks{number}-" for number in num_ranks)
    kind = "processes" if mode == "mps" else mode
    words = ("tests/gpu/test_conformance.py::test_case", "-k", f"({selected}) and {kind}")

    def run() -> dict[str, Any]:
        if mode != "mps":
            return in_mode(words, mode, CONNECTIONS)
        with mps() as daemon:
            return in_mode(words, mode, {**daemon, **CONNECTIONS})

    return run


def checks(mode: str) -> Callable[[], dict[str, Any]]:
    words = ("tests/gpu/test_conformance.py::test_check", "-k", mode)
    # In flight, operations of one rank too may come in an order that makes them wait for each other.
    return lambda: in_mode(words, mode, {**CONNECTIONS, **EAGER})


def build_nvshmem() -> dict[str, Any]:
    """The module across nodes; `build` has made the kernels that it shares."""
    found = command(
        *(sys.executable, "-c"),
        "from moe_comm.peers import nvshmem\n"
        "try: print(nvshmem.find_host_library())\n"
        "except FileNotFoundError as error: print(f'missing: {error}')",
    )
    if "missing: " in found["output"]:
        raise NotRunError(found["output"].split("missing: ", 1)[1].strip())
    return build_modules("host,cuda,nvshmem")


def nodes(layout: str, *, with_mps: bool = False) -> Callable[[], dict[str, Any]]:
    """Ranks on several nodes, PEs of NVSHMEM that share the one GPU."""
    words = ("tests/gpu/test_nodes.py", "-k", layout)
    environment = {
        **CONNECTIONS,
        # PEs of one machine need no network card.
        "NVSHMEM_REMOTE_TRANSPORT": "none",
        "NVSHMEM_DISABLE_NCCL": "1",
        # SMs are shared out by num_sms.
        "NVSHMEM_IGNORE_CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "1",
    }

    def run() -> dict[str, Any]:
        if not with_mps:
            return pytest(words, environment)
        with mps() as daemon:
            return pytest(words, {**daemon, **environment})

    return run


def captured(*words: str) -> Callable[[], dict[str, Any]]:
    return lambda: pytest(["tests/gpu/test_captured.py", *words], CONNECTIONS)


def staged() -> dict[str, Any]:
    """Rows that pass through the host, as between GPUs that do not reach each other; by no kernel of this package."""
    return pytest(["tests/gpu/test_staged.py"], {})


def topology() -> dict[str, Any]:
    """Links that join the GPUs."""
    return command("nvidia-smi", "topo", "--matrix")


def bench(
    num_ranks: int, num_tokens: int, *options: str, mode: str = "threads"
) -> Callable[[], dict[str, Any]]:
    """Dispatch and combine of rows of 7168 elements between ranks, on the GPUs of the stage in turn.

    Several processes on one GPU run side by side under MPS alone; without it they take turns, which
    says nothing about speed. Threads of one process run side by side everywhere.
    """

    def run() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            environment = EAGER if mode == "threads" else {}
            if mode == "processes" and num_ranks > len(Shown.names):
                environment = stack.enter_context(mps())
            path = Path(folder) / "bench.json"
            found = command(
                *(sys.executable, "-c", "from moe_comm.cli import main; main()"),
                *("bench", "dispatch-combine", "--backend", "cuda", "--ranks", str(num_ranks)),
                *("--tokens", str(num_tokens), "--hidden", "7168", "--topk", "8"),
                *("--experts", "64", "--mode", mode, "--json", str(path)),
                *options,
                **environment,
                **CONNECTIONS,
            )
            document = json.loads(path.read_text(encoding="utf-8"))
            check_spread(document["environment"]["devices"])
            return {**found, "bench": document}

    return run


def sanitizer(tool: str, num_ranks: int, mode: str = "threads") -> Callable[[], dict[str, Any]]:
    """A case of every layout and format that there is for so many ranks; kernels of this package alone.

    Eager loading, which ranks that share a context need, has the tool read every kernel of torch: minutes.
    """

    def run() -> dict[str, Any]:
        is_installed = (CUDA_PROGRAMS / "compute-sanitizer").exists()
        if shutil.which("compute-sanitizer") is None and not is_installed:
            raise NotRunError("compute-sanitizer is not installed")
        return command(
            *("compute-sanitizer", "--tool", tool, "--target-processes", "all"),
            *("--kernel-regex", "kns=moe", "--error-exitcode", "9", sys.executable),
            *one_round(num_ranks, mode, "--formats"),
            **CONNECTIONS,
            **(EAGER if mode == "threads" and num_ranks > 1 else {}),
        )

    return run


def across_gpus(num_gpus: int) -> list[Stage]:
    """Stages for ranks on so many GPUs, one rank on each."""
    names_and_runs = {
        "bench": bench(num_gpus, 4096, mode="processes"),
        "bench-low-latency": bench(num_gpus, 128, *LOW_LATENCY, mode="processes"),
        "kernels": kernel_times(num_gpus, 4096),
        "kernels-low-latency": kernel_times(num_gpus, 128, "--layout", "low-latency"),
        "bench-fp8": bench(num_gpus, 4096, *FP8, mode="processes"),
        "bench-rank-reduction": bench(num_gpus, 4096, "--rank-reduction", mode="processes"),
        "deep-ep": deep_ep(num_gpus, 4096),
        "deep-ep-low-latency": deep_ep(num_gpus, 128, "--layout", "low-latency"),
        "conformance-processes": conformance((num_gpus,), "processes"),
        "conformance-threads": conformance((num_gpus,), "threads"),
        "bench-threads": bench(num_gpus, 4096),
    }
    return [
        Stage(f"{name}-{num_gpus}-gpus", run, num_gpus=num_gpus)
        for name, run in names_and_runs.items()
    ]


STAGES = [
    Stage("build", build, makes=("_host", "_cuda")),
    Stage("warm-up", warm_up),
    Stage("probe", probe),
    Stage("doctor", doctor),
    Stage("smoke-1-rank", smoke(*one_round(1, "threads"))),
    Stage("smoke-2-threads", smoke(*one_round(2, "threads", "--cases", "2"), **EAGER)),
    Stage("smoke-2-processes", smoke(*one_round(2, "processes", "--cases", "2"))),
    Stage("smoke-captured", smoke("-m", "pytest", "-q", "tests/gpu/test_captured.py", "-k", "[1]")),
    Stage("topology", topology, num_gpus=2),
    Stage("smoke-2-gpus-processes", smoke(*one_round(2, "processes", "--cases", "2")), num_gpus=2),
    Stage(
        "smoke-2-gpus-threads", smoke(*one_round(2, "threads", "--cases", "2"), **EAGER), num_gpus=2
    ),
    Stage("bench-1-rank", bench(1, 4096)),
    Stage("kernels-1-rank", kernel_times(1, 4096)),
    # Decoding: dispatch + combine of 128 tokens is to take 60 us at most, captured 45 us.
    Stage("bench-1-rank-low-latency", bench(1, 128, *LOW_LATENCY)),
    Stage("kernels-1-rank-low-latency", kernel_times(1, 128, "--layout", "low-latency")),
    # What four ranks that share a GPU make of decoding and of prefill, before what takes minutes.
    Stage("bench-low-latency", bench(4, 128, *LOW_LATENCY)),
    Stage("bench-bf16", bench(4, 4096)),
    Stage("kernels-low-latency", kernel_times(4, 128, "--layout", "low-latency")),
    Stage("captured", captured("-k", "[2]")),
    Stage("staged-host", staged),
    Stage("conformance-2-threads", conformance((1, 2), "threads")),
    # Speed that is left to more SMs than the 24 of bench-1-rank.
    *(
        Stage(f"bench-1-rank-{number}-sms", bench(1, 4096, "--num-sms", str(number)))
        for number in (16, 32, 64)
    ),
    Stage("bench-fp8", bench(4, 4096, *FP8)),
    Stage("kernels", kernel_times(4, 4096)),
    Stage("kernels-fp8", kernel_times(4, 4096, "--fp8")),
    Stage("deep-ep", deep_ep(4, 4096)),
    Stage("deep-ep-low-latency", deep_ep(4, 128, "--layout", "low-latency")),
    *across_gpus(8),
    *across_gpus(4),
    *across_gpus(2),
    Stage("captured-2-gpus", captured("-k", "[2]"), num_gpus=2),
    Stage("checks-processes-2-gpus", checks("processes"), num_gpus=2),
    Stage("conformance-3-threads", conformance((3,), "threads")),
    Stage("conformance-2-processes", conformance((1, 2), "processes")),
    Stage("conformance-4-threads", conformance((4,), "threads")),
    Stage("conformance-4-processes", conformance((4,), "processes")),
    Stage("checks-threads", checks("threads")),
    Stage("checks-processes", checks("processes")),
    # Four processes on one GPU take turns of milliseconds, in which three wait for the fourth.
    Stage("captured-4", captured("-k", "[4]")),
    Stage("build-nvshmem", build_nvshmem, makes=("_nvshmem",)),
    Stage("nodes-2x1", nodes("2x1")),
    Stage("nodes-2x2-mps", nodes("2x2", with_mps=True)),
    Stage("bench-bf16-mps", bench(4, 4096, mode="processes")),
    Stage("bench-low-latency-mps", bench(4, 128, *LOW_LATENCY, mode="processes")),
    Stage("bench-low-latency-fp8", bench(4, 128, *LOW_LATENCY, *FP8)),
    Stage("conformance-2-mps", conformance((1, 2), "mps")),
    Stage("conformance-8-threads", conformance((6, 8), "threads")),
    Stage("conformance-8-processes", conformance((6, 8), "processes")),
    Stage("conformance-8-mps", conformance((8,), "mps")),
    Stage("nodes-3x1", nodes("3x1")),
    Stage("nodes-2x2", nodes("2x2")),
    Stage("conformance-3-processes", conformance((3,), "processes")),
    # Each may take all of its time. Threads wait for each other, which is the most to ask of a tool that may launch one
    # kernel at a time.
    *(Stage(f"{tool}-1", sanitizer(tool, 1)) for tool in SANITIZERS),
    *(Stage(f"{tool}-2-processes", sanitizer(tool, 2, "processes")) for tool in SANITIZERS),
    *(Stage(f"{tool}-3", sanitizer(tool, 3)) for tool in SANITIZERS),
]


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A path beside `path`, which takes its place at the end: who is cut short leaves `path` as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    other = path.with_name(f"{path.name}.part")
    yield other
    other.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """Results of an earlier run; none where there is no such file, or half of one."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        found = error
    if isinstance(found, dict) and all(isinstance(record, dict) for record in found.values()):
        return found
    reason = str(found) if isinstance(found, ValueError) else "no table of stages"
    print(f"=== {path} is not read, everything runs again: {reason}", flush=True)  # noqa: T201
    return {}


def write_json(path: Path, document: dict[str, Any]) -> None:
    with replaced(path) as part:
        part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def sources_digest() -> str:
    """Digest of the files that decide what stages find, where git is not asked: a copy has none."""
    digest = hashlib.sha256()
    for source in SOURCES:
        path = ROOT / source
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in SOURCE_SUFFIXES:
                digest.update(str(file.relative_to(ROOT)).encode() + b"\0")
                digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


def commit() -> str:
    """The commit that is checked out, `-dirty` where files differ from it; "unknown" without git."""
    if shutil.which("git") is None:
        return "unknown"
    done = subprocess.run(
        ["git", "describe", "--always", "--abbrev=12", "--dirty"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def run_stage(stage: Stage) -> dict[str, Any]:
    """The record of a stage: its outcome, the card as it was, and what it found."""
    names = gpu_names()
    record: dict[str, Any] = {"commit": commit(), "sources": sources_digest()}
    if len(names) < stage.num_gpus:
        few = "1 GPU" if len(names) == 1 else f"{len(names)} GPUs"
        return {**record, "outcome": "not run", "reason": f"{few}, it is for {stage.num_gpus}"}
    Shown.names = tuple(names[: stage.num_gpus])
    record |= {"gpu_before": gpu_facts(), "gpus": list(Shown.names)}
    try:
        record.update(stage.run(), outcome="passed")
    except NotRunError as reason:
        record.update(outcome="not run", reason=str(reason), output=reason.output)
    except subprocess.CalledProcessError as error:
        record.update(
            outcome="failed",
            exit_status=error.returncode,
            command=" ".join(error.cmd),
            output=str(error.output),
        )
    except Exception:  # noqa: BLE001 - what it had to say is not as this program knows it
        record.update(outcome="failed", output=traceback.format_exc())
    record["output"] = record.get("output", "")[-OUTPUT_TAIL:]
    record["gpu_after"] = gpu_facts()
    return record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--fresh", action="store_true", help="run again what has passed")
    parser.add_argument("--stages", default="", help="names with commas; all by default")
    parser.add_argument(
        "--time-limit", type=float, default=0.0, help="seconds for all stages together; 0 for any"
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="where to write what was found"
    )
    parser.add_argument(
        "--state",
        type=Path,
        help="results of an earlier run, of another machine perhaps, to go on from",
    )
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
    missing = what_is_missing()
    if missing is not None:
        print(f"make gpu: {missing}")  # noqa: T201
        return 2
    if options.time_limit > 0:
        Clock.deadline = time.monotonic() + options.time_limit
    sources = sources_digest()
    gpus = gpu_names()
    results = read_json(options.results)
    folders = [options.results.parent]
    if options.state is not None:
        results = {**read_json(options.state), **results}
        folders.append(options.state.parent)
    outcome_of: dict[str, str] = {}
    for stage in STAGES:
        if stage.name not in wanted:
            continue
        former = results.get(stage.name, {})
        has_passed = former.get("outcome") == "passed" and former.get("sources") == sources
        if has_passed and not options.fresh and stage.has_modules(former, folders):
            outcome_of[stage.name] = "passed"
            continue
        if len(gpus) < stage.num_gpus and former.get("sources") == sources:
            outcome_of[stage.name] = former["outcome"]  # nothing can be found here
            continue
        if Clock.left_s() < LEAST_S:
            print(f"=== {stage.name} and those behind it: the time is over", flush=True)  # noqa: T201
            break
        print(f"=== {stage.name}", flush=True)  # noqa: T201
        record = run_stage(stage)
        if record["outcome"] == "passed":
            record |= stage.keep(options.results.parent)
        outcome_of[stage.name] = record["outcome"]
        results[stage.name] = record
        write_json(options.results, results)
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
