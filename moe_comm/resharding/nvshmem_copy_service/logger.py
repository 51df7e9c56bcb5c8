"""Messages of one PE, in a file of its own where asked for."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

__all__ = ["PELogger"]

TRACE = logging.DEBUG - 5
_LEVELS = {
    "TRACE": TRACE,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "SUMMARY": logging.INFO,
    "WARN": logging.WARNING,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "CRITICAL": logging.CRITICAL,
}


def _level_of(level: str) -> int:
    if level.upper() not in _LEVELS:
        raise ValueError(f"level must be one of {', '.join(_LEVELS)}, got {level!r}")
    return _LEVELS[level.upper()]


class _Current(threading.local):
    """The logger of the PE that the calling thread is: ranks may be threads of one process."""

    logger: logging.Logger | None = None
    file: logging.Handler | None = None


def _logging_at(level: int, prefix: str = "") -> classmethod[PELogger, ..., None]:
    """Make a method that logs at one level."""

    def log(cls: type[PELogger], msg: str, *args: object) -> None:
        """Log a message; nothing before `init`."""
        if cls._current.logger is not None:
            marked = prefix + msg
            cls._current.logger.log(level, marked, *args)

    return classmethod(log)


class PELogger:
    """Logs as `moe_comm.pe_<N>` through Python's logging; does nothing before `init`.

    Per thread: a thread that calls `init` logs as that PE.
    """

    _current = _Current()

    @classmethod
    def init(cls, pe_id: int, level: str = "INFO", logs_dir: str | Path | None = "logs") -> None:
        """Log as PE `pe_id` from now on.

        Args:
            pe_id: Rank.
            level: Least level that is logged.
            logs_dir: Folder where `pe_<N>.log` is written, made where missing; None for no file.

        Raises:
            ValueError: `level` is unknown.
        """
        number = _level_of(level)
        cls.shutdown()
        logger = logging.getLogger(f"moe_comm.pe_{pe_id}")
        logger.setLevel(number)
        cls._current.logger = logger
        if logs_dir is not None:
            folder = Path(logs_dir)
            folder.mkdir(parents=True, exist_ok=True)
            handler = logging.FileHandler(folder / f"pe_{pe_id}.log", mode="w")
            handler.setFormatter(
                logging.Formatter(f"[PE {pe_id}] [%(asctime)s] [%(levelname)s] %(message)s")
            )
            logger.addHandler(handler)
            cls._current.file = handler

    @classmethod
    def set_level(cls, level: str) -> None:
        """Change the least level that is logged."""
        number = _level_of(level)
        if cls._current.logger is not None:
            cls._current.logger.setLevel(number)

    @classmethod
    def is_enabled_for(cls, level: int) -> bool:
        """Return whether a message of `level` would be logged."""
        logger = cls._current.logger
        return logger is not None and logger.isEnabledFor(level)

    trace = _logging_at(TRACE)
    debug = _logging_at(logging.DEBUG)
    info = _logging_at(logging.INFO)
    summary = _logging_at(logging.INFO, "[SUMMARY] ")
    warn = warning = _logging_at(logging.WARNING)
    error = _logging_at(logging.ERROR)
    critical = _logging_at(logging.CRITICAL)

    @classmethod
    def shutdown(cls) -> None:
        """Close the file and log no more. Idempotent."""
        logger, handler = cls._current.logger, cls._current.file
        if logger is not None and handler is not None:
            logger.removeHandler(handler)
            handler.close()
        cls._current.logger = None
        cls._current.file = None
