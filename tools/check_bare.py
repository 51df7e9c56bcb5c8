"""Checks the environment that make sets up as a machine that nobody prepared would have it.

`make check-bare` and CI run it with the Python of that environment, in two parts:

1. Whatever `make` would install resolves against the plain package index, with the versions of
   constraints.txt: nothing of pip's configuration counts, and only metadata is fetched. It is
   resolved for every Python that the pinned torch is built for, on x86-64 and aarch64.
2. The environment holds what these installations bring and nothing else, and with an empty home and
   a PATH of a few links, lint and types pass, and every module and every test can be imported.

    python tools/check_bare.py [--only resolution | --only environment]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "bare"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")

# What rules and linters call. nvcc is a compiler: where it is, what it compiles with is installed.
PROGRAMS = ("sh", "env", "make", "find", "sort", "sed", "awk", "git", "nvcc")
# Found in PATH, these must not change what is installed.
PEERS = ("mpirun", "mpiexec", "nvidia-smi")
# How the network is reached is the machine's affair.
NETWORK = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR", "PIP_CERT")
# Pure Python, of which there is no wheel in the version that omegaconf wants.
SOURCE_ALONE = "antlr4-python3-runtime"
TARGET = re.compile(r"^([a-z-]+):.*## ", re.MULTILINE)
INSTALLER = re.compile(r"(?:tools/pip_install\.py|-m pip install) (.*)")


class CheckError(Exception):
    """The message says what was expected and what was found."""


def bare_environment(path: Path) -> dict[str, str]:
    """Environment variables of a process that sees programs of the folder `path` alone."""
    home = WORK / "home"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    kept = {name: value for name, value in os.environ.items() if name.upper() in NETWORK}
    return {
        "HOME": str(home),
        "PATH": str(path),
        "PIP_CONFIG_FILE": os.devnull,
        "LANG": "C.UTF-8",
    } | kept


def linked_programs(name: str, stubs: Sequence[str] = ()) -> Path:
    """A folder for PATH: links to `PROGRAMS`, and programs called `stubs` that only succeed."""
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for program in PROGRAMS:
        if found := shutil.which(program):
            # A script of its own: what is linked may look for files beside itself.
            (folder / program).write_text(f'#!/bin/sh\nexec {shlex.quote(found)} "$@"\n')
            (folder / program).chmod(0o755)
    for stub in stubs:
        (folder / stub).write_text("#!/bin/sh\nexit 0\n")
        (folder / stub).chmod(0o755)
    return folder


def run(command: Sequence[str | Path], environment: Mapping[str, str], text: str = "") -> str:
    """Standard output of a command that must succeed.

    Raises:
        CheckError: It does not; with what it said.
    """
    words = [str(word) for word in command]
    done = subprocess.run(
        words, env=environment, cwd=ROOT, input=text, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CheckError(
            f"exit status {done.returncode} of: {' '.join(words)}\n{done.stdout}{done.stderr}"
        )
    return done.stdout


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    """Says what is checked, and how long it took."""
    start = time.monotonic()
    print(f"check-bare: {name}", flush=True)
    yield
    print(f"check-bare: {name}: {time.monotonic() - start:.0f} s", flush=True)


def installations(path: Path) -> list[list[str]]:
    """Arguments of every installation that a target of the Makefile may run, without options' values.

    Args:
        path: What PATH would be.
    """
    targets = [
        t for t in TARGET.findall((ROOT / "Makefile").read_text()) if t not in ("clean", "help")
    ]
    # Who holds the lock of the environment does what any other starts a make of its own for.
    make = ["make", "--no-print-directory", "-nB", "HOLDS_LOCK=1", f"VENV={sys.prefix}"]
    found = []
    for target in targets:
        recipe = run([*make, target], bare_environment(path)).replace("\\\n", " ")
        for command in INSTALLER.findall(recipe):
            words = shlex.shlex(command, posix=True, punctuation_chars=True)
            words.whitespace_split = True
            arguments = list(itertools.takewhile(lambda word: word.strip(";&|()"), words))
            if arguments not in found:
                found.append(arguments)
    if not found:
        raise CheckError(f"no installation in what make would run for {targets}")
    return found


class Installation:
    """What one call of pip asks for.

    Args:
        arguments: Of `pip install`.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self.has_dependencies = "--no-deps" not in arguments
        self.is_beside = "--target" in arguments or "--prefix" in arguments
        self.is_constrained = "-c" in arguments
        self.python: str | None = None
        self.requirements: list[str] = []
        self.extras: list[str] | None = None
        words = iter(arguments)
        for word in words:
            if word in ("-c", "--target", "--prefix"):
                next(words)
            elif word == "--python-version":
                self.python = next(words)
            elif match := re.fullmatch(r"(?:\.|moe_comm)(?:\[(.*)\])?", word):
                self.extras = match[1].split(",") if match[1] else []
            elif not word.startswith("-"):
                self.requirements.append(word)

    def __str__(self) -> str:
        own = [] if self.extras is None else [f".[{','.join(self.extras)}]"]
        return " ".join([*own, *self.requirements])


