import contextlib
import fcntl
import filecmp
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


MISSING_FOR = {
    "moe_comm._cuda": "no nvcc that works",
    "moe_comm._nvshmem": "no nvcc that works, or neither NVSHMEM's wheel nor NVSHMEM_HOME",
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


class CMakeBuild(build_ext):
    """Builds the extension modules with CMake and ninja instead of distutils' compiler."""

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

    def build_extension(self, ext: Extension) -> None:
        # In-place builds keep their directory, for incremental rebuilds; a wheel is often built in
        # an isolated environment whose tools vanish afterwards, so it has one of its own.
        kind = "inplace" if self._keeps_build_dir else "wheel"
        sanitize = os.environ.get("MOE_COMM_SANITIZE", "")
        name = "-".join(filter(None, ["native", kind, sys.implementation.cache_tag, sanitize]))
        build_dir = ROOT / "build" / name
        with locked(build_dir.with_suffix(".lock")):
            self._run_cmake(build_dir, sanitize)
            file_name = ext.name.split(".")[-1] + sysconfig.get_config_var("EXT_SUFFIX")
            built = build_dir / "lib" / file_name
            if ext.optional and not built.exists():
                self.warn(f"{ext.name} is not built: {MISSING_FOR[ext.name]}")
                remove_module(ext.name.split(".")[-1])
                return
            replace_if_changed(built, Path(self.get_ext_fullpath(ext.name)))

    def _run_cmake(self, build_dir: Path, sanitize: str) -> None:
        import pybind11

        cmake = shutil.which("cmake")
        ninja = shutil.which("ninja")
        if cmake is None or ninja is None:
            raise SystemExit(f"cmake and ninja are needed, found {cmake=} and {ninja=}")
        definitions = {
            "CMAKE_MAKE_PROGRAM": ninja,
            "MOE_COMM_CUDA": cuda_mode(),
            "MOE_COMM_CUDA_ARCHS": os.environ.get("MOE_COMM_CUDA_ARCHS") or "80;90a;100",
            "MOE_COMM_NVSHMEM": nvshmem_mode(),
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
        build_dir.mkdir(parents=True, exist_ok=True)
        stamp.write_text(tools)
        arguments = [f"-D{key}={value}" for key, value in definitions.items()]
        configure = [cmake, "-S", str(ROOT), "-B", str(build_dir), "-G", "Ninja", *arguments]
        for command in (configure, [cmake, "--build", str(build_dir)]):
            returncode = subprocess.run(command, check=False).returncode
            if returncode:
                raise SystemExit(f"exit status {returncode} of: {' '.join(command)}")

    def copy_extensions_to_source(self) -> None:
        build_py = self.get_finalized_command("build_py")
        for ext in self.extensions:
            _, built = self._get_inplace_equivalent(build_py, ext)
            filename = self.get_ext_filename(self.get_ext_fullname(ext.name))
            in_package = ROOT / filename
            if Path(built).exists() and Path(built).resolve() != in_package.resolve():
                replace_if_changed(Path(built), in_package)


extensions = [Extension(f"moe_comm.{name}", sources=[]) for name in ("_host", "_simt")]
for name, mode in (("_cuda", cuda_mode()), ("_nvshmem", nvshmem_mode())):
    if mode != "off":
        extensions.append(Extension(f"moe_comm.{name}", sources=[], optional=mode == "auto"))

setup(
    ext_modules=extensions,
    cmdclass={"build_ext": CMakeBuild},
)
