"""Progress of a command, and the file of its results."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

LINE_S = 2.0


@contextlib.contextmanager
def telling(console: Console) -> Iterator[Callable[[str], None]]:
    """Give a function that shows a text: as a task that turns, or where there is no terminal as a line now and then."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("start")
        said_at = time.monotonic()

        def tell(text: str) -> None:
            nonlocal said_at
            progress.update(task, description=text)
            if not console.is_terminal and time.monotonic() - said_at > LINE_S:
                said_at = time.monotonic()
                typer.echo(f"moe-comm bench: {text}", err=True)

        yield tell


def write_json(path: Path | None, document: dict[str, Any]) -> None:
    """Write what `--json PATH` asks for; without a path nothing."""
    if path is not None:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
