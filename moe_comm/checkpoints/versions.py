"""Versions of a checkpoint in one folder: each in a folder of its own, and a file that says which are whole.

A version is written under a name that nobody reads, synced, renamed, and entered into the file last. So
whatever ends a save on the way, the folder holds the versions that it held before.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moe_comm.arguments import shortened
from moe_comm.errors import CheckpointError
from moe_comm.peers.plain_data import NOT_AS_EXPECTED

VERSIONS = "versions.json"
"""File that says which versions of a folder are whole."""

MANIFEST = "moe_comm.json"
"""File of a version that says what it has."""

_LOCK = ".lock"
_PARTIAL = ".partial"
# Second line of the lock's file, behind the name of the version and the writer, until a save has ended.
_UNFINISHED = "unfinished"
_FORMAT = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_LEFT = re.compile(rf"version ({_NAME.pattern}) by [^\n]*\n{_UNFINISHED}")


class Versions(NamedTuple):
    """Content of the file of a folder.

    Args:
        latest: Name of the version that was saved last.
        names: Names of all versions, in the order in which they were saved.
    """

    latest: str
    names: list[str]


def check_version_name(version: Any, argument: str = "version") -> str:
    """Return the name of a version, which is one of a folder.

    Args:
        version: The name.
        argument: Name of the argument by which a caller gave it.

    Raises:
        TypeError: It is no text.
        ValueError: It cannot be the name of a version.
    """
    if not isinstance(version, str):
        raise TypeError(f"{argument} must be a str, got {type(version).__name__}")
    if not _NAME.fullmatch(version) or version == VERSIONS:
        raise ValueError(
            f"{argument} must be up to 100 letters, digits and any of . _ -, the first a letter or digit, "
            f"and not {VERSIONS}; got {version!r}"
        )
    return version


@contextlib.contextmanager
def failed(path: Path, what: str) -> Iterator[None]:
    """Around what is done to a file: an error of the system becomes one that names it."""
    try:
        yield
    except (EOFError, OSError) as error:
        text = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(f"{path}: {what}: {text}") from error


@contextlib.contextmanager
def fitting(path: Path, what: str) -> Iterator[None]:
    """Around what is made of what a file says: whatever does not fit becomes an error that names it."""
    try:
        yield
    except NOT_AS_EXPECTED as error:
        said = shortened(f"{type(error).__name__}: {error}")
        raise CheckpointError(f"{path}: {what}: {said}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        CheckpointError: It cannot be read, or holds something else.
    """
    with failed(path, "cannot be read"):
        data = path.read_bytes()
    with fitting(path, f"expected JSON, got {len(data)} bytes"):
        found = json.loads(data)
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: expected an object of JSON, got {type(found).__name__}")
    return found


def read_versions(folder: Path) -> Versions | None:
    """Read which versions of a folder are whole; None where nothing says so.

    Raises:
        CheckpointError: The file is damaged.
    """
    path = folder / VERSIONS
    if not path.exists():
        return None
    said = read_json(path)
    names, latest = said.get("versions"), said.get("latest")
    names = names if isinstance(names, list) and all(isinstance(x, str) for x in names) else []
    if said.get("format") != _FORMAT or latest not in names:
        raise CheckpointError(
            f"{path}: expected format {_FORMAT} with `versions` and the `latest` of them, got {said}"
        )
    return Versions(str(latest), names)