class Resolver:
    """Resolves requirements against the plain index by metadata alone, for any Python."""

    def __init__(self) -> None:
        self._environment = bare_environment(linked_programs("bin"))
        folder = WORK / "resolver"
        run([sys.executable, "-m", "venv", "--clear", folder], self._environment)
        try:
            run(
                [
                    *(folder / "bin" / "python", "-m", "pip", "install", "--quiet"),
                    *("--disable-pip-version-check", "--retries", "1"),
                    *("-c", ROOT / "constraints.txt", "uv"),
                ],
                self._environment,
            )
        except CheckError as error:
            raise CheckError(
                f"the package index cannot be reached, or lacks uv: {error}"
            ) from error
        self._uv = folder / "bin" / "uv"

    def resolve(
        self, installations: Sequence[Installation], python: str, machine: str, *options: str
    ) -> None:
        """Find versions that fit all of `installations` in one environment.

        Raises:
            CheckError: There are none; says which requirements contradict each other.
        """
        named = [extra for each in installations for extra in each.extras or []]
        extras = [] if "--all-extras" in options else named
        has_package = any(each.extras is not None for each in installations)
        requirements = [line for each in installations for line in each.requirements]
        is_constrained = any(each.is_constrained for each in installations)
        sources = ["-", *(["pyproject.toml"] if has_package else [])]
        run(
            [
                *(self._uv, "pip", "compile", "--quiet", "--no-config", "--native-tls"),
                *("--cache-dir", WORK / "cache"),
                *("--only-binary", ":all:"),
                *("--no-binary", SOURCE_ALONE),
                *(("-c", "constraints.txt") if is_constrained else ()),
                *("--python", sys.executable, "--python-version", python),
                *("--python-platform", f"{machine}-manylinux_2_28"),
                *(word for extra in extras for word in ("--extra", extra)),
                *options,
                *sources,
            ],
            self._environment,
            "\n".join(requirements),
        )


def check_resolution() -> None:
    """Whatever make installs, and whatever extra a user may ask for, can be had from the plain index.

    Raises:
        CheckError: It cannot, or what is installed depends on the programs in PATH.
    """
    alone = installations(linked_programs("bin"))
    with_peers = installations(linked_programs("peers", PEERS))
    if alone != with_peers:
        differing = [arguments for arguments in with_peers if arguments not in alone]
        raise CheckError(f"because of {PEERS} in PATH make would install {differing}")
    sets = [Installation(arguments) for arguments in alone]
    together = [each for each in sets if each.has_dependencies]
    resolver = Resolver()
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    for each in sets:
        python = each.python or here
        with step(f"Python {python}: {each}"):
            options = [] if each.has_dependencies else ["--no-deps"]
            resolver.resolve([each], python, os.uname().machine, *options)
    everything = [*together, Installation(["."])]
    for python in PYTHONS:
        with step(f"Python {python}: everything together, with all extras"):
            for machine in MACHINES:
                resolver.resolve(everything, python, machine, "--all-extras")


def closure(requirements: Sequence[Requirement]) -> set[str]:
    """Names of the distributions that `requirements` bring, as those installed here say."""
    names: set[str] = set()
    done = set()
    wanted = list(requirements)
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        extras = frozenset(requirement.extras)
        if (name, extras) in done:
            continue
        done.add((name, extras))
        names.add(name)
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # the caller sees that
            needed = map(Requirement, importlib.metadata.requires(name) or [])
            wanted += [each for each in needed if applies(each, extras)]
    return names


def applies(requirement: Requirement, extras: Iterable[str] = ()) -> bool:
    """Whether this Python needs it, of a distribution that is wanted with `extras`."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))


def expected_names() -> set[str]:
    """Of the distributions that make brings into this environment."""
    names = {"pip"}
    for arguments in installations(linked_programs("bin")):
        each = Installation(arguments)
        requirements = [Requirement(line) for line in each.requirements]
        if each.extras is not None:
            requirements.append(Requirement(f"moe-comm[{','.join(each.extras)}]"))
        requirements = [requirement for requirement in requirements if applies(requirement)]
        if each.has_dependencies and not each.is_beside:
            names |= closure(requirements)
        elif not each.is_beside:
            names |= {canonicalize_name(requirement.name) for requirement in requirements}
    return names


def check_contents() -> None:
    """The environment holds exactly what make installs, at the pinned versions.

    Raises:
        CheckError: It holds more, less or another version; names them.
    """
    installed = {
        canonicalize_name(distribution.metadata["Name"]): distribution.version
        for distribution in importlib.metadata.distributions()
    }
    expected = expected_names()
    more = sorted(set(installed) - expected)
    less = sorted(expected - set(installed))
    if more or less:
        raise CheckError(
            f"{sys.prefix} holds {more}, which make does not install, and lacks {less}"
        )
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pin = Requirement(line)
        version = installed.get(canonicalize_name(pin.name))
        if version is not None and applies(pin) and not pin.specifier.contains(version):
            raise CheckError(f"{sys.prefix} holds {pin.name} {version}, constraints.txt has {pin}")


def check_environment() -> None:
    """Lint, types and imports, with what is in this environment alone.

    Raises:
        CheckError: One of them fails; with what it said.
    """
    with step("the environment holds what make installs, and nothing else"):
        check_contents()
    environment = bare_environment(linked_programs("bin"))
    with step("every module of the package can be imported, and two ranks can talk"):
        run([sys.executable, "tools/exercise.py"], environment)
    with step("every test and example can be imported"):
        run([sys.executable, "-m", "pytest", "--collect-only", "-qq", "tests"], environment)
        for example in sorted((ROOT / "examples").glob("*.py")):
            run([sys.executable, example, "--help"], environment)
    with step("lint and types"):
        run(["make", "--no-print-directory", "lint", f"VENV={sys.prefix}"], environment)


def main() -> int:
    """Run what the arguments ask for; 0 where all of it passes, else 1."""
    parts = {"resolution": check_resolution, "environment": check_environment}
    parser = argparse.ArgumentParser(description="Check what make installs.")
    parser.add_argument("--only", choices=parts)
    only = parser.parse_args().only
    try:
        for name, check in parts.items():
            if only in (None, name):
                check()
    except CheckError as error:
        print(f"check-bare: FAILED: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
