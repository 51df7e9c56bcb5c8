"""Rules that every command keeps: errors in a sentence, examples, tables."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import typer
import typer.core
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table

from moe_comm import env

PIPE_WIDTH = 168

# Beginnings of command lines that are no more, and what does the same in a checkout of the package.
_GONE = {
    r"bench summary\b": "python -m benchmarks.summary",
    r"model (.* )?--published\b": "python -m benchmarks.published",
}


class CommandGroup(typer.core.TyperGroup):
    """A group that says what to write in place of words that no command has any more."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line, as click asks a group to.

        Raises:
            click.UsageError: A word is no more.
        """
        words = " ".join(args)
        for gone, instead in _GONE.items():
            found = re.match(gone, words)
            if found is not None:
                ctx.fail(f"{found[0]!r} is no part of the package: in a checkout write {instead}")
        return super().parse_args(ctx, args)


def sectioned(sections: dict[str, str]) -> type[typer.core.TyperCommand]:
    """Return a kind of command whose help lists its options in sections, the common ones first.

    Args:
        sections: Names of parameters, with spaces between them, by heading. `Options` has all others.
    """

    class SectionedCommand(typer.core.TyperCommand):
        def format_options(self, ctx: Any, formatter: Any) -> None:
            common = {param.name: param.get_help_record(ctx) for param in self.get_params(ctx)}
            listed = {
                heading: [common.pop(name) for name in names.split()]
                for heading, names in sections.items()
            }
            for heading, records in [("Options", list(common.values())), *listed.items()]:
                with formatter.section(heading):
                    formatter.write_dl(records)

    return SectionedCommand


def example(*lines: str) -> str:
    """The end of a help text, which shows how a command is called; not wrapped."""
    return "\n".join(["\b", "Example:", *(f"  {line}" for line in lines)])


@contextlib.contextmanager
def in_a_sentence(command: str) -> Iterator[None]:
    """Around what a command does: whatever keeps it from its work is said without a stack.

    Args:
        command: Name of the command, such as `"bench"`.
    """
    try:
        yield
    except (typer.Exit, typer.Abort, BrokenPipeError):  # of which click makes an end without a word
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


class FoldedTable:
    """A table whose cells break between words, and that has no grid, where the terminal is too narrow.

    Rich alone would narrow all columns alike, and cut numbers in two. Of words that do not fit the longest are cut.
    """

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Show the table; rich calls this."""
        table = self._table
        least, most = [], []  # of each column: its longest word and its longest line
        for column in table.columns:
            column.overflow = "fold"
            cells = [
                Measurement.get(console, options, cell) for cell in (column.header, *column.cells)
            ]
            least.append(max(cell.minimum for cell in cells))
            most.append(max(cell.maximum for cell in cells))
        frame = 3 * len(least) + 1
        if sum(least) + frame > options.max_width:
            table.box, table.show_edge, table.padding = box.SIMPLE_HEAD, False, (0, 0, 0, 0)
            frame = len(least) - 1
            for _ in range(sum(least) + frame - options.max_width):  # names of files and tensors
                widest = max(range(len(least)), key=least.__getitem__)
                least[widest] = max(1, least[widest] - 1)
        spare = max(0, options.max_width - frame - sum(least))
        for column, word, line in zip(table.columns, least, most, strict=True):
            more = min(spare, line - word)
            column.width = word + more
            spare -= more
        yield table