def create_file(path: Path) -> int:
    """Open a file that is not there yet; return its descriptor."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def sync_file(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_synced(path: Path, data: bytes) -> None:
    with failed(path, "cannot be written"):
        descriptor = create_file(path)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)


class NewVersion:
    """A version that is being written, by one rank for all.

    Holds the lock of the folder until it is closed, which the system opens again when the process ends,
    however that comes.

    Args:
        folder: Folder of the versions. Made if it is missing.
        version: Name of the new one.
        after: The version behind which it is entered; None for the latest. Where that is the latest, this one is.

    Attributes:
        path: Folder to write into.
        version: Name of the new version.

    Raises:
        CheckpointError: The version is there already, somebody else writes into the folder, or the system
            refuses.
    """

    def __init__(self, folder: Path, version: str, after: str | None = None) -> None:
        self._folder = folder
        self._after = after
        self.version = version
        self._is_committed = False
        with failed(folder, "cannot be made"):
            folder.mkdir(parents=True, exist_ok=True)
        self._lock, left = self._take_lock()
        try:
            self._remove_leftovers(left)
            self._check_is_new()
            # Not before: a folder of that name is what this save has left.
            with failed(folder / _LOCK, "cannot be written"):
                os.pwrite(self._lock, _UNFINISHED.encode(), os.fstat(self._lock).st_size)
            self.path = folder / f".{version}.{secrets.token_hex(8)}{_PARTIAL}"
            with failed(self.path, "cannot be made"):
                self.path.mkdir()
        except BaseException:
            self._open_lock()
            raise

    def _take_lock(self) -> tuple[int, str]:
        """Return the lock, and the version whose save has taken it last and was killed; "" for none."""
        path = self._folder / _LOCK
        with failed(path, "cannot be locked"):
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left = _LEFT.fullmatch(os.pread(lock, 1000, 0).decode(errors="replace"))
                writer = (
                    f"version {self.version} by process {os.getpid()} on {socket.gethostname()}"
                )
                os.ftruncate(lock, 0)
                os.pwrite(lock, f"{writer}\n".encode(), 0)
            except BlockingIOError:
                other = os.pread(lock, 200, 0).decode(errors="replace").partition("\n")[0]
                other = other or "something"
                os.close(lock)
                raise CheckpointError(
                    f"{self._folder}: cannot save version {self.version} while another writer saves "
                    f"{other}"
                ) from None
            except BaseException:
                os.close(lock)
                raise
        return lock, "" if left is None else left[1]

    @property
    def _final(self) -> Path:
        return self._folder / self.version

    def _check_is_new(self) -> None:
        known = read_versions(self._folder)
        if not os.path.lexists(self._final):
            return
        if known is not None and self.version in known.names:
            raise CheckpointError(
                f"{self._folder}: version {self.version} is there already, of {known.names}: "
                "give the new one another name"
            )
        if self._final.is_symlink() or not (self._final / MANIFEST).exists():
            raise CheckpointError(
                f"{self._final} is there already, and no folder with {MANIFEST}: it is no version of this "
                "folder"
            )
        listed = "is missing" if known is None else f"lists {known.names}"
        raise CheckpointError(
            f"{self._final} is there already, and {self._folder / VERSIONS} {listed}: give the new version "
            "another name, or remove the folder"
        )

    def _remove_leftovers(self, left: str = "") -> None:
        """Remove what saves have left that did not end: nobody but the holder of the lock writes here.

        Args:
            left: Version whose save may have ended before it was entered.
        """
        known = read_versions(self._folder) if left else None
        path = self._folder / left
        is_listed = known is not None and left in known.names
        if left and not is_listed and not path.is_symlink() and (path / MANIFEST).exists():
            with failed(path, "is of a save that was killed, and cannot be removed"):
                path.rename(self._folder / f".{secrets.token_hex(8)}{_PARTIAL}")
        for path in self._folder.glob(f".*{_PARTIAL}"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self._folder.glob(f".{VERSIONS}.*"):
            # The next save tries again, as with folders.
            with contextlib.suppress(OSError):
                path.unlink()

    def write(self, name: str, data: bytes) -> None:
        """Write a small file of the version.

        Raises:
            CheckpointError: It is there already, or the system refuses.
        """
        _write_synced(self.path / name, data)

    def commit(self, synced: Sequence[str]) -> Path:
        """Make the version one that is there.

        Args:
            synced: Names of files in it that are on the disk already.

        Returns:
            Its folder.

        Raises:
            CheckpointError: The system refuses; then it is not there.
        """
        done = set(synced)
        for folder, _, names in os.walk(self.path):
            for path in (Path(folder, name) for name in names):
                if str(path.relative_to(self.path)) not in done:
                    with failed(path, "cannot be synced"):
                        sync_file(path)
            with failed(Path(folder), "cannot be synced"):
                sync_file(Path(folder))
        with failed(self._final, "cannot be put in place"):
            self.path.rename(self._final)
            self.path = self._final
            sync_file(self._folder)
        known = read_versions(self._folder)
        names = [] if known is None else known.names
        kept = [name for name in names if (self._folder / name).is_dir()]
        place, latest = len(kept), self.version
        if known is not None and self._after in kept:
            place = kept.index(self._after) + 1
            latest = self.version if self._after == known.latest else known.latest
        kept.insert(place, self.version)
        said = {"format": _FORMAT, "latest": latest, "versions": kept}
        new = self._folder / f".{VERSIONS}.{secrets.token_hex(8)}"
        try:
            _write_synced(new, json.dumps(said, indent=1).encode())
            with failed(self._folder / VERSIONS, "cannot be replaced"):
                new.replace(self._folder / VERSIONS)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        self._is_committed = True
        with failed(self._folder, "cannot be synced"):
            sync_file(self._folder)
        return self._final

    def close(self) -> None:
        """Let others write; a version that was not committed is removed."""
        if not self._is_committed:
            shutil.rmtree(self.path, ignore_errors=True)
        self._remove_leftovers()
        self._open_lock()

    def _open_lock(self) -> None:
        with contextlib.suppress(OSError):  # what it says of this save is looked up by the next one
            os.ftruncate(self._lock, 0)
        fcntl.flock(self._lock, fcntl.LOCK_UN)  # processes forked meanwhile have it open, too
        os.close(self._lock)
