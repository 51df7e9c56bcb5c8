"""What every command keeps: errors in a sentence, examples, tables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer
from rich.console import Console
from rich.table import Table

from moe_comm import env

__all__ = ["example", "folded", "in_a_sentence", "wide_console"]

PIPE_WIDTH = 168


def example(*lines: str) -> str:
    """The end of a help text, which shows how a command is called; not wrapped."""
    return "\n".join(["\b", "Example:", *(f"  {line}" for line in lines)])


@contextlib.contextmanager
def in_a_sentence(command: str) -> Iterator[None]:
    """Around what a command does: whatever keeps it from its work is said without a stack.

    Args:
        command: Such as `"bench"`.
    """
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except (ValueError, RuntimeError, OSError, MemoryError) as error:
        typer.echo(f"moe-comm {command}: {str(error) or type(error).__name__}", err=True)
        raise typer.Exit(1) from error


def wide_console() -> Console:
    """Standard output; a file or pipe has the width that `COLUMNS` says, else what the tables need."""
    console = Console()
    if console.is_terminal:
        return console
    return Console(width=env.columns() or PIPE_WIDTH)


def folded(table: Table) -> Table:
    """`table`, with no word cut where it is too wide for its column."""
    for column in table.columns:
        column.overflow = "fold"
    return table
