import contextlib
import fcntl
import filecmp
import os
import re
import select
import shutil
import subprocess
import sys
import termios
import time
import tty
from collections.abc import Iterator
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


MODULES = ("host", "simt", "cuda", "nvshmem")
DEVICE_MODULES = ("cuda", "nvshmem")
MISSING_FOR = {
    "cuda": "no nvcc that works",
    "nvshmem": "no nvcc that works, or neither NVSHMEM's wheel nor NVSHMEM_HOME",
}


def enabled(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


def mode_of(name: str, default: str) -> str:
    mode = os.environ.get(name) or default
    if mode not in ("auto", "on", "off"):
        raise SystemExit(f"{name} must be auto, on or off, got {mode!r}")
    return mode


def cuda_mode() -> str:
    """MOE_COMM_CUDA: auto (with nvcc, and without a sanitizer), on or off."""
    return mode_of("MOE_COMM_CUDA", "off" if os.environ.get("MOE_COMM_SANITIZE") else "auto")


def nvshmem_mode() -> str:
    """MOE_COMM_NVSHMEM: auto (with _cuda, where NVSHMEM is found), on or off."""
    mode = mode_of("MOE_COMM_NVSHMEM", "auto")
    if mode == "on" and cuda_mode() == "off":
        raise SystemExit("MOE_COMM_NVSHMEM=on needs moe_comm._cuda: MOE_COMM_CUDA is off")
    return "off" if cuda_mode() == "off" else mode


def wanted_modules() -> tuple[str, ...]:
    """The modules that MOE_COMM_MODULES names, in the order of MODULES; without it, all."""
    text = os.environ.get("MOE_COMM_MODULES")
    if not text:
        modes = {"cuda": cuda_mode(), "nvshmem": nvshmem_mode()}
        return tuple(name for name in MODULES if modes.get(name) != "off")
    named = [name.strip() for name in text.split(",")]
    for name in named:
        if name not in MODULES:
            raise SystemExit(f"MOE_COMM_MODULES={text}: there is no {name!r}, only {MODULES}")
    for name, mode in (("cuda", cuda_mode()), ("nvshmem", nvshmem_mode())):
        if name in named and mode == "off":
            raise SystemExit(
                f"MOE_COMM_MODULES={text} names {name}, which other variables turn off"
            )
    return tuple(name for name in MODULES if name in named)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock file at `path`, so that two builds in one checkout follow each other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def replace_if_changed(src: Path, dst: Path) -> None:
    """Copies `src` over `dst` in one step: a process that has `dst` mapped keeps the old file."""
    if dst.exists() and filecmp.cmp(src, dst, shallow=False):
        return
    dst.parent.mkdir(parents=True, exist_ok=True)
    partial = dst.with_name(f".{dst.name}.{os.getpid()}")
    shutil.copy2(src, partial)
    partial.replace(dst)


def remove_module(name: str) -> None:
    """Modules share objects, so one that an earlier build left must not meet newer ones."""
    for stale in (ROOT / "moe_comm").glob(f"{name}.*.so"):
        stale.unlink()


class Progress:
    """Shows what a build compiles: one line that is rewritten on a terminal, else a line for each file.

    Ninja tells when it starts a command only on a terminal, so it is given one to write to.
    """

    STATUS = "@%s %f %t@"
    LINE = re.compile(r"@(\d+) (\d+) (\d+)@ (.*)")
    ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
    HEARTBEAT_S = 4.0

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._running: dict[str, float] = {}  # what is compiled, and since when
        self._num_started = self._num_finished = self._num_total = 0
        self._shown_at = 0.0
        self._is_after_status = False  # ninja's, which ended without a new line
        self._is_line_open = False  # the same of the line on the terminal

    def run(self, command: list[str]) -> int:
        """Runs a command that drives ninja; all but its status lines is shown as it is."""
        ours, theirs = os.openpty()
        tty.setraw(theirs, termios.TCSANOW)
        environment = {**os.environ, "NINJA_STATUS": f"{self.STATUS} ", "TERM": "xterm"}
        # Of make, whose job server ninja cannot reach through Python and would complain of.
        environment.pop("MAKEFLAGS", None)
        with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as process:
            os.close(theirs)
            pending = b""
            while True:
                readable, _, _ = select.select([ours], [], [], self.HEARTBEAT_S)
                if readable:
                    try:
                        chunk = os.read(ours, 65536)
                    except OSError:  # what Linux says once nobody writes any more
                        break
                    if not chunk:
                        break
                    # In this order: where setuptools runs this file by itself, it takes the two
                    # escapes the other way round for the end of a line, and drops the first.
                    *lines, pending = re.split(rb"(?<=[\n\r])", pending + chunk)
                    # A status has no end until the next comes.
                    if pending.endswith(b"\x1b[K"):
                        lines.append(pending)
                        pending = b""
                    for line in lines:
                        self._take_line(line.decode(errors="replace"))
                if time.monotonic() - self._shown_at > self.HEARTBEAT_S:
                    self._show()
            if pending:
                self._print(pending.decode(errors="replace"))
        os.close(ours)
        if self._is_line_open:
            sys.stdout.write("\n")
        return process.returncode

    def _take_line(self, line: str) -> None:
        plain = self.ESCAPE.sub("", line).strip()
        if plain.endswith("Re-checking globbed directories..."):
            return
        status = self.LINE.match(plain)
        if status is None:
            if line != "\r" and not (line == "\n" and self._is_after_status):
                self._print(line)
            self._is_after_status &= line == "\r"
            return
        self._is_after_status = "\n" not in line
        started, finished, self._num_total = (int(status[i]) for i in (1, 2, 3))
        what = self._name(status[4])
        if started < self._num_started or finished < self._num_finished:
            # Ninja counts anew once it has made its own files.
            self._running.clear()
            self._num_started = self._num_finished = 0
        if started > self._num_started:
            self._running[what] = time.monotonic()
            self._num_started = started
            self._show()
        elif finished > self._num_finished:
            self._running.pop(what, None)
            self._num_finished = finished

    @staticmethod
    def _name(description: str) -> str:
        """The file, or the part of the code that is compiled as one, of what CMake says ninja does."""
        built = re.fullmatch(
            r"Building \S+ object .*\.dir/(?:Unity/unity_)?(.*?)(?:_cxx\.cxx)?\.o", description
        )
        linked = re.fullmatch(r"Linking \S+ .* (\S+)", description)
        return (built or linked or [None, description])[1]

    def _show(self) -> None:
        now = self._shown_at = time.monotonic()
        if not self._running:
            return
        waited = now - min(self._running.values())
        which = ", ".join(self._running) if waited > 1 else next(reversed(self._running))
        # Before the names: a narrow terminal shows no more than the start, which has to move.
        seconds = f", {waited:.0f} s" if waited > 1 else ""
        text = f"compiling {self._num_started} of {self._num_total}{seconds}: {which}"
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            sys.stdout.write(f"\r{text[:width]}\x1b[K")
            self._is_line_open = True
        else:
            sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    def _print(self, text: str) -> None:
        if not self._is_terminal:
            text = self.ESCAPE.sub("", text)
        elif self._is_line_open:
            sys.stdout.write("\r\x1b[K")
            self._is_line_open = False
        sys.stdout.write(text)
        sys.stdout.flush()


class CMakeBuild(build_ext):
    """Builds the extension modules with CMake and ninja instead of distutils' compiler."""

    user_options = [  # noqa: RUF012 - as setuptools wants it
        *build_ext.user_options,
        ("test-programs", None, "build the programs that tests run too (in place only)"),
    ]
    boolean_options = [*build_ext.boolean_options, "test-programs"]  # noqa: RUF012

    def initialize_options(self) -> None:
        super().initialize_options()
        self.test_programs = False

    def run(self) -> None:
        # setuptools clears `inplace` while it builds and copies the result afterwards.
        self._keeps_build_dir = bool(self.inplace or self.editable_mode)
        super().run()
        if not self._keeps_build_dir:
            return
        if os.environ.get("MOE_COMM_CUDA") == "off":
            remove_module("_cuda")
        if "off" in (os.environ.get("MOE_COMM_CUDA"), os.environ.get("MOE_COMM_NVSHMEM")):
            remove_module("_nvshmem")

    def build_extensions(self) -> None:
        # In-place builds keep their directory, for incremental rebuilds; a wheel is often built in
        # an isolated environment whose tools vanish afterwards, so it has one of its own.
        kind = "inplace" if self._keeps_build_dir else "wheel"
        sanitize = os.environ.get("MOE_COMM_SANITIZE", "")
        name = "-".join(filter(None, ["native", kind, sys.implementation.cache_tag, sanitize]))
        build_dir = ROOT / "build" / name
        with locked(build_dir.with_suffix(".lock")):
            wanted = wanted_modules()
            cmake = self._configure(build_dir, sanitize, wanted)
            # CMake writes which modules this machine can build.
            possible = (build_dir / "modules.txt").read_text().split()
            targets = [f"_{name}" for name in wanted if name in possible]
            if self.test_programs:
                targets.append("test_programs")
            if targets:
                self._run([cmake, "--build", str(build_dir), "--target", *targets])
            for ext in self.extensions:
                module = ext.name.split("._")[-1]
                if module in possible:
                    built = build_dir / "lib" / Path(self.get_ext_filename(ext.name)).name
                    replace_if_changed(built, Path(self.get_ext_fullpath(ext.name)))
                else:
                    self.warn(f"{ext.name} is not built: {MISSING_FOR[module]}")
                    remove_module(f"_{module}")
            if self.test_programs:
                file = self.get_ext_filename("_host_testing")
                replace_if_changed(build_dir / "lib" / file, ROOT / "tests" / file)
            if self._keeps_build_dir:
                self._remove_older(set(MODULES) - set(wanted))

    def _configure(self, build_dir: Path, sanitize: str, wanted: tuple[str, ...]) -> str:
        """Brings CMake's part up to date; returns the path of cmake."""
        import pybind11

        cmake = shutil.which("cmake")
        ninja = shutil.which("ninja")
        if cmake is None or ninja is None:
            raise SystemExit(f"cmake and ninja are needed, found {cmake=} and {ninja=}")
        definitions = {
            "CMAKE_MAKE_PROGRAM": ninja,
            "MOE_COMM_SANITIZE": sanitize,
            "MOE_COMM_WERROR": "ON" if enabled("MOE_COMM_WERROR") else "OFF",
            "Python_EXECUTABLE": sys.executable,
            "pybind11_DIR": pybind11.get_cmake_dir(),
        }
        # A cache that points at tools of another environment is of no use.
        stamp = build_dir / "tools.txt"
        tools = "\n".join([cmake, ninja, sys.executable, definitions["pybind11_DIR"]])
        if build_dir.exists() and (not stamp.exists() or stamp.read_text() != tools):
            shutil.rmtree(build_dir)
        is_first = not (build_dir / "CMakeCache.txt").exists()
        build_dir.mkdir(parents=True, exist_ok=True)
        stamp.write_text(tools)
        if not os.environ.get("MOE_COMM_MODULES") or set(wanted) & set(DEVICE_MODULES):
            definitions["MOE_COMM_CUDA"] = cuda_mode()
            definitions["MOE_COMM_CUDA_ARCHS"] = (
                os.environ.get("MOE_COMM_CUDA_ARCHS") or "80;90a;100"
            )
            definitions["MOE_COMM_NVSHMEM"] = nvshmem_mode()
        elif is_first:
            # Without nvcc until somebody wants what it compiles. A directory that has it keeps it:
            # CMake deletes the objects that it no longer knows.
            definitions["MOE_COMM_CUDA"] = "off"
        arguments = [f"-D{key}={value}" for key, value in definitions.items()]
        self._run([cmake, "-S", str(ROOT), "-B", str(build_dir), "-G", "Ninja", *arguments])
        return cmake

    def _run(self, command: list[str]) -> None:
        returncode = Progress().run(command)
        if returncode:
            raise SystemExit(f"exit status {returncode} of: {' '.join(command)}")

    def _remove_older(self, others: set[str]) -> None:
        """Removes what lies in the checkout, was not built and an edit may have outdated."""
        edited = max(path.stat().st_mtime for path in (ROOT / "csrc").rglob("*.*"))
        modules = [
            *(
                module
                for name in sorted(others)
                for module in (ROOT / "moe_comm").glob(f"_{name}.*.so")
            ),
            *(() if self.test_programs else (ROOT / "tests").glob("_host_testing.*.so")),
        ]
        for module in modules:
            if module.stat().st_mtime < edited:
                self.warn(f"{module.name} is removed: there are newer sources")
                module.unlink()

    def copy_extensions_to_source(self) -> None:
        build_py = self.get_finalized_command("build_py")
        for ext in self.extensions:
            _, built = self._get_inplace_equivalent(build_py, ext)
            filename = self.get_ext_filename(self.get_ext_fullname(ext.name))
            in_package = ROOT / filename
            if Path(built).exists() and Path(built).resolve() != in_package.resolve():
                replace_if_changed(Path(built), in_package)


MODES = {"cuda": cuda_mode(), "nvshmem": nvshmem_mode()}

setup(
    ext_modules=[
        Extension(f"moe_comm._{name}", sources=[], optional=MODES.get(name) == "auto")
        for name in wanted_modules()
    ],
    cmdclass={"build_ext": CMakeBuild},
)
