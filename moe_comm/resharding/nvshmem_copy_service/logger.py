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
            logs_dir: Where `pe_<N>.log` is written, made where missing; None for no file.

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
        """Whether a message of `level` would be logged."""
        logger = cls._current.logger
        return logger is not None and logger.isEnabledFor(level)

    @classmethod
    def trace(cls, msg: str, *args: object) -> None:
        """Log below DEBUG."""
        cls._log(TRACE, msg, *args)

    @classmethod
    def debug(cls, msg: str, *args: object) -> None:
        """Log as DEBUG."""
        cls._log(logging.DEBUG, msg, *args)

    @classmethod
    def info(cls, msg: str, *args: object) -> None:
        """Log as INFO."""
        cls._log(logging.INFO, msg, *args)

    @classmethod
    def summary(cls, msg: str, *args: object) -> None:
        """Log as INFO, marked as a summary."""
        cls._log(logging.INFO, "[SUMMARY] " + msg, *args)

    @classmethod
    def warn(cls, msg: str, *args: object) -> None:
        """Log as WARNING."""
        cls._log(logging.WARNING, msg, *args)

    @classmethod
    def warning(cls, msg: str, *args: object) -> None:
        """Log as WARNING."""
        cls._log(logging.WARNING, msg, *args)

    @classmethod
    def error(cls, msg: str, *args: object) -> None:
        """Log as ERROR."""
        cls._log(logging.ERROR, msg, *args)

    @classmethod
    def critical(cls, msg: str, *args: object) -> None:
        """Log as CRITICAL."""
        cls._log(logging.CRITICAL, msg, *args)

    @classmethod
    def shutdown(cls) -> None:
        """Close the file and log no more. Idempotent."""
        logger, handler = cls._current.logger, cls._current.file
        if logger is not None and handler is not None:
            logger.removeHandler(handler)
            handler.close()
        cls._current.logger = None
        cls._current.file = None

    @classmethod
    def _log(cls, level: int, msg: str, *args: object) -> None:
        if cls._current.logger is not None:
            cls._current.logger.log(level, msg, *args)
